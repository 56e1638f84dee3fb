# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""PolicyEngine: JetStream's `Engine` over our decoder.

Serving uses prefill / insert / generate, as JetStream's Driver does. Rollouts use what RoundEngine
has: `play`. Both run on the same DecodeState.
"""

import dataclasses
import functools
import threading
import time
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from earl_jax.engine import prompts, slots
from earl_jax.engine._jetstream import Engine, ResultTokens, ServedTokenizer, tokenizer_parameters
from earl_jax.engine.choices import Choices, no_choices
from earl_jax.engine.config import Sampling
from earl_jax.engine.decode_state import DecodeState, Scores, no_scores
from earl_jax.engine.drafting import Drafting
from earl_jax.engine.engine_config import EngineConfig
from earl_jax.engine.pages import Pool, dense_pool, pages_for
from earl_jax.engine.prompts import Prefix
from earl_jax.engine.round_engine import RoundEngine
from earl_jax.engine.sampling import sampling_rows
from earl_jax.engine.step_tokens import step_tokens
from earl_jax.models.kv_cache import PagedCache, empty_cache, place_pages
from earl_jax.models.parameters import Params
from earl_jax.serving.block_manager import ServingBlockManager
from earl_jax.sharding.layout import Layout
from earl_jax.sharding.reshard import reshard

# A prompt's own seed lies in 1 to MAX_SEED; those that are named begin behind it.
MAX_SEED = 2**30 - 1
# Longer prompts are read in pieces of so many tokens, between which others' tokens are decoded.
PROMPT_CHUNK = 1024


class PolicyEngine(RoundEngine, Engine):
    """The engine for one model on one rollout layout, to serve from and to play with."""

    def __init__(self, config: EngineConfig, layout: Layout, tokenizer: Any = None) -> None:
        """Builds the jitted programs; nothing is compiled before its first call.

        `tokenizer` (transformers) is what JetStream's server asks for; rollouts bring ids.

        Raises as `RoundEngine`.
        """
        super().__init__(config, layout)
        self._tokenizer = tokenizer
        self._num_prefills = 0
        # By their room, and whether it is whole on each device: see `_reader`.
        self._readers: dict[Hashable, Any] = {}
        self._room: ServingBlockManager | None = None
        self._drafting = Drafting(config.serving.speculation if config.rules.ngram else "off")
        # JetStream calls from several threads. Programs that hold collectives must reach all
        # devices in one order.
        self._dispatching = threading.Lock()

    def _build_programs(self) -> None:
        super()._build_programs()
        rules = self.config.rules
        scores = Scores(asked=self._rows, logprob=self._rows, model_logprob=self._rows)
        served = dataclasses.replace(self.state_shardings, scores=scores)
        # By whether they guess.
        self._generate = {
            drafts: jax.jit(
                self._decoding(slots.generate, rules if drafts else rules._replace(ngram=0)),
                donate_argnums=1,
                out_shardings=(served, self._rows),
            )
            for drafts in (False, True)
        }
        # A prompt is one row: every row shard reads it alike.
        prefix = self._prefix_specs
        self._prefill = jax.jit(
            self._over_rows(
                functools.partial(prompts.read, self.config.model, self.layout),
                (P(), prefix, P(), P(), P()),
                prefix,
            )
        )
        self._insert = jax.jit(
            prompts.put,
            donate_argnums=1,
            out_shardings=dataclasses.replace(served, cache=None),
        )
        self._empty_served = jax.jit(
            self._new_served_state, static_argnums=(0, 1), out_shardings=served
        )

    def _new_served_state(self, max_tokens: int, pool: Pool) -> DecodeState:
        """Every slot has a row for its ids where tokens are guessed from them, else none has."""
        config = self.config
        rows = config.num_slots if config.rules.ngram else self.layout.num_row_shards
        state = self._new_state(max_tokens, pool, rows)
        return dataclasses.replace(state, scores=no_scores(config.num_slots))

    @property
    def _prefix_specs(self) -> Any:
        """Of a Prefix: its pages are cut over `context` as those of the slots are."""
        pages = [
            place_pages(layer, lambda letters: self._manual_spec(letters.replace("Z", ".")))
            for layer in self._state_specs.cache.layers
        ]
        whole: Any = P()
        return Prefix(
            cache=PagedCache(layers=pages, table=whole),
            cached=whole,
            pending=whole,
            seed=whole,
            sampling=whole,
            scores=whole,
            turn_limit=whole,
            choices=whole,
            tokens=whole,
        )

    def load_params(self, params: Params) -> Params:
        """Places weights, such as `publish` makes, where this engine wants them, on the devices."""
        return reshard(params, self.parameter_shardings)

    def prefill(
        self,
        *,
        params: Params,
        existing_prefix: Prefix | None = None,
        padded_tokens: jax.Array | np.ndarray,
        true_length: int,
        sampling: Sampling | None = None,
        seed: int | None = None,
        choices: Choices | None = None,
        logprobs: bool = False,
        max_tokens: int | None = None,
    ) -> Prefix:
        """Reads a prompt, and samples the token behind it.

        Args:
            params: as `load_params` places them.
            existing_prefix: what the tokens continue; its pending token is replaced.
            padded_tokens: i32[T], of which the first `true_length` count.
            true_length: how many.
            sampling: how the reply is drawn; as the prefix, or else `config.serving`, says.
            seed: of the reply, 0 to MAX_SEED: the same prompt then has the same reply. That of the
                prefix, or else one that no other prompt has.
            choices: what the reply may be, from its first token on, in one row with room for
                `rules.choice_branches`; None: anything.
            logprobs: whether its tokens come with their log-probs (`step_tokens.ScoredToken`).
            max_tokens: behind so many of the reply nothing is guessed, so that no step hands out
                more; None: it ends where the room does.

        Raises:
            ValueError: the prompt is empty, or with its prefix longer than `max_prefill_length`;
                a seed out of range.
        """
        read = 0 if existing_prefix is None else int(existing_prefix.cached[0])
        max_tokens, limit = len(padded_tokens), self.max_prefill_length
        if not 0 < true_length <= max_tokens <= limit or read + true_length > limit:
            raise ValueError(
                f"a prompt of {true_length} tokens padded to {max_tokens}, behind {read} tokens "
                f"read before; the engine takes 1 to {limit} in all"
            )
        if seed is not None and not 0 <= seed <= MAX_SEED:
            raise ValueError(f"seed is {seed}; it must lie between 0 and {MAX_SEED}")
        with self._dispatching:
            room = pages_for(read + max_tokens, self.config.page_size)
            prefix = prompts.with_room(existing_prefix or self._empty_prefix(room), room)
        limit = max(1, self.config.serving.context_tokens + 1 - read - true_length)
        prefix = dataclasses.replace(
            prefix,
            turn_limit=jnp.full((1,), min(limit, max_tokens or limit), jnp.int32),
            scores=prefix.scores._replace(asked=jnp.full((1,), logprobs)),
        )
        if seed is not None:
            prefix = dataclasses.replace(prefix, seed=_named_seed(seed))
        if sampling is not None:
            prefix = dataclasses.replace(prefix, sampling=sampling_rows(sampling, 1))
        return self._read(params, prefix, np.asarray(padded_tokens, np.int32), true_length, choices)

    def _read(
        self,
        params: Params,
        prefix: Prefix,
        tokens: np.ndarray,
        true_length: int,
        choices: Choices | None,
    ) -> Prefix:
        """The prompt piece by piece. What is sampled behind all but the last is forgotten."""
        if len(tokens) > PROMPT_CHUNK:
            tokens = np.pad(tokens, (0, -len(tokens) % PROMPT_CHUNK))
            # Where each piece leaves it, so that one program reads all of them.
            prefix = jax.device_put(prefix, self.get_prefix_destination_sharding())
        branches = self.config.rules.choice_branches
        for first in range(0, true_length, PROMPT_CHUNK):
            piece = tokens[first : first + PROMPT_CHUNK]
            count = min(len(piece), true_length - first)
            if branches:
                prefix = dataclasses.replace(prefix, choices=choices or no_choices(1, branches))
            given = (params, prefix, piece, np.int32(count), self._key_data)
            read = self._reader(*given) if len(tokens) > PROMPT_CHUNK else self._prefill
            with self._dispatching:
                prefix = read(*given)
            if first + len(piece) < true_length:
                # Else steps that are dispatched meanwhile would wait for all pieces.
                jax.block_until_ready(prefix.pending)
        return prefix

    def _reader(self, params: Params, prefix: Prefix, *rest: Any) -> Any:
        """`_prefill` for a piece of a long prompt, compiled for its room.

        Not by its first call, which would have every step wait for the compiler: the next one is
        dispatched only when nobody else dispatches.
        """
        pages = jax.tree.leaves(prefix.cache.layers)[0]
        room = (prefix.cache.num_pages, pages.sharding.is_fully_replicated)
        if room not in self._readers:
            self._readers[room] = self._prefill.lower(params, prefix, *rest).compile()
        return self._readers[room]

    def _empty_prefix(self, pages: int) -> Prefix:
        """No prompt yet, so many pages, and a seed that no other one has, nor is given."""
        self._num_prefills = self._num_prefills % MAX_SEED + 1
        zero = jnp.zeros((1,), jnp.int32)
        config = self.config
        guesses = config.rules.ngram > 0
        return Prefix(
            cache=empty_cache(
                config.model, 1, pages * config.page_size, config.page_size, config.kv_dtype
            ),
            cached=zero,
            pending=zero,
            seed=zero + self._num_prefills,
            sampling=sampling_rows(config.serving.sampling, 1),
            scores=no_scores(1),
            turn_limit=zero,
            tokens=jnp.zeros((1, pages * config.page_size), jnp.int32) if guesses else None,
        )

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Puts a prompt that was read into a slot, as soon as there are pages for it.

        Donates `decode_state`, not `prefix`.
        """
        with self._dispatching:
            self._served.insert(prefix, slot)
        return decode_state

    @property
    def _served(self) -> ServingBlockManager:
        """Who has which page of the state that is served."""
        assert self._room is not None, "there is no state to serve before init_decode_state"
        return self._room

    def put_prompt(
        self, state: DecodeState, prefix: Prefix, slot: int, pages: Sequence[int]
    ) -> DecodeState:
        """Puts a prompt into a slot and into these pages of its row shard. Donates `state`."""
        copies = self.page_copies
        number = prefix.cache.num_pages
        numbers = np.zeros((copies.num_shards, number), np.int32)
        counts = np.zeros(copies.num_shards, np.int32)
        shard = self._served.pages.shard(slot)
        numbers[shard, : len(pages)], counts[shard] = pages, len(pages)
        state = copies.put_row(state, prefix.cache.layers, numbers, counts)
        rows = dataclasses.replace(prefix, cache=None)
        small = self._insert(rows, dataclasses.replace(state, cache=None), slot)
        return dataclasses.replace(small, cache=state.cache)

    def free_resource(self, slot: int) -> None:
        """The slot's request is over, if one was in it: its pages are others'."""
        with self._dispatching:
            if self._room is not None:
                self._room.free(slot)

    def generate(
        self, params: Params, decode_state: DecodeState, *, drafts: bool | None = None
    ) -> tuple[DecodeState, ResultTokens]:
        """The next token of every slot, or tokens where guesses are right.

        Slots that wait for pages have none. `drafts`: whether tokens are guessed; None: as
        `config.serving` says, or the clock. Donates `decode_state`.
        """
        with self._dispatching:
            room = self._served
            state, moving = room.prepare(decode_state)
            program = (room.max_tokens, room.pages.pool)
            chosen = self._drafting.choose(program) if drafts is None else drafts
            is_timed = drafts is None and self._drafting.is_trying(program)
            if is_timed:
                jax.block_until_ready(state.pending)
            start_s = time.perf_counter()
            state, data = self._generate[chosen](params, state, moving, self._key_data)
            tokens = step_tokens(data, room.asleep, room.failed)
            room.note(tokens)
            if is_timed:
                # Only then is a step waited for.
                sampled, seconds = room.settle(), time.perf_counter() - start_s
            else:
                sampled, seconds = 1, 0.0
            if drafts is None:
                self._drafting.note(program, chosen, tokens=sampled, seconds=seconds)
            return state, tokens

    @property
    def step_kinds(self) -> tuple[bool, ...]:
        """Whether steps guess tokens: what `generate` may choose between."""
        guesses = self.config.rules.ngram > 0
        by_the_clock = guesses and self.config.serving.speculation == "auto"
        return (False, True) if by_the_clock else (guesses,)

    def init_decode_state(self) -> DecodeState:
        """Empty slots for serving. One state at a time: the engine knows who has which page."""
        pool, max_tokens = self.serving_pool, self.config.serving.first_context_tokens
        with self._dispatching:
            self._room = ServingBlockManager(self, pool, max_tokens)
            return self._empty_served(max_tokens, pool)

    def grow_served(
        self, state: DecodeState, max_tokens: int, old: Pool, source: np.ndarray | None
    ) -> DecodeState:
        """Returns `repack` of a state for serving, when it is done.

        Raises:
            JaxRuntimeError: there is no memory for it; `state` is as it was.
        """
        return jax.block_until_ready(self.repack(state, max_tokens, old, source))

    @property
    def serving_pool(self) -> Pool:
        """The pages that a state for serving begins with."""
        serving, size = self.config.serving, self.config.page_size
        shards = self.layout.num_row_shards
        pool = dense_pool(shards, self.config.num_slots, serving.context_tokens, size)
        if not serving.cache_tokens:
            return pool
        least = pages_for(serving.first_context_tokens, size)
        pages = max(least, serving.cache_tokens // (shards * size))
        return pool._replace(pages=min(pool.pages, pages))

    def get_prefix_destination_sharding(self) -> Any:
        """Where a prefix made by another engine is to be put before `insert`: on every device."""
        return self.layout.activations("")

    def get_tokenizer(self) -> Any:
        """The vocabulary's facts, for JetStream's server."""
        return tokenizer_parameters()

    def build_tokenizer(self, metadata: Any) -> Any:
        """JetStream's view of our tokenizer."""
        return ServedTokenizer(self._tokenizer, self.config.rules.end_of_turn_ids)

    @property
    def max_concurrent_decodes(self) -> int:
        """How many slots there are."""
        return self.config.num_slots

    @property
    def samples_per_slot(self) -> int:
        """Always 1."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The longest prompt that `prefill` takes, in tokens."""
        return self.config.serving.max_prefill_length

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of the rollout layout."""
        return self.layout.mesh  # pyright: ignore[reportReturnType]

    @property
    def colocated_cpus(self) -> None:
        """None: hosts are not addressed by this engine."""
        return None


def _named_seed(seed: int) -> jax.Array:
    return jnp.full((1,), MAX_SEED + 1 + seed, jnp.int32)
