# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Moves of a large array within one process, a chunk at a time into its destination.

`reshard` sends all pieces of an array and then joins them: for a moment a device holds what it
sends, what it received, and what it made of that. Here each chunk is written into the target's
shard as it comes, which is donated to the write, so that beside source and target a device holds
two chunks.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, SingleDeviceSharding

from earl_jax.sharding.moves import carrier, viewed
from earl_jax.sharding.placing import zeros_on
from earl_jax.sharding.ranges import Ranges, shard_ranges
from earl_jax.sharding.rounds import rounds_of
from earl_jax.sharding.transfer_plan import TransferPlan


def carry_in_chunks(
    array: jax.Array, target: NamedSharding, plan: TransferPlan, chunk_bytes: int
) -> jax.Array:
    """Carries out a plan within this process; no device has more than `chunk_bytes` under way.

    What goes beside it is not held up: a chunk is sent while the one before it is written.
    """
    source, goal = (shard_ranges(sharding, array.shape) for sharding in (array.sharding, target))
    devices = {device.id: SingleDeviceSharding(device) for device in target.device_set}
    shards = {shard.device.id: shard.data for shard in array.addressable_shards}
    block = target.shard_shape(array.shape)
    outs = {device: zeros_on(devices[device], block, array.dtype) for device in goal}
    written: list[jax.Array] = []
    for round_ in rounds_of(plan, max(1, chunk_bytes // 2)):
        # Two chunks are half of what may be under way each: the one before this must have arrived.
        jax.block_until_ready(written)
        written = []
        for piece in round_.pieces:
            cut = cut_box(
                shards[piece.source_device],
                offset(piece.index, source[piece.source_device]),
                round_.shape,
            )
            end = piece.target_device
            arrived = jax.device_put(cut, devices[end])
            outs[end], mark = write_box(outs[end], arrived, offset(piece.index, goal[end]))
            written.append(mark)
    return jax.make_array_from_single_device_arrays(array.shape, target, list(outs.values()))


def offset(index: Ranges, shard: Ranges) -> tuple[int, ...]:
    """Returns the start of a box of the array in a shard that holds it."""
    return tuple(start - first for (start, _), (first, _) in zip(index, shard, strict=True))


@functools.partial(jax.jit, static_argnums=2)
def cut_box(shard: jax.Array, start: tuple[Any, ...], shape: tuple[int, ...]) -> jax.Array:
    """Returns a box of a shard."""
    bits = lax.dynamic_slice(viewed(shard, carrier(shard.dtype)), start, shape)
    return viewed(bits, shard.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def write_box(
    out: jax.Array, chunk: jax.Array, start: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns the shard with the chunk written, and a small array that is ready after the write.

    The shard is given up.
    """
    dtype, kept = out.dtype, carrier(out.dtype)
    bits = viewed(chunk, kept)
    out = viewed(lax.dynamic_update_slice(viewed(out, kept), bits, start), dtype)
    return out, lax.dynamic_slice(out.reshape(-1), (0,), (1,))
