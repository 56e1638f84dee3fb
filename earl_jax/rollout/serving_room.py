# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Room in the KV cache for the requests that JetStream serves: pages as their replies need them.

A request has the pages of its tokens, from a pool that may hold fewer than all slots could fill.
Where a lane has too few for the next step, the shortest of its requests waits: its pages go to
host memory, or its prompt is not put into its slot yet. Its step then has no token, which JetStream
takes for nothing. The longest goes on, so that one after the other ends; who waits for pages comes
back to all that was read, in the order of length.
"""

import sys
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from earl_jax.rollout._jetstream import ResultTokens, SlotData
from earl_jax.rollout.decode_state import DecodeState
from earl_jax.rollout.host_pages import HostPages
from earl_jax.rollout.pages import PageTable, Pool, pages_for
from earl_jax.rollout.seat import Policy, Seat

if TYPE_CHECKING:
    from earl_jax.rollout.engine import PolicyEngine

# Whoever comes back has room for so many tokens more.
LEAST_TOKENS = 32


class StepTokens(ResultTokens):
    """What a step handed out; nothing in the slots `asleep`, whose requests it does not end."""

    asleep: frozenset[int] = frozenset()

    def convert_to_numpy(self) -> "StepTokens":
        """With the numbers on the host."""
        return step_tokens(np.array(self.data), self.asleep)

    def get_result_at_slot(self, slot: int) -> Any:
        """The slot's token, if it has one."""
        if slot not in self.asleep:
            return super().get_result_at_slot(slot)
        nothing = np.zeros((1, 0), np.int32)
        # More than no tokens: so JetStream ends a request whose client has gone.
        return SlotData(tokens=nothing, valid=nothing, lengths=np.ones((1,), np.int32))


def step_tokens(data: Any, asleep: frozenset[int]) -> StepTokens:
    """From i32[B,3] as `slots.generate_one` gives it."""
    tokens = StepTokens(
        data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
    )
    object.__setattr__(tokens, "asleep", asleep)
    return tokens


class ServingRoom:
    """The pages of JetStream's slots. Host-side state only."""

    def __init__(self, engine: "PolicyEngine", pool: Pool, places: int) -> None:
        """Nobody is in any slot of a state with these pages and places."""
        self._engine, self._places = engine, places
        self._page_size = engine.config.page_size
        assert pool.pages >= pages_for(places, self._page_size), "a lane holds a whole context"
        self.pages = PageTable(pool, num_slots=engine.config.num_slots, page_size=self._page_size)
        # Tokens in the cache of each slot that a request is in.
        self._lengths: dict[int, int] = {}
        # Prompts that are not in their slots yet.
        self._prompts: dict[int, Any] = {}
        self._asleep: set[int] = set()
        # At most what the slots of one server can hold.
        self.host = HostPages(sys.maxsize)
        self._given: np.ndarray | None = None
        self._awake: np.ndarray | None = None
        self._moving: Any = None

    @property
    def asleep(self) -> frozenset[int]:
        """Slots whose requests take no part in the step that was prepared last."""
        return frozenset(self._asleep)

    def insert(self, prompt: Any, slot: int) -> None:
        """A prompt is in the slot before the next step, or as soon as there are pages for it."""
        self.free(slot)
        self._lengths[slot], self._prompts[slot] = int(prompt.cached[0]), prompt
        self._asleep.add(slot)

    def free(self, slot: int) -> None:
        """The slot's request is over; there may be none."""
        self._lengths.pop(slot, None)
        self._prompts.pop(slot, None)
        self._asleep.discard(slot)
        self.host.drop(slot)
        self.pages.keep(slot, 0)

    def prepare(self, state: DecodeState) -> tuple[DecodeState, jax.Array]:
        """The state in which everybody who takes part has pages for a step, and who does.

        Donates `state`.
        """
        leaving = {}
        for lane in range(self.pages.pool.lanes):
            slots = [slot for slot in self.pages.slots_of(lane) if slot in self._lengths]
            self._wake(lane, slots)
            while self._wanted(slots) > self.pages.num_free(lane):
                slot = min((s for s in slots if s not in self._asleep), key=self._rank)
                self._asleep.add(slot)
                if slot not in self._prompts and slot not in self.host:
                    leaving[slot] = self.pages.pages_of(slot, self._lengths[slot])
                    self.pages.keep(slot, 0)
        state = self._copy(state, leaving)
        awake = np.zeros(self._engine.config.num_slots, np.int32)
        awake[[slot for slot in self._lengths if slot not in self._asleep]] = 1
        if self._awake is None or not np.array_equal(awake, self._awake):
            self._awake, self._moving = awake, self._engine.place_rows(awake)
        for slot in np.flatnonzero(awake).tolist():
            self._lengths[slot] = min(self._lengths[slot] + 1, self._places)
        return self._give(state), self._moving

    def _wake(self, lane: int, slots: list[int]) -> None:
        """Who waits takes part where there are pages, the longest first; none overtakes it."""
        for slot in sorted(self._asleep.intersection(slots), key=self._rank, reverse=True):
            alone = self._asleep.issuperset(slots)
            tokens = min(self._lengths[slot] + LEAST_TOKENS, self._places)
            pages = self._wanted(slots) + pages_for(tokens, self._page_size)
            if not alone and pages > self.pages.num_free(lane):
                break
            self._asleep.discard(slot)

    def _wanted(self, slots: list[int]) -> int:
        """Pages that those of the slots who are awake lack for a step."""
        return sum(
            self.pages.missing(slot, self._tokens(slot))
            for slot in slots
            if slot not in self._asleep
        )

    def _tokens(self, slot: int) -> int:
        """In the slot's cache after a step."""
        return min(self._lengths[slot] + 1, self._places)

    def _rank(self, slot: int) -> tuple[bool, int, int]:
        """Who goes on rather than others of the lane is higher; a prompt has least to lose."""
        return slot not in self._prompts, self._lengths[slot], -slot

    def _copy(self, state: DecodeState, leaving: dict[int, list[int]]) -> DecodeState:
        """Pages leave for the host and come back; prompts come in; everybody has room to go on."""
        seat = Seat(
            engine=self._engine,
            policy=Policy(params=None, version=0),
            state=state,
            places=self._places,
            pool=self.pages.pool,
        )
        self.host.settle()
        seat = self.host.copy_out(seat, leaving)
        coming = {}
        for slot in sorted(self._lengths.keys() - self._asleep):
            self.pages.hold(slot, self._tokens(slot))
            if slot in self.host:
                coming[slot] = self.pages.pages_of(slot, self._lengths[slot])
        state = self.host.copy_back(seat, coming, dict.fromkeys(coming, True)).state
        for slot in sorted(self._prompts.keys() - self._asleep):
            pages = self.pages.pages_of(slot, self._lengths[slot])
            state = self._engine.put_prompt(state, self._prompts.pop(slot), slot, pages)
        return state

    def _give(self, state: DecodeState) -> DecodeState:
        """The state in which slots have their pages."""
        table = self.pages.as_array(pages_for(self._places, self._page_size))
        if self._given is not None and np.array_equal(table, self._given):
            return state
        self._given = table
        return self._engine.give_pages(state, table)
