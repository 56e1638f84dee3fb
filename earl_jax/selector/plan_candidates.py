# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Candidates: every plan of a stage with its bytes and its speed. Pure.

Where bytes and speeds come from, and which observed speeds are doubted, is in
docs/design/selector.md.
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from earl_jax.selector.plans import Plan, RolloutPlan, Stage, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.roofline import MODEL_ERROR
from earl_jax.selector.table import Entry, ThroughputTable, key_of, parse_key
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import Load

P = TypeVar("P", RolloutPlan, TrainPlan)
# Speeds within this fraction are equal.
TIE = 0.02
# Without a known budget a pool has so many times the pages that are wanted.
MOST_SPARE = 4
# Share of the remaining memory that goes to pages.
FILLED = 0.9
# Meshes that never ran and may be tried, of each stage at each context bucket.
TRIALS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate(Generic[P]):
    """A plan with the bytes per device of its own program and its speed.

    `is_exact` bytes are XLA's. The speed was observed `num_speeds` times at this context bucket, or
    is computed; with `is_trial` it is the most that the model's error allows. `failed` is how the
    plan ran out of memory before, "" where it did not.
    """

    plan: P
    num_bytes: int
    is_exact: bool
    tokens_per_s: float
    num_speeds: int = 0
    is_trial: bool = False
    failed: str = ""

    def fits(self, free: float) -> bool:
        """Returns True if it fits into `free` bytes of a device and has not failed."""
        return not self.failed and self.num_bytes <= free


class _Bare(NamedTuple):
    """A rollout plan without pages, with all its slots at work.

    `full` are its computed tokens/s, `page_bytes` those of a page on a device, `dense` the pages of
    a row shard with which all slots hold an episode as long as the context bucket.
    """

    candidate: Candidate[RolloutPlan]
    full: float
    page_bytes: int
    dense: int


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The candidates of one problem by one table.

    Computed bytes count `caution` times, but for those of pages, which are exact.
    `may_try(plan, tokens)` is True for a plan whose mesh may be tried out if it never ran; None
    where none may. Episodes are expected to be as in `load`; None: all as long as the context
    bucket, and as many tokens are appended as the problem says.
    """

    problem: Problem
    table: ThroughputTable = ThroughputTable()
    caution: float = 1.0
    may_try: Callable[[Plan, int], bool] | None = None
    load: Load | None = None

    @property
    def train_tokens(self) -> int | None:
        """The tokens of a training batch's episodes; None: all are as long as the bucket."""
        load = self.load
        return load and math.ceil(self.problem.work.num_rows * load.context_tokens_mean)

    def train(self, length: int) -> list[Candidate[TrainPlan]]:
        """Returns every plan for rows of so many tokens."""
        return [self._train(plan, length) for plan in self.problem.train_plans(length)]

    def trains_that_fit(
        self, length: int, free: float, current: TrainPlan | None
    ) -> list[Candidate[TrainPlan]]:
        """Returns the plans for rows of so many tokens that fit into `free` bytes of a device.

        Of a mesh's plans with the fewest micro-batches that fit, by each remat policy, that is
        the fastest one; more are slower. The plan in use is there too, and where a rollout must fit
        beside an update all that fit.
        """
        found, stays = [], self.problem.rollout_stays
        every = self.problem.train_plans(length)
        for mesh, plans in itertools.groupby(every, lambda plan: plan.mesh):
            rates_all = stays or current is not None and mesh == current.mesh
            fitting = list[Candidate[TrainPlan]]()
            for plan in plans:
                is_first = rates_all or all(c.plan.remat != plan.remat for c in fitting)
                if is_first and self.update_bytes(plan, length)[0] <= free:
                    candidate = self._train(plan, length)
                    fitting += [] if candidate.failed else [candidate]
            best = fitting[:1]
            for candidate in fitting:
                if candidate.tokens_per_s > (1.0 + TIE) * best[0].tokens_per_s:
                    best = [candidate]
            here = [c for c in fitting if stays or c.plan == current]
            found += dict.fromkeys([*best, *here])
        return found

    def rollouts(
        self,
        max_tokens: int,
        cache_tokens: int | None,
        free: float,
        *,
        offload: bool = False,
        num_slots: int | None = None,
    ) -> list[Candidate[RolloutPlan]]:
        """Returns one plan of each mesh for a rollout in `free` bytes of a device.

        It has the most slots, and then the most pages up to those that are wanted, that fit; the
        fewest of both where nothing does. With `num_slots` it has as many slots as given.
        """
        found = []
        for mesh in self.problem.meshes("rollout", max_tokens):
            if num_slots is not None and num_slots % mesh.data:
                continue
            numbers = self.problem.slot_numbers(mesh) if num_slots is None else [num_slots]
            for slots in numbers:
                plan = RolloutPlan(mesh, slots, 0, offload)
                candidate = self._rollout(plan, max_tokens, cache_tokens, free)
                if candidate.fits(free):
                    break
            found.append(candidate)
        return found

    def filled(
        self, rollout: Candidate[RolloutPlan], max_tokens: int, free: float
    ) -> Candidate[RolloutPlan]:
        """Returns a chosen rollout with as many pages as could be of use, if they fit.

        So the pool need not grow, for which programs would be compiled. Without a budget there are
        MOST_SPARE times as many.
        """
        problem, plan = self.problem, rollout.plan
        dense = problem.dense_pages(plan.mesh, plan.num_slots, max_tokens)
        page_bytes = problem.page_bytes(plan.mesh)
        most = MOST_SPARE * plan.pages
        if not math.isinf(free):
            most = plan.pages + int(FILLED * (free - rollout.num_bytes) // page_bytes)
        plan = plan._replace(pages=max(plan.pages, min(dense, most)))
        if self.table.failure_of(plan, problem.size_of(plan, max_tokens)):
            return rollout
        num_bytes = rollout.num_bytes + (plan.pages - rollout.plan.pages) * page_bytes
        return dataclasses.replace(rollout, plan=plan, num_bytes=num_bytes)

    def in_use(self, plan: Plan, tokens: int, free: float) -> Candidate | None:
        """Returns the candidate of a plan in use; None where its mesh is no candidate.

        A rollout has the pages that fit into `free` bytes, or where nothing does the fewest slots.
        """
        if plan.mesh not in self.problem.all_meshes(plan.stage, tokens):
            return None
        if isinstance(plan, TrainPlan):
            return self._train(plan, tokens)
        slots = plan.num_slots if free else self.problem.slot_numbers(plan.mesh)[-1]
        return self._rollout(plan._replace(num_slots=slots, pages=0), tokens, None, free)

    def live_token_s(self, plan: RolloutPlan, live: int, max_tokens: int) -> float:
        """Returns the seconds of a token of each of `live` episodes, fewer than the slots."""
        full = self._full_speed(plan, max_tokens)
        speed, _ = self._speed(plan, max_tokens, full)
        slots, appended = plan.num_slots, self._appended
        alone_s = self.problem.live_token_s(plan.mesh, slots, live, max_tokens, appended)
        return alone_s * full / speed

    def seen(self, stage: Stage) -> Collection[MeshShape]:
        """Returns the meshes of a stage that ran."""
        return self._factors[stage].by_mesh.keys()

    def must_wait(self, plan: Plan, tokens: int) -> bool:
        """Returns True if the run would wait for the program of a plan, which never ran."""
        if self.may_try is None or self._entry(plan, tokens).speeds:
            return False
        return not self.may_try(plan, tokens)

    def update_bytes(self, plan: TrainPlan, length: int) -> tuple[int, bool]:
        """Returns bytes per device of an update, and True if they are XLA's."""
        if known := self._entry(plan, length).program_bytes:
            return known, True
        return int(self.caution * self.problem.update_footprint(plan, length).total), False

    def resident_bytes(self, plan: TrainPlan, offload: bool, length: int) -> int:
        """Returns the bytes beside which a rollout must fit.

        They are the trainer's state; where the rollout stays on the devices during an update, all
        that the update takes.
        """
        if self.problem.rollout_stays:
            return self.update_bytes(plan, length)[0]
        return self.problem.trainer_bytes(plan.mesh, offload)

    def round_bytes(self, plan: RolloutPlan, max_tokens: int) -> tuple[int, bool]:
        """Returns bytes per device of a rollout by itself, and True if they are XLA's.

        A program's bytes but for its pages are the same with any number of pages.
        """
        bare, *_ = self._bare(plan._replace(pages=0), max_tokens)
        return bare.num_bytes + plan.pages * self.problem.page_bytes(plan.mesh), bare.is_exact

    def _train(self, plan: TrainPlan, length: int) -> Candidate[TrainPlan]:
        known, computed = self.update_bytes(plan, length), self._update_speed(plan, length)
        return self._candidate(plan, length, known, computed)

    def _candidate(
        self, plan: P, tokens: int, known: tuple[int, bool], computed: float
    ) -> Candidate[P]:
        """Returns a plan with its bytes and its speed."""
        speed, is_trial = self._speed(plan, tokens, computed)
        return Candidate(
            plan=plan,
            num_bytes=known[0],
            is_exact=known[1],
            tokens_per_s=speed,
            num_speeds=len(self._entry(plan, tokens).speeds),
            is_trial=is_trial,
            failed=self._failed(plan, tokens),
        )

    @functools.cached_property
    def _bare(self) -> "Callable[[RolloutPlan, int], _Bare]":
        """Returns what a rollout plan has with any number of pages; each is computed once."""

        def bare(plan: RolloutPlan, max_tokens: int) -> _Bare:
            problem, mesh, slots = self.problem, plan.mesh, plan.num_slots
            known = self._entry(plan, max_tokens).program_bytes
            computed = self.caution * problem.bare_footprint(mesh, slots, max_tokens).total
            full = self._full_speed(plan, max_tokens)
            return _Bare(
                self._candidate(plan, max_tokens, (known or int(computed), bool(known)), full),
                full,
                problem.page_bytes(mesh),
                problem.dense_pages(mesh, slots, max_tokens),
            )

        return functools.cache(bare)

    def _rollout(
        self, plan: RolloutPlan, max_tokens: int, cache_tokens: int | None, free: float
    ) -> Candidate[RolloutPlan]:
        """Returns a plan with as many pages as are wanted and fit, at least one episode's."""
        problem, mesh = self.problem, plan.mesh
        bare, full, page_bytes, dense = self._bare(plan, max_tokens)
        least, wanted = problem.least_pages(max_tokens), dense
        if cache_tokens is not None:
            tokens = cache_tokens / problem.work.page_size
            # Half of each episode's last page is empty.
            wanted = math.ceil(tokens / mesh.data + plan.num_slots / mesh.data / 2)
        wanted = max(least, min(wanted, dense))
        most = wanted if math.isinf(free) else int((free - bare.num_bytes) // page_bytes)
        plan = plan._replace(pages=max(least, min(wanted, most)))
        speed, rows = bare.tokens_per_s, plan.num_slots // mesh.data
        at_once = max(1, min(rows, rows * plan.pages // max(1, wanted)))
        if at_once < rows:
            speed *= self._round_speed(plan, max_tokens, at_once) / full
        return Candidate(
            plan=plan,
            num_bytes=bare.num_bytes + plan.pages * page_bytes,
            is_exact=bare.is_exact,
            tokens_per_s=speed,
            num_speeds=bare.num_speeds,
            is_trial=bare.is_trial,
            failed=self._failed(plan, max_tokens),
        )

    def _failed(self, plan: Plan, tokens: int) -> str:
        if not self.table.failures:
            return ""
        return self.table.failure_of(plan, self.problem.size_of(plan, tokens))

    def _full_speed(self, plan: RolloutPlan, max_tokens: int) -> float:
        """Returns the computed tokens/s with all slots at work."""
        return self._round_speed(plan, max_tokens, plan.num_slots // plan.mesh.data)

    def _round_speed(self, plan: RolloutPlan, max_tokens: int, rows: int) -> float:
        sizes = (plan.mesh, plan.num_slots, max_tokens, rows)
        return self.problem.round_speed(*sizes, self._appended)

    @property
    def _appended(self) -> float:
        appended = self.load and self.load.appended
        return self.problem.work.appended if appended is None else appended

    def _entry(self, plan: Plan, tokens: int) -> Entry:
        return self.table.entries.get(key_of(plan, tokens), Entry())

    def _speed(self, plan: Plan, tokens: int, computed: float) -> tuple[float, bool]:
        """Returns a plan's tokens/s, and True for those of a trial.

        A mesh that never ran counts as slower than computed by the model's error, and as faster by
        it while it may be tried.
        """
        factors, entry = self._factors[plan.stage], self._entry(plan, tokens)
        if not factors.usual:
            return computed, False
        own = factors.by_mesh.get(plan.mesh)
        if known := entry.tokens_per_s:
            usual = own or factors.usual
            doubted = not entry.is_trusted and _is_doubted(known / computed, usual)
            return computed * usual if doubted else known, False
        if own:
            return computed * factors.by_bucket.get((plan.mesh, tokens), own), False
        ran = sum(bucket == tokens for _, bucket in factors.by_bucket)
        if self.may_try is not None and ran <= TRIALS and self.may_try(plan, tokens):
            return computed * factors.usual * MODEL_ERROR, True
        return computed * factors.usual / MODEL_ERROR, False

    @functools.cached_property
    def _factors(self) -> "dict[str, _Factors]":
        """Observed by computed speeds, by stage."""
        found: dict[str, list[tuple[MeshShape, int, float, bool]]] = {"rollout": [], "train": []}
        for text, entry in self.table.entries.items():
            (plan, tokens), observed = parse_key(text), entry.tokens_per_s
            if observed and (computed := self._computed(plan, tokens)):
                factor = (plan.mesh, tokens, observed / computed, entry.is_trusted)
                found[plan.stage].append(factor)
        return {stage: _factors_of(each) for stage, each in found.items()}

    def _computed(self, plan: Plan, tokens: int) -> float | None:
        """Returns the computed speed of a plan; None for one that this problem cannot have.

        It may be one with another split of the devices, where that is chosen.
        """
        problem = self.problem.of(plan)
        if plan.mesh not in problem.all_meshes(plan.stage, tokens):
            return None
        if isinstance(plan, RolloutPlan):
            return None if plan.num_slots % plan.mesh.data else self._full_speed(plan, tokens)
        if problem.work.num_rows % plan.micro_batches:
            return None
        obstacle = problem.train_obstacle(plan.mesh, plan.micro_batches)
        return None if obstacle else self._update_speed(plan, tokens)

    def _update_speed(self, plan: TrainPlan, length: int) -> float:
        """Returns the computed tokens/s of updates on packed rows."""
        rows = self.problem.packed_rows(length, self.train_tokens, plan.mesh)
        return self.problem.update_speed(plan, length, rows)


def _is_doubted(factor: float, usual: float) -> bool:
    """Returns True if a speed that is not trusted is so low that the observation may be wrong.

    `factor` is observed by computed, `usual` what is expected. A busy machine makes a plan look
    slow; nothing makes it look fast.
    """
    return factor < usual / MODEL_ERROR


class _Factors(NamedTuple):
    """Observed by computed speeds, doubted ones left out; `usual` is the median over meshes.

    The higher one of two medians, because observed speeds are too low rather than too high. None
    where no mesh ran.
    """

    by_bucket: Mapping[tuple[MeshShape, int], float]
    by_mesh: Mapping[MeshShape, float]
    usual: float | None


def _factors_of(found: Sequence[tuple[MeshShape, int, float, bool]]) -> _Factors:
    """Returns medians of (mesh, context bucket, factor, True if trusted): trusted ones go first."""

    def medians(number: int, trusted: bool) -> dict[Any, float]:
        groups = defaultdict[Any, list[float]](list)
        for *where, factor, is_trusted in found:
            if is_trusted == trusted:
                groups[tuple(where[:number])].append(factor)
        return {group: statistics.median_high(factors) for group, factors in groups.items()}

    unsure, sure = medians(1, False), medians(1, True)
    if not unsure | sure:
        return _Factors({}, {}, None)
    usual = statistics.median_high((unsure | sure).values())
    meshes = {key: usual if _is_doubted(f, usual) else f for key, f in unsure.items()} | sure
    buckets = {k: f for k, f in medians(2, False).items() if not _is_doubted(f, meshes[k[:1]])}
    by_mesh = {mesh: factor for (mesh,), factor in meshes.items()}
    return _Factors(buckets | medians(2, True), by_mesh, usual)
