# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's matrices as int8: a byte a number, and one fp32 scale for each output channel.

Symmetric and rounded to the nearest: W = Q s with Q in -127 to 127, where s takes the largest
|weight| of a channel to 127. A projection is y = (x Q) s, with Q in the type of x and s applied
behind the contraction: activations are not rounded, and no matrix is kept in another form. The
error of a weight is at most half a step of its channel, which is 1/254 of the largest there.
Which matrices are int8 is in engine_parameters.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

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
