# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Which waiting episode gets which slot, and where it is written down: arithmetic on the host.

Rows of experience and slots are cut into equal data shards, as many as divide the number of
devices, of slots and of rows. On every mesh whose data axis divides these a data shard is on one
data shard, and who sits where does not depend on the mesh. An episode is at home in the data shard
of its row, and plays there if a slot is free. Where none is, it is a guest in any data shard that
has one: it writes a row that its slot has for guests, which is copied home when it is over
(row_copies.py). So no slot is empty while an episode waits, and row i is the episode of task i
whoever played it where and when.
"""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Rows(NamedTuple):
    """Rows of experience: of each of `data shards` first `homes`, then `guests`, one for each slot.

    Without guests (0) episodes play at home only.

    Example: Rows(2, 3, 2) are ten rows, of which 0 1 2 and 5 6 7 are the homes of rows 0 to 5; the
    slots 0 1 and 2 3 have 3 4 and 8 9 for guests.
    """

    data_shards: int
    homes: int
    guests: int

    @property
    def total(self) -> int:
        """How many there are on the devices."""
        return self.data_shards * (self.homes + self.guests)

    def data_shard(self, row: int) -> int:
        """Where a row is at home."""
        return row // self.homes

    def home(self, row: int) -> int:
        """The place of a row at home, in the whole buffer."""
        return row + self.data_shard(row) * self.guests

    def guest(self, slot: int) -> int:
        """The place of the row that a slot has for guests, in the whole buffer."""
        return slot + (slot // self.guests + 1) * self.homes


def make_rows(*, num_rows: int, num_slots: int, num_devices: int, guests: bool = True) -> Rows:
    """Returns the rows for so many episodes; with `guests`, rows for these too.

    There are as many data shards as the greatest common divisor of the three numbers, which every
    data axis divides that a mesh of so many devices can have with these slots and rows.

    Example: 8 devices with 12 slots and 48 rows: 4 data shards, of 3 slots and 12 + 3 rows.
    """
    num_data_shards = math.gcd(num_rows, num_slots, num_devices)
    away = num_slots // num_data_shards if guests and num_data_shards > 1 else 0
    return Rows(num_data_shards, num_rows // num_data_shards, away)


class SlotScheduler:
    """Hands free slots to waiting rows: first to those at home, then to guests."""

    def __init__(self, groups: Sequence[int], *, rows: Rows, num_slots: int) -> None:
        """Rows 0, 1, .. wait; `groups` says of each which others begin as it does."""
        self._groups, self._rows = groups, rows
        self._slots_per_shard = num_slots // rows.data_shards
        # Dicts for sets that keep their order.
        self._waiting: list[dict[int, None]] = [{} for _ in range(rows.data_shards)]
        self._of_group: dict[int, dict[int, None]] = {group: {} for group in groups}
        for row, group in enumerate(groups):
            self._waiting[rows.data_shard(row)][row] = self._of_group[group][row] = None
        # Groups of which some episode has begun in the data shard: their prompt is read there.
        self._begun: list[dict[int, None]] = [{} for _ in range(rows.data_shards)]

    @property
    def num_waiting(self) -> int:
        """How many rows have no slot yet."""
        return sum(map(len, self._waiting))

    def assign(self, free: Sequence[int], crowded: Collection[int] = ()) -> dict[int, int]:
        """The rows that these free slots take now, by slot.

        A data shard gives its slots to its own rows in their order. What is left goes to rows that
        wait elsewhere: first of groups that have begun in a data shard with a free slot, which has
        read their prompt; then the last of the longest queue, whose group begins the latest, goes
        to the data shard with the most free slots. The `crowded` slots take no guests: episodes
        wait for their pages.
        """
        taken: dict[int, int] = {}
        left: list[list[int]] = [[] for _ in self._waiting]
        for slot in free:
            data_shard = slot // self._slots_per_shard
            if self._waiting[data_shard]:
                taken[slot] = self._take(data_shard, next(iter(self._waiting[data_shard])))
            elif self._rows.guests and slot not in crowded:
                left[data_shard].append(slot)
        while any(left) and any(self._waiting):
            data_shard, row = self._next_guest(left)
            taken[left[data_shard].pop(0)] = self._take(data_shard, row)
        return taken

    def _next_guest(self, left: Sequence[Sequence[int]]) -> tuple[int, int]:
        """The data shard, of those with slots `left`, that takes a guest; and which row that is."""
        for data_shard, slots in enumerate(left):
            if slots and (row := self._known_row(data_shard)) is not None:
                return data_shard, row
        data_shard = max(
            range(len(left)), key=lambda data_shard: (len(left[data_shard]), -data_shard)
        )
        return data_shard, next(reversed(max(self._waiting, key=len)))

    def _known_row(self, data_shard: int) -> int | None:
        """A row that waits, of a group that has begun in the data shard."""
        for group in list(self._begun[data_shard]):
            if rows := self._of_group[group]:
                return next(iter(rows))
            del self._begun[data_shard][group]
        return None

    def _take(self, data_shard: int, row: int) -> int:
        """The row begins in this data shard."""
        group = self._groups[row]
        del self._waiting[self._rows.data_shard(row)][row], self._of_group[group][row]
        self._begun[data_shard][group] = None
        return row
