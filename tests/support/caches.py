# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Paged caches as tests make and look at them; and slots with pages for their max tokens."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from earl_jax.engine.engine import Engine
from earl_jax.engine.pages import PageTable, dense_pool
from earl_jax.models.attention.paged_attention import Reading, plan_reading
from earl_jax.models.config import ModelConfig
from earl_jax.models.kv_cache import PagedCache, empty_pages, empty_states
from earl_jax.models.layer_groups import PageRule, group_layers, pages_for


def empty_cache(
    config: ModelConfig, rows: int, max_tokens: int, page_size: int = 64, kv_dtype: str = "compute"
) -> PagedCache:
    """Pages of zeros, and a table that gives every row its own pages for `max_tokens`."""
    groups = len(group_layers(config.paged_windows).windows)
    shape = rows, groups, pages_for(max_tokens, page_size)
    pages = math.prod(shape)
    return PagedCache(
        pools=empty_pages(config, pages, page_size, kv_dtype),
        table=jnp.arange(pages, dtype=jnp.int32).reshape(shape),
        states=empty_states(config, rows),
    )


def reading_of(cache: PagedCache, *sizes: Any) -> Reading:
    """`plan_reading` of the first group of layers, with the arguments behind the page size."""
    return plan_reading(cache.table[:, 0], cache.page_size, *sizes)


def rows_of(config: ModelConfig, cache: PagedCache) -> list[dict[str, np.ndarray]]:
    """For every layer its keys and values as [B, K, S, H], read through the table, in fp32."""
    rows, _, pages = cache.table.shape
    groups, found = group_layers(config.layer_windows), []
    for group, place in map(groups.place, range(config.num_layers)):
        table, layer = np.asarray(cache.table)[:, group], cache.pools[place]
        key = np.asarray(layer.key, np.float32)[table].swapaxes(-1, -2)
        value = np.asarray(layer.value, np.float32)[table]
        sides = {}
        for name, side in (("key", key), ("value", value)):
            _, _, heads, size, width = side.shape
            sides[name] = side.swapaxes(1, 2).reshape(rows, heads, pages * size, width)
        found.append(sides)
    return found


def whole_pages(
    slots: int, max_tokens: int, page_size: int, shards: int = 1, windows: tuple[int, ...] = (0,)
) -> PageTable:
    """The pages of `empty_state` without a pool: every slot has its own, in order."""
    rule = PageRule(page_size, windows, max_tokens)
    table = PageTable(dense_pool(shards, slots, max_tokens, rule), num_slots=slots, rule=rule)
    for slot in range(slots):
        table.hold(slot, max_tokens)
    return table


def whole_pages_on(engine: Engine, max_tokens: int) -> PageTable:
    """`whole_pages` of an engine's slots."""
    config, shards = engine.config, engine.layout.num_row_shards
    windows = config.page_rule.windows
    return whole_pages(config.num_slots, max_tokens, config.page_size, shards, windows)
