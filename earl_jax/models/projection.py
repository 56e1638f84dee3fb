# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Projections by weights of any kind: plain ones, int8 ones, and ones with a low-rank adapter."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from earl_jax.models.contraction import Contract, contract_flat
from earl_jax.models.quantization import Quantized


@struct.dataclass(frozen=True, kw_only=True)
class Adapted:
    """A projection in a tree of parameters: `weight` is frozen, `a` and `b` are trained.

    For a query, `inputs` is "D" and `outputs` "KGH": weight_DKGH, a_DR, b_RKGH; each with L before
    it where layers are stacked.
    """

    weight: Any
    a: Any
    b: Any
    inputs: str = struct.field(pytree_node=False)
    outputs: str = struct.field(pytree_node=False)
    scale: float = struct.field(pytree_node=False)


def is_adapted(node: Any) -> bool:
    """True for an adapted projection."""
    return isinstance(node, Adapted)


def project(
    equation: str,
    x: jax.Array,
    weight: jax.Array | Adapted | Quantized,
    contract: Contract = contract_flat,
) -> jax.Array:
    """Computes `einsum(equation, x, weight)`, plus the adapter's part where the weight has one.

    The second operand of the equation must be the weight's inputs, then its outputs. `contract`
    computes each product (contraction.py).
    """
    if isinstance(weight, Quantized):
        return _quantized_product(equation, x, weight)
    if not isinstance(weight, Adapted):
        return contract(equation, x, weight)
    operands, result = equation.split("->")
    given, axes = operands.split(",")
    inputs, outputs = weight.inputs, weight.outputs
    assert axes == inputs + outputs, equation
    rows = "".join(letter for letter in given if letter not in inputs)
    x_R = contract(f"{given},{inputs}R->{rows}R", x, weight.a)
    added = contract(f"{rows}R,R{outputs}->{result}", x_R, weight.b)
    return contract(equation, x, weight.weight) + weight.scale * added


def _quantized_product(equation: str, x: jax.Array, weight: Quantized) -> jax.Array:
    """Computes `einsum(equation, x, Q s)` in the type of `x`; outputs must be the last axes."""
    # In the type of x before it is scaled, because what a tensor axis adds up travels in this.
    product = contract_flat(equation, x, weight.values.astype(x.dtype))
    scale = jnp.expand_dims(weight.scale, tuple(range(product.ndim - weight.scale.ndim)))
    return (product.astype(jnp.float32) * scale).astype(x.dtype)


def merged(weight: jax.Array | Adapted) -> jax.Array:
    """Returns W + (alpha / rank) A B in fp32; a weight without adapter unchanged. Any stacking."""
    if not isinstance(weight, Adapted):
        return weight
    inputs, outputs = weight.inputs, weight.outputs
    # Highest: a TPU would otherwise round A and B to bf16.
    added = jnp.einsum(
        f"...{inputs}R,...R{outputs}->...{inputs}{outputs}",
        weight.a,
        weight.b,
        precision=jax.lax.Precision.HIGHEST,
    )
    return weight.weight.astype(jnp.float32) + weight.scale * added
