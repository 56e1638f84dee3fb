# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Which slot has which pages of the KV cache: the host's view, plain arithmetic.

Pages are cut into lanes as slots and rows are (scheduler.py): a slot has pages of its own lane
only, so they are on its data shard on every mesh. Pages are counted: slots whose prompts begin
alike hold the same ones, and a page is free when nobody holds it.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Pool(NamedTuple):
    """How many pages there are: `pages` in each of `lanes` equal parts, lane by lane."""

    lanes: int
    pages: int

    @property
    def total(self) -> int:
        """In all lanes."""
        return self.lanes * self.pages


def pages_for(places: int, page_size: int) -> int:
    """Pages that hold so many places."""
    return -(-places // page_size)


def dense_pool(lanes: int, slots: int, places: int, page_size: int) -> Pool:
    """Pages for every slot to be full."""
    return Pool(lanes, slots // lanes * pages_for(places, page_size))


def roomier_pages(pages: int) -> int:
    """A quarter more pages than so many, or up to 7/8 more: the next on a scale of sizes.

    Each is half as large again as the one before. Rollouts that grow by other pages come to the
    same sizes, for which programs are there.
    """
    size = 1
    while 4 * size < 5 * pages:
        size += (size + 1) // 2
    return size


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageCopy:
    """The contents of page `source` are to be in page `target`; numbers of the whole pool."""

    source: int
    target: int


class PageTable:
    """The pages of every slot, in the order of their places. Numbers within the slot's lane."""

    def __init__(self, pool: Pool, *, num_slots: int, page_size: int) -> None:
        """Nobody holds a page."""
        self.pool, self._page_size = pool, page_size
        self._slots_per_lane = num_slots // pool.lanes
        self._pages: list[list[int]] = [[] for _ in range(num_slots)]
        self._holders = np.zeros((pool.lanes, pool.pages), np.int32)
        # The last of a list is given out next: at first the pages in their order.
        self._free = [list(range(pool.pages))[::-1] for _ in range(pool.lanes)]
        self._pinned: list[tuple[int, int]] = []
        self._copied: dict[tuple[int, int], int] = {}

    def lane(self, slot: int) -> int:
        """The lane of a slot."""
        return slot // self._slots_per_lane

    def slots_of(self, lane: int) -> range:
        """The slots of a lane."""
        return range(lane * self._slots_per_lane, (lane + 1) * self._slots_per_lane)

    def num_free(self, lane: int) -> int:
        """Pages of the lane that nobody holds."""
        return len(self._free[lane])

    def num_held(self, slot: int) -> int:
        """Pages of the slot."""
        return len(self._pages[slot])

    def pages_of(self, slot: int, tokens: int) -> list[int]:
        """The pages that hold the slot's first so many tokens, numbered within its lane."""
        return self._pages[slot][: pages_for(tokens, self._page_size)]

    def missing(self, slot: int, tokens: int) -> int:
        """How many more pages the slot needs to hold so many tokens."""
        return max(0, pages_for(tokens, self._page_size) - len(self._pages[slot]))

    def has_alone(self, slot: int, tokens: int) -> bool:
        """Whether nobody else has the page in which the slot's first so many tokens end."""
        page = self._pages[slot][pages_for(tokens, self._page_size) - 1]
        return self._holders[self.lane(slot), page] == 1

    def hold(self, slot: int, tokens: int) -> None:
        """The slot has room for so many tokens. There must be pages enough (`missing`)."""
        lane = self.lane(slot)
        for _ in range(self.missing(slot, tokens)):
            page = self._free[lane].pop()
            self._holders[lane, page] = 1
            self._pages[slot].append(page)

    def keep(self, slot: int, tokens: int) -> None:
        """The slot gives up the pages behind its first so many tokens."""
        number = pages_for(tokens, self._page_size)
        for page in self._pages[slot][number:]:
            self._let_go(self.lane(slot), page)
        del self._pages[slot][number:]

    def begin(self, slot: int, source: int, tokens: int) -> PageCopy | None:
        """The slot begins anew with the first `tokens` tokens in the cache of slot `source`.

        Whole pages are shared from now on. The tokens behind them will be in a page of the slot's
        own, for which there must be a free one: what to copy into it before anything is appended,
        None where there is nothing to copy. Until `end_round` the copied page stays as it is.
        """
        lane, whole = self.lane(slot), tokens // self._page_size
        shared, rest = self._pages[source][:whole], tokens % self._page_size
        partial = self._pages[source][whole] if rest else None
        for page in (*shared, *([] if partial is None else [partial])):
            self._holders[lane, page] += 1
        for page in self._pages[slot]:
            self._let_go(lane, page)
        self._pages[slot] = list(shared)
        if partial is None:
            return None
        if self._holders[lane, partial] == 1:
            # It was the slot's own, and nobody else's.
            self._pages[slot].append(partial)
            return None
        self._pinned.append((lane, partial))
        self.hold(slot, tokens)
        target = self._pages[slot][-1]
        # A page that is to be filled itself in this round has its contents from elsewhere.
        origin = self._copied.get((lane, partial), partial)
        self._copied[lane, target] = origin
        return PageCopy(source=self._number(lane, origin), target=self._number(lane, target))

    def pin(self, slot: int, tokens: int) -> list[int]:
        """`pages_of`, which until `end_round` stay as they are, whoever lets them go."""
        pages, lane = self.pages_of(slot, tokens), self.lane(slot)
        for page in pages:
            self._holders[lane, page] += 1
            self._pinned.append((lane, page))
        return pages

    def end_round(self) -> None:
        """What was to be copied has been."""
        for lane, page in self._pinned:
            self._let_go(lane, page)
        self._pinned, self._copied = [], {}

    def grow(self, pool: Pool) -> None:
        """There are more pages now; those of before keep their places in their lanes."""
        more = pool.pages - self.pool.pages
        self._holders = np.pad(self._holders, ((0, 0), (0, more)))
        added = list(range(self.pool.pages, pool.pages))[::-1]
        self._free = [[*added, *free] for free in self._free]
        self.pool = pool

    def as_array(self, pages_per_row: int) -> np.ndarray:
        """i32[num_slots, pages_per_row]: numbers in the whole pool; 0 of the lane where none is."""
        table = np.zeros((len(self._pages), pages_per_row), np.int32)
        for slot, pages in enumerate(self._pages):
            table[slot, : len(pages)] = pages
            table[slot] += self._number(self.lane(slot), 0)
        return table

    def holders(self) -> Sequence[Sequence[int]]:
        """How many slots hold each page, lane by lane; for checks."""
        return self._holders.tolist()

    def _let_go(self, lane: int, page: int) -> None:
        self._holders[lane, page] -= 1
        if not self._holders[lane, page]:
            self._free[lane].append(page)

    def _number(self, lane: int, page: int) -> int:
        return lane * self.pool.pages + page
