# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The seconds of a rollout, or of an update, on every mesh that a config may use.

    python -m earl_jax.bench rollout --config=configs/X.py [--config.section.key=value]
    python -m earl_jax.bench train --config=configs/X.py

Rollouts play the first step's real episodes with random weights; updates are of full rows. Both are
at the last of config.rollout.context_buckets, and the median behind one that is not timed.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from earl_jax.config import Config
from earl_jax.loop import play_all
from earl_jax.placement.placement import Placement
from earl_jax.selector.plans import TrainPlan
from earl_jax.selector.table import ThroughputTable
from earl_jax.sharding.layout import MeshShape
from earl_jax.train.step import batch_shapes, read_metrics
from earl_jax.world import World


def placement_on(world: World, rollout: MeshShape | None, train: MeshShape | None) -> Placement:
    """Returns a placement that may use these meshes only; None: all that the config may use."""
    placement = Placement(world, ThroughputTable())
    placement.problem = dataclasses.replace(
        world.problem,
        rollout_meshes_named=(str(rollout),) if rollout else world.problem.rollout_meshes_named,
        train_meshes_named=(str(train),) if train else world.problem.train_meshes_named,
    )
    return placement


def rollout_rows(config: Config, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each rollout mesh."""
    world, tokens = World(config), config.rollout.context_buckets[-1]
    tasks = world.training_tasks(0)
    for mesh in world.problem.rollout_meshes_for(tokens):
        placement = placement_on(world, mesh, None)
        placement.choose_step(tokens, None)
        state = placement.move_state(world.init_train_state(placement.train.mesh), to_play=True)
        found: list[Any] = []

        def run(placement: Placement = placement, state: Any = state, found: Any = found) -> None:
            session, _ = placement.sessions.open(world.policy(state), version=0)
            found.append(play_all(world, placement, session, tasks, None)[1].stats)

        seconds = median_s(run, repeats)
        stats = found[-1]
        yield {
            "mesh": str(mesh),
            "slots": placement.rollout.num_slots,
            "s": seconds,
            "tokens": stats.rollout_tokens,
            "tokens/s": stats.rollout_tokens / seconds,
            "tokens/s in full rounds": stats.tokens_per_s,
        }


def train_rows(config: Config, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each training mesh."""
    world, length = World(config), config.rollout.context_buckets[-1]
    num_rows = config.rollout.episodes_per_step
    for mesh in world.problem.train_meshes_for(length):
        placement = placement_on(world, None, mesh)
        placement.choose_step(length, None)
        placement.length = length
        plan = placement.choose_training_again().train.plan  # pyright: ignore
        seconds = median_s(update_of(world, plan, length), repeats)
        yield {
            "mesh": str(mesh),
            "micro-batches": plan.micro_batches,
            "remat": plan.remat,
            "s": seconds,
            "tokens": num_rows * length,
            "tokens/s": num_rows * length / seconds,
        }


def update_of(world: World, plan: TrainPlan, length: int) -> Callable[[], None]:
    """Returns what trains once on full rows of `length` tokens."""
    rows, layout = world.config.rollout.episodes_per_step, world.train_layout(plan.mesh)
    shapes = batch_shapes(rows, length, layout, scored=world.learner.scored)
    batch = jax.tree.map(
        lambda shape: jax.device_put(np.ones(shape.shape, shape.dtype), shape.sharding), shapes
    )
    program, state = world.learner.program(plan), world.init_train_state(plan.mesh)

    def run() -> None:
        nonlocal state
        state, metrics = program(state, batch, np.zeros(2, np.float32))
        read_metrics(metrics)

    return run


def median_s(run: Callable[[], None], repeats: int) -> float:
    """Returns the median seconds of `repeats` runs, behind one that is not timed."""
    seconds = []
    for _ in range(1 + repeats):
        start_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[1:])
