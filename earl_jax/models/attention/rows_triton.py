# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Flash attention of training rows, whole or of parts, as Pallas kernels for GPUs (Triton).

One program of the grid computes a block of queries of a head: it reads the keys from the first that
one of them looks at, up to its own, so that other documents of a row cost nothing. Backward one
kernel does the same for the gradient of queries; another computes a block of keys of a key/value
head from the queries up to the last that looks at one of them. Scores never leave the chip: memory
is O(T) in both directions. (FlashAttention-2, arXiv 2307.08691.)

Where the window and the documents begin is one number for each query, so that windows may differ
from layer to layer of a scan. Of rows that are cut over `context` a part of the queries looks at a
part of the keys at a time, and ring.py adds up what was seen.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from earl_jax.models.attention.paged_attention import FLOOR
from earl_jax.models.attention.partial_attention import (
    KernelSettings,
    Outcome,
    Place,
    Seen,
    Sides,
    gradient_of_sinks,
    heads_first,
    outcome,
    tokens_first,
)
from earl_jax.models.attention.rows import ATTENTION_AXES, Spans, Window, cap, spans_of
from earl_jax.models.remat import mark_attention
from earl_jax.sharding.layout import Layout

# Rows are padded to a multiple of it.
BLOCK = 128


class Tile(NamedTuple):
    """The tokens of a program's own block, those that it reads at a time, its warps and stages."""

    own: int
    read: int
    warps: int
    stages: int


# By the largest head. Compiled for H100 and A100, bf16 spills no register up to heads of 128, and
# takes at most 97 KiB of shared memory; of 256 up to 40 bytes, and 112 KiB. Not timed on a chip.
FORWARD = {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)}
BACKWARD = {64: Tile(128, 64, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 1)}
LEAST_SIZE = 16


def triton_rows(
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

    On each device for its rows and heads, without a collective. Queries of segment 0 look at
    themselves, which is finite and never read. On CPUs the kernels' steps run as ordinary
    operations, which is slow: for tests.

    Returns:
        out_BTKGH in the type of the query.
    """
    settings = KernelSettings(scale, softcap, None, layout.platform == "cpu")
    length, size = query_BTKGH.shape[1], query_BTKGH.shape[-1]
    more_T, more_H = -length % BLOCK, _more_of_head(size)

    def attend_shard(query_BTKGH, key_BKSH, value_BKSH, segment_ids_BT, sinks_KG=None):
        query = jnp.pad(query_BTKGH, [(0, 0), (0, more_T), (0, 0), (0, 0), (0, more_H)])
        sides = [(0, 0), (0, 0), (0, more_T), (0, more_H)]
        key, value = jnp.pad(key_BKSH, sides), jnp.pad(value_BKSH, sides)
        spans = spans_of(jnp.pad(segment_ids_BT, [(0, 0), (0, more_T)]), window)
        out: jax.Array = _attend(settings, query, key, value, spans, sinks_KG)
        return out[:, :length, ..., :size]

    sinks = () if sinks_KG is None else (sinks_KG,)
    attend = layout.on_each_shard(attend_shard, ATTENTION_AXES)
    return attend(query_BTKGH, key_BKSH, value_BKSH, segment_ids_BT, *sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    settings: KernelSettings, query_BTKGH, key_BKSH, value_BKSH, spans, sinks_KG
) -> jax.Array:
    return _forward(settings, query_BTKGH, key_BKSH, value_BKSH, spans, sinks_KG)[0]


def _forward(
    settings: KernelSettings, query_BTKGH, key_BKSH, value_BKSH, spans, sinks_KG
) -> tuple[jax.Array, Any]:
    """Returns the attention output and the residuals of the backward pass."""
    pair = _Pair(spans.first, spans.last, jnp.int32(0))
    out_BTKGH, log_total_BKGT = _look(
        settings, query_BTKGH, key_BKSH, value_BKSH, pair, query_BTKGH.dtype
    )
    if sinks_KG is not None:
        # The share of all keys in the softmax.
        sinks_KG1 = sinks_KG.astype(jnp.float32)[..., None]
        share_BKGT = jax.nn.sigmoid(log_total_BKGT - sinks_KG1[None])
        share_BTKG1 = share_BKGT.transpose(0, 3, 1, 2)[..., None]
        out_BTKGH = (out_BTKGH * share_BTKG1).astype(query_BTKGH.dtype)
        log_total_BKGT = jnp.logaddexp(log_total_BKGT, sinks_KG1[None])
    out_BTKGH, log_total_BKGT = mark_attention(out_BTKGH, log_total_BKGT)
    kept = (query_BTKGH, key_BKSH, value_BKSH, spans, sinks_KG, out_BTKGH, log_total_BKGT)
    return out_BTKGH, kept


def _backward(settings: KernelSettings, kept: Any, grad_BTKGH: jax.Array) -> tuple[Any, ...]:
    query_BTKGH, key_BKSH, value_BKSH, spans, sinks_KG, out_BTKGH, log_total_BKGT = kept
    known = outcome(heads_first(out_BTKGH), heads_first(grad_BTKGH), log_total_BKGT)
    pair = _Pair(spans.first, spans.last, jnp.int32(0))
    sums = known.log_total, known.projected
    gradients = _look_back(
        settings, query_BTKGH, grad_BTKGH, sums, key_BKSH, value_BKSH, pair, query_BTKGH.dtype
    )
    of_sinks_BKG = gradient_of_sinks(sinks_KG, known)
    of_sinks_KG = None
    if sinks_KG is not None and of_sinks_BKG is not None:
        of_sinks_KG = jnp.sum(of_sinks_BKG, axis=0).astype(sinks_KG.dtype)
    return *gradients, Spans(None, None), of_sinks_KG  # pyright: ignore[reportArgumentType]


_attend.defvjp(_forward, _backward)


class _Pair(NamedTuple):
    """A part of a row's queries and a part of its keys, both contiguous.

    Positions count from the first key: `first` of each query and `last` of each key are a `Spans`,
    and query t stands at `offset` + t.
    """

    first: jax.Array
    last: jax.Array
    offset: jax.Array


def _look(
    settings: KernelSettings, query_BTKGH, key_BKSH, value_BKSH, pair: _Pair, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the attention of these queries to these keys, BTKGH, and the softmax's sums, BKGT.

    The latter as logarithms; a query that sees none of the keys gets zeros, and a very small one.
    """
    rows, length, heads, group, size = query_BTKGH.shape
    tile, keys = _tile(FORWARD, size), key_BKSH.shape[2]
    block = _Blocks(tile.own, group, size)
    return _call(
        functools.partial(_forward_kernel, settings=settings, read=tile.read),
        tile,
        grid=(length // tile.own, heads * group, rows),
        in_specs=[
            *(pl.BlockSpec(), block.of_spans, block.of_queries),
            *(block.of_row(keys), block.of_row(keys)),
        ],
        out_specs=[block.of_queries, block.of_sums],
        out_shape=[
            jax.ShapeDtypeStruct(query_BTKGH.shape, dtype),
            jax.ShapeDtypeStruct((rows, heads, group, length), jnp.float32),
        ],
        interpret=settings.interpret,
        name="rows_forward",
    )(pair.offset[None], pair.first, query_BTKGH, key_BKSH, value_BKSH)


def _look_back(
    settings: KernelSettings,
    query_BTKGH,
    grad_BTKGH,
    sums,
    key_BKSH,
    value_BKSH,
    pair: _Pair,
    dtype,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of queries, keys and values, laid out as these.

    `sums` are the logarithms of the softmax's sums over all keys, and the gradient of the output
    times the output, BKGT each.
    """
    rows, length, heads, group, size = query_BTKGH.shape
    tile, keys = _tile(BACKWARD, size), key_BKSH.shape[2]
    block, offset = _Blocks(tile.own, group, size), pair.offset[None]
    of_query_BTKGH = _call(
        functools.partial(_query_kernel, settings=settings, read=tile.read),
        tile,
        grid=(length // tile.own, heads * group, rows),
        in_specs=[
            *(pl.BlockSpec(), block.of_spans, block.of_queries, block.of_queries),
            *(block.of_sums, block.of_sums, block.of_row(keys), block.of_row(keys)),
        ],
        out_specs=block.of_queries,
        out_shape=jax.ShapeDtypeStruct(query_BTKGH.shape, dtype),
        interpret=settings.interpret,
        name="rows_backward_queries",
    )(offset, pair.first, query_BTKGH, grad_BTKGH, *sums, key_BKSH, value_BKSH)
    queries = pl.BlockSpec((None, length, None, group, size), lambda s, k, b: (b, 0, k, 0, 0))
    of_queries = pl.BlockSpec((None, None, group, length), lambda s, k, b: (b, k, 0, 0))
    side = pl.BlockSpec((None, None, tile.own, size), lambda s, k, b: (b, k, s, 0))
    of_key_BKSH, of_value_BKSH = _call(
        functools.partial(_key_kernel, settings=settings, read=tile.read),
        tile,
        grid=(keys // tile.own, heads, rows),
        in_specs=[
            *(pl.BlockSpec(), block.of_spans, side, side),
            *(pl.BlockSpec((None, length), lambda s, k, b: (b, 0)), queries, queries),
            *(of_queries, of_queries),
        ],
        out_specs=[side, side],
        out_shape=[jax.ShapeDtypeStruct(key_BKSH.shape, dtype)] * 2,
        interpret=settings.interpret,
        name="rows_backward_keys",
    )(offset, pair.last, key_BKSH, value_BKSH, pair.first, query_BTKGH, grad_BTKGH, *sums)
    return of_query_BTKGH, of_key_BKSH, of_value_BKSH


def look(
    settings: KernelSettings, query_BKGTH: jax.Array, sides: Sides, own: Place, others: Place
) -> Seen:
    """Returns the state of a part of a row's queries over a part of its keys alone.

    See `partial_attention.look`.
    """
    pair, query, (key, value) = _aligned(query_BKGTH, sides, own, others)
    out_BTKGH, log_total_BKGT = _look(settings, query, key, value, pair, jnp.float32)
    length, size = query_BKGTH.shape[3:]
    weighted = heads_first(out_BTKGH)[..., :length, :size]
    total = log_total_BKGT[..., :length]
    return Seen(weighted, jnp.ones_like(total), total)


def look_back(
    settings: KernelSettings,
    query_BKGTH: jax.Array,
    known: Outcome,
    sides: Sides,
    own: Place,
    others: Place,
) -> tuple[jax.Array, Sides]:
    """Returns gradients of these queries (BKGTH) and of these keys and values (BKHS), in fp32.

    See `partial_attention.look_back`.
    """
    pair, query, (key, value) = _aligned(query_BKGTH, sides, own, others)
    length, size = query_BKGTH.shape[3:]
    grad = _padded_queries(known.grad)
    more = [(0, 0)] * 3 + [(0, -length % BLOCK)]
    sums = [jnp.pad(each, more) for each in (known.log_total, known.projected)]
    of_query_BTKGH, *of_sides = _look_back(
        settings, query, grad, sums, key, value, pair, jnp.float32
    )
    keys = sides.key.shape[2]
    of_sides = [each[:, :, -keys:, :size].swapaxes(2, 3) for each in of_sides]
    return heads_first(of_query_BTKGH)[..., :length, :size], Sides(*of_sides)


def _aligned(
    query_BKGTH: jax.Array, sides: Sides, own: Place, others: Place
) -> tuple[_Pair, jax.Array, Sides]:
    """Returns a pair of parts, its queries as BTKGH, and its keys and values, all in whole blocks.

    Queries are filled up at the end and keys at the beginning, with such as see none and are not
    seen.
    """
    length, keys = query_BKGTH.shape[3], sides.key.shape[2]
    before = -keys % BLOCK
    first_BT = jnp.maximum(own.spans.first - others.start, 0) + before
    first_BT = jnp.pad(first_BT, [(0, 0), (0, -length % BLOCK)], constant_values=before + keys)
    last_BS = jnp.pad(
        others.spans.last - others.start + before, [(0, 0), (before, 0)], constant_values=-1
    )
    more = [(0, 0), (0, 0), (before, 0), (0, _more_of_head(sides.key.shape[-1]))]
    filled = jax.tree.map(lambda side: jnp.pad(side, more), sides)
    offset = jnp.asarray(own.start - others.start + before, jnp.int32)
    return _Pair(first_BT, last_BS, offset), _padded_queries(query_BKGTH), filled


def _padded_queries(query_BKGTH: jax.Array) -> jax.Array:
    """Returns these queries as BTKGH, in whole blocks and heads of a power of two."""
    length, size = query_BKGTH.shape[3:]
    more = [(0, 0), (0, -length % BLOCK), (0, 0), (0, 0), (0, _more_of_head(size))]
    return jnp.pad(tokens_first(query_BKGTH), more)


def _more_of_head(size: int) -> int:
    return max(LEAST_SIZE, pl.next_power_of_2(size)) - size


class _Blocks(NamedTuple):
    """Blocks of a grid of blocks of `own` tokens, heads and rows; `group` heads share a key."""

    own: int
    group: int
    size: int

    @property
    def of_queries(self) -> pl.BlockSpec:
        """A head's block of queries, BTKGH."""
        return pl.BlockSpec(
            (None, self.own, None, None, self.size),
            lambda t, n, b: (b, t, n // self.group, n % self.group, 0),
        )

    @property
    def of_sums(self) -> pl.BlockSpec:
        """A head's block of a number for each query, BKGT."""
        return pl.BlockSpec(
            (None, None, None, self.own), lambda t, n, b: (b, n // self.group, n % self.group, t)
        )

    @property
    def of_spans(self) -> pl.BlockSpec:
        """A block of a number for each token, BT."""
        return pl.BlockSpec((None, self.own), lambda t, n, b: (b, t))

    def of_row(self, length: int) -> pl.BlockSpec:
        """All keys or values of a head's row, BKSH."""
        return pl.BlockSpec(
            (None, None, length, self.size), lambda t, n, b: (b, n // self.group, 0, 0)
        )


def _tile(tiles: dict[int, Tile], size: int) -> Tile:
    return next(tile for most, tile in tiles.items() if size <= most)


def _call(kernel: Any, tile: Tile, **settings: Any) -> Any:
    # The parameters also choose the backend: the default for GPUs is Mosaic.
    params = triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)
    return pl.pallas_call(kernel, compiler_params=params, **settings)


def _forward_kernel(
    offset_ref: Any,
    first_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    out_ref: Any,
    log_total_ref: Any,
    *,
    settings: KernelSettings,
    read: int,
) -> None:
    """Computes one block of queries [T,H] over keys and values [S,H] of their row."""
    own, size = query_ref.shape
    start = offset_ref[0] + pl.program_id(0) * own
    order_T = start + jax.lax.broadcasted_iota(jnp.int32, (own,), 0)
    first_T, query_TH = first_ref[...], query_ref[...]

    def look(number: jax.Array, sums: Any) -> Any:
        top_T, weight_T, value_TH = sums
        here = pl.ds(number * read, read)
        scores_TS = cap(_product(query_TH, key_ref[here, :].T) * settings.scale, settings.softcap)
        order_S = number * read + jax.lax.broadcasted_iota(jnp.int32, (read,), 0)
        seen_TS = (order_S[None, :] >= first_T[:, None]) & (order_S[None, :] <= order_T[:, None])
        scores_TS = jnp.where(seen_TS, scores_TS, FLOOR)
        higher_T = jnp.maximum(top_T, jnp.max(scores_TS, axis=1))
        weights_TS = jnp.exp(scores_TS - higher_T[:, None])
        kept_T = jnp.exp(top_T - higher_T)
        weight_T = weight_T * kept_T + jnp.sum(weights_TS, axis=1)
        value_SH = value_ref[here, :]
        more_TH = _product(weights_TS.astype(value_SH.dtype), value_SH)
        return higher_T, weight_T, value_TH * kept_T[:, None] + more_TH

    nothing = (
        jnp.full((own,), FLOOR, jnp.float32),
        jnp.zeros((own,), jnp.float32),
        jnp.zeros((own, size), jnp.float32),
    )
    reach = _blocks_read(first_T, start + own, key_ref.shape[0], read)
    top_T, weight_T, value_TH = jax.lax.fori_loop(*reach, look, nothing)
    weight_T = jnp.maximum(weight_T, 1e-30)
    out_ref[...] = (value_TH / weight_T[:, None]).astype(out_ref.dtype)
    log_total_ref[...] = top_T + jnp.log(weight_T)


def _query_kernel(
    offset_ref: Any,
    first_ref: Any,
    query_ref: Any,
    grad_ref: Any,
    log_total_ref: Any,
    projected_ref: Any,
    key_ref: Any,
    value_ref: Any,
    of_query_ref: Any,
    *,
    settings: KernelSettings,
    read: int,
) -> None:
    """Computes the gradient of one block of queries [T,H]."""
    own, size = query_ref.shape
    start = offset_ref[0] + pl.program_id(0) * own
    order_T = start + jax.lax.broadcasted_iota(jnp.int32, (own,), 0)
    first_T, query_TH, grad_TH = first_ref[...], query_ref[...], grad_ref[...]
    log_total_T, projected_T = log_total_ref[...], projected_ref[...]

    def look(number: jax.Array, of_query_TH: jax.Array) -> jax.Array:
        here = pl.ds(number * read, read)
        key_SH = key_ref[here, :]
        scores_TS = cap(_product(query_TH, key_SH.T) * settings.scale, settings.softcap)
        order_S = number * read + jax.lax.broadcasted_iota(jnp.int32, (read,), 0)
        seen_TS = (order_S[None, :] >= first_T[:, None]) & (order_S[None, :] <= order_T[:, None])
        weights_TS = jnp.exp(jnp.where(seen_TS, scores_TS, FLOOR) - log_total_T[:, None])
        pull_TS = weights_TS * (_product(grad_TH, value_ref[here, :].T) - projected_T[:, None])
        pull_TS = _through_cap(settings, pull_TS, scores_TS)
        return of_query_TH + _product(pull_TS.astype(key_SH.dtype), key_SH)

    reach = _blocks_read(first_T, start + own, key_ref.shape[0], read)
    of_query_TH = jax.lax.fori_loop(*reach, look, jnp.zeros((own, size), jnp.float32))
    of_query_ref[...] = (of_query_TH * settings.scale).astype(of_query_ref.dtype)


def _blocks_read(first_T: jax.Array, end: Any, keys: int, read: int) -> tuple[Any, Any]:
    """Returns the first block of keys, and the one behind the last, of queries before `end`."""
    behind = jnp.clip(pl.cdiv(end, read), 0, keys // read)
    return jnp.clip(jnp.min(first_T) // read, 0, behind), behind


def _key_kernel(
    offset_ref: Any,
    last_ref: Any,
    key_ref: Any,
    value_ref: Any,
    first_ref: Any,
    query_ref: Any,
    grad_ref: Any,
    log_total_ref: Any,
    projected_ref: Any,
    of_key_ref: Any,
    of_value_ref: Any,
    *,
    settings: KernelSettings,
    read: int,
) -> None:
    """Computes the gradients of one block of keys and values [S,H], of all heads [T,G,H]."""
    own, size = key_ref.shape
    start = pl.program_id(0) * own
    order_S = start + jax.lax.broadcasted_iota(jnp.int32, (own,), 0)
    key_SH, value_SH, offset = key_ref[...], value_ref[...], offset_ref[0]
    end = jnp.clip((jnp.max(last_ref[...]) - offset) // read + 1, 0, query_ref.shape[0] // read)
    begin = jnp.clip((start - offset) // read, 0, end)

    def of_head(head: Any, sums: Any) -> Any:
        def look(number: jax.Array, sums: Any) -> Any:
            of_key_SH, of_value_SH = sums
            here = pl.ds(number * read, read)
            query_TH, grad_TH = query_ref[here, head, :], grad_ref[here, head, :]
            scores_ST = cap(_product(key_SH, query_TH.T) * settings.scale, settings.softcap)
            order_T = offset + number * read + jax.lax.broadcasted_iota(jnp.int32, (read,), 0)
            first_T, log_total_T = first_ref[here], log_total_ref[head, here]
            seen_ST = (order_S[:, None] >= first_T[None, :]) & (
                order_S[:, None] <= order_T[None, :]
            )
            weights_ST = jnp.exp(jnp.where(seen_ST, scores_ST, FLOOR) - log_total_T[None, :])
            of_value_SH += _product(weights_ST.astype(grad_TH.dtype), grad_TH)
            projected_T = projected_ref[head, here]
            pull_ST = weights_ST * (_product(value_SH, grad_TH.T) - projected_T[None, :])
            pull_ST = _through_cap(settings, pull_ST, scores_ST)
            return of_key_SH + _product(pull_ST.astype(query_TH.dtype), query_TH), of_value_SH

        return jax.lax.fori_loop(begin, end, look, sums)

    nothing = jnp.zeros((own, size), jnp.float32), jnp.zeros((own, size), jnp.float32)
    of_key_SH, of_value_SH = jax.lax.fori_loop(0, query_ref.shape[1], of_head, nothing)
    of_key_ref[...] = (of_key_SH * settings.scale).astype(of_key_ref.dtype)
    of_value_ref[...] = of_value_SH.astype(of_value_ref.dtype)


def _through_cap(settings: KernelSettings, pull: jax.Array, scores: jax.Array) -> jax.Array:
    """Returns the gradient of scores before the cap, which made them `scores`."""
    if not settings.softcap:
        return pull
    return pull * (1.0 - (scores / settings.softcap) * (scores / settings.softcap))


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    # Highest: fp32 would be rounded to tf32 else. Of bf16 it changes nothing.
    return jax.lax.dot(
        left, right, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
