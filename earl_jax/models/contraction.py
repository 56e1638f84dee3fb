# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The product of tokens with the weights of a projection, as XLA computes it fastest.

An einsum over several axes, and its gradients, are products of matrices for which XLA first copies
an operand in another order of axes; a product of two matrices it takes as they lie.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Contract = Callable[[str, jax.Array, jax.Array], jax.Array]


def contract_flat(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Computes `einsum(equation, x, weight)` as [tokens, inputs] x [inputs, outputs].

    `x` has its inputs last, the weight first, in the same order: "BTKGH,KGHD->BTD". Axes are merged
    with the first as the slowest, so that one that is cut, first among inputs or outputs, remains
    cut; of the axes of tokens, none but the first may be.

    The gradient keeps `x` as it is. Merged it would be kept once for each projection that reads it.
    """
    return _contract(equation, x, weight)


def _product(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    operands, result = equation.split("->")
    given, axes = operands.split(",")
    number = (len(given) + len(axes) - len(result)) // 2
    tokens, inputs, outputs = given[:-number], given[-number:], axes[number:]
    assert axes == inputs + outputs and result == tokens + outputs, equation
    size = math.prod(weight.shape[:number])
    product = x.reshape(-1, size) @ weight.reshape(size, -1)
    return product.reshape(*x.shape[: len(tokens)], *weight.shape[number:])


def _keep(equation: str, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    return _product(equation, x, weight), (x, weight)


def _pull(equation: str, kept: Any, gradient: jax.Array) -> Any:
    return jax.vjp(functools.partial(_product, equation), *kept)[1](gradient)


_contract = jax.custom_vjp(_product, nondiff_argnums=(0,))
_contract.defvjp(_keep, _pull)


def contract_by_axes(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Computes `einsum(equation, x, weight)` as it stands, where tokens are cut along two axes."""
    return jnp.einsum(equation, x, weight)
