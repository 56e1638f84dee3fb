# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The episodes of a rollout that one of several processes plays: its own, or also those of a queue.

Where there are more episodes than slots, a fixed part would leave a process without work while
another one has long episodes in its slots and more to begin. So each process begins with the first
groups of its part, as many as its slots need. The groups behind them, of all parts, are one queue
in the order of the tasks, from which a process takes the next ones, whole, when slots are free:
many at first, so that it asks seldom, and fewer the fewer are left (guided self-scheduling:
Polychronopoulos and Kuck 1987). The queue is a counter (`Cluster.add_to`).

Which process plays what depends on time. No token does: it is drawn by the seed of its episode. And
rows come to the trainer in the order of the tasks (dispatch/pack.py).
"""

import itertools
from collections.abc import Sequence

from earl_jax.launch.cluster import Cluster
from earl_jax.rollout.events import Events
from earl_jax.rollout.task import Task


class Share:
    """The tasks of this process, by their numbers in the rollout. Host-side state only.

    `numbers` are those so far, in the order in which they were taken. `is_fixed`: no process will
    have others.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        cluster: Cluster | None = None,
        queue: Sequence[Sequence[int]] = (),
        most: int = 0,
        events: Events | None = None,
    ) -> None:
        """Begins with `numbers`; groups of the `queue` follow, up to `most` tasks in all.

        Which ones is noted in the `events`, or comes again in a replay.
        """
        self._events = events or Events()
        self._left = len(queue)
        self.numbers = list(numbers)
        self.is_fixed = not queue
        self._queue, self._cluster, self._most = queue, cluster, most
        self._size = max(map(len, queue), default=1)
        self._is_over = self.is_fixed
        self._counter = cluster.new_counter() if cluster and queue else 0

    def take(self, num_free: int) -> list[int]:
        """Returns the tasks of the next groups; [] for no more, or where no slot is free.

        They are what so many free slots need, and half of this process's even part of what was
        left when it asked last.
        """
        players = len(self._cluster.players) if self._cluster else 1
        wanted = max(-(-num_free // self._size), self._left // (2 * players))
        num_groups = min(wanted, (self._most - len(self.numbers)) // self._size)
        if self._is_over or num_free <= 0 or num_groups <= 0:
            return []
        first = self._count(num_groups)
        self._left = max(0, len(self._queue) - first - num_groups)
        groups = self._queue[first : first + num_groups]
        self._is_over = first + num_groups >= len(self._queue)
        taken = list(itertools.chain.from_iterable(groups))
        self.numbers += taken
        return taken

    def close(self) -> None:
        """Leaves nothing in the queue, because the rollout is given up: the others end sooner."""
        if not self._is_over:
            self._count(len(self._queue))
            self._is_over = True

    def _count(self, number: int) -> int:
        assert self._cluster is not None, "a queue belongs to several processes"
        if (event := self._events.coming("queue")) is not None:
            first = event["first"]
        else:
            first = self._cluster.add_to(self._counter, number, "the next episodes of a rollout")
        self._events.note("queue", first=first)
        return first


def share_of(
    tasks: Sequence[Task],
    cluster: Cluster,
    num_slots: int,
    num_rows: int,
    events: Events | None = None,
) -> Share:
    """Returns this process's share of a rollout's tasks; those of a group follow each other.

    A process has `num_slots` slots and rows for `num_rows` episodes. There is a queue where these
    are twice the tasks of a part or more, which is no less than a group: then some process has rows
    for one more group while one is left, whoever is slow.

    Example: groups of two, 0 1 | 2 3 | 4 5 and 6 7 | 8 9 | 10 11 for two processes with two slots:
    they begin with 0 1 and 6 7, and 2 3, 4 5, 8 9 and 10 11 are in the queue.
    """
    numbers = range(len(tasks))
    part = cluster.own(numbers)
    runs = itertools.groupby(numbers, key=lambda number: tasks[number].group)
    groups = [list(run) for _, run in runs]
    size, players = max(map(len, groups), default=1), len(cluster.players)
    begun = -(-num_slots // size)
    queue = [group for each in cluster.parts(groups) for group in each[begun:]]
    if not queue or num_rows * players < 2 * len(tasks) or size * players > len(tasks):
        return Share(part)
    first = cluster.own(groups)[:begun]
    own = list(itertools.chain.from_iterable(first))
    return Share(own, cluster, queue, num_rows, events)
