# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A layer: what attention adds to the residual stream, then what the network adds."""

from typing import Any

import jax

from earl_jax.models.activations import gated
from earl_jax.models.layers.heads import attend_heads
from earl_jax.models.layers.latents import attend_latents
from earl_jax.models.layers.parts import Parts
from earl_jax.models.layers.states import attend_states


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
        mixed_BTKGH, out_KGHD = attend_states(layer, x_BTD, parts), layer["linear_out"]
    else:
        attend = attend_latents if config.latent_size else attend_heads
        mixed_BTKGH = attend(layer, x_BTD, parts)
        out_KGHD = layer["out"]
    added_BTD = parts.project("BTKGH,KGHD->BTD", mixed_BTKGH, out_KGHD)
    if config.out_bias:
        added_BTD += layer["out_bias"][None, None]
    return parts.norm(added_BTD, layer["post_attention_norm"]) if config.post_norms else added_BTD


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
