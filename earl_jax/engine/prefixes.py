# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An index of the prompts that slots have read: the host's view of the caches.

Episodes that begin alike (a group's prompt, a system message, descriptions of tools) need their
common beginning computed once: later episodes take it over from a slot's cache, a finished
episode's too, because a cache stays as it is until its slot is used again. Pages are shared with
slots of the same row shard only; from those of another they are copied, where that costs less than
reading (shard_copies.py).

Only tokens that were appended are taken over. The last token of a prompt is not: it goes in with
the decode step that samples the first token. So a group's prompt is read once, and its other
episodes append nothing. A beginning shorter than a tile is not worth it (appending.py): it costs
the same however full it is.

Prompts are kept in a radix tree (prompt_tree.py). A prompt is compared with it once, when it is
first looked for; a slot that waits asks again each round for a few operations on arrays of slots.

An episode's tokens do not depend on the episodes before it: the tokens of all tiles are rows of the
same matrix products, and attention adds up a row in the same blocks wherever a tile begins
(paged_attention.py). Sampled tokens are not taken over: a decode step is another program, which may
round otherwise.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from earl_jax.engine.prompt_tree import Node, PromptTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """A beginning of a prompt: its first `length` tokens are in the cache of slot `source`."""

    source: int
    length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wait:
    """A wait for any of `readers` to have `tokens` tokens in its cache.

    It holds while nothing happens to the slots whose prompts have as much in common, which are
    those of `node`.
    """

    readers: Sequence[int]
    tokens: int
    node: Node
    changes: int

    def holds(self, num_cached: np.ndarray) -> bool:
        """Returns whether the slot still waits, with so many tokens in the caches."""
        parent = self.node.parent
        return (
            self.node.changes == self.changes
            and parent is not None
            and parent.depth < self.tokens
            and all(num_cached[slot] < self.tokens for slot in self.readers)
        )


@dataclasses.dataclass(kw_only=True)
class _Sought:
    """A prompt that a slot is to read, as it was given, and its end in the tree."""

    prompt: Sequence[int] | np.ndarray
    node: Node
    wait: _Wait | None = None


class PrefixIndex:
    """The prompt in every slot's cache: the tokens read, and those still to be appended.

    All are of one policy version: where weights change, what they have not read is forgotten.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_shards: int,
        least_tokens: int,
        least_shared: np.ndarray | None = None,
        is_worth_sending: Callable[[int], bool] = lambda tokens: False,
    ) -> None:
        """Begins empty. Beginnings of fewer than `least_tokens` are not shared.

        Nor are those of a slot of fewer than its `least_shared` (`PageTable`; the array is the
        caller's, who goes on to write it). `is_worth_sending` decides on copies of so many tokens
        between shards.
        """
        self._least_shared = np.zeros(num_slots, np.int32) if least_shared is None else least_shared
        self._is_worth_sending = is_worth_sending
        self._num_slots, self._slots_a_shard = num_slots, num_slots // num_shards
        self._least_tokens = least_tokens
        self._tree = PromptTree(num_slots)
        # By slot: the prompt in its cache, and the one that it was last looked for.
        self._nodes: list[Node | None] = [None] * num_slots
        self._sought: list[_Sought | None] = [None] * num_slots
        # Of its prompt the first `num_cached` tokens are in a slot's cache, and all up to `length`
        # will be. Those behind `length` are in the tree, but count no more.
        self._lengths = np.zeros(num_slots, np.int32)
        self._num_cached = np.zeros(num_slots, np.int32)
        # Slots whose ids are in no row: another episode writes the row.
        self._unwritten: set[int] = set()
        # Slots that begin in this round: their shared tokens are there behind it.
        self._beginning: set[int] = set()
        # What was found in this round for a row shard's slots with the same prompt: all wait alike.
        self._waits: dict[tuple[Node, int], _Wait] = {}

    def regroup(self, num_shards: int, least_shared: np.ndarray) -> None:
        """Changes the number of row shards; the caches stay the same."""
        self._least_shared = least_shared
        for sought in self._sought:
            if sought is not None:
                sought.wait = None
        self._slots_a_shard = self._num_slots // num_shards

    def find(self, slot: int, prompt: Sequence[int] | np.ndarray) -> Shared | None:
        """Returns the tokens that this slot can take over for the prompt now; None: it should wait.

        It waits for a slot that is about to append more of the same than there is now, and asks
        again with the same `prompt`, which must not be changed in place.
        """
        # This slot has not begun: no other must wait for the prompt that it had before.
        self.stop(slot)
        sought = self._seek(slot, prompt)
        first = slot - slot % self._slots_a_shard
        wait = self._waits.get((sought.node, first), sought.wait)
        if wait is not None and wait.holds(self._num_cached):
            sought.wait = wait
            return None
        common = np.minimum(self._tree.common(sought.node), len(prompt) - 1)
        # What can be taken over from every slot now, and behind its whole prompt; that is 0 where
        # the slot has read it, and both are where they are too few.
        least = np.maximum(self._least_shared, self._least_tokens)
        have, ahead = np.minimum(common, self._num_cached), np.minimum(common, self._lengths)
        have *= have >= least
        ahead *= (ahead >= least) & (self._num_cached < self._lengths)
        shard = slice(first, first + self._slots_a_shard)
        source = first + int(have[shard].argmax())
        length = int(have[source])
        # Its own cache before another's: that copies nothing.
        found = Shared(source=slot if have[slot] == length else source, length=length)
        most = int(ahead[shard].max())
        if most > length:
            readers = first + np.flatnonzero(ahead[shard] == most)
            sought.wait = self._wait_for(readers.tolist(), most, sought.node)
            self._waits[sought.node, first] = sought.wait
            return None
        if self._slots_a_shard == self._num_slots:
            return found
        have[shard] = ahead[shard] = 0
        return self._find_elsewhere(have, ahead, len(prompt), found)

    def _wait_for(self, readers: Sequence[int], tokens: int, node: Node) -> _Wait:
        while node.parent is not None and node.parent.depth >= tokens:
            node = node.parent
        return _Wait(readers=readers, tokens=tokens, node=node, changes=node.changes)

    def _find_elsewhere(
        self, have: np.ndarray, ahead: np.ndarray, length: int, found: Shared
    ) -> Shared | None:
        """Returns a better source in another shard, None to wait for one, or else `found`.

        `have` and `ahead` are what slots of other shards have in common with a prompt of this
        length.
        """
        own = found.length
        if not self._is_worth_sending(length - 1 - own):
            return found
        most = max(own, int(have.max()), int(ahead.max()))
        # What they take over in this round themselves cannot be copied yet.
        have[list(self._beginning)] = 0
        for number in np.unique(have)[::-1].tolist():
            if number > own and self._is_worth_sending(number - own):
                found = Shared(source=int((have == number).argmax()), length=number)
                break
        waits = most > found.length and self._is_worth_sending(most - own)
        return None if waits else found

    def _seek(self, slot: int, prompt: Sequence[int] | np.ndarray) -> _Sought:
        """Returns the prompt with its end in the tree, to which it is added once."""
        sought = self._sought[slot]
        if sought is not None and sought.prompt is prompt:
            return sought
        if sought is not None:
            self._tree.remove(sought.node)
        ids = np.asarray(prompt, np.int32)
        sought = self._sought[slot] = _Sought(prompt=prompt, node=self._tree.add(ids))
        return sought

    def begin(self, slot: int, prompt: Sequence[int] | np.ndarray, shared: Shared) -> None:
        """Begins a slot with a prompt, of which it takes over a part; its ids are in its row."""
        node = self._seek(slot, prompt).node
        self.forget(slot)
        # The tree counts it as the slot's prompt from now on.
        self._sought[slot], self._nodes[slot] = None, node
        self._tree.put(slot, node, present=True)
        self._lengths[slot] = max(len(prompt) - 1, shared.length)
        self._num_cached[slot] = shared.length
        self._beginning.add(slot)

    def append(self, slots: int | slice, numbers: int | np.ndarray) -> None:
        """Notes so many more tokens in the slots' caches; those behind the prompt do not count."""
        tokens = self._num_cached[slots] + numbers
        self._num_cached[slots] = np.minimum(tokens, self._lengths[slots])

    def end_inputs(self) -> None:
        """Notes that the slots that began have the tokens that they took over."""
        self._beginning.clear()
        self._waits.clear()

    def extend(self, slot: int, ids: Sequence[int]) -> None:
        """Notes that the slot's cache holds these ids, which begin with all of its prompt.

        A slot whose prompt was forgotten stays as it is: weights before may have read it.
        """
        if self._nodes[slot] is not None and len(ids) > self._num_cached[slot]:
            self.restore(slot, ids)

    def restore(self, slot: int, ids: Sequence[int] | np.ndarray) -> None:
        """Notes that the slot's cache holds these ids, whatever it held before."""
        self.begin(slot, ids, Shared(source=slot, length=len(ids)))
        self._beginning.discard(slot)
        # In the row they are marked as sampled: who takes them over writes them anew.
        self.lose_row(slot)

    def stop(self, slot: int) -> None:
        """Notes that the slot appends no more of its prompt."""
        node = self._nodes[slot]
        if node is not None and self._lengths[slot] > self._num_cached[slot]:
            self._lengths[slot] = self._num_cached[slot]
            # A change: no other waits for it any more.
            self._tree.put(slot, node, present=True)

    def common(self, slot: int, prompt: Sequence[int] | np.ndarray) -> tuple[int, int]:
        """Returns the tokens that a slot's next prompt has in common with its own cache now.

        And the most that it has in common with the cache of any slot of its row shard.
        """
        node = self._seek(slot, prompt).node
        common = np.minimum(self._tree.common(node), len(prompt) - 1)
        have = np.minimum(common, self._num_cached)
        have *= have >= self._least_shared
        first = slot - slot % self._slots_a_shard
        return int(have[slot]), int(have[first : first + self._slots_a_shard].max())

    def ids(self, slot: int) -> np.ndarray:
        """Returns the ids in the slot's cache that others could take over."""
        node = self._nodes[slot]
        return np.zeros(0, np.int32) if node is None else node.ids[: self.num_kept(slot)]

    def num_kept(self, slot: int) -> int:
        """Returns how many tokens in the slot's cache others could take over."""
        number = int(self._num_cached[slot])
        return number if number >= self._least_shared[slot] else 0

    def forget(self, slot: int) -> None:
        """Forgets the slot's cache."""
        node, self._nodes[slot] = self._nodes[slot], None
        if node is not None:
            self._tree.put(slot, node, present=False)
            self._tree.remove(node)
        self._lengths[slot] = self._num_cached[slot] = 0
        self._unwritten.discard(slot)

    def lose_row(self, slot: int) -> None:
        """Notes that the ids in the slot's cache are in no row any more."""
        self._unwritten.add(slot)

    def has_row(self, slot: int) -> bool:
        """Returns whether the ids in the slot's cache are in a row on the devices, too."""
        return slot not in self._unwritten
