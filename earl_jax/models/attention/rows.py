# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention with all scores at once: of rows of one block, and the reference for every kernel.

Arithmetic only, placement is the caller's. The decoder does not come here: it goes through
kernels.py, which chooses.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Queries, and keys, that blockwise attention looks at together; a row of one block is one piece.
BLOCK_SIZE = 128

# Axes of what attention takes: query, key, value, numbers of tokens, and sinks if there are some.
# A device's rows and heads need no collective: no head looks at another's keys.
ATTENTION_AXES = ("BTKGH", "BKSH", "BKSH", "BT", "KG")

Window = int | jax.Array | None


class Positions(NamedTuple):
    """Positions of tokens, i32[B, T] each: order in the row and segment (0: padding)."""

    order: jax.Array
    segment: jax.Array


class Spans(NamedTuple):
    """The first key that each query looks at, and the last query that looks at each key, i32[B,T].

    A query looks at all keys from the first up to its own position.
    """

    first: jax.Array
    last: jax.Array


def part_length(length: int, context: int) -> int:
    """Returns the positions of one of the 2 x `context` parts of a row, the last one padded.

    They come in blocks that attention takes at a time, all of one size.

    Example: 2,100 tokens over 8 shards are 16 parts of 132 tokens, in 2 blocks of 66.
    """
    part = -(-length // (2 * context))
    blocks = -(-part // BLOCK_SIZE)
    return blocks * -(-part // blocks)


def spans_of(segments_BT: jax.Array, window: Window) -> Spans:
    """Returns the spans of documents and window; a token of padding looks at itself."""
    length = segments_BT.shape[1]
    order_BT = jax.lax.broadcasted_iota(jnp.int32, segments_BT.shape, 1)
    changes_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
    begins_BT = jnp.pad(changes_BT, ((0, 0), (1, 0)))
    ends_BT = jnp.pad(changes_BT, ((0, 0), (0, 1)), constant_values=True)
    first_BT = jax.lax.cummax(jnp.where(begins_BT, order_BT, 0), axis=1)
    last_BT = jax.lax.cummin(jnp.where(ends_BT, order_BT, length), axis=1, reverse=True)
    if window is not None:
        first_BT = jnp.maximum(first_BT, order_BT - (window - 1))
        last_BT = jnp.minimum(last_BT, order_BT + (window - 1))
    is_token_BT = segments_BT > 0
    return Spans(*(jnp.where(is_token_BT, each, order_BT) for each in (first_BT, last_BT)))


def attention(
    query_BTKGH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    query_positions: Positions,
    key_positions: Positions,
    *,
    scale: float,
    softcap: float = 0.0,
    window: Window = None,
    sinks_KG: jax.Array | None = None,
) -> jax.Array:
    """Causal grouped-query attention of T queries over S keys, softmax in fp32.

    A query looks at the keys of its own segment that stand where it stands or before; a query of
    segment 0 looks at nothing real, and gets something finite that is never read. All scores are
    made at once.

    Args:
        query_BTKGH: queries.
        key_BKSH: keys, laid out as the cache has them.
        value_BKSH: values, as the keys.
        query_positions: where the T queries stand.
        key_positions: where the S keys stand.
        scale: scores are multiplied by it.
        softcap: scores x become softcap * tanh(x / softcap); 0 leaves them.
        window: a query of order i looks at keys of order > i - window only; None: at all before it.
            It may be an i32 scalar on the device, where layers of a scan differ.
        sinks_KG: a score of each query head that takes part in the softmax and has no value.

    Returns:
        out_BTKGH in the type of the query.
    """
    behind_BTS = query_positions.order[:, :, None] - key_positions.order[:, None, :]
    mask_BTS = (
        (query_positions.segment[:, :, None] == key_positions.segment[:, None, :])
        & (query_positions.segment[:, :, None] > 0)
        & (behind_BTS >= 0)
    )
    if window is not None:
        mask_BTS &= behind_BTS < window
    scores_BKGTS = jnp.einsum(
        "BTKGH,BKSH->BKGTS", query_BTKGH, key_BKSH, preferred_element_type=jnp.float32
    )
    scores_BKGTS = cap(scores_BKGTS * scale, softcap)
    # A finite floor, because -inf everywhere in a row of padding would make NaN.
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, -1e30)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
    if sinks_KG is not None:
        # The share of all keys in the softmax.
        log_total_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
        sinks_BKGT = sinks_KG.astype(jnp.float32)[None, ..., None]
        weights_BKGTS *= jax.nn.sigmoid(log_total_BKGT - sinks_BKGT)[..., None]
    return jnp.einsum("BKGTS,BKSH->BTKGH", weights_BKGTS.astype(value_BKSH.dtype), value_BKSH)


def cap(x: jax.Array, softcap: float) -> jax.Array:
    """Squeezes x into (-softcap, softcap): softcap * tanh(x / softcap). 0 leaves it as it is."""
    return x if softcap == 0.0 else softcap * jnp.tanh(x / softcap)
