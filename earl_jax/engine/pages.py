# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The table of pages of the KV cache by slot: the host's view, plain arithmetic.

The pool is cut into as many parts as the mesh has row shards, and a slot has pages of its own row
shard only. Within a shard pages are cut over heads (`tensor`) and positions (`context`), so that
the longest episode that fits a budget grows with both. Pages are counted: slots whose prompts begin
alike hold the same ones, and a page is free when no slot holds it. A change of the mesh may change
the number of row shards: `PageTable.regroup` returns which page then has the contents of which.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from earl_jax.settings.errors import InputError

# In `PageTable.regroup`: the source of a page that is a copy of none.
NO_SOURCE = -1


class Pool(NamedTuple):
    """The number of pages: `pages` of each of `shards` row shards, shard by shard."""

    shards: int
    pages: int

    @property
    def total(self) -> int:
        """Pages of all row shards."""
        return self.shards * self.pages


def pages_for(max_tokens: int, page_size: int) -> int:
    """Returns the number of pages that hold so many tokens."""
    return -(-max_tokens // page_size)


def dense_pool(shards: int, slots: int, max_tokens: int, page_size: int) -> Pool:
    """Returns the pool with pages for every slot to be full."""
    return Pool(shards, slots // shards * pages_for(max_tokens, page_size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageCopy:
    """A copy of page `source` to page `target`; numbers of the whole pool."""

    source: int
    target: int


class PageTable:
    """The pages of every slot, in the order of their tokens. Numbers within the slot's row shard.

    A slot is idle from `end` until `hold` or `begin`: its pages are kept for other slots' prompts,
    and `regroup` may drop them.
    """

    def __init__(self, pool: Pool, *, num_slots: int, page_size: int) -> None:
        """Begins with all pages free."""
        assert num_slots % pool.shards == 0, f"{num_slots} slots over {pool.shards} row shards"
        self.pool, self._page_size = pool, page_size
        self._slots_a_shard = num_slots // pool.shards
        self._pages: list[list[int]] = [[] for _ in range(num_slots)]
        self._holders = np.zeros((pool.shards, pool.pages), np.int32)
        # The last of a list is given out next: at first the pages in their order.
        self._free = [list(range(pool.pages))[::-1] for _ in range(pool.shards)]
        self._pinned: list[tuple[int, int]] = []
        self._copied: dict[tuple[int, int], int] = {}
        self._idle: set[int] = set()

    def shard(self, slot: int) -> int:
        """Returns the row shard of a slot."""
        return slot // self._slots_a_shard

    def slots_of(self, shard: int) -> range:
        """Returns the slots of a row shard."""
        return range(shard * self._slots_a_shard, (shard + 1) * self._slots_a_shard)

    def num_free(self, shard: int) -> int:
        """Returns the number of free pages of the row shard."""
        return len(self._free[shard])

    def num_held(self, slot: int) -> int:
        """Returns the number of pages of the slot."""
        return len(self._pages[slot])

    def pages_of(self, slot: int, tokens: int) -> list[int]:
        """Returns the pages of the slot's first so many tokens, numbered within its row shard."""
        return self._pages[slot][: pages_for(tokens, self._page_size)]

    def missing(self, slot: int, tokens: int) -> int:
        """Returns how many more pages the slot needs to hold so many tokens."""
        return max(0, pages_for(tokens, self._page_size) - len(self._pages[slot]))

    def has_alone(self, slot: int, tokens: int) -> bool:
        """Returns whether the slot alone has its pages that its first so many do not fill."""
        whole, pages = tokens // self._page_size, self._pages[slot]
        # Other slots have a page only with all of those before it.
        return whole >= len(pages) or self._holders[self.shard(slot), pages[whole]] == 1

    def hold(self, slot: int, tokens: int) -> None:
        """Gives the slot pages for so many tokens. There must be pages enough (`missing`)."""
        shard = self.shard(slot)
        self._idle.discard(slot)
        for _ in range(self.missing(slot, tokens)):
            page = self._free[shard].pop()
            self._holders[shard, page] = 1
            self._pages[slot].append(page)

    def keep(self, slot: int, tokens: int) -> None:
        """Frees the slot's pages behind its first so many tokens."""
        number = pages_for(tokens, self._page_size)
        for page in self._pages[slot][number:]:
            self._let_go(self.shard(slot), page)
        del self._pages[slot][number:]

    def begin(self, slot: int, source: int, tokens: int) -> PageCopy | None:
        """Begins the slot anew with the first `tokens` tokens in the cache of slot `source`.

        Whole pages are shared from now on. The tokens behind them will be in a page of the slot's
        own, for which there must be a free one: what to copy into it before anything is appended,
        None where there is nothing to copy. Until `end_round` the copied page stays as it is.
        """
        self._idle.discard(slot)
        shard, whole = self.shard(slot), tokens // self._page_size
        shared, beyond = self._pages[source][:whole], tokens % self._page_size
        partial = self._pages[source][whole] if beyond else None
        for page in (*shared, *([] if partial is None else [partial])):
            self._holders[shard, page] += 1
        for page in self._pages[slot]:
            self._let_go(shard, page)
        self._pages[slot] = list(shared)
        if partial is None:
            return None
        if self._holders[shard, partial] == 1:
            # It was the slot's own, and no other slot's.
            self._pages[slot].append(partial)
            return None
        self._pinned.append((shard, partial))
        self.hold(slot, tokens)
        target = self._pages[slot][-1]
        # A page that is to be filled itself in this round has its contents from elsewhere.
        origin = self._copied.get((shard, partial), partial)
        self._copied[shard, target] = origin
        return PageCopy(source=self._number(shard, origin), target=self._number(shard, target))

    def pin(self, slot: int, tokens: int) -> list[int]:
        """Returns `pages_of`, which keep their contents until `end_round` even if freed."""
        pages, shard = self.pages_of(slot, tokens), self.shard(slot)
        for page in pages:
            self._holders[shard, page] += 1
            self._pinned.append((shard, page))
        return pages

    def end_round(self) -> None:
        """Frees the pages that were pinned for copies of the round."""
        for shard, page in self._pinned:
            self._let_go(shard, page)
        self._pinned, self._copied = [], {}

    def end(self, slot: int, tokens: int) -> None:
        """Ends the slot's episode: the slot is idle, with the pages of its first so many tokens."""
        self.keep(slot, tokens)
        self._idle.add(slot)

    def least_pages(self, num_shards: int) -> int:
        """Returns the fewest pages a shard with which `regroup` works for so many row shards.

        They are those of the slots that are not idle; pages that two of a shard share count once.
        """
        slots_a_shard = len(self._pages) // num_shards
        needed: list[set[tuple[int, int]]] = [set() for _ in range(num_shards)]
        for slot, pages in enumerate(self._pages):
            if slot not in self._idle:
                needed[slot // slots_a_shard].update((self.shard(slot), page) for page in pages)
        return max(map(len, needed))

    def regroup(self, pool: Pool) -> "tuple[PageTable, np.ndarray]":
        """Returns the table of the same slots for another pool, and where its pages come from.

        Between two rounds only: nothing is pinned. The table itself stays as it is. A page that
        slots of different new row shards share is there once for each of them. Idle slots keep
        their pages as far as there are pages left when all others have theirs; an idle slot that
        finds too few keeps none. With more pages of as many shards no page changes its number, and
        free ones keep their contents too.

        Returns:
            The table, and `source` i32[shards, pages]: the number in the whole old pool of the page
            that each new one is a copy of; NO_SOURCE for free ones.

        Raises:
            ValueError: the pool has fewer pages than `least_pages`.
        """
        assert not self._pinned, "pages are regrouped between two rounds"
        if pool.pages < self.least_pages(pool.shards):
            raise InputError(
                f"{pool.pages} pages in each of {pool.shards} row shards do not hold the live "
                f"episodes, which need {self.least_pages(pool.shards)}"
            )
        table = PageTable(pool, num_slots=len(self._pages), page_size=self._page_size)
        table._idle = set(self._idle)
        source = np.full((pool.shards, pool.pages), NO_SOURCE, np.int32)
        if pool.shards == self.pool.shards and pool.pages >= self.pool.pages:
            old = np.arange(self.pool.total, dtype=np.int32)
            source[:, : self.pool.pages] = old.reshape(self.pool)
            table._extend(self)
            return table, source
        # By new shard and old number.
        numbers: dict[tuple[int, int], int] = {}
        for slot in sorted(range(len(self._pages)), key=self._idle.__contains__):
            shard = table.shard(slot)
            keys = [(shard, self._number(self.shard(slot), page)) for page in self._pages[slot]]
            added = [key for key in keys if key not in numbers]
            if len(added) > table.num_free(shard):
                continue
            for key in added:
                numbers[key] = table._free[shard].pop()
                source[shard, numbers[key]] = key[1]
            table._pages[slot] = [numbers[key] for key in keys]
            for page in table._pages[slot]:
                table._holders[shard, page] += 1
        return table, source

    def _extend(self, smaller: "PageTable") -> None:
        """Copies a table of as many shards with no more pages."""
        more = self.pool.pages - smaller.pool.pages
        self._pages = [list(pages) for pages in smaller._pages]
        self._holders = np.pad(smaller._holders, ((0, 0), (0, more)))
        added = list(range(smaller.pool.pages, self.pool.pages))[::-1]
        self._free = [[*added, *free] for free in smaller._free]

    def as_array(self, pages_per_row: int) -> np.ndarray:
        """Returns i32[num_slots, pages_per_row], numbers of the pool; unused: the shard's first."""
        table = np.zeros((len(self._pages), pages_per_row), np.int32)
        for slot, pages in enumerate(self._pages):
            table[slot, : len(pages)] = pages
            table[slot] += self._number(self.shard(slot), 0)
        return table

    def holders(self) -> Sequence[Sequence[int]]:
        """Returns how many slots hold each page, shard by shard; for checks."""
        return self._holders.tolist()

    def _let_go(self, shard: int, page: int) -> None:
        self._holders[shard, page] -= 1
        if not self._holders[shard, page]:
            self._free[shard].append(page)

    def _number(self, shard: int, page: int) -> int:
        return shard * self.pool.pages + page
