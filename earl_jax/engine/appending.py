# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Appending to the KV cache: the chunks of all slots as one ragged batch of tiles.

A tile has those new tokens of one slot that lie between two multiples of its width. A forward pass
takes a fixed number of tiles, of whichever slots have any, and passes follow until there are none
left. So what appending costs follows the number of tokens, and neither the longest chunk nor the
number of slots (Sarathi, arXiv 2308.16369, fills its batches with parts of prompts likewise).

Tiles of one slot may be in one pass: in each layer all keys and values are written before any are
read; the states of linear attention go from tile to tile. How a prompt is cut into chunks changes
no tile but the first and the last of a chunk.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.engine.config import SlotRules
from earl_jax.models.attention.delta_rule import LinearState
from earl_jax.models.kv_cache import LayerCache, PagedCache

_Written = tuple[list[LayerCache], list[LinearState]]
# fill(cache, tokens_BT, cached, count): the cache with so many tokens behind the cached ones.
Fill = Callable[[PagedCache, jax.Array, jax.Array, jax.Array], PagedCache]


class Tiles(NamedTuple):
    """N tiles, i32[N] each: the tokens `offset` to `offset + count` of the chunk of `slot`.

    They go to the positions from `start` on. Tiles that do not exist have a count of 0.
    """

    slot: jax.Array
    start: jax.Array
    offset: jax.Array
    count: jax.Array


def num_tiles(cached_B: jax.Array, count_B: jax.Array, width: int) -> jax.Array:
    """Returns the tiles i32[B] of `count_B` tokens behind `cached_B` cached ones.

    Example: width 4, 3 tokens behind 3: positions 3, and 4 to 5, are two tiles.
    """
    last_B = (cached_B + count_B - 1) // width
    return jnp.where(count_B > 0, last_B - cached_B // width + 1, 0)


def tiles_at(index_N: jax.Array, cached_B: jax.Array, count_B: jax.Array, width: int) -> Tiles:
    """Returns the tiles of these numbers; all tiles are numbered slot by slot, in ascending order.

    `cached_B` and `count_B` as of `num_tiles`.
    """
    number_B = num_tiles(cached_B, count_B, width)
    end_B = jnp.cumsum(number_B)
    # Without a loop on the devices: by default it is a search of log2(B) steps.
    slot_N = jnp.searchsorted(end_B, index_N, side="right", method="compare_all")
    exists_N = slot_N < len(end_B)
    slot_N = jnp.minimum(slot_N, len(end_B) - 1).astype(jnp.int32)
    cached_N = cached_B[slot_N]
    number_N = cached_N // width + index_N - (end_B - number_B)[slot_N]
    start_N = jnp.maximum(cached_N, number_N * width)
    stop_N = jnp.minimum(cached_N + count_B[slot_N], (number_N + 1) * width)
    return Tiles(slot_N, start_N, start_N - cached_N, jnp.where(exists_N, stop_N - start_N, 0))


def append_chunks(
    fill: Fill,
    rules: SlotRules,
    cache: PagedCache,
    chunk_BC: jax.Array,
    cached_B: jax.Array,
    count_B: jax.Array,
) -> PagedCache:
    """Appends the first `count_B` tokens of each slot's chunk behind its `cached_B` cached ones.

    `fill` writes tiles into the cache. Without tokens nothing is computed.
    """
    slots, chunk_size = chunk_BC.shape
    width, most = rules.tile_width, rules.append_tokens
    # Chunks that fill their tiles take one pass, others at most one more.
    some = max(1, min(most // width, -(-slots * chunk_size // width)))
    passes = (jnp.sum(num_tiles(cached_B, count_B, width)) + some - 1) // some

    def append_some(number: jax.Array, carry: _Written) -> _Written:
        pools, states = carry
        tiles = tiles_at(number * some + jnp.arange(some), cached_B, count_B, width)
        place_NT = tiles.offset[:, None] + jnp.arange(width)[None, :]
        tokens_NT = chunk_BC[tiles.slot[:, None], jnp.minimum(place_NT, chunk_size - 1)]
        table = cache.table[tiles.slot]
        slots = tiles.slot if states else None
        part = dataclasses.replace(cache, pools=pools, table=table, states=states, slots=slots)
        filled = fill(part, tokens_NT, tiles.start, tiles.count)
        return filled.pools, filled.states

    carry = (cache.pools, cache.states)
    pools, states = jax.lax.fori_loop(0, passes, append_some, carry)
    return dataclasses.replace(cache, pools=pools, states=states)
