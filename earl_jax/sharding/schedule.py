# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The schedule of a tree's move to other placements: the route of each leaf, as plain facts.

Made once for a pair of layouts and kept; `reshard` carries it out.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import SingleDeviceSharding

from earl_jax.sharding.moves import Move
from earl_jax.sharding.ranges import Ranges, process_of, shard_ranges
from earl_jax.sharding.transfer_plan import Piece, TransferPlan, plan_transfers


class Cut(NamedTuple):
    """A box of one leaf's shard, in the shard's own coordinates; None for the whole shard."""

    leaf: int
    box: Ranges | None


class Join(NamedTuple):
    """One leaf's shard on a target device: its pieces, in the order of the delivery."""

    leaf: int
    indices: tuple[Ranges, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parcels:
    """Arrays that travel as pieces: cut on source devices, sent, joined on target devices.

    Leaves are numbered, devices go by their ids. `sent` names the pieces by source device and
    number of the cut there, in the order in which `joins` (one entry per target device) uses them;
    `destinations` has the target of each.
    """

    leaves: tuple[int, ...]
    cuts: dict[int, tuple[Cut, ...]]
    sent: tuple[tuple[int, int], ...]
    destinations: tuple[SingleDeviceSharding, ...]
    joins: tuple[tuple[Join, ...], ...]


class Shipment(NamedTuple):
    """One leaf that goes between processes, by its plan."""

    plan: TransferPlan
    move: Move

    @property
    def wire_type(self) -> Any:
        """Unsigned integers of that width: no compiler rounds them, and all share messages."""
        width = np.dtype(self.move.dtype).itemsize
        return np.dtype(f"uint{8 * width}") if width <= 4 else np.dtype(self.move.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The routes of a tuple of moves, by the numbers of their leaves.

    `compiled` groups the leaves that share their devices, those apart that go as bits; what is
    `exchanged`, by `shipments`, are those between processes.
    """

    relabelled: tuple[int, ...]
    compiled: tuple[tuple[int, ...], ...]
    parcels: Parcels
    chunked: tuple[tuple[int, TransferPlan], ...]
    exchanged: tuple[int, ...]
    shipments: tuple[Shipment, ...]


# 256 plans and as many identities: layouts come from a selector's short list of candidates.
@functools.lru_cache(maxsize=256)
def make_schedule(moves: tuple[Move, ...], chunk_bytes: int | None) -> Schedule:
    """Returns each leaf's route; shards above half of `chunk_bytes` go in chunks."""
    sources = [shard_ranges(move.source, move.shape) for move in moves]
    targets = [shard_ranges(move.target, move.shape) for move in moves]
    plans = plan_transfers(
        [
            (move.shape, move.dtype.itemsize, source, target)
            for move, source, target in zip(moves, sources, targets, strict=True)
        ],
        process_of=process_of(*(side for move in moves for side in (move.source, move.target))),
    )
    numbered = list(zip(range(len(moves)), moves, plans, strict=True))
    compiled: dict[Any, list[int]] = defaultdict(list)
    scattered, chunked = [], []
    for k, move, plan in numbered:
        large = chunk_bytes is not None and move.bytes_per_device > chunk_bytes // 2
        if large and plan.route in ("compiled", "pieces"):
            chunked.append((k, plan))
        elif plan.route == "compiled":
            compiled[tuple(targets[k]), move.goes_as_bits].append(k)
        elif plan.route == "pieces":
            scattered.append((k, plan))
    return Schedule(
        relabelled=tuple(
            k
            for k, move, plan in numbered
            if plan.route == "in place" and move.source != move.target
        ),
        compiled=tuple(tuple(group) for group in compiled.values()),
        parcels=_parcels(moves, sources, scattered),
        chunked=tuple(chunked),
        exchanged=tuple(k for k, _, plan in numbered if plan.route == "rounds"),
        shipments=tuple(
            Shipment(plan, move) for _, move, plan in numbered if plan.route == "rounds"
        ),
    )


def _parcels(
    moves: Sequence[Move],
    sources: Sequence[dict[int, Ranges]],
    scattered: Sequence[tuple[int, TransferPlan]],
) -> Parcels:
    """Returns the pieces of these leaves by target device, then by leaf."""
    pieces: dict[int, dict[int, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    for k, plan in scattered:
        for piece in plan.pieces:
            pieces[piece.target_device][k].append(piece)
    devices = {device.id: device for move in moves for device in move.target.device_set}
    cuts: dict[int, dict[Cut, int]] = defaultdict(dict)
    sent, destinations, joins = [], [], []
    for device, by_leaf in pieces.items():
        for k, leaf_pieces in by_leaf.items():
            for piece in leaf_pieces:
                shard = sources[k][piece.source_device]
                cut = Cut(k, _box_within(piece.index, shard))
                source_cuts = cuts[piece.source_device]
                sent.append((piece.source_device, source_cuts.setdefault(cut, len(source_cuts))))
                destinations.append(SingleDeviceSharding(devices[device]))
        joins.append(
            tuple(Join(k, tuple(piece.index for piece in whole)) for k, whole in by_leaf.items())
        )
    return Parcels(
        leaves=tuple(dict.fromkeys(k for by_leaf in pieces.values() for k in by_leaf)),
        cuts={device: tuple(numbers) for device, numbers in cuts.items()},
        sent=tuple(sent),
        destinations=tuple(destinations),
        joins=tuple(joins),
    )


def _box_within(index: Ranges, shard: Ranges) -> Ranges | None:
    if index == shard:
        return None
    local = ((start - o, stop - o) for (start, stop), (o, _) in zip(index, shard, strict=True))
    return tuple(local)
