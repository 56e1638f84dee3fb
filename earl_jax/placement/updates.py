# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The training of a step: its updates, each done again with less where memory is short."""

import functools

import jax
import numpy as np

from earl_jax.placement.placement import Placement
from earl_jax.placement.programs import update_key
from earl_jax.sharding.reshard import reshard
from earl_jax.train.step import TrainState, read_metrics
from earl_jax.trajectory import TrajectoryBatch
from earl_jax.world import World

Metrics = dict[str, float]


def learn(
    world: World, placement: Placement, state: TrainState, batch: TrajectoryBatch, step: int
) -> tuple[TrainState, list[Metrics]]:
    """The updates of one step; the first one's mismatch is taken before anything has changed.

    There are none in a process that does not train.
    """
    if not world.processes.trains:
        return state, []
    batch = world.learner.score(placement.train, state, batch)
    controls = world.learner.controls(step, world.config.num_steps)
    updates = []
    for _ in range(world.config.train.epochs):
        state, batch, metrics = update(world, placement, state, batch, controls)
        updates.append(metrics)
    return state, updates


def sft(
    world: World, placement: Placement, state: TrainState, step: int, length: int
) -> TrainState:
    """The supervised updates of the first steps, on games of random legal moves."""
    if not world.processes.trains:
        return state
    controls = world.learner.sft_controls()
    for games in world.demonstrations(step):
        batch = games.on(world.train_layout(placement.train.mesh), length)
        state, _, _ = update(world, placement, state, batch, controls, sft=True)
    return state


def update(
    world: World,
    placement: Placement,
    state: TrainState,
    batch: TrajectoryBatch,
    controls: np.ndarray,
    *,
    sft: bool = False,
) -> tuple[TrainState, TrajectoryBatch, Metrics]:
    """One update, and the batch where the trainer is then. `state` is given up.

    Where memory is too short, on another mesh, with more remat, or in smaller parts. A program that
    fails has its donated arguments with it: until it has run once there is a backup of the state in
    host memory. A program that ran once takes no more the next time.

    Raises:
        BudgetTooSmall: no plan is left.
        StateLost: a program failed that had run before.
    """
    while True:
        plan, length = placement.train, batch.tokens.shape[1]
        if not sft:
            placement.about_to_use(update_key(plan, length))
        placement.backup.save((plan, sft, batch.tokens.shape), state)
        again = functools.partial(_run_update, world, placement, state, batch, controls, sft=sft)
        done = placement.attempt("train", again, length)
        if done is not None:
            placement.backup.discard()
            return done[0], batch, done[1]
        state = placement.backup.restore(state)
        placement.choose_training_again()
        state = placement.move_state(state)
        layout = world.train_layout(placement.train.mesh)
        rows = jax.tree.map(lambda _, layout=layout: layout.activations("NS"), batch)
        batch = reshard(batch, rows)


def _run_update(
    world: World,
    placement: Placement,
    state: TrainState,
    batch: TrajectoryBatch,
    controls: np.ndarray,
    *,
    sft: bool,
) -> tuple[TrainState, Metrics]:
    after, metrics = world.learner.update(placement.train, state, batch, controls, sft=sft)
    # Reading what an earlier failure left ends the process (jaxlib 0.10.2); waiting for it raises.
    world.processes.wait(metrics, "training")
    return after, read_metrics(metrics)
