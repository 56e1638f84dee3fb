# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The kinds of layers of a model: their windows, and the frequencies at which heads rotate."""

import math

import jax
import jax.numpy as jnp

from earl_jax.models.config import ModelConfig, RopeScaling
from earl_jax.models.layers.parts import LayerKind


def layer_kind(config: ModelConfig, index: int) -> LayerKind:
    """Returns the kind of layer `index`."""
    window = config.layer_windows[index] or None
    if config.no_rope_every and (index + 1) % config.no_rope_every == 0:
        return LayerKind(window, jnp.zeros(config.rotated_size // 2))
    if window and config.window_rope_theta:
        return LayerKind(window, rope_frequencies(config.rotated_size, config.window_rope_theta))
    frequencies = rope_frequencies(config.rotated_size, config.rope_theta, config.rope_scaling)
    return LayerKind(window, frequencies, config.rope_scaling.magnitude)


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
