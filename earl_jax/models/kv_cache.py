# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The KV cache: per layer one array for keys and one for values, [B, K, S, H].

[B, K, S, H] and not [B, S, K, H]: decoding one token for 64 rows over 512 places took 2.9 ms
against 21 ms on a CPU (fp32, 2026-11), and saves a copy of one side of the cache on an H100.
"""

import dataclasses

import jax
import jax.numpy as jnp

from earl_jax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """Keys and values of one layer, [B, K, S, H] each, in the model's compute type."""

    key: jax.Array
    value: jax.Array


def empty_cache(config: ModelConfig, rows: int, places: int) -> list[LayerCache]:
    """Zeros for every layer."""
    shape = (rows, config.num_kv_heads, places, config.head_size)
    dtype = jnp.dtype(config.compute_dtype)
    return [
        LayerCache(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype))
        for _ in range(config.num_layers)
    ]


def cache_bytes(config: ModelConfig, rows: int, places: int) -> int:
    """Bytes of `empty_cache` before it is split over devices."""
    numbers = rows * places * config.num_kv_heads * config.head_size
    return 2 * config.num_layers * numbers * jnp.dtype(config.compute_dtype).itemsize


def write(side_BKSH: jax.Array, new_BTKH: jax.Array, starts_B: jax.Array, counts_B: jax.Array):
    """Writes row b's first `counts_B[b]` new entries at places `starts_B[b]`, ... of its cache.

    A gather and a select instead of a scatter: XLA's CPU and TPU scatters go update by update, and
    attention reads the whole side anyway.
    """
    places_BS = jnp.arange(side_BKSH.shape[2])[None, :] - starts_B[:, None]
    written_BS = (places_BS >= 0) & (places_BS < counts_B[:, None])
    source_BS = jnp.clip(places_BS, 0, new_BTKH.shape[1] - 1)
    moved_BSKH = jnp.take_along_axis(new_BTKH, source_BS[:, :, None, None], axis=1)
    moved_BKSH = moved_BSKH.transpose(0, 2, 1, 3).astype(side_BKSH.dtype)
    return jnp.where(written_BS[:, None, :, None], moved_BKSH, side_BKSH)
