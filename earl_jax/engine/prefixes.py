# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An index of the prompts that slots have read: the host's view of the caches.

Episodes that begin alike (a group's prompt, a system message, descriptions of tools) need their
common beginning computed once: later episodes take it over from a slot's cache, a finished
episode's too, because a cache stays as it is until its slot is used again. Pages are shared with
slots of the same row shard only; from those of another they are copied, where that costs less than
reading (shard_copies.py).

Only tokens that were read as a prompt are taken over, and the last token is left to append, whose
logits give the first sampled token: a group's prompt is read once, and each of its other episodes
appends one token. A beginning is worth it if it is as long as a page (or a chunk, where that is
shorter) and spares half a chunk at least of the forward passes' widths (`SlotRules.append_widths`):
a pass costs the same however full it is.

An episode's tokens do not depend on the episodes before it, up to rounding where a narrower pass
reads what is left: a chunk's positions are rows of the same matrix products as the slots are, and
attention adds up a row in the same blocks wherever a chunk begins (paged_attention.py). Sampled
tokens are not taken over: a decode step is another program than a chunk, which may round otherwise.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

_NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """A beginning of a prompt: its first `length` tokens are in the cache of slot `source`."""

    source: int
    length: int


class PrefixIndex:
    """The prompt in every slot's cache: the tokens read, and those still to be appended.

    All are of one policy version: the index lives as long as weights do, over several rollouts.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_shards: int,
        widths: Sequence[int],
        page_size: int,
        is_worth_sending: Callable[[int], bool] = lambda tokens: False,
    ) -> None:
        """Begins empty. Chunks are appended in forward passes of these `widths`, ascending.

        `is_worth_sending` decides on copies of so many tokens between shards.
        """
        self._is_worth_sending = is_worth_sending
        self._slots_a_shard = num_slots // num_shards
        self._widths = widths
        self._least = min(widths[-1], max(page_size, widths[0]))
        # As arrays: every prompt is compared with all of them.
        self._cached = [_NOTHING] * num_slots
        self._coming = [_NOTHING] * num_slots
        # Slots whose ids are in no row: they were read in a rollout before this one, or another
        # episode writes the row.
        self._unwritten: set[int] = set()
        # Slots that begin in this round: their shared tokens are there behind it.
        self._beginning: set[int] = set()

    def regroup(self, num_shards: int) -> None:
        """Changes the number of row shards; the caches stay the same."""
        self._slots_a_shard = len(self._cached) // num_shards

    def find(self, slot: int, prompt: Sequence[int]) -> Shared | None:
        """Returns the tokens that this slot can take over for the prompt now; None: it should wait.

        It waits for a slot that is about to append more of the same than there is now.
        """
        # This slot has not begun: no other must wait for the prompt that it had before.
        self.stop(slot)
        ids = np.asarray(prompt, np.int32)
        first = slot - slot % self._slots_a_shard
        shard = range(first, first + self._slots_a_shard)
        # Its own cache before another's: that copies nothing.
        sources = sorted(shard, key=lambda other: other != slot)
        have = {other: self._common(self._cached[other], ids) for other in sources}
        source = max(have, key=lambda other: have[other])
        for other in shard:
            if other != slot and self._common_ahead(other, ids) > have[source]:
                return None
        return self._find_elsewhere(shard, ids, Shared(source=source, length=have[source]))

    def _find_elsewhere(self, shard: range, ids: np.ndarray, found: Shared) -> Shared | None:
        """Returns a better source in another shard, None to wait for one, or else `found`."""
        own = ahead = found.length
        if not self._is_worth_sending(len(ids) - 1 - own):
            return found
        for other, cached in enumerate(self._cached):
            if other in shard:
                continue
            length = self._common(cached, ids)
            ahead = max(ahead, length, self._common_ahead(other, ids))
            if other in self._beginning or length <= found.length:
                continue
            if self._is_worth_sending(length - own):
                found = Shared(source=other, length=length)
        waits = ahead > found.length and self._is_worth_sending(ahead - own)
        return None if waits else found

    def begin(self, slot: int, prompt: Sequence[int], shared: Shared) -> None:
        """Begins a slot with a prompt, of which it takes over a part; its ids are in its row."""
        self._unwritten.discard(slot)
        self._beginning.add(slot)
        ids = np.asarray(prompt, np.int32)
        self._cached[slot], self._coming[slot] = ids[: shared.length], ids[shared.length :]

    def append(self, slot: int, number: int) -> None:
        """Notes so many more tokens in the slot's cache; those behind the prompt do not count."""
        coming = self._coming[slot]
        if number and len(coming):
            self._cached[slot] = np.concatenate([self._cached[slot], coming[:number]])
            self._coming[slot] = coming[number:]

    def end_inputs(self) -> None:
        """Notes that the slots that began have the tokens that they took over."""
        self._beginning.clear()

    def stop(self, slot: int) -> None:
        """Notes that the slot appends no more of its prompt."""
        self._coming[slot] = _NOTHING

    def num_kept(self, slot: int) -> int:
        """Returns how many tokens in the slot's cache others could take over."""
        return len(self._cached[slot])

    def forget(self, slot: int) -> None:
        """Forgets the slot's cache."""
        self._cached[slot] = self._coming[slot] = _NOTHING
        self._unwritten.discard(slot)

    def lose_rows(self) -> None:
        """Ends the rollout: the next one has rows of its own."""
        self._coming = [_NOTHING] * len(self._coming)
        self._unwritten = {slot for slot, cached in enumerate(self._cached) if len(cached)}

    def lose_row(self, slot: int) -> None:
        """Notes that the ids in the slot's cache are in no row any more."""
        self._unwritten.add(slot)

    def has_row(self, slot: int) -> bool:
        """Returns whether the ids in the slot's cache are in a row on the devices, too."""
        return slot not in self._unwritten

    def _common_ahead(self, slot: int, ids: np.ndarray) -> int:
        """Returns `_common` with the slot's cache behind its whole prompt; 0 where that is read."""
        coming = self._coming[slot]
        return self._common(np.concatenate([self._cached[slot], coming]), ids) if len(coming) else 0

    def _common(self, cached: np.ndarray, ids: np.ndarray) -> int:
        """Returns how many tokens of a prompt can be taken over from a cache of these."""
        length = min(len(cached), len(ids) - 1)
        if length < self._least or cached[0] != ids[0]:
            return 0
        same = cached[:length] == ids[:length]
        number = length if same.all() else int(same.argmin())
        spared = self._appended(len(ids)) - self._appended(len(ids) - number)
        return number if number >= self._least and 2 * spared >= self._widths[-1] else 0

    def _appended(self, tokens: int) -> int:
        """Returns how many tokens wide the forward passes are that append so many."""
        chunks, rest = divmod(tokens, self._widths[-1])
        last = next(width for width in (0, *self._widths) if rest <= width)
        return chunks * self._widths[-1] + last
