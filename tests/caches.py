# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A paged cache as tests look at it: row by row."""

import numpy as np

from earl_jax.models.kv_cache import PagedCache


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
