# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Observations: what plans did in this run, in the throughput table and on disk."""

import dataclasses
from collections.abc import Callable

from earl_jax.selector.plans import Failure, Plan, RolloutPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.table import ThroughputTable, key_of


class Observations:
    """The throughput table of a run. Every process has the same."""

    def __init__(
        self, problem: Problem, table: ThroughputTable, say: Callable[[str], None], *, is_fed: bool
    ) -> None:
        """Begins with a table; the run's speeds are added to it if `is_fed`.

        Speeds of before are one of each plan then, so that an entry is trusted only when this run
        has observed it. `say` reports failures and a table that cannot be kept.
        """
        self._problem, self._say, self.is_fed = problem, say, is_fed
        self.table = table.as_prior() if is_fed else table
        # Plans left out in this run only: a move to them ran out of memory.
        self._avoided: tuple[Failure, ...] = ()
        # Keys of plans whose speed this run has observed.
        self._observed: set[str] = set()

    def add_speed(self, plan: Plan, tokens: int, tokens_per_s: float | None) -> None:
        """Adds the speed of a step with a plan, unless None, to a table that is fed.

        The first one of this run takes the place of what was observed before.
        """
        if self.is_fed and tokens_per_s:
            key, table = key_of(plan, tokens), self.table
            if key not in self._observed:
                self._observed.add(key)
                table = table.with_entry(key, speeds=())
            self._keep(table.with_speed(key, tokens_per_s))

    def add_bytes(self, plan: Plan, tokens: int, program_bytes: int) -> None:
        """Adds XLA's bytes of a plan's program."""
        self._keep(with_program_bytes(self._problem, self.table, plan, tokens, program_bytes))

    def add_wait(self, compile_s: float) -> None:
        """Adds the seconds that a step waited for new programs."""
        if self.is_fed and compile_s:
            self._keep(self.table.with_wait(compile_s))

    @property
    def known(self) -> ThroughputTable:
        """The table to choose by: it also leaves out the plans that no move of this run reached."""
        return dataclasses.replace(self.table, failures=(*self.table.failures, *self._avoided))

    def add_failure(self, plan: Plan, tokens: int, *, in_move: bool = False) -> str:
        """Remembers that a plan ran out of memory; returns it in words.

        Later runs know it too, unless memory was short `in_move`, beside what was there before.
        """
        table = with_failure(self._problem, self.table, plan, tokens)
        words = f"{plan.stage} on {plan.mesh} {table.failures[-1]}"
        if in_move:
            words += ", in the move there"
            self._avoided += table.failures[-1:]
        else:
            self._keep(table)
        self._say(f"{words}; it is not tried again{' in this run' * in_move}")
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
    return table.with_bytes(key_of(plan, tokens), max(1, program_bytes))


def with_failure(
    problem: Problem, table: ThroughputTable, plan: Plan, tokens: int
) -> ThroughputTable:
    """Returns the table with a plan that ran out of memory."""
    size = problem.size_of(plan, tokens)
    return table.with_failure(Failure(stage=plan.stage, mesh=str(plan.mesh), size=size))
