# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Loops over the elements of a layer's activations: the gate of a feed-forward network.

Their backward pass computes them again from what is kept anyhow, which costs less than to keep
what is between (`again`).
"""

import functools
from collections.abc import Callable, Mapping

import jax

# In a scan over layers nothing need keep XLA from merging the passes.
again = functools.partial(jax.checkpoint, prevent_cse=False)

_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


@functools.partial(again, static_argnums=0)
def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns `up` times a function of `gate`, that of `ModelConfig.activation`."""
    return _ACTIVATIONS[activation](gate) * up
