# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's matrices as int8: a byte a number, and one fp32 scale for each output channel.

Symmetric and rounded to the nearest: W = Q s with Q in -127 to 127, where s takes the largest
|weight| of a channel to 127. A projection is y = (x Q) s, with Q in the type of x and s applied
behind the contraction: activations are not rounded, and no matrix is kept in another form. The
error of a weight is at most half a step of its channel, which is 1/254 of the largest there.

Made by `weights.publish` from what the trainer has, at every step anew. Norms, biases, routers and
embeddings, the head among them, stay in the compute type, and so do projections from latents to
keys and values, which the engine contracts over either side, and those to the rates and decays of
linear attention, a number for each head.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from earl_jax.models.config import ModelConfig
from earl_jax.models.contraction import contract_flat
from earl_jax.models.parameters import (
    ParameterSpec,
    compute_dtype_of,
    is_spec,
    parameter_specs,
    unstacked_specs,
)

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
_LARGEST = 127


@struct.dataclass(frozen=True, kw_only=True)
class Quantized:
    """A matrix in the engine's tree of parameters; also of its descriptions and shardings.

    For a query, `axes` is "DKGH" and `inputs` "D": values_DKGH i8, scale_KGH f32.
    """

    values: Any
    scale: Any
    axes: str = struct.field(pytree_node=False)
    inputs: str = struct.field(pytree_node=False)


def is_quantized(node: Any) -> bool:
    """True for a quantised matrix."""
    return isinstance(node, Quantized)


def quantize(weight: jax.Array, axes: str, inputs: str) -> Quantized:
    """Returns the nearest int8 to a matrix of these `axes`, which contracts over `inputs`.

    Example: "DF" with columns (1, -2) and (0.5, 0): scales 2/127 and 0.5/127, values (64, -127)
    and (127, 0). A channel of zeros has scale 0. Where a weight is NaN, so is its scale.
    """
    over = tuple(axes.index(letter) for letter in inputs)
    weight = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(weight), axis=over, keepdims=True) / _LARGEST
    steps = jnp.round(weight / jnp.where(scale > 0, scale, 1.0))
    values = jnp.clip(steps, -_LARGEST, _LARGEST).astype(jnp.int8)
    return Quantized(values=values, scale=jnp.squeeze(scale, over), axes=axes, inputs=inputs)


def dequantize(weight: Quantized) -> jax.Array:
    """Returns Q s in fp32."""
    over = tuple(weight.axes.index(letter) for letter in weight.inputs)
    return weight.values.astype(jnp.float32) * jnp.expand_dims(weight.scale, over)


def matmul(equation: str, x: jax.Array, weight: Quantized) -> jax.Array:
    """Computes `einsum(equation, x, Q s)` in the type of `x`; outputs must be the last axes."""
    # In the type of x before it is scaled, because what a tensor axis adds up travels in this.
    product = contract_flat(equation, x, weight.values.astype(x.dtype))
    scale = jnp.expand_dims(weight.scale, tuple(range(product.ndim - weight.scale.ndim)))
    return (product.astype(jnp.float32) * scale).astype(x.dtype)


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
