# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How many slots of a rollout are at work while episodes of different lengths end. Pure arithmetic.

Episodes take free slots in turn; behind the last one that waits, slots stay empty. Few long
episodes among many short ones leave most of a large batch empty for most of its rounds, and a
smaller batch fewer of a smaller number: which is the faster depends on what a round with few at
work takes.
"""

import functools
import heapq
from collections.abc import Sequence

# More episodes than these are counted by so many at a time.
MOST_ROWS = 512


@functools.lru_cache(maxsize=256)
def busy_shares(lengths: tuple[float, ...], rows: int, slots: int) -> tuple[tuple[int, float], ...]:
    """For how long how many slots are at work: (number, part of all rounds), for all numbers.

    Each of the lengths is that of as many of the `rows` episodes as any other one; they begin by
    turns. An episode is at work for as long as it is long.
    """
    ends: list[float] = []
    times: dict[int, float] = {}
    now = 0.0

    def let_end() -> None:
        nonlocal now
        end = heapq.heappop(ends)
        busy = len(ends) + 1
        times[busy] = times.get(busy, 0.0) + end - now
        now = end

    for row in range(rows):
        if len(ends) == slots:
            let_end()
        heapq.heappush(ends, now + lengths[row % len(lengths)])
    while ends:
        let_end()
    return tuple((busy, time / now) for busy, time in sorted(times.items()) if time)


def times_as_long(lengths: Sequence[float], rows: int, slots: int, alone_share: float) -> float:
    """How many times as long such episodes take as if all slots were always at work.

    A round with one slot at work takes `alone_share` of one with all, others are on the line
    between the two. With 1 an empty slot costs as much as a busy one.
    """
    several = -(-rows // MOST_ROWS)
    rows, slots = max(1, rows // several), max(1, slots // several)
    shares = busy_shares(tuple(lengths), rows, slots)
    took = said = 0.0
    for busy, share in shares:
        along = (busy - 1) / (slots - 1) if slots > 1 else 1.0
        took += share * (alone_share + along * (1.0 - alone_share))
        said += share * busy / slots
    return took / said
