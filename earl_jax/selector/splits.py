# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The choice of plans together with the split of the devices between the stages. Pure.

With each split both plans are chosen as if it were the only one; of the splits that one is taken
whose slower stage is the fastest: stages on devices apart work at the same time, so that a step
takes as long as the slower one (StreamRL, arXiv 2504.15930, section 4.3).
"""

import dataclasses
import math
from typing import Any

from earl_jax.selector.choose import HYSTERESIS, BudgetTooSmall, Decision, Step, choose
from earl_jax.selector.plan_candidates import Candidates
from earl_jax.selector.plans import Plan, Plans, Stage
from earl_jax.selector.problem import Problem
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import WINDOW

# Splits among which one is chosen, about evenly apart.
MOST_SPLITS = 16


def with_splits(problem: Problem) -> Problem:
    """Returns the problem with all splits for which both stages have a mesh.

    Each of several processes gives as many of its devices, so that it plays and trains in any split
    and its live episodes stay with it. Raises ValueError if there is no split, or none of a mesh
    that the config names.
    """
    number, unit = problem.hardware.num_devices, problem.num_processes
    apart = unit * max(1, number // unit // MOST_SPLITS)
    every, found, obstacles = dataclasses.replace(problem, splits=()), list[int](), list[str]()
    for split in range(apart, number, apart):
        try:
            assert every.at(split).meshes("rollout") and every.at(split).meshes("train")
            found.append(split)
        except ValueError as error:
            obstacles.append(f"{split} to play: {error}")
    if not found:
        why = "; ".join(obstacles[:2]) or "each process needs at least two"
        instead = (
            "make config.rollout.num_slots and episodes_per_step multiples of more numbers, such as"
            " 12"
        )
        if problem.rollout_meshes_named or problem.train_meshes_named:
            instead = (
                "name meshes of both stages that have these devices together, or leave out "
                "config.selector.rollout_meshes and train_meshes"
            )
        raise InputError(
            f"config.devices.num_rollout is 'auto', and no split of {number} devices gives both "
            f"stages a mesh ({why}): {instead}, or give the number of devices that play"
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


def choose_plans(
    candidates: Candidates,
    step: Step,
    current: Plans,
    calm_steps: int = WINDOW,
    only: Stage | None = None,
) -> Decision:
    """Chooses as `choose`; for both stages also an open split, which for one stage stays.

    The split in use is left, like plans, only after a window of steps, or where contexts are new,
    and for steps that are shorter by more than the hysteresis with the move paid for. Of equal ones
    that is taken whose faster stage is the faster. Nothing is tried in another split, and the run
    does not wait for the programs of one. Until both stages were observed, splits are compared by
    the speed model alone.
    """
    problem, work = candidates.problem, candidates.problem.work
    here = current.rollout.mesh.num_devices if current.rollout else None
    if only is not None or not problem.splits:
        own = with_split(candidates, here or problem.num_rollout)
        decision = choose(own, step, current, calm_steps, only)
        # On devices of their own the stages of an asynchronous or streaming run work at once.
        at_once = problem.num_rollout and max(work.batches, work.parts) > 1
        at_once = at_once and None not in (decision.rollout, decision.train)
        return _at_once(own, decision, step, here) if at_once else decision
    found, error, table = list[Decision](), None, candidates.table
    if not (candidates.speeds.has_seen("rollout") and candidates.speeds.has_seen("train")):
        # The factor by which one stage differs from the model would weigh it against the other.
        table = table.without_speeds()
    for split in problem.splits:
        own = dataclasses.replace(with_split(candidates, split), table=table)
        if split != here:
            # Meshes are mostly those that ran, with more or fewer devices.
            own = dataclasses.replace(own, may_try=None, model_error=1.0)
        try:
            decision = choose(own, step, current, calm_steps)
            found.append(_at_once(own, decision, step, here))
        except BudgetTooSmall as small:
            error = error or small
    if error is not None and not found:
        raise error
    found.sort(key=lambda each: (each.cost_s, min(choice.seconds for choice in each.choices)))
    best, stays = found[0], next((each for each in found if each.num_rollout == here), None)
    if stays is not None:
        may_leave = step.is_new or calm_steps >= WINDOW
        is_faster = stays.cost_s > (1.0 + HYSTERESIS) * best.cost_s
        waits = any(candidates.must_wait(choice.plan, choice.tokens) for choice in best.choices)
        best = best if may_leave and is_faster and not waits else stays
    others = (each for each in found if each is not best)
    chosen = dataclasses.replace(best, splits=(best, *others))
    return chosen if here in (None, best.num_rollout) else _with_reasons(chosen, current, stays)


def with_split(candidates: Candidates, split: int) -> Candidates:
    """Returns the candidates with so many devices for rollouts, where that is open."""
    if not candidates.problem.splits:
        return candidates
    return dataclasses.replace(candidates, problem=candidates.problem.at(split))


def _at_once(candidates: Candidates, decision: Decision, step: Step, here: int | None) -> Decision:
    """Returns the decision with the seconds of a step whose stages work at the same time.

    A rollout takes those of new weights on their way too. Live episodes move with their pages to
    another split than `here`.
    """
    rollout, train, problem = decision.rollout, decision.train, candidates.problem
    assert rollout is not None and train is not None
    mesh, move_s = rollout.plan.mesh, decision.switch_s
    publish_s = problem.publish_s(mesh)
    if here not in (None, mesh.num_devices):
        # The weights beside the pages arrive in any case.
        cache_bytes = rollout.plan.pages * problem.page_bytes(mesh)
        move_s += (problem.publish_s(mesh, cache_bytes) - publish_s) / step.lasts
    rollout = dataclasses.replace(rollout, seconds=rollout.seconds + publish_s)
    step_s = max(rollout.seconds, train.seconds)
    return Decision(rollout=rollout, train=train, seconds=step_s, switch_s=move_s)


def _with_reasons(decision: Decision, current: Plans, before: Decision | None) -> Decision:
    """Returns the decision with the split as the reason of both stages' moves."""
    why = f"before: {_words(before)}" if before else "the split in use does not fit"
    whys = {"rollout": f"{_words(decision)}; {why}", "train": "with the split of the devices"}

    def moved(choice: Any, plan: Plan | None) -> Any:
        if choice is None or plan is None:
            return choice
        reason = f"{plan.mesh} -> {choice.plan.mesh} ({whys[choice.stage]})"
        return dataclasses.replace(choice, reason=reason)

    rollout, train = decision.rollout, decision.train
    return dataclasses.replace(
        decision, rollout=moved(rollout, current.rollout), train=moved(train, current.train)
    )


def _words(decision: Decision) -> str:
    """Returns "6 play (rollout 2.00 s, training 3.00 s)"."""
    rollout_s, train_s = (choice.seconds for choice in decision.choices)
    return f"{decision.num_rollout} play (rollout {rollout_s:.3g} s, training {train_s:.3g} s)"
