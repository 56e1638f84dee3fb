# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Copies between files and devices by blocks; host memory does not grow with the array.

Every device has one block in hand at a time, and the host the one that it reads or writes. A block
is a part of each device's own part, so nothing travels between devices.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

# In fp32. Large enough that a model of 70 B parameters on 8 devices is some 8,000 of them.
BLOCK_BYTES = 4 * 2**20

Region = tuple[tuple[int, int], ...]
"""One (start, stop) per axis."""


def block_shape(
    axes: str, local_shape: Sequence[int], num_stacked: int, cut: str
) -> tuple[int, ...]:
    """Returns the shape of a block of a device's part, of at most BLOCK_BYTES if `cut` allows it.

    The first `num_stacked` axes are always cut apart; then the letters of `cut` are cut in their
    order, each no further than needed.

    Example: "LFD" of (2, 8192, 2048), L stacked, cut along "DF" (a tensor that has D outermost):
    (1, 8192, 128), which are 4 MiB.
    """
    sizes = dict(zip(axes, local_shape, strict=True))
    sizes |= dict.fromkeys(axes[:num_stacked], 1)
    for letter in cut:
        others = math.prod(sizes.values()) // sizes[letter]
        sizes[letter] = min(sizes[letter], max(1, BLOCK_BYTES // (4 * others)))
    return tuple(sizes.values())


def fill(
    shape: tuple[int, ...],
    dtype: Any,
    sharding: NamedSharding,
    block: tuple[int, ...],
    read: Callable[[Region], np.ndarray],
) -> jax.Array:
    """Returns an array of the values of `read`, called for each region once on this host."""
    array = jnp.zeros(shape, dtype, device=sharding)
    for part in _parts(sharding.shard_shape(shape), block, ()):
        starts = np.array([start for start, _ in part], np.int32)
        array = _put(sharding)(array, _placed(shape, sharding, part, read), starts)
        # The next block is read when this one has left the host.
        array.block_until_ready()
    return array


def drain(
    array: jax.Array, block: tuple[int, ...], index: tuple[int, ...] = ()
) -> Iterator[tuple[Region, np.ndarray]]:
    """Yields (region, values) of `array` on this host's devices, each number once.

    With an index, only those at this place of the first axes: a block has one of each.
    """
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding), sharding
    wanted = tuple((place, place + 1) for place in index)
    for part in _parts(sharding.shard_shape(array.shape), block, index):
        sizes = tuple(stop - start for start, stop in part)
        starts = np.array([start for start, _ in part], np.int32)
        regions = _regions(array.shape, sharding, part)
        for shard in _take(sharding, sizes)(array, starts).addressable_shards:
            region = regions[shard.device]
            if shard.replica_id == 0 and region[: len(index)] == wanted:
                yield region, np.asarray(shard.data)


def _parts(
    local_shape: Sequence[int], block: Sequence[int], index: tuple[int, ...]
) -> Iterator[Region]:
    """Returns the blocks of a device's part, last axis first; of the first axes at `index`."""
    # Parts are of one size, so that whoever has this place has it there in its own.
    inner = [place % size for place, size in zip(index, local_shape, strict=False)]
    cuts = [
        [(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(local_shape[len(index) :], block[len(index) :], strict=True)
    ]
    return itertools.product(*([(place, place + 1)] for place in inner), *cuts)


def _regions(shape: tuple[int, ...], sharding: NamedSharding, part: Region) -> Mapping[Any, Region]:
    """Returns the region of `part` in the array, for each of this host's devices."""
    return {
        device: tuple(
            (cut.indices(size)[0] + start, cut.indices(size)[0] + stop)
            for cut, size, (start, stop) in zip(index or (), shape, part, strict=True)
        )
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }


def _placed(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    part: Region,
    read: Callable[[Region], np.ndarray],
) -> jax.Array:
    """Returns `part` of every device as one array with the same sharding."""
    devices_of: dict[Region, list[Any]] = {}
    for device, region in _regions(shape, sharding, part).items():
        devices_of.setdefault(region, []).append(device)
    pieces = []
    for region, devices in devices_of.items():
        # On CPU a device may take the memory of the host's block for its own.
        values = read(region)
        pieces += jax.block_until_ready([jax.device_put(values, device) for device in devices])
    local = sharding.shard_shape(shape)
    whole = tuple(
        (stop - start) * (size // own)
        for (start, stop), size, own in zip(part, shape, local, strict=True)
    )
    return jax.make_array_from_single_device_arrays(whole, sharding, pieces)


@functools.lru_cache(maxsize=64)
def _put(sharding: NamedSharding) -> Any:
    """Returns a program (array, block, starts) -> array with each device's block at `starts`."""

    def put(array: jax.Array, block: jax.Array, starts: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(array, block, list(starts))

    specs = (sharding.spec, sharding.spec, PartitionSpec())
    mapped = jax.shard_map(put, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec)
    return jax.jit(mapped, donate_argnums=0)


@functools.lru_cache(maxsize=64)
def _take(sharding: NamedSharding, sizes: tuple[int, ...]) -> Any:
    """Returns a program (array, starts) -> the block of these sizes at `starts` of each part."""

    def take(array: jax.Array, starts: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(array, list(starts), sizes)

    specs = (sharding.spec, PartitionSpec())
    mapped = jax.shard_map(take, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec)
    return jax.jit(mapped)
