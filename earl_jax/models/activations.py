# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The gate of a feed-forward network, and the rule by which loops over elements keep nothing."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

# Has the backward pass of a loop over elements compute it again from its inputs, which are kept
# anyhow: that costs less than to keep what is between. Layers are scanned, so that XLA cannot merge
# both passes, and need not be kept from it.
recompute_backward = functools.partial(jax.checkpoint, prevent_cse=False)

# Of gpt-oss: the gain of the sigmoid, and the bound of what it reads (openai/gpt-oss, model.py).
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


def _swiglu_clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate = jnp.minimum(gate, SWIGLU_LIMIT)
    up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate)


_ACTIVATIONS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "swiglu_clamped": _swiglu_clamped,
}


@functools.partial(recompute_backward, static_argnums=0)
def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns what `ModelConfig.activation` makes of both: `up` times a function of `gate`."""
    return _ACTIVATIONS[activation](gate, up)
