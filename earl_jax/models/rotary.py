# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (RoFormer, arXiv 2104.09864, eq. 34)."""

import math

import jax
import jax.numpy as jnp

from earl_jax.models.config import RopeScaling


def rope_frequencies(
    head_size: int,
    theta: float,
    scaling: RopeScaling = RopeScaling(),  # noqa: B008 - frozen
) -> jax.Array:
    """Returns radians per position of each pair, f32[head_size / 2], stretched by RopeScaling."""
    half = head_size // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling.factor == 1:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        kept = 1 - _ramp(half, *_yarn_pairs(half, theta, scaling))
        return kept * frequencies + (1 - kept) * frequencies / scaling.factor
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = jnp.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _yarn_pairs(half: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """Returns the pair up to which YaRN keeps frequencies, and the one from which it divides them.

    Pair i turns `original_max_position * theta ** (-i / half) / (2 pi)` times. They are whole
    numbers, unless `scaling.truncate` is False.
    """

    def pair_that_turns(times: float) -> float:
        waves = scaling.original_max_position / (times * 2 * math.pi)
        return half * math.log(waves) / math.log(theta)

    first = pair_that_turns(scaling.high_freq_factor)
    last = pair_that_turns(scaling.low_freq_factor)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    return max(first, 0), min(last, 2 * half - 1)


def _ramp(size: int, first: float, last: float) -> jax.Array:
    """Returns f32[size] that rises from 0 at `first` to 1 at `last`."""
    # Equal ends are one step, as in `transformers`.
    width = last - first or 0.001
    return jnp.clip((jnp.arange(size, dtype=jnp.float32) - first) / width, 0.0, 1.0)


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
