# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints where the devices have no memory for a copy of the state."""

import gc
import types

import jax
import numpy as np
import pytest

from earl_jax.run.position import Position
from earl_jax.run.saver import save as save_position
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.telemetry.load import LoadHistory
from earl_jax.train.offload import is_offloaded, offload_moments
from earl_jax.train.saved_state import copy_to_save
from earl_jax.train.state import state_shardings
from tests.support.allocator import live_bytes, memory_limit
from tests.support.clusters import cluster_of
from tests.support.saved_states import (
    CUBE,
    D8,
    MODEL,
    POSITION,
    TRAIN,
    VOCAB,
    assert_bitwise_equal,
    made,
    restored,
)

F8 = make_layout(MeshShape(fsdp=8))
# The part of a run and of its placement that saving takes.
RUN = types.SimpleNamespace(
    cluster=cluster_of(0, count=1),
    tasks=types.SimpleNamespace(state=dict),
    stages=types.SimpleNamespace(saved_shardings=None),
)
PLACEMENT = types.SimpleNamespace(
    played=set(),
    as_dict=dict,
    table=types.SimpleNamespace(as_dict=dict),
)


def state_on(layout):
    where = state_shardings(MODEL, TRAIN, VOCAB, layout)
    state = jax.block_until_ready(jax.tree.map(jax.device_put, made(3), where))
    gc.collect()
    return state


def save(checkpoints, state):
    position = Position(step=1, state=state, history=LoadHistory())
    save_position(RUN, PLACEMENT, checkpoints, position)


overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 7, s), donate_argnums=0)


def test_a_state_that_only_just_fits_is_saved_from_its_own_arrays(checkpoints, tmp_path):
    """Bit for bit, with no more memory than it has, and on disk before the next step takes it."""
    state = state_on(CUBE)
    overwrite.lower(state).compile()
    with memory_limit(max(live_bytes().values())) as allocator:
        save(checkpoints, state)
        # One copy is tried; arrays that nothing can be computed of are saved unchecked.
        assert allocator.refused.count("program jit(copy)") == 1
        # Another process would find it finished.
        assert (tmp_path / "checkpoints" / "1" / "state").is_dir()
    jax.block_until_ready(overwrite(state))
    assert_bitwise_equal(made(3), restored(checkpoints, 1))


def test_offloaded_moments_are_saved_from_host_memory(checkpoints):
    state = offload_moments(state_on(D8))
    gc.collect()
    with memory_limit(max(live_bytes().values())) as allocator:
        save(checkpoints, state)
    assert "program jit(copy)" not in allocator.refused and is_offloaded(state)
    assert_bitwise_equal(made(3), restored(checkpoints, 1))


def test_with_memory_for_a_copy_the_state_may_go_while_it_is_written(checkpoints):
    state = state_on(F8)
    with memory_limit(3 * max(live_bytes().values())) as allocator:
        copied, is_copy = copy_to_save(state, None)
    assert is_copy and allocator.refused == []
    checkpoints.save(1, copied, POSITION)
    jax.block_until_ready(overwrite(state))
    checkpoints.wait()
    assert_bitwise_equal(made(3), restored(checkpoints, 1))


def test_other_errors_end_the_save(monkeypatch):
    state = state_on(F8)
    monkeypatch.setattr("earl_jax.train.saved_state.jnp.copy", lambda _: np.zeros(1) / None)
    with pytest.raises(TypeError):
        copy_to_save(state, None)
