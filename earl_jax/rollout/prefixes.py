# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Which slot has read the beginning of a prompt already: the host's view of the caches.

Episodes that begin alike (a group's prompt, a system message, descriptions of tools) need their
common beginning computed once: whoever comes later takes it over from a slot's cache, a finished
episode's too, because a cache stays as it is until its slot is used again. A slot of the same lane
only, which is on the same data shard on every mesh.

What is taken over was read as a prompt, and leaves the last token to append, which the policy's
first word needs: a group's prompt is read once, and each of its other episodes appends one token.
A beginning shorter than a chunk is not worth it: a chunk costs the same however full it is.

An episode's tokens do not depend on who was there before it: a chunk's places are rows of the same
matrix products as the slots are, and attention adds up a row in the same blocks wherever a chunk
begins (models/paged_attention.py). What was sampled is not taken over: a decode step is another
program than a chunk, which may round otherwise.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """The first `length` tokens of the prompt are in the cache of slot `source`."""

    source: int
    length: int


class PrefixIndex:
    """The prompt in every slot's cache: what was read of it, and what is still to be appended.

    All of one policy version: it lives as long as weights do, over several rollouts.
    """

    def __init__(self, *, num_slots: int, num_lanes: int, chunk_size: int) -> None:
        self._slots_per_lane = num_slots // num_lanes
        self._chunk_size = chunk_size
        self._cached: list[list[int]] = [[] for _ in range(num_slots)]
        self._coming: list[list[int]] = [[] for _ in range(num_slots)]
        # Slots whose ids are in no row: they were read in a rollout before this one.
        self._unwritten: set[int] = set()

    def find(self, slot: int, prompt: Sequence[int]) -> Shared | None:
        """What this slot can take over for the prompt now; None: it had better wait.

        It waits for a slot that is about to append more of the same than there is now.
        """
        # Who asks has not begun: nobody must wait for what it was to append before.
        self.stop(slot)
        first = slot - slot % self._slots_per_lane
        lane = range(first, first + self._slots_per_lane)
        # Its own cache before another's: that copies nothing.
        sources = sorted(lane, key=lambda other: other != slot)
        have = {other: self._common(self._cached[other], prompt) for other in sources}
        source = max(have, key=lambda other: have[other])
        for other in lane:
            if other != slot and self._coming[other]:
                ahead = self._common(self._cached[other] + self._coming[other], prompt)
                if ahead > have[source]:
                    return None
        return Shared(source=source, length=have[source])

    def begin(self, slot: int, prompt: Sequence[int], shared: Shared) -> None:
        """The slot begins with a prompt, of which it takes over a part; its ids are in its row."""
        self._unwritten.discard(slot)
        self._cached[slot] = list(prompt[: shared.length])
        self._coming[slot] = list(prompt[shared.length :])

    def append(self, slot: int, number: int) -> None:
        """So many more tokens are in the slot's cache; those behind the prompt do not matter."""
        coming = self._coming[slot]
        self._cached[slot] += coming[:number]
        self._coming[slot] = coming[number:]

    def stop(self, slot: int) -> None:
        """The slot appends no more of its prompt."""
        self._coming[slot] = []

    def num_kept(self, slot: int) -> int:
        """How many tokens in the slot's cache others could take over."""
        return len(self._cached[slot])

    def forget(self, slot: int) -> None:
        """There is nothing in the slot's cache any more."""
        self._cached[slot], self._coming[slot] = [], []
        self._unwritten.discard(slot)

    def lose_rows(self) -> None:
        """The rollout is over: another one has rows of its own."""
        self._coming = [[] for _ in self._coming]
        self._unwritten = {slot for slot, cached in enumerate(self._cached) if cached}

    def has_row(self, slot: int) -> bool:
        """Whether the ids in the slot's cache are in a row on the devices, too."""
        return slot not in self._unwritten

    def _common(self, cached: Sequence[int], prompt: Sequence[int]) -> int:
        """Tokens of the prompt that can be taken over from a cache of these."""
        length = min(len(cached), len(prompt) - 1)
        if length < self._chunk_size or (
            cached[: self._chunk_size] != list(prompt[: self._chunk_size])
        ):
            return 0
        same = np.array(cached[:length]) == np.array(prompt[:length])
        return length if same.all() else int(same.argmin())
