# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Flash attention of tokamax for Hopper and Blackwell GPUs, for whole training rows.

Its mask by ranges says for every query where the keys begin that it looks at.
"""

import functools
import importlib

import jax
import jax.numpy as jnp

from earl_jax.models.attention.rows import ATTENTION_AXES, Window
from earl_jax.models.tokamax_extra import quiet_tokamax
from earl_jax.sharding.layout import Layout

# Compute capabilities that it has a backward pass for: the first, and the first beyond.
CAPABILITIES = (9.0, 11.0)


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

    On each device for its rows and heads, without a collective. Queries of segment 0 look at
    themselves, which is finite and never read. On CPUs it is tokamax's own reference, which makes
    all scores: for tests. JAX 0.12.0 cannot interpret its kernels there (barriers of 288 threads in
    Hopper's, transformed references in Blackwell's).

    Returns:
        out_BTKGH in the type of the query.
    """
    order_BT = jax.lax.broadcasted_iota(jnp.int32, segment_ids_BT.shape, 1)
    begins_BT = jnp.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
    # The first key that each query looks at; the last is its own.
    first_BT = jax.lax.cummax(jnp.where(begins_BT, order_BT, 0), axis=1)
    first_BT = jnp.where(segment_ids_BT > 0, first_BT, order_BT)
    if window is not None:
        first_BT = jnp.maximum(first_BT, order_BT - (window - 1))
    implementation = "xla" if layout.platform == "cpu" else "mosaic_gpu"
    attend_shard = functools.partial(_call, implementation, scale, softcap)
    return layout.on_each_shard(attend_shard, ATTENTION_AXES)(
        query_BTKGH, key_BKSH, value_BKSH, first_BT
    )


def _call(
    implementation: str,
    scale: float,
    softcap: float,
    query_BTKGH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    first_BT: jax.Array,
) -> jax.Array:
    quiet_tokamax()
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
