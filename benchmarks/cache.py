# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token a row over its KV cache: pages against one dense array a row.

    uv run python benchmarks/cache.py

On one CPU device, fp32, 2 key/value heads of 64 and 4 query heads, 4 layers one behind the other
(as the tiny Qwen2 of rollout.md has), for equal and for long-tailed lengths: milliseconds, the
fastest of as many runs as fit into a second. Dense attention reads the room that every row has; by
pages what is there is read, through copies of a few rows' pages at a time. Prints a Markdown table.
"""

import functools
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.engine.pages import pages_for
from earl_jax.models.attention.paged_attention import Tile, attend_pages, plan_reading
from earl_jax.models.kv_cache import LayerCache, PagedCache

LAYERS, KV_HEADS, GROUPS, HEAD_SIZE = 4, 2, 2, 64
CASES = ((16, 192, "equal"), (64, 192, "equal"), (64, 576, "equal"), (64, 2304, "long tail"))
PAGE_SIZES, ROWS_AT_A_TIME = (16, 64, 128, 192), (4, 8, 16)


def lengths_of(rows: int, max_tokens: int, kind: str) -> np.ndarray:
    """Tokens in each row's cache: all but full, or one full among rows of a sixteenth of that."""
    if kind == "equal":
        return np.full(rows, max_tokens - 1, np.int32)
    drawn = max_tokens / 16 * np.exp(0.5 * np.random.default_rng(0).standard_normal(rows))
    lengths = np.minimum(max_tokens - 1, drawn.astype(np.int32))
    lengths[0] = max_tokens - 1
    return lengths.astype(np.int32)


def normal(*shape: int) -> jax.Array:
    """Noise."""
    return jax.random.normal(jax.random.key(len(shape)), shape, jnp.float32)


def dense(keys_last: bool, query: jax.Array, key: jax.Array, value: jax.Array, cached: jax.Array):
    """Attention over whole rows, keys as [B,K,S,H] or, summed over an outer axis, as [B,K,H,S]."""
    axes = "BKGH,BKSH->BKGS" if keys_last else "BKGH,BKHS->BKGS"
    scores = jnp.einsum(axes, query, key) * HEAD_SIZE**-0.5
    seen = jnp.arange(value.shape[2])[None, :] <= cached[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
    return jnp.einsum("BKGS,BKSH->BKGH", weights, value)


def paged(some: int, query: jax.Array, layer: LayerCache, table: jax.Array, cached: jax.Array):
    """The same over pages, as the engine has it."""
    cache, ones = PagedCache(layers=[layer], table=table), jnp.ones_like(cached)
    reading = plan_reading(cache, cached, ones, 1, None, Tile(rows=some, pages=1))
    return attend_pages(query[:, None], layer, reading, scale=HEAD_SIZE**-0.5)[:, 0]


def milliseconds(attend: Callable[..., jax.Array], query: jax.Array, *arrays: Any) -> float:
    """Of LAYERS attentions, each of which waits for the one before."""

    @jax.jit
    def layers(query: jax.Array, *arrays: Any) -> jax.Array:
        for _ in range(LAYERS):
            # Only a little of it, so that scores stay what they are.
            query = query + 1e-3 * attend(query, *arrays)
        return query

    jax.block_until_ready(layers(query, *arrays))
    best, end = float("inf"), time.perf_counter() + 1.0
    while time.perf_counter() < end:
        start = time.perf_counter()
        jax.block_until_ready(layers(query, *arrays))
        best = min(best, time.perf_counter() - start)
    return 1e3 * best


def row_of(rows: int, max_tokens: int, kind: str) -> list[str]:
    """One row of the table."""
    cached = lengths_of(rows, max_tokens, kind)
    query = normal(rows, KV_HEADS, GROUPS, HEAD_SIZE)
    value = normal(rows, KV_HEADS, max_tokens, HEAD_SIZE)
    cells = [f"{rows} x {max_tokens}, {kind}", f"{cached.mean() + 1:,.0f}"]
    for keys_last in (True, False):
        key = value if keys_last else value.swapaxes(2, 3).copy()
        attend = functools.partial(dense, keys_last)
        cells.append(f"{milliseconds(attend, query, key, value, jnp.asarray(cached)):.2f}")
    for size in PAGE_SIZES:
        number = pages_for(max_tokens, size)
        table = np.random.default_rng(1).permutation(rows * number).reshape(rows, number)
        layer = LayerCache(
            key=normal(rows * number, KV_HEADS, HEAD_SIZE, size),
            value=normal(rows * number, KV_HEADS, size, HEAD_SIZE),
        )
        times = [
            milliseconds(
                functools.partial(paged, some),
                query,
                layer,
                jnp.asarray(table, jnp.int32),
                jnp.asarray(cached),
            )
            for some in ROWS_AT_A_TIME
        ]
        cells.append(" / ".join(f"{ms:.2f}" for ms in times))
    return cells


def main() -> None:
    """Prints the table."""
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, ", end="")
    print(f"Python {platform.python_version()}, jax {jax.__version__}\n")
    rows = ", ".join(map(str, ROWS_AT_A_TIME))
    print(f"ms for {LAYERS} layers; by pages with {rows} rows at a time\n")
    names = [f"pages of {size}" for size in PAGE_SIZES]
    columns = ["rows x room", "mean tokens", "dense, keys BKSH", "dense, keys BKHS", *names]
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for case in CASES:
        print("| " + " | ".join(row_of(*case)) + " |", flush=True)


if __name__ == "__main__":
    main()
