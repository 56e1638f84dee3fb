# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The decoder: pure functions over a tree of parameters (see parameters.py).

`forward_rows` is the trainer's: whole rows, layers stacked, one scan. `forward_chunk` is the
engine's: the next few tokens of many rows against their caches, layers unrolled. Both run the same
`compute_layer`, so what the engine samples from is what the trainer scores.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.models.attention.attention_shards import on_own_heads
from earl_jax.models.attention.delta_rule import Mixed, mix_cached, mix_rows
from earl_jax.models.attention.folding import fold
from earl_jax.models.attention.kernels import (
    Kernel,
    attend_rows,
    attention_over_pages,
    choose_pages_kernel,
)
from earl_jax.models.attention.page_shares import TokenShare, own_share, share_tokens
from earl_jax.models.attention.rows import cap
from earl_jax.models.config import ModelConfig
from earl_jax.models.contraction import contract_by_axes, contract_flat
from earl_jax.models.kv_cache import PagedCache, write, writes_whole_pages
from earl_jax.models.layer_groups import group_layers
from earl_jax.models.layers.kinds import layer_kind
from earl_jax.models.layers.layer import compute_layer
from earl_jax.models.layers.parts import LayerKind, Parts, norm
from earl_jax.models.moe.experts import experts_of_rows, experts_of_shard
from earl_jax.models.moe.routing import Routing, routing_of_rows
from earl_jax.models.parameters import (
    Params,
    cast_parameters,
    layer_of_period,
    periods,
    uniform_stacks,
)
from earl_jax.models.remat import recomputed
from earl_jax.settings.remat import Remat
from earl_jax.sharding.layout import Layout

# A window that reaches over any row, for layers without one beside layers that have one.
WITHOUT_END = 2**30


def _windows_to_scan(config: ModelConfig) -> tuple[int, ...]:
    """Returns the window of each layer in a form that a scan over layers can carry."""
    return tuple(window or WITHOUT_END for window in config.layer_windows)


def _kinds_to_scan(config: ModelConfig) -> LayerKind | None:
    """Returns the kinds of all layers, stacked; None where all are alike.

    A window that all share is not in it, so that kernels know it.
    """
    if not config.layers_differ:
        return None
    is_one_window = len(set(config.layer_windows)) == 1
    kinds = [layer_kind(config, index) for index in range(config.num_layers)]
    return LayerKind(
        None if is_one_window else jnp.array(_windows_to_scan(config), jnp.int32),
        jnp.stack([kind.frequencies for kind in kinds]),
        jnp.array([kind.magnitude for kind in kinds], jnp.float32),
    )


def _embed(config: ModelConfig, x_BTD: jax.Array) -> jax.Array:
    """Returns rows of the embedding as the first layer takes them."""
    # The factor in the compute type, as pre-training had it: sqrt(1152) is 34.0 in bf16.
    return x_BTD * jnp.asarray(config.width**0.5, x_BTD.dtype) if config.scale_embeddings else x_BTD


def _gather_rows(
    layout: Layout, vocab_size: int, embed_VD: jax.Array, tokens_BT: jax.Array
) -> jax.Array:
    """Returns the rows of tokens. Backward a token's gradients are summed in fp32.

    JAX's own sum is in the compute type, one after the other: in bf16 256 + 1 is 256, and of what a
    token gets that comes 10,000 times most is lost. The sums go to the devices of the parameter
    before they are rounded, so that they are reduced there and not everywhere.
    """
    # Gathered over fsdp before the lookup: a lookup in a table cut along D makes XLA copy the rows
    # to every device.
    return layout.constrain(embed_VD, "V.")[tokens_BT]


def _forward(layout: Layout, vocab_size: int, embed_VD: jax.Array, tokens_BT: jax.Array) -> Any:
    return _gather_rows(layout, vocab_size, embed_VD, tokens_BT), tokens_BT


def _backward(layout: Layout, vocab_size: int, tokens_BT: jax.Array, gradient_BTD: Any) -> Any:
    sums_VD = jnp.zeros((vocab_size, gradient_BTD.shape[-1]), jnp.float32)
    sums_VD = sums_VD.at[tokens_BT].add(gradient_BTD.astype(jnp.float32))
    sums_VD = jax.lax.with_sharding_constraint(sums_VD, layout.parameters("VD"))
    return sums_VD.astype(gradient_BTD.dtype), None


_look_up = jax.custom_vjp(_gather_rows, nondiff_argnums=(0, 1))
_look_up.defvjp(_forward, _backward)


def head_weights(params: Params) -> jax.Array:
    """Returns the matrix from width to vocabulary, DV; where tied, the embedding transposed."""
    return params["head"] if "head" in params else params["embed"].T


def forward_rows(
    config: ModelConfig,
    layout: Layout,
    params: Params,
    tokens_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    remat: Remat = "none",
    kernel: Kernel = "blockwise",
) -> jax.Array:
    """Returns hidden states before the head for whole rows, causal within each segment.

    Positions count from the start of each segment; segment 0 is padding and looks at nothing real.
    `kernel` computes the attention (kernels.py).

    Returns:
        x_BTD in the compute type, normalised; on a layout with a `context` axis folded and filled
        up (folding.py).
    """
    x_BTD, _ = forward_rows_routed(
        config, layout, params, tokens_BT, segment_ids_BT, remat=remat, kernel=kernel
    )
    return x_BTD


def forward_rows_routed(
    config: ModelConfig,
    layout: Layout,
    params: Params,
    tokens_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    remat: Remat = "none",
    kernel: Kernel = "blockwise",
) -> tuple[jax.Array, Routing | None]:
    """Returns `forward_rows`, and the routers' statistics over tokens of segments above 0.

    Returns:
        x_BTD, and a Routing of f32[L, X]; None for a dense model.
    """
    dtype = jnp.dtype(config.compute_dtype)
    params = cast_parameters(params, dtype)
    # Rows come whole, and so what looks along them is done before they are folded.
    positions_BT = fold(layout, positions_in_segments(segment_ids_BT))
    real_BT = fold(layout, segment_ids_BT) > 0
    contract = contract_flat if layout.shape.context == 1 else contract_by_axes
    ids_BT = jnp.cumsum(_starts_of_segments(segment_ids_BT), axis=1)

    def mix_states(mixed: Mixed) -> jax.Array:
        assert layout.shape.context == 1, "tokens of a row are in one piece (check_tensor_axis)"
        parts = {name: getattr(mixed, name) for name in ("query", "key", "value", "decay", "rate")}
        letters = {4: "BTK.", 5: "BTK.."}
        placed = {name: layout.constrain(x, letters[x.ndim]) for name, x in parts.items()}
        return layout.constrain(mix_rows(mixed._replace(**placed), ids_BT), "BTK..")

    def block(x_BTD: jax.Array, layer: Any, kind: LayerKind | None) -> tuple[jax.Array, Any]:
        routing = None
        if kind is None:
            kind = layer_kind(config, 0)
        elif kind.window is None:
            kind = kind._replace(window=layer_kind(config, 0).window)

        def attend(query_BTKGH, key_BTKH, value_BTKH, sinks_KG):
            assert value_BTKH is not None
            return attend_rows(
                kernel,
                layout,
                query_BTKGH,
                key_BTKH.transpose(0, 2, 1, 3),
                value_BTKH.transpose(0, 2, 1, 3),
                segment_ids_BT,
                scale=config.attention_scale,
                softcap=config.attention_softcap,
                window=kind.window,
                windows=_windows_to_scan(config),
                sinks_KG=sinks_KG,
            )

        def mix_experts(layer: Any, x_BTD: jax.Array) -> jax.Array:
            nonlocal routing
            routing = routing_of_rows(config, layout, x_BTD, layer, real_BT)
            return experts_of_rows(config, layout, layer, x_BTD)

        parts = Parts(config, kind, positions_BT, attend, mix_experts, mix_states, contract)
        x_BTD = compute_layer(layer, x_BTD, parts)
        return layout.constrain(x_BTD, "BT."), routing

    embed_VD = params["embed"]
    x_BTD = _look_up(layout, len(embed_VD), embed_VD, fold(layout, tokens_BT))
    x_BTD = layout.constrain(_embed(config, x_BTD), "BT.")
    x_BTD, routing = _scan_layers(config, recomputed(block, remat), x_BTD, params["layers"])
    # Rows add up here and not in the loop: one exchange between row shards instead of one a layer.
    routing = jax.tree.map(lambda sums_LBX: jnp.sum(sums_LBX, axis=1), routing)
    return norm(config, x_BTD, params["final_norm"]), routing


def positions_in_segments(segment_ids_BT: jax.Array) -> jax.Array:
    """Returns each token's position in its segment: 1 1 1 2 2 0 -> 0 1 2 0 1 0."""
    order_BT = jax.lax.broadcasted_iota(jnp.int32, segment_ids_BT.shape, 1)
    starts = _starts_of_segments(segment_ids_BT)
    return order_BT - jax.lax.cummax(jnp.where(starts, order_BT, 0), axis=1)


def _scan_layers(
    config: ModelConfig, block: Callable[..., Any], x_BTD: jax.Array, layers: Params
) -> tuple[jax.Array, Any]:
    """Runs `block(x, layer, kind)` of stacked layers one after the other.

    Layers that are not alike go in periods, up to the next one that attends.

    Returns:
        x_BTD, and what those behind the dense ones of a mixture return beside it, stacked.
    """
    every, kinds = config.attention_every, _kinds_to_scan(config)

    def period(x_BTD: jax.Array, layers: Any) -> tuple[jax.Array, Any]:
        beside = []
        for place in range(every):
            x_BTD, one = block(x_BTD, layer_of_period(layers, place, every), None)
            beside.append(one)
        return x_BTD, jax.tree.map(lambda *each: jnp.stack(each), *beside)

    if config.has_states:
        x_BTD, beside = jax.lax.scan(period, x_BTD, periods(layers, config.num_layers, every))
        return x_BTD, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), beside)
    dense, beside = config.num_dense_layers if config.num_experts else 0, None
    # The last ones are those with experts.
    for which, some in uniform_stacks(layers, config.num_layers, dense):
        own = jax.tree.map(lambda kind, which=which: kind[which], kinds)
        x_BTD, beside = jax.lax.scan(lambda x, xs: block(x, *xs), x_BTD, (some, own))
    return x_BTD, beside


def _starts_of_segments(segment_ids_BT: jax.Array) -> jax.Array:
    """Returns where another segment begins than before: 1 1 1 2 2 0 -> 0 0 0 1 0 1."""
    return jnp.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], ((0, 0), (1, 0)))


def forward_chunk(
    config: ModelConfig,
    params: Params,
    cache: PagedCache,
    tokens_BT: jax.Array,
    cached_B: jax.Array,
    counts_B: jax.Array,
    *,
    layout: Layout | None = None,
    attention: str = "auto",
) -> tuple[jax.Array, PagedCache]:
    """Appends `counts_B[b]` tokens to each row b (at most T), after `cached_B[b]` cached ones.

    Rows with a count of 0 are left as they are; what is returned for them means nothing. `params`
    are the engine's: a list of layers, in the compute type. `layout` is the engine's too, inside
    its `shard_map` over rows; None: weights are whole on one device. Where pages are cut over
    `context`, the chunk is too, if its T divides (page_shares.py). `attention` is
    config.rollout.attention.

    Returns:
        logits_BV f32 after each row's last new token, and the cache with the new tokens in it.
    """
    x_BTD, tokens, cache = _chunk_states(
        config, params, cache, tokens_BT, cached_B, counts_B, layout, attention
    )
    x_BD = tokens.pick(x_BTD, jnp.maximum(counts_B - 1, 0))
    return _logits(config, params, x_BD), cache


def forward_drafts(
    config: ModelConfig,
    params: Params,
    cache: PagedCache,
    tokens_BT: jax.Array,
    cached_B: jax.Array,
    counts_B: jax.Array,
    *,
    layout: Layout | None = None,
    attention: str = "auto",
) -> tuple[jax.Array, PagedCache]:
    """Runs `forward_chunk` with logits of every token, and not only of the last of each row.

    Returns:
        logits_BTV f32 after each new token, which mean nothing behind the last of a row, and the
        cache with the new tokens in it.
    """
    x_BTD, tokens, cache = _chunk_states(
        config, params, cache, tokens_BT, cached_B, counts_B, layout, attention
    )
    return _logits(config, params, tokens.gather(x_BTD)), cache


def fill_cache(
    config: ModelConfig,
    params: Params,
    cache: PagedCache,
    tokens_BT: jax.Array,
    cached_B: jax.Array,
    counts_B: jax.Array,
    *,
    layout: Layout | None = None,
    attention: str = "auto",
) -> PagedCache:
    """Runs `forward_chunk` without logits. Returns the cache with the new tokens in it.

    Several rows may have one table, where the positions of one row follow those of another: each
    attends to what the others write in this pass.
    """
    return _chunk_states(config, params, cache, tokens_BT, cached_B, counts_B, layout, attention)[2]


def _chunk_states(
    config: ModelConfig,
    params: Params,
    cache: PagedCache,
    tokens_BT: jax.Array,
    cached_B: jax.Array,
    counts_B: jax.Array,
    layout: Layout | None,
    attention: str,
) -> tuple[jax.Array, TokenShare, PagedCache]:
    """Returns hidden states x_BTD of a chunk after the last layer, and the cache with its tokens.

    Of the tokens this device's share.
    """
    length = tokens_BT.shape[1]
    tokens = share_tokens(own_share(cache.parts), length)
    positions_BT = tokens.take(cached_B[:, None] + jnp.arange(length)[None, :])
    x_BTD = _embed(config, params["embed"][tokens.take(tokens_BT)])
    mix_experts = functools.partial(experts_of_shard, config, layout)
    groups = group_layers(config.paged_windows)
    platform = layout and layout.platform
    whole_pages = writes_whole_pages(platform)
    kernel = choose_pages_kernel(attention, layout, config, cache.page_size).kernel
    readings, look = attention_over_pages(
        kernel, platform, config, cache, cached_B, counts_B, length
    )
    on_heads_of = functools.partial(
        on_own_heads, layout, by_hand=kernel != "blockwise", one_key=config.latent_size > 0
    )
    pools, states = list(cache.pools), list(cache.states)
    # By layer: its number among those with pages, or among those with states.
    attends = [config.attends(index) for index in range(config.num_layers)]
    numbers_of_layers = [attends[:index].count(attends[index]) for index in range(len(attends))]
    for index, layer in enumerate(params["layers"]):
        kind, number = layer_kind(config, index), numbers_of_layers[index]
        group, place = groups.place(number) if attends[index] else (0, 0)

        def on_heads(new, pages, sinks_KG, numbers, window=groups.windows[group] or None):
            query_BTKGH, key_BTKH, value_BTKH = jax.tree.map(tokens.gather, new)
            table_BY, starts_B, counts_B, reading = numbers
            share = own_share(cache.parts)
            pages = write(
                pages,
                table_BY,
                key_BTKH,
                value_BTKH,
                starts_B,
                counts_B,
                value_size=config.latent_size,
                whole_pages=whole_pages,
                share=share,
            )
            mixed_BTKGH = look(query_BTKGH, pages, reading, window, share, tokens.is_cut, sinks_KG)
            return mixed_BTKGH, pages

        def attend(*new, group=group, place=place, on_heads=on_heads):
            *new, sinks_KG = new
            numbers = cache.table[:, group], cached_B, counts_B, readings[group]
            mixed_BTKGH, pools[place] = on_heads_of(on_heads)(
                tuple(new), pools[place], sinks_KG, numbers
            )
            return mixed_BTKGH

        def mix_states(mixed: Mixed, number=number):
            out, states[number] = mix_cached(mixed, states[number], cached_B, counts_B, cache.slots)
            return out

        parts = Parts(
            config,
            kind,
            positions_BT,
            attend,
            mix_experts,
            mix_states,
            contract_flat,
            reads_latents=config.latent_size > 0,
        )
        x_BTD = compute_layer(layer, x_BTD, parts)
    return x_BTD, tokens, dataclasses.replace(cache, pools=pools, states=states)


def _logits(config: ModelConfig, params: Params, x_BTD: jax.Array) -> jax.Array:
    """Returns logits f32 of hidden states after the last layer; any leading axes."""
    logits_BTV = jnp.einsum(
        "...D,DV->...V",
        norm(config, x_BTD, params["final_norm"]),
        head_weights(params),
        preferred_element_type=jnp.float32,
    )
    return cap(logits_BTV, config.final_softcap)
