# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Observations: what plans did in this run, in the throughput table and on disk."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from earl_jax.selector.plans import Failure, Plan, RolloutPlan, rollout_size, train_size
from earl_jax.selector.problem import Problem
from earl_jax.selector.table import ThroughputTable, rollout_key, train_key

if TYPE_CHECKING:
    from earl_jax.world import World


class Observations:
    """The throughput table of a run. Every process has the same."""

    def __init__(self, world: "World", table: ThroughputTable, say: Callable[[str], None]) -> None:
        """`say` tells the user what ran out of memory, or cannot be kept."""
        self._problem, self.table, self._say = world.problem, table, say
        self._is_fed = world.config.selector.table == "auto"

    def add_speed(self, plan: Plan, tokens: int, tokens_per_s: float | None) -> None:
        """Adds the speed of a real step at a context bucket, if config.selector.table is "auto"."""
        if self._is_fed and tokens_per_s:
            self._keep(self.table.with_speed(_key(plan, tokens), tokens_per_s))

    def add_bytes(self, plan: Plan, tokens: int, program_bytes: int) -> None:
        """Adds XLA's bytes of a plan's program."""
        self._keep(with_program_bytes(self._problem, self.table, plan, tokens, program_bytes))

    def add_failure(self, plan: Plan, tokens: int) -> str:
        """Remembers that a plan ran out of memory, in later runs too; returns it in words."""
        table = with_failure(self._problem, self.table, plan, tokens)
        failure = table.failures[-1]
        words = f"{failure.stage} on {plan.mesh} {failure}"
        self._say(f"{words}; it is not tried again")
        self._keep(table)
        return words

    def _keep(self, table: ThroughputTable) -> None:
        self.table = table
        try:
            table.write()
        except OSError as error:
            self._say(f"the throughput table cannot be kept for later runs: {error}")
            self.table = dataclasses.replace(table, path=None)


def with_program_bytes(
    problem: Problem, table: ThroughputTable, plan: Plan, tokens: int, program_bytes: int
) -> ThroughputTable:
    """Returns the table with XLA's bytes of a plan's program; those of pages are counted apart."""
    if isinstance(plan, RolloutPlan):
        program_bytes -= plan.pages * problem.page_bytes(plan.mesh)
    return table.with_bytes(_key(plan, tokens), max(1, program_bytes))


def with_failure(
    problem: Problem, table: ThroughputTable, plan: Plan, tokens: int
) -> ThroughputTable:
    """Returns the table with a plan that ran out of memory."""
    if isinstance(plan, RolloutPlan):
        stage, size = "rollout", rollout_size(plan, tokens, problem.work.page_size)
    else:
        stage, size = "train", train_size(plan, tokens, problem.work.num_rows)
    return table.with_failure(Failure(stage=stage, mesh=str(plan.mesh), size=size))


def _key(plan: Plan, tokens: int) -> str:
    if isinstance(plan, RolloutPlan):
        return rollout_key(plan.mesh, tokens, plan.num_slots)
    return train_key(plan.mesh, tokens, plan.micro_batches, plan.remat)
