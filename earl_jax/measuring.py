# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One candidate, measured: bytes and speed of the program that will run, on one mesh.

Bytes are XLA's own memory analysis of it; speed is that program, run: the best of some rounds,
because what disturbs a round only ever makes it slower. A run whose meshes go by the order of their
list asks for bytes only, and a program that needs more than `most` bytes a device is not run.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from earl_jax.joint import send_weights
from earl_jax.rollout.choices import no_choices
from earl_jax.rollout.config import Sampling
from earl_jax.rollout.decode_state import DecodeState
from earl_jax.rollout.orders import NO_ROW, pack_orders
from earl_jax.rollout.sampling import sampling_rows
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.selector.memory import program_bytes, resident_bytes
from earl_jax.selector.throughput import Measurement
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.placing import place
from earl_jax.sharding.reshard import reshard
from earl_jax.train.step import batch_shapes
from earl_jax.trajectory import TrajectoryBatch
from earl_jax.world import World

# A speed is that of rounds which took so long on average, or of more: five take 0.25 s in all.
ROUND_S = 0.05
# What a measurement says that could not be made.
NOTHING_KNOWN = Measurement(tokens_per_s=None, program_bytes=0, switch_s=0.0)


@functools.cache
def pool_bytes(world: World, mesh: MeshShape, places: int, rung: RolloutRung) -> int:
    """Bytes per device of the KV cache with so many pages a lane."""
    engine = world.engine(mesh, rung.num_slots, rung.page_size)
    pool = world.pool_of(mesh, rung.pages)
    layers = engine.state_shapes(places, pool).cache.layers
    return resident_bytes(layers, engine.state_shardings.cache.layers)


def measure_rollout(
    world: World, mesh: MeshShape, places: int, rung: RolloutRung, most: float = math.inf
) -> Measurement | None:
    """Rounds with every slot busy, at the end of its room: a chunk appended, a burst sampled.

    The bytes are those with pages for all slots; where the budget does not hold so many, rounds
    have the rung's, of which slots of a lane then read the same. Every process sends and receives
    the weights; None in one that does not play.
    """
    processes, config, slots = world.processes, world.config, rung.num_slots
    engine, plays = world.engine(mesh, slots, rung.page_size), processes.plays
    compiled = engine.lower_play(places).compile() if plays else None
    if plays and program_bytes(compiled) > most or config.selector.order == "listed":
        return bytes_only(compiled) if plays else None
    params = world.policy(world.init_train_state(world.train_candidates[0]))

    def move() -> Any:
        return send_weights(world, params, mesh, slots).params

    weights = move()
    switch_s = _seconds(move)
    if not plays:
        return None
    branches = engine.config.rules.choice_branches
    count = min(config.rollout.chunk_size, places - config.rollout.burst)

    def orders_for(busy: np.ndarray) -> np.ndarray:
        return pack_orders(
            chunk=np.ones((slots, config.rollout.chunk_size), np.int32),
            count=count * busy,
            restart=np.zeros(slots, np.int32),
            speak=busy,
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

    fits = compiled is not None and program_bytes(compiled) <= (world.budget_bytes or math.inf)
    pool = None if fits else world.pool_of(mesh, rung.pages)
    state = engine.empty_state(places, pool)

    def speed_with(busy: int) -> float:
        """Tokens per second with so many slots at work."""
        nonlocal state
        orders = orders_for((np.arange(slots) < busy).astype(np.int32))
        state, _ = engine.play(weights, at_the_end(state), orders)
        seconds, tokens = [], 0
        while not _are_enough(seconds, config.selector.measure_rounds):
            state = at_the_end(state)
            start = time.perf_counter()
            state, report = engine.play(weights, state, orders)
            seconds.append(time.perf_counter() - start)
            tokens = int(report.count.sum())
        return tokens / min(seconds)

    # The one before all: slots that have begun to speak go on.
    alone = speed_with(1)
    return Measurement(
        tokens_per_s=len(processes.players) * speed_with(slots),
        alone_tokens_per_s=alone,
        program_bytes=program_bytes(compiled),
        switch_s=switch_s,
    )


def _batch_shapes(world: World, mesh: MeshShape, places: int) -> TrajectoryBatch:
    rows, layout = world.config.rollout.episodes_per_step, world.train_layout(mesh)
    return batch_shapes(rows, places, layout, with_proximal=world.needs_proximal)


def lower_train(world: World, mesh: MeshShape, places: int, rung: TrainRung) -> Any:
    """The update's program, from shapes alone."""
    state = jax.tree.map(
        lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
        world.train_state_shapes(),
        world.train_state_shardings(mesh),
    )
    step = world.train_step(mesh, "policy_gradient", rung)
    return step.lower(state, _batch_shapes(world, mesh, places), np.zeros(2, np.float32))


def measure_train(
    world: World, mesh: MeshShape, places: int, rung: TrainRung, most: float = math.inf
) -> Measurement | None:
    """Updates on rows full of the policy's tokens; None in a process that does not train."""
    if not world.processes.trains:
        return None
    compiled = lower_train(world, mesh, places, rung).compile()
    if world.config.selector.order == "listed" or program_bytes(compiled) > most:
        return bytes_only(compiled)
    rows, shapes = world.config.rollout.episodes_per_step, _batch_shapes(world, mesh, places)
    step = world.train_step(mesh, "policy_gradient", rung)
    state = world.init_train_state(mesh)
    controls = np.zeros(2, np.float32)
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
    while not _are_enough(seconds, world.config.selector.measure_rounds):
        start = time.perf_counter()
        state, metrics = step(state, batch, controls)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - start)
    return Measurement(
        tokens_per_s=rows * places / min(seconds),
        program_bytes=program_bytes(compiled),
        switch_s=switch_s,
    )


def on_the_clock(measure: Callable[[], Measurement | None]) -> Measurement | None:
    """What it measures, and how long that took."""
    start = time.perf_counter()
    found = measure()
    return found and dataclasses.replace(found, took_s=time.perf_counter() - start)


def bytes_only(compiled: Any) -> Measurement:
    """What is known of a program that is not run."""
    return dataclasses.replace(NOTHING_KNOWN, program_bytes=program_bytes(compiled))


def _are_enough(seconds: Sequence[float], rounds: int) -> bool:
    """So many rounds, over some time: what disturbs a machine outlasts a few rounds of 3 ms."""
    return len(seconds) >= rounds and sum(seconds) >= rounds * ROUND_S


def _seconds(move: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(move())
    return time.perf_counter() - start
