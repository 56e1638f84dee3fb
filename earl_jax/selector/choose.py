# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The choice of plans, one for a rollout and one for training (docs/design/selector.md). Pure.

Of the candidates whose bytes fit the budget and that have not run out of memory before, the pair
with the fastest step is taken. Both stages are one choice, because a device holds both. The plans
in use stay while they fit, unless another pair's step is shorter by more than the hysteresis with
its switch paid for.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple

from earl_jax.selector.plan_candidates import TIE, Candidate, Candidates, P
from earl_jax.selector.plans import Plan, Plans, RolloutPlan, Stage, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.reasons import BudgetTooSmall as BudgetTooSmall
from earl_jax.selector.reasons import reason_of, step_too_small, too_small
from earl_jax.selector.table import KEPT, TRUSTED, key_of
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import WINDOW

# Of equally fast pairs those that leave this share of the budget are equal in memory too, and the
# least cut wins.
AMPLE = 0.5
# A plan that fits is left only for a step that is shorter by more than this fraction: a speed that
# differs by less is not worth a move of weights, moments and live episodes.
HYSTERESIS = 0.1
# A switch has to pay for itself over at most so many steps.
HORIZON_STEPS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The work of the next step, or of the rest of a rollout.

    Attributes:
        max_tokens: context bucket of the rollout's episodes.
        length: context bucket of the training rows.
        cache_tokens: tokens that the KV cache has to hold at once over all row shards; with fewer
            pages episodes wait. None: all slots' episodes at their longest.
        rollout_tokens: tokens to be sampled.
        lasts: steps that a choice lasts, over which a switch is spread.
        is_new: contexts were never so long, so that other programs are needed anyway.
        compile_s: seconds of waiting for the program of a plan that never ran; spread likewise.
        keeps_slots: live episodes sit in the slots and the pages of the plan in use.
        live: so many episodes are under way at once, on average or in the tail of a rollout; None:
            as many as there are slots.
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

    def tokens_of(self, plan: Plan) -> int:
        """Returns the context bucket of a plan's stage."""
        return self.length if isinstance(plan, TrainPlan) else self.max_tokens


def full_step(problem: Problem, context: int) -> Step:
    """Returns a step whose episodes all fill `context`, with appended and sampled tokens."""
    work = problem.work
    tokens = round(work.num_rows * context / (1.0 + work.appended))
    return Step(
        max_tokens=context,
        length=context,
        cache_tokens=None,
        rollout_tokens=tokens,
        lasts=HORIZON_STEPS,
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
    """The plans chosen for a step; None for a stage that was not asked for.

    A step takes `seconds`; `switch_s` more count for the switch, spread over the steps that the
    choice lasts. Where the split of the devices was chosen (splits.py), `splits` are the decisions
    with all that fit, the chosen one first.
    """

    rollout: Choice[RolloutPlan] | None
    train: Choice[TrainPlan] | None
    seconds: float
    switch_s: float = 0.0
    splits: tuple["Decision", ...] = ()

    @property
    def cost_s(self) -> float:
        """The seconds of a step, with its part of the switch."""
        return self.seconds + self.switch_s

    @property
    def num_rollout(self) -> int:
        """The number of devices that play."""
        return self.rollout.plan.mesh.num_devices if self.rollout else 0

    @property
    def plans(self) -> Plans:
        """The plans of both stages."""
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
    def candidates(self) -> list[Candidate]:
        return [candidate for candidate in (self.rollout, self.train) if candidate is not None]

    def kept(self, current: Plans) -> int:
        """Returns how much of the plans in use stays: one for a mesh, one more for its use.

        A trainer whose inputs go to host memory for it does not stay. With both stages a rollout
        is used otherwise if it has fewer slots.
        """
        number = 0
        if self.train is not None and current.train is not None:
            plan, before = self.train.plan, current.train
            stays = plan.remat != "offload" or before.remat == "offload"
            number += (plan.mesh == before.mesh and stays) * (1 + (plan == before))
        if self.rollout is not None and current.rollout is not None:
            plan, before = self.rollout.plan, current.rollout
            fewer = self.train is not None and plan.num_slots < before.num_slots
            number += (plan.mesh == before.mesh) * (2 - fewer)
        return number


def choose(
    candidates: Candidates,
    step: Step,
    current: Plans,
    calm_steps: int = WINDOW,
    only: Stage | None = None,
) -> Decision:
    """Chooses both stages' plans for a step, or those of `only` one beside the other's in use.

    Where nothing is played, those of a step are the trainer's alone.

    Plans that fit are left only for a step shorter by more than the hysteresis, and so is what
    can stay of them where something must go. Both stages' are left only after a window of steps
    (until then the load is in part other plans'), unless contexts are new or a trial begins or
    ends; between the stages of a step the trainer's only where contexts are new.

    Raises:
        BudgetTooSmall: nothing fits.
    """
    both = _pairs if candidates.problem.plays else _trainings
    ways = {None: both, "train": _trainings, "rollout": _rollouts}
    pairs = ways[only](candidates, step, current)
    most = max(pair.kept(current) for pair in pairs)
    here = [pair for pair in pairs if most and pair.kept(current) == most]
    if only == "rollout" and not here:
        # It must move, so that the cost of a move does not count.
        pairs = [pair._replace(cost_s=pair.step_s) for pair in pairs]
    pair = _best(candidates, pairs, current)
    stays = _best(candidates, here, current) if here else pair
    if here:
        all_fit = most == 2 * len(stays.candidates)
        may_leave = step.is_new or only == "rollout" or not all_fit
        if only is None and not may_leave:
            both = zip(stays.candidates, pair.candidates, strict=True)
            moved = [(old, new) for old, new in both if old.plan.mesh != new.plan.mesh]
            # Before a window of steps a plan may be left when it was observed just often enough to
            # be trusted (it came into use as the first, as a trial, or by the model), or for a
            # trial when it is trusted.
            early = any(
                old.num_speeds >= TRUSTED and (new.is_trial or old.num_speeds < KEPT)
                for old, new in moved
            )
            waits = any(
                candidates.must_wait(new.plan, step.tokens_of(new.plan)) for _, new in moved
            )
            may_leave = (calm_steps >= WINDOW or early) and not waits
        if not may_leave or stays.cost_s <= (1.0 + HYSTERESIS) * pair.cost_s:
            pair = stays
    rollout, train = pair.rollout, pair.train
    return Decision(
        rollout=rollout
        and _choice(candidates, step, rollout, current.rollout, stays.rollout, pair.resident),
        train=train and _choice(candidates, step, train, current.train, stays.train),
        seconds=pair.step_s,
        switch_s=pair.cost_s - pair.step_s,
    )


def _choice(
    candidates: Candidates,
    step: Step,
    found: Candidate[P],
    before: P | None,
    stays: Candidate[P] | None,
    beside: int = 0,
) -> Choice[P]:
    """Returns a stage's choice, beside so many bytes of the other one.

    `stays` is its candidate where as much stays of the plans in use as can.
    """
    seconds, tokens = _seconds(candidates, step, found), step.tokens_of(found.plan)
    gain = _seconds(candidates, step, stays) / seconds - 1 if stays and seconds else 0.0
    num_bytes = found.num_bytes - candidates.surplus(found) + beside
    return Choice(
        stage=found.plan.stage,
        plan=found.plan,
        tokens=tokens,
        num_bytes=num_bytes,
        is_exact=found.is_exact,
        seconds=seconds,
        switched=before is not None and found.plan.mesh != before.mesh,
        reason=reason_of(candidates, found, before, tokens, num_bytes, stays, gain),
    )


def _best(candidates: Candidates, pairs: Sequence[_Pair], current: Plans) -> _Pair:
    """Returns the pair of least cost.

    Of ties that without offload, which keeps most of the plans in use, and leaves most memory.
    """
    least_s = min(pair.cost_s for pair in pairs)
    ties = [pair for pair in pairs if pair.cost_s <= (1.0 + TIE) * least_s]

    def rank(pair: _Pair) -> tuple[int, int, float]:
        rollout, train = pair.rollout, pair.train
        playing = pair.resident + (rollout.wanted_bytes if rollout else 0)
        fullest = max(playing, train.num_bytes if train else 0)
        offloads = rollout is not None and rollout.plan.offload
        offloads += train is not None and train.plan.remat == "offload"
        kept = pair.kept(current)
        return offloads, -kept, max(fullest, AMPLE * candidates.problem.budget)

    return min(ties, key=rank)


def _pairs(candidates: Candidates, step: Step, current: Plans) -> list[_Pair]:
    """Returns each training plan that fits with the best rollouts beside it, least cut first.

    Those that cannot be the fastest beside any rollout are left out, but for those on the mesh
    in use. Where not both plans in use fit, one slower by the hysteresis may let the rollout's
    stay.
    """
    problem, before = candidates.problem, current.train
    least_s, found = math.inf, list[tuple[int, _Pair]]()
    margin = TIE if before is None else HYSTERESIS
    trains = _trains(candidates, step, before, problem.budget)
    plans = [pair.train.plan for pair in trains if pair.train]
    residents = sorted({key for p in plans for key in _residents(candidates, p, step.length)})
    beside = functools.cache(functools.partial(_beside, candidates, step, current.rollout))
    # The fastest is beside the fewest bytes that a trainer leaves on the device.
    each_s = (pair.cost_s for key in residents[:1] for pair in beside(*key))
    fastest_s = min(each_s, default=math.inf) / (1.0 + TIE)

    def is_elsewhere(alone: _Pair) -> bool:
        return before is None or alone.train is None or alone.train.plan.mesh != before.mesh

    # The mesh in use first.
    in_order = sorted(enumerate(trains), key=lambda n: (is_elsewhere(n[1]), n[1].cost_s))
    for index, alone in in_order:
        train = alone.train
        assert train is not None
        if is_elsewhere(alone) and alone.cost_s + fastest_s > (1.0 + margin) * least_s:
            continue
        for key in _residents(candidates, train.plan, step.length):
            away_s = problem.offload_s(train.plan.mesh) if key[1] else 0.0
            for pair in beside(*key):
                cost_s = alone.cost_s + away_s + pair.cost_s
                step_s = alone.step_s + away_s + pair.step_s
                least_s = min(least_s, cost_s)
                both = pair._replace(train=train, cost_s=cost_s, step_s=step_s)
                margin = TIE if both.kept(current) == 2 * len(both.candidates) else margin
                found.append((index, both))
    if not found:
        raise step_too_small(candidates, step.max_tokens, step.length, residents)
    # Of equally good pairs the first is taken: the one that is cut least.
    return [pair for _, pair in sorted(found, key=lambda each: each[0])]


def _trainings(candidates: Candidates, step: Step, current: Plans) -> list[_Pair]:
    """Returns the training plans that fit by themselves, or beside the rollout if it stays."""
    beside = 0
    if candidates.problem.rollout_stays and current.rollout is not None:
        beside, _ = candidates.round_bytes(current.rollout, step.max_tokens)
    if pairs := _trains(candidates, step, current.train, candidates.problem.budget - beside):
        return pairs
    every = candidates.train(step.length)
    raise too_small(candidates, "training", every, step.length, beside)


def _trains(
    candidates: Candidates, step: Step, current: TrainPlan | None, free: float
) -> list[_Pair]:
    """Returns the training plans that fit into `free` bytes, with their seconds."""
    pairs = []
    for found in candidates.trains_that_fit(step.length, free, current):
        seconds = _seconds(candidates, step, found)
        cost_s, mesh = seconds + _compile_s(step, found, current), found.plan.mesh
        if current is not None and mesh != current.mesh:
            cost_s += candidates.problem.move_s(mesh) / step.lasts
        pairs.append(_Pair(None, found, 0, cost_s, seconds))
    return pairs


def _rollouts(candidates: Candidates, step: Step, current: Plans) -> list[_Pair]:
    """Returns each rollout mesh that fits beside the trainer in use, if any, with its move."""
    problem, (before, train) = candidates.problem, current
    offload, resident = before is not None and before.offload, 0
    if train is not None:
        plans = [plan for plan in problem.train_plans(step.length) if plan.mesh == train.mesh]
        resident_bytes = candidates.resident_bytes
        resident = min(resident_bytes(plan, offload, step.length) for plan in plans or [train])
    free = problem.budget - resident
    every = _plans(candidates, step, free, offload, before)
    fitting = [candidate for candidate in every if candidate.fits(free)]
    if not fitting:
        raise too_small(candidates, "a rollout", every, step.max_tokens, resident)
    pairs = []
    for found in fitting:
        seconds, mesh = _seconds(candidates, step, found), found.plan.mesh
        moves = before is not None and mesh != before.mesh
        cost_s = seconds + (step.move_s(mesh) if moves else 0.0)
        pairs.append(_Pair(found, None, resident, cost_s, seconds))
    return pairs


def _beside(
    candidates: Candidates, step: Step, current: RolloutPlan | None, resident: int, offload: bool
) -> list[_Pair]:
    """Returns the best rollout beside `resident` bytes, that in use, and the best that ran."""
    problem, free = candidates.problem, candidates.problem.budget - resident
    fitting = [c for c in _plans(candidates, step, free, offload, current) if c.fits(free)]
    if not fitting:
        return []
    timed = [(_seconds(candidates, step, candidate), candidate) for candidate in fitting]
    most_s = (1.0 + TIE) * min(seconds for seconds, _ in timed)
    ties = [each for each in timed if each[0] <= most_s]
    best = min(ties, key=lambda each: max(each[1].wanted_bytes, AMPLE * free))
    here = [each for each in timed if current and each[1].plan.mesh == current.mesh]
    ran = sorted((each for each in timed if each[1].num_speeds), key=lambda each: each[0])
    pairs = []
    for play_s, rollout in dict.fromkeys([best, *here, *ran[:1]]):
        seconds = play_s + problem.publish_s(rollout.plan.mesh)
        cost_s = seconds + _compile_s(step, rollout, current)
        pairs.append(_Pair(rollout, None, resident, cost_s, seconds))
    return pairs


def _plans(
    candidates: Candidates, step: Step, free: float, offload: bool, current: RolloutPlan | None
) -> list[Candidate[RolloutPlan]]:
    """Returns a plan of each rollout mesh in `free` bytes, for live episodes their moves.

    Those stay inside processes, or across them.
    """
    sizes = (step.max_tokens, step.cache_tokens, free)
    if current is None or not step.keeps_slots:
        return candidates.rollouts(*sizes, offload=offload)
    spans, is_across = candidates.problem.spans, candidates.problem.spans(current.mesh)
    moves = candidates.moves(current._replace(offload=offload), *sizes)
    return [found for found in moves if spans(found.plan.mesh) == is_across]


def _seconds(candidates: Candidates, step: Step, found: Candidate) -> float:
    """Returns the seconds of a stage: of updates, on padding rows too, or of sampling.

    A rollout samples its tokens in all slots, or in those that are live.
    """
    plan, speeds, work = found.plan, candidates.speeds, candidates.problem.work
    if isinstance(plan, TrainPlan):
        rows = candidates.problem.packed_rows(step.length, speeds.train_tokens, plan.mesh)
        return rows * step.length * work.num_batches * work.epochs / found.tokens_per_s
    full_s = step.rollout_tokens / found.tokens_per_s
    if step.live is None:
        return full_s
    live = max(1, min(step.live, plan.num_slots))
    return max(
        full_s, step.rollout_tokens / live * speeds.live_token_s(plan, live, step.max_tokens)
    )


def _residents(candidates: Candidates, plan: TrainPlan, length: int) -> list[tuple[int, bool]]:
    """Returns the bytes without offload, and with it where the hosts' memory holds that."""
    problem, hardware = candidates.problem, candidates.problem.hardware
    devices = min(hardware.devices_a_host, hardware.num_devices)
    held = devices * problem.moments_bytes(plan.mesh) + problem.preempted_bytes
    offloads = problem.can_offload and not problem.num_rollout
    both = (False, True) if offloads and held <= hardware.host_memory_bytes else (False,)
    resident_bytes = candidates.resident_bytes
    return [(resident_bytes(plan, offload, length), offload) for offload in both]


def _compile_s(step: Step, new: Candidate[P], current: P | None) -> float:
    """Returns the seconds a step of waiting for a program, which a plan that ran has already.

    For contexts that are new to a run only programs of runs before are there.
    """
    stays = current is not None and key_of(new.plan, 0) == key_of(current, 0)
    return 0.0 if new.num_speeds or (stays and not step.is_new) else step.compile_s / step.lasts
