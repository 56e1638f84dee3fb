# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of queries, keys and values for attention."""

import jax
import jax.numpy as jnp
import numpy as np

KV_HEADS, GROUPS, HEAD_SIZE = 2, 3, 16


def make_rows(length: int, heads: int = KV_HEADS, groups: int = GROUPS, size: int = HEAD_SIZE):
    """Queries, keys, values, and segments: three in the first row, with padding, one in the other.

    The second segment of the first row goes over the kernel's first block of 128.
    """
    rng = np.random.default_rng(length)
    query = rng.normal(size=(2, length, heads, groups, size)) * 2
    sides = rng.normal(size=(2, 2, heads, length, size))
    segments = np.ones((2, length), np.int32)
    cuts = (length // 4, 3 * length // 4, length - 3)
    for number, first in zip((2, 3, 0), cuts, strict=True):
        segments[0, first:] = number
    return [jnp.asarray(array, jnp.float32) for array in (query, *sides)], jnp.asarray(segments)


def out_and_gradients(attend, *arrays, segments):
    """Returns the attention output, and gradients of a weighted sum of it without padding.

    `attend` takes queries, keys, values, segments and what else is in `arrays`.
    """
    weights = jnp.asarray(np.random.default_rng(7).normal(size=arrays[0].shape), jnp.float32)
    real = (segments > 0)[:, :, None, None, None]

    def total(*arrays):
        out = jnp.where(real, attend(*arrays[:3], segments, *arrays[3:]), 0.0)
        return jnp.sum(out * weights), out

    grad = jax.jit(jax.grad(total, argnums=tuple(range(len(arrays))), has_aux=True))
    gradients, out = grad(*arrays)
    return [out, *gradients]
