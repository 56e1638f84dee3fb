# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A layer: what attention adds to the residual stream, then what the network adds."""

from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.models.activations import gated
from earl_jax.models.attention.delta_rule import Mixed
from earl_jax.models.layers.parts import Parts, rms_norm

# Of the norms of latents, whatever that of others is, as in `transformers`.
_LATENT_EPS = 1e-6


def compute_layer(layer: Any, x_BTD: jax.Array, parts: Parts) -> jax.Array:
    """Returns the residual stream behind one layer."""
    x_BTD = x_BTD + _attention_half(layer, x_BTD, parts)
    return x_BTD + _feed_forward_half(layer, x_BTD, parts)


def _attention_half(layer: Any, x_BTD: jax.Array, parts: Parts) -> jax.Array:
    """Returns what attention adds to the residual stream."""
    config = parts.config
    if config.pre_norms:
        x_BTD = parts.norm(x_BTD, layer["attention_norm"])
    if "linear_out" in layer:
        mixed_BTKGH, out_KGHD = _attend_states(layer, x_BTD, parts), layer["linear_out"]
    else:
        attend = _attend_latents if config.latent_size else _attend_heads
        mixed_BTKGH = attend(layer, x_BTD, parts)
        out_KGHD = layer["out"]
    added_BTD = parts.project("BTKGH,KGHD->BTD", mixed_BTKGH, out_KGHD)
    if config.out_bias:
        added_BTD += layer["out_bias"][None, None]
    return parts.norm(added_BTD, layer["post_attention_norm"]) if config.post_norms else added_BTD


def _attend_heads(layer: Any, x_BTD: jax.Array, parts: Parts) -> jax.Array:
    """Returns what heads with keys and values of their own attended to, BTKGH."""
    config = parts.config
    query_BTKGH = parts.project("BTD,DKGH->BTKGH", x_BTD, layer["query"])
    key_BTKH = parts.project("BTD,DKH->BTKH", x_BTD, layer["key"])
    value_BTKH = parts.project("BTD,DKH->BTKH", x_BTD, layer["value"])
    if config.attention_bias:
        query_BTKGH += layer["query_bias"][None, None]
        key_BTKH += layer["key_bias"][None, None]
        value_BTKH += layer["value_bias"][None, None]
    if config.query_key_norm:
        query_BTKGH = parts.norm(query_BTKGH, layer["query_norm"])
        key_BTKH = parts.norm(key_BTKH, layer["key_norm"])
    query_BTKGH, key_BTKH = map(parts.rotate, (query_BTKGH, key_BTKH))
    sinks_KG = layer["sinks"] if config.attention_sinks else None
    mixed_BTKGH = parts.attend(query_BTKGH, key_BTKH, value_BTKH, sinks_KG)
    if config.attention_gate:
        gate_BTKGH = parts.project("BTD,DKGH->BTKGH", x_BTD, layer["attention_gate"])
        mixed_BTKGH *= jax.nn.sigmoid(gate_BTKGH)
    return mixed_BTKGH


def _attend_latents(layer: Any, x_BTD: jax.Array, parts: Parts) -> jax.Array:
    """Returns what heads of latent attention attended to, BTKGH (arXiv 2405.04434, section 2.1).

    Training projects a key and a value of each head from the latents (eq. 10 to 18). To read cached
    latents as they are, the projection to keys is taken to the queries, and that to values to the
    results (appendix C): of latents there is one head, so that all heads of queries are its group.
    """
    config = parts.config
    inside = config.head_size - config.rope_size
    if config.query_latent_size:
        low_BTA = parts.project("BTD,DA->BTA", x_BTD, layer["query_down"])
        low_BTA = parts.norm(low_BTA, layer["query_down_norm"], _LATENT_EPS)
        query_BTKGH = parts.project("BTA,AKGH->BTKGH", low_BTA, layer["query_up"])
    else:
        query_BTKGH = parts.project("BTD,DKGH->BTKGH", x_BTD, layer["query"])
    query_BTKGH, turned_BTKGH = jnp.split(query_BTKGH, [inside], axis=-1)
    row_BTA = parts.project("BTD,DA->BTA", x_BTD, layer["latent"])
    latent_BTA, key_BTH = jnp.split(row_BTA, [config.latent_size], axis=-1)
    latent_BTA = parts.norm(latent_BTA, layer["latent_norm"], _LATENT_EPS)
    turned_BTKGH, key_BTH = map(parts.rotate, (turned_BTKGH, key_BTH))
    if not parts.reads_latents:
        both_BTKH = parts.project("BTA,AKH->BTKH", latent_BTA, layer["latent_up"])
        own_BTKH, value_BTKH = jnp.split(both_BTKH, [inside], axis=-1)
        shape = *own_BTKH.shape[:-1], config.rope_size
        key_BTKH = jnp.broadcast_to(key_BTH[:, :, None], shape)
        key_BTKH = jnp.concatenate([own_BTKH, key_BTKH], axis=-1)
        query_BTKGH = jnp.concatenate([query_BTKGH, turned_BTKGH], axis=-1)
        return parts.attend(query_BTKGH, key_BTKH, value_BTKH, None)
    key_AKH, value_AKH = jnp.split(layer["latent_up"], [inside], axis=-1)
    query_BTGKA = jnp.einsum("BTKGH,AKH->BTGKA", query_BTKGH, key_AKH)
    query_BTGKA = jnp.concatenate([query_BTGKA, turned_BTKGH.swapaxes(2, 3)], axis=-1)
    row_BTA = jnp.concatenate([latent_BTA, key_BTH], axis=-1)
    mixed_BTGKA = parts.attend(query_BTGKA, row_BTA[:, :, None], None, None)
    return jnp.einsum("BTGKA,AKH->BTKGH", mixed_BTGKA, value_AKH)


def _attend_states(layer: Any, x_BTD: jax.Array, parts: Parts) -> jax.Array:
    """Returns what heads of linear attention read from their states, BTKGH (delta_rule.py)."""
    query_BTKH, key_BTKH = (
        parts.project("BTD,DKH->BTKH", x_BTD, layer[f"linear_{name}"]) for name in ("query", "key")
    )
    value_BTKGH, gate_BTKGH = (
        parts.project("BTD,DKGH->BTKGH", x_BTD, layer[f"linear_{name}"])
        for name in ("value", "gate")
    )
    rate_BTKG, decay_BTKG = (
        parts.project("BTD,DKG->BTKG", x_BTD, layer[f"linear_{name}"]).astype(jnp.float32)
        for name in ("rate", "decay")
    )
    factor_KG = jnp.exp(layer["linear_log_decay"])
    step_BTKG = jax.nn.softplus(decay_BTKG + layer["linear_decay_bias"][None, None])
    mixed = Mixed(
        query=query_BTKH,
        key=key_BTKH,
        value=value_BTKGH,
        decay=-factor_KG[None, None] * step_BTKG,
        rate=jax.nn.sigmoid(rate_BTKG),
        taps=(
            layer["linear_query_taps"],
            layer["linear_key_taps"],
            layer["linear_value_taps"],
        ),
    )
    out_BTKGH = rms_norm(parts.mix_states(mixed), layer["linear_norm"], parts.config.norm_eps)
    out_BTKGH = out_BTKGH.astype(jnp.float32) * jax.nn.silu(gate_BTKGH.astype(jnp.float32))
    return out_BTKGH.astype(x_BTD.dtype)


def _feed_forward_half(layer: Any, x_BTD: jax.Array, parts: Parts) -> jax.Array:
    """Returns what the feed-forward network or the experts add to the residual stream."""
    config = parts.config
    if config.pre_norms:
        x_BTD = parts.norm(x_BTD, layer["ffn_norm"])

    def network(prefix: str) -> jax.Array:
        gate_BTF = parts.project("BTD,DF->BTF", x_BTD, layer[f"{prefix}gate"])
        up_BTF = parts.project("BTD,DF->BTF", x_BTD, layer[f"{prefix}up"])
        hidden_BTF = gated(config.activation, gate_BTF, up_BTF)
        return parts.project("BTF,FD->BTD", hidden_BTF, layer[f"{prefix}down"])

    if "router" not in layer:
        added_BTD = network("")
    else:
        added_BTD = parts.mix_experts(layer, x_BTD)
        if config.shared_ffn_size:
            shared_BTD = network("shared_")
            if config.shared_ffn_gate:
                gate_BTX = parts.project("BTD,DX->BTX", x_BTD, layer["shared_router"])
                shared_BTD *= jax.nn.sigmoid(gate_BTX)
            added_BTD = added_BTD + shared_BTD
    return parts.norm(added_BTD, layer["post_ffn_norm"]) if config.post_norms else added_BTD
