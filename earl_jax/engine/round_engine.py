# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""RoundEngine: what RL rollouts need of an engine.

One dispatch and one read per round for all slots (`play`), answers appended to live slots,
log-probs and versions written down beside the KV cache.
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
from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.decoding import Decoder
from earl_jax.engine.engine_config import EngineConfig
from earl_jax.engine.page_copies import PageCopies
from earl_jax.engine.pages import NO_SOURCE, Pool
from earl_jax.engine.round_inputs import Report, order_width, unpack_report
from earl_jax.engine.row_copies import RowCopies
from earl_jax.engine.slots import SlotRules
from earl_jax.models.kv_cache import PagedCache, place_pages
from earl_jax.models.parameters import Params, parameter_shardings
from earl_jax.models.quantization import engine_shapes, engine_specs
from earl_jax.sharding.layout import Layout
from earl_jax.sharding.placing import placed_shapes


class RoundEngine:
    """Plays rounds of one model on one rollout layout.

    Slots and experience are split over `data`; heads and vocabulary over `tensor`, experts over
    `expert`, pages of the KV cache and chunks over `context` (page_shares.py). Each data
    shard decodes on its own (`shard_map` over `data`): no collective crosses it, and a shard whose
    slots have all ended their turn stops early whatever the others do.
    """

    def __init__(self, config: EngineConfig, layout: Layout) -> None:
        """Builds the jitted programs; nothing is compiled before its first call.

        Raises:
            ValueError: the slots or rows do not divide over the layout's data axis, or a page over
                its context axis.
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
        context = layout.shape.context
        if config.page_size % context:
            raise ValueError(
                f"config.rollout.page_size is {config.page_size}, which does not divide over "
                f"{layout}; choose a multiple of {context}"
            )
        self.config, self.layout = config, layout
        step_rows = -(-config.step_rows // layout.num_row_shards)
        # With those of its own part of the rows of a decode step.
        self._rules = config.rules._replace(step_rows=step_rows)
        # What is written by hand: an axis of size 1 would leave collectives of nothing.
        self._manual = {*layout.row_axes, *(("context",) if context > 1 else ())}
        self._key_data = jax.random.key_data(jax.random.key(config.seed))
        specs = engine_specs(config.model, config.vocab_size, config.weight_dtype)
        self.parameter_shardings = parameter_shardings(specs, layout)
        self.parameter_shapes = engine_shapes(specs, config.model.compute_dtype)
        self._rows = layout.activations("B")
        self.state_shardings = self._place_state(layout.activations)
        # Whatever a state has beside its cache is cut by rows.
        rows: Any = P(layout.row_axes)
        pages = self._place_state(self._manual_spec).cache.layers
        fields = dict.fromkeys((field.name for field in dataclasses.fields(DecodeState)), rows)
        cache = PagedCache(layers=pages, table=rows)
        self._state_specs = DecodeState(**{**fields, "cache": cache})
        self._build_programs()

    def _place_state(self, place: Callable[[str], Any]) -> DecodeState:
        """What `place` says of each array of a state."""
        shapes = self.state_shapes(1)
        pages = [place_pages(layer, place) for layer in shapes.cache.layers]
        by_rows = jax.tree.map(lambda leaf: place("B"), shapes)
        return dataclasses.replace(by_rows, cache=dataclasses.replace(by_rows.cache, layers=pages))

    def _manual_spec(self, letters: str) -> P:
        """Their placement, as far as it is written by hand."""

        def by_hand(axes: Any) -> Any:
            names = (axes,) if isinstance(axes, str) else axes or ()
            return axes if self._manual.issuperset(names) else None

        return P(*map(by_hand, self.layout.activation_spec(letters)))

    def _build_programs(self) -> None:
        rules, out = self._rules, (self.state_shardings, self._rows)

        def play_with(rules: SlotRules) -> Any:
            return jax.jit(self._decoding(slots.play, rules), donate_argnums=1, out_shardings=out)

        self._play = play_with(rules)
        self._play_plain = play_with(rules._replace(ngram=0)) if rules.ngram else self._play
        # Compiled when the first episode asks, where they are not written down for all.
        scored = rules._replace(model_logprobs=True)
        self._play_scored = {
            drafts: play_with(scored if drafts else scored._replace(ngram=0))
            for drafts in (False, True)
        }
        self._empty = jax.jit(
            self._new_state,
            static_argnums=(0, 1),
            out_shardings=self.state_shardings,
        )
        self._empty_slots = jax.jit(
            lambda max_tokens: dataclasses.replace(self._new_state(max_tokens, None), cache=None),
            static_argnums=0,
            out_shardings=dataclasses.replace(self.state_shardings, cache=None),
        )
        # Not donated: live episodes outlive a lack of memory.
        layers = self._state_specs.cache.layers
        repack = {
            True: self._over_rows(decode_state.repack, (layers, P(self.layout.row_axes)), layers),
            False: decode_state.repack,
        }
        # By whether no page goes from one row shard to another.
        self._repack = {
            is_local: jax.jit(function, out_shardings=self.state_shardings.cache.layers)
            for is_local, function in repack.items()
        }
        self._widen = jax.jit(
            decode_state.widen, static_argnums=1, out_shardings=self.state_shardings.experience
        )

    def _decoding(self, function: Any, rules: SlotRules) -> Any:
        """`slots.play` or `slots.generate` on every row shard: of params, state, orders, key.

        Manual over rows, and pages; the axes within them stay automatic and follow the weights'
        placement.
        """
        model, layout = self.config.model, self.layout

        def on_shard(params: Params, state: DecodeState, inputs: jax.Array, key_data: jax.Array):
            key = jax.random.wrap_key_data(key_data)
            decoder = Decoder(model, rules, params, key, _replicate, layout)
            state = _in_parts(state, layout.shape.context)
            state, packed = function(decoder, state, inputs, jax.lax.axis_index(layout.row_axes))
            return _in_parts(state, 1), packed

        rows, state = P(layout.row_axes), self._state_specs
        return self._over_rows(on_shard, (P(), state, rows, P()), (state, rows))

    def _over_rows(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self._manual,
            check_vma=False,
        )

    def state_shapes(self, max_tokens: int, pool: Pool | None = None) -> DecodeState:
        """A DecodeState with room for `places` tokens an episode, as shapes for tracing."""
        return jax.eval_shape(lambda: self._new_state(max_tokens, pool))

    def _new_state(
        self, max_tokens: int, pool: Pool | None, rows: int | None = None
    ) -> DecodeState:
        config = self.config
        return decode_state.empty_state(
            config.model,
            config.num_slots,
            rows or config.num_rows,
            max_tokens,
            page_size=config.page_size,
            pool=pool,
            kv_dtype=config.kv_dtype,
            model_logprobs=config.rules.model_logprobs,
            choice_branches=config.rules.choice_branches,
        )

    def empty_state(self, max_tokens: int, pool: Pool | None = None) -> DecodeState:
        """Empty slots with room for `places` tokens an episode, made on the devices.

        Without a `pool` of pages every slot has its own; with one, `give_pages` says who has which.
        """
        return self._empty(max_tokens, pool)

    def renew(self, state: DecodeState) -> DecodeState:
        """Empty slots and rows over the caches of `state`, which is good for nothing else then.

        Its experience stays as it is.
        """
        slots = self._empty_slots(state.experience.tokens.shape[1])
        return dataclasses.replace(slots, cache=state.cache)

    def repack(
        self, state: DecodeState, max_tokens: int, old: Pool, source: np.ndarray | None = None
    ) -> DecodeState:
        """Returns the state with room for `places` tokens an episode, and other pages.

        `source` is that of `PageTable.regroup` from the pool `old`; None: the pages stay as they
        are. The number of this layout's row shards should divide that of both pools: then no page
        leaves its row shard. Slots have the pages that `give_pages` says from then on. Donates
        nothing.
        """
        experience, layers = state.experience, state.cache.layers
        if experience.tokens.shape[1] != max_tokens:
            experience = self._widen(experience, max_tokens)
        if source is not None:
            is_local = self._is_local(old.shards, len(source))
            placed = jax.device_put(self._local_source(old, source), self._rows)
            layers = self._repack[is_local](layers, placed)
        return dataclasses.replace(
            state, experience=experience, cache=dataclasses.replace(state.cache, layers=layers)
        )

    def _is_local(self, *shards: int) -> bool:
        """Whether no row shard of this layout has a part of a shard of these numbers of shards."""
        return not any(number % self.layout.num_row_shards for number in shards)

    def _local_source(self, old: Pool, source: np.ndarray) -> np.ndarray:
        """i32[Z]: numbers within a row shard of this layout, if no page leaves its own."""
        if not self._is_local(old.shards, len(source)):
            return source.reshape(-1)
        parts = self.layout.num_row_shards
        first = np.arange(parts)[:, None] * (old.total // parts)
        apart = source.reshape(parts, -1)
        return np.where(apart == NO_SOURCE, NO_SOURCE, apart - first).astype(np.int32).reshape(-1)

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

    @functools.cached_property
    def row_copies(self) -> RowCopies:
        """The programs that bring rows of experience home."""
        return RowCopies(self.layout, self.state_shardings.experience, self.config.num_slots)

    def play(
        self,
        params: Params,
        state: DecodeState,
        inputs: np.ndarray,
        *,
        drafts: bool = True,
        model_logprobs: bool = False,
    ) -> tuple[DecodeState, Report]:
        """One round (`slots.play`). The one door: one array goes in, one comes out.

        Donates `state`. Without `drafts` nothing is guessed, where the rules say that it may be.
        With `model_logprobs` these are in the report, whatever the rules say.
        """
        rules = self._rules
        play = self._play if drafts else self._play_plain
        if model_logprobs and not rules.model_logprobs:
            play, rules = self._play_scored[drafts], rules._replace(model_logprobs=True)
        sent = jax.device_put(inputs, self._rows)
        state, packed = play(params, state, sent, self._key_data)
        # Reading what a failed round left ends the process (jaxlib 0.10.2); waiting for it raises.
        jax.block_until_ready(packed)
        return state, unpack_report(
            np.asarray(packed),
            model_logprobs=rules.model_logprobs,
            drafts=rules.draft > 0,
            steps=self.step_rows < self._slots_a_shard,
        )

    @property
    def _slots_a_shard(self) -> int:
        return self.config.num_slots // self.layout.num_row_shards

    @property
    def step_rows(self) -> int:
        """Rows of a decode step on one row shard."""
        return min(self._rules.step_rows or self._slots_a_shard, self._slots_a_shard)

    def lower_repack(self, max_tokens: int, old: Pool, room: int, new: Pool) -> list[Any]:
        """The programs of `repack` from `places` to `room`, lowered from shapes alone."""
        state, lowered = self._placed_shapes(max_tokens, old), []
        if room != max_tokens:
            lowered.append(self._widen.lower(state.experience, room))
        if new != old:
            source = jax.ShapeDtypeStruct((new.total,), jnp.int32, sharding=self._rows)
            program = self._repack[self._is_local(old.shards, new.shards)]
            lowered.append(program.lower(state.cache.layers, source))
        return lowered

    def _placed_shapes(self, max_tokens: int, pool: Pool | None) -> DecodeState:
        return placed_shapes(self.state_shapes(max_tokens, pool), self.state_shardings)

    def lower_play(self, max_tokens: int, pool: Pool | None = None) -> Any:
        """The round's program lowered from shapes alone, for memory analysis and tests."""
        width = order_width(self.config.chunk_size, self.config.rules.choice_branches)
        return self._play.lower(
            placed_shapes(self.parameter_shapes, self.parameter_shardings),
            self._placed_shapes(max_tokens, pool),
            jax.ShapeDtypeStruct((self.config.num_slots, width), jnp.int32, sharding=self._rows),
            jax.ShapeDtypeStruct(self._key_data.shape, self._key_data.dtype),
        )


def _in_parts(state: DecodeState, parts: int) -> DecodeState:
    """The same arrays, as so many parts of pages: on one device, or as the whole that they are."""
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, parts=parts))


def _replicate(logits_BV: jax.Array) -> jax.Array:
    """All logits on every device of their row shard.

    Else XLA cuts the sampling over `tensor`, with collective-permutes. These wait for every device
    of the mesh: shards that decode unequally long would hang. One all-gather within the shard is
    also fewer collectives (16 without it).
    """
    return jax.lax.with_sharding_constraint(logits_BV, P(*[None] * logits_BV.ndim))
