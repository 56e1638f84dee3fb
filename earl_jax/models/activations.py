# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The gate of a feed-forward network, and the rule by which loops over elements keep nothing."""

import functools
from collections.abc import Callable, Mapping

import jax

# Has the backward pass of a loop over elements compute it again from its inputs, which are kept
# anyhow: that costs less than to keep what is between. Layers are scanned, so that XLA cannot merge
# both passes, and need not be kept from it.
recompute_backward = functools.partial(jax.checkpoint, prevent_cse=False)

_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


@functools.partial(recompute_backward, static_argnums=0)
def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns `up` times a function of `gate`, that of `ModelConfig.activation`."""
    return _ACTIVATIONS[activation](gate) * up
