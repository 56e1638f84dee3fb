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
from earl_jax.selector.plans import Plan, Plans, RolloutPlan, Stage, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.reasons import BudgetTooSmall, reason_of, step_too_small, too_small
from earl_jax.selector.table import KEPT, TRUSTED, ThroughputTable, key_of
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import WINDOW

# Steps within the fraction TIE are equally fast. The pair that leaves most memory wins then; all
# that leave the share AMPLE of the budget are equal in this, and the least cut wins.
TIE, AMPLE = 0.02, 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The work of the next step, or of the rest of a rollout.

    Attributes:
        max_tokens: tokens that the rollout's episodes may come to (a context bucket).
        length: tokens of a training row (a context bucket).
        cache_tokens: tokens that the KV cache should hold over all row shards; None: all slots'
            episodes at their longest.
        rollout_tokens: tokens to be sampled.
        lasts: steps that a choice lasts, over which a switch is spread.
        is_new: contexts were never so long, so that other programs are needed anyway.
        compile_s: seconds that the run waits for the program of a plan that never ran, in this run
            or before; they are spread like a switch.
        keeps_slots: live episodes sit in the slots of the plan in use.
        live: so many episodes are left, in the tail of a rollout; None: all of them are ahead.
        move_s: returns the seconds of moving a rollout to another mesh; infinite where it stays
            on its own as long as it may.
    """

    max_tokens: int
    length: int
    cache_tokens: int | None
    rollout_tokens: int
    lasts: int
    is_new: bool = False
    compile_s: float = 0.0
    keeps_slots: bool = False
    live: int | None = None
    move_s: Callable[[MeshShape], float] = lambda mesh: math.inf


def full_step(problem: Problem, context: int) -> Step:
    """Returns a step whose episodes all fill `context` with sampled tokens."""
    tokens, lasts = problem.work.num_rows * context, problem.horizon_steps
    return Step(
        max_tokens=context, length=context, cache_tokens=None, rollout_tokens=tokens, lasts=lasts
    )


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
    def plans(self) -> Plans:
        """The plans, None for a stage that was not asked for."""
        rollout, train = self.rollout, self.train
        return Plans(rollout and rollout.plan, train and train.plan)

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

    def step(
        self, step: Step, current: Plans, calm_steps: int = WINDOW, only: Stage | None = None
    ) -> Decision:
        """Chooses both stages' plans for a step, or those of `only` one beside the other's in use.

        Plans that fit are left only for a step shorter by more than the hysteresis, and only when
        they have been in use for a window of steps (until then the load is in part other plans'),
        unless contexts are new, or a plan may be left early. Between the stages of a step the
        trainer's plan is left only where contexts are new, and within a rollout its plan where
        `step.move_s` allows it.

        Raises:
            BudgetTooSmall: nothing fits.
        """
        ways = {None: self._pairs, "train": self._trainings, "rollout": self._rollouts}
        pairs = ways[only](step, current)
        here = [pair for pair in pairs if _is_here(pair, current)]
        if only == "rollout" and not here:
            # It must move, so that the cost of a move does not count.
            pairs = [pair._replace(cost_s=pair.step_s) for pair in pairs]
        pair = _best(pairs, self.problem.budget)
        stays = _best(here, self.problem.budget) if here else None
        if stays is not None:
            gains = stays.cost_s > (1.0 + self.problem.hysteresis) * pair.cost_s
            may_leave = step.is_new or only == "rollout"
            if only is None and not may_leave:
                may_leave = calm_steps >= WINDOW or _may_leave_early(pair, stays)
                may_leave = may_leave and not self._must_wait(pair, stays, step)
            if not gains or not may_leave:
                pair = stays
        gain = stays.cost_s / pair.cost_s - 1.0 if stays and pair.cost_s else None
        rollout = train = None
        if (found := pair.rollout) is not None:
            free, tokens = self.problem.budget - pair.resident, step.max_tokens
            found = self.candidates.filled(found, tokens, free)
            work = (tokens, step.rollout_tokens, pair.resident)
            rollout = self._choice("rollout", found, current.rollout, work, gain)
        if pair.train is not None:
            work = (step.length, self._train_tokens(step, pair.train), 0)
            train = self._choice("train", pair.train, current.train, work, gain)
        return Decision(rollout=rollout, train=train, seconds=pair.step_s)

    def _choice(
        self,
        stage: str,
        chosen: Candidate[P],
        before: P | None,
        work: tuple[int, int, int],
        gain: float | None,
    ) -> Choice[P]:
        """Returns a stage's part of the decision.

        `work` is its context bucket, its tokens, and the bytes of a device beside it.
        """
        tokens, num_tokens, beside = work
        num_bytes = chosen.num_bytes + beside
        reason = reason_of(
            self.candidates, chosen, before, tokens=tokens, num_bytes=num_bytes, gain=gain
        )
        return Choice(
            stage=stage,
            plan=chosen.plan,
            tokens=tokens,
            num_bytes=num_bytes,
            is_exact=chosen.is_exact,
            seconds=num_tokens / chosen.tokens_per_s,
            switched=before is not None and chosen.plan.mesh != before.mesh,
            reason=reason,
        )

    def _pairs(self, step: Step, current: Plans) -> list[_Pair]:
        """Returns each training mesh that fits with the best rollouts beside it.

        Those that cannot be the fastest beside any rollout are left out, but for the one in use.
        """
        problem, least_s = self.problem, math.inf
        fitting = self.candidates.trains_that_fit(step.length, problem.budget, current.train)
        trains = _fastest_by_mesh(fitting, current.train)
        update_s = [self._train_tokens(step, c) / c.tokens_per_s for c in trains]
        train_s = [
            self._change_s(step, c, current.train) + seconds
            for c, seconds in zip(trains, update_s, strict=True)
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
                    cost_s += _compile_s(step, rollout, current.rollout)
                    step_s = update_s[index] + rollout_s
                    least_s = min(least_s, cost_s)
                    found.append((index, _Pair(rollout, train, key[0], cost_s, step_s)))
        if not found:
            raise self._too_small(step)
        # Of equally good pairs the first is taken: the one that is cut least.
        return [pair for _, pair in sorted(found, key=lambda each: each[0])]

    def _change_s(
        self, step: Step, train: Candidate[TrainPlan], current: TrainPlan | None
    ) -> float:
        """Returns the seconds a step of changing to a plan: the state's move, and its program."""
        mesh, compile_s = train.plan.mesh, _compile_s(step, train, current)
        stays = current is None or mesh == current.mesh
        return compile_s + (0.0 if stays else self.problem.move_s(mesh) / step.lasts)

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
        """Returns the best rollout beside `resident` bytes, that in use, and the best that ran."""
        free = self.problem.budget - resident
        found = self.candidates.rollouts(step.max_tokens, step.cache_tokens, free, offload=offload)
        fitting = [c for c in found if not c.failed and c.num_bytes <= free]
        if not fitting:
            return []
        top = max(candidate.tokens_per_s for candidate in fitting)
        ties = [c for c in fitting if (1.0 + TIE) * c.tokens_per_s >= top]
        best = min(ties, key=lambda candidate: max(candidate.num_bytes, AMPLE * free))
        here = [c for c in fitting if current and c.plan.mesh == current.mesh]
        ran = sorted((c for c in fitting if c.is_observed), key=lambda c: c.tokens_per_s)
        return list(dict.fromkeys([best, *here, *ran[-1:]]))

    def _trainings(self, step: Step, current: Plans) -> list[_Pair]:
        """Returns each training mesh that fits by itself, or beside the rollout if that stays."""
        beside = 0
        if self.problem.rollout_stays and current.rollout is not None:
            beside, _ = self.candidates.round_bytes(current.rollout, step.max_tokens)
        free = self.problem.budget - beside
        fitting = self.candidates.trains_that_fit(step.length, free, current.train)
        if not fitting:
            every = self.candidates.train(step.length)
            raise too_small(self.candidates, "training", every, step.length, beside)
        pairs = []
        for candidate in _fastest_by_mesh(fitting, current.train):
            seconds = self._train_tokens(step, candidate) / candidate.tokens_per_s
            cost_s = seconds + self._change_s(step, candidate, current.train)
            pairs.append(_Pair(None, candidate, 0, cost_s, seconds))
        return pairs

    def _rollouts(self, step: Step, current: Plans) -> list[_Pair]:
        """Returns each rollout mesh that fits beside the trainer in use, with its move."""
        problem, (before, train) = self.problem, current
        assert train is not None
        offload, slots = before is not None and before.offload, None
        if before is not None and step.keeps_slots:
            slots = before.num_slots
        trainers = [c for c in self.candidates.train(step.length) if c.plan.mesh == train.mesh]
        resident = min(self._resident(candidate, offload) for candidate in trainers)
        free = problem.budget - resident
        candidates = self.candidates.rollouts(
            step.max_tokens, step.cache_tokens, free, offload=offload, num_slots=slots
        )
        fitting = [c for c in candidates if not c.failed and c.num_bytes <= free]
        if not fitting:
            raise too_small(self.candidates, "a rollout", candidates, step.max_tokens, resident)
        pairs = []
        for candidate in fitting:
            mesh = candidate.plan.mesh
            if step.live is None:
                seconds = step.rollout_tokens / candidate.tokens_per_s
            else:
                rounds = step.rollout_tokens / problem.work.burst / max(1, step.live)
                round_s = self.candidates.live_round_s(candidate.plan, step.live, step.max_tokens)
                seconds = rounds * round_s
            moves = before is not None and mesh != before.mesh
            cost_s = seconds + (step.move_s(mesh) if moves else 0.0)
            pairs.append(_Pair(candidate, None, resident, cost_s, seconds))
        return pairs

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

    def _must_wait(self, pair: _Pair, stays: _Pair, step: Step) -> bool:
        """Returns True if the run would wait for a program although the plans in use fit."""
        tokens = {"rollout": step.max_tokens, "train": step.length}
        return self.may_try is not None and any(
            new.plan.mesh != old.plan.mesh
            and not new.is_observed
            and not self.may_try(new.plan, tokens[new.plan.stage])
            for old, new in zip(stays.candidates, pair.candidates, strict=True)
        )

    def _train_tokens(self, step: Step, train: Candidate[TrainPlan]) -> int:
        """Returns the tokens of a step's updates by a plan, those of padding rows included."""
        rows = self.problem.packed_rows(step.length, self.train_tokens, train.plan.mesh)
        return rows * step.length * self.problem.work.epochs


def _compile_s(step: Step, new: Candidate[P], current: P | None) -> float:
    """Returns the seconds a step of waiting for a program, which a plan that ran has already.

    For contexts that are new to a run only programs of runs before are there.
    """
    stays = current is not None and key_of(new.plan, 0) == key_of(current, 0)
    if new.is_observed or (stays and not step.is_new):
        return 0.0
    return step.compile_s / step.lasts


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
    """Returns True if a pair is of the plans in use, of the stages that are asked for.

    Where both are, the rollout has no fewer slots.
    """
    if pair.train is not None and pair.train.plan != current.train:
        return False
    if pair.rollout is None:
        return True
    plan, before = pair.rollout.plan, current.rollout
    if before is None or plan.mesh != before.mesh:
        return False
    return pair.train is None or plan.num_slots >= before.num_slots
