# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The block manager of serving: pages of the KV cache for requests, as their replies need them.

A request has the pages of its tokens, from a pool that may hold fewer than all slots could fill.
Where a row shard has too few for the next step, the shortest of its requests is preempted: its
pages go to host memory, or its prompt is not put into its slot yet. Its step then has no token,
which JetStream takes for nothing. The longest goes on, so that requests end one after the other; a
preempted request comes back with all that was read, the longest first.

The tables of slots and the pool begin small and grow, the pool where the longest request has it for
itself and needs more. Where there is no memory for that, this request ends, and the others go on.
The pool is what it was at first again with the first request that finds all slots empty.

A step with drafts generates several tokens; their number is known when it is done. The next step is
dispatched before that: until then a request counts as if all drafts had been accepted.
"""

import collections
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.engine import Engine
from earl_jax.engine.host_pages import HostPages
from earl_jax.engine.pages import PageTable, Pool, pages_for
from earl_jax.engine.session import Policy, Session
from earl_jax.serving.prompts import Prefix
from earl_jax.serving.step_tokens import StepTokens

# A request that comes back has pages for at least so many tokens more.
LEAST_TOKENS = 32
# put_prompt(state, prefix, slot, pages): the state with a prompt in these pages of a slot's shard.
PutPrompt = Callable[[DecodeState, Prefix, int, Sequence[int]], DecodeState]


class _Step(NamedTuple):
    """A step that was dispatched: the number of the request in each slot that took part."""

    requests: dict[int, int]
    tokens: StepTokens


class ServingBlockManager:
    """The pages of JetStream's slots. Host-side state only.

    The state has `max_tokens` tokens a slot and the pool of `pages` now. `failed` holds the reason
    why the requests of some slots end: a lack of memory.
    """

    def __init__(
        self,
        engine: Engine,
        pool: Pool,
        max_tokens: int,
        *,
        most_tokens: int,
        put_prompt: PutPrompt,
    ) -> None:
        """Begins with empty slots; a request may grow to `most_tokens`."""
        self._engine, self.max_tokens, self._first_pool = engine, max_tokens, pool
        self._most, self._put_prompt = most_tokens, put_prompt
        # The most tokens of a step.
        self._step_tokens = 1 + engine.config.rules.draft
        self._page_size = engine.config.page_size
        self.pages = PageTable(pool, num_slots=engine.config.num_slots, page_size=self._page_size)
        self.failed: dict[int, str] = {}
        # Tokens in the cache of each slot that a request is in: the most there can be by now.
        self._lengths: dict[int, int] = {}
        # The number of the request in each slot, and the steps whose tokens are not counted yet.
        self._tickets: collections.Counter[int] = collections.Counter()
        self._steps: collections.deque[_Step] = collections.deque()
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
        """The slots whose requests take no part in the step that was prepared last."""
        return frozenset(self._asleep)

    def insert(self, prompt: Any, slot: int) -> None:
        """Queues a prompt for the slot: it is there before the first step with pages for it."""
        self.free(slot)
        self._lengths[slot], self._prompts[slot] = int(prompt.cached[0]), prompt
        self._tickets[slot] += 1
        self._asleep.add(slot)

    def free(self, slot: int) -> None:
        """Frees the pages of the slot's request; there may be none."""
        self._lengths.pop(slot, None)
        self._prompts.pop(slot, None)
        self._asleep.discard(slot)
        self.failed.pop(slot, None)
        self.host.drop(slot)
        self.pages.keep(slot, 0)

    def note(self, tokens: StepTokens) -> None:
        """Takes the result of the step that was prepared last."""
        if self._step_tokens > 1:
            awake = self._lengths.keys() - self._asleep
            self._steps.append(_Step({slot: self._tickets[slot] for slot in awake}, tokens))

    def settle(self, in_flight: int = 0) -> None:
        """Counts the tokens of all steps but the last `in_flight`. Waits for these steps."""
        while len(self._steps) > in_flight:
            requests, tokens = self._steps.popleft()
            counts = tokens.num_tokens()
            for slot, ticket in requests.items():
                if slot in self._lengths and self._tickets[slot] == ticket:
                    self._lengths[slot] -= self._step_tokens - int(counts[slot])

    def prepare(self, state: DecodeState) -> tuple[DecodeState, jax.Array]:
        """Returns the state in which all slots that take part have pages for a step, and these.

        Donates `state`.
        """
        self.settle(in_flight=1)
        state = self._shrink(state)
        leaving, pages = {}, self.pages.pool.pages
        for shard in range(self.pages.pool.shards):
            slots = [slot for slot in self.pages.slots_of(shard) if slot in self._lengths]
            self._wake(shard, slots)
            while (short := self._wanted(slots) - self.pages.num_free(shard)) > 0:
                if self._steps:
                    self.settle()
                    continue
                awake = [slot for slot in slots if slot not in self._asleep]
                if len(awake) == 1:
                    pages = max(pages, self.pages.pool.pages + short)
                    break
                slot = min(awake, key=self._rank)
                self._asleep.add(slot)
                if slot not in self._prompts and slot not in self.host:
                    leaving[slot] = self.pages.pages_of(slot, self._length(slot))
                    self.pages.keep(slot, 0)
        state = self._copy(self._grow(state, pages), leaving)
        awake = np.zeros(self._engine.config.num_slots, np.int32)
        awake[[slot for slot in self._lengths if slot not in self._asleep]] = 1
        if self._awake is None or not np.array_equal(awake, self._awake):
            self._awake, self._moving = awake, self._engine.place_rows(awake)
        for slot in np.flatnonzero(awake).tolist():
            self._lengths[slot] += self._step_tokens
        return self._give(state), self._moving

    def _shrink(self, state: DecodeState) -> DecodeState:
        """Returns the state with the pool of the beginning, where no slot has any of its pages."""
        old = self.pages.pool
        slots = range(self._engine.config.num_slots)
        if old == self._first_pool or any(map(self.pages.num_held, slots)):
            return state
        self.pages, source = self.pages.regroup(self._first_pool)
        self._given = None
        return self._engine.repack(state, self.max_tokens, old, source)

    def _grow(self, state: DecodeState, pages: int) -> DecodeState:
        """Returns the state with tables for the next step, and at least `pages` a row shard.

        Where there is no memory for them, the requests fail that need them.
        """
        awake = self._lengths.keys() - self._asleep
        max_tokens = max((self._tokens(slot) for slot in awake), default=0)
        old, size = self.pages.pool, self._page_size
        if max_tokens <= self.max_tokens and pages <= old.pages:
            return state
        max_tokens = (
            self.max_tokens
            if max_tokens <= self.max_tokens
            else max(max_tokens, 2 * self.max_tokens)
        )
        pages = old.pages if pages <= old.pages else max(pages, 2 * old.pages)
        max_tokens = min(max_tokens, self._most)
        new = old._replace(pages=min(pages, max(old.pages, pages_for(self._most, size))))
        table, source = self.pages.regroup(new)
        try:
            moved = source if new != old else None
            # Waits: a lack of memory is raised here, and `state` is as it was.
            state = jax.block_until_ready(self._engine.repack(state, max_tokens, old, moved))
        except jax.errors.JaxRuntimeError as error:
            self._fail(awake, str(error).splitlines()[0])
            return state
        self.pages, self.max_tokens, self._given = table, max_tokens, None
        return state

    def _fail(self, awake: Collection[int], why: str) -> None:
        pool, size = self.pages.pool, self._page_size
        for slot in awake:
            tokens = self._tokens(slot)
            missing = self.pages.missing(slot, tokens)
            if tokens > self.max_tokens or missing > self.pages.num_free(self.pages.shard(slot)):
                self._asleep.add(slot)
                self.host.drop(slot)
                self.pages.keep(slot, 0)
                self.failed[slot] = (
                    f"the prompt and its reply have come to {self._length(slot)} tokens, and the "
                    f"devices have no memory for a longer context: the KV cache holds "
                    f"{pool.pages * size} tokens, and did not grow ({why:.200})"
                )

    def _length(self, slot: int) -> int:
        """Returns the number of tokens in the slot's cache."""
        return min(self._lengths[slot], self._most)

    def _wake(self, shard: int, slots: list[int]) -> None:
        """Resumes waiting requests where there are pages: the longest first, none before it."""
        waiting = self._asleep.intersection(slots) - self.failed.keys()
        for slot in sorted(waiting, key=self._rank, reverse=True):
            alone = self._asleep.issuperset(slots)
            tokens = min(self._lengths[slot] + LEAST_TOKENS, self._most)
            pages = self._wanted(slots) + pages_for(tokens, self._page_size)
            if not alone and pages > self.pages.num_free(shard):
                break
            self._asleep.discard(slot)

    def _wanted(self, slots: list[int]) -> int:
        """Returns how many pages those of the slots that take part lack for a step."""
        return sum(
            self.pages.missing(slot, self._tokens(slot))
            for slot in slots
            if slot not in self._asleep
        )

    def _tokens(self, slot: int) -> int:
        """Returns the most tokens in the slot's cache after a step."""
        return min(self._lengths[slot] + self._step_tokens, self._most)

    def _rank(self, slot: int) -> tuple[bool, int, int]:
        """Returns the slot's priority in its row shard; a prompt has the least to lose."""
        return slot not in self._prompts, self._lengths[slot], -slot

    def _copy(self, state: DecodeState, leaving: dict[int, list[int]]) -> DecodeState:
        """Copies pages to the host and back, puts prompts into slots, and assigns pages."""
        session = Session(
            engine=self._engine,
            policy=Policy(params=None, version=0),
            state=state,
            max_tokens=self.max_tokens,
            pages=self.pages,
        )
        self.host.settle()
        session = self.host.copy_out(session, leaving)
        coming = {}
        for slot in sorted(self._lengths.keys() - self._asleep):
            self.pages.hold(slot, self._tokens(slot))
            if slot in self.host:
                coming[slot] = self.pages.pages_of(slot, self._length(slot))
        state = self.host.copy_back(session, coming, dict.fromkeys(coming, True)).state
        for slot in sorted(self._prompts.keys() - self._asleep):
            pages = self.pages.pages_of(slot, self._length(slot))
            state = self._put_prompt(state, self._prompts.pop(slot), slot, pages)
        return state

    def _give(self, state: DecodeState) -> DecodeState:
        """Returns the state in which slots have their pages."""
        table = self.pages.as_array(pages_for(self.max_tokens, self._page_size))
        if self._given is not None and np.array_equal(table, self._given):
            return state
        self._given = table
        return self._engine.give_pages(state, table)
