# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
<<<<<<< HEAD
"""Where the optimizer's moments wait while episodes are played and there is no room for them.

They are two thirds of a trainer's state, and no rollout needs them. Every array keeps its layout:
each device's part lies in the memory of its own host. This is memory and not a path: what goes from
device to device does not come here.
=======
"""Optimizer offload: Adam's moments in pinned host memory while a rollout needs their room.

The moments are two thirds of a trainer's state, and no rollout reads them. Every array keeps its
sharding: each device's shard goes to the memory of its own host. Offloading is no path between
devices; moves between meshes are in sharding/reshard.py.
>>>>>>> guard
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from earl_jax.train.step import TrainState

HOST_MEMORY = "pinned_host"


def offload_moments(state: TrainState) -> TrainState:
<<<<<<< HEAD
    """The state with its moments in the host's memory. Gives up those on the devices."""
=======
    """Moves the moments to host memory; deletes those on the devices."""
>>>>>>> guard
    moments = jax.block_until_ready(to_memory(state.optimizer, HOST_MEMORY))
    for leaf in jax.tree.leaves(state.optimizer):
        leaf.delete()
    return dataclasses.replace(state, optimizer=moments)


def load_moments(state: TrainState) -> TrainState:
<<<<<<< HEAD
    """The inverse of `offload_moments`; what is on the devices stays as it is. Gives nothing up."""
=======
    """Copies offloaded moments back to the devices; the inverse of `offload_moments`.

    Deletes nothing. Returns `state` itself where the moments are on the devices.
    """
>>>>>>> guard
    if not is_offloaded(state):
        return state
    kind = jax.tree.leaves(state.params)[0].sharding.memory_kind
    return dataclasses.replace(state, optimizer=to_memory(state.optimizer, kind))


def is_offloaded(state: TrainState) -> bool:
<<<<<<< HEAD
    """Whether the moments are in the host's memory."""
=======
    """Returns True if the moments are in host memory."""
>>>>>>> guard
    return HOST_MEMORY in {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.optimizer)}


def has_host_memory(device: Any) -> bool:
<<<<<<< HEAD
    """Whether arrays can be left in the memory of this device's host."""
=======
    """Returns True if arrays of this device can be kept in its host's pinned memory."""
>>>>>>> guard
    return HOST_MEMORY in {memory.kind for memory in device.addressable_memories()}


def to_memory(tree: Any, kind: str) -> Any:
<<<<<<< HEAD
    """Arrays of the same layouts in another memory; of each process what its devices hold."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [[shard.data for shard in leaf.addressable_shards] for leaf in leaves]
    there = [
=======
    """Copies arrays to memory of another kind, with the same shardings otherwise.

    Of several processes each copies the shards of its own devices.
    """
    leaves, structure = jax.tree.flatten(tree)
    shards = [[shard.data for shard in leaf.addressable_shards] for leaf in leaves]
    targets = [
>>>>>>> guard
        [SingleDeviceSharding(s.device, memory_kind=kind) for s in leaf.addressable_shards]
        for leaf in leaves
    ]
    moved = [
        jax.make_array_from_single_device_arrays(
<<<<<<< HEAD
            leaf.shape, leaf.sharding.with_memory_kind(kind), own
        )
        for leaf, own in zip(leaves, jax.device_put(parts, there), strict=True)
=======
            leaf.shape, leaf.sharding.with_memory_kind(kind), own, dtype=leaf.dtype
        )
        for leaf, own in zip(leaves, jax.device_put(shards, targets), strict=True)
>>>>>>> guard
    ]
    return jax.tree.unflatten(structure, moved)
