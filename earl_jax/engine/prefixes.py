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
appends one token. A beginning shorter than a chunk is not worth it: a prompt's chunk costs the same
however full it is.

An episode's tokens do not depend on the episodes before it: a chunk's positions are rows of the
same matrix products as the slots are (prompts are read in full passes only), and attention adds up
a row in the same blocks wherever a chunk begins (paged_attention.py). Sampled tokens are not taken
over: a decode step is another program than a chunk, which may round otherwise.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

_NOTHING = np.zeros(0, np.int32)
# Tokens that are compared in one piece: prompts may be long and differ early.
_COMPARED = 4096


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
        chunk_size: int,
        is_worth_sending: Callable[[int], bool] = lambda tokens: False,
    ) -> None:
        """Begins empty; `is_worth_sending` decides on copies of so many tokens between shards."""
        self._is_worth_sending = is_worth_sending
        self._slots_a_shard = num_slots // num_shards
        self._chunk_size = chunk_size
        # The first `num_cached` tokens of a slot's prompt are in its cache, the others will be.
        self._prompts = [_NOTHING] * num_slots
        self._num_cached = [0] * num_slots
        # Slots by the first tokens of their prompts: only they can have enough in common.
        self._by_start: dict[bytes, set[int]] = {}
        # Slots whose ids are in no row: they were read in a rollout before this one, or another
        # episode writes the row.
        self._unwritten: set[int] = set()
        # Slots that begin in this round: their shared tokens are there behind it.
        self._beginning: set[int] = set()

    def regroup(self, num_shards: int) -> None:
        """Changes the number of row shards; the caches stay the same."""
        self._slots_a_shard = len(self._prompts) // num_shards

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
        alike = self._by_start.get(self._start(ids), ())
        common = {
            other: self._common(other, ids)
            for other in sorted(alike, key=lambda other: (other != slot, other))
        }
        found = Shared(source=slot, length=0)
        for other, (have, _) in common.items():
            if other in shard and have > found.length:
                found = Shared(source=other, length=have)
        for other, (_, ahead) in common.items():
            if other in shard and other != slot and ahead > found.length:
                return None
        elsewhere = {other: both for other, both in common.items() if other not in shard}
        return self._find_elsewhere(elsewhere, len(ids), found)

    def _find_elsewhere(
        self, common: Mapping[int, tuple[int, int]], length: int, found: Shared
    ) -> Shared | None:
        """Returns a better source in another shard, None to wait for one, or else `found`.

        `common` is what slots of other shards have in common with a prompt of this length.
        """
        own = most = found.length
        if not self._is_worth_sending(length - 1 - own):
            return found
        for other, (have, ahead) in common.items():
            most = max(most, have, ahead)
            if other in self._beginning or have <= found.length:
                continue
            if self._is_worth_sending(have - own):
                found = Shared(source=other, length=have)
        waits = most > found.length and self._is_worth_sending(most - own)
        return None if waits else found

    def begin(self, slot: int, prompt: Sequence[int], shared: Shared) -> None:
        """Begins a slot with a prompt, of which it takes over a part; its ids are in its row."""
        self._unwritten.discard(slot)
        self._beginning.add(slot)
        self._put(slot, np.asarray(prompt, np.int32), shared.length)

    def _put(self, slot: int, prompt: np.ndarray, num_cached: int) -> None:
        """Notes the slot's prompt, in its cache or still to be read."""
        before, after = self._start(self._prompts[slot]), self._start(prompt)
        if before != after:
            self._by_start.get(before, set()).discard(slot)
            if not self._by_start.get(before):
                self._by_start.pop(before, None)
            self._by_start.setdefault(after, set()).add(slot)
        self._prompts[slot], self._num_cached[slot] = prompt, num_cached

    def _start(self, ids: np.ndarray) -> bytes:
        return ids[: self._chunk_size].tobytes()

    def append(self, slot: int, number: int) -> None:
        """Notes so many more tokens in the slot's cache; those behind the prompt do not count."""
        self._num_cached[slot] = min(self._num_cached[slot] + number, len(self._prompts[slot]))

    def end_inputs(self) -> None:
        """Notes that the slots that began have the tokens that they took over."""
        self._beginning.clear()

    def stop(self, slot: int) -> None:
        """Notes that the slot appends no more of its prompt."""
        self._put(slot, self._prompts[slot][: self._num_cached[slot]], self._num_cached[slot])

    def num_kept(self, slot: int) -> int:
        """Returns how many tokens in the slot's cache others could take over."""
        return self._num_cached[slot]

    def forget(self, slot: int) -> None:
        """Forgets the slot's cache."""
        self._put(slot, _NOTHING, 0)
        self._unwritten.discard(slot)

    def lose_rows(self) -> None:
        """Ends the rollout: the next one has rows of its own."""
        for slot in range(len(self._prompts)):
            self.stop(slot)
        self._unwritten = {slot for slot, number in enumerate(self._num_cached) if number}

    def lose_row(self, slot: int) -> None:
        """Notes that the ids in the slot's cache are in no row any more."""
        self._unwritten.add(slot)

    def has_row(self, slot: int) -> bool:
        """Returns whether the ids in the slot's cache are in a row on the devices, too."""
        return slot not in self._unwritten

    def _common(self, slot: int, ids: np.ndarray) -> tuple[int, int]:
        """Returns how many tokens of a prompt can be taken over from the slot's cache.

        Now, and behind its whole prompt; that is 0 where the slot has read it.
        """
        theirs = self._prompts[slot]
        length, same = min(len(theirs), len(ids) - 1), 0
        while same < length:
            end = min(same + _COMPARED, length)
            equal = theirs[same:end] == ids[same:end]
            if not equal.all():
                same += int(equal.argmin())
                break
            same = end
        now = self._worth(min(same, self._num_cached[slot]))
        return now, self._worth(same) if self._num_cached[slot] < len(theirs) else 0

    def _worth(self, number: int) -> int:
        """Returns `number` if so many tokens are worth it, else 0."""
        return number if number >= self._chunk_size else 0
