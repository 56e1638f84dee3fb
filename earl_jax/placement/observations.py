# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Observations: what plans did in this run, in the throughput table and on disk."""

import dataclasses
from collections.abc import Callable

from earl_jax.selector.plans import Failure, RolloutPlan, TrainPlan, rollout_size, train_size
from earl_jax.selector.table import ThroughputTable, rollout_key, train_key
from earl_jax.world import World


class Observations:
    """The throughput table of a run. Every process has the same."""

    def __init__(self, world: World, table: ThroughputTable, say: Callable[[str], None]) -> None:
        """`say` tells the user what ran out of memory, or cannot be kept."""
        self._problem, self.table, self._say = world.problem, table, say
        self._is_fed = world.config.selector.table == "auto"

    def add_speed(
        self, plan: RolloutPlan | TrainPlan, tokens: int, tokens_per_s: float | None
    ) -> None:
        """Adds the speed of a real step at a context bucket, if config.selector.table is "auto"."""
        if self._is_fed and tokens_per_s:
            self._keep(self.table.with_speed(_key(plan, tokens), tokens_per_s))

    def add_bytes(self, plan: RolloutPlan | TrainPlan, tokens: int, program_bytes: int) -> None:
        """Adds XLA's bytes of a plan's program; those of pages are counted apart."""
        if isinstance(plan, RolloutPlan):
            program_bytes -= plan.pages * self._problem.page_bytes(plan.mesh)
        self._keep(self.table.with_bytes(_key(plan, tokens), max(1, program_bytes)))

    def add_failure(self, plan: RolloutPlan | TrainPlan, tokens: int) -> str:
        """Remembers that a plan ran out of memory, in later runs too; returns it in words."""
        work = self._problem.work
        if isinstance(plan, RolloutPlan):
            stage, size = "rollout", rollout_size(plan, tokens, work.page_size)
        else:
            stage, size = "train", train_size(plan, tokens, work.num_rows)
        failure = Failure(stage=stage, mesh=str(plan.mesh), size=size)
        words = f"{stage} on {plan.mesh} {failure}"
        self._say(f"{words}; it is not tried again")
        self._keep(self.table.with_failure(failure))
        return words

    def _keep(self, table: ThroughputTable) -> None:
        self.table = table
        try:
            table.write()
        except OSError as error:
            self._say(f"the throughput table cannot be kept for later runs: {error}")
            self.table = dataclasses.replace(table, path=None)


def _key(plan: RolloutPlan | TrainPlan, tokens: int) -> str:
    if isinstance(plan, RolloutPlan):
        return rollout_key(plan.mesh, tokens, plan.num_slots)
    return train_key(plan.mesh, tokens, plan.micro_batches, plan.remat)
