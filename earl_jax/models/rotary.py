# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (RoFormer, arXiv 2104.09864, eq. 34)."""

import jax
import jax.numpy as jnp


def rotate(
    x_BTAH: jax.Array,
    positions_BT: jax.Array,
    frequencies: jax.Array,
    magnitude: float | jax.Array = 1.0,
    *,
    interleaved: bool = False,
) -> jax.Array:
    """Turns pair i of each head by its position times `frequencies[i]`, in fp32.

    Pair i are the numbers i and i + H / 2, as in Llama, or 2i and 2i + 1 if `interleaved`; the
    result has them at i and i + H / 2 in either case. It is `magnitude` times as long. `x_BTAH` may
    have any number of axes between T and H.
    """
    angles = positions_BT.astype(jnp.float32)[..., None] * frequencies[None, None, :]
    between = (1,) * (x_BTAH.ndim - 3)
    angles = angles.reshape(*positions_BT.shape, *between, frequencies.size)
    x32 = x_BTAH.astype(jnp.float32)
    if interleaved:
        first, second = x32[..., ::2], x32[..., 1::2]
    else:
        first, second = jnp.split(x32, 2, axis=-1)
    cos, sin = jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTAH.dtype)
