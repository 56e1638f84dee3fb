# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The choice of plans, one for a rollout and one for training. Pure.

Of the candidates whose bytes fit the budget and that have not run out of memory before, the pair
with the fastest step is taken. Both stages are one choice, because a device holds both: what the
trainer keeps there during a rollout is missing for the KV cache.

The plans in use stay while they fit, unless another pair's step is shorter by more than the
hysteresis with its switch paid for.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple

from earl_jax.selector.plan_candidates import Candidate, Candidates, P
from earl_jax.selector.plans import Plan, Plans, RolloutPlan, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.reasons import BudgetTooSmall, reason_of, step_too_small, too_small
from earl_jax.selector.table import KEPT, TRUSTED, ThroughputTable
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import WINDOW

# Steps within the fraction TIE are equally fast. The pair that leaves most memory wins then; all
# that leave the share AMPLE of the budget are equal in this, and the least cut wins.
TIE, AMPLE = 0.02, 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The work of the next step.

    Attributes:
        max_tokens: tokens that the rollout's episodes may come to (a context bucket).
        length: tokens of a training row (a context bucket).
        cache_tokens: tokens that the KV cache should hold over all row shards; None: all slots'
            episodes at their longest.
        rollout_tokens: tokens to be sampled.
        lasts: steps that a choice lasts, over which a switch is spread.
        is_new: contexts were never so long, so that other programs are needed anyway.
    """

    max_tokens: int
    length: int
    cache_tokens: int | None
    rollout_tokens: int
    lasts: int
    is_new: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(Generic[P]):
    """One stage's part of a decision; `tokens` is its context bucket.

    `num_bytes` is all that a device holds meanwhile, `seconds` what the stage is expected to take.
    """

    stage: str
    plan: P
    tokens: int
    num_bytes: int
    is_exact: bool
    seconds: float
    switched: bool
    reason: str

    def __str__(self) -> str:
        """Returns "train: data=8 -> data=4,context=2 (...)"."""
        return f"{self.stage}: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The plans chosen for a step; None for a stage that was not asked for."""

    rollout: Choice[RolloutPlan] | None
    train: Choice[TrainPlan] | None
    seconds: float

    @property
    def choices(self) -> list[Choice]:
        """The choices of the stages that were asked for."""
        return [choice for choice in (self.rollout, self.train) if choice is not None]


class _Pair(NamedTuple):
    """A trainer, a rollout beside it, and the step's seconds; `cost_s` counts the switch too."""

    rollout: Candidate[RolloutPlan] | None
    train: Candidate[TrainPlan] | None
    resident: int
    cost_s: float
    step_s: float

    @property
    def offloads(self) -> bool:
        """True if the optimizer's moments are in host memory during the rollout."""
        return self.rollout is not None and self.rollout.plan.offload

    @property
    def fullest(self) -> int:
        """Bytes of the device in the fuller of the two stages."""
        rollout = self.resident + (self.rollout.num_bytes if self.rollout else 0)
        return max(rollout, self.train.num_bytes if self.train else 0)

    @property
    def candidates(self) -> list[Candidate]:
        """The candidates of the stages that were asked for."""
        return [candidate for candidate in (self.rollout, self.train) if candidate is not None]


@dataclasses.dataclass(frozen=True)
class Chooser:
    """The choice among the candidates of one problem by one table; fields as in `Candidates`."""

    problem: Problem
    table: ThroughputTable
    caution: float = 1.0
    may_try: Callable[[Plan, int], bool] | None = None
    train_tokens: int | None = None

    @functools.cached_property
    def candidates(self) -> Candidates:
        """The plans to choose from."""
        return Candidates(self.problem, self.table, self.caution, self.may_try, self.train_tokens)

    def step(self, step: Step, current: Plans, calm_steps: int = WINDOW) -> Decision:
        """Chooses both stages' plans for a step.

        Plans that fit are left only when they have been in use for a window of steps (until then
        the load is in part other plans'), unless contexts are new, or a mesh is tried out.

        Raises:
            BudgetTooSmall: no pair fits.
        """
        pairs = self._pairs(step, current)
        if not pairs:
            raise self._too_small(step)
        here = [pair for pair in pairs if _is_here(pair, current)]
        is_calm = step.is_new or calm_steps >= WINDOW
        return self._decide(step, pairs, here, current, is_calm)

    def _pairs(self, step: Step, current: Plans) -> list[_Pair]:
        """Returns each training mesh that fits with the best rollouts beside it.

        Those that cannot be the fastest beside any rollout are left out, but for the one in use.
        """
        problem, train_tokens, least_s = self.problem, self._train_tokens(step), math.inf
        fitting = self.candidates.trains_that_fit(step.length, problem.budget, current.train)
        trains = _fastest_by_mesh(fitting, current.train)
        train_s = [
            self._move_s(step, c, current.train) + train_tokens / c.tokens_per_s for c in trains
        ]
        fastest_s = self._fastest_rollout_s(step, trains)
        # The best rollout and that on the mesh in use, by the bytes that a trainer leaves there.
        beside: dict[tuple[int, bool], list[Candidate[RolloutPlan]]] = {}
        found = list[tuple[int, _Pair]]()
        for index in sorted(range(len(trains)), key=lambda index: train_s[index]):
            train = trains[index]
            is_slow = train_s[index] + fastest_s > (1.0 + TIE) * least_s
            if is_slow and train.plan != current.train:
                continue
            mesh = train.plan.mesh
            for offload in (False, True) if self._may_offload(mesh) else (False,):
                key = (self._resident(train, offload), offload)
                if key not in beside:
                    beside[key] = self._beside(step, *key, current.rollout)
                for rollout in beside[key]:
                    rollout_s = step.rollout_tokens / rollout.tokens_per_s
                    rollout_s += problem.publish_s(rollout.plan.mesh)
                    rollout_s += problem.offload_s(mesh) if offload else 0.0
                    cost_s = train_s[index] + rollout_s
                    step_s = train_tokens / train.tokens_per_s + rollout_s
                    least_s = min(least_s, cost_s)
                    found.append((index, _Pair(rollout, train, key[0], cost_s, step_s)))
        # Of equally good pairs the first is taken: the one that is cut least.
        return [pair for _, pair in sorted(found, key=lambda each: each[0])]

    def _move_s(self, step: Step, train: Candidate[TrainPlan], current: TrainPlan | None) -> float:
        """Returns the seconds a step of moving the trainer's state to a plan, 0 where it stays."""
        mesh = train.plan.mesh
        stays = current is None or mesh == current.mesh
        return 0.0 if stays else self.problem.move_s(mesh) / step.lasts

    def _fastest_rollout_s(self, step: Step, trains: Sequence[Candidate[TrainPlan]]) -> float:
        """Returns the seconds of the fastest rollout beside the smallest of these trainers."""
        offload = self.problem.can_offload
        resident = min((self._resident(train, offload) for train in trains), default=0)
        free = self.problem.budget - resident
        found = self.candidates.rollouts(step.max_tokens, step.cache_tokens, free, offload=True)
        top = max((candidate.tokens_per_s for candidate in found), default=math.inf)
        return step.rollout_tokens / top

    def _resident(self, train: Candidate[TrainPlan], offload: bool) -> int:
        """Returns the bytes beside which a rollout must fit.

        They are the trainer's state; where the rollout stays on the devices during an update, all
        that the update takes.
        """
        if self.problem.rollout_stays:
            return train.num_bytes
        return self.problem.trainer_bytes(train.plan.mesh, offload)

    def _beside(
        self, step: Step, resident: int, offload: bool, current: RolloutPlan | None
    ) -> list[Candidate[RolloutPlan]]:
        """Returns the best rollout beside `resident` bytes, and that on the mesh in use."""
        free = self.problem.budget - resident
        found = self.candidates.rollouts(step.max_tokens, step.cache_tokens, free, offload=offload)
        fitting = [c for c in found if not c.failed and c.num_bytes <= free]
        if not fitting:
            return []
        top = max(candidate.tokens_per_s for candidate in fitting)
        ties = [c for c in fitting if (1.0 + TIE) * c.tokens_per_s >= top]
        best = min(ties, key=lambda candidate: max(candidate.num_bytes, AMPLE * free))
        here = [c for c in fitting if current and c.plan.mesh == current.mesh and c is not best]
        return [best, *here]

    def training(self, step: Step, current: TrainPlan | None, beside: int = 0) -> Decision:
        """Chooses a plan for training alone, or `beside` so many bytes of a rollout.

        The plan in use stays while it fits, unless rows are longer than ever, so that other
        programs are needed anyway, and another plan is faster.

        Raises:
            BudgetTooSmall: no plan fits.
        """
        free = self.problem.budget - beside
        fitting = self.candidates.trains_that_fit(step.length, free, current)
        if not fitting:
            every = self.candidates.train(step.length)
            raise too_small(self.candidates, "training", every, step.length, beside)
        tokens = self._train_tokens(step)
        pairs = []
        for candidate in _fastest_by_mesh(fitting, current):
            seconds = tokens / candidate.tokens_per_s
            cost_s = seconds + self._move_s(step, candidate, current)
            pairs.append(_Pair(None, candidate, 0, cost_s, seconds))
        here = [pair for pair in pairs if pair.train and pair.train.plan == current]
        return self._decide(step, pairs, here, Plans(train=current), step.is_new)

    def rollout(
        self,
        step: Step,
        current: RolloutPlan | None,
        trainer: MeshShape,
        *,
        keeps_slots: bool = False,
        live: int | None = None,
        move_s: Callable[[MeshShape], float] | None = None,
    ) -> Decision:
        """Chooses a plan for a rollout beside a trainer; the plan in use stays unless it must go.

        With `live` episodes left (the tail of a rollout) the mesh is also left where rounds of so
        few are faster by more than the hysteresis, a move of `move_s(mesh)` seconds included.
        `keeps_slots`: live episodes sit in their slots.

        Raises:
            BudgetTooSmall: no plan fits.
        """
        problem, offload = self.problem, current is not None and current.offload
        trainers = [c for c in self.candidates.train(step.length) if c.plan.mesh == trainer]
        resident = min(self._resident(candidate, offload) for candidate in trainers)
        free = problem.budget - resident
        slots = current.num_slots if current and keeps_slots else None
        candidates = self.candidates.rollouts(
            step.max_tokens, step.cache_tokens, free, offload=offload, num_slots=slots
        )
        fitting = [c for c in candidates if not c.failed and c.num_bytes <= free]
        if not fitting:
            raise too_small(self.candidates, "a rollout", candidates, step.max_tokens, resident)

        def seconds(candidate: Candidate[RolloutPlan]) -> float:
            if live is None:
                return step.rollout_tokens / candidate.tokens_per_s
            rounds = step.rollout_tokens / problem.work.burst / max(1, live)
            return rounds * self.candidates.live_round_s(candidate.plan, live, step.max_tokens)

        pairs = []
        for candidate in fitting:
            moves = current is not None and candidate.plan.mesh != current.mesh
            own_s = seconds(candidate)
            cost_s = own_s
            if moves:
                cost_s += math.inf if move_s is None else move_s(candidate.plan.mesh)
            pairs.append(_Pair(candidate, None, resident, cost_s, own_s))
        here = [p for p in pairs if current and p.rollout and p.rollout.plan.mesh == current.mesh]
        if not here:
            # It must move, so that the cost of a move does not count.
            pairs = [pair._replace(cost_s=pair.step_s) for pair in pairs]
        return self._decide(step, pairs, here, Plans(rollout=current), is_calm=True)

    def _may_offload(self, mesh: MeshShape) -> bool:
        problem = self.problem
        if not problem.can_offload or problem.num_rollout:
            return False
        hardware = problem.hardware
        devices = min(hardware.devices_a_host, hardware.num_devices)
        held = devices * problem.moments_bytes(mesh) + problem.preempted_bytes
        return held <= hardware.host_memory_bytes

    def _too_small(self, step: Step) -> BudgetTooSmall:
        fitting = self.candidates.trains_that_fit(step.length, self.problem.budget, None)
        residents = {
            (self._resident(candidate, offload), offload)
            for candidate in fitting
            for offload in {False, self._may_offload(candidate.plan.mesh)}
        }
        return step_too_small(self.candidates, step.max_tokens, step.length, sorted(residents))

    def _decide(
        self,
        step: Step,
        pairs: Sequence[_Pair],
        here: Sequence[_Pair],
        current: Plans,
        is_calm: bool,
    ) -> Decision:
        """Returns the decision among pairs, where `here` are those of the plans in use, if any fit.

        Plans in use are left for a step shorter by more than the hysteresis, when `is_calm` or
        where they may be left early.
        """
        pair, budget = _best(pairs, self.problem.budget), self.problem.budget
        stays = _best(here, budget) if here else None
        if stays is not None:
            gains = stays.cost_s > (1.0 + self.problem.hysteresis) * pair.cost_s
            both = pair.rollout is not None and pair.train is not None
            if not gains or not (is_calm or (both and _may_leave_early(pair, stays))):
                pair = stays
            elif not step.is_new and self._must_wait(pair, stays, step):
                pair = stays
        gain = stays.cost_s / pair.cost_s - 1.0 if stays and pair.cost_s else None

        def choice(
            stage: str,
            chosen: Candidate[P],
            before: P | None,
            tokens: int,
            work: int,
        ) -> Choice[P]:
            num_bytes = chosen.num_bytes + (pair.resident if stage == "rollout" else 0)
            reason = reason_of(
                self.candidates,
                chosen,
                before,
                tokens=tokens,
                num_bytes=num_bytes,
                gain=gain,
            )
            return Choice(
                stage=stage,
                plan=chosen.plan,
                tokens=tokens,
                num_bytes=num_bytes,
                is_exact=chosen.is_exact,
                seconds=work / chosen.tokens_per_s,
                switched=before is not None and chosen.plan.mesh != before.mesh,
                reason=reason,
            )

        rollout = train = None
        if (found := pair.rollout) is not None:
            tokens, work = step.max_tokens, step.rollout_tokens
            found = self.candidates.filled(found, tokens, self.problem.budget - pair.resident)
            rollout = choice("rollout", found, current.rollout, tokens, work)
        if (update := pair.train) is not None:
            tokens, work = step.length, self._train_tokens(step)
            train = choice("train", update, current.train, tokens, work)
        return Decision(rollout=rollout, train=train, seconds=pair.step_s)

    def _must_wait(self, pair: _Pair, stays: _Pair, step: Step) -> bool:
        """Returns True if the run would wait for a program although the plans in use fit."""
        tokens = {"rollout": step.max_tokens, "train": step.length}
        return self.may_try is not None and any(
            new.plan.mesh != old.plan.mesh
            and not new.is_observed
            and not self.may_try(new.plan, tokens[new.plan.stage])
            for old, new in zip(stays.candidates, pair.candidates, strict=True)
        )

    def _train_tokens(self, step: Step) -> int:
        rows = self.problem.packed_rows(step.length, self.train_tokens)
        return rows * step.length * self.problem.work.epochs


def _fastest_by_mesh(
    candidates: Iterable[Candidate[TrainPlan]], current: TrainPlan | None
) -> list[Candidate[TrainPlan]]:
    """Returns the fastest of each mesh, the first of ties, and the plan in use."""
    best: dict[MeshShape, Candidate[TrainPlan]] = {}
    here = []
    for candidate in candidates:
        known = best.get(candidate.plan.mesh)
        if known is None or candidate.tokens_per_s > (1.0 + TIE) * known.tokens_per_s:
            best[candidate.plan.mesh] = candidate
        if candidate.plan == current:
            here.append(candidate)
    return list(dict.fromkeys([*best.values(), *here]))


def _best(pairs: Sequence[_Pair], budget: float) -> _Pair:
    """Returns the pair of least cost; among ties without offload, then with most memory left."""
    least = min(pair.cost_s for pair in pairs)
    ties = [pair for pair in pairs if pair.cost_s <= (1.0 + TIE) * least]
    return min(ties, key=lambda pair: (pair.offloads, max(pair.fullest, AMPLE * budget)))


def _may_leave_early(best: _Pair, stays: _Pair) -> bool:
    """Returns True if plans may be left before a window of steps.

    One may when it was observed just often enough to be trusted: it came into use as the first
    plan, as a trial, or by the model, and its speed is known since. Or for a trial, when it is
    trusted.
    """
    for old, new in zip(stays.candidates, best.candidates, strict=True):
        if old.plan.mesh != new.plan.mesh and old.num_speeds >= TRUSTED:
            if new.is_trial or old.num_speeds < KEPT:
                return True
    return False


def _is_here(pair: _Pair, current: Plans) -> bool:
    """Returns True if a pair trains by the plan in use and plays on its mesh in no fewer slots."""
    rollout, train = current
    if rollout is None or train is None or pair.rollout is None or pair.train is None:
        return False
    plan = pair.rollout.plan
    return (
        pair.train.plan == train
        and plan.mesh == rollout.mesh
        and plan.num_slots >= rollout.num_slots
    )
