# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A backup of the trainer's state in host memory while a program runs for the first time.

A program that runs out of memory takes its donated arguments with it (XLA on CPUs, jaxlib 0.10.2),
and the trainer's state is donated. A program that ran once needs no more memory the next time, so
that each is backed up against only once.
"""

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from earl_jax.train.offload import HOST_MEMORY, has_host_memory
from earl_jax.train.state import TrainState


class StateLost(RuntimeError):
    """A program ran out of memory and took the trainer's state with it; there was no backup."""


class StateBackup:
    """Keeps a host copy of the state until the program that takes the state has run once.

    Example:
        backup.save(key, state)
        try:
            state = program(state, batch)  # donates the state
            backup.discard()
        except jax.errors.JaxRuntimeError:
            state = backup.restore(state)
    """

    def __init__(self, enabled: bool = True) -> None:
        """Begins without a copy; if not `enabled`, `save` copies nothing and `restore` may fail."""
        self._enabled = enabled
        self._proven: set[Hashable] = set()
        self._program: Hashable = None
        self._copy: list[_HostArray] | None = None

    def save(self, program: Hashable, state: TrainState) -> None:
        """Copies the state to host memory, unless `program` has run before.

        Takes no device memory. A shard that several devices hold is copied once. Of several
        processes each copies what its own devices hold.
        """
        self._program, self._copy = program, None
        if self._enabled and program not in self._proven:
            self._copy = [_HostArray(leaf) for leaf in jax.tree.leaves(state)]
            jax.block_until_ready([list(copy.shards.values()) for copy in self._copy])

    def discard(self) -> None:
        """Frees the copy and remembers that the program ran."""
        self._proven.add(self._program)
        self._copy = None

    def restore(self, state: TrainState) -> TrainState:
        """Returns the state from before the program, bit for bit in the same shardings.

        Arrays that are still there are used as they are; those that the program took come from the
        copy, which is freed.

        Raises:
            StateLost: arrays are gone, and there is no copy because the program had run before.
        """
        leaves, structure = jax.tree.flatten(state)
        copy, self._copy = self._copy, None
        if not any(map(_is_gone, leaves)):
            return state
        if copy is None:
            raise StateLost(
                "training ran out of memory in a program that had run before, and lost the "
                "weights; the failure is remembered: the run goes on from its newest checkpoint "
                "with less memory"
            )
        restored = [
            on_host.to_devices() if _is_gone(leaf) else leaf
            for leaf, on_host in zip(leaves, copy, strict=True)
        ]
        return jax.tree.unflatten(structure, jax.block_until_ready(restored))


def _is_gone(leaf: jax.Array) -> bool:
    """Returns True if a program has taken any part of an array; `is_deleted` looks at one alone."""
    return leaf.is_deleted() or any(s.data.is_deleted() for s in leaf.addressable_shards)


class _HostArray:
    """This process's shards of an array in host memory; replicas are kept once.

    Shards are pinned host arrays where the device has such memory, which its copy engine reads
    directly; on CPUs numpy arrays, because device memory is host memory there.
    """

    def __init__(self, array: jax.Array) -> None:
        self._shape, self._dtype, self._sharding = array.shape, array.dtype, array.sharding
        # By the shard's index in the array, as text.
        self._regions = {shard.device: str(shard.index) for shard in array.addressable_shards}
        self.shards: dict[str, Any] = {}
        for shard in array.addressable_shards:
            if str(shard.index) not in self.shards:
                self.shards[str(shard.index)] = _to_host(shard.data, shard.device)

    def to_devices(self) -> jax.Array:
        """Returns the array; one device of a region gets it from the host, the others from it."""
        placed: list[jax.Array] = []
        first: dict[str, jax.Array] = {}
        for device, region in self._regions.items():
            target = SingleDeviceSharding(device, memory_kind=self._sharding.memory_kind)
            source = first.get(region, self.shards[region])
            # A CPU device would otherwise use the memory of a numpy array as its own.
            placed.append(jax.device_put(source, target, may_alias=False))
            first.setdefault(region, placed[-1])
        return jax.make_array_from_single_device_arrays(
            self._shape, self._sharding, placed, dtype=self._dtype
        )


def _to_host(shard: jax.Array, device: Any) -> Any:
    if _has_pinned_memory(device):
        return jax.device_put(shard, SingleDeviceSharding(device, memory_kind=HOST_MEMORY))
    # An array keeps what the host has read of it, and its device gives that memory to no program
    # then (jax 0.11): read another array of the same memory, which is dropped.
    other = jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])
    return np.array(jax.device_get(other))


def _has_pinned_memory(device: Any) -> bool:
    return device.platform != "cpu" and has_host_memory(device)
