# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What the selector chooses from: the candidates' bytes and speeds, each measured once and kept.

What runs out of memory while it is measured has failed, as it would in the run.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import numpy as np

from earl_jax.estimates import Estimate, rollout_estimate, train_estimate
from earl_jax.measuring import (
    NOTHING_KNOWN,
    bytes_only,
    lower_train,
    measure_rollout,
    measure_train,
    pool_bytes,
)
from earl_jax.selector.choose import Option
from earl_jax.selector.ladder import (
    Failure,
    RolloutRung,
    TrainRung,
    failure_of,
    rollout_size,
    train_size,
)
from earl_jax.selector.memory import resident_bytes as resident_bytes_of
from earl_jax.selector.memory import unless_out_of_memory
from earl_jax.selector.tail import TailOption
from earl_jax.selector.throughput import Measurement, ThroughputTable
from earl_jax.sharding.layout import MeshShape
from earl_jax.world import World


class Calibration:
    """The table, filled in where an entry is missing. `say` tells the user what is measured."""

    def __init__(self, world: World, table: ThroughputTable, say: Callable[[str], None]) -> None:
        self._world, self.table, self._say = world, table, say
        # What this process alone measured, while others did something else.
        self._own: dict[str, Measurement] = {}
        self._is_apart = False

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, of several processes each asks for itself: nothing is measured together.

        What is missing is then known by its bytes alone, until all ask for it.
        """
        self._is_apart = self._world.processes.count > 1
        try:
            yield
        finally:
            self._is_apart = False

    def measure_all(self) -> None:
        """Measures what is missing for the configured rooms per episode, so that no step waits."""
        for places in self._world.config.rollout.context_buckets:
            self.train_options(places)
            self.rollout_options(places, 0)

    def rollout_options(
        self,
        places: int,
        resident_bytes: int,
        pages: int | None = None,
        num_slots: int | None = None,
        contexts: Sequence[float] = (),
        *,
        offload: bool = False,
        compiled: Container[MeshShape] = (),
    ) -> list[Option]:
        """The rollout candidates at this room per episode, beside `resident_bytes` of others.

        With `pages` in each lane of the KV cache; None: enough for every episode to fill its room.
        `contexts` are lengths that episodes are expected to come to: the speed is then the mean of
        those measured at such rooms; without them it is that of episodes that fill their room.
        Those on the `compiled` meshes have a compiler's bytes however much they take.
        """
        world = self._world
        slots = num_slots or world.own_rollout.num_slots
        rung = RolloutRung(slots, pages or world.pool_for(places, slots).pages, offload)
        return [
            self._rollout_option(mesh, places, rung, resident_bytes, contexts, mesh in compiled)
            for mesh in world.rollout_candidates_for(places)
        ]

    def train_options(
        self,
        places: int,
        rung: TrainRung | None = None,
        *,
        compiled: Container[MeshShape] = (),
    ) -> list[Option]:
        """The training candidates for rows of this length; `compiled` as for rollouts."""
        world = self._world
        rung = rung or world.first_train_rung
        return [
            self._train_option(mesh, places, rung, mesh in compiled)
            for mesh in world.train_candidates_for(places)
            if world.train_obstacle(mesh, rung.micro_batches) is None
        ]

    def tail_options(
        self, places: int, resident_bytes: int, rung: RolloutRung, current: MeshShape
    ) -> list[TailOption]:
        """The rollout candidates for the last episodes of a rollout that is on `current`.

        Those whose rounds were measured; a move takes the weights and all of the KV cache, at the
        rate at which new weights came when it was measured.
        """
        world, found = self._world, []
        options = self.rollout_options(places, resident_bytes, rung.pages, rung.num_slots)
        for option in options:
            entry = self._rollout_entry(option.mesh, places, rung.num_slots)
            measured = self.table.measurements.get(entry)
            alone = measured and measured.alone_tokens_per_s
            if not option.tokens_per_s or not alone:
                continue
            engine = world.engine(option.mesh, rung.num_slots)
            weights = resident_bytes_of(engine.parameter_shapes, engine.parameter_shardings)
            moved = weights + pool_bytes(world, option.mesh, places, rung)
            burst = world.config.rollout.round_tokens
            found.append(
                TailOption(
                    mesh=option.mesh,
                    full_round_s=rung.num_slots * burst / option.tokens_per_s,
                    alone_round_s=burst / alone,
                    move_s=option.move_s * moved / weights,
                    bytes_per_device=option.bytes_per_device,
                    impossible=option.impossible,
                )
            )
        known = {option.mesh for option in found}
        return found if current in known else []

    def note_failure(self, failure: Failure) -> None:
        """This is impossible from now on, in later runs too."""
        self._keep(lambda table: table.with_failure(failure))
        self._say(f"{failure.stage} on {failure.mesh} {failure}; it is not tried again")

    def _rollout_option(
        self,
        mesh: MeshShape,
        places: int,
        rung: RolloutRung,
        resident: int,
        contexts: Sequence[float],
        compiled: bool,
    ) -> Option:
        world = self._world
        words = self._slots_words(rung.num_slots)
        dense = rung._replace(pages=world.pool_for(places, rung.num_slots).pages)
        more = pool_bytes(world, mesh, places, rung) - pool_bytes(world, mesh, places, dense)
        most = self._most_bytes - more
        size = rollout_size(places, rung)
        entry = self.table.entry("rollout", mesh, places, words)
        estimate = rollout_estimate(world, mesh, places, dense)
        if not compiled and self._is_hopeless(entry, estimate, most):
            return self._computed_option("rollout", mesh, size, estimate.total + more + resident)
        measured = self._measured(
            "rollout",
            mesh,
            places,
            words,
            rollout_size(places, dense),
            most,
            lambda: measure_rollout(world, mesh, places, rung.num_slots, most),
            lambda: world.engine(mesh, rung.num_slots).lower_play(places),
        )
        return Option(
            mesh=mesh,
            bytes_per_device=max(0, measured.program_bytes + more) + resident,
            tokens_per_s=self._speed(measured, mesh, places, words, contexts),
            move_s=measured.switch_s,
            impossible=failure_of(self.table.failures, "rollout", mesh, size),
        )

    def _slots_words(self, num_slots: int) -> str:
        return "" if num_slots == self._world.own_rollout.num_slots else f"slots={num_slots}"

    def _rollout_entry(self, mesh: MeshShape, places: int, num_slots: int) -> str:
        return self.table.entry("rollout", mesh, places, self._slots_words(num_slots))

    def _speed(
        self,
        measured: Measurement,
        mesh: MeshShape,
        places: int,
        words: str,
        contexts: Sequence[float],
    ) -> float | None:
        """Tokens per second of episodes of these lengths, from the rooms that were measured."""
        speed, table = measured.tokens_per_s, self.table
        if speed is None or not contexts:
            return speed
        seconds = {places: 1.0 / speed}
        for room in {*self._world.config.rollout.context_buckets, places}:
            found = table.measurements.get(table.entry("rollout", mesh, room, words))
            if found and found.tokens_per_s and room <= places:
                seconds[room] = 1.0 / found.tokens_per_s
        rooms = sorted(seconds)
        return 1.0 / float(np.interp(contexts, rooms, [seconds[room] for room in rooms]).mean())

    def _train_option(
        self, mesh: MeshShape, places: int, rung: TrainRung, compiled: bool
    ) -> Option:
        world, rows = self._world, self._world.config.rollout.episodes_per_step
        size = train_size(places, rows, rung)
        first = rung == world.first_train_rung
        words = "" if first else f"micro_batches={rung.micro_batches},remat={rung.remat}"
        entry = self.table.entry("train", mesh, places, words)
        estimate = train_estimate(world, mesh, places, rung)
        if not compiled and self._is_hopeless(entry, estimate, self._most_bytes):
            return self._computed_option("train", mesh, size, estimate.total)
        measured = self._measured(
            "train",
            mesh,
            places,
            words,
            size,
            self._most_bytes,
            lambda: measure_train(world, mesh, places, rung, self._most_bytes),
            lambda: lower_train(world, mesh, places, rung),
        )
        return Option(
            mesh=mesh,
            bytes_per_device=measured.program_bytes,
            tokens_per_s=measured.tokens_per_s,
            move_s=measured.switch_s,
            impossible=failure_of(self.table.failures, "train", mesh, size),
        )

    def _is_hopeless(self, entry: str, estimate: Estimate, most: float) -> bool:
        """Whether it surely takes more than `most` bytes, and nothing was compiled for it yet."""
        return entry not in self.table.measurements and estimate.surely_exceeds(most)

    def _computed_option(
        self, stage: str, mesh: MeshShape, size: tuple[int, ...], total: int
    ) -> Option:
        return Option(
            mesh=mesh,
            bytes_per_device=total,
            tokens_per_s=None,
            impossible=failure_of(self.table.failures, stage, mesh, size),
            is_computed=True,
        )

    def _measured(
        self,
        stage: str,
        mesh: MeshShape,
        places: int,
        words: str,
        size: tuple[int, ...],
        most: float,
        measure: Callable[[], Measurement | None],
        lower: Callable[[], Any],
    ) -> Measurement:
        """The entry, measured now if it is missing; running out of memory is noted as a failure.

        Of what takes more than `most` bytes a device the speed is not asked for.
        """
        entry, table = self.table.entry(stage, mesh, places, words), self.table
        found = table.measurements.get(entry)
        if found is not None and (self._is_enough(found) or found.program_bytes > most):
            return found
        if failure_of(table.failures, stage, mesh, size):
            return found or NOTHING_KNOWN
        if self._is_apart:
            if entry not in self._own:
                self._own[entry] = _bytes_of(lower)()
            return self._own[entry]
        several = self._world.processes.count > 1
        if several:
            found = self._measured_together(stage, mesh, most, measure, lower)
        else:
            found = unless_out_of_memory(measure)
        if found is None:
            self.note_failure(Failure(stage=stage, mesh=str(mesh), size=size))
            # Where it failed when it ran, its bytes can still be said.
            asked = None if several else unless_out_of_memory(_bytes_of(lower))
            found = asked or NOTHING_KNOWN
        kept = found
        self._keep(lambda table: table.with_measurement(entry, kept))
        speed = f"{found.tokens_per_s:,.0f} tokens/s, " if found.tokens_per_s else ""
        self._say(
            f"measured {stage} on {mesh} with room for {places} tokens an episode"
            f"{words and ', '}{words}: {speed}{found.program_bytes / 2**20:.2f} MiB per device"
        )
        return found

    def _measured_together(
        self,
        stage: str,
        mesh: MeshShape,
        most: float,
        measure: Callable[[], Measurement | None],
        lower: Callable[[], Any],
    ) -> Measurement | None:
        """What several processes measure; None where a compiler had too little memory for it.

        The bytes first, of those who compile it: some others only send the weights, and all must
        know whether it is to run.
        """
        processes, own = self._world.processes, None
        if processes.plays if stage == "rollout" else processes.trains:
            own = unless_out_of_memory(_bytes_of(lower)) or NOTHING_KNOWN
        told = processes.gather(own, f"what {stage} on {mesh} takes")
        known = [one for one in told if one is not None]
        if NOTHING_KNOWN in known:
            return None
        if known[0].program_bytes > most or self._is_enough(known[0]):
            return known[0]
        told = processes.gather(measure(), f"how fast {stage} on {mesh} is")
        # The first that has some of these devices.
        return next(one for one in told if one is not None)

    @property
    def _most_bytes(self) -> float:
        """What a program may take to be timed."""
        return self._world.budget_bytes or math.inf

    def _is_enough(self, found: Measurement) -> bool:
        """Whether all is known of a candidate that this run asks for."""
        return found.tokens_per_s is not None or self._world.config.selector.order == "listed"

    def _keep(self, change: Callable[[ThroughputTable], ThroughputTable]) -> None:
        try:
            self.table = change(self.table)
        except OSError as error:
            self._say(f"measurements cannot be kept for later runs: {error}")
            self.table = change(dataclasses.replace(self.table, path=None))


def _bytes_of(lower: Callable[[], Any]) -> Callable[[], Measurement]:
    """What asks a compiler for the bytes of a program."""
    return lambda: bytes_only(lower().compile())
