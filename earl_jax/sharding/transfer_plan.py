# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Who must send which part of an array to whom, as arithmetic on index ranges.

No device is touched here: a plan for 256 chips is made on a laptop. `reshard` carries plans out,
`dispatch.plan` adds them up over a batch and prints them.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jax.sharding import AbstractMesh, NamedSharding, Sharding

Ranges = tuple[tuple[int, int], ...]
"""One (start, stop) per axis: a box of a global array. A scalar's only box is ()."""

Route = Literal["in place", "compiled", "pieces"]

# A table of more lines than this is no longer read, and 256 devices can need 65,280 pieces.
_MAX_PRINTED_PIECES = 64


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box `index` of the global array that `target_device` takes from `source_device`."""

    source_device: int
    target_device: int
    index: Ranges
    num_bytes: int


class Traffic:
    """Sums over what goes from device to device (`link_bytes`) and what stays (`kept_bytes`)."""

    link_bytes: Any  # (source device, target device) -> bytes
    kept_bytes: Any  # device -> bytes

    @functools.cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes per sending device."""
        return self._sum_ends(0)

    @functools.cached_property
    def received_bytes(self) -> dict[int, int]:
        """Bytes per receiving device."""
        return self._sum_ends(1)

    @property
    def moved_bytes(self) -> int:
        """Bytes that travel between devices."""
        return sum(self.link_bytes.values())

    @property
    def in_place_bytes(self) -> int:
        """Bytes that the targets already hold."""
        return sum(self.kept_bytes.values())

    def _sum_ends(self, end: int) -> dict[int, int]:
        totals: Counter[int] = Counter()
        for link, num_bytes in self.link_bytes.items():
            totals[link[end]] += num_bytes
        return dict(sorted(totals.items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferPlan(Traffic):
    """How one array gets from one placement to another.

    `pieces` cover every target device's ranges exactly once; a piece from a device to itself stays
    where it is. `route` says what carries the plan out: "in place" (all devices hold what they
    need), "compiled" (same devices in the same order: XLA's collectives, for which `pieces` is the
    lower bound) or "pieces" (cut, send and join exactly as listed).

    Example: 4 floats, device 0 holds [0:4], devices 0 and 1 want [0:2] and [2:4]: the pieces are
    (0 -> 0, [0:2], 8 bytes) in place and (0 -> 1, [2:4], 8 bytes) moved.
    """

    shape: tuple[int, ...]
    itemsize: int
    route: Route
    pieces: tuple[Piece, ...]

    @functools.cached_property
    def link_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes per (source device, target device), pieces that stay in place left out."""
        links: Counter[tuple[int, int]] = Counter()
        for piece in self._moved_pieces:
            links[piece.source_device, piece.target_device] += piece.num_bytes
        return dict(sorted(links.items()))

    @functools.cached_property
    def kept_bytes(self) -> dict[int, int]:
        """Bytes per device that it needs and already holds."""
        kept: Counter[int] = Counter()
        for piece in self.pieces:
            if piece.source_device == piece.target_device:
                kept[piece.target_device] += piece.num_bytes
        return dict(sorted(kept.items()))

    @functools.cached_property
    def _moved_pieces(self) -> list[Piece]:
        return [p for p in self.pieces if p.source_device != p.target_device and p.num_bytes]

    def __str__(self) -> str:
        """The pieces that move, then what each device sends, receives and keeps."""
        moved = self._moved_pieces
        lines = [
            f"shape {self.shape}, {self.itemsize} B an element, {self.route}: "
            f"{bytes_text(self.moved_bytes)} between devices, "
            f"{bytes_text(self.in_place_bytes)} in place"
        ]
        if moved:
            rows = [
                (p.source_device, p.target_device, _index_text(p.index), bytes_text(p.num_bytes))
                for p in moved[:_MAX_PRINTED_PIECES]
            ]
            lines += table_lines(("from", "to", "index", "bytes"), rows)
        if len(moved) > _MAX_PRINTED_PIECES:
            lines.append(f"... and {len(moved) - _MAX_PRINTED_PIECES} more pieces")
        lines += device_table_lines(self.sent_bytes, self.received_bytes, self.kept_bytes)
        return "\n".join(lines)


def plan_transfer(
    shape: Sequence[int],
    itemsize: int,
    source: Mapping[int, Ranges],
    target: Mapping[int, Ranges],
    *,
    sent_bytes: Mapping[int, int] | None = None,
) -> TransferPlan:
    """Plans that every target device gets exactly the ranges that it lacks, each once.

    What a device already holds it takes from itself; the rest comes from the holder that has sent
    the fewest bytes so far, the lowest id on a tie. The bytes moved equal the lower bound: the sum
    over targets of their range minus what they hold.

    Args:
      shape: the global array's shape.
      itemsize: bytes per element.
      source: ranges per device id, in the order of the mesh. The distinct ranges must be the
        cells of a grid over the array, as those of every `NamedSharding` are.
      target: ranges per device id, in the order of the mesh; any boxes inside the array.
      sent_bytes: what the devices send already for other arrays.

    Raises:
      ValueError: if the source is no grid over the array or a target leaves the array.
    """
    shape = tuple(shape)
    grid = _Grid(shape, source)
    load = Counter(sent_bytes or {})
    pieces = []
    for device, wanted in target.items():
        _check_inside(shape, device, wanted)
        own = source.get(device)
        for cell, index in grid.overlaps(wanted):
            num_bytes = itemsize * math.prod(stop - start for start, stop in index)
            if cell == own:
                holder = device
            else:
                holders = grid.holders[cell]
                holder = holders[0] if len(holders) == 1 else min(holders, key=load.__getitem__)
                load[holder] += num_bytes
            pieces.append(Piece(holder, device, index, num_bytes))
    return TransferPlan(
        shape=shape,
        itemsize=itemsize,
        route=choose_route(source, target),
        pieces=tuple(pieces),
    )


def plan_transfers(
    moves: Sequence[tuple[Sequence[int], int, Mapping[int, Ranges], Mapping[int, Ranges]]],
) -> tuple[TransferPlan, ...]:
    """Plans several arrays, (shape, itemsize, source, target) each, as one load on the devices.

    Only what goes as pieces counts as load: who sends in a compiled move is XLA's choice.
    """
    load: Counter[int] = Counter()
    plans = []
    for shape, itemsize, source, target in moves:
        plan = plan_transfer(shape, itemsize, source, target, sent_bytes=load)
        if plan.route == "pieces":
            load.update(plan.sent_bytes)
        plans.append(plan)
    return tuple(plans)


def choose_route(source: Mapping[int, Ranges], target: Mapping[int, Ranges]) -> Route:
    """What can carry an array from `source` to `target` (ranges per device id in mesh order)."""
    if dict(source) == dict(target):
        return "in place"
    # jax 0.10.2: a compiled move of an array without elements returns shards of the wrong shape.
    has_elements = all(start < stop for ranges in target.values() for start, stop in ranges)
    # XLA makes whole copies on every device when the source is partly replicated: from (2,2,2) as
    # P(x,y) to (8,1,1) as P(x), 64 MiB took 96 MiB more per device and 700 ms on 8 CPU devices, as
    # pieces 32 ms (jax 0.10.2 and 0.12.0, 2026-11).
    partly_replicated = 1 < len(set(source.values())) < len(source)
    # XLA compiles for one device assignment, so the order of the devices counts, not only the set.
    same_devices = tuple(source) == tuple(target)
    return "compiled" if same_devices and has_elements and not partly_replicated else "pieces"


def shard_ranges(sharding: Sharding, shape: Sequence[int]) -> dict[int, Ranges]:
    """The ranges that each device holds, by device id in the order of the mesh.

    Under an abstract mesh the devices are numbered 0, 1, ... in the order of the mesh.
    """
    shape = tuple(shape)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return _abstract_shard_ranges(sharding, shape)
    return {
        device.id: tuple(
            (0 if part.start is None else part.start, size if part.stop is None else part.stop)
            for part, size in zip(index, shape, strict=True)
        )
        for device, index in sharding.devices_indices_map(shape).items()
    }


def check_divides(name: str, shape: Sequence[int], sharding: NamedSharding) -> None:
    """Raises ValueError unless the array called `name` splits evenly over `sharding`."""
    for axis, (mesh_axes, parts) in enumerate(_splits(sharding, shape)):
        if shape[axis] % parts:
            raise ValueError(
                f"{name} of shape {tuple(shape)} does not divide: axis {axis} has {shape[axis]} "
                f"elements, and {sharding.spec} splits it over {parts} devices (mesh axes "
                f"{mesh_axes} of mesh {dict(sharding.mesh.shape)}); pad axis {axis} to a multiple "
                f"of {parts} or write None for it in the spec"
            )


def bytes_text(num_bytes: int) -> str:
    """Bytes for people: 96 B, 1.50 MiB."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = min((num_bytes.bit_length() - 1) // 10, 4)
    return f"{num_bytes / 1024**power:.2f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def table_lines(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of right-aligned columns, the header first."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]


def device_table_lines(
    sent: Mapping[int, int], received: Mapping[int, int], kept: Mapping[int, int]
) -> list[str]:
    """A table of what each device sends, receives and keeps, in bytes."""
    rows = [
        (device, *(bytes_text(column.get(device, 0)) for column in (sent, received, kept)))
        for device in sorted({*sent, *received, *kept})
    ]
    return table_lines(("device", "sends", "receives", "keeps"), rows)


class _Grid:
    """The cells into which a source placement cuts an array, and who holds each."""

    def __init__(self, shape: tuple[int, ...], source: Mapping[int, Ranges]):
        self.holders: dict[Ranges, list[int]] = defaultdict(list)
        for device in sorted(source):
            self.holders[source[device]].append(device)
        self._cuts = [
            sorted({ranges[axis] for ranges in self.holders if len(ranges) == len(shape)})
            for axis in range(len(shape))
        ]
        whole = all(
            [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
            and cuts[-1][1] == size
            for cuts, size in zip(self._cuts, shape, strict=True)
            if cuts
        )
        if not whole or len(self.holders) != math.prod(map(len, self._cuts)) or not source:
            raise ValueError(
                f"the source's ranges {sorted(self.holders)} are not the cells of a grid over an "
                f"array of shape {shape}; every element needs a holder, and two devices must hold "
                "either the same range or ranges without overlap"
            )

    def overlaps(self, box: Ranges) -> Iterator[tuple[Ranges, Ranges]]:
        """Yields (cell, cell's part inside `box`) for the cells that share elements with `box`."""
        per_axis = [
            [
                (cut, (max(cut[0], start), min(cut[1], stop)))
                for cut in cuts
                if cut[0] < stop and start < cut[1] or cut == (start, stop)  # the last: no elements
            ]
            for cuts, (start, stop) in zip(self._cuts, box, strict=True)
        ]
        for parts in itertools.product(*per_axis):
            yield tuple(part[0] for part in parts), tuple(part[1] for part in parts)


def _splits(sharding: NamedSharding, shape: Sequence[int]) -> list[tuple[tuple[str, ...], int]]:
    """Per axis of the array: the mesh axes that split it and the number of parts."""
    spec = tuple(sharding.spec)
    if len(spec) > len(shape):
        raise ValueError(
            f"{sharding.spec} has {len(spec)} entries for an array of shape {tuple(shape)}; "
            f"give at most {len(shape)}"
        )
    splits = []
    for entry in spec + (None,) * (len(shape) - len(spec)):
        if not (entry is None or isinstance(entry, (str, tuple))):
            raise ValueError(
                f"{sharding.spec} leaves an axis open ({entry}); name its mesh axes or write None"
            )
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        splits.append((names, math.prod(sharding.mesh.shape[name] for name in names)))
    return splits


def _abstract_shard_ranges(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[int, Ranges]:
    splits = _splits(sharding, shape)
    mesh_axes = dict(sharding.mesh.shape)
    ranges = {}
    for device, place in enumerate(itertools.product(*map(range, mesh_axes.values()))):
        coordinate = dict(zip(mesh_axes, place, strict=True))
        box = []
        for size, (names, parts) in zip(shape, splits, strict=True):
            part = 0
            for name in names:  # the first name is the slowest
                part = part * mesh_axes[name] + coordinate[name]
            box.append((part * size // parts, (part + 1) * size // parts))
        ranges[device] = tuple(box)
    return ranges


def _check_inside(shape: tuple[int, ...], device: int, box: Ranges) -> None:
    if len(box) != len(shape) or any(
        not 0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
    ):
        raise ValueError(
            f"target device {device} wants {box} of an array of shape {shape}; give one "
            "(start, stop) inside the array per axis"
        )


def _index_text(index: Ranges) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in index) + "]"
