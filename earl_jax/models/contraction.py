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
from jax.ad_checkpoint import checkpoint_name

from earl_jax.settings.remat import Remat

Contract = Callable[[str, jax.Array, jax.Array], jax.Array]

# What `recomputed` keeps with remat "dots", by name.
PRODUCT, ATTENTION = "product", "attention"


def mark_product(product: jax.Array) -> jax.Array:
    """Returns the result of a projection, which `recomputed` keeps with remat "dots"."""
    return checkpoint_name(product, PRODUCT)


def mark_attention(out: jax.Array, log_total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what attention's backward pass needs of its forward pass, kept like a product.

    They are its result and the logarithms of the softmax's sums.
    """
    return checkpoint_name(out, ATTENTION), checkpoint_name(log_total, ATTENTION)


def recomputed(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Returns a layer whose backward pass computes again what the policy `remat` does not keep.

    The layer's first argument is its input.
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        return layer
    if remat != "offload":
        names = (PRODUCT, ATTENTION) if remat == "dots" else ()
        return jax.checkpoint(layer, policy=policies.save_only_these_names(*names))

    def named(x: Any, *others: Any) -> Any:
        return layer(checkpoint_name(x, "input"), *others)

    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(named, policy=offload)


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
