# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The scheduling policy of a rollout: which waiting task takes which free slot. Pure Python.

Tasks are numbered as they are submitted. A task plays in its home data shard (engine/rows.py) if a
slot is free there. Where none is, it borrows a slot of any data shard that has one. So no slot is
empty while a task waits. Waiting is bounded: a task begins before any that was submitted
`Rows.num_places` tasks after it, or later.
"""

from collections.abc import Collection, Sequence

from earl_jax.engine.rows import Rows


class SlotScheduler:
    """Assigns free slots to waiting tasks: first to tasks at home there, then to others."""

    def __init__(self, rows: Rows, num_slots: int) -> None:
        self._rows, self._slots_per_shard = rows, num_slots // rows.data_shards
        # Dicts for sets that keep their order. Each data shard's tasks, with their groups.
        self._waiting: list[dict[int, int]] = [{} for _ in range(rows.data_shards)]
        self._of_group: dict[int, dict[int, None]] = {}
        # Groups of which some task has begun in the data shard: their prompt is read there.
        self._begun: list[dict[int, None]] = [{} for _ in range(rows.data_shards)]

    def submit(self, task: int, group: int) -> None:
        """Adds a task with the next number; tasks of a group have similar prompts."""
        self._waiting[self._rows.home(task)][task] = group
        self._of_group.setdefault(group, {})[task] = None

    def remove(self, task: int) -> None:
        """Removes a waiting task."""
        group = self._waiting[self._rows.home(task)].pop(task)
        del self._of_group[group][task]
        if not self._of_group[group]:
            del self._of_group[group]
            for groups in self._begun:
                groups.pop(group, None)

    @property
    def num_waiting(self) -> int:
        """The number of tasks that have no slot yet."""
        return sum(map(len, self._waiting))

    def assign(self, free: Sequence[int], crowded: Collection[int] = ()) -> dict[int, int]:
        """Returns the tasks that these free slots take now, by slot.

        A data shard gives its slots to its own tasks in their order. The slots that are left are
        lent to tasks of other data shards: first to those of groups that have begun in a data shard
        with a free slot, which has read their prompt; then the last task of the longest queue,
        whose group begins the latest, goes to the data shard with the most free slots. The
        `crowded` slots, whose shards have episodes that wait for pages, are not lent. A task that
        would overtake one submitted `Rows.num_places` before it, or earlier, lets that one go
        first.
        """
        taken: dict[int, int] = {}
        left: list[list[int]] = [[] for _ in self._waiting]
        for slot in free:
            shard = slot // self._slots_per_shard
            if self._waiting[shard]:
                taken[slot] = self._take(shard, next(iter(self._waiting[shard])))
            elif slot not in crowded:
                left[shard].append(slot)
        while any(left) and any(self._waiting):
            shard, task = self._next_borrower(left)
            taken[left[shard].pop(0)] = self._take(shard, task)
        return taken

    def _next_borrower(self, left: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Returns the data shard, of those with slots `left`, that lends one; and the task."""
        for shard, slots in enumerate(left):
            if slots and (task := self._known_task(shard)) is not None:
                return shard, task
        shard = max(range(len(left)), key=lambda shard: (len(left[shard]), -shard))
        return shard, next(reversed(max(self._waiting, key=len)))

    def _known_task(self, shard: int) -> int | None:
        """Returns a waiting task of a group that has begun in the data shard; None: there is none.

        Groups without waiting tasks are forgotten.
        """
        for group in self._begun[shard]:
            return next(iter(self._of_group[group]))
        return None

    def _take(self, shard: int, task: int) -> int:
        """Removes the task, or the oldest, from its queue; its group has begun in this shard."""
        oldest = min(next(iter(tasks)) for tasks in self._waiting if tasks)
        task = oldest if task >= oldest + self._rows.num_places else task
        group = self._waiting[self._rows.home(task)][task]
        self._begun[shard][group] = None
        self.remove(task)
        return task
