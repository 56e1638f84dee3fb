# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts that slots of a rollout take over from other slots instead of prefilling them.

Within a row shard a slot takes over whole pages as they are (engine/prefixes.py). From another row
shard they are copied, where that costs less than reading (engine/shard_copies.py).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.page_copies import PageCopies
from earl_jax.engine.pages import NO_PAGE, PageTable
from earl_jax.engine.prefixes import PrefixIndex, Shared
from earl_jax.engine.row_copies import RowCopies, RowIds
from earl_jax.engine.rows import NO_ROW
from earl_jax.engine.shard_copies import ShardCopies
from earl_jax.rollout.episode import LiveEpisode


class Beginning(NamedTuple):
    """The first tokens of a slot: `shared` tokens of slot `source`, pages `copied` among them.

    Where `source` is the slot itself, the tokens may have come from elsewhere. With `written` their
    ids are in the slot's row already.
    """

    source: int
    shared: int
    copied: list[int]
    written: bool


class SharedPrompts:
    """The prompts in the caches of one rollout's slots. Host-side state only."""

    def __init__(self, prefixes: PrefixIndex, slots: Sequence[LiveEpisode | None]) -> None:
        """`slots` is the caller's list of the live episodes."""
        self._prefixes, self._slots = prefixes, slots
        self._shard_copies = ShardCopies(len(slots))
        # Ids that the host writes for slots that begin in this round; and slots whose rows are in
        # use in this round for an episode before.
        self._ids: dict[int, np.ndarray] = {}
        self._rows_in_use: set[int] = set()
        # By slot: the row that it began to write last.
        self._row_of = np.full(len(slots), NO_ROW)

    @property
    def copied_tokens(self) -> int:
        """Tokens that came from other row shards' pages."""
        return self._shard_copies.tokens

    def move(self, before: PageTable, pages: PageTable) -> None:
        """Goes on with other pages; prompts whose pages were dropped are forgotten."""
        self._prefixes.regroup(pages.pool.shards, pages.least_shared)
        for slot in range(len(self._slots)):
            if before.num_held(slot) and not pages.num_held(slot):
                self._prefixes.forget(slot)

    def begin(
        self,
        slot: int,
        pages: PageTable,
        prompt: np.ndarray,
        fits: Callable[[int, Shared], bool],
        own: int,
    ) -> Beginning | None:
        """Begins the slot anew with a prompt i32[tokens]. None: it waits for another slot.

        For one that reads the same; or for one that has just taken over a part of the slot's own
        pages, where there are no others. `fits` returns whether there are pages for a slot to begin
        so. There surely are to begin with the first `own` tokens in the slot's own cache, as long
        as no other slot has taken them over.
        """
        shared = self._prefixes.find(slot, prompt)
        if shared is None:
            return None
        if not fits(slot, shared):
            shared = Shared(source=slot, length=min(own, self.num_kept(slot)))
            if own and not fits(slot, shared):
                return None
        source, length = shared.source, shared.length
        is_far = pages.shard(slot) != pages.shard(source)
        if length and (is_far or not self._prefixes.has_row(source)):
            if slot in self._rows_in_use:
                return None
            self._ids[slot] = prompt[:length]
        self.use_row(source)
        self._prefixes.begin(slot, prompt, Shared(source=source, length=length))
        self._row_of[slot] = row = self._episode(slot).row
        if row == NO_ROW:
            self._prefixes.lose_row(slot)
        written = slot in self._ids
        if is_far:
            pages.skip(slot, pages.num_gone(source))
            pages.hold(slot, length)
            copied, targets = pages.pin(source, length), pages.pages_of(slot, length)
            self._shard_copies.plan(source, copied, slot, targets, length)
            return Beginning(slot, length, [NO_PAGE] * pages.rule.num_groups, written)
        copies = pages.begin(slot, source, length)
        copied = [NO_PAGE if copy is None else copy.source for copy in copies]
        return Beginning(source, length, copied, written)

    def _episode(self, slot: int) -> LiveEpisode:
        episode = self._slots[slot]
        assert episode is not None
        return episode

    def lose_row(self, row: int) -> None:
        """Notes that the row is written for another episode, and the ids in it are lost."""
        for slot in np.flatnonzero(self._row_of == row).tolist():
            self._prefixes.lose_row(slot)

    def use_row(self, slot: int) -> None:
        """Notes that the row is still read or written in this round for the episode before."""
        self._rows_in_use.add(slot)

    def end_inputs(self, counts: np.ndarray) -> None:
        """Notes that so many tokens are appended to the slots in this round."""
        # Only now: no slot takes over tokens that are appended in the same round.
        self._prefixes.append(slice(None), counts)
        self._prefixes.end_inputs()
        self._rows_in_use.clear()

    def carry_out(
        self, page_copies: PageCopies, row_copies: RowCopies, state: DecodeState
    ) -> DecodeState:
        """Makes the round's copies between row shards, and writes ids that are taken over."""
        state = self._shard_copies.carry_out(page_copies, state)
        taken = [(self._episode(slot), ids) for slot, ids in sorted(self._ids.items())]
        writes = [RowIds(e.row, e.origin, ids) for e, ids in taken if e.row != NO_ROW]
        self._ids = {}
        return row_copies.write_ids(state, writes) if writes else state

    def end(self, slot: int, cached: Sequence[int] = ()) -> int:
        """Ends the slot's episode. Returns how many of its first tokens are kept for others.

        Those are its prompt, or if that is in its cache all of the `cached` ids behind it, too.
        """
        self._prefixes.stop(slot)
        self._prefixes.extend(slot, cached)
        kept = self._prefixes.num_kept(slot)
        if not kept:
            # The pages that its prompt needs may be gone.
            self._prefixes.forget(slot)
        return kept

    def num_kept(self, slot: int) -> int:
        """Returns how many of the first tokens in the slot's cache others could take over."""
        return self._prefixes.num_kept(slot)

    def forget(self, slot: int) -> None:
        """Forgets the prompt of a slot that gives up its pages."""
        self._prefixes.forget(slot)
