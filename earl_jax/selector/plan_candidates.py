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
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from earl_jax.selector.plans import Plan, RolloutPlan, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.roofline import MODEL_ERROR, reads_in_place
from earl_jax.selector.speeds import Speeds
from earl_jax.selector.table import ThroughputTable
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


class Candidate(NamedTuple, Generic[P]):
    """A plan with the bytes per device of its own program and its speed.

    `is_exact` bytes are XLA's. `wanted_bytes` are those of a rollout with pages for all tokens that
    are expected; it may have fewer, or more. The speed was observed `num_speeds` times at this
    context bucket, or is computed; with `is_trial` it is the most that the model's error allows.
    `failed` is how the plan ran out of memory before, "" where it did not.
    """

    plan: P
    num_bytes: int
    wanted_bytes: int
    is_exact: bool
    tokens_per_s: float
    num_speeds: int = 0
    is_trial: bool = False
    failed: str = ""

    def fits(self, free: float) -> bool:
        """Returns True if it fits into `free` bytes of a device and has not failed."""
        return not self.failed and self.num_bytes <= free


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The candidates of one problem by one table.

    Computed bytes count `caution` times, but for those of pages, which are exact.
    `may_try(plan, tokens)` is True for a plan whose mesh may be tried out if it never ran; None
    where none may. Computed speeds of other such meshes are divided by `model_error`. Episodes are
    expected to be as in `load`; None: all as long as the context bucket, and as many tokens are
    appended as the problem says.
    """

    problem: Problem
    table: ThroughputTable = ThroughputTable()
    caution: float = 1.0
    may_try: Callable[[Plan, int], bool] | None = None
    load: Load | None = None
    model_error: float = MODEL_ERROR

    @functools.cached_property
    def speeds(self) -> Speeds:
        """The speeds of plans by what the table has of them."""
        return Speeds(self.problem, self.table, self.may_try, self.load, self.model_error)

    def train(self, length: int) -> list[Candidate[TrainPlan]]:
        """Returns every plan for rows of so many tokens."""
        return [self._train(plan, length) for plan in self.problem.train_plans(length)]

    def trains_that_fit(
        self, length: int, free: float, current: TrainPlan | None
    ) -> list[Candidate[TrainPlan]]:
        """Returns the plans for rows of so many tokens that fit into `free` bytes of a device.

        Of a mesh's plans with the fewest micro-batches that fit, by each remat policy, that is
        the fastest one; more are slower. With inputs in host memory it has the most that are as
        fast, which hold least there. The plan in use is there too, and where a rollout must fit
        beside an update all that fit.
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
                    if not candidate.failed:
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

        It has the most slots that fit, or as many as given, and all pages that fit then; the fewest
        of both where nothing does. Fewer pages than hold `cache_tokens` make it slower. Where on
        all meshes that fit pages are gathered, for slots too whose episodes wait for some, it has
        the slots that are fastest.
        """
        problem, sizes, found = self.problem, (max_tokens, cache_tokens, free), []
        in_place = functools.partial(reads_in_place, problem.hardware, problem.work)
        for mesh in problem.meshes("rollout", max_tokens):
            if num_slots is not None and num_slots % mesh.data:
                continue
            numbers = problem.slot_numbers(mesh) if num_slots is None else [num_slots]
            for slots in numbers:
                candidate = self._rollout(RolloutPlan(mesh, slots, 0, offload), *sizes)
                if candidate.fits(free):
                    break
            found.append(candidate)
        if num_slots is not None or any(in_place(c.plan.mesh) for c in found if c.fits(free)):
            return found
        return [self._with_fastest_slots(candidate, *sizes) for candidate in found]

    def _with_fastest_slots(
        self,
        found: Candidate[RolloutPlan],
        max_tokens: int,
        cache_tokens: int | None,
        free: float,
    ) -> Candidate[RolloutPlan]:
        """Returns the fastest candidate that has as many slots or fewer, if some wait for pages."""
        each, plan = [found], found.plan._replace(pages=0)
        if found.fits(free) and found.num_bytes < found.wanted_bytes:
            plans = (plan._replace(num_slots=n) for n in self.problem.slot_numbers(plan.mesh))
            each += (self._rollout(fewer, max_tokens, cache_tokens, free) for fewer in plans)
        fitting = (candidate for candidate in each if candidate.fits(free))
        return max(fitting, key=lambda candidate: candidate.tokens_per_s, default=found)

    def moves(
        self, live: RolloutPlan, max_tokens: int, cache_tokens: int | None, free: float
    ) -> list[Candidate[RolloutPlan]]:
        """Returns one plan of each mesh by which the episodes of the plan `live` can go on.

        On their mesh the pool stays, also where computed bytes are too many by no more than what
        they may be off (ERROR). It grows where a larger one fits beside it: where it holds fewer
        than `cache_tokens`, or if it need not grow again. On another mesh a pool must fit beside
        theirs, their weights, and a copy of their pages
        (`relocate` in engine/relocation.py).
        """
        problem, least, found = self.problem, self.problem.least_pages(max_tokens), []
        pool = live.pages * problem.page_bytes(live.mesh)
        weights = problem.bare_footprint(live.mesh, live.num_slots, max_tokens).weights
        for mesh in problem.meshes("rollout", max_tokens):
            if live.num_slots % mesh.data:
                continue
            plan, sizes = live._replace(mesh=mesh, pages=0), (max_tokens, cache_tokens, free)
            beside = pool if mesh == live.mesh else weights + 2 * pool
            moved = self._rollout(plan, *sizes, beside)
            if mesh == live.mesh and live.pages >= least:
                stays, pages = self._rollout(live, *sizes), moved.plan.pages
                over = stays.num_bytes - free
                if not stays.is_exact and 0 < over <= ERROR * stays.num_bytes:
                    stays = stays._replace(num_bytes=int(free))
                wanted, dense = (self._wanted(live, least, n) for n in (cache_tokens, None))
                grows = moved.fits(free) and (pages == dense or wanted > live.pages)
                moved = moved if grows and pages > live.pages else stays
            found.append(moved)
        return found

    def in_use(self, plan: Plan, tokens: int, *, least: bool) -> Candidate | None:
        """Returns the candidate of a plan in use; None where its mesh is no candidate.

        A rollout has no pages. With `least` the mesh is used in the way that takes the fewest
        bytes: a rollout with the fewest slots, an update without layers' inputs in host memory
        where they are not there.
        """
        if plan.mesh not in self.problem.meshes(plan.stage, tokens):
            return None
        if isinstance(plan, RolloutPlan):
            slots = self.problem.slot_numbers(plan.mesh)[-1] if least else plan.num_slots
            return self._rollout(plan._replace(num_slots=slots, pages=0), tokens, None, 0.0)
        every = self.problem.train_plans(tokens) if least else [plan]
        ways = [way for way in every if way.mesh == plan.mesh]
        ways = [way for way in ways if plan.remat == "offload" or way.remat != "offload"]
        return self._train(min(ways, key=lambda way: self.update_bytes(way, tokens)), tokens)

    def must_wait(self, plan: Plan, tokens: int) -> bool:
        """Returns True if the run would wait for the program of a plan, which never ran."""
        if self.may_try is None or self.speeds.entry(plan, tokens).speeds:
            return False
        return not self.may_try(plan, tokens)

    def update_bytes(self, plan: TrainPlan, length: int) -> tuple[int, bool]:
        """Returns bytes per device of an update, and True if they are XLA's."""
        footprint = self.problem.update_footprint(plan, length)
        if known := self.speeds.entry(plan, length).program_bytes:
            return known + footprint.trainer, True
        return int(self.caution * footprint.total), False

    def surplus(self, found: Candidate) -> int:
        """Returns how many of a candidate's bytes per device are those of `caution`."""
        pages, plan = 0, found.plan
        if isinstance(plan, RolloutPlan):
            pages = plan.pages * self.problem.page_bytes(plan.mesh)
        return 0 if found.is_exact else int((found.num_bytes - pages) * (1.0 - 1.0 / self.caution))

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
        bare, _, page_bytes = self._bare(plan.mesh, plan.num_slots, max_tokens)
        return bare.num_bytes + plan.pages * page_bytes, bare.is_exact

    def _train(self, plan: TrainPlan, length: int) -> Candidate[TrainPlan]:
        known, computed = self.update_bytes(plan, length), self.speeds.of_update(plan, length)
        return self._candidate(plan, length, known, computed)

    def _candidate(
        self, plan: P, tokens: int, known: tuple[int, bool], computed: float
    ) -> Candidate[P]:
        """Returns a plan with its bytes and its speed."""
        speed, is_trial = self.speeds.expected(plan, tokens, computed)
        return Candidate(
            plan=plan,
            num_bytes=known[0],
            wanted_bytes=known[0],
            is_exact=known[1],
            tokens_per_s=speed,
            num_speeds=len(self.speeds.entry(plan, tokens).speeds),
            is_trial=is_trial,
            failed=self._failed(plan, tokens),
        )

    @functools.cached_property
    def _bare(self) -> "Callable[[MeshShape, int, int], tuple[Candidate[RolloutPlan], float, int]]":
        """Returns a rollout without pages, with all slots at work, and its computed tokens/s.

        And the bytes of a page. Each is computed once.
        """
        speeds = self.speeds

        def bare(
            mesh: MeshShape, num_slots: int, max_tokens: int
        ) -> tuple[Candidate[RolloutPlan], float, int]:
            plan = RolloutPlan(mesh, num_slots, 0)
            known, full = speeds.entry(plan, max_tokens), speeds.of_rounds(plan, max_tokens)
            computed = self.problem.bare_footprint(mesh, num_slots, max_tokens).total
            num_bytes = known.program_bytes or int(self.caution * computed)
            size = (num_bytes, bool(known.program_bytes))
            candidate = self._candidate(plan, max_tokens, size, full)
            return candidate, full, self.problem.page_bytes(mesh)

        return functools.cache(bare)

    def _rollout(
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
            dense = rows * least
            room = free - beside - bare.num_bytes - RESERVE * (self.problem.budget_bytes or 0)
            most = dense if math.isinf(room) else int(room // page_bytes)
            most = max(least, min(dense, most))
            for share in (1.0, *FEWER):
                pages = max(least, int(share * most))
                plan = RolloutPlan(mesh, num_slots, pages, offload)
                if not (failed := self._failed(plan, max_tokens)):
                    break
        speed, at_once = bare.tokens_per_s, max(1, min(rows, rows * pages // max(1, wanted)))
        if at_once < rows:
            speed *= self.speeds.of_rounds(plan, max_tokens, at_once) / full
        # Thousands for a choice: `_replace` takes three times as long.
        return Candidate(
            plan=plan,
            num_bytes=bare.num_bytes + pages * page_bytes + beside,
            wanted_bytes=bare.num_bytes + wanted * page_bytes,
            is_exact=bare.is_exact,
            tokens_per_s=speed,
            num_speeds=bare.num_speeds,
            is_trial=bare.is_trial,
            failed=failed,
        )

    def _wanted(self, plan: RolloutPlan, least: int, cache_tokens: int | None) -> int:
        """Returns the pages of a row shard for so many tokens of all, at least one episode's.

        That is `least`. None: all slots' episodes at their longest, which is the most.
        """
        num_slots, data = plan.num_slots, plan.mesh.data
        dense = num_slots // data * least
        if cache_tokens is None:
            return dense
        pages = self.problem.page_rule.pages_of(cache_tokens / data, num_slots / data)
        return max(least, min(dense, math.ceil(pages)))

    def _failed(self, plan: Plan, tokens: int) -> str:
        if not self.table.failures:
            return ""
        return self.table.failure_of(plan, self.problem.size_of(plan, tokens))
