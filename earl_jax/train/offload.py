# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Optimizer offload: Adam's moments in pinned host memory while a rollout needs their bytes.

The moments are two thirds of a trainer's state, and no rollout reads them. Every array keeps its
sharding: each device's shard goes to the memory of its own host. Offloading is no path between
devices; moves between meshes are in sharding/reshard.py.
"""

from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from earl_jax.train.state import TrainState

HOST_MEMORY = "pinned_host"


def offload_moments(state: TrainState) -> TrainState:
    """Moves the moments to host memory; deletes those on the devices."""
    moments = jax.block_until_ready(to_memory(state.moments, HOST_MEMORY))
    for leaf in jax.tree.leaves(state.moments):
        leaf.delete()
    return state.with_moments(moments)


def load_moments(state: TrainState) -> TrainState:
    """Copies offloaded moments back to the devices; the inverse of `offload_moments`.

    Deletes nothing. Returns `state` itself where the moments are on the devices.
    """
    if not is_offloaded(state):
        return state
    kind = jax.tree.leaves(state.params)[0].sharding.memory_kind
    return state.with_moments(to_memory(state.moments, kind))


def is_offloaded(state: TrainState) -> bool:
    """Returns True if the moments are in host memory."""
    return HOST_MEMORY in {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.moments)}


def has_host_memory(device: Any) -> bool:
    """Returns True if arrays of this device can be kept in its host's pinned memory."""
    return HOST_MEMORY in {memory.kind for memory in device.addressable_memories()}


def to_memory(tree: Any, kind: str) -> Any:
    """Copies arrays to memory of another kind, with the same shardings otherwise.

    Each process copies the shards of its own devices.
    """
    leaves, structure = jax.tree.flatten(tree)
    shards = [[shard.data for shard in leaf.addressable_shards] for leaf in leaves]
    targets = [
        [SingleDeviceSharding(s.device, memory_kind=kind) for s in leaf.addressable_shards]
        for leaf in leaves
    ]
    moved = [
        jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding.with_memory_kind(kind), own, dtype=leaf.dtype
        )
        for leaf, own in zip(leaves, jax.device_put(shards, targets), strict=True)
    ]
    return jax.tree.unflatten(structure, moved)
