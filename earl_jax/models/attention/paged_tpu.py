# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over the pages that rows have, as one Pallas kernel for TPUs (through Mosaic).

The grid is a list of work, made on the device once for all layers of one window: for each block of
a row's queries the blocks of pages that they look at, and nothing for rows without queries. So its
length follows the tokens that are there, however unequal rows are, and the pipeline of the grid
fetches the next block of pages, of whichever row, from where it is in the pool while one is
computed (arXiv 2205.14135; prefetched scalars as in jax's megablox). jax's own
`ragged_paged_attention` wants keys and values interleaved in one array, which would have to be
copied from ours, takes one scale for all int8 pages, and returns no sums to add up over `context`.

A row's numbers depend neither on its neighbours nor on the chunk that a query came in: blocks of
pages begin at fixed positions. Equal to `attend_pages` up to rounding, which reads other blocks.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from earl_jax.models.attention.page_shares import WHOLE, LayerCache, PageShare, add_up
from earl_jax.models.attention.paged_attention import FLOOR
from earl_jax.models.attention.rows import cap

# Positions of a device that one step of the grid reads. For four heads of 128 in bf16 these are
# 1 MiB, 1.3 us at v5e's 819 GB/s, where a step itself takes about 0.35. Not measured on a chip yet.
TOKENS_A_STEP = 512
# The least rows of a matrix product (a tile of bf16), and the most: with 512 keys and 512 queries
# on v5e products take as long as keys take to arrive.
LEAST, MOST = 16, 512
# The list is in scalar memory, of 1 MiB; longer ones are cut by rows.
MOST_SCALARS = 2**17
# Of 128 MiB (v5p: 95), instead of the 16 that are the default.
VMEM_BYTES = 64 * 2**20


class Work(NamedTuple):
    """The steps of the grid, of blocks of queries and of pages.

    Block x of `length` queries is of row x // (blocks a row). It looks at `blocks[x]` blocks of
    `together` pages, from page `first[x]` of its row on, in consecutive steps from `begin[x]` on.
    Step n of `total` is of block `block[n]`, and reads the pages of the pool
    `pages[n * together : (n + 1) * together]`; behind a row's last page it names the one that was
    read at this place before, which is not read again. `cached` i32[B].
    """

    block: jax.Array
    pages: jax.Array
    begin: jax.Array
    blocks: jax.Array
    first: jax.Array
    cached: jax.Array
    total: jax.Array


class Shape(NamedTuple):
    """Sizes that fix a list of work: queries of a block, blocks a row, pages a step, group."""

    queries: int
    blocks_a_row: int
    together: int
    group: int


def shape_of(length: int, group: int, own_size: int) -> Shape:
    """Returns the sizes for `length` positions of `group` queries a row and key/value head."""
    queries = min(MOST, -(-length * group // LEAST) * LEAST)
    together = max(1, TOKENS_A_STEP // own_size)
    return Shape(queries, pl.cdiv(length * group, queries), together, group)


def plan_work(
    shape: Shape,
    table_BY: jax.Array,
    cached_B: jax.Array,
    counts_B: jax.Array,
    page_size: int,
    window: int | None,
) -> Work:
    """Returns the steps for the first `counts_B` queries behind `cached_B` positions of each row.

    `page_size` are the positions of a page in all its parts. At least one step, which does nothing.
    """
    rows, width = table_BY.shape
    together = shape.together
    # [B, blocks a row], of each block of queries.
    begin = jnp.arange(shape.blocks_a_row)[None, :] * shape.queries
    first_query, last_query = begin // shape.group, (begin + shape.queries - 1) // shape.group
    cached, counts = cached_B[:, None], counts_B[:, None]
    end = pl.cdiv(cached + jnp.minimum(counts, last_query + 1), page_size)
    first = jnp.zeros_like(end)
    if window is not None:
        first = jnp.maximum(0, cached + first_query + 1 - window)
        first = first // (page_size * together) * together
    end = jnp.where(first_query < counts, jnp.minimum(end, width), first)
    first_X, end_X = first.reshape(-1), end.reshape(-1)
    blocks_X = pl.cdiv(end_X - first_X, together)
    ends_X = jnp.cumsum(blocks_X)
    most = rows * shape.blocks_a_row * pl.cdiv(width, together)
    block_N = jnp.repeat(jnp.arange(len(blocks_X)), blocks_X, total_repeat_length=most)
    begin_X = ends_X - blocks_X
    step_N = jnp.arange(most) - begin_X[block_N]
    number_NJ = (first_X[block_N] + step_N * together)[:, None] + jnp.arange(together)[None, :]
    row_N = block_N // shape.blocks_a_row
    inside_NJ = jnp.minimum(number_NJ, width - 1)
    pages_NJ = table_BY[row_N[:, None], inside_NJ]
    real_NJ = number_NJ < end_X[block_N][:, None]
    latest_NJ = jax.lax.cummax(jnp.where(real_NJ, jnp.arange(most)[:, None], 0), axis=0)
    pages_NJ = jnp.take_along_axis(pages_NJ, latest_NJ, axis=0)
    numbers = (block_N, pages_NJ.reshape(-1), begin_X, blocks_X, first_X, cached_B)
    return Work(
        *[array.astype(jnp.int32) for array in numbers],
        total=jnp.maximum(1, ends_X[-1]).astype(jnp.int32),
    )


def plan_works(
    shape: Shape,
    table_BY: jax.Array,
    cached_B: jax.Array,
    counts_B: jax.Array,
    page_size: int,
    window: int | None,
) -> list[Work]:
    """Returns `plan_work` of groups of rows, as few as scalar memory allows."""
    rows, width = table_BY.shape
    a_row = shape.blocks_a_row * pl.cdiv(width, shape.together) * (shape.together + 1)
    some = max(1, min(rows, MOST_SCALARS // a_row))
    parts = [slice(start, start + some) for start in range(0, rows, some)]
    return [
        plan_work(shape, table_BY[of], cached_B[of], counts_B[of], page_size, window)
        for of in parts
    ]


def attend(
    query_BTKGH: jax.Array,
    layer: LayerCache,
    works: list[Work],
    counts_B: jax.Array,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int | None = None,
    share: PageShare = WHOLE,
    scatter: bool = False,
    sinks_KG: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal grouped-query attention of T queries a row over the row's pages, softmax in fp32.

    Args:
        query_BTKGH: queries, of the whole chunk, the first `counts_B` of each row.
        layer: the pages of this layer, with the keys and values of the queries' own tokens.
        works: by `plan_works`, with the same window, for T queries in groups of G.
        counts_B: queries that count.
        scale: scores are multiplied by it.
        softcap: scores x become softcap * tanh(x / softcap); 0 leaves them.
        window: a query at position i attends to positions > i - window only; None: to all before.
        share: the part of each page that this device has; what others see is added to it.
        scatter: each of these devices gets what its own part of T attended to.
        sinks_KG: a score of each query head that takes part in the softmax and has no value.
        interpret: the kernel's steps run as ordinary operations, which is slow: for tests on CPUs.

    Returns:
        out_BTKGH in the type of the query; zeros for queries that do not count.
    """
    rows, length, heads, group, size = query_BTKGH.shape
    shape = shape_of(length, group, layer.own_size)
    # One axis for queries and the heads that share keys: the rows of a matrix product.
    queries, padded = length * group, shape.queries * shape.blocks_a_row
    query_BKMH = query_BTKGH.transpose(0, 2, 1, 3, 4).reshape(rows, heads, queries, size)
    query_BKMH = jnp.pad(query_BKMH, ((0, 0), (0, 0), (0, padded - queries), (0, 0)))
    # A part of the weights is added behind the kernel.
    is_part = share.parts > 1 or sinks_KG is not None
    sums, start = [], 0
    for work in works:
        some = len(work.cached)
        settings = {"scale": scale, "softcap": softcap, "window": window}
        of_these = jax.lax.slice_in_dim(query_BKMH, start, start + some)
        sums.append(_sums(of_these, layer, work, shape, share, is_part, interpret, settings))
        start += some
    value_BKMH, *rest = (jnp.concatenate(parts) for parts in zip(*sums, strict=True))
    # Behind what counts nothing was written.
    seen_BT = jnp.arange(length)[None, :] < counts_B[:, None]
    seen_BM = jnp.repeat(seen_BT, group, axis=1)[:, None]
    value_BKMH = jnp.where(seen_BM[..., None], value_BKMH[:, :, :queries], 0)
    if rest:
        top_BKM, weight_BKM = (sums_BKM[:, :, :queries, 0] for sums_BKM in rest)
        top_BKM = jnp.where(seen_BM, top_BKM, FLOOR)
        weight_BKM = jnp.where(seen_BM, weight_BKM, 0)
        weight_BKM, value_BKMH = add_up(
            share, top_BKM, weight_BKM, value_BKMH, scatter=scatter, sinks_KG=sinks_KG
        )
        value_BKMH = value_BKMH / jnp.maximum(weight_BKM, 1e-30)[..., None]
    out_BKMH = value_BKMH.astype(query_BTKGH.dtype)
    return out_BKMH.reshape(rows, heads, -1, group, size).transpose(0, 2, 1, 3, 4)


def _sums(
    query_BKMH: jax.Array,
    layer: LayerCache,
    work: Work,
    shape: Shape,
    share: PageShare,
    is_part: bool,
    interpret: bool,
    settings: dict[str, Any],
) -> list[jax.Array]:
    """Runs the kernel over one list of work.

    Returns:
        out_BKMH in the type of the query; of a part of the softmax instead, in fp32, its weighted
        values, and behind them the largest scores and the sums of weights, BKM1.
    """
    heads, size = query_BKMH.shape[1], query_BKMH.shape[3]
    own_size, together = layer.own_size, shape.together

    def of_block(*last: int) -> pl.BlockSpec:
        def index(n: Any, block: Any, *_: Any) -> Any:
            x = block[n]
            return x // shape.blocks_a_row, 0, x % shape.blocks_a_row, 0

        return pl.BlockSpec((None, heads, shape.queries, *last), index)

    def of_page(pool: jax.Array, place: int) -> pl.BlockSpec:
        def index(n: Any, block: Any, pages: Any, *_: Any) -> Any:
            return pages[n * together + place], *[0] * (pool.ndim - 1)

        return pl.BlockSpec((None, *pool.shape[1:]), index)

    pools = [layer.key, layer.value, layer.key_scale, layer.value_scale]
    pools = [pool for pool in pools if pool is not None]
    sums = [of_block(1), of_block(1)]
    shapes = [query_BKMH.shape, *[(*query_BKMH.shape[:3], 1)] * 2]
    state = [(heads, shape.queries, last) for last in (size, 1, 1)]
    offset = jnp.full((1,), share.index * own_size, jnp.int32)
    outputs = pl.pallas_call(
        functools.partial(
            _kernel,
            shape=shape,
            parts=share.parts,
            is_part=is_part,
            num_pools=len(pools),
            **settings,
        ),
        out_shape=[
            jax.ShapeDtypeStruct(dims, jnp.float32 if is_part else query_BKMH.dtype)
            for dims in shapes[: 3 if is_part else 1]
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(work.total,),
            in_specs=[
                of_block(size),
                *[of_page(pool, place) for pool in pools for place in range(together)],
            ],
            out_specs=[of_block(size), *(sums if is_part else [])],
            scratch_shapes=[pltpu.VMEM(dims, jnp.float32) for dims in state],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="paged_attention",
    )(*work[:-1], offset, query_BKMH, *[pool for pool in pools for _ in range(together)])
    return list(outputs)


def _kernel(
    block_ref: Any,
    pages_ref: Any,
    begin_ref: Any,
    blocks_ref: Any,
    first_ref: Any,
    cached_ref: Any,
    offset_ref: Any,
    query_ref: Any,
    *refs: Any,
    shape: Shape,
    parts: int,
    is_part: bool,
    num_pools: int,
    scale: float,
    softcap: float,
    window: int | None,
) -> None:
    """Adds one block of pages to the sums of one block of queries, for all heads.

    `query_ref` [K,M,H]; `refs` are pages, each pool's one after another, outputs, and the sums.
    """
    together = shape.together
    pages = [refs[i * together : (i + 1) * together] for i in range(num_pools)]
    *outputs, sum_ref, top_ref, weight_ref = refs[num_pools * together :]
    n = pl.program_id(0)
    x = block_ref[n]
    step = n - begin_ref[x]
    row, part = x // shape.blocks_a_row, x % shape.blocks_a_row

    @pl.when(step == 0)
    def _begin() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)
        top_ref[...] = jnp.full_like(top_ref, FLOOR)
        weight_ref[...] = jnp.zeros_like(weight_ref)

    own_size = pages[1][0].shape[1]
    dims = shape.queries, together * own_size
    query_M = part * shape.queries + jax.lax.broadcasted_iota(jnp.int32, dims, 0)
    lane_S = jax.lax.broadcasted_iota(jnp.int32, dims, 1)
    number_S = first_ref[x] + step * together + lane_S // own_size
    position_S = number_S * (own_size * parts) + offset_ref[0] + lane_S % own_size
    behind_MS = cached_ref[row] + query_M // shape.group - position_S
    seen_MS = behind_MS >= 0
    if window is not None:
        seen_MS &= behind_MS < window

    for head in range(query_ref.shape[0]):
        _add(query_ref, pages, (sum_ref, top_ref, weight_ref), head, seen_MS, scale, softcap)

    @pl.when(step == blocks_ref[x] - 1)
    def _end() -> None:
        if is_part:
            for output, state in zip(outputs, (sum_ref, top_ref, weight_ref), strict=True):
                output[...] = state[...]
        else:
            out = sum_ref[...] / jnp.maximum(weight_ref[...], 1e-30)
            outputs[0][...] = out.astype(outputs[0].dtype)


def _add(
    query_ref: Any,
    pages: list[Any],
    state: tuple[Any, Any, Any],
    head: int,
    seen_MS: jax.Array,
    scale: float,
    softcap: float,
) -> None:
    """Adds a block of pages to the sums of one head."""
    sum_ref, top_ref, weight_ref = state
    key, value, *scales = pages
    query_MH = query_ref[head]

    def joined(refs: Any) -> jax.Array:
        return jnp.concatenate([ref[pl.ds(head, 1), :] for ref in refs], axis=1)

    scores_MS = jnp.concatenate(
        [_product(query_MH, ref[head].astype(query_MH.dtype)) for ref in key], axis=1
    )
    # Of int8 pages the scales come after the product: they are the same for all of a head.
    if scales:
        scores_MS *= joined(scales[0])
    scores_MS = jnp.where(seen_MS, cap(scores_MS * scale, softcap), FLOOR)
    before_M1 = top_ref[head]
    top_M1 = jnp.maximum(before_M1, jnp.max(scores_MS, axis=1, keepdims=True))
    weights_MS = jnp.exp(scores_MS - top_M1)
    kept_M1 = jnp.exp(before_M1 - top_M1)
    weight_ref[head] = weight_ref[head] * kept_M1 + jnp.sum(weights_MS, axis=1, keepdims=True)
    if scales:
        weights_MS *= joined(scales[1])
    weights_MS = weights_MS.astype(query_MH.dtype)
    own_size = value[0].shape[1]
    read_MH = sum(
        _product(weights_MS[:, i * own_size : (i + 1) * own_size], ref[head].astype(query_MH.dtype))
        for i, ref in enumerate(value)
    )
    sum_ref[head] = sum_ref[head] * kept_M1 + read_MH
    top_ref[head] = top_M1


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    # fp32 would be rounded to bf16 else.
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jax.lax.dot(left, right, precision=precision, preferred_element_type=jnp.float32)
