# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The backup of the trainer's state: bit for bit, in the same shardings, in no device memory."""

import gc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from earl_jax.train.backup import StateBackup, StateLost
from earl_jax.train.offload import (
    has_host_memory,
    is_offloaded,
    load_moments,
    offload_moments,
    to_memory,
)
from earl_jax.train.state import TrainState
from tests.support.allocator import live_bytes, memory_limit
from tests.support.processes import Processes

P = PartitionSpec


def made(seed=0):
    """A state cut over all devices, over some with copies on others, and whole on each."""
    num = len(jax.devices())
    mesh = Mesh(np.array(jax.devices()).reshape(num // 2, 2), ("x", "y"))
    rng = np.random.default_rng(seed)

    def array(shape, dtype, *spec):
        values = (100 * rng.standard_normal(shape)).astype(dtype)
        where = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(shape, where, lambda index: values[index])

    def tree(dtype):
        return {
            "cut": array((32, 64), dtype, ("x", "y")),
            "copied": array((16, 24), dtype, None, "y"),
            "whole": array((128,), dtype),
        }

    return TrainState(
        updates=array((), np.int32),
        params=tree(np.float32),
        optimizer=(tree(ml_dtypes.bfloat16), array((), np.int32)),
    )


def bits(state):
    """The bytes of each shard on this process's devices."""
    return [
        [np.array(shard.data).tobytes() for shard in leaf.addressable_shards]
        for leaf in jax.tree.leaves(state)
    ]


def shardings(state):
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def failing():
    """A donating program that wants 4 GB more on each device."""

    def step(state):
        return jax.tree.map(lambda x: x + 1, state), jnp.zeros((2**15, 2**15)) + state.updates

    return jax.jit(step, donate_argnums=0)


def lose(state):
    with memory_limit(2**31, takes_donated=True):
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            failing()(state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("pinned", [False, True])
def test_a_lost_state_is_restored_bit_for_bit_in_its_shardings(monkeypatch, pinned):
    monkeypatch.setattr("earl_jax.train.backup._has_pinned_memory", lambda _: pinned)
    state, backup = made(), StateBackup()
    before, where = bits(state), shardings(state)
    backup.save("step", state)
    lose(state)
    restored = backup.restore(state)
    assert bits(restored) == before and shardings(restored) == where
    # Each device has a buffer of its own, which the next program may take.
    whole = restored.params["whole"].addressable_shards
    assert len({shard.data.unsafe_buffer_pointer() for shard in whole}) == 8
    add = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    after = add(restored)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(restored.params))
    assert bits(after) == bits(add(made()))


def test_a_backup_takes_no_device_memory_and_a_restored_state_only_its_own():
    state, backup = made(), StateBackup()
    before = bits(state)
    gc.collect()
    held = live_bytes()
    with memory_limit(max(held.values())) as allocator:
        backup.save("step", state)
    assert live_bytes() == held
    assert (allocator.num_programs, allocator.refused) == (0, [])
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    with memory_limit(max(held.values())):
        restored = backup.restore(state)
    assert live_bytes() == held and bits(restored) == before


def test_arrays_that_are_not_deleted_are_used_as_they_are():
    state, backup = made(), StateBackup()
    before = bits(state)
    backup.save("step", state)
    assert backup.restore(state) is state
    backup.save("step", state)
    state.params["copied"].delete()
    restored = backup.restore(state)
    assert restored.params["cut"] is state.params["cut"]
    assert bits(restored) == before


def test_a_program_that_ran_once_is_not_backed_up_again():
    state, backup = made(), StateBackup()
    backup.save("one", state)
    backup.discard()
    backup.save("one", state)
    lose(state)
    with pytest.raises(StateLost, match="newest checkpoint"):
        backup.restore(state)
    state = made()
    before = bits(state)
    backup.save("other", state)
    lose(state)
    assert bits(backup.restore(state)) == before


def test_without_a_backup_a_lost_state_is_an_error():
    state, backup = made(), StateBackup(enabled=False)
    backup.save("step", state)
    assert backup.restore(state) is state
    lose(state)
    with pytest.raises(StateLost, match="had run before|newest checkpoint"):
        backup.restore(state)


def test_offloaded_moments_leave_the_devices_and_come_back_bit_for_bit():
    state = made()
    before, where = bits(state), shardings(state)
    gc.collect()
    held = sum(live_bytes().values())
    moments = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(state.optimizer)
        for shard in leaf.addressable_shards
    )
    assert has_host_memory(jax.devices()[0]) and not is_offloaded(state)
    assert load_moments(state) is state
    away = offload_moments(state)
    assert is_offloaded(away) and bits(away) == before
    assert held - sum(live_bytes().values()) == moments
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.optimizer))
    back = load_moments(away)
    assert not is_offloaded(back) and bits(back) == before and shardings(back) == where
    assert shardings(to_memory(back, "device")) == where


def test_an_offloaded_state_is_restored_to_host_memory():
    state, backup = offload_moments(made()), StateBackup()
    before, where = bits(state), shardings(state)
    backup.save("step", state)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    restored = backup.restore(state)
    assert bits(restored) == before and shardings(restored) == where and is_offloaded(restored)


def lost_in_one_process():
    """One of two processes loses its part of the state; both have the same state then."""
    state, backup = made(), StateBackup()
    before, where = bits(state), shardings(state)
    backup.save("step", state)
    if jax.process_index() == 1:
        for leaf in jax.tree.leaves(state):
            leaf.delete()
    restored = backup.restore(state)
    return bits(restored) == before and shardings(restored) == where


@pytest.mark.slow
def test_each_of_several_processes_restores_the_shards_of_its_devices():
    assert Processes(2, 2, "test_backup:lost_in_one_process").results() == [True, True]
