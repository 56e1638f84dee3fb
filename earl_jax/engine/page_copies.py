# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Small programs of fixed shape that copy pages out of the pools into blocks, and back.

A block holds some pages of every layer for each row shard, [L, R * P, K, ...]: the pages that row
shard r names are at r * P. Each shard copies its own pages, every device its own heads: no
collective, and no shard waits for another. `send` alone has one, because
its pages go from one shard to others.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from earl_jax.engine.decode_state import DecodeState
from earl_jax.models.kv_cache import LayerCache, place_pages
from earl_jax.models.layer_groups import PageRule
from earl_jax.sharding.layout import Layout
from earl_jax.sharding.placing import place

# Large enough that a long context takes few calls, small enough that the last is not much waste.
TOKENS_A_CALL = 256
# What `mark` does to a slot.
LEAVE, SLEEP, WAKE = 0, 1, 2


def take_pages(pools: list[LayerCache], pages_P: jax.Array) -> LayerCache:
    """Returns the contents of these pages of every layer, stacked: [L,P,K,...]."""
    return jax.tree.map(
        lambda *sides: jnp.stack([side.at[pages_P].get(mode="clip") for side in sides]), *pools
    )


def put_pages(
    pools: list[LayerCache], block: list[LayerCache], pages_P: jax.Array, count: jax.Array
) -> list[LayerCache]:
    """Returns the pools with the first `count` pages of a block, [P,K,...] a layer, at `pages_P`.

    The pages are written one after the other, because then they are written in place.
    """

    def put_one(index: jax.Array, pools: list[LayerCache]) -> list[LayerCache]:
        def put(pool: jax.Array, some: jax.Array) -> jax.Array:
            page = jax.lax.dynamic_slice_in_dim(some, index, 1, 0)
            return jax.lax.dynamic_update_slice_in_dim(pool, page, pages_P[index], 0)

        return jax.tree.map(put, pools, block)

    return jax.lax.fori_loop(0, count, put_one, pools)


def _from_one(block: LayerCache, is_source: jax.Array, row_axes: tuple[str, ...]) -> LayerCache:
    """Returns the block of the row shard that is the source, on all row shards."""

    def add_zeros(side: jax.Array) -> jax.Array:
        # In types that every backend adds, and that hold every number of the narrower ones.
        wide = jnp.float32 if jnp.issubdtype(side.dtype, jnp.floating) else jnp.int32
        sent = jnp.where(is_source, side.astype(wide), 0)
        return jax.lax.psum(sent, row_axes).astype(side.dtype)

    return jax.tree.map(add_zeros, block)


def _unstack(block: LayerCache, number: int) -> list[LayerCache]:
    return [
        jax.tree.map(lambda stacked, layer=layer: stacked[layer], block) for layer in range(number)
    ]


class PageCopies:
    """The programs for one engine; each is compiled once for a pool's size."""

    def __init__(self, layout: Layout, pool_shardings: list[LayerCache], rule: PageRule) -> None:
        """Builds the programs; `pool_shardings` as of `DecodeState.cache.pools`."""
        self.layout = layout
        self.num_shards = layout.num_row_shards
        self.pages_a_call = max(1, TOKENS_A_CALL // rule.page_size) * rule.num_groups
        self.block_shardings = place_pages(
            pool_shardings[0], lambda letters: layout.activations("." + letters)
        )
        rows = P(layout.row_axes)

        def over_rows(function: Any, in_specs: Any, out_specs: Any) -> Any:
            return jax.shard_map(
                function,
                mesh=layout.mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=layout.by_hand(layout.row_axes),
                check_vma=False,
            )

        def put_block(pools: Any, block: LayerCache, pages: jax.Array, count: jax.Array) -> Any:
            return put_pages(pools, _unstack(block, len(pools)), pages, count[0])

        def send(
            pools: Any, sent: jax.Array, is_source: jax.Array, pages: jax.Array, count: jax.Array
        ) -> Any:
            block = _from_one(take_pages(pools, sent), is_source[0], layout.row_axes)
            return put_pages(pools, _unstack(block, len(pools)), pages, count[0])

        by_page = P(None, layout.row_axes)
        self._take = jax.jit(
            over_rows(take_pages, (rows, rows), by_page), out_shardings=self.block_shardings
        )
        self._put = jax.jit(
            over_rows(put_block, (rows, by_page, rows, rows), rows),
            donate_argnums=0,
            out_shardings=pool_shardings,
        )
        self._send = jax.jit(
            over_rows(send, (rows, P(), rows, rows, rows), rows),
            donate_argnums=0,
            out_shardings=pool_shardings,
        )
        self._rows, self._everywhere = layout.activations("B"), layout.activations("")
        self._mark = jax.jit(
            lambda active, marks: jnp.where(marks == LEAVE, active, marks == WAKE),
            out_shardings=self._rows,
        )
        self._blank = jax.jit(
            lambda pools: jax.tree.map(jnp.zeros_like, self._block_of(pools)),
            out_shardings=self.block_shardings,
        )

    def _block_of(self, pools: list[LayerCache]) -> LayerCache:
        return take_pages(pools, jnp.zeros(self.num_shards * self.pages_a_call, jnp.int32))

    def block_bytes(self, state: DecodeState) -> int:
        """Returns the bytes of a block of one row shard, over all of that shard's devices."""
        pools = jax.tree.leaves(state.cache.pools)
        page_bytes = sum(pool.size // pool.shape[0] * pool.dtype.itemsize for pool in pools)
        return self.pages_a_call * page_bytes

    def blank(self, state: DecodeState) -> LayerCache:
        """Returns a block of zeros."""
        return self._blank(state.cache.pools)

    def take(self, state: DecodeState, pages: np.ndarray) -> LayerCache:
        """Returns a block with these pages, i32[R,P], each numbered within its row shard."""
        return self._take(state.cache.pools, self._placed(pages.reshape(-1)))

    def put(
        self, state: DecodeState, block: LayerCache, pages: np.ndarray, counts: np.ndarray
    ) -> DecodeState:
        """Returns the state with the first `counts[r]` pages of row shard r at `pages` i32[R,P].

        Donates the pools of `state`.
        """
        placed = self._placed(pages.reshape(-1)), self._placed(counts)
        pools = self._put(state.cache.pools, block, *placed)
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, pools=pools))

    def send(
        self,
        state: DecodeState,
        source: int,
        sent: Sequence[int],
        pages: np.ndarray,
        counts: np.ndarray,
    ) -> DecodeState:
        """Returns the state with the first `counts[r]` of the pages `sent` in pages of row shard r.

        `sent` are at most `pages_a_call`, numbered within row shard `source`, and `pages` i32[R,P]
        within row shard r. Donates the pools of `state`.
        """
        numbers = np.zeros(self.pages_a_call, np.int32)
        numbers[: len(sent)] = sent
        pools = self._send(
            state.cache.pools,
            place(numbers, self._everywhere),
            self._placed(np.arange(self.num_shards) == source),
            self._placed(pages.reshape(-1)),
            self._placed(counts),
        )
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, pools=pools))

    def mark(self, state: DecodeState, marks: np.ndarray) -> DecodeState:
        """Returns the state with slots in a turn (WAKE), in none (SLEEP), or as before (LEAVE)."""
        return dataclasses.replace(
            state, active=self._mark(state.active, self._placed(marks.astype(np.int32)))
        )

    def _placed(self, numbers: np.ndarray) -> jax.Array:
        return place(numbers.astype(np.int32), self._rows)
