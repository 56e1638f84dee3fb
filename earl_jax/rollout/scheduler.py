# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The scheduling policy of a rollout: which waiting task takes which free slot. Pure Python.

Tasks are numbered as they are submitted. A task plays in its own data shard (engine/rows.py) if a
slot is free there. Where none is, it takes a slot of any data shard that has one. So no slot is
empty while a task waits. Waiting is bounded: a task begins before any that was submitted
`Rows.batch_size` tasks after it, or later.

With the order "longest" the tasks that are expected to be the longest begin first (StreamRL,
arXiv 2504.15930, orders by a trained ranker). What is expected costs nothing: the lengths of tasks
of the same kind, which are those of a group, and those of the same task when it was played before.
The service of a rollout knows those that it has played; a run keeps the last length of each task
from step to step (`next_lengths`).
"""

import collections
import itertools
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from earl_jax.engine.rows import Rows
from earl_jax.trajectory import Outcome

Order = Literal["fifo", "longest", "queue"]
# Lengths of a kind of task that are remembered, and kinds: those of which a task ended last.
_REMEMBERED, _KINDS = 8, 100_000
# Tasks whose last length a run keeps: 1.3 MB of a checkpoint.
_KEPT = 65_536


def next_lengths(
    order: Order, before: Mapping[int, int], outcomes: Iterable[Outcome]
) -> dict[int, int]:
    """Returns the last lengths of tasks by `Task.kind`, with those of a step's `outcomes`.

    Only the order "longest" needs them; with another they stay. A length is the mean of the task's
    episodes in the last step that had some. Those of the 65,536 tasks that steps had last are kept,
    in the order of these steps.

    Example: {1: 10, 2: 20} with episodes of 31 and 34 tokens of kind 1 is {2: 20, 1: 32}.
    """
    if order != "longest":
        return dict(before)
    found: dict[int, list[int]] = collections.defaultdict(list)
    for outcome in outcomes:
        found[outcome.kind].append(outcome.num_tokens)
    kept = {kind: length for kind, length in before.items() if kind not in found}
    kept |= {kind: int(statistics.fmean(lengths)) for kind, lengths in found.items()}
    return dict(itertools.islice(kept.items(), max(0, len(kept) - _KEPT), None))


class Lengths:
    """The lengths of tasks by their kind: the last ones that ended, and those that play."""

    def __init__(self) -> None:
        self._kinds: dict[int, int] = {}
        self._playing: dict[int, dict[int, int]] = collections.defaultdict(dict)
        self._ended: dict[int, collections.deque[int]] = {}

    def add(self, task: int, kind: int, before: int | None = None) -> None:
        """Adds a task of this kind, which waits; where none has ended here, one had `before`."""
        self._kinds[task] = kind
        if before is not None and kind not in self._ended:
            self._remember(kind, before)

    def play(self, lengths: Mapping[int, int]) -> None:
        """Notes how long tasks are that play."""
        for task, length in lengths.items():
            self._playing[self._kinds[task]][task] = length

    def end(self, task: int, length: int | None) -> None:
        """Forgets a task; one that ended had this length. None: it was aborted."""
        kind = self._kinds.pop(task)
        playing = self._playing.get(kind, {})
        playing.pop(task, None)
        if not playing:
            self._playing.pop(kind, None)
        if length is not None:
            self._remember(kind, length)

    def _remember(self, kind: int, length: int) -> None:
        # The last one in the order of the dict, which is that in which kinds are forgotten.
        ended = self._ended[kind] = self._ended.pop(kind, collections.deque(maxlen=_REMEMBERED))
        ended.append(length)
        if len(self._ended) > _KINDS:
            del self._ended[next(iter(self._ended))]

    def kind(self, task: int) -> int:
        """Returns the kind of a task that waits or plays."""
        return self._kinds[task]

    def expected(self, kind: int) -> float | None:
        """Returns the length that a task of this kind is expected to have; None: nothing is known.

        It is the mean of those that ended, or the length of one that plays if that is more already.
        """
        ended, playing = self._ended.get(kind, ()), self._playing.get(kind, {})
        if not ended and not playing:
            return None
        return max(statistics.fmean(ended) if ended else 0.0, *playing.values(), 0.0)


class SlotScheduler:
    """Assigns free slots to waiting tasks: first to tasks of their data shard, then to others."""

    def __init__(self, rows: Rows, num_slots: int, order: Order = "fifo") -> None:
        self._rows, self._slots_per_shard = rows, num_slots // rows.data_shards
        self._lengths = Lengths() if order == "longest" else None
        # Dicts for sets that keep their order. Each data shard's tasks, with their groups.
        self._waiting: list[dict[int, int]] = [{} for _ in range(rows.data_shards)]
        self._of_group: dict[int, dict[int, None]] = {}
        # Groups of which some task has begun in the data shard: their prompt is read there.
        self._begun: list[dict[int, None]] = [{} for _ in range(rows.data_shards)]

    def submit(
        self, task: int, group: int, kind: int | None = None, before: int | None = None
    ) -> None:
        """Adds a task with the next number; tasks of a group have similar prompts.

        Tasks of one `kind` are about equally long; None: those of the group are. One of them had
        the length `before`, if it is known.
        """
        if self._lengths is not None:
            self._lengths.add(task, group if kind is None else kind, before)
        self._waiting[self._rows.own_shard(task)][task] = group
        self._of_group.setdefault(group, {})[task] = None

    @property
    def needs_lengths(self) -> bool:
        """True if the order depends on the lengths of the tasks that play."""
        return self._lengths is not None

    def play(self, lengths: Mapping[int, int]) -> None:
        """Notes how many tokens the tasks have that play."""
        if self._lengths is not None:
            self._lengths.play(lengths)

    def end(self, task: int, length: int | None = None) -> None:
        """Notes that a task that played is over, with so many tokens; None: it was aborted."""
        if self._lengths is not None:
            self._lengths.end(task, length)

    def remove(self, task: int) -> None:
        """Removes a waiting task."""
        self._leave(task)
        self.end(task)

    def _leave(self, task: int) -> None:
        group = self._waiting[self._rows.own_shard(task)].pop(task)
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

        A data shard gives its slots to its own tasks in their order (`_first`). The slots that are
        left go to tasks of other data shards. With "longest" the first of all goes to the data
        shard with the most free slots. With "fifo" those of groups go first that have begun in a
        data shard with a free slot, which has read their prompt; then the last task of the longest
        queue, whose group begins the latest, goes to the data shard with the most free slots. The
        `crowded` slots, whose shards have episodes that wait for pages, take tasks of their own
        shard alone. A task that would overtake one submitted `Rows.batch_size` before it, or
        earlier, lets that one go first.
        """
        taken: dict[int, int] = {}
        left: list[list[int]] = [[] for _ in self._waiting]
        for slot in free:
            shard = slot // self._slots_per_shard
            if self._waiting[shard]:
                taken[slot] = self._take(shard, self._first(self._waiting[shard]))
            elif slot not in crowded:
                left[shard].append(slot)
        while any(left) and any(self._waiting):
            shard, task = self._next_of_another(left)
            taken[left[shard].pop(0)] = self._take(shard, task)
        return taken

    def _next_of_another(self, left: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Returns the data shard, of those with slots `left`, that gives the next; and the task."""
        if self._lengths is not None:
            shard = max(range(len(left)), key=lambda shard: (len(left[shard]), -shard))
            return shard, self._first([task for tasks in self._waiting for task in tasks])
        for shard, slots in enumerate(left):
            if slots and (task := self._known_task(shard)) is not None:
                return shard, task
        shard = max(range(len(left)), key=lambda shard: (len(left[shard]), -shard))
        return shard, next(reversed(max(self._waiting, key=len)))

    def _first(self, tasks: Collection[int]) -> int:
        """Returns the task of these, in the order of their numbers, that begins first.

        "longest": of the `Rows.batch_size` oldest, which are a step's, first those of which nothing
        is known, because only they tell how long others of their kind are; then the longest.
        """
        lengths = self._lengths
        if lengths is None:
            return next(iter(tasks))

        # Many tasks are of few kinds.
        known: dict[int, float | None] = {}

        def key(task: int) -> tuple[int, bool, float, int]:
            kind = lengths.kind(task)
            if kind not in known:
                known[kind] = lengths.expected(kind)
            step, expected = task // self._rows.batch_size, known[kind]
            return step, expected is not None, -(expected or 0.0), task

        return min(tasks, key=key)

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
        task = oldest if task >= oldest + self._rows.batch_size else task
        group = self._waiting[self._rows.own_shard(task)][task]
        self._begun[shard][group] = None
        self._leave(task)
        self.play({task: 0})
        return task
