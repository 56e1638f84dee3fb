# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Paged caches as tests make and look at them; and slots with pages for their max tokens."""

import jax.numpy as jnp
import numpy as np

from earl_jax.engine.engine import Engine
from earl_jax.engine.pages import PageTable, dense_pool, pages_for
from earl_jax.models.config import ModelConfig
from earl_jax.models.kv_cache import PagedCache, empty_pages


def empty_cache(
    config: ModelConfig, rows: int, max_tokens: int, page_size: int = 64, kv_dtype: str = "compute"
) -> PagedCache:
    """Pages of zeros, and a table that gives every row its own pages for `max_tokens`."""
    per_row = pages_for(max_tokens, page_size)
    return PagedCache(
        layers=empty_pages(config, rows * per_row, page_size, kv_dtype),
        table=jnp.arange(rows * per_row, dtype=jnp.int32).reshape(rows, per_row),
    )


def rows_of(cache: PagedCache) -> list[dict[str, np.ndarray]]:
    """For every layer its keys and values as [B, K, S, H], read through the table, in fp32."""
    table = np.asarray(cache.table)
    rows, pages = table.shape
    found = []
    for layer in cache.layers:
        key = np.asarray(layer.key, np.float32)[table].swapaxes(-1, -2)
        value = np.asarray(layer.value, np.float32)[table]
        sides = {}
        for name, side in (("key", key), ("value", value)):
            _, _, heads, size, width = side.shape
            sides[name] = side.swapaxes(1, 2).reshape(rows, heads, pages * size, width)
        found.append(sides)
    return found


def whole_pages(slots: int, max_tokens: int, page_size: int, shards: int = 1) -> PageTable:
    """The pages of `empty_state` without a pool: every slot has its own, in order."""
    table = PageTable(
        dense_pool(shards, slots, max_tokens, page_size), num_slots=slots, page_size=page_size
    )
    for slot in range(slots):
        table.hold(slot, max_tokens)
    return table


def whole_pages_on(engine: Engine, max_tokens: int) -> PageTable:
    """`whole_pages` of an engine's slots."""
    config = engine.config
    return whole_pages(config.num_slots, max_tokens, config.page_size, engine.layout.num_row_shards)
