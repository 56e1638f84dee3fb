# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Moves of the trainer's state to the training mesh in use, and of its moments to host memory.

The plans that it moves to are events of the run (rollout/events.py).
"""

import functools
import time
from typing import Any

import jax

from earl_jax.placement.placement import Placement
from earl_jax.sharding.carry import carry, is_placed
from earl_jax.sharding.placing import absent_tree
from earl_jax.sharding.reshard import reshard
from earl_jax.train.offload import is_offloaded, load_moments, offload_moments
from earl_jax.train.state import TrainState


def move_state(placement: Placement, state: TrainState, *, to_play: bool = False) -> TrainState:
    """Moves parameters and optimizer state to the training mesh in use; gives `state` up.

    Where memory is too short for that, even piece by piece, the state goes to another mesh. With
    `to_play` the moments then go to host memory, if the rollout's plan offloads them.

    Raises:
        BudgetTooSmall: no mesh is left.
    """
    rollout = placement.plans.rollout
    offload = to_play and rollout is not None and rollout.offload
    where = placement.stages.learner.state_shardings(placement.train.mesh)
    if offload and is_offloaded(state) and is_placed(state.params, where.params):
        return state
    state = _to_mesh(placement, load_moments(state))
    return offload_moments(state) if offload else state


def settle(
    placement: Placement, state: TrainState, version: int | None = None, *, to_play: bool = False
) -> TrainState:
    """Moves the state to the plans that were chosen, as `move_state`, and notes these.

    In a replay they are those of then. `version` is that of the weights, None: of the last event.
    """
    restore_plans(placement)
    state = move_state(placement, state, to_play=to_play)
    note_plans(placement, version)
    return state


def note_plans(placement: Placement, version: int | None = None) -> None:
    """Notes the plans in use; `version` as of `settle`."""
    # The events of a process that only trains know of no weights that were published.
    facts = {} if version is None else {"version": version}
    placement.events.note("plans", **facts, placement=placement.as_dict())


def restore_plans(placement: Placement) -> bool:
    """Takes the plans of the run that is replayed into use, if these come next. False if not."""
    event = placement.events.coming("plans")
    if event is not None:
        placement.restore(event["placement"])
    return event is not None


def _to_mesh(placement: Placement, state: TrainState) -> TrainState:
    stages = placement.stages

    def together(shardings: Any) -> TrainState:
        with stages.cluster.limited("the switch of the trainer"):
            moved = reshard(state, shardings, chunk_bytes=stages.chunk_bytes, donate=True)
            return jax.block_until_ready(moved)

    while True:
        shardings = stages.learner.state_shardings(placement.train.mesh).like(state)
        if is_placed(state, shardings):
            return state
        if not stages.cluster.trains:
            return absent_tree(stages.learner.state_shapes().like(state), shardings)
        start = time.perf_counter()
        if stages.cluster.count > 1:
            moved = placement.attempt("train", functools.partial(together, shardings))
            assert moved is not None, "of several processes one that is short ends"
            state, whole = moved, True
        else:
            attempt = functools.partial(placement.attempt, None)
            state, whole = carry(state, shardings, stages.chunk_bytes, attempt)
        placement.log.switch_s += time.perf_counter() - start
        if whole:
            return state
        placement.fail("train", in_move=True)
        placement.choose_training()
