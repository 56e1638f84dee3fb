# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The rounds of an engine on the devices: pure functions over a DecodeState.

A slot holds one live episode: its KV cache, and the row of the experience buffers that it writes.
The last token of a slot in a turn is *pending*: recorded, but not yet in the cache. It goes in at
the head of whatever comes next (the next decode step, or the environment's answer), so a turn's
last token costs no forward pass of its own, and a prompt of which all other tokens are shared costs
one row of a decode step.

`play` is one round: it appends the chunk that the host gives to each slot (appending.py), then
decodes until every slot has ended its turn or had `burst` forward passes (decoding.py), each of
which samples a token, or with drafts some. The inputs of a round travel as one array, and so do its
outputs (round_inputs.py).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.engine.appending import append_chunks
from earl_jax.engine.config import SlotRules
from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.decoding import (
    Decoder,
    Sampled,
    decode_drafted,
    decode_plain,
    nothing_sampled,
    rows_or_drop,
)
from earl_jax.engine.pages import NO_PAGE
from earl_jax.engine.round_inputs import RoundInputs, pack_outputs, unpack_inputs
from earl_jax.engine.rows import NO_ROW
from earl_jax.trajectory import Experience


def play(
    decoder: Decoder, state: DecodeState, packed_inputs: jax.Array, shard: jax.Array | int
) -> tuple[DecodeState, jax.Array]:
    """Plays one round of data shard number `shard`, of equal ones.

    Returns:
        The new state, and the packed RoundOutputs.
    """
    rules = decoder.rules
    inputs = unpack_inputs(packed_inputs, state.cache.table.shape[1], rules.choice_branches)
    first_row = shard * state.experience.tokens.shape[0]
    state = shift_rows_and_pages(state, -first_row, -shard * state.cache.num_pages)
    state = _discard(rules, state, inputs)
    state = _restart(_take_over(state, inputs, shard), inputs, first_row)
    slots = state.cached.shape[0]
    state = _append(decoder, state, inputs)
    sampled = nothing_sampled(slots, rules.round_tokens, model_logprobs=rules.model_logprobs)
    state, sampled = _decode(decoder, state, sampled)
    outputs = pack_outputs(
        sampled.tokens,
        sampled.logprobs,
        sampled.count,
        state.active,
        sampled.model_logprobs,
        (sampled.passes, sampled.drafted) if rules.draft else None,
    )
    return shift_rows_and_pages(state, first_row, shard * state.cache.num_pages), outputs


def _decode(decoder: Decoder, state: DecodeState, sampled: Sampled) -> tuple[DecodeState, Sampled]:
    """Runs the decode steps of a round. Returns the state and the sampled tokens."""
    rules = decoder.rules
    step = functools.partial(decode_drafted if rules.draft else decode_plain, decoder)

    def decoding(state: DecodeState, sampled: Sampled) -> jax.Array:
        return state.active & (sampled.passes < rules.burst)

    return jax.lax.while_loop(
        lambda loop: jnp.any(decoding(*loop)),
        lambda loop: step(*loop, decoding(*loop)),
        (state, sampled),
    )


def _append(decoder: Decoder, state: DecodeState, inputs: RoundInputs) -> DecodeState:
    """Appends the chunks, and begins the turns behind them.

    The last token of a chunk behind which a turn begins or goes on is left pending.
    """
    has_chunk = inputs.count > 0
    begins = inputs.begin_turn & has_chunk
    # A turn that goes on in another slot than the one that it began in is unrestricted.
    chooses = begins | inputs.restart
    speaks = begins | inputs.resume_turn & has_chunk
    appended = inputs.count - speaks
    last_B1 = jnp.maximum(inputs.count - 1, 0)[:, None]
    return dataclasses.replace(
        state,
        cache=append_chunks(
            decoder.fill, decoder.rules, state.cache, inputs.chunk, state.cached, appended
        ),
        experience=_record_chunk(state, inputs),
        cached=state.cached + appended,
        pending=jnp.where(
            speaks, jnp.take_along_axis(inputs.chunk, last_B1, axis=1)[:, 0], state.pending
        ),
        active=state.active | speaks,
        turn=state.turn + begins,
        turn_tokens=jnp.where(begins, 0, state.turn_tokens),
        turn_limit=jnp.where(speaks, inputs.turn_limit, state.turn_limit),
        choices=jax.tree.map(
            lambda new, old: jnp.where(chooses.reshape(-1, *(1,) * (new.ndim - 1)), new, old),
            inputs.choices,
            state.choices,
        ),
    )


def shift_rows_and_pages(
    state: DecodeState, rows: jax.Array | int, pages: jax.Array | int
) -> DecodeState:
    """Changes global row and page numbers to those of this shard's buffers, or back."""
    return dataclasses.replace(
        state,
        row=jnp.where(state.row == NO_ROW, NO_ROW, state.row + rows),
        cache=dataclasses.replace(state.cache, table=state.cache.table + pages),
    )


def _discard(rules: SlotRules, state: DecodeState, inputs: RoundInputs) -> DecodeState:
    """Ends turns as if their last tokens had not been sampled.

    The keys and values of these tokens stay in the cache, behind `cached`, where nothing is read.
    """
    cached = state.cached - inputs.discarded
    position = state.origin + cached
    offsets_BK = jnp.arange(rules.round_tokens)[None, :]
    rows_BK = jnp.where(
        offsets_BK < inputs.discarded[:, None],
        rows_or_drop(state, inputs.end_turn)[:, None],
        state.experience.tokens.shape[0],
    )
    positions_BK = position[:, None] + 1 + offsets_BK
    kept = state.experience.tokens[jnp.maximum(state.row, 0), position]
    return dataclasses.replace(
        state,
        experience=jax.tree.map(
            lambda field: field.at[rows_BK, positions_BK].set(0, mode="drop"), state.experience
        ),
        cached=cached,
        pending=jnp.where(inputs.end_turn & (state.row >= 0), kept, state.pending),
        active=state.active & ~inputs.end_turn,
        turn_tokens=state.turn_tokens - inputs.discarded,
    )


def _restart(state: DecodeState, inputs: RoundInputs, first_row: jax.Array | int) -> DecodeState:
    def taken(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(inputs.restart, new, old)

    origin, row = _new_origin_and_row(state, inputs, first_row)
    return dataclasses.replace(
        state,
        origin=origin,
        cached=jnp.where(inputs.restart | inputs.fork | inputs.rewind, inputs.shared, state.cached),
        active=state.active & ~inputs.restart & ~inputs.rewind,
        turn=taken(inputs.turns, state.turn),
        turn_tokens=taken(inputs.turn_tokens, state.turn_tokens),
        stop_ids=jnp.where(inputs.restart[:, None], inputs.stop_ids, state.stop_ids),
        seed=taken(inputs.seed, state.seed),
        row=row,
        sampling=jax.tree.map(taken, inputs.sampling, state.sampling),
        version=inputs.version,
    )


def _new_origin_and_row(
    state: DecodeState, inputs: RoundInputs, first_row: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Returns each slot's origin and row after its restart or fork."""
    # Not behind what is cached: the sample before may have been rewound, and be read in part.
    origin = jnp.where(inputs.restart | inputs.fork, inputs.origin, state.origin)
    row = jnp.where(inputs.row == NO_ROW, NO_ROW, inputs.row - first_row)
    return origin, jnp.where(inputs.restart, row, state.row)


def _take_over(state: DecodeState, inputs: RoundInputs, shard: jax.Array | int) -> DecodeState:
    """Records the ids that are taken over, and copies the pages that they end in.

    Whole pages are not copied: the slot's table has them already. The copies are made one slot
    after the other, because then the pages are written in place.
    """
    takes = inputs.shared > 0
    order_B = jnp.argsort(~takes, stable=True)
    first_row = shard * state.experience.tokens.shape[0]
    origins, rows = _new_origin_and_row(state, inputs, first_row)
    offsets = jnp.arange(state.experience.tokens.shape[1])
    table_BGY, page_size = state.cache.table, state.cache.page_size
    copied_BG = inputs.copied - shard * state.cache.num_pages

    def copy(index: jax.Array, carry: Any) -> Any:
        pools, tokens = carry
        slot = order_B[index]
        source = slot + inputs.source[slot]
        # Where nothing is to be copied the page is copied to itself.
        last = jnp.minimum(inputs.shared[slot] // page_size, table_BGY.shape[2] - 1)
        target_G = table_BGY[slot, :, last]
        page_G = jnp.where(inputs.copied[slot] == NO_PAGE, target_G, copied_BG[slot])

        def copy_side(side: jax.Array) -> jax.Array:
            for group in range(len(target_G)):
                taken = jax.lax.dynamic_index_in_dim(side, page_G[group], 0)
                side = jax.lax.dynamic_update_slice_in_dim(side, taken, target_G[group], 0)
            return side

        # A slot before this one has begun anew by now, where it does so in this round.
        begun = source < slot
        source_row = jnp.where(begun, rows[source], state.row[source])
        source_origin = jnp.where(begun, origins[source], state.origin[source])
        max_tokens = offsets - origins[slot]
        inside = (max_tokens >= 0) & (max_tokens < inputs.shared[slot])
        inside &= (rows[slot] >= 0) & (source_row >= 0) & ~inputs.written[slot]
        read = jnp.take(tokens[source_row], max_tokens + source_origin, mode="clip")
        row = jnp.where(inside, read, tokens[rows[slot]])
        return jax.tree.map(copy_side, pools), tokens.at[rows[slot]].set(row)

    pools, tokens = jax.lax.fori_loop(
        0, jnp.sum(takes), copy, (state.cache.pools, state.experience.tokens)
    )
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, pools=pools),
        experience=dataclasses.replace(state.experience, tokens=tokens),
    )


def _record_chunk(state: DecodeState, inputs: RoundInputs) -> Experience:
    """Records the appended ids; the pending token in front of a later turn is recorded already."""
    offsets_BC = jnp.arange(inputs.chunk.shape[1])[None, :]
    rows_BC = jnp.where(
        offsets_BC < inputs.count[:, None],
        rows_or_drop(state, inputs.count > 0)[:, None],
        state.experience.tokens.shape[0],
    )
    positions_BC = (state.origin + state.cached)[:, None] + offsets_BC
    tokens = state.experience.tokens.at[rows_BC, positions_BC].set(inputs.chunk, mode="drop")
    return dataclasses.replace(state.experience, tokens=tokens)
