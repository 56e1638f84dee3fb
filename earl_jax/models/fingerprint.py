# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of trees of arrays, which tell whether two are the same on whatever layouts."""

from typing import Any

import jax
import jax.numpy as jnp

# Changes whenever `fingerprint` returns other numbers; checkpoints hold it.
FINGERPRINT_VERSION = 2


@jax.jit
def fingerprint(tree: Any) -> jax.Array:
    """Returns a u32 that depends on every bit of the arrays and its index, not on their layout.

    A change of one number always changes it. Changes of several cancel by chance alone, once in
    2**32: of two flipped signs, too.
    """

    def add(leaf: jax.Array) -> jax.Array:
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32)
        place = jnp.zeros(leaf.shape, jnp.uint32)
        for axis, size in enumerate(leaf.shape):
            place = place * size + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        # Integers add up to the same in any order.
        return jnp.sum(_mixed(bits ^ _mixed(place)), dtype=jnp.uint32)

    total = jnp.zeros((), jnp.uint32)
    for leaf in jax.tree.leaves(tree):
        total = total * 31 + add(leaf)
    return total


def _mixed(number: jax.Array) -> jax.Array:
    """Returns a u32 of which every bit depends on every bit of `number`, each from one number.

    MurmurHash3's finalizer. Without it the highest bit, a sign, would only reach the highest bit of
    a sum, where two changes cancel.
    """
    number = (number ^ (number >> 16)) * jnp.uint32(0x85EBCA6B)
    number = (number ^ (number >> 13)) * jnp.uint32(0xC2B2AE35)
    return number ^ (number >> 16)
