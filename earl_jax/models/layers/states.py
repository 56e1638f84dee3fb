# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Linear attention: heads read a state that each token changes (models/attention/delta_rule.py)."""

from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.models.attention.delta_rule import Mixed
from earl_jax.models.layers.parts import Parts, rms_norm


def attend_states(layer: Any, x_BTD: jax.Array, parts: Parts) -> jax.Array:
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
