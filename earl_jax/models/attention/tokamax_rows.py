# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Flash attention of tokamax for Hopper and Blackwell GPUs, for whole training rows.

tokamax is an optional extra, for Python 3.12 and later. Its mask by ranges, which says for every
query where the keys begin that it looks at, has no public name yet: hence one known version.

It looks up the GPU of JAX's default device whenever any pass of it is traced. To compile for
GPUs that are not here, lower under `jax.default_device` of one of their topology.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import logging

import jax
import jax.numpy as jnp

from earl_jax.models.attention.attention_shards import on_each_shard
from earl_jax.models.attention.rows import Window
from earl_jax.models.config import ModelConfig
from earl_jax.sharding.layout import Layout

VERSION = "0.0.17"
# Compute capabilities that it has a backward pass for: the first, and the first beyond.
CAPABILITIES = (9.0, 11.0)


def tokamax_obstacle(layout: Layout, model: ModelConfig) -> str | None:
    """Returns why this model cannot train with it on these devices; None where it can."""
    if layout.platform not in ("gpu", None):
        return f"its kernel is for GPUs and these are {layout.platform} devices"
    if importlib.util.find_spec("tokamax") is None:
        return (
            "tokamax is not installed (`uv sync --extra tokamax`, on Python 3.12 or later, has "
            "the fast kernel for GPUs)"
        )
    if (found := importlib.metadata.version("tokamax")) != VERSION:
        return f"tokamax {found} is installed, and only {VERSION} is known to work"
    if layout.platform:
        chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        default = chosen or jax.devices()[0]
        capability = getattr(default, "compute_capability", None)
        if capability is None:
            return "tokamax goes by JAX's default device, which is not one of these GPUs"
        if not CAPABILITIES[0] <= float(capability) < CAPABILITIES[1]:
            return f"tokamax cannot train on GPUs of compute capability {capability}"
    if model.compute_dtype != "bfloat16":
        return (
            "tokamax's kernel computes in bfloat16 and config.model.compute_dtype is "
            f"{model.compute_dtype!r}"
        )
    return None


def tokamax_rows(
    layout: Layout,
    query_BTKGH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    scale: float,
    softcap: float = 0.0,
    window: Window = None,
) -> jax.Array:
    """Computes `attention` of whole rows over themselves (S = T), token t of a row at position t.

    On each device for its rows and heads, without a collective. Queries of segment 0 look at each
    other, which is finite and never read. On CPUs it is tokamax's own reference, which makes all
    scores: for tests. JAX 0.12.0 cannot interpret its kernels there (barriers of 288 threads in
    Hopper's, transformed references in Blackwell's).

    Returns:
        out_BTKGH in the type of the query.
    """
    order_BT = jax.lax.broadcasted_iota(jnp.int32, segment_ids_BT.shape, 1)
    begins_BT = jnp.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
    # The first key that each query looks at; the last is its own.
    first_BT = jax.lax.cummax(jnp.where(begins_BT, order_BT, 0), axis=1)
    if window is not None:
        first_BT = jnp.maximum(first_BT, order_BT - (window - 1))
    implementation = "xla" if layout.platform == "cpu" else "mosaic_gpu"
    attend_shard = functools.partial(_call, implementation, scale, softcap)
    return on_each_shard(layout, attend_shard)(query_BTKGH, key_BKSH, value_BKSH, first_BT)


def _is_of_use(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Autotuning cache miss")


def _call(
    implementation: str,
    scale: float,
    softcap: float,
    query_BTKGH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    first_BT: jax.Array,
) -> jax.Array:
    # It warns for each shape and pass that its table of tuned settings has none for it.
    if _is_of_use not in (logger := logging.getLogger("absl")).filters:
        logger.addFilter(_is_of_use)
    # By name, and here: whoever does not use it need not have it, nor wait for its import.
    attend = importlib.import_module("tokamax._src.ops.attention.api").IMPLEMENTATIONS
    make_mask = importlib.import_module("tokamax._src.ops.attention.base").Mask
    rows, length, kv_heads, groups, head_size = query_BTKGH.shape
    out = attend[implementation](
        query_BTKGH.reshape(rows, length, kv_heads * groups, head_size),
        key_BKSH.swapaxes(1, 2),
        value_BKSH.swapaxes(1, 2),
        mask=make_mask(is_causal=True, k_start=first_BT[:, None, :]),
        logits_scale=scale,
        logits_soft_cap=softcap or None,
    )
    return out.reshape(query_BTKGH.shape).astype(query_BTKGH.dtype)
