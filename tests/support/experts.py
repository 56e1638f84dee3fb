# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts model, and its layer by hand."""

import functools

import jax
import numpy as np

from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import init_parameters, parameter_specs
from tests.support.slots import VOCAB

MODEL = ModelConfig(
    num_layers=2,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    num_experts=8,
    experts_per_token=3,
    expert_ffn_size=16,
    init_scale=4.0,
)


@functools.cache
def params():
    """Norms away from one, a router that is sure of itself, and a head of about two bits."""
    specs = parameter_specs(MODEL, VOCAB)
    values = jax.jit(lambda key: init_parameters(specs, key))(jax.random.key(3))
    noise = jax.random.normal(jax.random.key(4), values["layers"]["ffn_norm"].shape)
    values["layers"]["ffn_norm"] = 1 + 0.3 * noise
    values["layers"]["router"] = 2 * values["layers"]["router"]
    return {**values, "head": 2 * values["head"]}


def one_layer():
    names = ("router", "expert_gate", "expert_up", "expert_down")
    return {name: params()["layers"][name][0] for name in names}


def by_hand(model: ModelConfig, layer, x_TD) -> np.ndarray:
    """Token by token, expert by expert, in float64."""
    layer = {name: np.asarray(leaf, np.float64) for name, leaf in layer.items()}
    out = np.zeros(x_TD.shape, np.float64)
    for token, x in enumerate(np.asarray(x_TD, np.float64)):
        scores = np.exp(x @ layer["router"])
        scores /= scores.sum()
        chosen = np.argsort(-scores)[: model.experts_per_token]
        total = scores[chosen].sum() if model.normalize_expert_weights else 1.0
        for expert in chosen:
            gate, up = x @ layer["expert_gate"][expert], x @ layer["expert_up"][expert]
            hidden = gate / (1 + np.exp(-gate)) * up
            out[token] += scores[expert] / total * (hidden @ layer["expert_down"][expert])
    return out


def tokens_TD(count: int) -> jax.Array:
    return jax.random.normal(jax.random.key(count), (count, MODEL.width))
