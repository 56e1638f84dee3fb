# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Candidates: every plan of a stage with its bytes and its speed. Pure."""

import dataclasses
import functools
import math
from typing import Generic, TypeVar

from earl_jax.selector.estimate import Estimator
from earl_jax.selector.plans import RolloutPlan, TrainPlan, rollout_size, train_size
from earl_jax.selector.problem import Problem
from earl_jax.selector.table import ThroughputTable

P = TypeVar("P", RolloutPlan, TrainPlan)
# Without a known budget a pool has so many times the pages that are wanted.
MOST_SPARE = 4
# So much of the memory that is left over goes to pages.
FILLED = 0.9


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


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The candidates of one problem by one table."""

    problem: Problem
    table: ThroughputTable
    caution: float = 1.0

    @functools.cached_property
    def estimate(self) -> Estimator:
        """Bytes and speeds."""
        return Estimator(self.problem, self.table, self.caution)

    def train(self, length: int) -> list[Candidate[TrainPlan]]:
        """Returns every way to train on rows of so many tokens."""
        estimate, rows = self.estimate, self.problem.work.num_rows
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

    def rollouts(
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

    def filled(
        self, rollout: Candidate[RolloutPlan], max_tokens: int, room: float
    ) -> Candidate[RolloutPlan]:
        """Returns a chosen rollout with as many pages as could ever be of use, if they fit.

        Memory that nothing else takes during the rollout: then its pool need not grow, for which
        programs would be compiled. Where no budget is known, with a few times what is wanted.
        """
        problem, plan = self.problem, rollout.plan
        dense = problem.dense_pages(plan.mesh, plan.num_slots, max_tokens)
        page_bytes = problem.page_bytes(plan.mesh)
        most = MOST_SPARE * plan.pages
        if not math.isinf(room):
            most = plan.pages + int(FILLED * (room - rollout.num_bytes) // page_bytes)
        pages = max(plan.pages, min(dense, most))
        num_bytes = rollout.num_bytes + (pages - plan.pages) * page_bytes
        plan = plan._replace(pages=pages)
        size = rollout_size(plan, max_tokens, problem.work.page_size)
        if self.table.failure_of("rollout", plan.mesh, size):
            return rollout
        return dataclasses.replace(rollout, plan=plan, num_bytes=num_bytes)

    def _rollout(
        self, bare: RolloutPlan, max_tokens: int, cache_tokens: int | None, room: float
    ) -> Candidate[RolloutPlan]:
        """A plan's slots with as many pages as are wanted and fit, at least one episode's."""
        problem, estimate, mesh = self.problem, self.estimate, bare.mesh
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
