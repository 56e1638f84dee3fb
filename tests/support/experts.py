# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts model, and its layer by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
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
# As gpt-oss: biases, and a gate that is clamped.
BIASED = dataclasses.replace(MODEL, expert_bias=True, activation="swiglu_clamped")


@functools.cache
def params():
    """Norms away from one, a router that is sure of itself, and a head of about two bits."""
    specs = parameter_specs(MODEL, VOCAB)

    @jax.jit
    def draw():
        values = init_parameters(specs, jax.random.key(3))
        noise = jax.random.normal(jax.random.key(4), values["layers"]["ffn_norm"].shape)
        values["layers"]["ffn_norm"] = 1 + 0.3 * noise
        values["layers"]["router"] = 2 * values["layers"]["router"]
        return {**values, "head": 2 * values["head"]}

    return draw()


def one_layer():
    names = ("router", "expert_gate", "expert_up", "expert_down")
    return {name: np.asarray(params()["layers"][name])[0] for name in names}


def one_biased_layer():
    """Gates and ups of `BIASED` of which some are clamped, and a bias that changes the routing."""
    layer, rng = one_layer(), np.random.default_rng(5)
    layer |= {name: 8 * layer[name] for name in ("expert_gate", "expert_up")}
    for name, size in (("router", ()), ("expert_gate", (16,)), ("expert_up", (16,))):
        layer[f"{name}_bias"] = rng.normal(size=(8, *size)).astype(np.float32)
    return layer | {"expert_down_bias": rng.normal(size=(8, 32)).astype(np.float32)}


def by_hand(model: ModelConfig, layer, x_TD) -> np.ndarray:
    """Token by token, expert by expert, in float64."""
    layer = {name: np.asarray(leaf, np.float64) for name, leaf in layer.items()}
    out = np.zeros(x_TD.shape, np.float64)
    for token, x in enumerate(np.asarray(x_TD, np.float64)):
        scores = np.exp(x @ layer["router"] + layer.get("router_bias", 0))
        scores /= scores.sum()
        chosen = np.argsort(-scores)[: model.experts_per_token]
        total = scores[chosen].sum() if model.normalize_expert_weights else 1.0
        for expert in chosen:

            def project(x, name, expert=expert):
                bias = layer[f"{name}_bias"][expert] if model.expert_bias else 0
                return x @ layer[name][expert] + bias

            gate, up = project(x, "expert_gate"), project(x, "expert_up")
            alpha = 1.0
            if model.activation == "swiglu_clamped":
                gate, up, alpha = np.minimum(gate, 7), np.clip(up, -7, 7) + 1, 1.702
            hidden = gate / (1 + np.exp(-alpha * gate)) * up
            out[token] += scores[expert] / total * project(hidden, "expert_down")
    return out


def tokens_TD(count: int) -> jax.Array:
    drawn = np.random.default_rng(count).normal(size=(count, MODEL.width))
    return jnp.asarray(drawn, jnp.float32)
