# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What the selector chooses from: the candidates' bytes and speeds, each measured once and kept.

What runs out of memory while it is measured has failed, as it would in the run.
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

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
from earl_jax.selector.throughput import Measurement, ThroughputTable, load_table
from earl_jax.sharding.layout import MeshShape
from earl_jax.world import World


def open_table(world: World) -> tuple[ThroughputTable, str | None]:
    """The kept measurements for this world's model, programs, devices and versions.

    Those of the first process, which alone keeps them, in every process.
    """
    config = world.config
    facts = {
        "model": dataclasses.asdict(world.model),
        "vocab_size": world.vocab_size,
        "rollout": {
            field: getattr(config.rollout, field)
            for field in (
                "num_slots",
                "episodes_per_step",
                "chunk_size",
                "burst",
                "step_rows",
                "tokens_a_page",
                "model_logprobs",
                "compute_dtype",
                "weight_dtype",
                "kv_dtype",
            )
        }
        | {
            "choice_branches": world.choice_branches,
            "draft": config.rollout.max_drafts,
            "ngram": config.rollout.speculation.ngram if config.rollout.max_drafts else 0,
        },
        "train": {
            field: getattr(config.train, field)
            for field in ("micro_batches", "remat", "logprob_chunk", "epochs")
        }
        | {"lora": dataclasses.asdict(config.train.lora), "importance_cap": config.importance_cap},
        "attention": [choice.kernel for choice in world.attention_choices],
        "order": config.selector.order,
        "measure_rounds": config.selector.measure_rounds,
        "devices": {
            stage: [f"{d.platform} {d.device_kind}" for d in devices]
            for stage, devices in (
                ("rollout", world.processes.rollout_devices),
                ("train", world.processes.train_devices),
            )
        },
        "processes": world.processes.count,
        "host": [platform.machine(), os.cpu_count()],
        "versions": {n: importlib.metadata.version(n) for n in ("jax", "jaxlib", "earl_jax")},
    }
    if world.processes.is_first:
        table, damage = load_table(facts)
        world.processes.gather(table.as_dict(), "the table of measurements")
        return table, damage
    told = world.processes.gather(None, "the table of measurements")
    return ThroughputTable.from_dict(None, told[0]), None


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
    ) -> list[Option]:
        """The rollout candidates at this room per episode, beside `resident_bytes` of others.

        With `pages` in each lane of the KV cache; None: enough for every episode to fill its room.
        `contexts` are lengths that episodes are expected to come to: the speed is then the mean of
        those measured at such rooms; without them it is that of episodes that fill their room.
        """
        world = self._world
        slots = num_slots or world.own_rollout.num_slots
        rung = RolloutRung(slots, pages or world.pool_for(places, slots).pages, offload)
        return [
            self._rollout_option(mesh, places, rung, resident_bytes, contexts)
            for mesh in world.rollout_candidates_for(places)
        ]

    def train_options(self, places: int, rung: TrainRung | None = None) -> list[Option]:
        """The training candidates for rows of this length."""
        world = self._world
        rung = rung or world.first_train_rung
        return [
            self._train_option(mesh, places, rung)
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
    ) -> Option:
        world = self._world
        words = self._slots_words(rung.num_slots)
        dense = rung._replace(pages=world.pool_for(places, rung.num_slots).pages)
        more = pool_bytes(world, mesh, places, rung) - pool_bytes(world, mesh, places, dense)
        most = self._most_bytes - more
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
            impossible=failure_of(self.table.failures, "rollout", mesh, rollout_size(places, rung)),
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

    def _train_option(self, mesh: MeshShape, places: int, rung: TrainRung) -> Option:
        world, rows = self._world, self._world.config.rollout.episodes_per_step
        size = train_size(places, rows, rung)
        first = rung == world.first_train_rung
        words = "" if first else f"micro_batches={rung.micro_batches},remat={rung.remat}"
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
                self._own[entry] = bytes_only(lower().compile())
            return self._own[entry]
        if self._world.processes.count > 1:
            told = self._world.processes.gather(measure(), f"what {stage} on {mesh} needs")
            # The first that has some of these devices.
            found = next(one for one in told if one is not None)
        else:
            found = unless_out_of_memory(measure)
        if found is None:
            self.note_failure(Failure(stage=stage, mesh=str(mesh), size=size))
            # Where it failed when it ran, its bytes can still be said.
            found = unless_out_of_memory(lambda: bytes_only(lower().compile())) or NOTHING_KNOWN
        kept = found
        self._keep(lambda table: table.with_measurement(entry, kept))
        speed = f"{found.tokens_per_s:,.0f} tokens/s, " if found.tokens_per_s else ""
        self._say(
            f"measured {stage} on {mesh} with room for {places} tokens an episode"
            f"{words and ', '}{words}: {speed}{found.program_bytes / 2**20:.2f} MiB per device"
        )
        return found

    @property
    def _most_bytes(self) -> float:
        """What a program may take to be timed.

        Of several processes some only send the weights, and cannot know: they time everything.
        """
        several = self._world.processes.count > 1
        return math.inf if several else self._world.budget_bytes or math.inf

    def _is_enough(self, found: Measurement) -> bool:
        """Whether all is known of a candidate that this run asks for."""
        return found.tokens_per_s is not None or self._world.config.selector.order == "listed"

    def _keep(self, change: Callable[[ThroughputTable], ThroughputTable]) -> None:
        try:
            self.table = change(self.table)
        except OSError as error:
            self._say(f"measurements cannot be kept for later runs: {error}")
            self.table = change(dataclasses.replace(self.table, path=None))
