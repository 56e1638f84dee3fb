# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of heads with keys and values of their own."""

from typing import Any

import jax

from earl_jax.models.layers.parts import Parts


def attend_heads(layer: Any, x_BTD: jax.Array, parts: Parts) -> jax.Array:
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
