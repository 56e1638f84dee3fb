# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Copies of prompts that one row shard has read into pages of others, which need not read them.

An episode has pages of its own row shard. So a beginning that another shard has read is copied:
from devices to devices, in one all-reduce for so many pages, to which all but the shard that has
them add zeros. It is a program of its own, which runs between two rounds, because in a round shards
decode unequally long.

Whether a copy is worth it is a matter of cost, as it is for preempted pages (preemption.py): the
copy against reading so many tokens chunk by chunk, both by the chip's data sheet. Row shards that
read the same at the same time need no longer for it than one of them does. But neither do the
shards that wait for it: their other slots go on, and they begin when the first shard's do.
"""

import collections
from collections.abc import Sequence

import numpy as np

from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.page_copies import PageCopies


class ShardCopies:
    """The copies to make before the next round. Host-side state only.

    `tokens` counts those that were copied.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        # By slot: its pages, and those that they are copied to, by slot too; the first ones alike.
        self._sources: dict[int, list[int]] = {}
        self._targets: dict[int, dict[int, list[int]]] = collections.defaultdict(dict)
        self.tokens = 0

    def plan(
        self, source: int, source_pages: list[int], slot: int, pages: list[int], tokens: int
    ) -> None:
        """Plans a copy of the first so many tokens of `source` to a slot of another row shard.

        Both have so many pages for them, numbered within their shards; those of `source` stay as
        they are until the round.
        """
        assert len(source_pages) == len(pages)
        self._sources[source] = max(self._sources.get(source, []), source_pages, key=len)
        self._targets[source][slot] = pages
        self.tokens += tokens

    def carry_out(self, copies: PageCopies, state: DecodeState) -> DecodeState:
        """Makes the copies. Donates the pools of `state`."""
        size = copies.pages_a_call
        slots_a_shard = self._num_slots // copies.num_shards
        for source, targets in self._targets.items():
            sent = self._sources[source]
            for slots in _waves(sorted(targets), slots_a_shard):
                taken = [targets[slot] for slot in slots]
                for first in range(0, max(map(len, taken)), size):
                    pages = np.zeros((copies.num_shards, size), np.int32)
                    counts = np.zeros(copies.num_shards, np.int32)
                    for slot, own in zip(slots, taken, strict=True):
                        part = own[first : first + size]
                        shard = slot // slots_a_shard
                        pages[shard, : len(part)], counts[shard] = part, len(part)
                    shard = source // slots_a_shard
                    state = copies.send(state, shard, sent[first : first + size], pages, counts)
        self._sources, self._targets = {}, collections.defaultdict(dict)
        return state


def _waves(slots: Sequence[int], slots_a_shard: int) -> list[list[int]]:
    """Returns the slots in groups with one slot of each row shard at most."""
    queues: dict[int, list[int]] = collections.defaultdict(list)
    for slot in slots:
        queues[slot // slots_a_shard].append(slot)
    longest = max(map(len, queues.values()))
    return [[q[index] for q in queues.values() if index < len(q)] for index in range(longest)]
