# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The results that a layer's backward pass keeps, and those that it computes again."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from earl_jax.settings.remat import Remat

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
