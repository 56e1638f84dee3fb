# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Any layout to any layout, of one process's devices or of several, never through the host.

`jax.device_put` between two meshes reads the array to the host whenever the target's shard ranges
are not among the source's (64 MiB of 64 MiB on CPU, jax 0.10.2 and 0.12.0), so it is used here only
from one device to one other device of the same process, where it copies directly.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, SingleDeviceSharding

from earl_jax.sharding.chunks import carry_in_chunks
from earl_jax.sharding.exchange import Shipment, exchange, narrower
from earl_jax.sharding.ranges import Ranges, check_divides, process_of, shard_ranges
from earl_jax.sharding.transfer_plan import Piece, TransferPlan, plan_transfers

Tree = TypeVar("Tree")

_NO_MESH = Mesh(np.empty((), object), ())


def reshard(
    tree: Tree,
    shardings: Any,
    *,
    dtypes: Any = None,
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

    The compiled identity can cost far more than its plan: from a partly replicated source, or with
    mesh axes regrouped, XLA may gather the whole array on every device (f32[4096, 4096], 2x2x2 to
    8x1x1: 96 MiB of temporaries per device and 700 ms where pieces took 35 ms; 8 CPU devices on 2
    cores, jax 0.10.2 and 0.12.0, 2026-11-21).

    One bit pattern may change on CPU: XLA's CPU compiler moves bfloat16 by way of float32, which
    keeps that a value is NaN but not the NaN's other bits (0x7fe9 became 0x7fc0, jax 0.10.2).

    The result may share buffers with `tree` where a shard stays whole on its device: donate
    neither while the other is in use.

    With `chunk_bytes` a device holds no more than about so much beside sources and results: the
    leaves move a few at a time, and a leaf with larger shards chunk by chunk, at the price of more
    and smaller sends. One batch of leaves is sent while the one before it arrives.

    Args:
      tree: `jax.Array`s. Of one that is on other processes' devices, `absent_array` is the handle.
      shardings: the same structure with a `NamedSharding` at every leaf.
      dtypes: the same structure with the type that each leaf is to arrive in; None: as they are.
        A cast to fewer bytes happens before the bytes are sent, one to more behind it.
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
    targets = _leaves_like(structure, shardings, "sharding")
    leaves = [leaf for _, leaf in named_leaves]
    for (path, leaf), target in zip(named_leaves, targets, strict=True):
        _check(jax.tree_util.keystr(path) or "the array", leaf, target)
    wanted = (
        [leaf.dtype for leaf in leaves]
        if dtypes is None
        else [jnp.dtype(dtype) for dtype in _leaves_like(structure, dtypes, "type")]
    )
    moves = [
        _Move(leaf.shape, leaf.dtype, leaf.sharding, target, dtype)
        for leaf, target, dtype in zip(leaves, targets, wanted, strict=True)
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
    return jax.tree_util.tree_unflatten(structure, moved)


def _batches(moves: Sequence["_Move"], chunk_bytes: int | None) -> list[list[int]]:
    """Leaves in their order, as many at once as half of the chunk has room for; at least one."""
    if chunk_bytes is None:
        return [list(range(len(moves)))]
    batches: list[list[int]] = []
    room = 0
    for k, move in enumerate(moves):
        size = move.bytes_per_device
        if size > room or not batches:
            batches.append([])
            room = chunk_bytes // 2
        batches[-1].append(k)
        room -= size
    return batches


def _carry(
    leaves: Sequence[jax.Array], moves: tuple["_Move", ...], chunk_bytes: int | None
) -> list[jax.Array]:
    """Moves these leaves at once, but for those that are larger than a chunk."""
    schedule = _make_schedule(moves, chunk_bytes)
    targets = [move.target for move in moves]
    moved = dict(enumerate(leaves))
    for k in schedule.relabelled:
        moved[k] = _relabel(leaves[k], targets[k])
    # A caller's `jax.set_mesh` would forbid programs on any other devices than its own.
    with jax.set_mesh(_NO_MESH):
        for group in schedule.compiled:
            dtypes = tuple(moves[k].arrives_as for k in group)
            identity = _identity(tuple(targets[k] for k in group), dtypes)
            moved.update(zip(group, identity(tuple(moved[k] for k in group)), strict=True))
        moved.update(_carry_pieces(leaves, targets, schedule))
        for k, plan in schedule.chunked:
            assert chunk_bytes is not None
            dtype = moves[k].arrives_as
            moved[k] = carry_in_chunks(leaves[k], targets[k], plan, dtype, chunk_bytes)
        arrived = exchange([leaves[k] for k in schedule.exchanged], schedule.shipments, chunk_bytes)
        moved.update(zip(schedule.exchanged, arrived, strict=True))
    return [moved[k] for k in range(len(leaves))]


def _give_up(leaves: Sequence[jax.Array], moved: Sequence[jax.Array]) -> None:
    """Frees what the results do not share. What is still being read is freed behind that."""
    kept = {
        (shard.device, shard.data.unsafe_buffer_pointer())
        for array in moved
        for shard in array.addressable_shards
    }
    for leaf in leaves:
        buffers = {(s.device, s.data.unsafe_buffer_pointer()) for s in leaf.addressable_shards}
        if not buffers & kept:
            leaf.delete()


def absent_array(shape: Sequence[int], dtype: Any, sharding: NamedSharding) -> jax.Array:
    """The handle of an array on devices of other processes, to call `reshard` with.

    Raises:
      ValueError: some of the devices are this process's, which has to bring its part.
    """
    if sharding.addressable_devices:
        raise ValueError(
            f"absent_array of shape {tuple(shape)}: {sharding} has devices of this process; make "
            "the array with jax.make_array_from_single_device_arrays from what they hold"
        )
    return jax.make_array_from_single_device_arrays(
        tuple(shape), sharding, [], dtype=jnp.dtype(dtype)
    )


def _leaves_like(structure: Any, tree: Any, what: str) -> list[Any]:
    leaves, own = jax.tree_util.tree_flatten(tree)
    if own != structure:
        raise ValueError(
            f"reshard needs one {what} per array, in the same structure; the arrays are "
            f"{structure}, the {what}s {own}"
        )
    return leaves


class _Move(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any
    source: Sharding
    target: NamedSharding
    arrives_as: Any

    @property
    def carried_as(self) -> Any:
        return narrower(self.dtype, self.arrives_as) if self.is_cast else self.dtype

    @property
    def is_cast(self) -> bool:
        return self.dtype != self.arrives_as

    @property
    def bytes_per_device(self) -> int:
        """Of the larger of the two shards, as it travels."""
        sides = (side.shard_shape(self.shape) for side in (self.source, self.target))
        return max(map(math.prod, sides)) * self.carried_as.itemsize


class _Cut(NamedTuple):
    """A box of one leaf's shard, in the shard's own coordinates; None for the whole shard.

    `dtype` is what it is cast to; None: as it is.
    """

    leaf: int
    box: Ranges | None
    dtype: Any = None


class _Join(NamedTuple):
    """One leaf's shard on a target device: its pieces, in the order of the delivery."""

    leaf: int
    indices: tuple[Ranges, ...]
    dtype: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Schedule:
    """What to do for a tuple of moves; leaves are numbered, devices go by their ids.

    `compiled` groups the leaves that share their devices, `scattered` are those that go as pieces.
    `parcels` names the pieces by source device and number of the cut there, in the order in which
    `joins` (one entry per target device) uses them; `destinations` says where each goes. What is
    `exchanged` are the leaves between processes.
    """

    relabelled: tuple[int, ...]
    compiled: tuple[tuple[int, ...], ...]
    cuts: dict[int, tuple[_Cut, ...]]
    scattered: tuple[int, ...]
    parcels: tuple[tuple[int, int], ...]
    destinations: tuple[SingleDeviceSharding, ...]
    joins: tuple[tuple[_Join, ...], ...]
    exchanged: tuple[int, ...]
    shipments: tuple[Shipment, ...]
    chunked: tuple[tuple[int, TransferPlan], ...]


# 256 plans and as many identities: layouts come from a selector's short list of candidates.
@functools.lru_cache(maxsize=256)
def _make_schedule(moves: tuple[_Move, ...], chunk_bytes: int | None) -> _Schedule:
    sources = [shard_ranges(move.source, move.shape) for move in moves]
    targets = [shard_ranges(move.target, move.shape) for move in moves]
    plans = plan_transfers(
        [
            (move.shape, move.carried_as.itemsize, source, target)
            for move, source, target in zip(moves, sources, targets, strict=True)
        ],
        process_of=process_of(*(side for move in moves for side in (move.source, move.target))),
    )
    compiled: dict[tuple[int, ...], list[int]] = defaultdict(list)
    pieces: dict[int, dict[int, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    chunked = []
    for k, plan in enumerate(plans):
        large = chunk_bytes is not None and moves[k].bytes_per_device > chunk_bytes // 2
        if large and plan.route in ("compiled", "pieces"):
            chunked.append((k, plan))
        elif plan.route == "compiled" or plan.route == "in place" and moves[k].is_cast:
            compiled[tuple(targets[k])].append(k)
        elif plan.route == "pieces":
            for piece in plan.pieces:
                pieces[piece.target_device][k].append(piece)
    devices = {device.id: device for move in moves for device in move.target.device_set}
    cuts: dict[int, dict[_Cut, int]] = defaultdict(dict)
    parcels, destinations, joins = [], [], []
    for device, by_leaf in pieces.items():
        for k, leaf_pieces in by_leaf.items():
            for piece in leaf_pieces:
                shard = sources[k][piece.source_device]
                cut = _Cut(k, _box_within(piece.index, shard), _cast(moves[k], before=True))
                source_cuts = cuts[piece.source_device]
                number = source_cuts.setdefault(cut, len(source_cuts))
                parcels.append((piece.source_device, number))
                destinations.append(SingleDeviceSharding(devices[device]))
        joins.append(
            tuple(
                _Join(k, tuple(piece.index for piece in whole), _cast(moves[k], before=False))
                for k, whole in by_leaf.items()
            )
        )
    exchanged = tuple(k for k, plan in enumerate(plans) if plan.route == "rounds")
    return _Schedule(
        relabelled=tuple(
            k
            for k, (move, plan) in enumerate(zip(moves, plans, strict=True))
            if plan.route == "in place" and move.source != move.target
        ),
        compiled=tuple(tuple(group) for group in compiled.values()),
        cuts={device: tuple(numbered) for device, numbered in cuts.items()},
        scattered=tuple(dict.fromkeys(k for by_leaf in pieces.values() for k in by_leaf)),
        chunked=tuple(chunked),
        parcels=tuple(parcels),
        destinations=tuple(destinations),
        joins=tuple(joins),
        exchanged=exchanged,
        shipments=tuple(
            Shipment(
                plan=plans[k],
                shape=moves[k].shape,
                dtype=moves[k].dtype,
                source=moves[k].source,
                target=moves[k].target,
                arrives_as=moves[k].arrives_as,
            )
            for k in exchanged
        ),
    )


def _box_within(index: Ranges, shard: Ranges) -> Ranges | None:
    if index == shard:
        return None
    local = ((start - o, stop - o) for (start, stop), (o, _) in zip(index, shard, strict=True))
    return tuple(local)


def _cast(move: _Move, *, before: bool) -> Any:
    """The type that a piece is cast to before it is sent, or behind that; None: it is not."""
    narrows = move.carried_as == move.arrives_as
    return move.arrives_as if move.is_cast and narrows == before else None


def _relabel(array: jax.Array, target: NamedSharding) -> jax.Array:
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, target, shards, dtype=array.dtype)


@functools.lru_cache(maxsize=256)
def _identity(
    targets: tuple[NamedSharding, ...], dtypes: tuple[Any, ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    def cast(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(
            array if array.dtype == dtype else array.astype(dtype)
            for array, dtype in zip(arrays, dtypes, strict=True)
        )

    return jax.jit(cast, out_shardings=targets)


def _carry_pieces(
    leaves: Sequence[jax.Array], targets: Sequence[NamedSharding], schedule: _Schedule
) -> dict[int, jax.Array]:
    """Cuts, sends and joins; returns the scattered leaves by their numbers."""
    shards = {
        k: {shard.device.id: shard.data for shard in leaves[k].addressable_shards}
        for k in schedule.scattered
    }
    cut = {
        device: _cut_shards([shards[c.leaf][device] for c in cuts], cuts)
        for device, cuts in schedule.cuts.items()
    }
    parcels = [cut[source][number] for source, number in schedule.parcels]
    delivered = iter(jax.device_put(parcels, list(schedule.destinations)))
    joined: dict[int, list[jax.Array]] = {k: [] for k in schedule.scattered}
    for joins in schedule.joins:
        arrived = [[next(delivered) for _ in join.indices] for join in joins]
        for join, shard in zip(joins, _join_pieces(arrived, joins), strict=True):
            joined[join.leaf].append(shard)
    return {
        k: jax.make_array_from_single_device_arrays(leaves[k].shape, targets[k], arrays)
        for k, arrays in joined.items()
    }


def _cut_shards(shards: list[jax.Array], cuts: tuple[_Cut, ...]) -> list[jax.Array]:
    """Cuts the shards of one device in one program; what goes whole and as it is, is not copied."""
    todo = [n for n, cut in enumerate(cuts) if cut.box is not None or cut.dtype is not None]
    if todo:
        cut = _slice_all([shards[n] for n in todo], tuple(cuts[n][1:] for n in todo))
        for n, piece in zip(todo, cut, strict=True):
            shards[n] = piece
    return shards


def _join_pieces(arrived: list[list[jax.Array]], joins: tuple[_Join, ...]) -> list[jax.Array]:
    """Joins the pieces on one device in one program; a shard of a single piece is that piece."""
    shards = [pieces[0] for pieces in arrived]
    todo = [n for n, join in enumerate(joins) if len(arrived[n]) > 1 or join.dtype is not None]
    if todo:
        joined = _concatenate_all([arrived[n] for n in todo], tuple(joins[n][1:] for n in todo))
        for n, shard in zip(todo, joined, strict=True):
            shards[n] = shard
    return shards


@functools.partial(jax.jit, static_argnums=1)
def _slice_all(
    shards: list[jax.Array], cuts: tuple[tuple[Ranges | None, Any], ...]
) -> list[jax.Array]:
    pieces = []
    for shard, (box, dtype) in zip(shards, cuts, strict=True):
        if box is not None:
            shard = lax.slice(shard, [start for start, _ in box], [stop for _, stop in box])
        pieces.append(shard if dtype is None else shard.astype(dtype))
    return pieces


@functools.partial(jax.jit, static_argnums=1)
def _concatenate_all(
    arrived: list[list[jax.Array]], joins: tuple[tuple[tuple[Ranges, ...], Any], ...]
) -> list[jax.Array]:
    shards = []
    for pieces, (boxes, dtype) in zip(arrived, joins, strict=True):
        shard = _concatenate_grid(dict(zip(boxes, pieces, strict=True)))
        shards.append(shard if dtype is None else shard.astype(dtype))
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
