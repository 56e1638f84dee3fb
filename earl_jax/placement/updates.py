# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The training of a step: its updates, each done again with less where memory is short."""

import functools
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from earl_jax.placement.moves import move_state
from earl_jax.placement.placement import Placement
from earl_jax.placement.programs import update_key
from earl_jax.sharding.reshard import reshard
from earl_jax.train.sft import sft_batch
from earl_jax.train.state import TrainState
from earl_jax.train.step import read_metrics
from earl_jax.trajectory import TrajectoryBatch

Metrics = dict[str, float]
# Token ids of an example episode, and who wrote each: 0 or the policy's turn.
Example = tuple[Sequence[int], Sequence[int]]


def learn(
    placement: Placement,
    state: TrainState,
    batch: TrajectoryBatch,
    controls: np.ndarray,
    epochs: int,
) -> tuple[TrainState, list[Metrics]]:
    """Makes the updates of one step, one an epoch; gives `state` up.

    Returns:
        The new state, and the metrics of each update: none in a process that does not train.
    """
    stages = placement.stages
    if not stages.cluster.trains:
        return state, []
    batch = stages.learner.score(placement.train, state, batch)
    updates = []
    for _ in range(epochs):
        state, batch, metrics = update(placement, state, batch, controls)
        updates.append(metrics)
    return state, updates


def sft(
    placement: Placement, state: TrainState, batches: Iterable[Sequence[Example]], length: int
) -> tuple[TrainState, list[Metrics]]:
    """Makes a supervised update of each batch of examples, in rows of `length` tokens.

    Returns:
        As `learn`.
    """
    stages, updates = placement.stages, []
    if not stages.cluster.trains:
        return state, updates
    controls = stages.learner.sft_controls()
    for examples in batches:
        batch = sft_batch(examples, stages.layouts.train(placement.train.mesh), length)
        state, _, metrics = update(placement, state, batch, controls, sft=True)
        updates.append(metrics)
    return state, updates


def update(
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
        again = functools.partial(_run_update, placement, state, batch, controls, sft=sft)
        done = placement.attempt("train", again, length)
        if done is not None:
            placement.backup.discard()
            return done[0], batch, done[1]
        state = placement.backup.restore(state)
        placement.choose_training_again()
        state = move_state(placement, state)
        layout = placement.stages.layouts.train(placement.train.mesh)
        rows = jax.tree.map(lambda _, layout=layout: layout.activations("NS"), batch)
        batch = reshard(batch, rows)


def _run_update(
    placement: Placement,
    state: TrainState,
    batch: TrajectoryBatch,
    controls: np.ndarray,
    *,
    sft: bool,
) -> tuple[TrainState, Metrics]:
    stages = placement.stages
    after, metrics = stages.learner.update(placement.train, state, batch, controls, sft=sft)
    # Reading what an earlier failure left ends the process (jaxlib 0.10.2); waiting for it raises.
    stages.cluster.wait(metrics, "training")
    return after, read_metrics(metrics)
