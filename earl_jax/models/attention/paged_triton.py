# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over the pages that rows have, as one Pallas kernel for GPUs (through Triton).

One program of the grid computes a block of queries of a row and a key/value head: it reads that
row's own pages one after the other from the pool, without a copy of them, with an online softmax in
fp32. Where there are few queries a row's pages are split over programs, a fixed number of tokens
each, whose sums a second kernel adds up (flash-decoding's split). Splits behind a row's tokens are
neither written nor read, so that a wide table costs nothing, and a row without queries reads
nothing. Where a `context` axis cuts pages each device reads its part, and their sums are added up
alike.

Latents (kv_cache.py) are one head that all heads of queries read. A row is read once for both
products: its scores are those of the latent and of the rotated key added up, two products because
Triton's sides are powers of two (512 + 64), and the latent is the value. A row is as long as nine
heads of 64, so that a page is read in blocks of few tokens.

A row's numbers depend neither on its neighbours nor on the chunk that a query came in: pages and
splits begin at fixed positions. Equal to `attend_pages` up to rounding, which reads more pages at a
time.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from earl_jax.models.attention.page_shares import WHOLE, LayerCache, PageShare, add_up
from earl_jax.models.attention.paged_attention import FLOOR
from earl_jax.models.attention.rows import cap

# Up to so many queries a row, programs split its pages: there are few programs else.
SPLIT_QUERIES = 8
TOKENS_A_SPLIT = 1024
# So many heads of queries of one key have splits twice as long, and so on: a split's sums in fp32
# are written and read once more, 256 KiB of 128 heads over latents, which are 1.1 MiB of 1,024.
HEADS_A_SPLIT = 32
# The least side of a matrix product, and the most rows of one.
LEAST, MOST = 16, 64
# Threads of a program by 32, and pages that are fetched ahead. On an H100 2 to 8 and 2 to 4 are as
# fast within 3 %, and so are 512 to 2,048 tokens a split but for long rows (benchmarks/chip.md).
WARPS, STAGES = 4, 2
# Of latents: tokens that are read at a time, 36 KiB in bf16, and warps of a program with more than
# the least queries. Compiled for H100 no register is spilled: 16 queries have 55 KiB of shared
# memory and 210 registers a thread, 64 have 144 KiB and 255. Not measured on a chip yet.
LATENT_TOKENS, LATENT_WARPS = 32, 8


def attend(
    query_BTKGH: jax.Array,
    layer: LayerCache,
    table_BY: jax.Array,
    cached_B: jax.Array,
    counts_B: jax.Array,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int | None = None,
    share: PageShare = WHOLE,
    scatter: bool = False,
    sinks_KG: jax.Array | None = None,
    value_size: int = 0,
    interpret: bool = False,
) -> jax.Array:
    """Causal grouped-query attention of T queries a row over the row's pages, softmax in fp32.

    Args:
        query_BTKGH: queries, the first `counts_B` of each row behind its first `cached_B` tokens.
        layer: the pages of this layer, with the keys and values of the queries' own tokens.
        table_BY: the pages of each row.
        cached_B: tokens in a row's cache before the queries' own.
        counts_B: queries that count.
        scale: scores are multiplied by it.
        softcap: scores x become softcap * tanh(x / softcap); 0 leaves them.
        window: a query at position i attends to positions > i - window only; None: to all before.
        share: the part of each page that this device has; what others see is added to it.
        scatter: each of these devices gets what its own part of T attended to.
        sinks_KG: a score of each query head that takes part in the softmax and has no value.
        value_size: in pages without values, the first numbers of a key that are its value.
        interpret: the kernel's steps run as ordinary operations, which is slow: for tests on CPUs.

    Returns:
        out_BTKGH in the type of the query, H that of values; zeros for rows with a count of 0.
        Queries that do not count get finite numbers.
    """
    rows, length, heads, group, size = query_BTKGH.shape
    page_size, value_size = layer.own_size, value_size or size
    # One axis for queries and the heads that share keys: the rows of a matrix product.
    queries = length * group
    block = min(MOST, max(LEAST, pl.next_power_of_2(queries)))
    query_XMH = query_BTKGH.transpose(0, 2, 1, 3, 4).reshape(rows * heads, queries, size)
    query_XMH = jnp.pad(query_XMH, ((0, 0), (0, -queries % block), (0, 0)))
    padded = query_XMH.shape[1]
    tokens, warps = page_size, WARPS
    if layer.value is None:
        tokens = min(page_size, LATENT_TOKENS)
        warps = WARPS if block == LEAST else LATENT_WARPS
    pages = table_BY.shape[1]
    tokens_a_split = TOKENS_A_SPLIT * max(1, group // HEADS_A_SPLIT)
    pages_a_split = max(1, tokens_a_split // page_size) if length <= SPLIT_QUERIES else pages
    splits = pl.cdiv(pages, pages_a_split)
    reach = _Reach(group, share.parts * page_size, pages_a_split, pages, window)
    sums = functools.partial(_sums, (splits, rows * heads, padded), block)
    shapes, specs = zip(sums(value_size), sums(), sums(), strict=True)
    whole = pl.BlockSpec()
    pools = [layer.value, layer.key_scale, layer.value_scale]
    # The first parameters also choose the backend: the default for GPUs is Mosaic.
    partial_sums = pl.pallas_call(
        functools.partial(
            _kernel,
            reach=reach,
            heads=heads,
            tokens=tokens,
            parts=share.parts,
            scale=scale,
            softcap=softcap,
        ),
        grid=(rows * heads, padded // block, splits),
        in_specs=[
            pl.BlockSpec((None, block, size), lambda row, part, split: (row, part, 0)),
            whole,
            *[None if pool is None else whole for pool in pools],
            whole,
            whole,
            whole,
            whole,
        ],
        out_specs=specs,
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=STAGES),
        interpret=interpret,
        name="paged_attention",
    )(
        *(query_XMH, layer.key, *pools, table_BY, cached_B, counts_B),
        jnp.full((1,), share.index, jnp.int32),
    )
    value_XMH, top_XM, weight_XM = _of_all_splits(
        partial_sums, cached_B, counts_B, reach=reach, heads=heads, interpret=interpret
    )
    top_BKM, weight_BKM, value_BKMH = (
        sums.reshape(rows, heads, padded, *sums.shape[2:])[:, :, :queries]
        for sums in (top_XM, weight_XM, value_XMH)
    )
    weight_BKM, value_BKMH = add_up(
        share, top_BKM, weight_BKM, value_BKMH, scatter=scatter, sinks_KG=sinks_KG
    )
    out_BKMH = (value_BKMH / jnp.maximum(weight_BKM, 1e-30)[..., None]).astype(query_BTKGH.dtype)
    return out_BKMH.reshape(rows, heads, -1, group, value_size).transpose(0, 2, 1, 3, 4)


def _sums(shape: tuple[int, int, int], block: int, *last: int) -> tuple[Any, Any]:
    """Returns the shape of partial results in fp32, [splits, rows, queries, *last], and its blocks.

    A block is of one split and row, and `block` queries.
    """
    spec = pl.BlockSpec(
        (None, None, block, *last),
        lambda row, part, split: (split, row, part, *[0] * len(last)),
    )
    return jax.ShapeDtypeStruct((*shape, *last), jnp.float32), spec


def _of_all_splits(
    partial_sums: Sequence[jax.Array],
    cached_B: jax.Array,
    counts_B: jax.Array,
    *,
    reach: "_Reach",
    heads: int,
    interpret: bool,
) -> list[jax.Array]:
    """Returns sums of values, [X,M,H], largest scores and weights, [X,M], of all splits of a row.

    `partial_sums` are those of each split, in a first axis.
    """
    if not reach.is_split:
        return [array[0] for array in partial_sums]
    splits, rows, queries, size = partial_sums[0].shape
    whole = pl.BlockSpec()
    return pl.pallas_call(
        functools.partial(_add_splits, reach=reach, heads=heads),
        grid=(rows, queries // LEAST),
        in_specs=[*_of_a_block(splits, size), whole, whole],
        out_specs=_of_a_block(None, size),
        out_shape=[jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in partial_sums],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="add_splits",
    )(*partial_sums, cached_B, counts_B)


def _of_a_block(splits: int | None, size: int) -> list[Any]:
    """Returns blocks of sums of one row and LEAST queries: of values, [X,M,H], and of two [X,M].

    With `splits` all of them, as a first axis.
    """

    def spec(*last: int) -> Any:
        first = () if splits is None else (splits,)
        zeros = [0] * len(first), [0] * len(last)
        return pl.BlockSpec(
            (*first, None, LEAST, *last), lambda row, part: (*zeros[0], row, part, *zeros[1])
        )

    return [spec(size), spec(), spec()]


class _Reach(NamedTuple):
    """The sizes that say which pages a block of queries reads: `page_size` of all parts, and so on.

    Every `group` queries are of one token.
    """

    group: int
    page_size: int
    pages_a_split: int
    pages: int
    window: int | None

    @property
    def is_split(self) -> bool:
        """True where several programs read a row's pages."""
        return self.pages_a_split < self.pages

    def pages_of(self, first: Any, block: int, cached: Any, count: Any) -> tuple[Any, Any]:
        """Returns the first page, and the one behind the last, of the queries from `first` on.

        From the window of the first one to the last one's own position. None are read for queries
        that do not count.
        """
        first_query, last_query = first // self.group, (first + block - 1) // self.group
        end = pl.cdiv(cached + jnp.minimum(count, last_query + 1), self.page_size)
        end = jnp.where(first_query < count, jnp.minimum(end, self.pages), 0)
        if self.window is None:
            return 0, end
        begin = jnp.maximum(0, cached + first_query + 1 - self.window) // self.page_size
        return jnp.minimum(begin, end), end


def _kernel(
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    key_scale_ref: Any,
    value_scale_ref: Any,
    table_ref: Any,
    cached_ref: Any,
    counts_ref: Any,
    index_ref: Any,
    sum_ref: Any,
    top_ref: Any,
    weight_ref: Any,
    *,
    reach: _Reach,
    heads: int,
    tokens: int,
    parts: int,
    scale: float,
    softcap: float,
) -> None:
    """Computes one block of queries of one row and head over one split of the row's pages.

    `query_ref` [M,H]; the pools, the table and the rows' lengths are whole; `index_ref` [1] says
    which of `parts` of each page is here, of which `tokens` are read at a time. Results are the
    largest score of each query, and relative to it the sum of weights and of weighted values. They
    are not written where a split of several has none of the row's pages.
    """
    row, head = pl.program_id(0) // heads, pl.program_id(0) % heads
    block, size = query_ref.shape
    own_size, value_size = key_ref.shape[3], sum_ref.shape[1]
    page_size, blocks = reach.page_size, own_size // tokens
    # Numbers of a key by the powers of two that they are: a latent, and its rotated key.
    sides = [slice(0, value_size), slice(value_size, size)][: 2 if value_ref is None else 1]
    dtype = query_ref.dtype
    queries = [query_ref[:, side] for side in sides]
    cached, count = cached_ref[row], counts_ref[row]
    first = pl.program_id(1) * block
    position_M = cached + (first + jax.lax.broadcasted_iota(jnp.int32, (block,), 0)) // reach.group
    begin, end = reach.pages_of(first, block, cached, count)
    begin = jnp.maximum(begin, pl.program_id(2) * reach.pages_a_split)
    end = jnp.minimum(end, (pl.program_id(2) + 1) * reach.pages_a_split)

    def read(number: jax.Array, sums: Any) -> Any:
        top_M, weight_M, value_MH = sums
        number, inside = (number, 0) if blocks == 1 else divmod(number, blocks)
        page, here = table_ref[row, number], pl.ds(inside * tokens, tokens)
        keys = [key_ref[page, head, side, here].astype(dtype) for side in sides]
        scores_MS = functools.reduce(jnp.add, map(_product, queries, keys))
        # Of int8 pages the scales come after the product: they are the same for all of a head.
        if key_scale_ref is not None:
            scores_MS *= key_scale_ref[page, head, here][None, :]
        scores_MS = cap(scores_MS * scale, softcap)
        first_S = number * page_size + index_ref[0] * own_size + inside * tokens
        position_S = first_S + jax.lax.broadcasted_iota(jnp.int32, (tokens,), 0)
        behind_MS = position_M[:, None] - position_S[None, :]
        seen_MS = behind_MS >= 0
        if reach.window is not None:
            seen_MS &= behind_MS < reach.window
        scores_MS = jnp.where(seen_MS, scores_MS, FLOOR)
        higher_M = jnp.maximum(top_M, jnp.max(scores_MS, axis=1))
        weights_MS = jnp.exp(scores_MS - higher_M[:, None])
        kept_M = jnp.exp(top_M - higher_M)
        weight_M = weight_M * kept_M + jnp.sum(weights_MS, axis=1)
        if value_scale_ref is not None:
            weights_MS *= value_scale_ref[page, head, here][None, :]
        # A latent has been read already.
        read_SH = keys[0].T if value_ref is None else value_ref[page, head, here].astype(dtype)
        read_MH = _product(weights_MS.astype(dtype), read_SH)
        return higher_M, weight_M, value_MH * kept_M[:, None] + read_MH

    def read_all() -> None:
        nothing = _nothing(block, value_size)
        sums = jax.lax.fori_loop(begin * blocks, end * blocks, read, nothing)
        top_ref[...], weight_ref[...], sum_ref[...] = sums

    if reach.is_split:
        pl.when(begin < end)(read_all)
    else:
        read_all()


def _add_splits(
    sum_ref: Any,
    top_ref: Any,
    weight_ref: Any,
    cached_ref: Any,
    counts_ref: Any,
    all_sum_ref: Any,
    all_top_ref: Any,
    all_weight_ref: Any,
    *,
    reach: _Reach,
    heads: int,
) -> None:
    """Adds up what `_kernel` found of LEAST queries of one row and head in the row's splits.

    Sums are relative to the largest score of all splits, a split's to its own one.
    """
    row, (block, value_size) = pl.program_id(0) // heads, all_sum_ref.shape
    begin, end = reach.pages_of(pl.program_id(1) * block, block, cached_ref[row], counts_ref[row])

    def add(split: jax.Array, sums: Any) -> Any:
        top_M, weight_M, value_MH = sums
        higher_M = jnp.maximum(top_M, top_ref[split])
        kept_M, kept_own_M = jnp.exp(top_M - higher_M), jnp.exp(top_ref[split] - higher_M)
        return (
            higher_M,
            weight_M * kept_M + weight_ref[split] * kept_own_M,
            value_MH * kept_M[:, None] + sum_ref[split] * kept_own_M[:, None],
        )

    splits = begin // reach.pages_a_split, pl.cdiv(end, reach.pages_a_split)
    sums = jax.lax.fori_loop(*splits, add, _nothing(block, value_size))
    all_top_ref[...], all_weight_ref[...], all_sum_ref[...] = sums


def _nothing(block: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the largest score, and the sums of weights and values, before the first key."""
    return (
        jnp.full((block,), FLOOR, jnp.float32),
        jnp.zeros((block,), jnp.float32),
        jnp.zeros((block, size), jnp.float32),
    )


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    # Highest: fp32 would be rounded to tf32 else. Of bf16 it changes nothing.
    return jax.lax.dot(
        left, right, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
