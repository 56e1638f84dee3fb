# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The training of a step: its updates, each done again with less where memory is short."""

import functools
from typing import Any

import jax
import numpy as np

from earl_jax.placement.placement import Placement
from earl_jax.placement.programs import update_key
from earl_jax.sharding.reshard import reshard
from earl_jax.train.optimizer import entropy_coefficient, learning_rate
from earl_jax.train.step import Objective, TrainState, UpdateMetrics, read_metrics
from earl_jax.trajectory import TrajectoryBatch
from earl_jax.world import World


def learn(
    world: World, placement: Placement, state: TrainState, batch: TrajectoryBatch, step: int
) -> tuple[TrainState, list[UpdateMetrics]]:
    """The updates of one step; the first one's mismatch is taken before anything has changed.

    There are none in a process that does not train.
    """
    config = world.config
    if not world.processes.trains:
        return state, []
    if world.needs_proximal:
        batch = world.scorer(placement.train)(state, batch)
    controls = np.array(
        [
            learning_rate(config.train, step, config.num_steps),
            entropy_coefficient(config.train, step, config.num_steps),
        ],
        np.float32,
    )
    updates = []
    for _ in range(config.train.epochs):
        state, batch, metrics = update(world, placement, state, batch, controls, "policy_gradient")
        updates.append(metrics)
    return state, updates


def sft(
    world: World, placement: Placement, state: TrainState, step: int, length: int
) -> TrainState:
    """The supervised updates of the first steps, on example episodes."""
    if not world.processes.trains:
        return state
    controls = np.array([world.config.train.sft_learning_rate, 0.0], np.float32)
    for games in world.demonstrations(step):
        batch = games.on(world.train_layout(placement.train.mesh), length)
        state, _, _ = update(world, placement, state, batch, controls, "supervised")
    return state


def update(
    world: World,
    placement: Placement,
    state: TrainState,
    batch: TrajectoryBatch,
    controls: np.ndarray,
    objective: Objective,
) -> tuple[TrainState, TrajectoryBatch, UpdateMetrics]:
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
        program = world.train_step(plan, objective)
        if objective == "policy_gradient":
            placement.about_to_use(update_key(plan, length))
        placement.backup.save((plan, objective, batch.tokens.shape), state)
        again = functools.partial(_run_update, world, program, state, batch, controls)
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
    world: World, program: Any, state: TrainState, batch: TrajectoryBatch, controls: np.ndarray
) -> tuple[TrainState, UpdateMetrics]:
    after, metrics = program(state, batch, controls)
    # Reading what an earlier failure left ends the process (jaxlib 0.10.2); waiting for it raises.
    world.processes.wait(metrics, "training")
    return after, read_metrics(metrics)
