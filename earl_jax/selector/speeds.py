# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Speeds of plans: observed ones, and those computed, by the factor by which observed ones differ.

Which observed speeds are doubted is in docs/design/selector.md.
"""

import dataclasses
import functools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from earl_jax.selector.plans import Plan, RolloutPlan, Stage, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.table import Entry, ThroughputTable, key_of, parse_key
from earl_jax.telemetry.load import Load

# Meshes that never ran and may be tried, of each stage at each context bucket.
TRIALS = 2
_NEVER_RAN = Entry()


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The speeds of plans of one problem by one table; fields as of `Candidates`."""

    problem: Problem
    table: ThroughputTable
    may_try: Callable[[Plan, int], bool] | None
    load: Load | None
    model_error: float

    @property
    def train_tokens(self) -> int | None:
        """The tokens of a training batch's episodes; None: all are as long as the bucket."""
        load = self.load
        return load and math.ceil(self.problem.work.num_rows * load.context_tokens_mean)

    def live_token_s(self, plan: RolloutPlan, live: int, max_tokens: int) -> float:
        """Returns the seconds of a token of each of `live` episodes, fewer than the slots."""
        full = self.of_rounds(plan, max_tokens)
        speed, _ = self.expected(plan, max_tokens, full)
        slots, appended = plan.num_slots, self._appended
        alone_s = self.problem.live_token_s(plan.mesh, slots, live, max_tokens, appended)
        return alone_s * full / speed

    def has_seen(self, stage: Stage) -> bool:
        """Returns True if a mesh of this stage ran."""
        return bool(self._factors[stage])

    def of_rounds(self, plan: RolloutPlan, max_tokens: int, rows: int | None = None) -> float:
        """Returns the computed tokens/s with so many slots of a row shard at work; None: all."""
        rows = rows or plan.num_slots // plan.mesh.data
        sizes = (plan.mesh, plan.num_slots, max_tokens, rows)
        return self.problem.round_speed(*sizes, self._appended)

    @property
    def _appended(self) -> float:
        appended = self.load and self.load.appended
        return self.problem.work.appended if appended is None else appended

    def entry(self, plan: Plan, tokens: int) -> Entry:
        """Returns what the table has of a plan at this context bucket."""
        return self.table.entries.get(key_of(plan, tokens), _NEVER_RAN)

    def expected(self, plan: Plan, tokens: int, computed: float) -> tuple[float, bool]:
        """Returns a plan's tokens/s by those `computed`, and True for those of a trial.

        A mesh that never ran counts as slower than computed by the model's error, and as faster by
        it while it may be tried.
        """
        factors, entry = self._factors[plan.stage], self.entry(plan, tokens)
        if not factors:
            return computed, False
        own, usual = factors.get(plan.mesh), factors[None]
        if known := entry.tokens_per_s:
            least = 0.0 if entry.is_trusted else computed * (own or usual)
            return max(known, least), False
        if own:
            return computed * factors.get((plan.mesh, tokens), own), False
        if self.may_try is not None and self._ran[plan.stage, tokens] <= TRIALS:
            if self.may_try(plan, tokens):
                return computed * usual * self.model_error, True
        return computed * usual / self.model_error, False

    @functools.cached_property
    def _observed(self) -> list[tuple[Plan, int, Entry, float]]:
        """Plans that ran, with their context buckets, and observed by computed speeds."""
        found = []
        for text, entry in self.table.entries.items():
            (plan, tokens), speed = parse_key(text), entry.tokens_per_s
            if speed and (computed := self._computed(plan, tokens)):
                found.append((plan, tokens, entry, speed / computed))
        return found

    @functools.cached_property
    def _ran(self) -> Counter[tuple[str, int]]:
        """The number of meshes that ran, by stage and context bucket."""
        each = {(plan.stage, plan.mesh, tokens) for plan, tokens, *_ in self._observed}
        return Counter((stage, tokens) for stage, _, tokens in each)

    @functools.cached_property
    def _factors(self) -> dict[str, dict[Any, float]]:
        """Medians of observed by computed speeds, by stage, and mesh or mesh and context bucket.

        Under None is that of the stage's meshes. One that is not trusted counts as no lower than
        this, or than the mesh's at another bucket. A busy machine makes a plan look slow, and
        nothing makes it look fast: of two medians the higher one is taken.
        """

        def medians(stage: str, trusted: bool, by_bucket: bool) -> dict[Any, float]:
            groups = defaultdict[Any, list[float]](list)
            for plan, tokens, entry, factor in self._observed:
                if plan.stage == stage and entry.is_trusted == trusted:
                    groups[(plan.mesh, tokens) if by_bucket else plan.mesh].append(factor)
            return {group: statistics.median_high(factors) for group, factors in groups.items()}

        found: dict[str, dict[Any, float]] = {"rollout": {}, "train": {}}
        for stage, factors in found.items():
            unsure, sure = (medians(stage, trusted, False) for trusted in (False, True))
            if unsure or sure:
                usual = factors[None] = statistics.median_high((unsure | sure).values())
                factors |= {mesh: max(factor, usual) for mesh, factor in unsure.items()} | sure
                here = medians(stage, False, True).items()
                factors |= {key: max(factor, factors[key[0]]) for key, factor in here}
                factors |= medians(stage, True, True)
        return found

    def _computed(self, plan: Plan, tokens: int) -> float | None:
        """Returns the computed speed of a plan; None for one that this problem cannot have.

        It may be one with another split of the devices, where that is chosen.
        """
        problem = self.problem.of(plan)
        if plan.mesh not in problem.meshes(plan.stage, tokens):
            return None
        if isinstance(plan, RolloutPlan):
            return None if plan.num_slots % plan.mesh.data else self.of_rounds(plan, tokens)
        if problem.work.num_rows % plan.micro_batches:
            return None
        obstacle = problem.train_obstacle(plan.mesh, plan.micro_batches)
        return None if obstacle else self.of_update(plan, tokens)

    def of_update(self, plan: TrainPlan, length: int) -> float:
        """Returns the computed tokens/s of updates on packed rows."""
        rows = self.problem.packed_rows(length, self.train_tokens, plan.mesh)
        return self.problem.update_speed(plan, length, rows)
