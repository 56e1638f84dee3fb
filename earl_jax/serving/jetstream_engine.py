# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The JetStream adapter: JetStream's `Engine` interface over an engine of ours.

Its calls, prefill / insert / generate, run on the DecodeState of the engine that it holds.
"""

import dataclasses
import functools
import threading
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from earl_jax.engine.choices import Choices, no_choices
from earl_jax.engine.config import Sampling
from earl_jax.engine.decode_state import DecodeState, Scores, no_scores
from earl_jax.engine.engine import Engine
from earl_jax.engine.pages import Pool, dense_pool, pages_for
from earl_jax.engine.sampling import sampling_rows
from earl_jax.models.kv_cache import PagedCache, empty_cache, place_pages
from earl_jax.models.parameters import Params
from earl_jax.serving import _jetstream, prompts
from earl_jax.serving.block_manager import ServingBlockManager
from earl_jax.serving.config import ServingConfig
from earl_jax.serving.prompts import Prefix
from earl_jax.serving.step_tokens import StepTokens, decode_step, step_tokens
from earl_jax.settings.errors import InputError

# The largest seed of a request; seeds of prompts without one lie in 1 to MAX_SEED, and seeds that a
# request gives are moved behind these.
MAX_SEED = 2**30 - 1
# Longer prompts are read in pieces of so many tokens, between which other requests are decoded.
PROMPT_CHUNK = 1024


class JetStreamEngine(_jetstream.Engine):
    """One engine as JetStream's orchestrator uses it: prompts, slots, and steps of one token."""

    def __init__(self, engine: Engine, serving: ServingConfig, tokenizer: Any = None) -> None:
        """Builds the jitted programs; nothing is compiled before its first call.

        `tokenizer` (transformers) is returned to JetStream's server by `build_tokenizer`.
        """
        self.engine, self.serving = engine, serving
        self._tokenizer = tokenizer
        self._num_prefills = 0
        # By number of pages, and whether these are whole on each device: see `_reader`.
        self._readers: dict[Hashable, Any] = {}
        self._manager: ServingBlockManager | None = None
        # JetStream calls from several threads. Programs that hold collectives must reach all
        # devices in one order.
        self._dispatching = threading.Lock()
        self._build_programs()

    def _build_programs(self) -> None:
        engine, rows = self.engine, self.engine.row_sharding
        scores = Scores(wanted=rows, logprob=rows, model_logprob=rows)
        served = dataclasses.replace(engine.state_shardings, scores=scores)
        self._generate = jax.jit(
            engine.decoding_program(decode_step, engine.config.rules),
            donate_argnums=1,
            out_shardings=(served, rows),
        )
        # A prompt is one row, which every row shard reads alike.
        prefix = self._prefix_specs
        self._prefill = jax.jit(
            engine.over_rows(
                functools.partial(
                    prompts.read,
                    engine.config.model,
                    engine.layout,
                    attention=engine.config.rules.attention,
                ),
                (P(), prefix, P(), P(), P()),
                prefix,
            )
        )
        self._insert = jax.jit(
            prompts.put,
            donate_argnums=1,
            out_shardings=dataclasses.replace(served, cache=None),
        )
        self._empty_state = jax.jit(self._new_state, static_argnums=(0, 1), out_shardings=served)

    def _new_state(self, max_tokens: int, pool: Pool) -> DecodeState:
        """Returns empty slots; each has a row for its ids where tokens are drafted from them."""
        engine = self.engine
        slots = engine.config.num_slots
        rows = slots if engine.config.rules.draft else engine.layout.num_row_shards
        state = engine.new_state(max_tokens, pool, rows)
        return dataclasses.replace(state, scores=no_scores(slots))

    @property
    def _prefix_specs(self) -> Any:
        """The partition specs of a Prefix: its pages are cut over `context` as the slots' are."""
        pages = [
            place_pages(layer, lambda letters: self.engine.manual_spec(letters.replace("Z", ".")))
            for layer in self.engine.state_specs.cache.layers
        ]
        whole: Any = P()
        fields = dict.fromkeys((field.name for field in dataclasses.fields(Prefix)), whole)
        return Prefix(**{**fields, "cache": PagedCache(layers=pages, table=whole)})

    def load_params(self, params: Params) -> Params:
        """Moves weights to the engine's placement on the devices."""
        return self.engine.load_params(params)

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
            existing_prefix: a prompt that the tokens continue; its pending token is replaced.
            padded_tokens: i32[T], of which the first `true_length` count.
            true_length: the number of tokens.
            sampling: of the reply; None: that of the prefix, or else of `ServingConfig`.
            seed: of the reply, 0 to MAX_SEED: the same prompt then has the same reply. None: that
                of the prefix, or else one that no other prompt has.
            choices: the replies to which this one is restricted, from its first token on, in one
                row of `rules.choice_branches` branches; None: anything.
            logprobs: whether its tokens come with their log-probs (`step_tokens.ScoredToken`).
            max_tokens: of the reply; nothing is drafted behind them, so that no step returns more.
                None: the reply ends with the context.

        Raises:
            ValueError: the prompt is empty, or with its prefix longer than `max_prefill_length`;
                a seed out of range.
        """
        read = 0 if existing_prefix is None else int(existing_prefix.cached[0])
        padded, longest = len(padded_tokens), self.max_prefill_length
        if not 0 < true_length <= padded <= longest or read + true_length > longest:
            raise InputError(
                f"a prompt of {true_length} tokens padded to {padded}, behind {read} tokens "
                f"read before; the engine takes 1 to {longest} in all"
            )
        if seed is not None and not 0 <= seed <= MAX_SEED:
            raise InputError(f"seed is {seed}; it must lie between 0 and {MAX_SEED}")
        with self._dispatching:
            pages = pages_for(read + padded, self.engine.config.page_size)
            prefix = prompts.with_pages(existing_prefix or self._empty_prefix(pages), pages)
        limit = max(1, self.serving.context_tokens + 1 - read - true_length)
        prefix = dataclasses.replace(
            prefix,
            turn_limit=jnp.full((1,), min(limit, max_tokens or limit), jnp.int32),
            scores=prefix.scores._replace(wanted=jnp.full((1,), logprobs)),
        )
        if seed is not None:
            prefix = dataclasses.replace(prefix, seed=_requested_seed(seed))
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
        """Reads the prompt piece by piece; tokens sampled behind all but the last are dropped."""
        if len(tokens) > PROMPT_CHUNK:
            tokens = np.pad(tokens, (0, -len(tokens) % PROMPT_CHUNK))
            # The placement of each piece's result, so that one program reads all of them.
            prefix = jax.device_put(prefix, self.get_prefix_destination_sharding())
        branches = self.engine.config.rules.choice_branches
        for first in range(0, true_length, PROMPT_CHUNK):
            piece = tokens[first : first + PROMPT_CHUNK]
            count = min(len(piece), true_length - first)
            if branches:
                prefix = dataclasses.replace(prefix, choices=choices or no_choices(1, branches))
            given = (params, prefix, piece, np.int32(count), self.engine.key_data)
            read = self._reader(*given) if len(tokens) > PROMPT_CHUNK else self._prefill
            with self._dispatching:
                prefix = read(*given)
            if first + len(piece) < true_length:
                # Else steps that are dispatched meanwhile would wait for all pieces.
                jax.block_until_ready(prefix.pending)
        return prefix

    def _reader(self, params: Params, prefix: Prefix, *rest: Any) -> Any:
        """Returns `_prefill` for a piece of a long prompt, compiled for its number of pages.

        It is compiled here and not by its first call, which would have every step wait for the
        compiler: only one thread dispatches at a time.
        """
        pages = jax.tree.leaves(prefix.cache.layers)[0]
        shape = (prefix.cache.num_pages, pages.sharding.is_fully_replicated)
        if shape not in self._readers:
            self._readers[shape] = self._prefill.lower(params, prefix, *rest).compile()
        return self._readers[shape]

    def _empty_prefix(self, pages: int) -> Prefix:
        """Returns an empty prompt of so many pages, with a seed that no other prompt has."""
        self._num_prefills = self._num_prefills % MAX_SEED + 1
        zero = jnp.zeros((1,), jnp.int32)
        config = self.engine.config
        tokens = pages * config.page_size
        return Prefix(
            cache=empty_cache(config.model, 1, tokens, config.page_size, config.kv_dtype),
            cached=zero,
            pending=zero,
            seed=zero + self._num_prefills,
            sampling=sampling_rows(self.serving.sampling, 1),
            scores=no_scores(1),
            turn_limit=zero,
            tokens=jnp.zeros((1, tokens), jnp.int32) if config.rules.draft else None,
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
        """The block manager of the state that is served."""
        assert self._manager is not None, "there is no state to serve before init_decode_state"
        return self._manager

    def _put_prompt(
        self, state: DecodeState, prefix: Prefix, slot: int, pages: Sequence[int]
    ) -> DecodeState:
        """Puts a prompt into a slot and into these pages of its row shard. Donates `state`."""
        copies = self.engine.page_copies
        numbers = np.zeros((copies.num_shards, prefix.cache.num_pages), np.int32)
        counts = np.zeros(copies.num_shards, np.int32)
        shard = self._served.pages.shard(slot)
        numbers[shard, : len(pages)], counts[shard] = pages, len(pages)
        state = copies.put_row(state, prefix.cache.layers, numbers, counts)
        rows = dataclasses.replace(prefix, cache=None)
        small = self._insert(rows, dataclasses.replace(state, cache=None), slot)
        return dataclasses.replace(small, cache=state.cache)

    def free_resource(self, slot: int) -> None:
        """Frees the pages of a slot whose request, if it had one, is over."""
        with self._dispatching:
            if self._manager is not None:
                self._manager.free(slot)

    def generate(self, params: Params, decode_state: DecodeState) -> tuple[DecodeState, StepTokens]:
        """Returns the next token of every slot, or several where drafts were accepted.

        Slots that wait for pages have none. Donates `decode_state`.
        """
        with self._dispatching:
            manager = self._served
            state, moving = manager.prepare(decode_state)
            state, data = self._generate(params, state, moving, self.engine.key_data)
            tokens = step_tokens(data, manager.asleep, manager.failed)
            manager.note(tokens)
            return state, tokens

    def init_decode_state(self) -> DecodeState:
        """Returns empty slots. One state is served at a time: its pages are tracked here."""
        pool, max_tokens = self.first_pool, self.serving.first_slot_tokens
        with self._dispatching:
            self._manager = ServingBlockManager(
                self.engine,
                pool,
                max_tokens,
                most_tokens=self.serving.context_tokens,
                put_prompt=self._put_prompt,
            )
            return self._empty_state(max_tokens, pool)

    @property
    def first_pool(self) -> Pool:
        """The pages that a state for serving begins with."""
        serving, config = self.serving, self.engine.config
        shards = self.engine.layout.num_row_shards
        pool = dense_pool(shards, config.num_slots, serving.context_tokens, config.page_size)
        if not serving.cache_tokens:
            return pool
        least = pages_for(serving.first_slot_tokens, config.page_size)
        pages = max(least, serving.cache_tokens // (shards * config.page_size))
        return pool._replace(pages=min(pool.pages, pages))

    def get_prefix_destination_sharding(self) -> Any:
        """Returns the sharding of another engine's prefix before `insert`: replicated."""
        return self.engine.layout.activations("")

    def get_tokenizer(self) -> Any:
        """Returns the vocabulary's facts, for JetStream's server."""
        return _jetstream.tokenizer_parameters()

    def build_tokenizer(self, metadata: Any) -> Any:
        """Returns JetStream's view of our tokenizer."""
        rules = self.engine.config.rules
        return _jetstream.ServedTokenizer(self._tokenizer, rules.end_of_turn_ids)

    @property
    def max_concurrent_decodes(self) -> int:
        """The number of slots."""
        return self.engine.config.num_slots

    @property
    def samples_per_slot(self) -> int:
        """Always 1."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The longest prompt that `prefill` takes, in tokens."""
        return self.serving.max_prefill_length

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of the rollout layout."""
        return self.engine.layout.mesh  # pyright: ignore[reportReturnType]

    @property
    def colocated_cpus(self) -> None:
        """None: this engine addresses no hosts."""
        return None


def _requested_seed(seed: int) -> jax.Array:
    return jnp.full((1,), MAX_SEED + 1 + seed, jnp.int32)
