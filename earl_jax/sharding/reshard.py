# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Any layout to any layout, of one process's devices or of several, never through the host.

`jax.device_put` between two meshes reads the array to the host whenever the target's shard ranges
are not among the source's (64 MiB of 64 MiB on CPU, jax 0.10.2 and 0.12.0), so it is used here only
from one device to one other device of the same process, where it copies directly.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from earl_jax.sharding.chunks import carry_in_chunks
from earl_jax.sharding.exchange import exchange
from earl_jax.sharding.moves import Move, carrier, is_key, viewed
from earl_jax.sharding.pieces import carry_pieces
from earl_jax.sharding.ranges import check_divides
from earl_jax.sharding.schedule import make_schedule
from earl_jax.sharding.waypoint import travel

Tree = TypeVar("Tree")

_NO_MESH = Mesh(np.empty((), object), ())


def reshard(
    tree: Tree,
    shardings: Any,
    *,
    chunk_bytes: int | None = None,
    donate: bool = False,
) -> Tree:
    """Moves a tree of arrays to a tree of placements, bit for bit and with no byte on the host.

    Leaves whose devices hold what they need are only relabelled. Leaves that keep their devices in
    their order, all of this process, move in one compiled identity. Others within the process go as
    the pieces of `plan_transfers`: cut on their source devices, sent, joined on their target
    devices, with at most one program per device and one send for the whole tree. Where devices of
    several processes take part, the same pieces go in rounds (`exchange.py`), and each process
    calls `reshard` alike, those too that have no device in it. Programs and plans are kept, so that
    a repeated switch between two layouts traces nothing.

    The compiled identity goes by way of `waypoints.py`, because XLA by itself may gather a whole
    array on every device: from 2x2x2 to 8x1x1 it sent 9.3 times the plan's bytes, and sends 1.3
    times now (f32[24, 8, 8] on 8 CPU devices, jax 0.10.2, 2026-11). What can be gathered at once,
    and moves of one axis of the mesh, send the plan's bytes.

    The result may share buffers with `tree` where a shard stays whole on its device: donate
    neither while the other is in use.

    With `chunk_bytes` a device holds no more than about so much beside sources and results: the
    leaves move a few at a time, and a leaf with larger shards chunk by chunk, at the price of more
    and smaller sends. One batch of leaves is sent while the one before it arrives.

    Args:
      tree: `jax.Array`s. Of one that is on other processes' devices, `absent_array` is the handle.
      shardings: the same structure with a `NamedSharding` at every leaf.
      chunk_bytes: a bound per device; None: all leaves at once.
      donate: `tree` is given up. Each leaf's memory is free as soon as it is sent, but for buffers
        that the result shares with it.

    Raises:
      ValueError: if the structures differ, `chunk_bytes` is not above 0, a leaf is no `jax.Array`,
        a target is no `NamedSharding` on devices of the same platform, or a shape does not divide.
    """
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; give at least 1, or None for no bound")
    named_leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    targets = _leaves_like(structure, shardings)
    for (path, leaf), target in zip(named_leaves, targets, strict=True):
        _check(jax.tree_util.keystr(path) or "the array", leaf, target)
    leaves = [_as_data(leaf) for _, leaf in named_leaves]
    moves = [
        Move(leaf.shape, leaf.dtype, leaf.sharding, target)
        for leaf, target in zip(leaves, targets, strict=True)
    ]
    moved: list[jax.Array] = []
    last: list[jax.Array] = []
    for batch in _batches(moves, chunk_bytes):
        arrived = _carry([leaves[k] for k in batch], tuple(moves[k] for k in batch), chunk_bytes)
        moved += arrived
        if donate:
            _give_up([leaves[k] for k in batch], arrived)
        if chunk_bytes is not None:
            jax.block_until_ready(last)
            last = arrived
    moved = [_as_before(array, leaf) for array, (_, leaf) in zip(moved, named_leaves, strict=True)]
    return jax.tree_util.tree_unflatten(structure, moved)


def _batches(moves: Sequence[Move], chunk_bytes: int | None) -> list[list[int]]:
    """Returns batches of leaves in order, each of at most half a chunk, at least one leaf."""
    if chunk_bytes is None:
        return [list(range(len(moves)))]
    batches: list[list[int]] = []
    left = 0
    for k, move in enumerate(moves):
        size = move.bytes_per_device
        if size > left or not batches:
            batches.append([])
            left = chunk_bytes // 2
        batches[-1].append(k)
        left -= size
    return batches


def _carry(
    leaves: Sequence[jax.Array], moves: tuple[Move, ...], chunk_bytes: int | None
) -> list[jax.Array]:
    """Moves these leaves at once, but for those that are larger than a chunk."""
    schedule = make_schedule(moves, chunk_bytes)
    targets = [move.target for move in moves]
    moved = dict(enumerate(leaves))
    for k in schedule.relabelled:
        moved[k] = _relabel(leaves[k], targets[k])
    # A caller's `jax.set_mesh` would forbid programs on any other devices than its own.
    with jax.set_mesh(_NO_MESH):
        for group in schedule.compiled:
            arrived = _carry_compiled([leaves[k] for k in group], tuple(moves[k] for k in group))
            moved.update(zip(group, arrived, strict=True))
        moved.update(carry_pieces(leaves, targets, schedule.parcels))
        for k, plan in schedule.chunked:
            assert chunk_bytes is not None
            moved[k] = carry_in_chunks(leaves[k], targets[k], plan, chunk_bytes)
        if schedule.shipments:
            sent = [leaves[k] for k in schedule.exchanged]
            arrived = exchange(sent, schedule.shipments, chunk_bytes)
            moved.update(zip(schedule.exchanged, arrived, strict=True))
    return [moved[k] for k in range(len(leaves))]


def _give_up(leaves: Sequence[jax.Array], moved: Sequence[jax.Array]) -> None:
    """Frees buffers that the results do not share, once pending reads of them have ended."""
    kept = {
        (shard.device, shard.data.unsafe_buffer_pointer())
        for array in moved
        for shard in array.addressable_shards
    }
    for leaf in leaves:
        buffers = {(s.device, s.data.unsafe_buffer_pointer()) for s in leaf.addressable_shards}
        if not buffers & kept:
            leaf.delete()


def _as_data(leaf: jax.Array) -> jax.Array:
    """Returns the data of random keys, the same buffers, which can be split and viewed as bits."""
    return jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf


def _as_before(array: jax.Array, leaf: jax.Array) -> jax.Array:
    """Returns the inverse: `array` as random keys if `leaf` has them."""
    if not is_key(leaf.dtype):
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))


def _leaves_like(structure: Any, tree: Any) -> list[Any]:
    leaves, own = jax.tree_util.tree_flatten(tree)
    if own != structure:
        raise ValueError(
            "reshard needs one sharding per array, in the same structure; the arrays are "
            f"{structure}, the shardings {own}"
        )
    return leaves


def _relabel(array: jax.Array, target: NamedSharding) -> jax.Array:
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, target, shards, dtype=array.dtype)


def _carry_compiled(leaves: Sequence[jax.Array], moves: tuple[Move, ...]) -> Sequence[jax.Array]:
    """Moves in one program; narrow floats on CPUs between two others, as integers."""
    if not moves[0].goes_as_bits:
        return _identity(moves)(tuple(leaves))
    targets = tuple(move.target for move in moves)
    dtypes = tuple(move.dtype for move in moves)
    bits = tuple(carrier(dtype) for dtype in dtypes)
    seen = _view(tuple(leaf.sharding for leaf in leaves), bits)(tuple(leaves))
    return _view(targets, dtypes)(_identity(moves)(seen))


@functools.lru_cache(maxsize=256)
def _view(
    shardings: tuple[Sharding, ...], dtypes: tuple[Any, ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    def view(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(map(viewed, arrays, dtypes))

    return jax.jit(view, out_shardings=shardings)


@functools.lru_cache(maxsize=256)
def _identity(moves: tuple[Move, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the program for these moves."""

    def move_all(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        pairs = zip(arrays, moves, strict=True)
        return tuple(travel(array, move.source, move.target) for array, move in pairs)

    return jax.jit(move_all, out_shardings=tuple(move.target for move in moves))


def _check(name: str, leaf: Any, target: Any) -> None:
    if not isinstance(leaf, jax.Array):
        raise ValueError(
            f"{name} is a {type(leaf).__name__}; reshard moves jax.Arrays, so put it on devices "
            "once where it is made"
        )
    if not isinstance(target, NamedSharding) or isinstance(target.mesh, AbstractMesh):
        raise ValueError(
            f"the target of {name} is {target}; give a NamedSharding on a mesh of real devices"
        )
    platforms = {device.platform for device in leaf.sharding.device_set | target.device_set}
    if len(platforms) > 1:
        raise ValueError(
            f"{name} would move between the platforms {sorted(platforms)}, which goes through the "
            "host; give a target on the platform of the array"
        )
    check_divides(name, leaf.shape, target)
