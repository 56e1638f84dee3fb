# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Speeds of plans: observed ones, and those computed, by the factor by which observed ones differ.

Which observed speeds are doubted is in docs/design/selector.md.
"""

import dataclasses
import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from earl_jax.selector.plans import Plan, RolloutPlan, Stage, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.roofline import MODEL_ERROR
from earl_jax.selector.table import Entry, ThroughputTable, key_of, parse_key
from earl_jax.sharding.layout import MeshShape
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

    @property
    def train_tokens(self) -> int | None:
        """The tokens of a training batch's episodes; None: all are as long as the bucket."""
        load = self.load
        return load and math.ceil(self.problem.work.num_rows * load.context_tokens_mean)

    def live_token_s(self, plan: RolloutPlan, live: int, max_tokens: int) -> float:
        """Returns the seconds of a token of each of `live` episodes, fewer than the slots."""
        full = self.of_full_rounds(plan, max_tokens)
        speed, _ = self.expected(plan, max_tokens, full)
        slots, appended = plan.num_slots, self._appended
        alone_s = self.problem.live_token_s(plan.mesh, slots, live, max_tokens, appended)
        return alone_s * full / speed

    def seen(self, stage: Stage) -> Collection[MeshShape]:
        """Returns the meshes of a stage that ran."""
        return self._factors[stage].by_mesh.keys()

    def of_full_rounds(self, plan: RolloutPlan, max_tokens: int) -> float:
        """Returns the computed tokens/s with all slots at work."""
        return self.of_rounds(plan, max_tokens, plan.num_slots // plan.mesh.data)

    def of_rounds(self, plan: RolloutPlan, max_tokens: int, rows: int) -> float:
        """Returns the computed tokens/s with so many slots of a row shard at work."""
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
        if not factors.usual:
            return computed, False
        own = factors.by_mesh.get(plan.mesh)
        if known := entry.tokens_per_s:
            least = 0.0 if entry.is_trusted else computed * (own or factors.usual)
            return max(known, least), False
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
        if plan.mesh not in problem.meshes(plan.stage, tokens):
            return None
        if isinstance(plan, RolloutPlan):
            return None if plan.num_slots % plan.mesh.data else self.of_full_rounds(plan, tokens)
        if problem.work.num_rows % plan.micro_batches:
            return None
        obstacle = problem.train_obstacle(plan.mesh, plan.micro_batches)
        return None if obstacle else self.of_update(plan, tokens)

    def of_update(self, plan: TrainPlan, length: int) -> float:
        """Returns the computed tokens/s of updates on packed rows."""
        rows = self.problem.packed_rows(length, self.train_tokens, plan.mesh)
        return self.problem.update_speed(plan, length, rows)


class _Factors(NamedTuple):
    """Observed by computed speeds; `usual` is the median over meshes, None where no mesh ran.

    A factor that is not trusted counts as no lower than the usual one, or than the mesh's at
    another context bucket. A busy machine makes a plan look slow, and nothing makes it look fast:
    of two medians the higher one is taken.
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
    meshes = {key: max(factor, usual) for key, factor in unsure.items()} | sure
    buckets = {key: max(factor, meshes[key[:1]]) for key, factor in medians(2, False).items()}
    by_mesh = {mesh: factor for (mesh,), factor in meshes.items()}
    return _Factors(buckets | medians(2, True), by_mesh, usual)
