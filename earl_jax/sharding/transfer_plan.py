# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The transfers that move an array to another placement, by arithmetic on index ranges.

No device is touched here: a plan for 1,024 chips is made on a laptop. `reshard` carries plans out,
`dispatch.plan` adds them up over a batch and prints them.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from earl_jax.sharding.plan_text import bytes_text, device_table_lines, index_text, table_lines
from earl_jax.sharding.ranges import Ranges

Route = Literal["in place", "compiled", "pieces", "rounds"]

# A table of more lines than this is no longer read, and 1,024 devices can need 1,047,552 pieces.
MAX_PRINTED_LINES = 64


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
        return sum(self.received_bytes.values())

    @property
    def in_place_bytes(self) -> int:
        """Bytes that the targets already hold."""
        return sum(self.kept_bytes.values())

    def _sum_ends(self, end: int) -> dict[int, int]:
        totals: Counter[int] = Counter()
        for link, num_bytes in self.link_bytes.items():
            totals[link[end]] += num_bytes
        return dict(sorted(totals.items()))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TransferPlan(Traffic):
    """The plan of one array's move from one placement to another.

    `pieces` cover every target device's ranges exactly once; a piece from a device to itself stays
    where it is. `route` is the way to carry it out: "in place" (all devices hold what they
    need), "compiled" (same devices in the same order: XLA's collectives, for which `pieces` is the
    lower bound), "pieces" (cut, send and join exactly as listed) or "rounds" (the same between
    processes, see `rounds.py`, by their hosts where their devices have no path).

    Example: 4 floats, device 0 holds [0:4], devices 0 and 1 want [0:2] and [2:4]: the pieces are
    (0 -> 0, [0:2], 8 bytes) in place and (0 -> 1, [2:4], 8 bytes) moved.

    The pieces are kept as arrays, n of them: `senders` and `receivers` i64[n], their boxes
    i64[n, axes, 2].
    """

    shape: tuple[int, ...]
    itemsize: int
    route: Route
    process_of: Mapping[int, int]
    senders: np.ndarray
    receivers: np.ndarray
    boxes: np.ndarray

    @functools.cached_property
    def piece_bytes(self) -> np.ndarray:
        """i64[n], the size of each piece."""
        return self.itemsize * np.prod(self.boxes[..., 1] - self.boxes[..., 0], axis=1)

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The plan one by one, in the order of the target's devices."""
        columns = (self.senders, self.receivers, self.boxes, self.piece_bytes)
        return tuple(
            Piece(source, target, tuple(map(tuple, box)), size)
            for source, target, box, size in zip(*(c.tolist() for c in columns), strict=True)
        )

    @functools.cached_property
    def link_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes per (source device, target device), pieces that stay in place left out."""
        moved = self._is_moved
        links = np.stack([self.senders[moved], self.receivers[moved]])
        width = 1 + int(links.max(initial=0))
        sums = _sums(links[0] * width + links[1], self.piece_bytes[moved])
        ends = np.divmod(np.fromiter(sums, np.int64, len(sums)), width)
        pairs = zip(*(end.tolist() for end in ends), strict=True)
        return dict(zip(pairs, sums.values(), strict=True))

    @functools.cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes per sending device."""
        return _sums(self.senders[self._is_moved], self.piece_bytes[self._is_moved])

    @functools.cached_property
    def received_bytes(self) -> dict[int, int]:
        """Bytes per receiving device."""
        return _sums(self.receivers[self._is_moved], self.piece_bytes[self._is_moved])

    @functools.cached_property
    def kept_bytes(self) -> dict[int, int]:
        """Bytes per device that it needs and already holds."""
        stays = self.senders == self.receivers
        return _sums(self.receivers[stays], self.piece_bytes[stays])

    @functools.cached_property
    def _is_moved(self) -> np.ndarray:
        return (self.senders != self.receivers) & (self.piece_bytes > 0)

    def path(self, source: int, target: int) -> str:
        """Returns the link between two devices: none, inside a process, or the network."""
        if source == target:
            return "in place"
        same = self.process_of[source] == self.process_of[target]
        return "same process" if same else "network"

    def __str__(self) -> str:
        """Returns the pieces that move, then what each device sends, receives and keeps."""
        moved = np.flatnonzero(self._is_moved)
        lines = [
            f"shape {self.shape}, {self.itemsize} B an element, {self.route}: "
            f"{bytes_text(self.moved_bytes)} between devices, "
            f"{bytes_text(self.in_place_bytes)} in place"
        ]
        if len(moved):
            rows = []
            for n in moved[:MAX_PRINTED_LINES]:
                ends = int(self.senders[n]), int(self.receivers[n])
                size = bytes_text(int(self.piece_bytes[n]))
                rows.append((*ends, index_text(self.boxes[n].tolist()), size, self.path(*ends)))
            lines += table_lines(("from", "to", "index", "bytes", "path"), rows)
        if len(moved) > MAX_PRINTED_LINES:
            lines.append(f"... and {len(moved) - MAX_PRINTED_LINES} more pieces")
        lines += device_table_lines(self.sent_bytes, self.received_bytes, self.kept_bytes)
        return "\n".join(lines)


def plan_transfer(
    shape: Sequence[int],
    itemsize: int,
    source: Mapping[int, Ranges],
    target: Mapping[int, Ranges],
    *,
    process_of: Mapping[int, int] | None = None,
    sent_bytes: Mapping[int, int] | None = None,
) -> TransferPlan:
    """Plans that every target device gets exactly the ranges that it lacks, each once.

    What a device already holds it takes from itself. The rest comes from a holder of the same
    process where there is one, of these from the one that has sent the fewest bytes so far, the
    lowest id on a tie. The bytes moved equal the lower bound: the sum over targets of their range
    minus what they hold.

    Args:
      shape: the global array's shape.
      itemsize: bytes per element.
      source: ranges per device id, in the order of the mesh. The distinct ranges must be the
        cells of a grid over the array, as those of every `NamedSharding` are.
      target: ranges per device id, in the order of the mesh; any boxes inside the array.
      process_of: the process of each device; all in one where it is None.
      sent_bytes: what the devices send already for other arrays.

    Raises:
      ValueError: if the source is no grid over the array or a target leaves the array.
    """
    shape = tuple(shape)
    for device, wanted in target.items():
        _check_inside(shape, device, wanted)
    processes = process_of or dict.fromkeys([*source, *target], 0)
    grid = _Grid(shape, source)
    receivers, cells, boxes = grid.overlaps(target)
    sizes = itemsize * np.prod(boxes[..., 1] - boxes[..., 0], axis=1)
    senders = grid.senders(receivers, cells, sizes, processes, sent_bytes or {})
    return TransferPlan(
        shape=shape,
        itemsize=itemsize,
        route=choose_route(source, target, processes),
        process_of=processes,
        senders=senders,
        receivers=receivers,
        boxes=boxes,
    )


def plan_transfers(
    moves: Sequence[tuple[Sequence[int], int, Mapping[int, Ranges], Mapping[int, Ranges]]],
    *,
    process_of: Mapping[int, int] | None = None,
) -> tuple[TransferPlan, ...]:
    """Plans several arrays, (shape, itemsize, source, target) each, as one load on the devices.

    Only what goes as pieces counts as load: who sends in a compiled move is XLA's choice.
    """
    load: Counter[int] = Counter()
    plans = []
    # The fields of a batch often go alike. Where nobody can choose a sender, so do their plans.
    forced: dict[Any, TransferPlan] = {}
    for shape, itemsize, source, target in moves:
        move = (tuple(shape), itemsize, tuple(source.items()), tuple(target.items()))
        plan = forced.get(move)
        if plan is None:
            plan = plan_transfer(
                shape, itemsize, source, target, process_of=process_of, sent_bytes=load
            )
            if len(set(source.values())) == len(source):
                forced[move] = plan
        if plan.route != "compiled":
            load.update(plan.sent_bytes)
        plans.append(plan)
    return tuple(plans)


def choose_route(
    source: Mapping[int, Ranges],
    target: Mapping[int, Ranges],
    process_of: Mapping[int, int] | None = None,
) -> Route:
    """Returns an array's route from `source` to `target` (ranges per device id, mesh order)."""
    if dict(source) == dict(target):
        return "in place"
    # Between processes nothing can be sent but by a program that all of them run.
    if process_of and len({process_of[device] for device in (*source, *target)}) > 1:
        return "rounds"
    # jax 0.10.2: a compiled move of an array without elements returns shards of the wrong shape.
    has_elements = all(start < stop for ranges in target.values() for start, stop in ranges)
    # XLA makes whole copies on every device when the source is partly replicated: from (2,2,2) as
    # P(x,y) to (8,1,1) as P(x), 64 MiB took 96 MiB more per device and 700 ms on 8 CPU devices, as
    # pieces 32 ms (jax 0.10.2 and 0.12.0, 2026-11).
    partly_replicated = 1 < len(set(source.values())) < len(source)
    # XLA compiles for one device assignment, so the order of the devices counts, not only the set.
    same_devices = tuple(source) == tuple(target)
    return "compiled" if same_devices and has_elements and not partly_replicated else "pieces"


class _Grid:
    """The cells, in row-major order, into which a source cuts an array, and who holds each."""

    def __init__(self, shape: tuple[int, ...], source: Mapping[int, Ranges]):
        holders: dict[Ranges, list[int]] = defaultdict(list)
        for device in sorted(source):
            holders[source[device]].append(device)
        self._cuts = [
            sorted({ranges[axis] for ranges in holders if len(ranges) == len(shape)})
            for axis in range(len(shape))
        ]
        whole = all(
            [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
            and cuts[-1][1] == size
            for cuts, size in zip(self._cuts, shape, strict=True)
            if cuts
        )
        if not whole or len(holders) != math.prod(map(len, self._cuts)) or not source:
            raise ValueError(
                f"the source's ranges {sorted(holders)} are not the cells of a grid over an "
                f"array of shape {shape}; every element needs a holder, and two devices must hold "
                "either the same range or ranges without overlap"
            )
        self._holders = [holders[cell] for cell in itertools.product(*self._cuts)]

    def overlaps(self, boxes: Mapping[int, Ranges]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns parts of each device's box by cell: devices [n], cells [n], parts [n, axes, 2].

        Axis by axis, all boxes at once: a part so far and the cuts that it meets there.
        """
        devices = np.fromiter(boxes, np.int64, len(boxes))
        wanted = np.array(list(boxes.values()), np.int64).reshape(len(boxes), len(self._cuts), 2)
        row, cell = np.arange(len(boxes)), np.zeros(len(boxes), np.int64)
        parts = np.zeros((len(boxes), 0, 2), np.int64)
        for axis, cuts in enumerate(self._cuts):
            starts, stops = np.array(cuts, np.int64).T
            box = wanted[row, axis]
            first = np.searchsorted(stops, box[:, 0], side="right")
            behind = np.searchsorted(starts, box[:, 1], side="left")
            if stops[-1] == 0:  # no elements: the only cut meets every box
                first, behind = np.zeros_like(first), np.ones_like(behind)
            number = np.maximum(behind - first, 0)
            again = np.repeat(np.arange(len(row)), number)
            cut = np.arange(len(again)) - np.repeat(np.cumsum(number) - number, number)
            cut += first[again]
            row, cell = row[again], cell[again] * len(cuts) + cut
            part = np.stack(
                [np.maximum(starts[cut], box[again, 0]), np.minimum(stops[cut], box[again, 1])], -1
            )
            parts = np.concatenate([parts[again], part[:, None]], axis=1)
        return devices[row], cell, parts

    def senders(
        self,
        receivers: np.ndarray,
        cells: np.ndarray,
        sizes: np.ndarray,
        process_of: Mapping[int, int],
        sent_bytes: Mapping[int, int],
    ) -> np.ndarray:
        """Returns each part's sender: the only holder, the receiver, or the best of several."""
        senders = np.array([holders[0] for holders in self._holders], np.int64)[cells]
        several = np.array([len(holders) > 1 for holders in self._holders])[cells]
        load = Counter(sent_bytes)
        alone = ~several & (senders != receivers)
        load.update(_sums(senders[alone], sizes[alone]))
        for n in np.flatnonzero(several):
            receiver, size = int(receivers[n]), int(sizes[n])
            holders = self._holders[cells[n]]
            if receiver in holders:
                senders[n] = receiver
                continue
            home = process_of[receiver]
            near = [holder for holder in holders if process_of[holder] == home]
            senders[n] = sender = min(near or holders, key=load.__getitem__)
            load[sender] += size
        return senders


def _sums(keys: np.ndarray, values: np.ndarray) -> dict[int, int]:
    """Returns the sum of the values of each key."""
    if not len(keys):
        return {}
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    first = np.flatnonzero(np.diff(keys, prepend=keys[0] - 1))
    sums = np.add.reduceat(values, first)
    return dict(zip(keys[first].tolist(), sums.tolist(), strict=True))


def _check_inside(shape: tuple[int, ...], device: int, box: Ranges) -> None:
    if len(box) != len(shape) or any(
        not 0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
    ):
        raise ValueError(
            f"target device {device} wants {box} of an array of shape {shape}; give one "
            "(start, stop) inside the array per axis"
        )
