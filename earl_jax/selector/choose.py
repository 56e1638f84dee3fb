# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The choice of plans, one for a rollout and one for training. Pure.

Candidates are all meshes in all ways. Those count whose bytes fit the budget (XLA's where a program
was compiled, else computed) and that have not run out of memory before. Of these the fastest step
is taken, by speeds that were observed where there are any, else by the speed model, corrected by
what was observed of the same mesh or stage. Both stages are one choice, because a device holds
both: what the trainer keeps there during a rollout leaves less room for the KV cache.

The plans in use stay while they fit, unless another pair's step is shorter by more than the
hysteresis with its switch paid for.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from earl_jax.selector.estimate import Estimator
from earl_jax.selector.plans import Plans, RolloutPlan, TrainPlan, rollout_size, train_size
from earl_jax.selector.problem import Problem
from earl_jax.selector.table import ThroughputTable
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import WINDOW, Load

P = TypeVar("P", RolloutPlan, TrainPlan)
# Steps so near to each other are equally fast; of such pairs the one that leaves most memory wins.
TIE = 0.02


class BudgetTooSmall(ValueError):
    """No plan fits the budget; the message says the smallest budget that would do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The work of a step to come.

    Attributes:
        max_tokens: tokens that the rollout's episodes may come to (a context bucket).
        length: tokens of a training row (a context bucket).
        cache_tokens: tokens that the KV cache should hold over all row shards; None: all slots'
            episodes at their longest.
        rollout_tokens: tokens to be sampled.
        lasts: steps that a choice lasts, over which a switch is spread.
        is_new: contexts were never so long, so that other programs are needed anyway.
        load: recent steps, for the words; None at the start.
    """

    max_tokens: int
    length: int
    cache_tokens: int | None
    rollout_tokens: int
    lasts: int
    is_new: bool = False
    load: Load | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate(Generic[P]):
    """A plan with its bytes per device, its own program's alone, and its speed.

    `is_exact` bytes are XLA's; a speed `is_observed`, or the speed model's. `failed` says why it
    ran out of memory before, "" where it did not.
    """

    plan: P
    num_bytes: int
    is_exact: bool
    tokens_per_s: float
    is_observed: bool
    failed: str = ""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What was chosen for a step; a stage that was not asked for is None."""

    rollout: Choice[RolloutPlan] | None
    train: Choice[TrainPlan] | None
    seconds: float

    @property
    def choices(self) -> list[Choice]:
        """The choices of the stages that were asked for."""
        return [choice for choice in (self.rollout, self.train) if choice is not None]


class _Pair(NamedTuple):
    """A trainer, beside it a rollout, and what the step costs; the switch is spread in `cost_s`."""

    rollout: Candidate[RolloutPlan] | None
    train: Candidate[TrainPlan] | None
    resident: int
    cost_s: float
    step_s: float

    @property
    def offloads(self) -> bool:
        """Whether moments wait in host memory meanwhile."""
        return self.rollout is not None and self.rollout.plan.offload

    @property
    def fullest(self) -> int:
        """Bytes of the device in the fuller of the two stages."""
        rollout = self.resident + (self.rollout.num_bytes if self.rollout else 0)
        return max(rollout, self.train.num_bytes if self.train else 0)


@dataclasses.dataclass(frozen=True)
class Chooser:
    """The candidates of one problem by one table; computed bytes are taken `caution` times."""

    problem: Problem
    table: ThroughputTable
    caution: float = 1.0

    @functools.cached_property
    def _estimate(self) -> Estimator:
        return Estimator(self.problem, self.table, self.caution)

    # Candidates.

    def train_candidates(self, length: int) -> list[Candidate[TrainPlan]]:
        """Returns every way to train on rows of so many tokens."""
        estimate, rows = self._estimate, self.problem.work.num_rows
        found = []
        for plan in self.problem.train_plans(length):
            num_bytes, is_exact = estimate.update_bytes(plan, length)
            size = train_size(plan, length, rows)
            found.append(
                Candidate(
                    plan=plan,
                    num_bytes=num_bytes,
                    is_exact=is_exact,
                    tokens_per_s=estimate.update_speed(plan, length),
                    is_observed=estimate.is_update_observed(plan, length),
                    failed=self.table.failure_of("train", plan.mesh, size),
                )
            )
        return found

    def rollout_candidates(
        self,
        max_tokens: int,
        cache_tokens: int | None,
        room: float,
        *,
        offload: bool = False,
        num_slots: int | None = None,
    ) -> list[Candidate[RolloutPlan]]:
        """Returns each mesh as a rollout would use it in `room` bytes of a device.

        With the most slots, and then the most pages up to those that are wanted, that fit; with
        the fewest of both where nothing does. With `num_slots` as many slots as given.
        """
        found = []
        for mesh in self.problem.rollout_meshes_for(max_tokens):
            if num_slots is not None and num_slots % mesh.data:
                continue
            numbers = self.problem.slot_numbers(mesh) if num_slots is None else [num_slots]
            for slots in numbers:
                plan = RolloutPlan(mesh, slots, 0, offload)
                candidate = self._rollout(plan, max_tokens, cache_tokens, room)
                if not candidate.failed and candidate.num_bytes <= room:
                    break
            found.append(candidate)
        return found

    def _rollout(
        self, bare: RolloutPlan, max_tokens: int, cache_tokens: int | None, room: float
    ) -> Candidate[RolloutPlan]:
        """A plan's slots with as many pages as are wanted and fit, at least one episode's."""
        problem, estimate, mesh = self.problem, self._estimate, bare.mesh
        least = problem.least_pages(max_tokens)
        dense = problem.dense_pages(mesh, bare.num_slots, max_tokens)
        wanted = dense
        if cache_tokens is not None:
            tokens = cache_tokens / problem.work.page_size
            # Half of each episode's last page is empty.
            wanted = math.ceil(tokens / mesh.data + bare.num_slots / mesh.data / 2)
        wanted = max(least, min(wanted, dense))
        empty, _ = estimate.round_bytes(bare, max_tokens)
        page_bytes = problem.page_bytes(mesh)
        most = wanted if math.isinf(room) else int((room - empty) // page_bytes)
        plan = bare._replace(pages=max(least, min(wanted, most)))
        num_bytes, is_exact = estimate.round_bytes(plan, max_tokens)
        size = rollout_size(plan, max_tokens, problem.work.page_size)
        failed = self.table.failure_of("rollout", mesh, size)
        return Candidate(
            plan=plan,
            num_bytes=num_bytes,
            is_exact=is_exact,
            tokens_per_s=estimate.round_speed(plan, max_tokens, wanted),
            is_observed=estimate.is_round_observed(plan, max_tokens),
            failed=failed,
        )

    # Choices.

    def step(self, step: Step, current: Plans, calm_steps: int = WINDOW) -> Decision:
        """Chooses both stages' plans for a step.

        Plans that fit are left only when they have been in use for a window of steps (until then
        the load is in part other plans'), unless contexts are new.

        Raises:
            BudgetTooSmall: no pair fits.
        """
        pairs = self._pairs(step, current)
        if not pairs:
            raise BudgetTooSmall(self._too_small(step, self.train_candidates(step.length)))
        best = _best(pairs)
        here = [pair for pair in pairs if _is_here(pair, current)]
        stays = _best(here) if here else None
        if stays is not None:
            gain = stays.cost_s / best.cost_s - 1.0
            calm = step.is_new or calm_steps >= WINDOW
            if gain <= self.problem.hysteresis or not calm:
                best = stays
        return self._decide(step, best, stays, current)

    def _pairs(self, step: Step, current: Plans) -> list[_Pair]:
        """Returns each training mesh that fits with the best rollouts beside it."""
        problem, pairs = self.problem, []
        # By what a trainer leaves on a device: the best rollout, and that on the mesh in use.
        beside: dict[tuple[int, bool], list[Candidate[RolloutPlan]]] = {}
        train_tokens = problem.work.num_rows * step.length * problem.work.epochs
        fitting = self._that_fit(self.train_candidates(step.length))
        for train in _fastest_by_mesh(fitting, current.train):
            mesh = train.plan.mesh
            switches = current.train is not None and mesh != current.train.mesh
            switch_s = problem.move_s(mesh) / step.lasts if switches else 0.0
            for offload in (False, True) if self._may_offload(mesh) else (False,):
                resident = problem.trainer_bytes(mesh, offload)
                key = (resident, offload)
                if key not in beside:
                    beside[key] = self._beside(step, resident, offload, current.rollout)
                train_s = train_tokens / train.tokens_per_s
                train_s += problem.offload_s(mesh) if offload else 0.0
                for rollout in beside[key]:
                    rollout_s = step.rollout_tokens / rollout.tokens_per_s
                    step_s = train_s + rollout_s + problem.publish_s(rollout.plan.mesh)
                    pairs.append(_Pair(rollout, train, resident, step_s + switch_s, step_s))
        return pairs

    def _beside(
        self, step: Step, resident: int, offload: bool, current: RolloutPlan | None
    ) -> list[Candidate[RolloutPlan]]:
        """Returns the best rollout beside `resident` bytes, and that on the mesh in use."""
        room = self.problem.budget - resident
        found = self.rollout_candidates(step.max_tokens, step.cache_tokens, room, offload=offload)
        fitting = [c for c in found if not c.failed and c.num_bytes <= room]
        if not fitting:
            return []
        top = max(candidate.tokens_per_s for candidate in fitting)
        ties = [c for c in fitting if (1.0 + TIE) * c.tokens_per_s >= top]
        best = min(ties, key=lambda candidate: candidate.num_bytes)
        here = [c for c in fitting if current and c.plan.mesh == current.mesh and c is not best]
        return [best, *here]

    def training(self, step: Step, current: TrainPlan | None) -> Decision:
        """Chooses a plan for training alone; the plan in use stays unless it must be left.

        Or unless rows are longer than ever: then other programs are needed anyway.

        Raises:
            BudgetTooSmall: no plan fits.
        """
        candidates = self.train_candidates(step.length)
        fitting = self._that_fit(candidates)
        if not fitting:
            raise BudgetTooSmall(self._too_small(step, candidates))
        tokens = self.problem.work.num_rows * step.length * self.problem.work.epochs
        pairs = []
        for candidate in _fastest_by_mesh(fitting, current):
            seconds = tokens / candidate.tokens_per_s
            moves = current is not None and candidate.plan.mesh != current.mesh
            switch_s = self.problem.move_s(candidate.plan.mesh) / step.lasts if moves else 0.0
            pairs.append(_Pair(None, candidate, 0, seconds + switch_s, seconds))
        best, stays = _best(pairs), None
        if current is not None:
            here = [p for p in pairs if p.train and p.train.plan == current]
            stays = here[0] if here else None
        if stays is not None:
            gain = stays.cost_s / best.cost_s - 1.0
            best = best if step.is_new and gain > self.problem.hysteresis else stays
        return self._decide(step, best, stays, Plans(train=current))

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
        resident = problem.trainer_bytes(trainer, offload)
        room = problem.budget - resident
        slots = current.num_slots if current and keeps_slots else None
        candidates = self.rollout_candidates(
            step.max_tokens, step.cache_tokens, room, offload=offload, num_slots=slots
        )
        fitting = [c for c in candidates if not c.failed and c.num_bytes <= room]
        if not fitting:
            raise BudgetTooSmall(self._rollout_too_small(step, candidates, resident))

        def seconds(candidate: Candidate[RolloutPlan]) -> float:
            if live is None:
                return step.rollout_tokens / candidate.tokens_per_s
            rounds = step.rollout_tokens / problem.work.burst / live
            return rounds * self._estimate.live_round_s(candidate.plan, live, step.max_tokens)

        pairs = []
        for candidate in fitting:
            moves = current is not None and candidate.plan.mesh != current.mesh
            own_s = seconds(candidate)
            cost_s = own_s
            if moves:
                cost_s += math.inf if move_s is None else move_s(candidate.plan.mesh)
            pairs.append(_Pair(candidate, None, resident, cost_s, own_s))
        here = [p for p in pairs if current and p.rollout and p.rollout.plan.mesh == current.mesh]
        stays = here[0] if here else None
        if stays is None:
            # It must move: which way takes least does not depend on what every move costs.
            pairs = [pair._replace(cost_s=pair.step_s) for pair in pairs]
        best = _best(pairs)
        if stays is not None and stays.cost_s <= (1.0 + problem.hysteresis) * best.cost_s:
            best = stays
        return self._decide(step, best, stays, Plans(rollout=current))

    def _may_offload(self, mesh: MeshShape) -> bool:
        problem = self.problem
        if not problem.can_offload or problem.num_rollout:
            return False
        hardware = problem.hardware
        devices = min(hardware.devices_a_host, hardware.num_devices)
        held = devices * problem.moments_bytes(mesh) + problem.preempted_bytes
        return held <= hardware.host_memory_bytes

    def _that_fit(self, candidates: Iterable[Candidate[P]]) -> list[Candidate[P]]:
        budget = self.problem.budget
        return [c for c in candidates if not c.failed and c.num_bytes <= budget]

    # Words.

    def _decide(self, step: Step, pair: _Pair, stays: _Pair | None, current: Plans) -> Decision:
        work, gain = self.problem.work, stays.cost_s / pair.cost_s - 1.0 if stays else 0.0
        rollout = train = None
        if pair.rollout:
            rollout = self._choice(
                "rollout",
                pair.rollout,
                current.rollout,
                step.max_tokens,
                pair.rollout.num_bytes + pair.resident,
                step.rollout_tokens / pair.rollout.tokens_per_s,
                gain,
                stays is not None,
                step.load,
            )
        if pair.train:
            train = self._choice(
                "train",
                pair.train,
                current.train,
                step.length,
                pair.train.num_bytes,
                work.num_rows * step.length * work.epochs / pair.train.tokens_per_s,
                gain,
                stays is not None,
                step.load,
            )
        return Decision(rollout=rollout, train=train, seconds=pair.step_s)

    def _choice(
        self,
        stage: str,
        chosen: Candidate,
        current: RolloutPlan | TrainPlan | None,
        tokens: int,
        num_bytes: int,
        seconds: float,
        gain: float,
        fits_here: bool,
        load: Load | None,
    ) -> Choice:
        """One stage's choice with its reason."""
        plan, budget = chosen.plan, self.problem.budget_bytes
        of = "" if budget is None else f" of {size_words(budget)}"
        known = "observed" if chosen.is_observed else "computed"
        about = "" if chosen.is_exact else "about "
        facts = (
            f"context {tokens}, {about}{size_words(num_bytes)}{of}/device, "
            f"{chosen.tokens_per_s:,.0f} tokens/s {known}"
        )
        if load is not None:
            facts += f"; longest episode {load.context_tokens_max} tokens"
        switched = current is not None and plan.mesh != current.mesh
        if current is None:
            reason = f"starts on {plan.words()} ({facts})"
        elif not switched:
            reason = f"stays on {plan.words(current)} ({facts})"  # pyright: ignore[reportArgumentType]
        elif fits_here:
            reason = f"{current.mesh} -> {plan.words()} (step {gain:.0%} shorter; {facts})"
        else:
            why = self._why_left(current, tokens)
            reason = f"{current.mesh} -> {plan.words()} ({why}; {facts})"
        return Choice(
            stage=stage,
            plan=plan,
            tokens=tokens,
            num_bytes=num_bytes,
            is_exact=chosen.is_exact,
            seconds=seconds,
            switched=switched,
            reason=reason,
        )

    def _why_left(self, plan: RolloutPlan | TrainPlan, tokens: int) -> str:
        """Says why a plan in use cannot stay."""
        problem, work = self.problem, self.problem.work
        if isinstance(plan, TrainPlan):
            stage, size = "train", train_size(plan, tokens, work.num_rows)
        else:
            stage, size = "rollout", rollout_size(plan, tokens, work.page_size)
        if failed := self.table.failure_of(stage, plan.mesh, size):
            return f"{plan.mesh} {failed}"
        if isinstance(plan, TrainPlan):
            found = [c for c in self.train_candidates(tokens) if c.plan.mesh == plan.mesh]
        else:
            found = [
                c
                for c in self.rollout_candidates(tokens, None, 0.0, offload=plan.offload)
                if c.plan.mesh == plan.mesh
            ]
        if not found:
            return f"{plan.mesh} is no candidate for context {tokens}"
        least = min(found, key=lambda candidate: candidate.num_bytes)
        if least.failed:
            return f"{plan.mesh} {least.failed}"
        if least.num_bytes > problem.budget:
            return f"context {tokens} needs {size_words(least.num_bytes)}/device on {plan.mesh}"
        return f"{plan.mesh} leaves the other stage too little memory"

    def _too_small(self, step: Step, trains: Sequence[Candidate[TrainPlan]]) -> str:
        """The message where no pair fits."""
        trainers = [c for c in trains if not c.failed]
        if not trainers:
            return _all_failed("train", trains, step.length)
        update = min(c.num_bytes for c in trainers)
        if update > self.problem.budget:
            least = min(trainers, key=lambda c: c.num_bytes)
            return self._more("training", step.length, update, least)
        residents = {
            (self.problem.trainer_bytes(c.plan.mesh, offload), offload)
            for c in self._that_fit(trains)
            for offload in (False, self._may_offload(c.plan.mesh))
        }
        found = [
            (candidate.num_bytes + resident, candidate)
            for resident, offload in residents
            for candidate in self.rollout_candidates(
                step.max_tokens, step.cache_tokens, 0.0, offload=offload
            )
        ]
        if all(candidate.failed for _, candidate in found):
            return _all_failed("rollout", [candidate for _, candidate in found], step.max_tokens)
        need, least = min(
            ((need, c) for need, c in found if not c.failed), key=lambda pair: pair[0]
        )
        return self._more("a rollout beside the trainer", step.max_tokens, need, least)

    def _rollout_too_small(
        self, step: Step, candidates: Sequence[Candidate[RolloutPlan]], resident: int
    ) -> str:
        possible = [c for c in candidates if not c.failed]
        if not possible:
            return _all_failed("rollout", candidates, step.max_tokens)
        least = min(possible, key=lambda c: c.num_bytes)
        need = least.num_bytes + resident
        return self._more("a rollout", step.max_tokens, need, least)

    def _more(self, what: str, tokens: int, need: int, least: Candidate) -> str:
        budget = self.problem.budget_bytes or 0
        about = "" if least.is_exact else "about "
        return (
            f"config.selector.budget_bytes_per_device is {budget}, and no mesh for {what} fits it "
            f"at a context of {tokens} tokens; the smallest budget that would do is {about}{need} "
            f"(mesh {least.plan.mesh}), {size_words(need - budget)} more. Raise the budget, use "
            "more devices, or lower config.rollout.num_slots or the model's size"
        )


def _all_failed(stage: str, candidates: Sequence[Candidate], tokens: int) -> str:
    tried = "; ".join(f"{c.plan.words()} {c.failed}" for c in candidates[:4])
    return (
        f"no mesh for {stage} at a context of {tokens} tokens: {tried}. Use more devices, or "
        "devices with more memory, or lower config.rollout.num_slots or the model's size"
    )


def _fastest_by_mesh(
    candidates: Iterable[Candidate[TrainPlan]], current: TrainPlan | None
) -> list[Candidate[TrainPlan]]:
    """Returns the fastest of each mesh, and the plan in use.

    Of a mesh's ways the first of those that are faster by no more than a tie.
    """
    best: dict[MeshShape, Candidate[TrainPlan]] = {}
    here = []
    for candidate in candidates:
        known = best.get(candidate.plan.mesh)
        if known is None or candidate.tokens_per_s > (1.0 + TIE) * known.tokens_per_s:
            best[candidate.plan.mesh] = candidate
        if candidate.plan == current:
            here.append(candidate)
    return list(dict.fromkeys([*best.values(), *here]))


def _best(pairs: Sequence[_Pair]) -> _Pair:
    """Returns the pair of least cost; of ties the one that leaves most memory, then the first.

    Of ties no moments are offloaded where there is room for them.
    """
    least = min(pair.cost_s for pair in pairs)
    ties = [pair for pair in pairs if pair.cost_s <= (1.0 + TIE) * least]
    return min(ties, key=lambda pair: (pair.offloads, pair.fullest))


def _is_here(pair: _Pair, current: Plans) -> bool:
    """Whether a pair trains by the plan in use and plays on the mesh in use, in no fewer slots."""
    rollout, train = current
    if rollout is None or train is None or pair.rollout is None or pair.train is None:
        return False
    plan = pair.rollout.plan
    return (
        pair.train.plan == train
        and plan.mesh == rollout.mesh
        and plan.num_slots >= rollout.num_slots
    )


def size_words(num_bytes: float) -> str:
    """Returns bytes for people: "1.50 GiB", "20.1 MiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return (
                f"{num_bytes / size:.3g} {unit}"
                if num_bytes < 1000 * size
                else (f"{num_bytes / size:,.0f} {unit}")
            )
    return f"{num_bytes:.0f} bytes"
