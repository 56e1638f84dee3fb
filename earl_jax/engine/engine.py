# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An engine: the programs of one model on one rollout layout, over slots with a paged KV cache.

A rollout plays rounds: one dispatch and one read a round for all slots (`Engine.play`), with
answers appended to live slots, and log-probs and versions recorded beside the KV cache. A session
is an engine with weights and the state of its slots.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from earl_jax.engine import decode_state, slots
from earl_jax.engine.config import (
    EngineConfig,
    SlotRules,
    append_tokens_for,
    tile_width_for,
)
from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.decoding import Decoder
from earl_jax.engine.page_copies import PageCopies
from earl_jax.engine.pages import NO_SOURCE, PageTable, Pool
from earl_jax.engine.round_inputs import (
    RoundInputs,
    RoundOutputs,
    inputs_width,
    pack_inputs,
    unpack_outputs,
)
from earl_jax.engine.row_copies import RowCopies
from earl_jax.models.attention.delta_rule import place_linear_state
from earl_jax.models.attention.kernels import choose_pages_kernel
from earl_jax.models.engine_parameters import engine_shapes, engine_specs
from earl_jax.models.kv_cache import PagedCache, place_pages, writes_whole_pages
from earl_jax.models.parameters import Params, parameter_shardings
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import Layout
from earl_jax.sharding.placing import place, placed_shapes
from earl_jax.sharding.reshard import reshard


class Engine:
    """One model on one rollout layout: makes states of slots, and plays rounds on them.

    Slots and experience are split over `data`; heads and vocabulary over `tensor`, experts over
    `expert`, pages of the KV cache and chunks over `context` (page_shares.py). Each data shard
    decodes on its own (`shard_map` over `data`): no collective crosses it, and a shard whose slots
    have all ended their turn stops early whatever the others do.
    """

    def __init__(self, config: EngineConfig, layout: Layout) -> None:
        """Builds the jitted programs; nothing is compiled before its first call.

        Raises:
            ValueError: the slots or rows do not divide over the layout's data axis, or a page over
                its context axis; or the attention that was asked for does not run there.
        """
        _check_divides(config, layout)
        _check_states(config, layout)
        choose_pages_kernel(config.rules.attention, layout, config.model, config.page_size)
        self.config, self.layout = config, layout
        tile_width = tile_width_for(
            config.rules.tile_width,
            config.page_size,
            layout.shape.context,
            whole_pages=writes_whole_pages(layout.platform),
        )
        self._rules = config.rules._replace(
            tile_width=tile_width, append_tokens=append_tokens_for(layout.platform, config.model)
        )
        # The manual axes: one of size 1 would leave collectives of nothing.
        cut_pages = layout.shape.context > 1
        self._manual = {*layout.row_axes, *(("context",) if cut_pages else ())}
        specs = engine_specs(config.model, config.vocab_size, config.weight_dtype)
        self.parameter_shardings = parameter_shardings(specs, layout)
        self.parameter_shapes = engine_shapes(specs, config.model.compute_dtype)
        self.row_sharding = layout.activations("B")
        # Every process reads the outputs of all slots.
        self._read_sharding = layout.activations("") if layout.spans_processes else None
        self.state_shardings = self._place_state(layout.activations)
        # All of a state but its cache is cut by rows.
        rows: Any = P(layout.row_axes)
        pages = self._place_state(self.manual_spec).cache.pools
        fields = dict.fromkeys((field.name for field in dataclasses.fields(DecodeState)), rows)
        cache = PagedCache(pools=pages, table=rows, states=rows)
        self.state_specs = DecodeState(**{**fields, "cache": cache})
        self._build_programs()

    @functools.cached_property
    def key_data(self) -> jax.Array:
        """The random key of all samples, as data; not made to compile for devices of elsewhere."""
        key_data = jax.random.key_data(jax.random.key(self.config.seed))
        if not self.layout.spans_processes:
            return key_data
        return place(np.asarray(key_data), self.layout.activations(""))

    def _place_state(self, place: Callable[[str], Any]) -> DecodeState:
        """Returns `place` of the axes of each array of a state."""
        shapes = self.state_shapes(1)
        pages = [place_pages(layer, place) for layer in shapes.cache.pools]
        states = [place_linear_state(place) for _ in shapes.cache.states]
        by_rows = jax.tree.map(lambda leaf: place("B"), shapes)
        cache = dataclasses.replace(by_rows.cache, pools=pages, states=states)
        return dataclasses.replace(by_rows, cache=cache)

    def manual_spec(self, letters: str) -> P:
        """Returns the part of an array's partition spec that is over the manual axes."""

        def by_hand(axes: Any) -> Any:
            names = (axes,) if isinstance(axes, str) else axes or ()
            return axes if self._manual.issuperset(names) else None

        return P(*map(by_hand, self.layout.activation_spec(letters)))

    def _build_programs(self) -> None:
        def play_with(rules: SlotRules) -> Any:
            program = self.decoding_program(slots.play, rules)
            out = (self.state_shardings, self._read_sharding or self.row_sharding)
            return jax.jit(program, donate_argnums=1, out_shardings=out)

        self._play = play_with(self._rules)
        # By rules that have what single episodes want beside: compiled for the first of them.
        self._play_with = functools.cache(play_with)
        self._empty = jax.jit(
            self.new_state,
            static_argnums=(0, 1),
            out_shardings=self.state_shardings,
        )
        # Not donated: live episodes survive a lack of memory.
        pools = self.state_specs.cache.pools
        repack = {
            True: self.over_rows(decode_state.repack, (pools, P(self.layout.row_axes)), pools),
            False: decode_state.repack,
        }
        # By whether no page goes from one row shard to another.
        self._repack = {
            is_local: jax.jit(function, out_shardings=self.state_shardings.cache.pools)
            for is_local, function in repack.items()
        }
        self._widen = jax.jit(
            decode_state.widen, static_argnums=1, out_shardings=self.state_shardings.experience
        )

    def decoding_program(self, function: Any, rules: SlotRules) -> Any:
        """Returns a step such as `slots.play` on every row shard: of params, state, inputs, key.

        `function` takes a Decoder, the shard's state and inputs, and the shard's number. The
        program is manual over rows and pages; the other axes stay automatic and follow the weights'
        placement.
        """
        model, layout = self.config.model, self.layout

        def on_shard(params: Params, state: DecodeState, inputs: jax.Array, key_data: jax.Array):
            key = jax.random.wrap_key_data(key_data)
            decoder = Decoder(model, rules, params, key, _replicate, layout)
            state = _in_parts(state, layout.shape.context)
            state, packed = function(decoder, state, inputs, jax.lax.axis_index(layout.row_axes))
            return _in_parts(state, 1), packed

        rows, state = P(layout.row_axes), self.state_specs
        return self.over_rows(on_shard, (P(), state, rows, P()), (state, rows))

    def over_rows(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """Returns `function` mapped over the row shards, and over `context`."""
        return jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self.layout.by_hand(self._manual),
            check_vma=False,
        )

    def load_params(self, params: Params) -> Params:
        """Moves weights, such as `publish` makes, to this engine's placement on the devices."""
        return reshard(params, self.parameter_shardings)

    def state_shapes(self, max_tokens: int, pool: Pool | None = None) -> DecodeState:
        """Returns a DecodeState for `max_tokens` tokens an episode, as shapes for tracing."""
        return jax.eval_shape(lambda: self.new_state(max_tokens, pool))

    def new_state(self, max_tokens: int, pool: Pool | None) -> DecodeState:
        """Returns an empty state; traceable."""
        config = self.config
        return decode_state.empty_state(
            config.model,
            config.num_slots,
            config.num_rows,
            max_tokens,
            page_size=config.page_size,
            pool=pool,
            kv_dtype=config.kv_dtype,
            model_logprobs=config.rules.model_logprobs,
            choice_branches=config.rules.choice_branches,
            choice_width=config.rules.choice_width,
        )

    def empty_state(self, max_tokens: int, pool: Pool | None = None) -> DecodeState:
        """Returns empty slots for `max_tokens` tokens an episode, made on the devices.

        Without a `pool` of pages every slot has its own; with one, `give_pages` assigns them.
        """
        return self._empty(max_tokens, pool)

    def repack(
        self, state: DecodeState, max_tokens: int, old: Pool, source: np.ndarray | None = None
    ) -> DecodeState:
        """Returns the state for `max_tokens` tokens an episode, and with other pages.

        `source` is that of `PageTable.regroup` from the pool `old`; None: the pages stay as they
        are. The number of this layout's row shards should divide that of both pools: then no page
        leaves its row shard. The table of pages is that of the next `give_pages`. Donates nothing.
        """
        experience, pools = state.experience, state.cache.pools
        if experience.tokens.shape[1] != max_tokens:
            experience = self._widen(experience, max_tokens)
        if source is not None:
            is_local = self._is_local(old.shards, len(source))
            placed = place(self._local_source(old, source), self.row_sharding)
            pools = self._repack[is_local](pools, placed)
        return dataclasses.replace(
            state, experience=experience, cache=dataclasses.replace(state.cache, pools=pools)
        )

    def _is_local(self, *shards: int) -> bool:
        """Returns whether this layout's row shards divide pools of these numbers of shards."""
        return not any(number % self.layout.num_row_shards for number in shards)

    def _local_source(self, old: Pool, source: np.ndarray) -> np.ndarray:
        """Returns `source` i32[Z] by numbers within a row shard, if no page leaves its own."""
        if not self._is_local(old.shards, len(source)):
            return source.reshape(-1)
        parts = self.layout.num_row_shards
        first = np.arange(parts)[:, None] * (old.total // parts)
        apart = source.reshape(parts, -1)
        return np.where(apart == NO_SOURCE, NO_SOURCE, apart - first).astype(np.int32).reshape(-1)

    def give_pages(self, state: DecodeState, table: np.ndarray) -> DecodeState:
        """Returns the state in which slots have the pages of `table` i32[num_slots, G, Y]."""
        placed = place(table, self.row_sharding)
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, table=placed))

    @functools.cached_property
    def page_copies(self) -> PageCopies:
        """The programs that copy pages out of the pools, and back."""
        return PageCopies(self.layout, self.state_shardings.cache.pools, self.config.page_rule)

    @functools.cached_property
    def row_copies(self) -> RowCopies:
        """The programs that copy rows of experience between row shards."""
        return RowCopies(self.layout, self.state_shardings.experience, self.config.num_slots)

    def play(
        self,
        params: Params,
        state: DecodeState,
        inputs: RoundInputs,
        *,
        model_logprobs: bool = False,
        truncates: bool = False,
        wait: Callable[[Any], Any] = jax.block_until_ready,
    ) -> tuple[DecodeState, RoundOutputs]:
        """Plays one round (`slots.play`): one array goes to the devices, one comes back.

        Donates `state`. With `model_logprobs` the outputs have these even if the rules record none,
        and with `truncates` slots may truncate even if the rules exclude it. `wait` waits for the
        outputs. On a mesh of several processes each of them calls this alike.
        """
        rules = self._rules._replace(
            model_logprobs=model_logprobs or self._rules.model_logprobs,
            truncates=truncates or self._rules.truncates,
        )
        columns = pack_inputs(inputs, self.config.page_rule.num_groups)
        sent = place(columns, self.row_sharding)
        play = self._play if rules == self._rules else self._play_with(rules)
        state, packed = play(params, state, sent, self.key_data)
        # Reading what a failed round left ends the process (jaxlib 0.10.2); waiting for it raises.
        wait(packed)
        return state, unpack_outputs(
            np.asarray(packed),
            model_logprobs=rules.model_logprobs,
            drafts=rules.draft > 0,
        )

    @property
    def tile_width(self) -> int:
        """Tokens of a tile in which chunks are appended."""
        return self._rules.tile_width

    @property
    def append_budget(self) -> int:
        """Tokens that a row shard appends in about the time of a round's decode steps.

        A pass of `SlotRules.append_tokens` takes about as long as a step, where contexts are short:
        on chips both read the weights once, and on a CPU both take 6 ms in benchmarks/appending.md.
        """
        return self._rules.burst * self._rules.append_tokens

    def lower_play(self, max_tokens: int, pool: Pool | None = None) -> Any:
        """Returns a round's program lowered from shapes alone, for memory analysis and tests."""
        config = self.config
        width = inputs_width(
            config.chunk_size, config.page_rule.num_groups, config.rules.choice_branches
        )
        return self._play.lower(
            placed_shapes(self.parameter_shapes, self.parameter_shardings),
            placed_shapes(self.state_shapes(max_tokens, pool), self.state_shardings),
            jax.ShapeDtypeStruct(
                (self.config.num_slots, width), jnp.int32, sharding=self.row_sharding
            ),
            jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Weights on a rollout layout, and their version: the number of RL steps that made them."""

    params: Params
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """An engine, the policy on its layout, and the state of its slots: where a rollout runs.

    The state has `max_tokens` tokens an episode. `pages` is the host's table of the state's cache,
    whose pool has as many parts as the layout has row shards.
    """

    engine: Engine
    policy: Policy
    state: DecodeState
    max_tokens: int
    pages: PageTable

    def __post_init__(self) -> None:
        """Checks that the pool is cut as the layout is."""
        shards = self.engine.layout.num_row_shards
        assert self.pool.shards == shards, f"{self.pool} on {self.engine.layout}"

    @property
    def pool(self) -> Pool:
        """The pool of pages."""
        return self.pages.pool


def empty_session(engine: Engine, policy: Policy, max_tokens: int, pool: Pool) -> Session:
    """Returns a session with empty slots."""
    config = engine.config
    return Session(
        engine=engine,
        policy=policy,
        state=engine.empty_state(max_tokens, pool),
        max_tokens=max_tokens,
        pages=PageTable(pool, num_slots=config.num_slots, rule=config.page_rule),
    )


def _check_divides(config: EngineConfig, layout: Layout) -> None:
    """Raises ValueError unless slots, rows and pages divide over the layout."""
    shards, context = layout.num_row_shards, layout.shape.context
    for name, number, divisor in (
        ("config.rollout.num_slots", config.num_slots, shards),
        ("config.rollout.episodes_per_step", config.num_rows, shards),
        ("config.rollout.page_size", config.page_size, context),
    ):
        if number % divisor:
            raise InputError(
                f"{name} is {number}, which does not divide over {layout}; choose a multiple of "
                f"{divisor}"
            )


def _check_states(config: EngineConfig, layout: Layout) -> None:
    """Raises ValueError for what layers of linear attention cannot do."""
    assert not (config.model.has_states and config.rules.draft)
    if config.model.has_states and layout.shape.context > 1:
        raise InputError(
            f"the rollout's mesh is {layout}, but this model has layers of linear attention, which "
            "read tokens in their order, so that they are not cut over context; use data, expert "
            "or tensor"
        )


def _in_parts(state: DecodeState, parts: int) -> DecodeState:
    """Returns the state whose pages count as so many parts, 1 outside of the manual program."""
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, parts=parts))


def _replicate(logits_BV: jax.Array) -> jax.Array:
    """Puts all logits on every device of their row shard.

    Else XLA cuts the sampling over `tensor`, with collective-permutes. These wait for every device
    of the mesh: shards that decode unequally long would hang. One all-gather within the shard is
    also fewer collectives (16 without it).
    """
    return jax.lax.with_sharding_constraint(logits_BV, P(*[None] * logits_BV.ndim))
