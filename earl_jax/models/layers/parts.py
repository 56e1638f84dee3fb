# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of all kinds of layers: their records, the norm, and the rotation of heads."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.models.activations import recompute_backward
from earl_jax.models.attention.delta_rule import Mixed
from earl_jax.models.attention.rows import Window
from earl_jax.models.config import ModelConfig
from earl_jax.models.contraction import Contract
from earl_jax.models.projection import project
from earl_jax.models.remat import mark_product


class LayerKind(NamedTuple):
    """The settings in which layers of one model may differ.

    `window` is that of `attention`, `frequencies` and `magnitude` those of `rotate`.
    """

    window: Window
    frequencies: jax.Array
    magnitude: float | jax.Array = 1.0


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """Root mean square normalisation (arXiv 1910.07467) in fp32, in the type of the input.

    Over the axes of the scale, which are the last ones, whatever axes are before them.
    """
    axes = tuple(range(-scale_D.ndim, 0))

    @recompute_backward
    def normalised(x_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
        x32 = x_BTD.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axes, keepdims=True) + eps)
        scale = jnp.expand_dims(scale_D.astype(jnp.float32), range(x32.ndim - scale_D.ndim))
        return (x32 * scale).astype(x_BTD.dtype)

    return normalised(x_BTD, scale_D)


def norm(
    config: ModelConfig, x_BTD: jax.Array, weight_D: jax.Array, eps: float | None = None
) -> jax.Array:
    """Runs `rms_norm` with the weight as its scale, or 1 + the weight where the model has it so.

    With the model's epsilon, if not with `eps`.
    """
    if config.norm_from_one:
        weight_D = 1.0 + weight_D.astype(jnp.float32)
    return rms_norm(x_BTD, weight_D, eps or config.norm_eps)


def rotate(
    x_BTAH: jax.Array,
    positions_BT: jax.Array,
    frequencies: jax.Array,
    magnitude: float | jax.Array = 1.0,
    *,
    interleaved: bool = False,
) -> jax.Array:
    """Turns pair i of each head by its position times `frequencies[i]`, in fp32.

    Rotary position embedding (RoFormer, arXiv 2104.09864, eq. 34).

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


class Parts(NamedTuple):
    """The arguments of a layer beside its weights and the residual stream.

    The model, the layer's kind, the positions of the tokens, and the functions in which training
    and decoding differ: `attend(query, key, value, sinks)`, sinks being None without attention
    sinks; `mix_experts(layer, x)`, which is not called for a dense layer; `mix_states(inputs)`, for
    layers of linear attention; `contract(equation, x, weight)`, the products of projections
    (contraction.py). With `reads_latents` keys are latents of latent attention with a rotated key
    behind, values None, and results latents.
    """

    config: ModelConfig
    kind: LayerKind
    positions_BT: jax.Array
    attend: Callable[[jax.Array, jax.Array, jax.Array | None, jax.Array | None], jax.Array]
    mix_experts: Callable[[Any, jax.Array], jax.Array]
    mix_states: Callable[[Mixed], jax.Array]
    contract: Contract
    reads_latents: bool = False

    def project(self, equation: str, x: jax.Array, weight: Any) -> jax.Array:
        """Computes a projection (projection.py), whose result remat may keep."""
        return mark_product(project(equation, x, weight, self.contract))

    def norm(self, x_BTD: jax.Array, weight_D: jax.Array, eps: float | None = None) -> jax.Array:
        """Runs `norm` of the model."""
        return norm(self.config, x_BTD, weight_D, eps)

    def rotate(self, x_BTAH: jax.Array) -> jax.Array:
        """Rotates the first numbers of heads, all of them or `config.rotated_size`."""
        size = self.config.rotated_size
        rotated_BTAH = rotate(
            x_BTAH[..., :size],
            self.positions_BT,
            self.kind.frequencies,
            self.kind.magnitude,
            interleaved=self.config.rope_interleaved,
        )
        if size == x_BTAH.shape[-1]:
            return rotated_BTAH
        return jnp.concatenate([rotated_BTAH, x_BTAH[..., size:]], axis=-1)
