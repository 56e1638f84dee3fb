# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What was measured of each candidate, once and for all processes; and what ran out of memory."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from earl_jax.measuring import NOTHING_KNOWN, bytes_only
from earl_jax.selector.ladder import Failure, failure_of
from earl_jax.selector.memory import unless_out_of_memory
from earl_jax.selector.throughput import Measurement, ThroughputTable
from earl_jax.sharding.layout import MeshShape
from earl_jax.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a candidate: `size` as in `Failure`, `words` its rung, "" for the first.

    `measure` runs its program, `lower` makes it from shapes alone, and `program` is its name. Of
    what takes more than `most` bytes a device the speed is not asked for.
    """

    stage: str
    mesh: MeshShape
    places: int
    size: tuple[int, ...]
    most: float
    measure: Callable[[], Measurement | None]
    lower: Callable[[], Any]
    program: Hashable = None
    words: str = ""

    @property
    def entry(self) -> str:
        """Its key in the table."""
        return ThroughputTable.entry(self.stage, self.mesh, self.places, self.words)

    @property
    def title(self) -> str:
        """What it is, for the user."""
        way = f", {self.words}" if self.words else ""
        room = f"with room for {self.places} tokens an episode{way}"
        return f"{self.stage} on {self.mesh} {room}"


class Remembered:
    """The table, filled in where an entry is missing. `say` tells the user what is measured."""

    def __init__(self, world: World, table: ThroughputTable, say: Callable[[str], None]) -> None:
        self._world, self.table, self._say = world, table, say
        # What this process alone measured, while others did something else.
        self._own: dict[str, Measurement] = {}
        # Whether nothing is timed now (`apart`).
        self.is_apart = False
        # What there was no memory to time beside the run's own arrays.
        self._untimed: set[str] = set()
        # Whether weights and moments of a run are on the devices while something is measured.
        self.is_beside_run = False
        # Hears what is compiled next to be measured (`CompileAhead.hand_over`).
        self.about_to_use: Callable[[Hashable], None] = lambda key: None

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, nothing is timed: what is missing is known by its bytes, until it is asked for.

        Live episodes wait meanwhile, and of several processes each asks for itself. Where meshes go
        by the order of their list nothing is ever timed, and one process asks as always.
        """
        self.is_apart = self._several or not self.by_order
        try:
            yield
        finally:
            self.is_apart = False

    @property
    def most_bytes(self) -> float:
        """What a program may take to be timed."""
        return self._world.budget_bytes or math.inf

    @property
    def by_order(self) -> bool:
        """Whether no speed is asked for: meshes are taken in the order of their lists."""
        return self._world.config.selector.order == "listed"

    @property
    def is_urgent(self) -> bool:
        """Whether one process's live episodes wait for the answer: only what is chosen is asked."""
        return self.is_apart and not self._several

    @property
    def _several(self) -> bool:
        return self._world.processes.count > 1

    def note_failure(self, failure: Failure) -> None:
        """This is impossible from now on, in later runs too."""
        self._keep(lambda table: table.with_failure(failure))
        self._say(f"{failure.stage} on {failure.mesh} {failure}; it is not tried again")

    def known(self, question: Question) -> Measurement | None:
        """The answer, if it is there."""
        return self.table.measurements.get(question.entry)

    def measure_again(self, question: Question) -> float:
        """Measures once more what was timed, and keeps the better speed.

        Returns the new speed as a part of the best before: 1 where it was not measured, as where
        nothing is timed now or memory was short.
        """
        found = self.known(question)
        if found is None or not found.tokens_per_s or self.is_apart:
            return 1.0
        if self._several:
            again = self._timed_together(question)
        else:
            self.about_to_use(question.program)
            again = unless_out_of_memory(question.measure)
        # Counted also where memory was short: it would be again.
        better = found.or_faster(again or found)
        self._keep(lambda table: table.with_measurement(question.entry, better))
        if again is None or not again.tokens_per_s:
            return 1.0
        self._say(f"measured again {question.title}: {again.tokens_per_s:,.0f} tokens/s")
        return again.tokens_per_s / found.tokens_per_s

    def answer(self, question: Question) -> Measurement:
        """The entry, measured now if it is missing; running out of memory is noted as a failure."""
        entry, found = question.entry, self.known(question)
        if found is not None and (
            self._is_enough(found) or found.program_bytes > question.most or entry in self._untimed
        ):
            return found
        if failure_of(self.table.failures, question.stage, question.mesh, question.size):
            return found or NOTHING_KNOWN
        if self.is_apart and self._several:
            if entry not in self._own:
                self._own[entry] = _bytes_of(question.lower)()
            return self._own[entry]
        several = self._several
        found = self._together(question) if several else self._alone(question)
        if found is None:
            self.note_failure(
                Failure(stage=question.stage, mesh=str(question.mesh), size=question.size)
            )
            # Where it failed when it ran, its bytes can still be said.
            asked = None if several else unless_out_of_memory(_bytes_of(question.lower))
            found = asked or NOTHING_KNOWN
        kept = found
        self._keep(lambda table: table.with_measurement(entry, kept))
        speed = f"{found.tokens_per_s:,.0f} tokens/s, " if found.tokens_per_s else ""
        size = f"{found.program_bytes / 2**20:.2f} MiB per device"
        self._say(f"measured {question.title}: {speed}{size}")
        return found

    def _alone(self, question: Question) -> Measurement | None:
        """What one process measures; None where there was too little memory for it.

        Beside a run's own arrays that is no failure of the candidate, which would replace some of
        them: its bytes are then all that is known, and its speed stays a guess.
        """
        self.about_to_use(question.program)
        if not self.is_urgent:
            found = unless_out_of_memory(question.measure)
            if found is not None or not self.is_beside_run:
                return found
            self._untimed.add(question.entry)
        return unless_out_of_memory(_bytes_of(question.lower))

    def _together(self, question: Question) -> Measurement | None:
        """What several processes measure; None where a compiler had too little memory for it.

        The bytes first, of those who compile it: some others only send the weights, and all must
        know whether it is to run.
        """
        processes, own = self._world.processes, None
        if processes.plays if question.stage == "rollout" else processes.trains:
            own = unless_out_of_memory(_bytes_of(question.lower)) or NOTHING_KNOWN
        told = processes.gather(own, f"what {question.stage} on {question.mesh} takes")
        known = [one for one in told if one is not None]
        if NOTHING_KNOWN in known:
            return None
        if known[0].program_bytes > question.most or self._is_enough(known[0]):
            return known[0]
        return self._timed_together(question)

    def _timed_together(self, question: Question) -> Measurement:
        words = f"how fast {question.stage} on {question.mesh} is"
        told = self._world.processes.gather(question.measure(), words)
        # The first that has some of these devices.
        return next(one for one in told if one is not None)

    def _is_enough(self, found: Measurement) -> bool:
        """Whether all is known of a candidate that this run asks for."""
        return found.tokens_per_s is not None or self.by_order or self.is_apart

    def _keep(self, change: Callable[[ThroughputTable], ThroughputTable]) -> None:
        try:
            self.table = change(self.table)
        except OSError as error:
            self._say(f"measurements cannot be kept for later runs: {error}")
            self.table = change(dataclasses.replace(self.table, path=None))


def _bytes_of(lower: Callable[[], Any]) -> Callable[[], Measurement]:
    """What asks a compiler for the bytes of a program."""
    return lambda: bytes_only(lower().compile())
