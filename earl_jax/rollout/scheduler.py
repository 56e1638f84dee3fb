# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The scheduling policy of a rollout: which waiting episode takes which free slot. Pure Python.

An episode plays in the data shard of its row if a slot is free there. Where none is, it borrows a
slot of any data shard that has one (engine/rows.py). So no slot is empty while an episode waits,
and row i is the episode of task i, whichever slot played it.
"""

from collections.abc import Collection, Sequence

from earl_jax.engine.rows import Rows


class SlotScheduler:
    """Assigns free slots to waiting rows: first to rows of the same data shard, then to others."""

    def __init__(self, groups: Sequence[int], *, rows: Rows, num_slots: int) -> None:
        """Begins with all rows waiting; `groups` has each row's group, with similar prompts."""
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
        """The number of rows that have no slot yet."""
        return sum(map(len, self._waiting))

    def assign(self, free: Sequence[int], crowded: Collection[int] = ()) -> dict[int, int]:
        """Returns the rows that these free slots take now, by slot.

        A data shard gives its slots to its own rows in their order. The slots that are left are
        lent to rows of other data shards: first to rows of groups that have begun in a data shard
        with a free slot, which has read their prompt; then the last row of the longest queue, whose
        group begins the latest, goes to the data shard with the most free slots. The `crowded`
        slots, whose shards have episodes that wait for pages, are not lent.
        """
        taken: dict[int, int] = {}
        left: list[list[int]] = [[] for _ in self._waiting]
        for slot in free:
            shard = slot // self._slots_per_shard
            if self._waiting[shard]:
                taken[slot] = self._take(shard, next(iter(self._waiting[shard])))
            elif self._rows.spare and slot not in crowded:
                left[shard].append(slot)
        while any(left) and any(self._waiting):
            shard, row = self._next_borrower(left)
            taken[left[shard].pop(0)] = self._take(shard, row)
        return taken

    def _next_borrower(self, left: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Returns the data shard, of those with slots `left`, that lends one; and the row."""
        for shard, slots in enumerate(left):
            if slots and (row := self._known_row(shard)) is not None:
                return shard, row
        shard = max(range(len(left)), key=lambda shard: (len(left[shard]), -shard))
        return shard, next(reversed(max(self._waiting, key=len)))

    def _known_row(self, shard: int) -> int | None:
        """Returns a waiting row of a group that has begun in the data shard; None if there is none.

        Groups without waiting rows are forgotten.
        """
        for group in list(self._begun[shard]):
            if rows := self._of_group[group]:
                return next(iter(rows))
            del self._begun[shard][group]
        return None

    def _take(self, shard: int, row: int) -> int:
        """Removes the row from its queue; its group has begun in this data shard."""
        group = self._groups[row]
        del self._waiting[self._rows.data_shard(row)][row], self._of_group[group][row]
        self._begun[shard][group] = None
        return row
