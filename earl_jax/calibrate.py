# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Measures what the selector chooses from: bytes and speed of each candidate, each program once.

Bytes are XLA's own memory analysis of the program that will run; speed is that program, run: the
best of some rounds, because what disturbs a round only ever makes it slower. A run whose meshes go
by the order of their list asks for bytes only.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from earl_jax.joint import send_weights
from earl_jax.rollout.choices import no_choices
from earl_jax.rollout.config import Sampling
from earl_jax.rollout.decode_state import DecodeState
from earl_jax.rollout.orders import NO_ROW, pack_orders
from earl_jax.rollout.pages import Pool
from earl_jax.rollout.sampling import sampling_rows
from earl_jax.selector.choose import Option
from earl_jax.selector.memory import program_bytes, resident_bytes
from earl_jax.selector.throughput import Measurement, ThroughputTable, load_table
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.placing import place
from earl_jax.sharding.reshard import reshard
from earl_jax.train.step import batch_shapes
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
        self, places: int, resident_bytes: int, pages: int | None = None
    ) -> list[Option]:
        """The rollout candidates at this room per episode, beside `resident_bytes` of others.

        With `pages` in each lane of the KV cache; None: enough for every episode to fill its room.
        """
        return [
            self._option(
                "rollout", mesh, places, resident_bytes + self._other_pages(mesh, places, pages)
            )
            for mesh in self._world.rollout_candidates
        ]

    def _other_pages(self, mesh: MeshShape, places: int, pages: int | None) -> int:
        """Bytes per device that so many pages a lane take more than what was measured has."""
        if pages is None:
            return 0
        engine, dense = self._world.engine(mesh), self._world.pool_for(places)

        def num_bytes(pool: Pool) -> int:
            layers = engine.state_shapes(places, pool).cache.layers
            return resident_bytes(layers, engine.state_shardings.cache.layers)

        return num_bytes(dense._replace(pages=pages)) - num_bytes(dense)

    def train_options(self, places: int) -> list[Option]:
        """The training candidates for rows of this length."""
        candidates = self._world.train_candidates
        return [self._option("train", mesh, places, 0) for mesh in candidates]

    def switch_s(self, stage: str, mesh: MeshShape, places: int) -> float:
        """What going to this mesh costs; the entry must have been measured."""
        return self._measurement(stage, mesh, places).switch_s

    def _option(self, stage: str, mesh: MeshShape, places: int, resident: int) -> Option:
        measured = self._measurement(stage, mesh, places)
        return Option(
            mesh=mesh,
            bytes_per_device=measured.program_bytes + resident,
            tokens_per_s=measured.tokens_per_s,
        )

    def _measurement(self, stage: str, mesh: MeshShape, places: int) -> Measurement:
        entry = self.table.entry(stage, mesh, places)
        if self._is_apart and entry not in self.table.measurements:
            if entry not in self._own:
                compiled = self._world.engine(mesh).lower_play(places).compile()
                self._own[entry] = _bytes_only(compiled)
            return self._own[entry]
        if entry not in self.table.measurements:
            measure = _measure_rollout if stage == "rollout" else _measure_train
            told = self._world.processes.gather(
                measure(self._world, mesh, places), f"what {stage} on {mesh} needs"
            )
            # Of several processes the first that has some of these devices.
            found = next(one for one in told if one is not None)
            try:
                self.table = self.table.with_measurement(entry, found)
            except OSError as error:
                self._say(f"measurements cannot be kept for later runs: {error}")
                table = dataclasses.replace(self.table, path=None)
                self.table = table.with_measurement(entry, found)
            speed = f"{found.tokens_per_s:,.0f} tokens/s, " if found.tokens_per_s else ""
            self._say(
                f"measured {stage} on {mesh} with room for {places} tokens an episode: {speed}"
                f"{found.program_bytes / 2**20:.2f} MiB per device"
            )
        return self.table.measurements[entry]


def _measure_rollout(world: World, mesh: MeshShape, places: int) -> Measurement | None:
    """Rounds with every slot busy, at the end of its room: a chunk appended, a burst sampled.

    Every process sends and receives the weights; None in one that does not play.
    """
    processes, config = world.processes, world.config
    engine, plays = world.engine(mesh), processes.plays
    compiled = engine.lower_play(places).compile() if plays else None
    if config.selector.order == "listed":
        return _bytes_only(compiled) if plays else None
    params = world.policy(world.init_train_state(world.train_candidates[0]))

    def move() -> Any:
        return send_weights(world, params, mesh).params

    weights = move()
    switch_s = _seconds(move)
    if not plays:
        return None
    slots, branches = world.own_rollout.num_slots, engine.config.rules.choice_branches
    count = min(config.rollout.chunk_size, places - config.rollout.burst)
    orders = pack_orders(
        chunk=np.ones((slots, config.rollout.chunk_size), np.int32),
        count=np.full(slots, count),
        restart=np.zeros(slots, np.int32),
        speak=np.ones(slots, np.int32),
        seed=np.arange(slots),
        row=np.full(slots, NO_ROW),
        sampling=sampling_rows(Sampling(), slots),
        version=0,
        choices=no_choices(slots, branches) if branches else None,
    )
    read = np.full(slots, places - count - config.rollout.burst, np.int32)

    def at_the_end(state: DecodeState) -> DecodeState:
        placed = jax.device_put(read, engine.state_shardings.cached)
        return jax.block_until_ready(dataclasses.replace(state, cached=placed))

    state, _ = engine.play(weights, at_the_end(engine.empty_state(places)), orders)
    seconds, tokens = [], 0
    for _ in range(config.selector.measure_rounds):
        state = at_the_end(state)
        start = time.perf_counter()
        state, report = engine.play(weights, state, orders)
        seconds.append(time.perf_counter() - start)
        tokens = int(report.count.sum())
    return Measurement(
        tokens_per_s=len(processes.players) * tokens / min(seconds),
        program_bytes=program_bytes(compiled),
        switch_s=switch_s,
    )


def _measure_train(world: World, mesh: MeshShape, places: int) -> Measurement | None:
    """Updates on rows full of the policy's tokens; None in a process that does not train."""
    if not world.processes.trains:
        return None
    rows, layout = world.config.rollout.episodes_per_step, world.train_layout(mesh)
    shapes = batch_shapes(rows, places, layout, with_proximal=world.needs_proximal)
    step = world.train_step(mesh, "policy_gradient")
    state = world.init_train_state(mesh)
    controls = np.zeros(2, np.float32)
    compiled = step.lower(state, shapes, controls).compile()
    if world.config.selector.order == "listed":
        return _bytes_only(compiled)
    elsewhere = world.init_train_state(world.train_candidates[0])
    shardings = world.train_state_shardings(mesh)
    reshard(elsewhere, shardings)
    switch_s = _seconds(lambda: reshard(elsewhere, shardings))
    batch = jax.tree.map(
        lambda shape: place(np.ones(shape.shape, shape.dtype), shape.sharding), shapes
    )
    state, metrics = step(state, batch, controls)
    jax.block_until_ready(metrics)
    seconds = []
    for _ in range(world.config.selector.measure_rounds):
        start = time.perf_counter()
        state, metrics = step(state, batch, controls)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - start)
    return Measurement(
        tokens_per_s=rows * places / min(seconds),
        program_bytes=program_bytes(compiled),
        switch_s=switch_s,
    )


def _bytes_only(compiled: Any) -> Measurement:
    return Measurement(tokens_per_s=None, program_bytes=program_bytes(compiled), switch_s=0.0)


def _seconds(move: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(move())
    return time.perf_counter() - start
