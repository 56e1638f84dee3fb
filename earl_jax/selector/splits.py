# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The choice of plans together with the split of the devices between the stages. Pure.

With each split a `Chooser` chooses both plans as if it were the only one; of the splits that one is
taken whose slower stage is the fastest: stages on devices apart work at the same time, so that a
step takes as long as the slower one (StreamRL, arXiv 2504.15930, section 4.3).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from earl_jax.selector.choose import BudgetTooSmall, Choice, Chooser, Decision, Step
from earl_jax.selector.plan_candidates import Candidates
from earl_jax.selector.plans import Plan, Plans, SplitTime, Stage
from earl_jax.selector.problem import Problem
from earl_jax.selector.roofline import MODEL_ERROR
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import WINDOW

# Splits among which one is chosen, about evenly apart.
MOST_SPLITS = 16


def with_splits(problem: Problem) -> Problem:
    """Returns the problem with all splits for which both stages have a mesh.

    Of several processes whole ones play. Raises ValueError if there is no split, or none of a mesh
    that the config names.
    """
    number = problem.hardware.num_devices
    unit = 1 if problem.num_processes == 1 else number // problem.num_processes
    apart = unit * max(1, number // unit // MOST_SPLITS)
    every, found, obstacles = dataclasses.replace(problem, splits=()), list[int](), list[str]()
    for split in range(apart, number, apart):
        try:
            assert every.at(split).meshes("rollout") and every.at(split).meshes("train")
            found.append(split)
        except ValueError as error:
            obstacles.append(f"{split} to play: {error}")
    if not found:
        why = "; ".join(obstacles[:2]) or "a split needs at least two"
        raise InputError(
            f"config.devices.num_rollout is 'auto', and no split of {number} devices gives both "
            f"stages a mesh ({why}): make config.rollout.num_slots and episodes_per_step multiples "
            "of more numbers, such as 12, or give the number of devices that play"
        )
    for stage, named, counts in (
        ("rollout", problem.rollout_meshes_named, found),
        ("train", problem.train_meshes_named, [number - split for split in found]),
    ):
        for text in named:
            if MeshShape.parse(text).num_devices not in counts:
                raise InputError(
                    f"config.selector.{stage}_meshes has '{text}', and the splits of {number} "
                    f"devices with a mesh of both stages leave {stage} {counts}; remove it, or name"
                    " a mesh of the other stage for the devices that are left"
                )
    middle = min(found, key=lambda split: abs(2 * split - number))
    work = dataclasses.replace(problem.work, row_devices=math.lcm(*found))
    return dataclasses.replace(problem, num_rollout=middle, splits=tuple(found), work=work)


@dataclasses.dataclass(frozen=True)
class SplitChooser:
    """A `Chooser` that chooses the split of the devices too, where the problem leaves it open."""

    candidates: Candidates

    @property
    def problem(self) -> Problem:
        """The problem of the candidates."""
        return self.candidates.problem

    def step(
        self, step: Step, current: Plans, calm_steps: int = WINDOW, only: Stage | None = None
    ) -> Decision:
        """Chooses as `Chooser.step`; for both stages also the split, for one the split stays.

        The split in use is left, like plans, only after a window of steps, or where contexts are
        new. Until both stages were observed, splits are compared by the speed model alone: one
        stage's factor by which it differs would weigh it against the other.
        """
        if not self.problem.splits:
            decision = self.at(self.problem.num_rollout).step(step, current, calm_steps, only)
            return self._with_overlap(decision, step)
        here = current.rollout.mesh.num_devices if current.rollout else None
        if only is not None:
            assert here is not None, "a stage is chosen beside the other in use"
            return self.at(here).step(step, current, calm_steps, only)
        found, error = dict[int, Decision](), None
        for split in self.problem.splits:
            try:
                found[split] = self.at(split, tries=split == here).step(step, current, calm_steps)
            except BudgetTooSmall as small:
                error = error or small
        if error is not None and not found:
            raise error
        times = [self._time(split, found[split], step, here) for split in found]
        may_leave = step.is_new or calm_steps >= WINDOW
        hysteresis = self.problem.hysteresis
        chosen = choose_split(times, here, hysteresis, may_leave=may_leave)
        if here in found and self._must_wait(found[chosen.num_rollout], chosen, here):
            chosen = next(time for time in times if time.num_rollout == here)
        others = sorted((time for time in times if time != chosen), key=lambda time: time.cost_s)
        decision = found[chosen.num_rollout]
        if here not in (None, chosen.num_rollout):
            before = next((time for time in times if time.num_rollout == here), None)
            decision = _with_reasons(decision, current, chosen, before)
        return dataclasses.replace(decision, seconds=chosen.step_s, splits=(chosen, *others))

    def _with_overlap(self, decision: Decision, step: Step) -> Decision:
        """Returns the decision with the seconds of a step whose stages run at the same time.

        As they do on devices of their own, in an asynchronous or streaming run.
        """
        work, apart = self.problem.work, self.problem.num_rollout
        if not apart or None in (decision.rollout, decision.train):
            return decision
        if work.batches == 1 and work.parts == 1:
            return decision
        return dataclasses.replace(decision, seconds=self._time(apart, decision, step, None).step_s)

    def at(self, split: int, *, tries: bool = True) -> Chooser:
        """Returns the chooser with so many devices for rollouts; nothing new if not `tries`."""
        candidates = self._candidates[split]
        return Chooser(candidates if tries else dataclasses.replace(candidates, may_try=None))

    @functools.cached_property
    def _candidates(self) -> dict[int, Candidates]:
        problem = self.problem
        if not problem.splits:
            return {problem.num_rollout: self.candidates}
        return {
            split: dataclasses.replace(self.candidates, problem=problem.at(split))
            for split in problem.splits
        }

    def _time(self, split: int, decision: Decision, step: Step, here: int | None) -> SplitTime:
        """Returns the seconds of both stages with a split, and those of the move there."""
        rollout, train, problem = decision.rollout, decision.train, self.problem.at(split)
        assert rollout is not None and train is not None
        move_s = decision.switch_s
        if here not in (None, split):
            # Live episodes move with their pages, the weights beside them arrive in any case.
            cache_bytes = rollout.plan.pages * problem.page_bytes(rollout.plan.mesh)
            arrival_s = problem.publish_s(rollout.plan.mesh, cache_bytes)
            move_s += (arrival_s - problem.publish_s(rollout.plan.mesh)) / step.lasts
        rollout_s, train_s = (self._seconds(split, each, here) for each in (rollout, train))
        rollout_s += problem.publish_s(rollout.plan.mesh)
        return SplitTime(split, rollout_s, train_s, move_s)

    def _seconds(self, split: int, choice: Choice, here: int | None) -> float:
        """Returns a stage's seconds with a split, to be compared with those of others.

        The model's error does not count against a mesh that never ran: it is mostly the same with
        more or fewer devices.
        """
        known = self._candidates[split]
        seen = {stage: known.speeds.seen(stage) for stage in ("rollout", "train")}
        if not all(seen.values()):
            computed = dataclasses.replace(known, table=known.table.without_speeds())
            speeds = [
                each.in_use(choice.plan, choice.tokens, math.inf) for each in (known, computed)
            ]
            known_s, computed_s = (1.0 / each.tokens_per_s for each in filter(None, speeds))
            return choice.seconds * computed_s / known_s
        is_known = split == here or choice.plan.mesh in seen[choice.plan.stage]
        return choice.seconds / (1.0 if is_known else MODEL_ERROR)

    def _must_wait(self, decision: Decision, chosen: SplitTime, here: int | None) -> bool:
        """Returns True if the run would wait for a program of another split, as for a trial."""
        return chosen.num_rollout != here and any(
            self.candidates.must_wait(choice.plan, choice.tokens) for choice in decision.choices
        )


def choose_split(
    times: Sequence[SplitTime], current: int | None, hysteresis: float, *, may_leave: bool = True
) -> SplitTime:
    """Returns the split of least cost; of equal ones that whose faster stage is the faster.

    The `current` one, where it is among them, is left only if it `may_leave`, and for steps that
    are shorter by more than the fraction `hysteresis` with the move paid for.
    """
    best = min(times, key=lambda time: (time.cost_s, min(time.rollout_s, time.train_s)))
    here = next((time for time in times if time.num_rollout == current), None)
    if here is None:
        return best
    stays = not may_leave or here.cost_s <= (1.0 + hysteresis) * best.cost_s
    return here if stays else best


def _with_reasons(
    decision: Decision, current: Plans, chosen: SplitTime, before: SplitTime | None
) -> Decision:
    """Returns the decision with the split as the reason of both stages' moves."""
    why = "the split in use does not fit" if before is None else f"before: {before}"
    whys = {"rollout": f"{chosen}; {why}", "train": "with the split of the devices"}

    def moved(choice: Choice | None, plan: Plan | None) -> Any:
        if choice is None or plan is None:
            return choice
        reason = f"{plan.mesh} -> {choice.plan.mesh} ({whys[choice.stage]})"
        return dataclasses.replace(choice, reason=reason)

    rollout, train = decision.rollout, decision.train
    return dataclasses.replace(
        decision, rollout=moved(rollout, current.rollout), train=moved(train, current.train)
    )
