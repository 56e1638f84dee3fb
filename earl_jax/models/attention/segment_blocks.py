# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Blockwise attention of packed rows: only blocks of keys that some query of a block looks at.

A row of several episodes would cost a square of its length; so it costs about the squares of the
episodes' lengths, and half of them, because what comes later is skipped too. Row by row, because
every row has its episodes elsewhere. Backward the same blocks are looked at once more, from the
sums of the softmax that the forward pass kept: memory is O(T) in both directions.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.models.attention.partial_attention import (
    Outcome,
    Rules,
    Sides,
    conclude,
    gradient_of_sinks,
    heads_first,
    joined,
    look,
    look_back,
    merge,
    no_gradients,
    nothing_seen,
    outcome,
    tokens_first,
)
from earl_jax.models.attention.rows import ATTENTION_AXES, BLOCK_SIZE, Positions, Window, attention
from earl_jax.models.remat import mark_attention
from earl_jax.sharding.layout import Layout


class _Settings(NamedTuple):
    """The static settings of a program."""

    scale: float
    softcap: float


def attend_packed_rows(
    layout: Layout,
    query_BTKGH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    scale: float,
    softcap: float = 0.0,
    window: Window = None,
    sinks_KG: jax.Array | None = None,
) -> jax.Array:
    """Computes `attention` of whole rows over themselves (S = T), token t of a row at position t.

    On each device for its rows and heads, without a collective. Queries of segment 0 get something
    finite that is never read. Rows of at most BLOCK_SIZE tokens are one block.

    Returns:
        out_BTKGH in the type of the query.
    """
    length = query_BTKGH.shape[1]
    if length <= BLOCK_SIZE:
        order_BT = jax.lax.broadcasted_iota(jnp.int32, segment_ids_BT.shape, 1)
        positions = Positions(order_BT, segment_ids_BT)
        rows = query_BTKGH, key_BKSH, value_BKSH, positions, positions
        return attention(*rows, scale=scale, softcap=softcap, window=window, sinks_KG=sinks_KG)
    settings = _Settings(scale, softcap)
    reach = jnp.asarray(length if window is None else window, jnp.int32)
    more = -length % BLOCK_SIZE

    def attend_shard(query_BTKGH, key_BKSH, value_BKSH, segment_ids_BT, sinks_KG=None):
        def pad(array: jax.Array, axis: int) -> jax.Array:
            return jnp.pad(array, [(0, more * (i == axis)) for i in range(array.ndim)])

        rows = (pad(query_BTKGH, 1), pad(key_BKSH, 2), pad(value_BKSH, 2), pad(segment_ids_BT, 1))
        return jax.lax.map(lambda row: _attend(settings, *row, reach, sinks_KG), rows)[:, :length]

    sinks = () if sinks_KG is None else (sinks_KG,)
    inputs = query_BTKGH, key_BKSH, value_BKSH, segment_ids_BT
    return layout.on_each_shard(attend_shard, ATTENTION_AXES)(*inputs, *sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    settings: _Settings, query_TKGH, key_KSH, value_KSH, segments_T, window, sinks_KG
) -> jax.Array:
    return _forward(settings, query_TKGH, key_KSH, value_KSH, segments_T, window, sinks_KG)[0]


def _forward(
    settings: _Settings, query_TKGH, key_KSH, value_KSH, segments_T, window, sinks_KG
) -> tuple[jax.Array, Any]:
    """Returns the attention output and the residuals of the backward pass."""
    rules, first_Q = Rules(*settings, window), _first_blocks(segments_T, window)
    query_KGTH, sides = heads_first(query_TKGH), Sides(key_KSH, value_KSH)

    def block(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        query, own = _block(query_KGTH, number, 2), _positions(segments_T, number)

        def see(theirs: jax.Array, seen: Any) -> Any:
            others = _positions(segments_T, theirs)
            return merge(seen, look(rules, query, _blocks_of(sides, theirs), own, others))

        seen = nothing_seen(query, sinks_KG)
        seen = jax.lax.fori_loop(first_Q[number], number + 1, see, seen)
        out, log_total = conclude(seen)
        return out[0].astype(query.dtype), log_total[0]

    out_QKGTH, log_total_QKGT = jax.lax.map(block, jnp.arange(len(first_Q)))
    out_TKGH = tokens_first(out_QKGTH).reshape(query_TKGH.shape)
    out_TKGH, log_total_QKGT = mark_attention(out_TKGH, log_total_QKGT)
    kept = (query_TKGH, key_KSH, value_KSH, segments_T, window, sinks_KG, out_TKGH, log_total_QKGT)
    return out_TKGH, kept


def _backward(settings: _Settings, kept: Any, grad_TKGH: jax.Array) -> tuple[Any, ...]:
    query_TKGH, key_KSH, value_KSH, segments_T, window, sinks_KG, out_TKGH, log_total_QKGT = kept
    rules, first_Q = Rules(*settings, window), _first_blocks(segments_T, window)
    query_KGTH, sides = heads_first(query_TKGH), Sides(key_KSH, value_KSH)
    log_total_KGT = joined(log_total_QKGT, 2)
    known = outcome(heads_first(out_TKGH), heads_first(grad_TKGH), log_total_KGT)

    def block(totals: Sides, number: jax.Array) -> tuple[Sides, jax.Array]:
        query, own = _block(query_KGTH, number, 2), _positions(segments_T, number)
        of_block = Outcome(*(_block(array, number, 2) for array in known))

        def see(theirs: jax.Array, grads: tuple[jax.Array, Sides]) -> tuple[jax.Array, Sides]:
            of_query, totals = grads
            others = _positions(segments_T, theirs)
            mine, found = look_back(rules, query, of_block, _blocks_of(sides, theirs), own, others)
            totals = jax.tree.map(lambda total, more: _add(total, more[0], theirs), totals, found)
            return of_query + mine, totals

        start = (jnp.zeros(query.shape, jnp.float32), totals)
        of_query, totals = jax.lax.fori_loop(first_Q[number], number + 1, see, start)
        return totals, of_query[0]

    of_sides, of_query_QKGTH = jax.lax.scan(block, no_gradients(sides), jnp.arange(len(first_Q)))
    of_sinks_KG = gradient_of_sinks(sinks_KG, known)
    return (
        tokens_first(of_query_QKGTH).reshape(query_TKGH.shape).astype(query_TKGH.dtype),
        of_sides.key.swapaxes(1, 2).astype(key_KSH.dtype),
        of_sides.value.swapaxes(1, 2).astype(value_KSH.dtype),
        None,
        None,
        None if of_sinks_KG is None else of_sinks_KG.astype(sinks_KG.dtype),
    )


_attend.defvjp(_forward, _backward)


def _first_blocks(segments_T: jax.Array, window: jax.Array) -> jax.Array:
    """Returns the first block of keys that each block of queries looks at, i32[Q].

    It is the block behind the queries' own where all of these are padding.
    """
    order_T = jnp.arange(segments_T.shape[0], dtype=jnp.int32)
    begins_T = jnp.pad(segments_T[1:] != segments_T[:-1], (1, 0))
    first_T = jax.lax.cummax(jnp.where(begins_T, order_T, 0))
    first_T = jnp.maximum(first_T, order_T - (window - 1))
    nothing_T = (order_T // BLOCK_SIZE + 1) * BLOCK_SIZE
    first_T = jnp.where(segments_T > 0, first_T, nothing_T)
    return jnp.min(first_T.reshape(-1, BLOCK_SIZE), axis=1) // BLOCK_SIZE


def blocks_looked_at(segments_T: jax.Array) -> jax.Array:
    """Returns the number of pairs of blocks that attention computes for a row without a window."""
    first_Q = _first_blocks(segments_T, jnp.int32(segments_T.shape[0]))
    return jnp.sum(jnp.arange(1, len(first_Q) + 1) - first_Q)


def _block(array: jax.Array, number: jax.Array, axis: int) -> jax.Array:
    """Returns a block of a row, with an axis for the one row."""
    start = number * BLOCK_SIZE
    return jax.lax.dynamic_slice_in_dim(array, start, BLOCK_SIZE, axis)[None]


def _blocks_of(sides: Sides, number: jax.Array) -> Sides:
    return jax.tree.map(lambda side: _block(side, number, 1), sides)


def _add(total_KHS: jax.Array, more_KHS: jax.Array, number: jax.Array) -> jax.Array:
    start = number * BLOCK_SIZE
    before = jax.lax.dynamic_slice_in_dim(total_KHS, start, BLOCK_SIZE, 2)
    return jax.lax.dynamic_update_slice_in_dim(total_KHS, before + more_KHS, start, 2)


def _positions(segments_T: jax.Array, number: jax.Array) -> Positions:
    segment_BT = _block(segments_T, number, 0)
    order_BT = number * BLOCK_SIZE + jax.lax.broadcasted_iota(jnp.int32, segment_BT.shape, 1)
    return Positions(order_BT, segment_BT)
