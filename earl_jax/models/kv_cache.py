# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The KV cache in pages: pools of pages, and a table of the pages of each row.

A page holds `page_size` consecutive tokens of one row; page j of a row holds the positions from
j * page_size on, at any index of the pool. So memory follows the tokens in use, rows with a common
prefix may share pages, and nothing moves when a row grows.

Keys are stored [Z, K, H, S] and values [Z, K, S, H]: then neither of the two products of decoding
sums over the innermost axis, which XLA's CPU code does one number at a time (64 rows over 576
tokens, fp32: 20.3 ms a layer against 1.1 ms for the keys, 2026-11).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from earl_jax.models.attention.delta_rule import LinearState, empty_linear_state
from earl_jax.models.attention.page_shares import WHOLE, LayerCache, PageShare
from earl_jax.models.config import ModelConfig
from earl_jax.models.layer_groups import group_layers


@struct.dataclass(frozen=True, kw_only=True)
class PagedCache:
    """Pools of Z pages, and `table` i32[B,G,Y]: each row's pages, by group of layers.

    There is a pool for each layer of a group: page z has the tokens of one group's layers, in all
    pools (layer_groups.py). Entries behind a row's length are not read, nor written, nor are those
    of pages behind a group's window read. Inside a `shard_map` that cuts pages over `context` a
    device has one of `parts` of each page, else all.

    Layers of linear attention have `states` of slots in place of pages. A row is the slot of its
    number; or that of `slots` i32[B], where several rows are tokens of one slot.
    """

    pools: list[LayerCache]
    table: jax.Array
    states: list[LinearState] = struct.field(default_factory=list)
    slots: jax.Array | None = None
    parts: int = struct.field(default=1, pytree_node=False)

    @property
    def page_size(self) -> int:
        """Positions of a page, in all its parts."""
        return self.pools[0].own_size * self.parts

    @property
    def num_pages(self) -> int:
        """Pages of a pool."""
        return self.pools[0].key.shape[0]


def empty_pages(
    config: ModelConfig, pages: int, page_size: int, kv_dtype: str = "compute"
) -> list[LayerCache]:
    """Returns pools of zeros, one a layer of a group; `kv_dtype` is "compute" or "int8".

    Latents have the compute type.
    """
    assert kv_dtype == "compute" or not config.latent_size
    dtype = jnp.dtype(config.compute_dtype if kv_dtype == "compute" else kv_dtype)
    heads, size = config.num_kv_heads, config.head_size
    if config.latent_size:
        heads, size = 1, config.cached_size

    def scales() -> jax.Array | None:
        if kv_dtype == "compute":
            return None
        return jnp.zeros((pages, heads, page_size), jnp.float32)

    return [
        LayerCache(
            key=jnp.zeros((pages, heads, size, page_size), dtype),
            value=None if config.latent_size else jnp.zeros((pages, heads, page_size, size), dtype),
            key_scale=scales(),
            value_scale=scales(),
        )
        for _ in range(group_layers(config.paged_windows).size)
    ]


def empty_states(config: ModelConfig, slots: int) -> list[LinearState]:
    """Returns the states of slots that have read nothing, one a layer of linear attention."""
    return [
        empty_linear_state(
            slots,
            config.linear_key_heads,
            config.linear_groups,
            config.linear_key_size,
            config.linear_value_size,
            config.conv_size,
            jnp.dtype(config.compute_dtype),
        )
        for _ in range(config.num_linear_layers)
    ]


def place_pages(layer: LayerCache, place: Callable[[str], Any]) -> LayerCache:
    """Returns `place` of each array by its letters; positions of a page are split as tokens (T).

    Latents, which all heads read, are whole on each device of the `tensor` axis.
    """
    letters = {"key": "ZKHT", "value": "ZKTH", "key_scale": "ZKT", "value_scale": "ZKT"}
    if layer.value is None:
        return LayerCache(key=place("Z.HT"), value=None)
    return LayerCache(
        **{name: place(axes) for name, axes in letters.items() if getattr(layer, name) is not None}
    )


def write(
    layer: LayerCache,
    table_BY: jax.Array,
    key_BTKH: jax.Array,
    value_BTKH: jax.Array | None,
    starts_B: jax.Array,
    counts_B: jax.Array,
    *,
    value_size: int = 0,
    whole_pages: bool = False,
    share: PageShare = WHOLE,
) -> LayerCache:
    """Writes row b's first `counts_B[b]` new keys and values at its positions from `starts_B[b]`.

    Tokens past the table's last page are dropped, and those in another device's `share` of a page.
    Pages of latents have no values, but the first `value_size` numbers of keys. Of what is not
    finite the keys alone become NaN (`_fail_by_keys`). With `whole_pages` changed pages are read,
    changed and written as a whole; no two rows may then write to one page.
    """
    new = _NewTokens(
        table_BY,
        starts_B,
        counts_B,
        length=key_BTKH.shape[1],
        num_pages=layer.key.shape[0],
        own_size=layer.own_size,
        share=share,
    )
    put = new.put_pages if whole_pages else new.put_tokens
    key_BTKH, value_BTKH = _fail_by_keys(key_BTKH, value_BTKH, value_size)
    if layer.value is None or value_BTKH is None:
        return LayerCache(key=put(layer.key, key_BTKH, 3), value=None)
    if layer.key_scale is None or layer.value_scale is None:
        return LayerCache(key=put(layer.key, key_BTKH, 3), value=put(layer.value, value_BTKH, 2))
    (key_BTKH, key_scale_BTK), (value_BTKH, value_scale_BTK) = map(_round, (key_BTKH, value_BTKH))
    return LayerCache(
        key=put(layer.key, key_BTKH, 3),
        value=put(layer.value, value_BTKH, 2),
        key_scale=put(layer.key_scale, key_scale_BTK, 2),
        value_scale=put(layer.value_scale, value_scale_BTK, 2),
    )


def _fail_by_keys(
    key_BTKH: jax.Array, value_BTKH: jax.Array | None, value_size: int
) -> tuple[jax.Array, jax.Array | None]:
    """Returns keys that are NaN where values are not finite, and values that are 0 there.

    Attention gives a token that a query may not look at the weight 0, but 0 * NaN is NaN: values
    that are not finite would spoil queries before them, and those of rows that are given the page
    later. A key's score is replaced where the query may not look, and is NaN where it may.

    It takes no time that shows: with it a rollout of 16 x 128 tokens took 0.99 of the processor
    time without it, from 0.92 to 1.10 (median of nine pairs; 4 layers of width 256, fp32, a shared
    CPU, jax 0.10.2, 2026-12-01).
    """
    if value_BTKH is not None:
        is_finite = jnp.isfinite(value_BTKH)
        return jnp.where(is_finite, key_BTKH, jnp.nan), jnp.where(is_finite, value_BTKH, 0)
    latent, rotated = key_BTKH[..., :value_size], key_BTKH[..., value_size:]
    is_finite = jnp.isfinite(latent)
    rotated = jnp.where(jnp.all(is_finite, axis=-1, keepdims=True), rotated, jnp.nan)
    return jnp.concatenate([jnp.where(is_finite, latent, 0), rotated], axis=-1), None


def writes_whole_pages(platform: str | None) -> bool:
    """Returns True if `write` writes whole pages on this platform; None is the CPU.

    XLA for TPUs writes single tokens in another order of axes than it reads pages in, and copies
    every pool to and fro in each decode step: with a cache of 1.00 GiB, 1.91 GiB of temporaries
    instead of 0.25 (Llama, 2 layers, v6e, jax 0.12.0). A CPU writes 64 tokens in 10 us, and 64
    pages of 16 in 157 us (fp32, 2 heads of 64, jax 0.10.2).
    """
    return platform == "tpu"


class _NewTokens(NamedTuple):
    """The targets of the first `counts` of `length` new tokens a row, from `starts` on."""

    table_BY: jax.Array
    starts_B: jax.Array
    counts_B: jax.Array
    length: int
    num_pages: int
    own_size: int
    share: PageShare

    @property
    def page_size(self) -> int:
        """Positions of a page, in all its parts."""
        return self.own_size * self.share.parts

    def put_tokens(self, pool: jax.Array, new_BTK: jax.Array, axis: int) -> jax.Array:
        """Returns the pool with the tokens written; `axis` of the pool is the tokens of a page."""
        offsets_BT = jnp.arange(self.length)[None, :]
        positions_BT = self.starts_B[:, None] + offsets_BT
        index_BT = positions_BT // self.page_size
        pages_BT = jnp.take_along_axis(self.table_BY, index_BT, axis=1, mode="clip")
        written_BT = (offsets_BT < self.counts_B[:, None]) & (index_BT < self.table_BY.shape[1])
        inside_BT = positions_BT % self.page_size
        if self.share.parts > 1:
            written_BT &= inside_BT // self.own_size == self.share.index
            inside_BT %= self.own_size
        pages_BT = jnp.where(written_BT, pages_BT, self.num_pages)
        index = (pages_BT, *(slice(None),) * (axis - 1), inside_BT)
        return pool.at[index].set(new_BTK.astype(pool.dtype), mode="drop")

    def put_pages(self, pool: jax.Array, new_BTK: jax.Array, axis: int) -> jax.Array:
        """Does the same as `put_tokens`, a page at a time."""
        # The most pages that `length` consecutive tokens can touch.
        number = (self.length + self.page_size - 2) // self.page_size + 1
        index_BN = (self.starts_B // self.page_size)[:, None] + jnp.arange(number)[None, :]
        pages_BN = jnp.take_along_axis(self.table_BY, index_BN, axis=1, mode="clip")
        positions_BNS = self.share.positions(index_BN, self.own_size)
        token_BNS = positions_BNS - self.starts_B[:, None, None]
        is_new_BNS = (token_BNS >= 0) & (token_BNS < self.counts_B[:, None, None])
        is_new_BNS &= (index_BN < self.table_BY.shape[1])[:, :, None]

        def as_pages(x_BNS: jax.Array) -> jax.Array:
            """Moves axis S of [B,N,S,...] to its position in the pool."""
            return jnp.moveaxis(x_BNS, 2, axis + 1)

        ones = (1,) * (new_BTK.ndim - 2)
        token_BX = jnp.clip(token_BNS, 0, self.length - 1).reshape(len(token_BNS), -1, *ones)
        new_BX = jnp.take_along_axis(new_BTK, token_BX, axis=1).astype(pool.dtype)
        pages = jnp.where(
            as_pages(is_new_BNS.reshape(*is_new_BNS.shape, *ones)),
            as_pages(new_BX.reshape(*is_new_BNS.shape, *new_BTK.shape[2:])),
            pool.at[pages_BN].get(mode="clip"),
        )
        written_BN = jnp.where(jnp.any(is_new_BNS, axis=2), pages_BN, self.num_pages)
        return pool.at[written_BN].set(pages, mode="drop")


def _round(x_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns whole numbers from -127 to 127, and the common scale of each head's numbers."""
    x32 = x_BTKH.astype(jnp.float32)
    scale_BTK = jnp.max(jnp.abs(x32), axis=-1) / 127
    safe_BTK = jnp.where(scale_BTK > 0, scale_BTK, 1.0)
    return jnp.round(x32 / safe_BTK[..., None]), scale_BTK
