# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes and speeds of plans: observed where they ran, else computed and corrected. Pure.

The speed model says how fast each plan is. What was observed says by which factor it is wrong: of
the same mesh where that ran at any context bucket, else the median over the meshes of the stage. A
mesh that never ran must win by more than the model's stated error to be tried.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from earl_jax.selector.plans import RolloutPlan, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.roofline import MODEL_ERROR
from earl_jax.selector.table import Entry, ThroughputTable, parse_key, rollout_key, train_key
from earl_jax.sharding.layout import MeshShape


@dataclasses.dataclass(frozen=True)
class Estimator:
    """What is known of one problem's plans by one table.

    Computed bytes are taken `caution` times, but for those of pages, which are exact.
    """

    problem: Problem
    table: ThroughputTable
    caution: float = 1.0

    # Bytes.

    def update_bytes(self, plan: TrainPlan, length: int) -> tuple[int, bool]:
        """Returns bytes per device of an update, and whether they are XLA's."""
        if known := self._update(plan, length).program_bytes:
            return known, True
        return int(self.caution * self.problem.update_footprint(plan, length).total), False

    def round_bytes(self, plan: RolloutPlan, max_tokens: int) -> tuple[int, bool]:
        """Returns bytes per device of a rollout by itself, and whether they are XLA's.

        A program's bytes but for its pages are the same with any number of pages.
        """
        pages = plan.pages * self.problem.page_bytes(plan.mesh)
        if known := self._round(plan, max_tokens).program_bytes:
            return known + pages, True
        bare = self.problem.bare_footprint(plan.mesh, plan.num_slots, max_tokens).total
        return int(self.caution * bare) + pages, False

    # Speeds.

    def update_speed(self, plan: TrainPlan, length: int) -> float:
        """Returns the tokens/s of an update."""
        computed = self.problem.update_speed(plan, length)
        return self._speed("train", plan.mesh, length, self._update(plan, length), computed)

    def round_speed(self, plan: RolloutPlan, max_tokens: int, wanted: int) -> float:
        """Returns the tokens/s of a rollout, of whose pages `wanted` are enough for all slots."""
        problem, mesh, slots = self.problem, plan.mesh, plan.num_slots
        rows = slots // mesh.data
        full = problem.round_speed(mesh, slots, max_tokens, rows)
        speed = self._speed("rollout", mesh, max_tokens, self._round(plan, max_tokens), full)
        at_once = max(1, min(rows, rows * plan.pages // max(1, wanted)))
        if at_once == rows:
            return speed
        return speed * problem.round_speed(mesh, slots, max_tokens, at_once) / full

    def live_round_s(self, plan: RolloutPlan, live: int, max_tokens: int) -> float:
        """Returns the seconds of a round with `live` episodes left."""
        problem, mesh, slots = self.problem, plan.mesh, plan.num_slots
        full = problem.round_speed(mesh, slots, max_tokens, slots // mesh.data)
        speed = self._speed("rollout", mesh, max_tokens, self._round(plan, max_tokens), full)
        return problem.live_round_s(mesh, live, max_tokens) * full / speed

    def is_update_observed(self, plan: TrainPlan, length: int) -> bool:
        """Whether such an update ran."""
        return bool(self._update(plan, length).speeds)

    def is_round_observed(self, plan: RolloutPlan, max_tokens: int) -> bool:
        """Whether such a rollout ran."""
        return bool(self._round(plan, max_tokens).speeds)

    def _update(self, plan: TrainPlan, length: int) -> Entry:
        key = train_key(plan.mesh, length, plan.micro_batches, plan.remat)
        return self.table.entries.get(key, Entry())

    def _round(self, plan: RolloutPlan, max_tokens: int) -> Entry:
        key = rollout_key(plan.mesh, max_tokens, plan.num_slots)
        return self.table.entries.get(key, Entry())

    def _speed(
        self, stage: str, mesh: MeshShape, tokens: int, entry: Entry, computed: float
    ) -> float:
        """The observed speed once it is trusted; before that no less than the model's, discounted.

        So a plan whose only observation was noise is tried again, and a true one is believed after
        a few steps. A plan that never ran is as wrong as others on its mesh, at this context bucket
        where there are any.
        """
        factors = self._factors[stage]
        if not factors.usual:
            return computed
        if entry.speeds and entry.is_trusted:
            return entry.tokens_per_s or computed
        careful = computed * factors.usual / MODEL_ERROR
        if entry.speeds:
            return max(entry.tokens_per_s or 0.0, careful)
        own = factors.by_bucket.get((mesh, tokens)) or factors.by_mesh.get(mesh)
        return computed * own if own else careful

    @functools.cached_property
    def _factors(self) -> "dict[str, _Factors]":
        """Observed by computed speeds, of each stage."""
        found: dict[str, list[tuple[MeshShape, int, float, bool]]] = {"rollout": [], "train": []}
        for text, entry in self.table.entries.items():
            observed, computed = entry.tokens_per_s, self._computed(text)
            if observed is not None and computed:
                key = parse_key(text)
                one = (key.mesh, key.tokens, observed / computed, entry.is_trusted)
                found[key.stage].append(one)
        return {stage: _factors_of(each) for stage, each in found.items()}

    def _computed(self, text: str) -> float | None:
        """The speed model's figure for an entry; None for a plan that this problem cannot have."""
        problem, key = self.problem, parse_key(text)
        way = dict(part.split("=") for part in key.way.split(","))
        if key.stage == "rollout":
            slots = int(way["slots"])
            if key.mesh not in problem.rollout_meshes_for(key.tokens) or slots % key.mesh.data:
                return None
            rows = slots // key.mesh.data
            return problem.round_speed(key.mesh, slots, key.tokens, rows)
        plan = TrainPlan(key.mesh, int(way["micro_batches"]), way["remat"] == "True")
        if key.mesh not in problem.train_meshes_for(key.tokens):
            return None
        if problem.work.num_rows % plan.micro_batches:
            return None
        if problem.train_obstacle(key.mesh, plan.micro_batches):
            return None
        return problem.update_speed(plan, key.tokens)


class _Factors(NamedTuple):
    """Medians of observed by computed speeds; `usual` is that over meshes, None where none ran."""

    by_bucket: dict[tuple[MeshShape, int], float]
    by_mesh: dict[MeshShape, float]
    usual: float | None


def _factors_of(found: Sequence[tuple[MeshShape, int, float, bool]]) -> _Factors:
    """Of (mesh, context bucket, factor, trusted): trusted ones count, all where none is."""

    def medians(key: Callable[[MeshShape, int], Any], trusted: bool) -> dict[Any, float]:
        groups: dict[Any, list[float]] = {}
        for mesh, tokens, factor, is_trusted in found:
            if is_trusted or not trusted:
                groups.setdefault(key(mesh, tokens), []).append(factor)
        return {group: statistics.median(factors) for group, factors in groups.items()}

    def of_mesh(mesh: MeshShape, tokens: int) -> MeshShape:
        return mesh

    sure = medians(of_mesh, True)
    by_mesh = medians(of_mesh, False) | sure
    by_bucket = medians(lambda mesh, tokens: (mesh, tokens), False)
    by_bucket |= medians(lambda mesh, tokens: (mesh, tokens), True)
    usual = statistics.median((sure or by_mesh).values()) if by_mesh else None
    return _Factors(by_bucket, by_mesh, usual)
