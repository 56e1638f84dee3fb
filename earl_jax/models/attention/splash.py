# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Splash attention, JAX's Pallas kernel for TPUs, for whole training rows.

Scores never leave the chip's vector memory. Temporaries are copies of the inputs in the order that
the kernel wants, about as many bytes as the blockwise reference takes. The kernel masks what is of
another document; that it leaves such blocks out is ours, by the blocks that it is told to visit.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    SplashAttentionKernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from earl_jax.models.attention.attention_shards import on_each_shard
from earl_jax.models.remat import ATTENTION
from earl_jax.sharding.layout import Layout

# The kernel's own unit: lengths and head sizes are padded to multiples of it.
LANES = 128
# Queries and keys of one step of the grid. At 512 x 512 the scores are 1 MiB of vector memory.
BLOCK = 512


def splash_rows(
    layout: Layout,
    query_BTKGH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int | None = None,
    sinks_KG: jax.Array | None = None,
) -> jax.Array:
    """Computes `attention` of whole rows over themselves (S = T), token t of a row at position t.

    On each device for its rows and heads, without a collective: XLA cannot cut the kernel itself.
    Blocks of queries and keys without a document in common are left out. Queries of segment 0 look
    at others of their block, which is finite and never read. On CPUs the kernel's steps run as
    ordinary operations, which is slow: for tests.

    Returns:
        out_BTKGH in the type of the query.
    """

    def attend_shard(query_BTKGH, key_BKSH, value_BKSH, segment_ids_BT, sinks_KG=None):
        return _attend(
            query_BTKGH,
            key_BKSH,
            value_BKSH,
            segment_ids_BT,
            sinks_KG,
            scale=scale,
            softcap=softcap,
            window=window,
            interpret=layout.platform == "cpu",
        )

    sinks = () if sinks_KG is None else (sinks_KG,)
    attend = on_each_shard(layout, attend_shard)
    return attend(query_BTKGH, key_BKSH, value_BKSH, segment_ids_BT, *sinks)


def _attend(
    query_BTKGH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    segment_ids_BT: jax.Array,
    sinks_KG: jax.Array | None,
    *,
    scale: float,
    softcap: float,
    window: int | None,
    interpret: bool,
) -> jax.Array:
    """Computes one device's rows and heads, padded to the sizes of the kernel."""
    rows, length, kv_heads, groups, head_size = query_BTKGH.shape
    heads = kv_heads * groups
    block = min(BLOCK, _up(length, LANES))
    more_T, more_H = _up(length, block) - length, _up(head_size, LANES) - head_size
    # Scaled in fp32: the kernel takes scores as they come.
    query_BTKGH = (query_BTKGH.astype(jnp.float32) * scale).astype(query_BTKGH.dtype)
    # Heads as [B, N, T, H] with the groups of a key/value head together, as the kernel wants them.
    query = query_BTKGH.transpose(0, 2, 3, 1, 4).reshape(rows, heads, length, head_size)
    widths = ((0, 0), (0, 0), (0, more_T), (0, more_H))
    query, key, value = (jnp.pad(array, widths) for array in (query, key_BKSH, value_BKSH))
    segments = jnp.pad(segment_ids_BT, ((0, 0), (0, more_T)))
    kernel = _kernel(heads, length + more_T, block, softcap, window, interpret)
    sinks_N = None if sinks_KG is None else sinks_KG.reshape(heads).astype(jnp.float32)

    def attend_row(query, key, value, segment_ids_T) -> Any:
        own = _leave_out_other_documents(kernel, segment_ids_T, block)
        return own(query, key, value, splash.SegmentIds(segment_ids_T, segment_ids_T), sinks_N)

    out: jax.Array = jax.vmap(attend_row)(query, key, value, segments)
    out = out[:, :, :length, :head_size].reshape(rows, kv_heads, groups, length, head_size)
    return out.transpose(0, 3, 1, 2, 4).astype(query_BTKGH.dtype)


def _kernel(
    heads: int, length: int, block: int, softcap: float, window: int | None, interpret: bool
) -> SplashAttentionKernel:
    shape = (length, length)
    if window is None or window >= length:
        mask = splash.CausalMask(shape)
    else:
        mask = splash.LocalMask(shape, window_size=(window - 1, 0), offset=0)
    return splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        residual_checkpoint_name=ATTENTION,
        attn_logits_soft_cap=softcap or None,
        interpret=interpret,
    )


def _leave_out_other_documents(
    kernel: SplashAttentionKernel, segment_ids_T: jax.Array, block: int
) -> SplashAttentionKernel:
    """Returns the kernel for one row: of its blocks those that have a document in common.

    A document is a stretch of the row with one number; of padding each block is one, which looks at
    itself so that its sums are not 0.
    """
    is_first_T = jnp.arange(len(segment_ids_T)) % block == 0
    begins_T = jnp.pad(segment_ids_T[1:] != segment_ids_T[:-1], (1, 0))
    begins_T |= is_first_T & (segment_ids_T == 0)
    documents = jnp.cumsum(begins_T, dtype=jnp.int32).reshape(-1, block)
    first_b, last_b = documents[:, 0], documents[:, -1]
    steps = jnp.arange(len(documents))

    def own(info: Any, axis: int) -> MaskInfo:
        """Returns the blocks to visit along `axis`: 2 those of keys, 1 those of queries."""
        numbers = info.data_next.astype(jnp.int32)
        queries, keys = (steps[:, None], numbers[0]) if axis == 2 else (numbers[0], steps[None])
        in_common = (first_b[queries] <= last_b[keys]) & (first_b[keys] <= last_b[queries])
        visited = jnp.where(in_common, info.block_mask, 0)
        # A step that is left out has the next block that is visited, or behind it the last one, so
        # that none is fetched for it. Along the axis they ascend.
        following = jnp.where(visited > 0, numbers, len(documents))
        following = jax.lax.cummin(following, axis=axis, reverse=True)
        final = jnp.max(jnp.where(visited > 0, numbers, 0), axis=axis, keepdims=True)
        fetched = jnp.minimum(following, final).astype(info.data_next.dtype)
        return info._replace(block_mask=visited, data_next=fetched)

    infos = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    own_infos = [own(info, axis) for info, axis in zip(infos, (2, 2, 1), strict=True)]
    return SplashAttentionKernel(*own_infos, **kernel.kwargs)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
