# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays as pieces within one process: cut on their source devices, sent, joined where they go.

At most one program per device and one send for a whole tree of arrays.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import NamedSharding

from earl_jax.sharding.moves import carrier, viewed
from earl_jax.sharding.ranges import Ranges
from earl_jax.sharding.schedule import Cut, Join, Parcels


def carry_pieces(
    leaves: Sequence[jax.Array], targets: Sequence[NamedSharding], parcels: Parcels
) -> dict[int, jax.Array]:
    """Carries out `parcels`; returns its leaves by their numbers."""
    shards = {
        k: {shard.device.id: shard.data for shard in leaves[k].addressable_shards}
        for k in parcels.leaves
    }
    cut = {
        device: _cut_shards([shards[c.leaf][device] for c in cuts], cuts)
        for device, cuts in parcels.cuts.items()
    }
    sent = [cut[source][number] for source, number in parcels.sent]
    delivered = iter(jax.device_put(sent, list(parcels.destinations)))
    joined: dict[int, list[jax.Array]] = {k: [] for k in parcels.leaves}
    for joins in parcels.joins:
        arrived = [[next(delivered) for _ in join.indices] for join in joins]
        for join, shard in zip(joins, _join_pieces(arrived, joins), strict=True):
            joined[join.leaf].append(shard)
    return {
        k: jax.make_array_from_single_device_arrays(leaves[k].shape, targets[k], arrays)
        for k, arrays in joined.items()
    }


def _cut_shards(shards: list[jax.Array], cuts: tuple[Cut, ...]) -> list[jax.Array]:
    """Cuts the shards of one device in one program; what goes whole is not copied."""
    todo = {n: cut.box for n, cut in enumerate(cuts) if cut.box is not None}
    if todo:
        cut = _slice_all([shards[n] for n in todo], tuple(todo.values()))
        for n, piece in zip(todo, cut, strict=True):
            shards[n] = piece
    return shards


def _join_pieces(arrived: list[list[jax.Array]], joins: tuple[Join, ...]) -> list[jax.Array]:
    """Joins the pieces on one device in one program; a shard of a single piece is that piece."""
    shards = [pieces[0] for pieces in arrived]
    todo = {n: join.indices for n, join in enumerate(joins) if len(arrived[n]) > 1}
    if todo:
        joined = _concatenate_all([arrived[n] for n in todo], tuple(todo.values()))
        for n, shard in zip(todo, joined, strict=True):
            shards[n] = shard
    return shards


@functools.partial(jax.jit, static_argnums=1)
def _slice_all(shards: list[jax.Array], boxes: tuple[Ranges, ...]) -> list[jax.Array]:
    pieces = []
    for shard, box in zip(shards, boxes, strict=True):
        bits = viewed(shard, carrier(shard.dtype))
        bits = lax.slice(bits, [start for start, _ in box], [stop for _, stop in box])
        pieces.append(viewed(bits, shard.dtype))
    return pieces


@functools.partial(jax.jit, static_argnums=1)
def _concatenate_all(
    arrived: list[list[jax.Array]], joins: tuple[tuple[Ranges, ...], ...]
) -> list[jax.Array]:
    shards = []
    for pieces, boxes in zip(arrived, joins, strict=True):
        bits = [viewed(piece, carrier(piece.dtype)) for piece in pieces]
        joined = _concatenate_grid(dict(zip(boxes, bits, strict=True)))
        shards.append(viewed(joined, pieces[0].dtype))
    return shards


def _concatenate_grid(pieces: dict[Ranges, jax.Array]) -> jax.Array:
    """Joins the cells of a grid, in row-major order, along the last axis first."""
    num_axes = len(next(iter(pieces)))
    for axis in reversed(range(num_axes)):
        lines: dict[Ranges, list[jax.Array]] = defaultdict(list)
        for index, piece in pieces.items():
            lines[index[:axis]].append(piece)
        pieces = {
            index: lax.concatenate(line, axis) if len(line) > 1 else line[0]
            for index, line in lines.items()
        }
    return pieces[()]
