# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""PolicyEngine: JetStream's `Engine` over our decoder, and the calls that RL rollouts need.

Serving uses prefill / insert / generate, as JetStream's Driver does. Rollouts use `play`: one
dispatch and one read per round for all slots, answers appended to live slots, log-probs and
versions written down beside the KV cache. Both run on the same DecodeState.
"""

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_chunk
from earl_jax.models.kv_cache import PagedCache, empty_cache
from earl_jax.models.parameters import Params, parameter_shardings
from earl_jax.models.quantization import engine_shapes, engine_specs
from earl_jax.rollout import decode_state, slots
from earl_jax.rollout._jetstream import Engine, ResultTokens, ServedTokenizer, tokenizer_parameters
from earl_jax.rollout.choices import Choices, allowed_logits, no_choices, walk
from earl_jax.rollout.config import Sampling
from earl_jax.rollout.decode_state import DecodeState
from earl_jax.rollout.orders import NO_ROW, Report, order_width, unpack_report
from earl_jax.rollout.page_copies import PageCopies
from earl_jax.rollout.pages import Pool, dense_pool, pages_for
from earl_jax.rollout.sampling import SamplingRows, sample, sampling_rows, token_uniforms
from earl_jax.rollout.serving_room import ServingRoom, step_tokens
from earl_jax.rollout.slots import SlotRules
from earl_jax.sharding.layout import Layout
from earl_jax.sharding.reshard import reshard

# A prompt's own seed lies in 1 to MAX_SEED; those that are named begin behind it.
MAX_SEED = 2**30 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """What JetStream's calls are compiled for.

    Prompts of up to `max_prefill_length` tokens (a power of two, from 16: JetStream pads to these);
    `places` for a prompt and its reply; how tokens are drawn for who does not say. The KV cache
    holds `cache_tokens` in all, and one whole context a row shard at least; 0: `places` for every
    slot. Where that is not enough, requests wait for others.
    """

    max_prefill_length: int = 64
    places: int = 128
    cache_tokens: int = 0
    sampling: Sampling = Sampling()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What one engine's programs are compiled for.

    `num_slots` episodes live at once over all devices, and write `num_rows` rows of experience.
    `chunk_size` tokens of a prompt or an answer are appended per slot and round. The KV cache comes
    in pages of `page_size` tokens. `weight_dtype` is "compute", the model's compute type, or "int8"
    (models/quantization.py). `serving` is for JetStream's calls alone.
    """

    model: ModelConfig
    vocab_size: int
    num_slots: int
    num_rows: int
    chunk_size: int
    rules: SlotRules
    seed: int
    page_size: int = 64
    weight_dtype: Literal["compute", "int8"] = "compute"
    kv_dtype: Literal["compute", "int8"] = "compute"
    serving: Serving = Serving()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """A prompt that was read: the cache of one row, its length, and the token sampled behind it.

    That token, and those behind it, are drawn with `seed` by `sampling`, of one row. `choices`, of
    one row too, are what may be said behind the token; None where the engine has no room for any.
    """

    cache: PagedCache
    cached: jax.Array
    pending: jax.Array
    seed: jax.Array
    sampling: SamplingRows
    choices: Choices | None = None


class PolicyEngine(Engine):
    """The engine for one model on one rollout layout.

    Slots and experience are split over `data`; heads and vocabulary over `tensor`, experts over
    `expert`. Each data shard decodes on its own (`shard_map` over `data`): no collective crosses
    it, and a shard whose slots have all ended their turn stops early whatever the others do.
    """

    def __init__(self, config: EngineConfig, layout: Layout, tokenizer: Any = None) -> None:
        """Builds the jitted programs; nothing is compiled before its first call.

        `tokenizer` (transformers) is what JetStream's server asks for; rollouts bring ids.

        Raises:
            ValueError: the slots or rows do not divide over the layout's data axis.
        """
        for name, number in (
            ("num_slots", config.num_slots),
            ("episodes_per_step", config.num_rows),
        ):
            if number % layout.num_row_shards:
                raise ValueError(
                    f"config.rollout.{name} is {number}, which does not divide over {layout}; "
                    f"choose a multiple of {layout.num_row_shards}"
                )
        self.config, self.layout = config, layout
        self._tokenizer = tokenizer
        self._num_prefills = 0
        self._room: ServingRoom | None = None
        # JetStream calls from several threads. Programs that hold collectives must reach all
        # devices in one order.
        self._dispatching = threading.Lock()
        self._key_data = jax.random.key_data(jax.random.key(config.seed))
        specs = engine_specs(config.model, config.vocab_size, config.weight_dtype)
        self.parameter_shardings = parameter_shardings(specs, layout)
        self.parameter_shapes = engine_shapes(specs, config.model.compute_dtype)
        self._rows = layout.activations("B")
        by_rows = jax.tree.map(lambda leaf: self._rows, self.state_shapes(1))
        pages = jax.tree.map(lambda leaf: layout.activations("ZK"), by_rows.cache.layers)
        self.state_shardings = dataclasses.replace(
            by_rows, cache=dataclasses.replace(by_rows.cache, layers=pages)
        )
        self._build_programs()

    def _build_programs(self) -> None:
        config, layout = self.config, self.layout
        model, rules = config.model, config.rules
        row_axes = layout.row_axes

        def replicate(logits_BV: jax.Array) -> jax.Array:
            # Else XLA cuts the sampling over `tensor`, with collective-permutes. These wait for
            # every device of the mesh: shards that decode unequally long would hang. One
            # all-gather within the shard is also fewer collectives (16 without it).
            return jax.lax.with_sharding_constraint(logits_BV, P(*[None] * logits_BV.ndim))

        def generate_shard(
            params: Params, state: DecodeState, awake: jax.Array, key_data: jax.Array
        ):
            key = jax.random.wrap_key_data(key_data)
            shard = jax.lax.axis_index(row_axes)
            return slots.generate_one(
                model, rules, params, state, awake > 0, key, shard, replicate, layout
            )

        def over_rows(function: Any, in_specs: Any, out_specs: Any = P(row_axes)) -> Any:  # noqa: B008
            # Manual over rows; the axes within them stay automatic and follow the weights'
            # placement.
            return jax.shard_map(
                function,
                mesh=layout.mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=set(row_axes),
                check_vma=False,
            )

        out = (self.state_shardings, self._rows)

        def play_with(rules: SlotRules) -> Any:
            def play_shard(params: Params, state: DecodeState, orders: jax.Array, key_data: Any):
                key = jax.random.wrap_key_data(key_data)
                shard = jax.lax.axis_index(row_axes)
                return slots.play(
                    model, rules, params, state, orders, key, shard, replicate, layout
                )

            in_specs = (P(), P(row_axes), P(row_axes), P())
            return jax.jit(over_rows(play_shard, in_specs), donate_argnums=1, out_shardings=out)

        self._play = play_with(rules)
        self._play_plain = play_with(rules._replace(ngram=0)) if rules.ngram else self._play
        self._generate = jax.jit(
            over_rows(generate_shard, (P(), P(row_axes), P(row_axes), P())),
            donate_argnums=1,
            out_shardings=out,
        )
        self._empty = jax.jit(
            self._new_state,
            static_argnums=(0, 1),
            out_shardings=self.state_shardings,
        )
        # Not donated: no buffer that grows can be used again, and JAX warns of each.
        self._grow = jax.jit(
            decode_state.grow, static_argnums=(1, 2, 3), out_shardings=self.state_shardings
        )
        # A prompt is one row: every row shard reads it alike.
        self._prefill = jax.jit(over_rows(functools.partial(_prefill, model, layout), P(), P()))
        self._insert = jax.jit(
            _insert,
            donate_argnums=1,
            out_shardings=dataclasses.replace(self.state_shardings, cache=None),
        )

    # What a rollout calls.

    def state_shapes(self, places: int, pool: Pool | None = None) -> DecodeState:
        """A DecodeState with room for `places` tokens an episode, as shapes for tracing."""
        return jax.eval_shape(lambda: self._new_state(places, pool))

    def _new_state(self, places: int, pool: Pool | None) -> DecodeState:
        config = self.config
        return decode_state.empty_state(
            config.model,
            config.num_slots,
            config.num_rows,
            places,
            page_size=config.page_size,
            pool=pool,
            kv_dtype=config.kv_dtype,
            model_logprobs=config.rules.model_logprobs,
            choice_branches=config.rules.choice_branches,
        )

    def empty_state(self, places: int, pool: Pool | None = None) -> DecodeState:
        """Empty slots with room for `places` tokens an episode, made on the devices.

        Without a `pool` of pages every slot has its own; with one, `give_pages` says who has which.
        """
        return self._empty(places, pool)

    def grow(
        self,
        state: DecodeState,
        places: int,
        old: Pool | None = None,
        new: Pool | None = None,
    ) -> DecodeState:
        """The same state with more room, and more pages (`decode_state.grow`)."""
        return self._grow(state, places, old, new)

    def place_rows(self, numbers: np.ndarray) -> jax.Array:
        """Numbers of slots on their row shards."""
        return jax.device_put(numbers, self._rows)

    def give_pages(self, state: DecodeState, table: np.ndarray) -> DecodeState:
        """The same state in which slots have the pages of `table` i32[num_slots, Y]."""
        placed = jax.device_put(table, self._rows)
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, table=placed))

    @functools.cached_property
    def page_copies(self) -> PageCopies:
        """The programs that copy pages out of the pools, and back."""
        return PageCopies(self.layout, self.state_shardings.cache.layers, self.config.page_size)

    def play(
        self, params: Params, state: DecodeState, orders: np.ndarray, *, drafts: bool = True
    ) -> tuple[DecodeState, Report]:
        """One round (`slots.play`). The one door: one array goes in, one comes out.

        Donates `state`. Without `drafts` nothing is guessed, where the rules say that it may be.
        """
        play, rules = self._play if drafts else self._play_plain, self.config.rules
        sent = jax.device_put(orders, self._rows)
        state, packed = play(params, state, sent, self._key_data)
        # Reading what a failed round left ends the process (jaxlib 0.10.2); waiting for it raises.
        jax.block_until_ready(packed)
        return state, unpack_report(
            np.asarray(packed), model_logprobs=rules.model_logprobs, drafts=rules.draft > 0
        )

    def lower_play(self, places: int, pool: Pool | None = None) -> Any:
        """The round's program lowered from shapes alone, for memory analysis and tests."""

        def placed(shapes: Any, shardings: Any) -> Any:
            return jax.tree.map(
                lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
                shapes,
                shardings,
            )

        width = order_width(self.config.chunk_size, self.config.rules.choice_branches)
        return self._play.lower(
            placed(self.parameter_shapes, self.parameter_shardings),
            placed(self.state_shapes(places, pool), self.state_shardings),
            jax.ShapeDtypeStruct((self.config.num_slots, width), jnp.int32, sharding=self._rows),
            jax.ShapeDtypeStruct(self._key_data.shape, self._key_data.dtype),
        )

    # JetStream's interface.

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

        Raises:
            ValueError: the prompt is empty, or with its prefix longer than `max_prefill_length`;
                a seed out of range.
        """
        read = 0 if existing_prefix is None else int(existing_prefix.cached[0])
        places, limit = len(padded_tokens), self.max_prefill_length
        if not 0 < true_length <= places <= limit or read + true_length > limit:
            raise ValueError(
                f"a prompt of {true_length} tokens in {places} places, behind {read} tokens read "
                f"before; the engine takes 1 to {limit} in all"
            )
        if seed is not None and not 0 <= seed <= MAX_SEED:
            raise ValueError(f"seed is {seed}; it must lie between 0 and {MAX_SEED}")
        with self._dispatching:
            room = pages_for(read + places, self.config.page_size)
            prefix = existing_prefix or self._empty_prefix(room)
            prefix = dataclasses.replace(prefix, cache=_grown(prefix.cache, room))
            if seed is not None:
                prefix = dataclasses.replace(prefix, seed=_named_seed(seed))
            if sampling is not None:
                prefix = dataclasses.replace(prefix, sampling=sampling_rows(sampling, 1))
            if branches := self.config.rules.choice_branches:
                prefix = dataclasses.replace(prefix, choices=choices or no_choices(1, branches))
            return self._prefill(
                params, prefix, jnp.asarray(padded_tokens), true_length, self._key_data
            )

    def _empty_prefix(self, pages: int) -> Prefix:
        """No prompt yet, so many pages, and a seed that no other one has, nor is given."""
        self._num_prefills = self._num_prefills % MAX_SEED + 1
        zero = jnp.zeros((1,), jnp.int32)
        return Prefix(
            cache=empty_cache(
                self.config.model,
                1,
                pages * self.config.page_size,
                self.config.page_size,
                self.config.kv_dtype,
            ),
            cached=zero,
            pending=zero,
            seed=zero + self._num_prefills,
            sampling=sampling_rows(self.config.serving.sampling, 1),
        )

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Puts a prompt that was read into a slot, as soon as there are pages for it.

        Donates `decode_state`, not `prefix`.
        """
        with self._dispatching:
            self._served.insert(prefix, slot)
        return decode_state

    @property
    def _served(self) -> ServingRoom:
        """Who has which page of the state that is served."""
        assert self._room is not None, "there is no state to serve before init_decode_state"
        return self._room

    def put_prompt(
        self, state: DecodeState, prefix: Prefix, slot: int, pages: Sequence[int]
    ) -> DecodeState:
        """The state with a prompt in a slot and in these pages of its lane. Donates `state`."""
        copies = self.page_copies
        number = prefix.cache.num_pages
        numbers = np.zeros((copies.num_shards, number), np.int32)
        counts = np.zeros(copies.num_shards, np.int32)
        # For serving every row shard is a lane.
        lane = self._served.pages.lane(slot)
        numbers[lane, : len(pages)], counts[lane] = pages, len(pages)
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
        self, params: Params, decode_state: DecodeState
    ) -> tuple[DecodeState, ResultTokens]:
        """The next token of every slot, but of those that wait for pages.

        Donates `decode_state`.
        """
        with self._dispatching:
            state, moving = self._served.prepare(decode_state)
            state, data = self._generate(params, state, moving, self._key_data)
            return state, step_tokens(data, self._served.asleep)

    def init_decode_state(self) -> DecodeState:
        """Empty slots for serving. One state at a time: the engine knows who has which page."""
        places, pool = self.config.serving.places, self.serving_pool
        with self._dispatching:
            self._room = ServingRoom(self, pool, places)
            return self.empty_state(places, pool)

    @property
    def serving_pool(self) -> Pool:
        """The pages of a state for serving."""
        serving, size = self.config.serving, self.config.page_size
        lanes = self.layout.num_row_shards
        pool = dense_pool(lanes, self.config.num_slots, serving.places, size)
        if not serving.cache_tokens:
            return pool
        least = pages_for(serving.places, size)
        pages = max(least, serving.cache_tokens // (lanes * size))
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


def _grown(cache: PagedCache, pages: int) -> PagedCache:
    """A row's cache with so many pages at least."""
    more = pages - cache.num_pages
    if more <= 0:
        return cache
    layers = jax.tree.map(
        lambda pool: jnp.pad(pool, [(0, more), *[(0, 0)] * (pool.ndim - 1)]), cache.layers
    )
    return PagedCache(layers=layers, table=jnp.arange(pages, dtype=jnp.int32)[None])


def _named_seed(seed: int) -> jax.Array:
    return jnp.full((1,), MAX_SEED + 1 + seed, jnp.int32)


def _prefill(
    config: ModelConfig,
    layout: Layout,
    params: Params,
    prefix: Prefix,
    tokens_T: jax.Array,
    true_length: jax.Array,
    key_data: jax.Array,
) -> Prefix:
    count = jnp.asarray(true_length, jnp.int32)[None]
    logits_BV, cache = forward_chunk(
        config, params, prefix.cache, tokens_T[None], prefix.cached, count, layout=layout
    )
    cached = prefix.cached + count
    uniform = token_uniforms(jax.random.wrap_key_data(key_data), prefix.seed, cached)
    choices = prefix.choices
    may_BV = logits_BV if choices is None else allowed_logits(logits_BV, choices)
    token, _ = sample(uniform, may_BV, prefix.sampling)
    choices = choices and walk(choices, token, jnp.ones((1,), bool))
    return dataclasses.replace(prefix, cache=cache, cached=cached, pending=token, choices=choices)


def _insert(prefix: Prefix, state: DecodeState, slot: jax.Array) -> DecodeState:
    """The fields of a slot, without caches.

    A select over slots instead of a write at `slot`: no shard has to know where the slot is.
    """
    chosen_B = jnp.arange(state.cached.shape[0]) == slot

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        chosen = chosen_B.reshape(-1, *(1,) * (old.ndim - 1))
        return jnp.where(chosen, new.astype(old.dtype), old)

    return dataclasses.replace(
        state,
        origin=put(state.origin, jnp.zeros((1,), jnp.int32)),
        cached=put(state.cached, prefix.cached),
        pending=put(state.pending, prefix.pending),
        active=put(state.active, jnp.ones((1,), bool)),
        turn=put(state.turn, jnp.ones((1,), jnp.int32)),
        turn_tokens=put(state.turn_tokens, jnp.ones((1,), jnp.int32)),
        seed=put(state.seed, prefix.seed),
        row=put(state.row, jnp.full((1,), NO_ROW)),
        sampling=jax.tree.map(put, state.sampling, prefix.sampling),
        choices=jax.tree.map(put, state.choices, prefix.choices),
    )
