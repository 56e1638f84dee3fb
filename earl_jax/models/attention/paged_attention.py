# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over the pages that rows have, page by page with an online softmax.

What it costs follows the tokens that are there: rows are sorted by how much they have to read, and
block i of a few pages is read for those rows only that have one, a tile of rows at a time. Nothing
depends on how long the table is, nor on how large the pool. The online softmax is that of arXiv
2205.14135, pages those of arXiv 2309.06180.

A row's numbers are added up block by block in the order of its positions, whatever other rows are.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.models.attention.page_shares import WHOLE, LayerCache, PageShare, add_up
from earl_jax.models.attention.rows import cap


@jax.tree_util.register_static
class Tile(NamedTuple):
    """The amount read at a time: a block of `pages` pages for each of `rows` rows."""

    rows: int
    pages: int


# Two rows waste little where lengths differ. If how many are read at a time depended on how many
# are left, a row's last bits would change with its neighbours. One page, because several would
# have to be copied once more to lie side by side. A decode step on a CPU (benchmarks.appending), ms
# with 8, 4, 2 and 1 rows: 32 contexts of 512, 12.8, 13.4, 14.5 and 18.5; one of 8,192 among them,
# 35.7, 27.4, 22.6 and 33.4 (2026-11).
ON_CPU = Tile(rows=2, pages=1)
# Each step is some kernels to start, so steps are few and large. Not measured on a chip yet.
TOKENS_AT_A_TIME = 1024
# The score of what a query may not look at. Finite, because -inf everywhere in a block would make
# NaN. Where a query has seen nothing else yet, what is summed up is taken back by the first block
# that it sees.
FLOOR = -1e30


def tile_for(platform: str | None, rows: int, own_size: int) -> Tile:
    """Returns the tile of this platform, where a device has `own_size` positions of a page.

    `platform` None is the CPU.
    """
    if platform in (None, "cpu"):
        return ON_CPU._replace(rows=min(rows, ON_CPU.rows))
    return Tile(rows=rows, pages=max(1, TOKENS_AT_A_TIME // own_size))


class Reading(NamedTuple):
    """The blocks that each row reads, rows sorted by their number, the most first.

    `order` i32[B] is the rows in that order; the others are in it, padded to a multiple of the
    tile's rows by rows that read nothing. `first` is a row's first page, `blocks` how many blocks
    it reads from there on, `table` its pages, `positions` i32[B,T] where its queries stand.
    """

    order: jax.Array
    first: jax.Array
    blocks: jax.Array
    table: jax.Array
    positions: jax.Array
    tile: Tile


def plan_reading(
    table_BY: jax.Array,
    size: int,
    cached_B: jax.Array,
    counts_B: jax.Array,
    length: int,
    window: int | None,
    tile: Tile,
) -> Reading:
    """Returns the pages to read for `length` queries behind `cached_B` positions of each row.

    `size` are the positions of a page in all its parts. Rows with a count of 0 read nothing; with a
    window, whole blocks before that of a row's first query are left out. Blocks begin at the same
    positions whichever part of a row is appended, so that the result does not depend on how it was
    cut. The same for all layers of one group.
    """
    rows = cached_B.shape[0]
    ends_B = jnp.where(counts_B > 0, cached_B + counts_B, 0)
    first_B = jnp.zeros_like(cached_B)
    if window is not None:
        # Of blocks no longer than the window at most one is read beside those that it fills.
        tile = tile._replace(pages=max(1, min(tile.pages, window // size)))
        first_B = jnp.maximum(0, cached_B + 1 - window) // (size * tile.pages) * tile.pages
    pages_B = jnp.maximum(0, (ends_B + size - 1) // size - first_B)
    blocks_B = (pages_B + tile.pages - 1) // tile.pages
    order_B = jnp.argsort(-blocks_B, stable=True)
    pad = [(0, -rows % tile.rows)]
    return Reading(
        order=order_B,
        first=jnp.pad(first_B[order_B], pad),
        blocks=jnp.pad(blocks_B[order_B], pad),
        table=jnp.pad(table_BY[order_B], [*pad, (0, 0)]),
        positions=jnp.pad(cached_B[order_B], pad)[:, None] + jnp.arange(length)[None, :],
        tile=tile,
    )


class _Sums(NamedTuple):
    """The online softmax of queries so far: largest score, sum of weights, weighted values."""

    top_BKM: jax.Array
    weight_BKM: jax.Array
    value_BKMH: jax.Array


def attend_pages(
    query_BTKGH: jax.Array,
    layer: LayerCache,
    reading: Reading,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int | None = None,
    share: PageShare = WHOLE,
    scatter: bool = False,
    sinks_KG: jax.Array | None = None,
    value_size: int = 0,
) -> jax.Array:
    """Causal grouped-query attention of T queries a row over the row's pages, softmax in fp32.

    Args:
        query_BTKGH: queries, of the whole chunk.
        layer: the pages of this layer, with the keys and values of the queries' own tokens.
        reading: by `plan_reading`, with the same window.
        scale: scores are multiplied by it.
        softcap: scores x become softcap * tanh(x / softcap); 0 leaves them.
        window: a query at position i attends to positions > i - window only; None: to all before.
        share: the part of each page that this device has; what others see is added to it.
        scatter: each of these devices gets what its own part of T attended to.
        sinks_KG: a score of each query head that takes part in the softmax and has no value.
        value_size: in pages without values, the first numbers of a key that are its value.

    Returns:
        out_BTKGH in the type of the query, H that of values; zeros for rows that read nothing.
    """
    rows, length, heads, group, size = query_BTKGH.shape
    some = reading.tile.rows
    # One axis for queries and the heads that share keys: the rows of one matrix product.
    query_BKMH = query_BTKGH[reading.order].transpose(0, 2, 1, 3, 4)
    query_BKMH = query_BKMH.reshape(rows, heads, length * group, size)
    padded = reading.blocks.shape[0]
    query_BKMH = jnp.pad(query_BKMH, ((0, padded - rows), (0, 0), (0, 0), (0, 0)))

    def read(index: jax.Array, start: jax.Array, sums: _Sums) -> _Sums:
        these = _Sums(*[_rows_from(start, some, field) for field in sums])
        query = _rows_from(start, some, query_BKMH)
        block = _Block(layer, reading, share, index, start)
        scores, value = _look_at(query, block, scale, softcap, window, value_size)
        return _Sums(
            *[
                jax.lax.dynamic_update_slice_in_dim(field, new, start, 0)
                for field, new in zip(sums, _add(these, scores, *value), strict=True)
            ]
        )

    def read_all(index: jax.Array, sums: _Sums) -> _Sums:
        tiles = (jnp.sum(reading.blocks > index) + some - 1) // some
        return jax.lax.fori_loop(0, tiles, lambda tile, sums: read(index, tile * some, sums), sums)

    shape = query_BKMH.shape[:-1]
    sums = _Sums(
        jnp.full(shape, FLOOR, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, value_size or size), jnp.float32),
    )
    sums = jax.lax.fori_loop(0, reading.blocks[0], read_all, sums)
    weight_BKM, value_BKMH = add_up(share, *sums, scatter=scatter, sinks_KG=sinks_KG)
    out_BKMH = value_BKMH / jnp.maximum(weight_BKM, 1e-30)[..., None]
    # Rows that read nothing may have been in a tile with others.
    out_BKMH = jnp.where((reading.blocks > 0)[:, None, None, None], out_BKMH, 0)
    out_BKMH = out_BKMH.astype(query_BTKGH.dtype)[:rows][jnp.argsort(reading.order)]
    out_BKTGH = out_BKMH.reshape(rows, heads, -1, group, value_size or size)
    return out_BKTGH.transpose(0, 2, 1, 3, 4)


def _rows_from(start: jax.Array, some: int, array: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, start, some)


class _Block(NamedTuple):
    """Block `index` of a layer's pages for the tile of rows from `start` on."""

    layer: LayerCache
    reading: Reading
    share: PageShare
    index: jax.Array
    start: jax.Array


def _look_at(
    query_BKMH: jax.Array,
    block: _Block,
    scale: float,
    softcap: float,
    window: int | None,
    value_size: int,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    """Reads a block.

    Returns:
        scores_BKMS, FLOOR where a query may not look; value_BKSH in the type of the query, and
        their scales, f32[B,K,S], of int8 pages.
    """
    layer, reading, share, index, start = block
    some, together = reading.tile
    of_these = functools.partial(_rows_from, start, some)
    own_size = layer.own_size
    number_BY = (of_these(reading.first) + index * together)[:, None]
    number_BY = number_BY + jnp.arange(together)[None, :]
    pages_BY = jnp.take_along_axis(of_these(reading.table), number_BY, 1, mode="clip")
    # Entries after a row's last page have positions after its queries, which are masked.
    positions_BS = share.positions(number_BY, own_size).reshape(some, -1)
    behind_BTS = of_these(reading.positions)[:, :, None] - positions_BS[:, None, :]
    seen_BTS = (behind_BTS >= 0) & (index < of_these(reading.blocks))[:, None, None]
    if window is not None:
        seen_BTS &= behind_BTS < window

    def pages_of(pool: jax.Array, axis: int) -> jax.Array:
        """Returns the pages joined along their token axis."""
        pages = jnp.moveaxis(pool.at[pages_BY].get(mode="clip"), 1, axis)
        shape = pages.shape
        return pages.reshape(*shape[:axis], together * own_size, *shape[axis + 2 :])

    key_BKHS = pages_of(layer.key, 3).astype(query_BKMH.dtype)
    scores_BKMS = jnp.einsum(
        "BKMH,BKHS->BKMS", query_BKMH, key_BKHS, preferred_element_type=jnp.float32
    )
    # Of int8 pages the scales come after the product: they are the same for all of a head.
    if layer.key_scale is not None:
        scores_BKMS *= pages_of(layer.key_scale, 2)[:, :, None]
    scores_BKMS = cap(scores_BKMS * scale, softcap)
    seen_BMS = jnp.repeat(seen_BTS, query_BKMH.shape[2] // seen_BTS.shape[1], axis=1)
    scores_BKMS = jnp.where(seen_BMS[:, None], scores_BKMS, FLOOR)
    if layer.value is None:
        return scores_BKMS, (key_BKHS[:, :, :value_size].swapaxes(2, 3), None)
    value_BKSH = pages_of(layer.value, 2).astype(query_BKMH.dtype)
    value_scale_BKS = None if layer.value_scale is None else pages_of(layer.value_scale, 2)
    return scores_BKMS, (value_BKSH, value_scale_BKS)


def _add(
    sums: _Sums,
    scores_BKMS: jax.Array,
    value_BKSH: jax.Array,
    value_scale_BKS: jax.Array | None,
) -> _Sums:
    """Returns the sums with one more block."""
    top_BKM = jnp.maximum(sums.top_BKM, jnp.max(scores_BKMS, axis=-1))
    weights_BKMS = jnp.exp(scores_BKMS - top_BKM[..., None])
    kept_BKM = jnp.exp(sums.top_BKM - top_BKM)
    scaled_BKMS = weights_BKMS
    if value_scale_BKS is not None:
        scaled_BKMS = weights_BKMS * value_scale_BKS[:, :, None]
    read_BKMH = jnp.einsum(
        "BKMS,BKSH->BKMH",
        scaled_BKMS.astype(value_BKSH.dtype),
        value_BKSH,
        preferred_element_type=jnp.float32,
    )
    return _Sums(
        top_BKM,
        sums.weight_BKM * kept_BKM + jnp.sum(weights_BKMS, axis=-1),
        sums.value_BKMH * kept_BKM[..., None] + read_BKMH,
    )
