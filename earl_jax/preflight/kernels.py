# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention kernels on the devices of a run, beside our blockwise attention, the reference.

A kernel may compile for a chip and be wrong there. Losses and rewards show that late, if at all.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from earl_jax.models.attention.folding import fold
from earl_jax.models.attention.kernels import (
    Kernel,
    PagesKernel,
    attend_rows,
    attention_over_pages,
    choose_kernel,
    choose_pages_kernel,
)
from earl_jax.models.attention.page_shares import own_share
from earl_jax.models.config import ModelConfig
from earl_jax.models.kv_cache import PagedCache, empty_pages
from earl_jax.models.layer_groups import group_layers, pages_for
from earl_jax.placement.placement import Placement
from earl_jax.sharding.layout import Layout

# Both round to bfloat16, which is 0.2 to 0.5 %; a wrong block or mask is far beyond.
_MOST_OFF = 0.03
_MOST_TOKENS = 2048
_SEED = 0


def rows_off(layout: Layout, model: ModelConfig, kernel: Kernel, length: int) -> float:
    """Returns by how much a kernel over rows of `length` tokens is off, on all devices of a layout.

    Of each result this is the norm of the difference by the norm of the reference's, which computes
    in fp32: of the attention, and of the gradients of queries, keys, values and sinks. The largest
    for any window of the model counts. Each row has three documents and padding.
    """
    rows, key_heads, groups = layout.num_row_shards, model.num_kv_heads, model.num_query_groups
    ends = jnp.array([2 * length // 5, 2 * length // 3, 9 * length // 10])
    segments = 1 + jnp.searchsorted(ends, jnp.arange(length), side="right")
    segments_BT = jnp.broadcast_to(jnp.where(segments > 3, 0, segments), (rows, length))

    def off() -> jax.Array:
        real_BT = fold(layout, segments_BT) > 0
        size, value_size, folded = model.head_size, model.value_head_size, real_BT.shape[1]
        shapes = [
            (rows, folded, key_heads, groups, size),
            (rows, key_heads, folded, size),
            (rows, key_heads, folded, value_size),
        ]
        shapes += [(key_heads, groups)] * model.attention_sinks
        *given, pull_BTKGH = _random([*shapes, (*shapes[0][:-1], value_size)], model.compute_dtype)
        pull_BTKGH = jnp.where(real_BT[:, :, None, None, None], pull_BTKGH, 0)

        def results(kernel: Kernel, dtype: str, window: int) -> list[jax.Array]:
            def attend(
                query: jax.Array, key: jax.Array, value: jax.Array, *sinks: jax.Array
            ) -> jax.Array:
                out_BTKGH = attend_rows(
                    kernel,
                    layout,
                    query,
                    key,
                    value,
                    segments_BT,
                    scale=model.attention_scale,
                    softcap=model.attention_softcap,
                    window=window or None,
                    windows=model.paged_windows,
                    sinks_KG=sinks[0] if sinks else None,
                )
                return jnp.where(real_BT[:, :, None, None, None], out_BTKGH, 0)

            out_BTKGH, back = jax.vjp(attend, *(array.astype(dtype) for array in given))
            return [out_BTKGH, *back(pull_BTKGH.astype(out_BTKGH.dtype))]

        return jnp.array(
            [
                _distance(one, other)
                for window in sorted(set(model.paged_windows))
                for one, other in zip(
                    results(kernel, model.compute_dtype, window),
                    results("blockwise", "float32", window),
                    strict=True,
                )
            ]
        ).max()

    return float(jax.jit(off, out_shardings=NamedSharding(layout.mesh, P()))())


def pages_off(
    layout: Layout,
    model: ModelConfig,
    kernel: PagesKernel,
    page_size: int,
    kv_dtype: str,
    length: int,
) -> float:
    """Returns by how much a kernel over pages is off, for `length` queries a row, on one device.

    The device has its share of the heads, of a page, and rows of up to `_MOST_TOKENS` tokens. The
    largest for any window of the model counts; as `rows_off`.
    """
    shape = layout.shape
    heads, key_heads = model.num_heads // shape.tensor, max(1, model.num_kv_heads // shape.tensor)
    own = dataclasses.replace(model, num_heads=heads, num_kv_heads=key_heads)
    groups, own_page = group_layers(model.paged_windows), page_size // shape.context
    cached_B = jnp.array([0, 1, own_page + 3, _MOST_TOKENS - length])
    counts_B = jnp.array([length, length, length, (length + 1) // 2])
    each = pages_for(_MOST_TOKENS + own_page, own_page)
    table = jnp.arange(len(cached_B) * len(groups.windows) * each, dtype=jnp.int32)
    query_heads = (1, heads) if model.latent_size else (key_heads, heads // key_heads)
    is_real = (jnp.arange(length)[None] < counts_B[:, None])[:, :, None, None, None]

    def off() -> jax.Array:
        pages = empty_pages(own, len(table), own_page, kv_dtype)[0]
        leaves, tree = jax.tree.flatten(pages)
        dtypes = [leaf.dtype for leaf in leaves]
        drawn = _random([leaf.shape for leaf in leaves], "float32")
        # Numbers in int8 times scales that are as large as they would be.
        pages = tree.unflatten(
            (40 * x).clip(-127, 127).astype(dtype)
            if dtype == jnp.int8
            else (jnp.abs(x) / 40 if x.ndim == 3 else x).astype(dtype)
            for x, dtype in zip(drawn, dtypes, strict=True)
        )
        cache = PagedCache(
            pools=[pages], table=table[::-1].reshape(len(cached_B), len(groups.windows), each)
        )
        size = model.cached_size if model.latent_size else model.head_size
        query_BTKGH, sinks_KG = _random(
            [(len(cached_B), length, *query_heads, size), query_heads], model.compute_dtype
        )

        def results(kernel: PagesKernel) -> list[jax.Array]:
            readings, look = attention_over_pages(
                kernel, layout.platform, own, cache, cached_B, counts_B, length
            )
            return [
                jnp.where(
                    is_real,
                    look(
                        query_BTKGH,
                        pages,
                        reading,
                        window or None,
                        own_share(1),
                        False,
                        sinks_KG if model.attention_sinks else None,
                    ),
                    0,
                )
                for reading, window in zip(readings, groups.windows, strict=True)
            ]

        return jnp.array(list(map(_distance, results(kernel), results("blockwise")))).max()

    return float(jax.jit(off)())


def misfits(placement: Placement) -> tuple[list[str], list[str]]:
    """Returns the kernels of the plans in use that do not compute the reference, and lines."""
    stages, rollout, train = placement.stages, placement.plans.rollout, placement.train
    own: list[tuple[str, str, float | str]] = []
    if stages.cluster.trains:
        layout, learner = stages.learner.layout(train.mesh), stages.learner
        length, setting = min(placement.length, _MOST_TOKENS), learner.config.attention
        choice = choose_kernel(setting, layout, learner.model, length)
        if (kernel := choice.kernel) != "blockwise":
            found = _tried(lambda: rows_off(layout, learner.model, kernel, length))
            own.append(("train", str(choice), found))
    if rollout is not None and stages.cluster.plays:
        engine = stages.engines.engine(rollout.mesh, rollout.num_slots)
        given, config, model = engine.layout, engine.config, engine.config.model
        paged = choose_pages_kernel(config.rules.attention, given, model, config.page_size)
        if (over_pages := paged.kernel) != "blockwise":
            for length in (1, config.rules.tile_width):
                sizes = (over_pages, config.page_size, config.kv_dtype, length)
                found = _tried(lambda sizes=sizes: pages_off(given, model, *sizes))
                own.append(("rollout", f"{paged} (queries of a row: {length})", found))
    each = stages.cluster.gather(own, "the kernels of the other processes")
    lines = [
        f"attention of {stage}: {words}: {off if isinstance(off, str) else f'{off:.2%} off'}"
        for stage, words, off in each[0]
    ]
    problems = [
        f"attention of {stage} on {host}: {words}: "
        f"{off if isinstance(off, str) else f'{off:.2%} off the reference'}; set "
        f"config.{stage}.attention to 'blockwise'"
        for host, found in zip(stages.cluster.hosts, each, strict=True)
        for stage, words, off in found
        if isinstance(off, str) or not off <= _MOST_OFF
    ]
    return problems, lines


def _tried(measure: Callable[[], float]) -> float | str:
    """Returns what it measures, or why the devices do not run it."""
    try:
        return measure()
    except jax.errors.JaxRuntimeError as error:
        return f"does not run: {str(error).splitlines()[0]}"


def _random(shapes: list[Any], dtype: str) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(_SEED), len(shapes))
    return [
        jax.random.normal(key, shape, jnp.dtype(dtype))
        for key, shape in zip(keys, shapes, strict=True)
    ]


def _distance(one: jax.Array, other: jax.Array) -> jax.Array:
    one, other = one.astype(jnp.float32), other.astype(jnp.float32)
    return jnp.linalg.norm(one - other) / jnp.linalg.norm(other)
