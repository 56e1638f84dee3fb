# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The choice of plans, one for a rollout and one for training (docs/design/selector.md). Pure.

Of the candidates that fit the pair with the fastest step is taken. The plans in use stay while they
fit, unless another pair's step is shorter by more than the hysteresis with its switch paid for. Of
several splits of the devices that one is taken whose slower stage is the fastest (StreamRL, arXiv
2504.15930, section 4.3).
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from earl_jax.selector.candidates import TIE, Candidate, Candidates, P
from earl_jax.selector.plans import Plans, RolloutPlan, Stage, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.reasons import BudgetTooSmall as BudgetTooSmall
from earl_jax.selector.reasons import reason_of, step_too_small, too_small
from earl_jax.selector.table import KEPT, TRUSTED, key_of
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import WINDOW

# Of equally fast pairs those that leave this share of the budget are equal in memory too, and the
# least cut wins.
AMPLE = 0.5
# A plan that fits is left only for a step that is shorter by more than this fraction.
HYSTERESIS = 0.1
# A switch has to pay for itself over at most so many steps.
HORIZON_STEPS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The work of the next step, or of the rest of a rollout.

    Attributes:
        max_tokens: context bucket of the rollout's episodes.
        length: context bucket of the training rows.
        cache_tokens: tokens that the KV cache has to hold at once over all row shards; None: those
            of all slots' episodes at their longest.
        rollout_tokens: tokens to be sampled.
        lasts: steps that a choice lasts, over which a switch is spread.
        is_new: contexts were never so long, so that other programs are needed anyway.
        compile_s: seconds of waiting for the program of a plan that never ran; spread likewise.
        keeps_slots: live episodes sit in the slots and the pages of the plan in use.
        live: so many episodes are under way at once, on average or in the tail; None: all slots.
        move_s: returns the seconds of moving a rollout to another mesh; infinite where it may not.
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


class Decision(NamedTuple):
    """The plans chosen for a step, or a pair that may be; None for a stage that is not asked for.

    A step takes `seconds`, and `cost_s` with its part of the switch. The rollout is beside
    `resident` bytes of the trainer. `splits` are the decisions with all splits of the devices that
    fit, the chosen one first.
    """

    rollout: Candidate[RolloutPlan] | None
    train: Candidate[TrainPlan] | None
    seconds: float
    cost_s: float
    resident: int = 0
    splits: tuple["Decision", ...] = ()

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
    def choices(self) -> list[Candidate]:
        """The candidates of the stages that were asked for."""
        return [candidate for candidate in (self.rollout, self.train) if candidate is not None]

    def kept(self, current: Plans) -> int:
        """Returns how much of the plans in use stays: one for a mesh, one more for its use.

        A mesh does not stay if layers' inputs go to host memory for it; with both stages a rollout
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


def choose_plans(
    candidates: Candidates,
    step: Step,
    current: Plans,
    calm_steps: int = WINDOW,
    only: Stage | None = None,
) -> Decision:
    """Chooses both stages' plans for a step, or those of `only` one beside the other's in use.

    Where nothing is played, those of a step are the trainer's alone. An open split of the devices
    is chosen with both stages' plans, and stays for one stage. The plans in use were chosen
    `calm_steps` ago.

    Raises:
        BudgetTooSmall: nothing fits.
    """
    problem, work = candidates.problem, candidates.problem.work
    here = current.rollout.mesh.num_devices if current.rollout else None
    if only is None and problem.splits:
        return _with_best_split(candidates, step, current, calm_steps, here)
    own = with_split(candidates, here or problem.num_rollout)
    decision = _choose(own, step, current, calm_steps, only)
    # On devices of their own the stages of an asynchronous or streaming run work at once.
    at_once = problem.num_rollout and max(work.batches, work.parts) > 1
    at_once = at_once and None not in (decision.rollout, decision.train)
    return _at_once(own, decision, step, here) if at_once else decision


# The split of the devices.


def with_split(candidates: Candidates, split: int) -> Candidates:
    """Returns the candidates with so many devices for rollouts, where that is open."""
    if not candidates.problem.splits:
        return candidates
    return dataclasses.replace(candidates, problem=candidates.problem.at(split))


def _with_best_split(
    candidates: Candidates, step: Step, current: Plans, calm_steps: int, here: int | None
) -> Decision:
    """Chooses both stages' plans with the split of the devices, which is `here` now.

    It is left as plans are. Of equal ones that is taken whose faster stage is the faster. Nothing
    is tried in another split, and the run does not wait for the programs of one.
    """
    found, error, table = list[Decision](), None, candidates.table
    if not (candidates.has_seen("rollout") and candidates.has_seen("train")):
        # The factor by which one stage differs from the model would weigh it against the other.
        table = dataclasses.replace(table, speeds={})
    for split in candidates.problem.splits:
        own = dataclasses.replace(with_split(candidates, split), table=table)
        if split != here:
            # Meshes are mostly those that ran, with more or fewer devices.
            own = dataclasses.replace(own, may_try=None, model_error=1.0)
        try:
            decision = _choose(own, step, current, calm_steps)
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
    if here not in (None, best.num_rollout):
        before = f"before: {_split_words(stays)}" if stays else "the split in use does not fit"
        whys = f"{_split_words(best)}; {before}", "with the split of the devices"
        rollout, train = (
            each and plan and each._replace(reason=f"{plan.mesh} -> {each.plan.mesh} ({why})")
            for each, plan, why in zip((best.rollout, best.train), current, whys, strict=True)
        )
        found[found.index(best)] = best = best._replace(
            rollout=rollout or best.rollout, train=train or best.train
        )
    return best._replace(splits=(best, *(each for each in found if each is not best)))


def _at_once(candidates: Candidates, decision: Decision, step: Step, here: int | None) -> Decision:
    """Returns the decision with the seconds of a step whose stages work at the same time.

    Live episodes move with their pages to another split than `here`. Example: 4 s of rollout, 3 s
    of training and 1 s of new weights, for which both wait, are a step of 5 s.
    """
    rollout, train, problem = decision.rollout, decision.train, candidates.problem
    assert rollout is not None and train is not None
    mesh, move_s = rollout.plan.mesh, decision.cost_s - decision.seconds
    if here not in (None, mesh.num_devices):
        # The weights beside the pages arrive in any case.
        cache_bytes = rollout.plan.pages * problem.page_bytes(mesh)
        pages_s = problem.relocate_s(mesh, cache_bytes) - problem.relocate_s(mesh, 0)
        move_s += pages_s / step.lasts
    step_s = max(rollout.seconds, train.seconds) + problem.publish_s(mesh)
    return decision._replace(seconds=step_s, cost_s=step_s + move_s)


def _split_words(decision: Decision) -> str:
    """Returns "6 play (rollout 2.00 s, training 3.00 s)"."""
    rollout_s, train_s = (choice.seconds for choice in decision.choices)
    return f"{decision.num_rollout} play (rollout {rollout_s:.3g} s, training {train_s:.3g} s)"


# Both stages' plans on given devices.


def _choose(
    candidates: Candidates,
    step: Step,
    current: Plans,
    calm_steps: int,
    only: Stage | None = None,
) -> Decision:
    """Chooses as `choose_plans` with a given split of the devices."""
    both = _pairs if candidates.problem.plays else _trainings
    pairs = {None: both, "train": _trainings, "rollout": _rollouts}[only](candidates, step, current)
    most = max(pair.kept(current) for pair in pairs)
    here = [pair for pair in pairs if most and pair.kept(current) == most]
    if only == "rollout" and not here:
        # It must move, so that the cost of a move does not count.
        pairs = [pair._replace(cost_s=pair.seconds) for pair in pairs]
    pair = _best(candidates, pairs, current)
    stays = _best(candidates, here, current) if here else pair
    if here and stays.cost_s <= (1.0 + HYSTERESIS) * pair.cost_s:
        pair = stays
    all_fit = bool(here) and most == 2 * len(stays.choices)
    if only != "rollout" and all_fit and not step.is_new:
        if only == "train" or not _may_leave(candidates, stays, pair, calm_steps):
            pair = stays

    def chosen(found: Candidate[P], before: P | None, stays: Candidate[P] | None) -> Candidate[P]:
        """Returns a stage's candidate; `stays` is that where as much stays as can."""
        seconds, num_bytes = _seconds(candidates, step, found), found.num_bytes
        num_bytes += pair.resident if found is pair.rollout else 0
        gain = _seconds(candidates, step, stays) / seconds - 1 if stays and seconds else 0.0
        return found._replace(
            num_bytes=num_bytes,
            stage=found.plan.stage,
            seconds=seconds,
            switched=before is not None and found.plan.mesh != before.mesh,
            reason=reason_of(candidates, found, before, num_bytes, stays, gain),
        )

    rollout, train = pair.rollout, pair.train
    return pair._replace(
        rollout=rollout and chosen(rollout, current.rollout, stays.rollout),
        train=train and chosen(train, current.train, stays.train),
    )


def _may_leave(candidates: Candidates, stays: Decision, pair: Decision, calm_steps: int) -> bool:
    """Returns True if plans that fit may be left now for those of `pair`.

    Before a window of steps a plan may be left when it was observed just often enough to be
    trusted, or for a trial. The run does not wait for the program of a mesh that never ran.
    """
    both = zip(stays.choices, pair.choices, strict=True)
    moved = [(old, new) for old, new in both if old.plan.mesh != new.plan.mesh]
    early = any(
        old.num_speeds >= TRUSTED and (new.is_trial or old.num_speeds < KEPT) for old, new in moved
    )
    waits = any(candidates.must_wait(new.plan, new.tokens) for _, new in moved)
    return (calm_steps >= WINDOW or early) and not waits


def _best(candidates: Candidates, pairs: Sequence[Decision], current: Plans) -> Decision:
    """Returns the pair of least cost; of ties without offload, with most plans and memory kept."""
    least_s = min(pair.cost_s for pair in pairs)
    ties = [pair for pair in pairs if pair.cost_s <= (1.0 + TIE) * least_s]

    def rank(pair: Decision) -> tuple[int, int, float]:
        rollout, train = pair.rollout, pair.train
        playing = pair.resident + (rollout.wanted_bytes if rollout else 0)
        fullest = max(playing, train.num_bytes if train else 0)
        offloads = rollout is not None and rollout.plan.offload
        offloads += train is not None and train.plan.remat == "offload"
        return offloads, -pair.kept(current), max(fullest, AMPLE * candidates.problem.budget)

    return min(ties, key=rank)


def _pairs(candidates: Candidates, step: Step, current: Plans) -> list[Decision]:
    """Returns training plans that fit, each with the best rollouts beside it, least cut first.

    Those that cannot be the fastest are left out, but for those on the mesh in use, and for those
    slower by the hysteresis unless both plans in use fit.
    """
    problem, before = candidates.problem, current.train
    trains, found = list[tuple[bool, int, Candidate, Decision]](), list[tuple[int, Decision]]()
    for index, alone in enumerate(_trains(candidates, step, before, problem.budget)):
        (train,) = alone.choices
        trains.append((before is None or train.plan.mesh != before.mesh, index, train, alone))
    plans = [train.plan for *_, train, _ in trains]
    residents = {key for plan in plans for key in _residents(candidates, plan, step.length)}

    def best(resident: int, offload: bool) -> list[Decision]:
        """Returns the best rollout beside so many bytes, and that on the mesh in use."""
        pairs = _rollouts_beside(candidates, step, current.rollout, resident, offload)
        best = [_best(candidates, pairs, Plans())] if pairs else []
        return best + [p for p in pairs if p is not best[0] and p.kept(Plans(current.rollout))]

    beside = _search(best, residents)
    least_s, margin = math.inf, TIE if before is None else HYSTERESIS
    # Those on the mesh in use first.
    by_cost = sorted(trains, key=lambda each: (each[0], each[3].cost_s))
    for is_elsewhere, index, train, alone in by_cost:
        for resident, offload in _residents(candidates, train.plan, step.length):
            away_s = problem.offload_s(train.plan.mesh) if offload else 0.0
            left_s = (1.0 + margin) * least_s - alone.cost_s - away_s
            for pair in beside(resident, offload, left_s if is_elsewhere else math.inf):
                cost_s = alone.cost_s + away_s + pair.cost_s
                seconds = alone.seconds + away_s + pair.seconds
                least_s = min(least_s, cost_s)
                both = Decision(pair.rollout, train, seconds, cost_s, resident)
                margin = TIE if both.kept(current) == 4 else margin
                found.append((index, both))
    if not found:
        raise step_too_small(candidates, step.max_tokens, step.length, sorted(residents))
    # Of equally good pairs the first is taken.
    return [pair for _, pair in sorted(found, key=lambda each: each[0])]


def _search(
    best: Callable[[int, bool], list[Decision]], residents: Iterable[tuple[int, bool]]
) -> Callable[[int, bool, float], list[Decision]]:
    """Returns the best rollouts beside each of `residents`, bytes of a trainer, in few calls.

    The more a trainer leaves on the device, the fewer rollouts fit. So between two numbers of bytes
    with the same best rollouts there are no others. And they are no faster than those beside fewer
    bytes: where these take more than the seconds given, none are returned.
    """
    known: dict[bool, list[tuple[int, list[Decision]]]] = {False: [], True: []}

    def beside(resident: int, offload: bool, most_s: float = math.inf) -> list[Decision]:
        those = known[offload]
        place = bisect.bisect_left(those, resident, key=lambda each: each[0])
        below, above = those[max(0, place - 1) : place], those[place : place + 1]
        if above and above[0][0] == resident:
            return above[0][1]
        if below and min((pair.cost_s for pair in below[0][1]), default=math.inf) > most_s:
            return []
        if below and above:
            (_, fewer), (_, more) = *below, *above
            if [pair.rollout for pair in fewer] == [pair.rollout for pair in more]:
                return [pair._replace(resident=resident) for pair in more]
        those.insert(place, (resident, best(resident, offload)))
        return those[place][1]

    for offload in (False, True):
        own = sorted(key for key in residents if key[1] == offload)
        for key in own[:1] + own[-1:]:
            beside(*key)
    return beside


def _trainings(candidates: Candidates, step: Step, current: Plans) -> list[Decision]:
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
) -> list[Decision]:
    """Returns the training plans that fit into `free` bytes, with their seconds."""
    pairs = []
    for found in candidates.trains_that_fit(step.length, free, current):
        seconds = _seconds(candidates, step, found)
        cost_s, mesh = seconds + _compile_s(step, found, current), found.plan.mesh
        if current is not None and mesh != current.mesh:
            cost_s += candidates.problem.move_s(mesh) / step.lasts
        pairs.append(Decision(None, found, seconds, cost_s))
    return pairs


def _rollouts(candidates: Candidates, step: Step, current: Plans) -> list[Decision]:
    """Returns the rollouts that fit beside the trainer in use, if any, each with its move."""
    train, offload = current.train, current.rollout is not None and current.rollout.offload
    every = candidates.problem.train_plans(step.length) if train else []
    plans = [plan for plan in every if train and plan.mesh == train.mesh] or [train]
    resident = min(candidates.resident_bytes(p, offload, step.length) if p else 0 for p in plans)
    if pairs := _rollouts_beside(candidates, step, current.rollout, resident, offload, alone=True):
        return pairs
    found = _plans(candidates, step, candidates.problem.budget - resident, offload, current.rollout)
    raise too_small(candidates, "a rollout", found, step.max_tokens, resident)


def _rollouts_beside(
    candidates: Candidates,
    step: Step,
    current: RolloutPlan | None,
    resident: int,
    offload: bool,
    *,
    alone: bool = False,
) -> list[Decision]:
    """Returns a plan of each rollout mesh that fits beside `resident` bytes.

    In a step it waits for new weights, and costs its program's wait; `alone` it costs its move.
    """
    problem, pairs = candidates.problem, list[Decision]()
    free = problem.budget - resident
    for found in _plans(candidates, step, free, offload, current):
        if found.fits(free):
            mesh, seconds = found.plan.mesh, _seconds(candidates, step, found)
            seconds += 0.0 if alone else problem.publish_s(mesh)
            cost_s = seconds if alone else seconds + _compile_s(step, found, current)
            if alone and current is not None and mesh != current.mesh:
                cost_s += step.move_s(mesh)
            pairs.append(Decision(found, None, seconds, cost_s, resident))
    return pairs


def _plans(
    candidates: Candidates, step: Step, free: float, offload: bool, current: RolloutPlan | None
) -> list[Candidate[RolloutPlan]]:
    """Returns a plan of each rollout mesh in `free` bytes, for live episodes their moves."""
    sizes = (step.max_tokens, step.cache_tokens, free)
    if current is None or not step.keeps_slots:
        return candidates.rollouts(*sizes, offload=offload)
    spans, is_across = candidates.problem.spans, candidates.problem.spans(current.mesh)
    moves = candidates.moves(current._replace(offload=offload), *sizes)
    return [found for found in moves if spans(found.plan.mesh) == is_across]


def _seconds(candidates: Candidates, step: Step, found: Candidate) -> float:
    """Returns the seconds of a stage: of updates, on padding rows too, or of sampling."""
    plan, work = found.plan, candidates.problem.work
    if isinstance(plan, TrainPlan):
        rows = candidates.problem.packed_rows(step.length, candidates.train_tokens, plan.mesh)
        return rows * step.length * work.num_batches * work.epochs / found.tokens_per_s
    full_s = step.rollout_tokens / found.tokens_per_s
    if step.live is None:
        return full_s
    live = max(1, min(step.live, plan.num_slots))
    token_s = candidates.live_token_s(plan, live, step.max_tokens)
    return max(full_s, step.rollout_tokens / live * token_s)


def _residents(candidates: Candidates, plan: TrainPlan, length: int) -> list[tuple[int, bool]]:
    """Returns the bytes without offload, and with it where the hosts' memory holds that."""
    problem = candidates.problem
    offloads = problem.can_offload and not problem.num_rollout
    offloads = offloads and problem.hosts_hold(problem.moments_bytes(plan.mesh))
    both = (False, True) if offloads else (False,)
    return [(candidates.resident_bytes(plan, offload, length), offload) for offload in both]


def _compile_s(step: Step, new: Candidate[P], current: P | None) -> float:
    """Returns the seconds a step of waiting for a program, which a plan that ran has already."""
    stays = current is not None and key_of(new.plan, 0) == key_of(current, 0)
    return 0.0 if new.num_speeds or (stays and not step.is_new) else step.compile_s / step.lasts
