# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An engine on simulated devices, which checks that every round reads the right KV.

Only the programs of a round and the copies of pages are simulated. In place of the KV of a token,
the cache holds a number for the token and all tokens before it. Sampled tokens are random.
"""

import dataclasses
import functools
import random
import types
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from earl_jax.engine.config import EngineConfig
from earl_jax.engine.engine import Engine
from earl_jax.engine.page_copies import LEAVE, WAKE
from earl_jax.engine.pages import NO_PAGE, NO_SOURCE, Pool
from earl_jax.engine.round_inputs import RoundOutputs
from earl_jax.models.layer_groups import PageRule
from earl_jax.rollout.episode import LiveEpisode
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.episodes import renderer


def ids_of(episode: LiveEpisode) -> list[int]:
    """Returns the ids of the episode's newest sample."""
    ids = [token for turn in episode.turns for token in turn.token_ids]
    return [*ids, *episode.reply.ids][episode.origin :]


@dataclasses.dataclass(kw_only=True)
class Slot:
    """A slot of the devices: the numbers of its cached tokens, and the turn that it samples."""

    cached: list[int] = dataclasses.field(default_factory=list)
    pending: int = 0
    active: bool = False
    turn_tokens: int = 0
    turn_limit: int = 0


@jax.tree_util.register_static
class Devices:
    """The state of a rollout on all meshes, which changes in place; a tree without leaves.

    `kv` i32[Z, 1, page_size] is the pool, `table` that of `Engine.give_pages`, and `live` the
    service's list of the episodes in the slots.
    """

    def __init__(self, rng: random.Random, rule: PageRule, num_slots: int, pool: Pool) -> None:
        self.rng, self.rule, self.slots = rng, rule, [Slot() for _ in range(num_slots)]
        self.kv = np.zeros((pool.total, 1, rule.page_size), np.int32)
        self.table = np.zeros((num_slots, rule.num_groups, 0), np.int32)
        self.live: Sequence[LiveEpisode | None] = ()
        self.num_checked, self._end = 0, renderer().end_of_turn_id
        # The number of a token, by the number of the token before it and its id.
        self._numbers: dict[tuple[int, int], int] = {}

    @property
    def cache(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(pools=[self.kv])

    def play(self, inputs, most_sampled: int) -> RoundOutputs:
        """Plays a round as `slots.play` does: turns end, slots begin, append, and sample."""
        tokens = np.zeros((len(self.slots), most_sampled), np.int64)
        count = np.zeros(len(self.slots), np.int64)
        for number, slot in enumerate(self.slots):
            if inputs.end_turn[number]:
                slot.active = False
                del slot.cached[len(slot.cached) - inputs.discarded[number] :]
                slot.turn_tokens -= inputs.discarded[number]
        for number in range(len(self.slots)):
            self._begin(number, inputs)
        before = [len(slot.cached) for slot in self.slots]
        for number, slot in enumerate(self.slots):
            self._append_chunk(number, inputs)
            if slot.active:
                sampled = self._sample(slot, most_sampled)
                tokens[number, : len(sampled)], count[number] = sampled, len(sampled)
            self._access(number, before[number], write=True)
        for number in range(len(self.slots)):
            self._access(number, before[number], write=False)
        active = np.array([slot.active for slot in self.slots])
        logprobs = np.zeros(tokens.shape, np.float32)
        return RoundOutputs(tokens=tokens, logprobs=logprobs, count=count, active=active)

    def _begin(self, number: int, inputs) -> None:
        slot, shared = self.slots[number], inputs.shared[number]
        if not (inputs.restart[number] or inputs.fork[number] or inputs.rewind[number]):
            return
        slot.cached = self._numbered(number)[:shared] if shared else []
        for group, source in enumerate(inputs.copied[number]):
            if shared and source != NO_PAGE:
                self.kv[self.table[number, group, shared // self.rule.page_size]] = self.kv[source]
        if inputs.restart[number]:
            slot.turn_tokens = inputs.turn_tokens[number]
        slot.active &= not (inputs.restart[number] or inputs.rewind[number])

    def _append_chunk(self, number: int, inputs) -> None:
        slot, chunk = self.slots[number], inputs.chunk[number, : inputs.count[number]].tolist()
        if chunk and (inputs.begin_turn[number] or inputs.resume_turn[number]):
            slot.active, slot.turn_limit, slot.pending = True, inputs.turn_limit[number], chunk[-1]
            slot.turn_tokens *= not inputs.begin_turn[number]
            chunk = chunk[:-1]
        self._append(slot.cached, chunk)
        if chunk or slot.active:
            assert slot.cached == self._numbered(number)[: len(slot.cached)], f"ids, slot {number}"

    def _sample(self, slot: Slot, most: int) -> list[int]:
        number = max(1, min(self.rng.randint(1, most), slot.turn_limit - slot.turn_tokens))
        sampled = [self.rng.randint(10, 17) for _ in range(number)]
        if self.rng.random() < 0.25:
            sampled[-1] = self._end
        self._append(slot.cached, [slot.pending, *sampled[:-1]])
        slot.pending, slot.turn_tokens = sampled[-1], slot.turn_tokens + number
        slot.active = sampled[-1] != self._end and slot.turn_tokens < slot.turn_limit
        return sampled

    def _access(self, number: int, first: int, *, write: bool) -> None:
        """Writes the tokens from `first` on, or checks all that windows read behind them."""
        cached, size = self.slots[number].cached, self.rule.page_size
        for group, window in enumerate(self.rule.windows):
            begin = first if write else max(0, first - window + 1) if window else 0
            if first == len(cached):
                return
            positions = np.arange(begin, len(cached))
            places = self.table[number, group, positions // size], 0, positions % size
            expected = np.array(cached[begin:]) * self.rule.num_groups + group
            if write:
                self.kv[places] = expected
                continue
            self.num_checked += len(positions)
            wrong = positions[self.kv[places] != expected]
            assert not wrong.size, f"wrong KV: slot {number}, group {group}, position {wrong[0]}"

    def _numbered(self, number: int) -> list[int]:
        """Returns the numbers of the tokens of the slot's episode, in its newest sample."""
        episode, numbers = self.live[number], []
        assert episode is not None and not episode.preempted, f"slot {number} takes no part"
        self._append(numbers, ids_of(episode))
        return numbers

    def _append(self, cached: list[int], ids: Sequence[int]) -> None:
        for token in ids:
            before = (cached[-1] if cached else 0, token)
            cached.append(self._numbers.setdefault(before, len(self._numbers) + 1))


class SimulatedPageCopies:
    """`PageCopies` for `Devices`; blocks of pages are arrays that are cut over the row shards."""

    def __init__(self, layout, rule: PageRule) -> None:
        self.num_shards, self.pages_a_call = layout.num_row_shards, 2 * rule.num_groups
        self.block_shardings = NamedSharding(layout.mesh, P(None, layout.row_axes))

    def block_bytes(self, state: Devices) -> int:
        return self.pages_a_call * state.kv[0].nbytes

    def blank(self, state: Devices) -> jax.Array:
        return self.take(state, np.zeros((self.num_shards, self.pages_a_call), np.int32))

    def take(self, state: Devices, pages: np.ndarray) -> jax.Array:
        return jax.device_put(state.kv[self._of_pool(state, pages)][None], self.block_shardings)

    def put(self, state: Devices, block: jax.Array, pages, counts) -> Devices:
        parts = np.split(np.asarray(block)[0], self.num_shards)
        for own, count, part in zip(self._apart(state, pages), counts, parts, strict=True):
            state.kv[own[:count]] = part[:count]
        return state

    def send(self, state: Devices, source: int, sent, pages, counts) -> Devices:
        taken = state.kv[np.array(sent) + source * (len(state.kv) // self.num_shards)]
        for own, count in zip(self._apart(state, pages), counts, strict=True):
            state.kv[own[:count]] = taken[:count]
        return state

    def mark(self, state: Devices, marks: np.ndarray) -> Devices:
        for slot, mark in zip(state.slots, marks, strict=True):
            slot.active = slot.active if mark == LEAVE else mark == WAKE
        return state

    def _apart(self, state: Devices, pages: np.ndarray) -> np.ndarray:
        first = np.arange(self.num_shards) * (len(state.kv) // self.num_shards)
        return pages + first[:, None]

    def _of_pool(self, state: Devices, pages: np.ndarray) -> np.ndarray:
        return self._apart(state, pages).reshape(-1)


class SimulatedEngine(Engine):
    """An engine on `Devices`, which has no weights, and records no experience."""

    def __init__(self, config: EngineConfig, devices: Devices, num_shards: int) -> None:
        super().__init__(config, make_layout(MeshShape(data=num_shards)))
        self.state_shardings = devices

    def load_params(self, params):
        return params

    def give_pages(self, state: Devices, table: np.ndarray) -> Devices:
        state.table = table
        return state

    def repack(self, state: Devices, max_tokens: int, old: Pool, source=None) -> Devices:
        if source is not None:
            numbers = source.reshape(-1)
            state.kv = np.where(numbers[:, None, None] == NO_SOURCE, 0, state.kv[numbers])
        return state

    def play(self, params, state: Devices, inputs, **options):
        return state, state.play(inputs, self.config.rules.round_tokens)

    @functools.cached_property
    def page_copies(self) -> SimulatedPageCopies:
        return SimulatedPageCopies(self.layout, self.config.page_rule)

    @functools.cached_property
    def row_copies(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            move_rows=lambda state, moves: state, write_ids=lambda state, writes: state
        )
