# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The parameters of an engine, as specs and shapes: layers are a list, matrices may be int8.

They are made by `weights.publish` from what the trainer has, at every step anew. The matrices of
`INPUTS` may be int8 (quantization.py). Norms, biases, routers and embeddings, the head among them,
stay in the compute type, and so do projections from latents to keys and values, which the engine
contracts over either side, and those to the rates and decays of linear attention, a number for each
head.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import (
    ParameterSpec,
    compute_dtype_of,
    is_spec,
    parameter_specs,
    unstacked_specs,
)
from earl_jax.models.quantization import Quantized, is_quantized

# What each matrix of a layer contracts over. Each place of its other letters has its own scale: an
# output has one in every expert.
INPUTS = {
    "query": "D",
    "query_down": "D",
    "query_up": "A",
    "latent": "D",
    "key": "D",
    "value": "D",
    "attention_gate": "D",
    "out": "KGH",
    "linear_query": "D",
    "linear_key": "D",
    "linear_value": "D",
    "linear_gate": "D",
    "linear_out": "KGH",
    "gate": "D",
    "up": "D",
    "down": "F",
    "shared_gate": "D",
    "shared_up": "D",
    "shared_down": "F",
    "expert_gate": "D",
    "expert_up": "D",
    "expert_down": "F",
}


def engine_specs(config: ModelConfig, vocab_size: int, weight_dtype: str) -> Any:
    """Returns the specs of the engine's parameters: layers as a list, `Quantized` if int8.

    `weight_dtype` is "compute" or "int8".
    """
    specs = unstacked_specs(parameter_specs(config, vocab_size), config.num_layers)
    if weight_dtype == "compute":
        return specs
    assert weight_dtype == "int8", weight_dtype
    layers = [
        {
            name: _quantized_spec(spec, INPUTS[name]) if name in INPUTS else spec
            for name, spec in layer.items()
        }
        for layer in specs["layers"]
    ]
    return {**specs, "layers": layers}


def _quantized_spec(spec: ParameterSpec, inputs: str) -> Quantized:
    """Returns the specs of an int8 matrix and its scale, which is cut as the matrix is."""
    sizes = dict(zip(spec.axes, spec.shape, strict=True))
    outputs = "".join(letter for letter in spec.axes if letter not in inputs)
    shape = tuple(sizes[letter] for letter in outputs)
    scale = dataclasses.replace(spec, shape=shape, axes=outputs)
    return Quantized(values=spec, scale=scale, axes=spec.axes, inputs=inputs)


def engine_shapes(specs: Any, compute_dtype: str) -> Any:
    """Returns the engine's parameters as shapes and types, from `engine_specs`."""

    def shape(path: Any, node: Any) -> Any:
        if is_quantized(node):
            values = jax.ShapeDtypeStruct(node.values.shape, jnp.int8)
            scale = jax.ShapeDtypeStruct(node.scale.shape, jnp.float32)
            return dataclasses.replace(node, values=values, scale=scale)
        dtype = compute_dtype_of(getattr(path[-1], "key", ""), jnp.dtype(compute_dtype))
        return jax.ShapeDtypeStruct(node.shape, dtype)

    def is_leaf(node: Any) -> bool:
        return is_quantized(node) or is_spec(node)

    return jax.tree_util.tree_map_with_path(shape, specs, is_leaf=is_leaf)
