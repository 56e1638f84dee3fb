# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The training of a step: its updates, each done again with less where memory is short."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from earl_jax.dispatch.packing import Shape, pack_rows
from earl_jax.placement.moves import move_state
from earl_jax.placement.packing import move_batch, plan_batch, plan_of_shape, tightest_plan
from earl_jax.placement.placement import Placement
from earl_jax.placement.programs import update_key
from earl_jax.placement.stages import Stages
from earl_jax.selector.plans import TrainPlan
from earl_jax.train.sft import sft_batch
from earl_jax.train.state import TrainState
from earl_jax.train.step import read_metrics
from earl_jax.trajectory import TrajectoryBatch

Metrics = dict[str, float]
# Called with arrays under way; does something else until they are there.
Wait = Callable[[Any], None]
# Token ids of an example episode, and who wrote each: 0 or the policy's turn.
Example = tuple[Sequence[int], Sequence[int]]


def learn(
    placement: Placement,
    state: TrainState,
    batch: TrajectoryBatch,
    controls: np.ndarray,
    length: int,
    wait: Wait | None = None,
) -> tuple[TrainState, list[Metrics]]:
    """Makes the updates of one step, one an epoch; gives `state` up.

    The batch is of episodes of the context bucket `length`. `wait` is called while an update is
    under way; None: nothing else is done.

    Returns:
        The new state, and the metrics of each update: none in a process that does not train.
    """
    stages = placement.stages
    if not stages.cluster.trains:
        return state, []
    plan = plan_of_shape(stages, placement.train, Shape(*batch.tokens.shape), length)
    batch = stages.learner.score(plan, state, batch)
    updates = []
    for _ in range(stages.learner.config.epochs):
        state, batch, metrics = update(placement, state, batch, controls, length, wait=wait)
        updates.append(metrics)
    return state, updates


def sft(
    placement: Placement, state: TrainState, batches: Iterable[Sequence[Example]], length: int
) -> tuple[TrainState, list[Metrics]]:
    """Makes a supervised update of each batch of examples, cut to `length` tokens.

    Returns:
        As `learn`.
    """
    stages, updates = placement.stages, []
    controls = stages.learner.sft_controls()
    for examples in batches:
        lengths = [min(len(ids), length) for ids, _ in examples]
        # In every process: all know the same shapes.
        packing = plan_batch(placement, lengths, length)
        if not stages.cluster.trains:
            continue
        layout = stages.layouts.train(placement.train.mesh)
        batch = pack_rows(sft_batch(examples, layout, length), packing, layout)
        state, _, metrics = update(placement, state, batch, controls, length, sft=True)
        updates.append(metrics)
    return state, updates


def update(
    placement: Placement,
    state: TrainState,
    batch: TrajectoryBatch,
    controls: np.ndarray,
    length: int,
    *,
    sft: bool = False,
    wait: Wait | None = None,
) -> tuple[TrainState, TrajectoryBatch, Metrics]:
    """One update, and the batch where the trainer is then. `state` is given up.

    The batch is of episodes of the context bucket `length`.

    Where memory is too short, on another mesh, with more remat, or in smaller parts. A program that
    fails has its donated arguments with it: until it has run once there is a backup of the state in
    host memory. A program that ran once takes no more the next time.

    Raises:
        BudgetTooSmall: no plan is left.
        StateLost: a program failed that had run before.
    """
    while True:
        shape = Shape(*batch.tokens.shape)
        plan = plan_of_shape(placement.stages, placement.train, shape, length)
        if not sft:
            placement.about_to_use(update_key(plan, shape))
        placement.backup.save((plan, sft, shape), state)
        again = functools.partial(
            _run_update, placement.stages, plan, state, batch, controls, sft, wait
        )
        tightest = tightest_plan(placement.stages, placement.train, shape, length)
        done = placement.attempt("train", again, length, plan=tightest)
        if done is not None:
            placement.backup.discard()
            return done[0], batch, done[1]
        state = placement.backup.restore(state)
        placement.choose_training_again()
        state = move_state(placement, state)
        batch = move_batch(placement, batch, length)


def _run_update(
    stages: Stages,
    plan: TrainPlan,
    state: TrainState,
    batch: TrajectoryBatch,
    controls: np.ndarray,
    sft: bool,
    wait: Wait | None,
) -> tuple[TrainState, Metrics]:
    after, metrics = stages.learner.update(plan, state, batch, controls, sft=sft)
    if wait is not None:
        wait(metrics)
    # Reading what an earlier failure left ends the process (jaxlib 0.10.2); waiting for it raises.
    stages.cluster.wait(metrics, "training")
    return after, read_metrics(metrics)
