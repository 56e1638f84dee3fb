# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The table of pages of the KV cache by slot: the host's view, plain arithmetic.

The pool is cut into as many parts as the mesh has row shards, and a slot has pages of its own row
shard only. Within a shard pages are cut over heads (`tensor`) and positions (`context`), so that
the longest episode that fits a budget grows with both. Pages are counted: slots whose prompts begin
alike hold the same ones, and a page is free when no slot holds it. A change of the mesh may change
the number of row shards: `PageTable.regroup` returns which page then has the contents of which.

A slot has a list of pages for each group of layers (models/layer_groups.py). Pages behind a window
are kept as long as there are enough: other slots may begin with them. `trim` frees them.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from earl_jax.models.layer_groups import PageRule, pages_for
from earl_jax.settings.errors import InputError

# In place of the number of a page, where none is copied.
NO_PAGE = -1
# In `PageTable.regroup`: the source of a page that is a copy of none.
NO_SOURCE = -1
# In place of a page that a slot has given up, or will not have, behind a window.
_GONE = -1


class Pool(NamedTuple):
    """The number of pages: `pages` of each of `shards` row shards, shard by shard."""

    shards: int
    pages: int

    @property
    def total(self) -> int:
        """Pages of all row shards."""
        return self.shards * self.pages


def dense_pool(shards: int, slots: int, max_tokens: int, rule: PageRule) -> Pool:
    """Returns the pool with pages for every slot to be full."""
    return Pool(shards, slots // shards * rule.most_pages(max_tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageCopy:
    """A copy of page `source` to page `target`; numbers of the whole pool."""

    source: int
    target: int


class PageTable:
    """The pages of every slot, in the order of their tokens. Numbers within the slot's row shard.

    A slot is idle from `end` until `hold` or `begin`: its pages are kept for other slots' prompts,
    and `regroup` may drop them. `least_shared` i32[slots] are the fewest tokens of a slot that
    another slot, or a new episode of its own, can begin with: pages that fewer need are gone.
    `capacity` has by slot how many tokens it can hold with the pages that it has.
    """

    def __init__(self, pool: Pool, *, num_slots: int, rule: PageRule) -> None:
        """Begins with all pages free."""
        assert num_slots % pool.shards == 0, f"{num_slots} slots over {pool.shards} row shards"
        self.pool, self.rule = pool, rule
        self._slots_a_shard = num_slots // pool.shards
        # By slot and group: its pages, and how many of the first ones are gone.
        self._pages: list[list[list[int]]] = [
            [[] for _ in range(rule.num_groups)] for _ in range(num_slots)
        ]
        self._gone = [[0] * rule.num_groups for _ in range(num_slots)]
        # By slot: what it holds pages for.
        self._tokens = [0] * num_slots
        self.least_shared = np.zeros(num_slots, np.int32)
        self.capacity = [0] * num_slots
        self._holders = np.zeros((pool.shards, pool.pages), np.int32)
        # The last of a list is given out next: at first the pages in their order.
        self._free = [list(range(pool.pages))[::-1] for _ in range(pool.shards)]
        self._pinned: list[tuple[int, int]] = []
        self._copied: dict[tuple[int, int], int] = {}
        self._idle: set[int] = set()
        # The table as an array, and slots whose pages have changed since it was written.
        self._array, self._changed = np.zeros((0, 0, 0), np.int32), set[int]()

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
        return sum(map(len, self._pages[slot])) - sum(self._gone[slot])

    def num_gone(self, slot: int) -> list[int]:
        """Returns how many of the slot's first pages are gone, by group."""
        return list(self._gone[slot])

    def pages_of(self, slot: int, tokens: int) -> list[int]:
        """Returns the pages of the slot's first so many tokens, numbered within its row shard.

        In the order of tokens, and then of groups: the pages of fewer tokens are the first of them.
        """
        number = pages_for(tokens, self.rule.page_size)
        taken = zip(*(own[:number] for own in self._pages[slot]), strict=True)
        return [page for pages in taken for page in pages if page != _GONE]

    def pages_again(self, slot: int, tokens: int, gone: Sequence[int]) -> list[int]:
        """Returns the pages to write what `pages_of` were when only these first ones were gone.

        For one that the slot has given up since then stands the last of all, which is written last.
        """
        indices = range(pages_for(tokens, self.rule.page_size))
        groups = list(zip(self._pages[slot], gone, strict=True))
        pages = [own[index] for index in indices for own, first in groups if index >= first]
        return [pages[-1] if page == _GONE else page for page in pages]

    def missing(self, slot: int, tokens: int) -> int:
        """Returns how many more pages `hold` gives the slot for so many tokens."""
        number = pages_for(tokens, self.rule.page_size)
        return sum(max(0, number - len(own)) for own in self._pages[slot])

    def needed(self, slot: int, tokens: int) -> int:
        """Returns `missing` without pages that the slot gives up on the way to so many tokens."""
        if not self.rule.has_windows:
            return self.missing(slot, tokens)
        number, gone = pages_for(tokens, self.rule.page_size), self.rule.num_gone(tokens)
        there = (max(len(own), n) for own, n in zip(self._pages[slot], gone, strict=True))
        return sum(max(0, number - n) for n in there)

    def has_alone(self, slot: int, tokens: int) -> bool:
        """Returns whether the slot alone has its pages that its first so many do not fill."""
        whole, holders = tokens // self.rule.page_size, self._holders[self.shard(slot)]
        for own, window in zip(self._pages[slot], self.rule.windows, strict=True):
            # Without a window other slots have a page only with all of those before it.
            pages = own[whole:] if window else own[whole : whole + 1]
            if any(page != _GONE and holders[page] > 1 for page in pages):
                return False
        return True

    def hold(self, slot: int, tokens: int) -> None:
        """Gives the slot pages for so many tokens. There must be pages enough (`missing`)."""
        self._idle.discard(slot)
        self._tokens[slot] = tokens
        if tokens <= self.capacity[slot]:
            return
        shard, number = self.shard(slot), pages_for(tokens, self.rule.page_size)
        for own in self._pages[slot]:
            while len(own) < number:
                page = self._free[shard].pop()
                self._holders[shard, page] = 1
                own.append(page)
        self._note_change(slot)

    def trim(self, slot: int, tokens: int | None = None) -> None:
        """Frees the slot's pages that it needs no more when it holds so many tokens.

        None: as many as it holds pages for.
        """
        before, gone = self._gone[slot], self._num_gone(slot, tokens)
        for own, first, end in zip(self._pages[slot], before, gone, strict=True):
            self._free_all(slot, own[first:end])
            own[first:end] = [_GONE] * (end - first)
        self._set_gone(slot, gone)

    def skip(self, slot: int, gone: Sequence[int]) -> None:
        """Frees all pages of the slot, which will hold none for these first ones of each group."""
        self.keep(slot, 0)
        self._pages[slot] = [[_GONE] * number for number in gone]
        self._set_gone(slot, gone)

    def keep(self, slot: int, tokens: int) -> None:
        """Frees the slot's pages behind its first so many tokens."""
        number = pages_for(tokens, self.rule.page_size)
        for own in self._pages[slot]:
            self._free_all(slot, own[number:])
            del own[number:]
        self._tokens[slot] = min(self._tokens[slot], tokens)
        self._set_gone(slot, [min(gone, number) for gone in self._gone[slot]])

    def begin(self, slot: int, source: int, tokens: int) -> list[PageCopy | None]:
        """Begins the slot anew with the first `tokens` tokens in the cache of slot `source`.

        Whole pages are shared from now on. The tokens behind them will be in pages of the slot's
        own, one a group, for which there must be free ones: what to copy into them before anything
        is appended, None where there is nothing to copy. Until `end_round` the copied pages stay as
        they are. There are at least `least_shared` tokens of the source, or none.
        """
        assert not tokens or tokens >= self.least_shared[source], "pages of the source are gone"
        self._idle.discard(slot)
        shard, whole = self.shard(slot), tokens // self.rule.page_size
        is_partial = tokens % self.rule.page_size > 0
        before, sources = self._pages[slot], self._pages[source]
        taken = [own[: whole + is_partial] for own in sources]
        # Each of them once: a slot has no page twice.
        self._holders[shard, [page for own in taken for page in own if page != _GONE]] += 1
        for own in before:
            self._free_all(slot, own)
        self._pages[slot] = [own[:whole] for own in taken]
        self._tokens[slot] = tokens
        self._set_gone(slot, [min(gone, whole) for gone in self._gone[source]])
        if not is_partial:
            return [None] * len(taken)
        copies = [
            self._copy(slot, own, partial[whole])
            for own, partial in zip(self._pages[slot], taken, strict=True)
        ]
        self._note_change(slot)
        return copies

    def _copy(self, slot: int, own: list[int], partial: int) -> PageCopy | None:
        """Adds a copy of a page to the slot's `own` ones, or the page itself if no other has it."""
        shard = self.shard(slot)
        if self._holders[shard, partial] == 1:
            own.append(partial)
            return None
        self._pinned.append((shard, partial))
        target = self._free[shard].pop()
        self._holders[shard, target] = 1
        own.append(target)
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

        They are those that slots need which are not idle; pages that two of a shard share count
        once.
        """
        slots_a_shard = len(self._pages) // num_shards
        needed: list[set[tuple[int, int]]] = [set() for _ in range(num_shards)]
        for slot in range(len(self._pages)):
            if slot not in self._idle:
                own = (page for pages in self._needed(slot) for page in pages if page != _GONE)
                needed[slot // slots_a_shard].update((self.shard(slot), page) for page in own)
        return max(map(len, needed))

    def regroup(self, pool: Pool) -> "tuple[PageTable, np.ndarray]":
        """Returns the table of the same slots for another pool, and where its pages come from.

        Between two rounds only: nothing is pinned. The table itself stays as it is. A page that
        slots of different new row shards share is there once for each of them. Slots keep the pages
        that they need (`trim`); idle ones as far as there are pages left when all others have
        theirs, and one that finds too few keeps none. With more pages of as many shards no page
        changes its number, all are kept, and free ones keep their contents too.

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
        table = PageTable(pool, num_slots=len(self._pages), rule=self.rule)
        table._idle, table._tokens = set(self._idle), list(self._tokens)
        source = np.full((pool.shards, pool.pages), NO_SOURCE, np.int32)
        if pool.shards == self.pool.shards and pool.pages >= self.pool.pages:
            old = np.arange(self.pool.total, dtype=np.int32)
            source[:, : self.pool.pages] = old.reshape(self.pool)
            table._extend(self)
            return table, source
        # By new shard and old number.
        numbers: dict[tuple[int, int], int] = {}
        for slot in sorted(range(len(self._pages)), key=self._idle.__contains__):
            shard, old_shard, needed = table.shard(slot), self.shard(slot), self._needed(slot)
            keys = {page: (shard, self._number(old_shard, page)) for own in needed for page in own}
            keys.pop(_GONE, None)
            added = [key for key in keys.values() if key not in numbers]
            if len(added) > table.num_free(shard):
                continue
            for key in added:
                numbers[key] = table._free[shard].pop()
                source[shard, numbers[key]] = key[1]
            new = {_GONE: _GONE, **{page: numbers[key] for page, key in keys.items()}}
            table._pages[slot] = [[new[page] for page in own] for own in needed]
            for page in keys:
                table._holders[shard, new[page]] += 1
            table._set_gone(slot, self._num_gone(slot))
        return table, source

    def _extend(self, smaller: "PageTable") -> None:
        """Copies a table of as many shards with no more pages."""
        more = self.pool.pages - smaller.pool.pages
        self._pages = [[list(own) for own in pages] for pages in smaller._pages]
        self._gone = [list(gone) for gone in smaller._gone]
        self.capacity = list(smaller.capacity)
        self.least_shared = smaller.least_shared.copy()
        self._holders = np.pad(smaller._holders, ((0, 0), (0, more)))
        added = list(range(smaller.pool.pages, self.pool.pages))[::-1]
        self._free = [[*added, *free] for free in smaller._free]

    def as_array(self, pages_per_row: int) -> np.ndarray:
        """Returns i32[num_slots, groups, pages_per_row], numbers of the pool.

        Entries of no page are the row shard's first.
        """
        shape = (len(self._pages), self.rule.num_groups, pages_per_row)
        if self._array.shape != shape:
            self._array, self._changed = np.zeros(shape, np.int32), set(range(len(self._pages)))
        for slot in self._changed:
            self._array[slot] = 0
            for group, own in enumerate(self._pages[slot]):
                gone = self._gone[slot][group]
                self._array[slot, group, gone : len(own)] = own[gone:]
            self._array[slot] += self._number(self.shard(slot), 0)
        self._changed.clear()
        return self._array.copy()

    def holders(self) -> Sequence[Sequence[int]]:
        """Returns how many slots hold each page, shard by shard; for checks."""
        return self._holders.tolist()

    def _num_gone(self, slot: int, tokens: int | None = None) -> list[int]:
        """Returns how many first pages of each group are gone, or needed no more (`trim`)."""
        gone = self.rule.num_gone(self._tokens[slot] if tokens is None else tokens)
        there = zip(gone, self._gone[slot], self._pages[slot], strict=True)
        return [max(before, min(number, len(own))) for number, before, own in there]

    def _needed(self, slot: int) -> list[list[int]]:
        """Returns the slot's pages by group, with _GONE for those that it needs no more."""
        pages = zip(self._num_gone(slot), self._pages[slot], strict=True)
        return [[_GONE] * gone + own[gone:] for gone, own in pages]

    def _set_gone(self, slot: int, gone: Sequence[int]) -> None:
        """Notes how many first pages of each group are gone, and that the slot has changed."""
        self._note_change(slot)
        self._gone[slot] = list(gone)
        read = zip(gone, self.rule.windows, strict=True)
        least = (number * self.rule.page_size + window - 1 for number, window in read if number)
        self.least_shared[slot] = max(least, default=0)

    def _note_change(self, slot: int) -> None:
        """Notes that the slot has other pages."""
        self._changed.add(slot)
        self.capacity[slot] = min(map(len, self._pages[slot])) * self.rule.page_size

    def _free_all(self, slot: int, pages: Sequence[int]) -> None:
        for page in pages:
            if page != _GONE:
                self._let_go(self.shard(slot), page)

    def _let_go(self, shard: int, page: int) -> None:
        self._holders[shard, page] -= 1
        if not self._holders[shard, page]:
            self._free[shard].append(page)

    def _number(self, shard: int, page: int) -> int:
        return shard * self.pool.pages + page
