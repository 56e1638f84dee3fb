# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The rounds of an engine on the devices: pure functions over a DecodeState.

A slot holds one live episode: its KV cache, and the row of the experience buffers that it writes.
The token sampled last is *pending*: recorded, but not yet in the cache. It goes in at the head of
whatever comes next (the next decode step, or the environment's answer), so a turn's last token
costs no forward pass of its own.

`play` is one round: it appends the chunk that the host gives to each slot, then decodes until every
slot has ended its turn or had `burst` forward passes (decoding.py), each of which samples a token,
or with drafts some. Where slots take turns in decode steps, a round ends behind `burst` steps as
soon as fewer slots decode than a step has rows. The inputs of a round travel as one array, and so
do its outputs (round_inputs.py).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.engine.config import SlotRules
from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.decoding import (
    Decoder,
    Sampled,
    decode_drafted,
    decode_plain,
    decode_some,
    nothing_sampled,
    rows_or_drop,
    sample_next,
)
from earl_jax.engine.round_inputs import (
    NO_PAGE,
    NO_ROW,
    RoundInputs,
    pack_outputs,
    unpack_inputs,
)
from earl_jax.models.decoder import head_weights
from earl_jax.models.kv_cache import LayerCache, PagedCache
from earl_jax.trajectory import Experience


def play(
    decoder: Decoder, state: DecodeState, packed_inputs: jax.Array, shard: jax.Array | int
) -> tuple[DecodeState, jax.Array]:
    """Plays one round of data shard number `shard`, of equal ones.

    Returns:
        The new state, and the packed RoundOutputs.
    """
    rules = decoder.rules
    inputs = unpack_inputs(packed_inputs, rules.choice_branches)
    first_row = shard * state.experience.tokens.shape[0]
    state = shift_rows_and_pages(state, -first_row, -shard * state.cache.num_pages)
    state = _discard(rules, state, inputs)
    state = _restart(_take_over(state, inputs, shard), inputs, first_row)
    slots = state.cached.shape[0]
    sampled = nothing_sampled(slots, rules.round_tokens, model_logprobs=rules.model_logprobs)
    # A loop of at most one pass and not a `cond`, whose branches cannot share the caller's buffers:
    # XLA for GPUs then holds the whole KV cache twice, and copies it twice a round (9.7 GiB of
    # temporaries against 2.7, Qwen2.5-7B with 32 slots of 8192 tokens, 2 of 8 H100s a shard).
    waiting = jnp.any(inputs.count > 0)
    _, (state, sampled) = jax.lax.while_loop(
        lambda loop: loop[0],
        lambda loop: (jnp.zeros_like(waiting), _append_chunks(decoder, inputs, *loop[1])),
        (waiting, (state, sampled)),
    )
    steps, state, sampled = _decode(decoder, state, sampled)
    outputs = pack_outputs(
        sampled.tokens,
        sampled.logprobs,
        sampled.count,
        state.active,
        sampled.model_logprobs,
        (sampled.passes, sampled.drafted) if rules.draft else None,
        jnp.broadcast_to(steps, slots) if takes_turns(rules, slots) else None,
    )
    return shift_rows_and_pages(state, first_row, shard * state.cache.num_pages), outputs


def takes_turns(rules: SlotRules, slots: int) -> bool:
    """Returns whether a decode step of a data shard has fewer rows than the shard has slots."""
    return 0 < rules.step_rows < slots


def _decode(
    decoder: Decoder, state: DecodeState, sampled: Sampled
) -> tuple[jax.Array, DecodeState, Sampled]:
    """Runs the decode steps of a round. Returns their number, the state and the sampled tokens."""
    rules = decoder.rules
    step = functools.partial(decode_drafted if rules.draft else decode_plain, decoder)
    turns = takes_turns(rules, state.cached.shape[0])
    if turns:
        step = functools.partial(decode_some, step, rules.step_rows)

    def decoding(state: DecodeState, sampled: Sampled) -> jax.Array:
        # A slot that begins its turn with its chunk has had one pass of its burst already.
        return state.active & (sampled.passes < rules.burst)

    def goes_on(loop: Any) -> jax.Array:
        steps, state, sampled = loop
        slots_B = decoding(state, sampled)
        if not turns:
            return jnp.any(slots_B)
        # Rows that cannot be filled any more are filled in the next round, beside others.
        full = jnp.sum(slots_B) >= rules.step_rows
        return jnp.any(slots_B) & (full | (steps < rules.burst))

    def take_step(loop: Any) -> Any:
        steps, state, sampled = loop
        return steps + 1, *step(state, sampled, decoding(state, sampled))

    return jax.lax.while_loop(goes_on, take_step, (jnp.int32(0), state, sampled))


def _append_chunks(
    decoder: Decoder, inputs: RoundInputs, state: DecodeState, sampled: Sampled
) -> tuple[DecodeState, Sampled]:
    """Appends the chunks, and samples the first token of the turns that begin behind them."""
    logits_BV, cache = _append(decoder, state, inputs)
    experience = _record_chunk(state, inputs)
    begins = inputs.begin_turn & (inputs.count > 0)
    decoding = begins | inputs.resume_turn & (inputs.count > 0)
    state = dataclasses.replace(
        state,
        cache=cache,
        experience=experience,
        cached=state.cached + inputs.count,
        active=state.active | decoding,
        turn=state.turn + begins,
        turn_tokens=jnp.where(begins, 0, state.turn_tokens),
        turn_limit=jnp.where(begins, inputs.turn_limit, state.turn_limit),
        choices=jax.tree.map(
            lambda new, old: jnp.where(begins.reshape(-1, *(1,) * (new.ndim - 1)), new, old),
            inputs.choices,
            state.choices,
        ),
    )
    sampled = sampled._replace(passes=sampled.passes + decoding)
    return sample_next(decoder, state, logits_BV, decoding, sampled)


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

    zero = jnp.zeros_like(state.cached)
    origin, row = _new_origin_and_row(state, inputs, first_row)
    return dataclasses.replace(
        state,
        origin=origin,
        cached=jnp.where(inputs.restart | inputs.fork | inputs.rewind, inputs.shared, state.cached),
        active=state.active & ~inputs.restart & ~inputs.rewind,
        turn=taken(zero, state.turn),
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
    # A new sample begins behind the pending token, which is recorded and ends the one before.
    origin = jnp.where(inputs.fork, state.origin + state.cached + 1, state.origin)
    row = jnp.where(inputs.row == NO_ROW, NO_ROW, inputs.row - first_row)
    return (
        jnp.where(inputs.restart, 0, origin),
        jnp.where(inputs.restart, row, state.row),
    )


def _take_over(state: DecodeState, inputs: RoundInputs, shard: jax.Array | int) -> DecodeState:
    """Records the ids that are taken over, and copies the page that they end in.

    Whole pages are not copied: the slot's table has them already. The copies are made one slot
    after the other, because then the pages are written in place.
    """
    takes = inputs.shared > 0
    order_B = jnp.argsort(~takes, stable=True)
    first_row = shard * state.experience.tokens.shape[0]
    origins, rows = _new_origin_and_row(state, inputs, first_row)
    offsets = jnp.arange(state.experience.tokens.shape[1])
    table, page_size = state.cache.table, state.cache.page_size
    copied_B = inputs.copied - shard * state.cache.num_pages

    def copy(index: jax.Array, carry: Any) -> Any:
        layers, tokens = carry
        slot = order_B[index]
        source = slot + inputs.source[slot]
        # Where nothing is to be copied the page is copied to itself.
        last = jnp.minimum(inputs.shared[slot] // page_size, table.shape[1] - 1)
        target = table[slot, last]
        page = jnp.where(inputs.copied[slot] == NO_PAGE, target, copied_B[slot])

        def copy_side(side: jax.Array) -> jax.Array:
            taken = jax.lax.dynamic_index_in_dim(side, page, 0)
            return jax.lax.dynamic_update_slice_in_dim(side, taken, target, 0)

        # A slot before this one has begun anew by now, where it does so in this round.
        begun = source < slot
        source_row = jnp.where(begun, rows[source], state.row[source])
        source_origin = jnp.where(begun, origins[source], state.origin[source])
        max_tokens = offsets - origins[slot]
        inside = (max_tokens >= 0) & (max_tokens < inputs.shared[slot])
        inside &= (rows[slot] >= 0) & (source_row >= 0) & ~inputs.written[slot]
        read = jnp.take(tokens[source_row], max_tokens + source_origin, mode="clip")
        row = jnp.where(inside, read, tokens[rows[slot]])
        return jax.tree.map(copy_side, layers), tokens.at[rows[slot]].set(row)

    layers, tokens = jax.lax.fori_loop(
        0, jnp.sum(takes), copy, (state.cache.layers, state.experience.tokens)
    )
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, layers=layers),
        experience=dataclasses.replace(state.experience, tokens=tokens),
    )


def _append(
    decoder: Decoder, state: DecodeState, inputs: RoundInputs
) -> tuple[jax.Array, PagedCache]:
    """Appends the chunks to the cache: those that may be `narrow` first, then the others.

    Returns:
        logits_BV behind each chunk, and the cache.
    """
    slots, chunk_size = inputs.chunk.shape
    done = (
        jnp.zeros((slots, head_weights(decoder.params).shape[1]), jnp.float32),
        state.cache.layers,
    )
    left = inputs.count > 0
    for width in decoder.rules.append_widths(chunk_size, state.cache.parts):
        fits = (inputs.narrow > 0) & (inputs.count <= width) if width < chunk_size else left
        done = _append_chosen(decoder, state, inputs, left & fits, width, done)
        left &= ~fits
    logits_BV, layers = done
    return logits_BV, dataclasses.replace(state.cache, layers=layers)


def _append_chosen(
    decoder: Decoder,
    state: DecodeState,
    inputs: RoundInputs,
    chosen_B: jax.Array,
    width: int,
    done: tuple[jax.Array, list[LayerCache]],
) -> tuple[jax.Array, list[LayerCache]]:
    """Appends the chunks of chosen slots, of at most `width` tokens, some slots at a time.

    Without chosen slots it costs nothing. `done` are logits_BV and the pages, and so is the result.
    """
    slots, chunk_size = inputs.chunk.shape
    some = min(slots, decoder.rules.rows_appended(width, chunk_size))
    # Filled up with slots that do not exist: what is written there is dropped.
    steps = (jnp.sum(chosen_B) + some - 1) // some
    position_B = jnp.arange(slots + -slots % some)
    order_B = jnp.pad(jnp.argsort(~chosen_B, stable=True), (0, -slots % some))
    order_B = jnp.where(position_B < jnp.sum(chosen_B), order_B, slots + position_B)

    def append_some(index: jax.Array, carry: Any) -> Any:
        logits_BV, layers = carry
        chosen = jax.lax.dynamic_slice_in_dim(order_B, index * some, some)
        exists = chosen < slots
        row = jnp.minimum(chosen, slots - 1)
        logits, cache = decoder.append(
            dataclasses.replace(state.cache, layers=layers, table=state.cache.table[row]),
            inputs.chunk[row, :width],
            state.cached[row],
            jnp.where(exists, inputs.count[row], 0),
        )
        return logits_BV.at[chosen].set(logits, mode="drop"), cache.layers

    return jax.lax.fori_loop(0, steps, append_some, done)


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
