# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Candidates: every plan of a stage with its bytes and its speed. Pure.

Bytes are XLA's where a program was compiled, else computed. Speeds are observed ones, else computed
and corrected by the factor by which observed ones differ. Which of them are doubted is in
docs/design/selector.md.
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from earl_jax.selector.plans import Plan, RolloutPlan, Stage, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.roofline import MODEL_ERROR, reads_in_place
from earl_jax.selector.table import TRUSTED, ThroughputTable, key_of, parse_key
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import Load

P = TypeVar("P", RolloutPlan, TrainPlan)
# Speeds within this fraction are equal.
TIE = 0.02
# Share of the budget that pages leave free: a program takes more than was computed, and the rows of
# a rollout grow beside a pool that stays.
RESERVE = 0.05
# Share by which computed bytes may be too many (benchmarks/plan.md).
ERROR = 0.1
# Shares of its pages with which a rollout that ran out of memory is tried, before fewer slots.
FEWER = (0.9, 0.75, 0.5, 0.25)
# Meshes that never ran and may be tried, of each stage at each context bucket.
TRIALS = 2


class Candidate(NamedTuple, Generic[P]):
    """A plan at a context bucket of `tokens`, with its bytes per device and its speed.

    `num_bytes` are those of its own program, XLA's if `is_exact`; of computed ones `margin` more
    must be free. `wanted_bytes` are those of a rollout with pages for all tokens that are expected.
    The speed was observed `num_speeds` times at this bucket, or is computed; with `is_trial` it is
    the most that the model's error allows. `failed` says how the plan ran out of memory before.

    The last four are those of a chosen plan, whose `num_bytes` are all that a device holds; its
    `stage` is "tail" for the last episodes of a rollout.
    """

    plan: P
    tokens: int
    num_bytes: int
    wanted_bytes: int
    is_exact: bool
    tokens_per_s: float
    num_speeds: int = 0
    is_trial: bool = False
    failed: str = ""
    margin: int = 0
    stage: str = ""
    seconds: float = 0.0
    switched: bool = False
    reason: str = ""

    def fits(self, free: float) -> bool:
        """Returns True if it fits into `free` bytes of a device and has not failed."""
        return not self.failed and self.num_bytes + self.margin <= free

    def __str__(self) -> str:
        """Returns "train: data=8 -> data=4,context=2 (...)" of a chosen plan."""
        return f"{self.stage}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The candidates of one problem by one table.

    Computed bytes must fit `caution` times, but for those of pages, which are exact.
    `may_try(key)` is True for a plan (`key_of`) whose mesh may be tried out if it never ran; None
    where none may. Computed speeds of other such meshes are divided by `model_error`. Episodes are
    expected to be as in `load`; None: all as long as the context bucket, and as many tokens are
    appended as the problem says.
    """

    problem: Problem
    table: ThroughputTable = ThroughputTable()
    caution: float = 1.0
    may_try: Callable[[str], bool] | None = None
    load: Load | None = None
    model_error: float = MODEL_ERROR

    # Training.

    def train(self, length: int) -> list[Candidate[TrainPlan]]:
        """Returns every plan for rows of so many tokens."""
        return [self._train(plan, length) for plan in self.problem.train_plans(length)]

    def trains_that_fit(
        self, length: int, free: float, current: TrainPlan | None
    ) -> list[Candidate[TrainPlan]]:
        """Returns the plans for rows of so many tokens that fit into `free` bytes of a device.

        Of each mesh it is the fastest of those with the fewest micro-batches that fit, by each
        remat policy; with inputs in host memory the one with the most that is as fast. The plan in
        use is there too, and where a rollout must fit beside an update all that fit.
        """
        found, stays = [], self.problem.rollout_stays
        every = self.problem.train_plans(length)
        for _, group in itertools.groupby(every, lambda plan: plan.mesh):
            plans = list(group)
            fitting, remats = list[Candidate[TrainPlan]](), set[str]()
            for plan in plans:
                is_rated = stays or plan == current or plan.remat not in remats
                if is_rated and self.update_bytes(plan, length)[0] <= free:
                    candidate = self._train(plan, length)
                    if candidate.fits(free):
                        fitting.append(candidate)
                        remats.add(plan.remat)
            best = fitting[:1]
            for candidate in fitting:
                if candidate.tokens_per_s > (1.0 + TIE) * best[0].tokens_per_s:
                    best = [candidate]
            if best and best[0].plan.remat == "offload":
                offloads = (self._train(plan, length) for plan in plans if plan.remat == "offload")
                held = [candidate for candidate in offloads if candidate.fits(free)]
                least = max(candidate.tokens_per_s for candidate in held) / (1.0 + TIE)
                best = [candidate for candidate in held if candidate.tokens_per_s >= least][-1:]
            here = [c for c in fitting if stays or c.plan == current]
            found += dict.fromkeys([*best, *here])
        return found

    def _train(self, plan: TrainPlan, length: int) -> Candidate[TrainPlan]:
        """Returns an update with its bytes and its speed on packed rows."""
        num_bytes, is_exact = self.update_bytes(plan, length)
        return self._candidate(plan, length, num_bytes, is_exact, self._computed(plan, length))

    def update_bytes(self, plan: TrainPlan, length: int) -> tuple[int, bool]:
        """Returns bytes per device of an update, and True if they are XLA's."""
        footprint = self.problem.update_footprint(plan, length)
        if known := self.table.program_bytes.get(key_of(plan, length)):
            return known + footprint.trainer, True
        return footprint.total, False

    def resident_bytes(self, plan: TrainPlan, offload: bool, length: int) -> int:
        """Returns the bytes beside which a rollout must fit: the trainer's state, or its update."""
        if not self.problem.rollout_stays:
            return self.problem.trainer_bytes(plan.mesh, offload)
        num_bytes, is_exact = self.update_bytes(plan, length)
        return num_bytes if is_exact else int(self.caution * num_bytes)

    # Rollouts.

    def rollouts(
        self,
        max_tokens: int,
        cache_tokens: int | None,
        free: float,
        *,
        offload: bool = False,
    ) -> list[Candidate[RolloutPlan]]:
        """Returns one plan of each mesh for a rollout in `free` bytes of a device.

        It has the most slots that fit, and all pages that fit then; the fewest of both where
        nothing does. Where all meshes that fit gather pages, for waiting episodes too, it has the
        slots that are fastest.
        """
        problem, found = self.problem, list[Candidate[RolloutPlan]]()

        def ways(mesh: MeshShape) -> Iterator[Candidate[RolloutPlan]]:
            for slots in problem.slot_numbers(mesh):
                plan = RolloutPlan(mesh, slots, 0, offload)
                yield self.rollout(plan, max_tokens, cache_tokens, free)

        for mesh in problem.meshes("rollout", max_tokens):
            # The first that fits, or the last.
            for candidate in ways(mesh):
                if candidate.fits(free):
                    break
            found.append(candidate)
        in_place = functools.partial(reads_in_place, problem.hardware, problem.work)
        if any(in_place(candidate.plan.mesh) for candidate in found if candidate.fits(free)):
            return found
        for number, first in enumerate(found):
            if first.fits(free) and first.num_bytes < first.wanted_bytes:
                fitting = (each for each in ways(first.plan.mesh) if each.fits(free))
                found[number] = max(fitting, key=lambda each: each.tokens_per_s)
        return found

    def moves(
        self, live: RolloutPlan, max_tokens: int, cache_tokens: int | None, free: float
    ) -> list[Candidate[RolloutPlan]]:
        """Returns one plan of each mesh by which the episodes of the plan `live` can go on.

        On their mesh the pool stays, also where computed bytes are too many by no more than what
        they may be off (ERROR). It grows beside the old one if it holds fewer than `cache_tokens`,
        or need not grow again. On another mesh a pool must fit beside theirs, their weights, and a
        copy of their pages (engine/relocation.py).
        """
        problem, least, found = self.problem, self.problem.least_pages(max_tokens), []
        pool = live.pages * problem.page_bytes(live.mesh)
        weights = problem.bare_footprint(live.mesh, live.num_slots, max_tokens).weights
        for mesh in problem.meshes("rollout", max_tokens):
            if live.num_slots % mesh.data:
                continue
            plan, sizes = live._replace(mesh=mesh, pages=0), (max_tokens, cache_tokens, free)
            beside = pool if mesh == live.mesh else weights + 2 * pool
            moved = self.rollout(plan, *sizes, beside)
            if mesh == live.mesh and live.pages >= least:
                stays, pages = self.rollout(live, *sizes), moved.plan.pages
                over = stays.num_bytes + stays.margin - free
                if not stays.is_exact and 0 < over <= ERROR * stays.num_bytes:
                    stays = stays._replace(num_bytes=int(free), margin=0)
                wanted, dense = (self._wanted(live, least, n) for n in (cache_tokens, None))
                grows = moved.fits(free) and (pages == dense or wanted > live.pages)
                moved = moved if grows and pages > live.pages else stays
            found.append(moved)
        return found

    def round_bytes(self, plan: RolloutPlan, max_tokens: int) -> tuple[int, bool]:
        """Returns bytes per device of a rollout by itself, and True if they are XLA's."""
        bare, _, page_bytes = self._bare(plan.mesh, plan.num_slots, max_tokens)
        return bare.num_bytes + plan.pages * page_bytes, bare.is_exact

    @functools.cached_property
    def _bare(self) -> "Callable[[MeshShape, int, int], tuple[Candidate[RolloutPlan], float, int]]":
        """Returns a rollout without pages, its computed tokens/s, and the bytes of a page, once."""

        def bare(
            mesh: MeshShape, num_slots: int, max_tokens: int
        ) -> tuple[Candidate[RolloutPlan], float, int]:
            plan = RolloutPlan(mesh, num_slots, 0)
            known = self.table.program_bytes.get(key_of(plan, max_tokens))
            full = self._full(plan, max_tokens)
            num_bytes = known or self.problem.bare_footprint(mesh, num_slots, max_tokens).total
            candidate = self._candidate(plan, max_tokens, num_bytes, bool(known), full)
            return candidate, full, self.problem.page_bytes(mesh)

        return functools.cache(bare)

    def rollout(
        self,
        plan: RolloutPlan,
        max_tokens: int,
        cache_tokens: int | None,
        free: float,
        beside: int = 0,
    ) -> Candidate[RolloutPlan]:
        """Returns a plan with its pages; one that has none yet with all that are of use and fit.

        They hold one episode at least, and where the plan failed they are fewer. `beside` bytes are
        there too, while live episodes move.
        """
        mesh, num_slots, pages, offload = plan
        bare, full, page_bytes = self._bare(mesh, num_slots, max_tokens)
        rows, least = num_slots // mesh.data, self.problem.least_pages(max_tokens)
        wanted = self._wanted(plan, least, cache_tokens)
        failed = self._failed(plan, max_tokens) if pages else ""
        if not pages:
            taken = beside + bare.num_bytes + bare.margin
            room = free - taken - RESERVE * (self.problem.budget_bytes or 0)
            dense = rows * least
            most = dense if math.isinf(room) else max(least, min(dense, int(room // page_bytes)))
            for share in (1.0, *FEWER):
                pages = max(least, int(share * most))
                plan = RolloutPlan(mesh, num_slots, pages, offload)
                if not (failed := self._failed(plan, max_tokens)):
                    break
        speed, at_once = bare.tokens_per_s, max(1, min(rows, rows * pages // max(1, wanted)))
        if at_once < rows:
            speed *= self._full(plan, max_tokens, at_once) / full
        # Thousands for a choice: `_replace` takes three times as long.
        return Candidate(
            plan=plan,
            tokens=max_tokens,
            num_bytes=bare.num_bytes + pages * page_bytes + beside,
            wanted_bytes=bare.num_bytes + wanted * page_bytes,
            is_exact=bare.is_exact,
            tokens_per_s=speed,
            num_speeds=bare.num_speeds,
            is_trial=bare.is_trial,
            failed=failed,
            margin=bare.margin,
        )

    def _wanted(self, plan: RolloutPlan, least: int, cache_tokens: int | None) -> int:
        """Returns the pages of a row shard for so many tokens, None: for the longest episodes."""
        num_slots, data = plan.num_slots, plan.mesh.data
        dense = num_slots // data * least
        if cache_tokens is None:
            return dense
        pages = self.problem.page_rule.pages_of(cache_tokens / data, num_slots / data)
        return max(least, min(dense, math.ceil(pages)))

    # Both stages.

    def in_use(self, plan: Plan, tokens: int, *, least: bool) -> Candidate | None:
        """Returns the candidate of a plan in use; None where its mesh is no candidate.

        With `least` the mesh is used in the way that takes the fewest bytes; layers' inputs go to
        host memory only where they are there already.
        """
        if plan.mesh not in self.problem.meshes(plan.stage, tokens):
            return None
        if isinstance(plan, RolloutPlan):
            slots = self.problem.slot_numbers(plan.mesh)[-1] if least else plan.num_slots
            return self.rollout(plan._replace(num_slots=slots, pages=0), tokens, None, 0.0)
        every = self.problem.train_plans(tokens) if least else [plan]
        ways = [way for way in every if way.mesh == plan.mesh]
        ways = [way for way in ways if plan.remat == "offload" or way.remat != "offload"]
        return self._train(min(ways, key=lambda way: self.update_bytes(way, tokens)), tokens)

    def _candidate(
        self, plan: P, tokens: int, num_bytes: int, is_exact: bool, computed: float | None
    ) -> Candidate[P]:
        """Returns a plan with its speed, by that `computed`."""
        assert computed is not None, "the plan is one of this problem"
        speed, is_trial = self._expected(plan, tokens, computed)
        return Candidate(
            plan=plan,
            tokens=tokens,
            num_bytes=num_bytes,
            wanted_bytes=num_bytes,
            is_exact=is_exact,
            tokens_per_s=speed,
            num_speeds=len(self.speeds_of(plan, tokens)),
            is_trial=is_trial,
            failed=self._failed(plan, tokens),
            margin=0 if is_exact else int((self.caution - 1.0) * num_bytes),
        )

    def _failed(self, plan: Plan, tokens: int) -> str:
        if not self.table.failures:
            return ""
        return self.table.failure_of(self.problem.failure(plan, tokens))

    def speeds_of(self, plan: Plan, tokens: int) -> tuple[float, ...]:
        """Returns the observed speeds of a plan at this context bucket; () if it never ran."""
        return self.table.speeds.get(key_of(plan, tokens), ())

    def must_wait(self, plan: Plan, tokens: int) -> bool:
        """Returns True if the run would wait for the program of a plan, which never ran."""
        if self.may_try is None or self.speeds_of(plan, tokens):
            return False
        return not self.may_try(key_of(plan, tokens))

    # Speeds.

    @property
    def train_tokens(self) -> int | None:
        """The tokens of a training batch's episodes; None: all are as long as the bucket."""
        load = self.load
        return load and math.ceil(self.problem.work.num_rows * load.context_tokens_mean)

    @functools.cached_property
    def _appended(self) -> float:
        appended = self.load and self.load.appended
        return self.problem.work.appended if appended is None else appended

    def has_seen(self, stage: Stage) -> bool:
        """Returns True if a mesh of this stage ran."""
        return bool(self._factors[stage])

    def live_token_s(self, plan: RolloutPlan, live: int, max_tokens: int) -> float:
        """Returns the seconds of a token of each of `live` episodes, fewer than the slots."""
        full, slots, appended = self._full(plan, max_tokens), plan.num_slots, self._appended
        speed, _ = self._expected(plan, max_tokens, full)
        alone_s = self.problem.live_token_s(plan.mesh, slots, live, max_tokens, appended)
        return alone_s * full / speed

    def _full(self, plan: RolloutPlan, max_tokens: int, rows: int | None = None) -> float:
        """Returns the computed tokens/s with so many slots of a row shard at work; None: all."""
        rows = rows or plan.num_slots // plan.mesh.data
        sizes = (plan.mesh, plan.num_slots, max_tokens, rows)
        return self.problem.round_speed(*sizes, self._appended)

    def _computed(self, plan: Plan, tokens: int) -> float | None:
        """Returns a plan's tokens/s by the speed model; None for one that cannot be."""
        if isinstance(plan, RolloutPlan):
            return None if plan.num_slots % plan.mesh.data else self._full(plan, tokens)
        if self.problem.work.num_rows % plan.micro_batches:
            return None
        rows = self.problem.packed_rows(tokens, self.train_tokens, plan.mesh)
        return self.problem.update_speed(plan, tokens, rows)

    def _expected(self, plan: Plan, tokens: int, computed: float) -> tuple[float, bool]:
        """Returns a plan's tokens/s by those `computed`, and True for those of a trial."""
        factors, speeds = self._factors[plan.stage], self.speeds_of(plan, tokens)
        if not factors:
            return computed, False
        own, usual, error = factors.get(plan.mesh), factors[None], self.model_error
        expected = computed * factors.get((plan.mesh, tokens), own or usual)
        if speeds:
            speed = statistics.median(speeds)
            if len(speeds) >= TRUSTED:
                return speed, False
            if self.may_try is not None and speed * error < expected:
                return expected * error, True
            return max(speed, expected), False
        if own:
            return expected, False
        if self.may_try is not None and self._ran[plan.stage, tokens] <= TRIALS:
            if self.may_try(key_of(plan, tokens)):
                return expected * error, True
        return expected / error, False

    @functools.cached_property
    def _observed(self) -> list[tuple[Plan, int, bool, float]]:
        """Plans that ran, their context buckets, if trusted, and observed by computed speeds."""
        found = []
        for text, speeds in self.table.speeds.items():
            plan, tokens = parse_key(text)
            if plan.mesh not in self.problem.of(plan).meshes(plan.stage, tokens):
                continue
            if computed := self._computed(plan, tokens):
                factor = statistics.median(speeds) / computed
                found.append((plan, tokens, len(speeds) >= TRUSTED, factor))
        return found

    @functools.cached_property
    def _ran(self) -> Counter[tuple[str, int]]:
        """The number of meshes that ran, by stage and context bucket."""
        each = {(plan.stage, plan.mesh, tokens) for plan, tokens, *_ in self._observed}
        return Counter((stage, tokens) for stage, _, tokens in each)

    @functools.cached_property
    def _factors(self) -> dict[str, dict[Any, float]]:
        """Observed by computed speeds, by stage, and mesh, or mesh and context bucket, or None.

        Each is the median of the trusted ones, or of all where none is; then it counts as no lower
        than the mesh's at any bucket, or than that of the stage's meshes, which is under None. Of
        two medians the higher one is taken: a busy machine makes a plan look slow, never fast.
        """

        def medians(stage: str, by_bucket: bool) -> dict[Any, tuple[float, bool]]:
            groups = defaultdict[Any, list[tuple[float, bool]]](list)
            for plan, tokens, trusted, factor in self._observed:
                if plan.stage == stage:
                    groups[(plan.mesh, tokens) if by_bucket else plan.mesh].append(
                        (factor, trusted)
                    )
            found = {}
            for group, each in groups.items():
                sure = [factor for factor, trusted in each if trusted]
                every = sure or [factor for factor, _ in each]
                found[group] = statistics.median_high(every), bool(sure)
            return found

        factors: dict[str, dict[Any, float]] = {"rollout": {}, "train": {}}
        for stage, found in factors.items():
            if meshes := medians(stage, by_bucket=False):
                usual = found[None] = statistics.median_high(f for f, _ in meshes.values())
                found |= {mesh: f if sure else max(f, usual) for mesh, (f, sure) in meshes.items()}
                for key, (factor, sure) in medians(stage, by_bucket=True).items():
                    found[key] = factor if sure else max(factor, found[key[0]])
        return factors
