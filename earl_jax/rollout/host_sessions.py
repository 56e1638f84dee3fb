# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions in host memory: caches of conversations that are idle, found again by their ids.

When a slot whose last episode is over is used for something else, its pages come here. Where a
prompt goes on with what is kept here, the pages go back into its slot before it begins, as if the
slot had kept them. The sessions that were used the longest ago are dropped first.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from earl_jax.engine.host_pages import HostPages, Part
from earl_jax.engine.pages import PageTable
from earl_jax.engine.prefixes import PrefixIndex
from earl_jax.engine.prompt_tree import Node, PromptTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdleSession:
    """The ids in a session's cache, and its pages.

    The first `gone` pages of each group of layers are not there, so that no prompt goes on from
    fewer than `least` tokens of it.
    """

    ids: np.ndarray
    parts: list[Part]
    gone: Sequence[int]
    least: int


class HostSessions:
    """Idle sessions of one policy version. Host-side state only.

    Their ids are in a radix tree: what a prompt has in common with all of them is found without
    comparing it with each (prompt_tree.py).
    """

    def __init__(self, host: HostPages, least_tokens: int) -> None:
        """Pages are in `host`; sessions that have fewer tokens in common do not count."""
        self._host, self._least = host, least_tokens
        # By number, the one that came first in front; and where their ids end in the tree.
        self._sessions: dict[int, IdleSession] = {}
        self._ends: dict[int, Node] = {}
        self._widen(64)

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, prompt: Sequence[int] | np.ndarray) -> tuple[int, int]:
        """Returns the session that has the most tokens in common with a prompt, and how many.

        The last token of a prompt does not count. Without such a session: (-1, 0).
        """
        if not self._sessions or len(prompt) <= self._least:
            return -1, 0
        common = self._common(np.asarray(prompt, np.int32)[:-1])
        most = int(common.max())
        if most < self._least:
            return -1, 0
        return next(number for number in self._sessions if common[number] == most), most

    def holds(self, ids: np.ndarray) -> bool:
        """Returns whether a session's cache begins with these ids."""
        return bool(self._sessions) and int(self._common(ids).max()) == len(ids)

    def _common(self, ids: np.ndarray) -> np.ndarray:
        """Returns how many tokens of each session these ids can go on from, by number."""
        node = self._tree.add(ids)
        common = self._tree.common(node)
        self._tree.remove(node)
        return common * (common >= self._leasts)

    def add(self, session: IdleSession) -> None:
        """Adds a session, as the one that is dropped last."""
        if not self._free:
            self._widen(2 * len(self._leasts))
        self._put(self._free.pop(), session)

    def _put(self, number: int, session: IdleSession) -> None:
        self._sessions[number], self._leasts[number] = session, session.least
        self._ends[number] = self._tree.add(session.ids)
        self._tree.put(number, self._ends[number], present=True)

    def _widen(self, most: int) -> None:
        """Makes the tree anew, for at most so many sessions, with those that are here."""
        self._tree, self._leasts = PromptTree(most), np.zeros(most, np.int32)
        for number, session in self._sessions.items():
            self._put(number, session)
        self._free = [number for number in range(most) if number not in self._sessions]

    def remove(self, number: int) -> IdleSession:
        """Removes a session, whose pages stay in the host's memory."""
        end = self._ends.pop(number)
        self._tree.put(number, end, present=False)
        self._tree.remove(end)
        self._free.append(number)
        return self._sessions.pop(number)

    def make_space(self, block_bytes: int, pages_a_block: int, num_pages: Sequence[int]) -> bool:
        """Drops sessions until slots with so many pages each fit too. Returns whether they do."""
        while not self._host.has_space(block_bytes, pages_a_block, num_pages):
            if not self._sessions:
                return False
            self._host.release(self.remove(next(iter(self._sessions))).parts)
        return True

    def clear(self) -> None:
        """Drops all sessions: the weights have changed."""
        for number in list(self._sessions):
            self._host.release(self.remove(number).parts)


class IdleSessions:
    """Moves of idle sessions from slots to host memory and back, planned before each round."""

    def __init__(self, host: HostPages, leaving: dict[int, list[int]], least_tokens: int) -> None:
        """`leaving` is the caller's: the pages of slots that are copied to the host next."""
        self._host, self._leaving, self._least = host, leaving, least_tokens
        self.store = HostSessions(host, least_tokens)
        # By slot: the ids of what leaves; the session that comes; and how many tokens of the prompt
        # that is to begin are in the slot's own cache, or will be.
        self._aside: dict[int, tuple[np.ndarray, list[int], int]] = {}
        self._coming: dict[int, IdleSession] = {}
        self._own: dict[int, int] = {}
        self._block = 0, 1

    def own(self, slot: int) -> int:
        """Returns how many tokens of its next prompt the slot goes on from in its own pages."""
        return self._own.get(slot, 0)

    def end_inputs(self) -> None:
        """Notes that slots have begun, and go on from what they have read since."""
        self._own.clear()

    def plan(
        self,
        prompts: Mapping[int, np.ndarray],
        block: tuple[int, int],
        pages: PageTable,
        prefixes: PrefixIndex,
        give_up: Callable[[int], None],
        free: Callable[[int, int], None],
    ) -> None:
        """Plans which sessions come back for the prompts that are to begin, by slot.

        What a slot keeps that its prompt has no use for goes to the host. `block` has the bytes of
        a block of pages and their number. `give_up` frees a slot's pages, `free` makes so many
        pages of a row shard free, if it can.
        """
        self._own, self._block = {}, block
        for slot, prompt in prompts.items():
            own, most = prefixes.common(slot, prompt)
            if own == most and own >= self._least and pages.has_alone(slot, own):
                self._own[slot] = own
            number, common = self.store.find(prompt)
            if common < most + self._least:
                self.move_aside(slot, own, pages, prefixes)
                continue
            # Removed first, so that it makes no room for what it comes in place of.
            idle = self.store.remove(number)
            self.move_aside(slot, 0, pages, prefixes)
            give_up(slot)
            # What the prompt goes on from needs no more.
            gone = pages.rule.num_gone(common)
            pages.skip(slot, [max(each) for each in zip(idle.gone, gone, strict=True)])
            shard, missing = pages.shard(slot), pages.missing(slot, len(idle.ids))
            if missing > pages.num_free(shard):
                free(shard, missing)
            if missing > pages.num_free(shard):
                pages.keep(slot, 0)
                self.store.add(idle)
                continue
            pages.hold(slot, len(idle.ids))
            self._coming[slot], self._own[slot] = idle, common

    def move_aside(self, slot: int, own: int, pages: PageTable, prefixes: PrefixIndex) -> None:
        """Plans that the slot's cache goes to the host, if more than `own` tokens of it count."""
        ids = prefixes.ids(slot)
        if len(ids) - own < self._least or slot in self._leaving or self.store.holds(ids):
            return
        leaving = pages.pages_of(slot, len(ids))
        if not leaving:
            return  # all of them are behind windows
        if self.store.make_space(*self._block, [*map(len, self._leaving.values()), len(leaving)]):
            least = int(pages.least_shared[slot])
            self._leaving[slot], self._aside[slot] = leaving, (ids, pages.num_gone(slot), least)

    def cancel(self, slot: int) -> None:
        """Notes that the slot gives up its pages: no session comes back to it."""
        self._own.pop(slot, None)
        if (idle := self._coming.pop(slot, None)) is not None:
            self.store.add(idle)

    def carry_out(self, pages: PageTable, prefixes: PrefixIndex) -> dict[int, list[int]]:
        """Keeps what has left, and returns the pages to write back, by slot.

        The host has the pages of these slots then, and the prefix index their ids.
        """
        for slot, (ids, gone, least) in self._aside.items():
            parts = self._host.give(slot)
            self.store.add(IdleSession(ids=ids, parts=parts, gone=gone, least=least))
        coming, self._aside, self._coming = self._coming, {}, {}
        for slot, idle in coming.items():
            self._host.take_back(slot, idle.parts)
            prefixes.restore(slot, idle.ids)
        return {
            slot: pages.pages_again(slot, len(idle.ids), idle.gone) for slot, idle in coming.items()
        }
