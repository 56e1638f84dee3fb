# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Where the optimizer's moments wait while episodes are played and there is no room for them.

They are two thirds of a trainer's state, and no rollout needs them. Every array keeps its layout:
each device's part lies in the memory of its own host. This is memory and not a path: what goes from
device to device does not come here.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from earl_jax.train.step import TrainState

HOST_MEMORY = "pinned_host"


def offload_moments(state: TrainState) -> TrainState:
    """The state with its moments in the host's memory. Gives up those on the devices."""
    moments = jax.block_until_ready(to_memory(state.optimizer, HOST_MEMORY))
    for leaf in jax.tree.leaves(state.optimizer):
        leaf.delete()
    return dataclasses.replace(state, optimizer=moments)


def load_moments(state: TrainState) -> TrainState:
    """The inverse of `offload_moments`; what is on the devices stays as it is. Gives nothing up."""
    if not is_offloaded(state):
        return state
    kind = jax.tree.leaves(state.params)[0].sharding.memory_kind
    return dataclasses.replace(state, optimizer=to_memory(state.optimizer, kind))


def is_offloaded(state: TrainState) -> bool:
    """Whether the moments are in the host's memory."""
    return HOST_MEMORY in {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.optimizer)}


def has_host_memory(device: Any) -> bool:
    """Whether arrays can be left in the memory of this device's host."""
    return HOST_MEMORY in {memory.kind for memory in device.addressable_memories()}


def to_memory(tree: Any, kind: str) -> Any:
    """Arrays of the same layouts in another memory; of each process what its devices hold."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [[shard.data for shard in leaf.addressable_shards] for leaf in leaves]
    there = [
        [SingleDeviceSharding(s.device, memory_kind=kind) for s in leaf.addressable_shards]
        for leaf in leaves
    ]
    moved = [
        jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding.with_memory_kind(kind), own
        )
        for leaf, own in zip(leaves, jax.device_put(parts, there), strict=True)
    ]
    return jax.tree.unflatten(structure, moved)
