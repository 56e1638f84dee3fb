# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Splash attention, JAX's Pallas kernel for TPUs, for whole training rows.

Scores never leave the chip's vector memory. Temporaries are copies of the inputs in the order that
the kernel wants, about as many bytes as the blockwise reference takes. The kernel masks what is of
another document; that it leaves such blocks out is ours, by the list of blocks to visit.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    SplashAttentionKernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from earl_jax.models.attention.partial_attention import (
    KernelSettings,
    Outcome,
    Place,
    Seen,
    Sides,
)
from earl_jax.models.attention.rows import ATTENTION_AXES
from earl_jax.models.remat import ATTENTION
from earl_jax.sharding.layout import Layout

# The kernels beneath the public one, which takes no sums of other keys: alike in jax 0.10 to 0.12.
_FORWARD: Any = splash_kernel._splash_attention_forward
_OF_QUERIES: Any = splash_kernel._splash_attention_bwd_dq
_OF_KEYS: Any = splash_kernel._splash_attention_bwd_dkv
# The kernel's own unit: lengths and head sizes are padded to multiples of it.
LANES = 128
# Queries and keys of one step of the grid. At 512 x 512 the scores are 1 MiB of vector memory.
BLOCK = 512
# Below the logarithm of any softmax's sum.
FLOOR = -1e30


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
    attend = layout.on_each_shard(attend_shard, ATTENTION_AXES)
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
    if window is not None and window >= length:
        window = None
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
    if window is None:
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
        return _visiting(info, numbers, jnp.where(in_common, info.block_mask, 0), axis)

    infos = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    own_infos = [own(info, axis) for info, axis in zip(infos, (2, 2, 1), strict=True)]
    return SplashAttentionKernel(*own_infos, **kernel.kwargs)


def _visiting(info: Any, numbers: jax.Array, visited: jax.Array, axis: int) -> MaskInfo:
    """Returns the mask of a kernel that visits the blocks where `visited` is not 0.

    `numbers` are those of the blocks along `axis` of each step.
    """
    # A step that is left out has the next block that is visited, or behind it the last one, so that
    # none is fetched for it. Along the axis they ascend.
    following = jnp.where(visited > 0, numbers, jnp.iinfo(jnp.int32).max)
    following = jax.lax.cummin(following, axis=axis, reverse=True)
    final = jnp.max(jnp.where(visited > 0, numbers, 0), axis=axis, keepdims=True)
    fetched = jnp.minimum(following, final).astype(info.data_next.dtype)
    return info._replace(block_mask=visited.astype(info.block_mask.dtype), data_next=fetched)


# Parts of rows, for ring.py.


def look(
    settings: KernelSettings, query_BKGTH: jax.Array, sides: Sides, own: Place, others: Place
) -> Seen:
    """Returns the state of a part of a row's queries over a part of its keys alone.

    What was seen is rounded to the queries' type once. See `partial_attention.look`.
    """
    shape = query_BKGTH.shape

    def of_row(pair: SplashAttentionKernel, segments: splash.SegmentIds, *arrays: jax.Array) -> Any:
        names = ("mask_value", "is_mqa", "block_sizes", "mask_function", "attn_logits_soft_cap")
        out, (log_total,) = _FORWARD(
            pair.fwd_mask_info,
            *arrays,
            segments,
            None,
            residual_checkpoint_name=None,
            save_residuals=True,
            interpret=settings.interpret,
            **{name: pair.kwargs[name] for name in names},
        )
        return out, log_total

    query = _padded(_scaled(settings, query_BKGTH).reshape(shape[0], -1, *shape[3:]))
    out_BNTH, log_total_BNT = _of_rows(settings, of_row, sides, own, others, query)
    out = out_BNTH[:, :, : shape[3], : shape[4]].reshape(shape).astype(jnp.float32)
    log_total = log_total_BNT[:, :, : shape[3]].reshape(shape[:-1])
    # A query that saw nothing has the lowest score of all, or no number.
    has_seen = log_total > FLOOR
    return Seen(
        jnp.where(has_seen[..., None], out, 0.0),
        has_seen.astype(jnp.float32),
        jnp.where(has_seen, log_total, FLOOR),
    )


def look_back(
    settings: KernelSettings,
    query_BKGTH: jax.Array,
    known: Outcome,
    sides: Sides,
    own: Place,
    others: Place,
) -> tuple[jax.Array, Sides]:
    """Returns gradients of these queries (BKGTH) and of these keys and values (BKHS), in fp32.

    They are rounded to the type of queries and keys once. See `partial_attention.look_back`.
    """
    shape = query_BKGTH.shape

    def of_row(pair: SplashAttentionKernel, segments: splash.SegmentIds, *arrays: jax.Array) -> Any:
        query, key, value, grad, log_total, projected = arrays
        given = (query, key, value, segments, None, log_total, grad, projected)
        names = ("mask_value", "is_mqa", "mask_function", "attn_logits_soft_cap")
        sizes: Any = pair.kwargs["block_sizes"]
        layouts = {"q_layout": sizes.q_layout, "k_layout": sizes.k_layout}
        both = {name: pair.kwargs[name] for name in names} | layouts
        both |= {"v_layout": sizes.v_layout, "interpret": settings.interpret}
        of_query = _OF_QUERIES(
            *given, bq=sizes.block_q, bkv=sizes.block_kv, mask_info=pair.dq_mask_info, **both
        )
        _, of_key, of_value = _OF_KEYS(
            *given,
            bq=sizes.block_q,
            bkv=sizes.block_kv,
            bkv_compute=sizes.block_kv,
            mask_info=pair.dkv_mask_info,
            use_fused_bwd_kernel=False,
            **both,
        )
        return of_query, of_key, of_value

    def of_heads(array: jax.Array) -> jax.Array:
        return _padded(array.reshape(shape[0], -1, *array.shape[3:]))

    arrays = _scaled(settings, query_BKGTH), known.grad.astype(query_BKGTH.dtype)
    query, grad = map(of_heads, arrays)
    sums = [of_heads(each[..., None])[..., 0] for each in (known.log_total, known.projected)]
    of_query, *of_sides = _of_rows(settings, of_row, sides, own, others, query, grad, *sums)
    of_query = of_query[:, :, : shape[3], : shape[4]].reshape(shape).astype(jnp.float32)
    keys, size = sides.key.shape[2:]
    of_sides = [each[:, :, :keys, :size].astype(jnp.float32).swapaxes(2, 3) for each in of_sides]
    return of_query * settings.scale, Sides(*of_sides)


def _of_rows(
    settings: KernelSettings,
    of_row: Callable[..., Any],
    sides: Sides,
    own: Place,
    others: Place,
    query_BNTH: jax.Array,
    *arrays: jax.Array,
) -> Any:
    """Calls `of_row(kernel, segments, query, key, value, *arrays)` for each row, in blocks."""
    key, value = map(_padded, sides)
    length, keys = query_BNTH.shape[2], key.shape[2]
    block = min(BLOCK, length)
    kernel = _kernel(
        query_BNTH.shape[1], length, block, settings.softcap, settings.window, settings.interpret
    )
    # Padding has numbers of its own: it is not seen, and sees nothing.
    segments = [
        jnp.pad(
            place.positions.segment,
            ((0, 0), (0, number - place.positions.segment.shape[1])),
            constant_values=none,
        )
        for place, number, none in ((own, length, -1), (others, keys, -2))
    ]
    first_BT = own.spans.first - others.start
    first_BT = jnp.pad(first_BT, ((0, 0), (0, length - first_BT.shape[1])), constant_values=keys)
    offset = own.start - others.start

    def one(query, key, value, segments_T, segments_S, first_T, *arrays: jax.Array) -> Any:
        pair = _of_pair(kernel, first_T, offset, block)
        return of_row(pair, splash.SegmentIds(segments_T, segments_S), query, key, value, *arrays)

    return jax.vmap(one)(query_BNTH, key, value, *segments, first_BT, *arrays)


def _of_pair(
    kernel: SplashAttentionKernel, first_T: jax.Array, offset: jax.Array, block: int
) -> SplashAttentionKernel:
    """Returns the kernel for a part of queries, which stand at `offset` + t from the first key on.

    It visits the blocks of keys from the first that a query of a block looks at up to its own.
    """
    order_qt = (offset + jnp.arange(len(first_T), dtype=jnp.int32)).reshape(-1, block)
    first_qt, steps = first_T.reshape(-1, block), jnp.arange(len(order_qt))
    begin_k = steps * block
    reached = begin_k[None] <= order_qt[:, -1:]
    visited_qk = reached & (begin_k[None] + block > jnp.min(first_qt, axis=1)[:, None])
    # Of 2 no mask is needed but that of segments.
    is_whole = begin_k[None] + block <= order_qt[:, :1]
    is_whole &= begin_k[None] >= jnp.max(first_qt, axis=1)[:, None]
    visited = jnp.where(visited_qk, 1 + is_whole, 0)[None]

    def own(info: Any, axis: int) -> MaskInfo:
        numbers = jnp.broadcast_to(steps[None] if axis == 2 else steps[:, None], visited.shape[1:])
        return _visiting(info, numbers[None], visited, axis)._replace(
            q_sequence=order_qt.reshape(-1)
        )

    infos = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    own_infos = [own(info, axis) for info, axis in zip(infos, (2, 2, 1), strict=True)]
    return SplashAttentionKernel(*own_infos, **kernel.kwargs)


def _scaled(settings: KernelSettings, query: jax.Array) -> jax.Array:
    # In fp32: the kernel takes scores as they come.
    return (query.astype(jnp.float32) * settings.scale).astype(query.dtype)


def _padded(array_BNTH: jax.Array) -> jax.Array:
    """Returns arrays of tokens in whole blocks, and heads in whole lanes."""
    length, size = array_BNTH.shape[2:]
    block = min(BLOCK, _up(length, LANES))
    more = ((0, 0), (0, 0), (0, _up(length, block) - length), (0, _up(size, LANES) - size))
    return jnp.pad(array_BNTH, more)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
