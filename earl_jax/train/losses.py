# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Losses as sums over tokens, so that micro-batches add up: sum of losses over sum of tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.models.logprobs import TokenScores
from earl_jax.trajectory import TrajectoryBatch


class LossSums(NamedTuple):
    """Sums over the policy's tokens (f32 scalars); `mismatch_max` is a maximum.

    `loss` is what is minimised. `clipped` counts tokens whose ratio the clip cut off. `kl` sums the
    estimate r - 1 - log r of KL(behaviour, policy) (Schulman's k3), r = policy / behaviour.
    `mismatch` sums |log-prob here - log-prob of the engine|. `importance` sums the weights of the
    correction, 1 where there is none, and `truncated` counts those that the cap cut off.
    """

    loss: jax.Array
    entropy: jax.Array
    clipped: jax.Array
    kl: jax.Array
    mismatch: jax.Array
    mismatch_max: jax.Array
    importance: jax.Array
    truncated: jax.Array


def policy_gradient(
    scores: TokenScores,
    batch: TrajectoryBatch,
    *,
    clip_low: float,
    clip_high: float,
    entropy_coefficient: jax.Array | float,
    importance_cap: float = 0.0,
) -> LossSums:
    """PPO's clipped objective (arXiv 1707.06347, eq. 7) and an entropy bonus, per policy token.

    w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    With an `importance_cap` of 0, r = policy / behaviour and w = 1. Above 0 the objective is
    decoupled (AReaL, arXiv 2505.24298, eq. 5): r = policy / proximal, where the proximal policy is
    the one that the batch's first update begins with, as the trainer scores it, and w =
    min(proximal / behaviour, cap) is a constant (truncated importance sampling, Ionides 2008).
    `batch.proximal` has its log-probs; without it the update must be the batch's first.
    """
    spoken = batch.turn_ids > 0
    proximal_BT, weight = batch.logprobs, jnp.ones_like(batch.logprobs)
    if importance_cap:
        current_BT = jax.lax.stop_gradient(scores.logprobs)
        proximal_BT = current_BT if batch.proximal is None else batch.proximal
        weight = jnp.exp(jnp.where(spoken, proximal_BT - batch.logprobs, 0.0))
    truncated = weight > (importance_cap or jnp.inf)
    weight = jnp.where(truncated, importance_cap, weight)
    log_ratio = jnp.where(spoken, scores.logprobs - proximal_BT, 0.0)
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    gain = weight * jnp.minimum(ratio * batch.advantages, clipped_ratio * batch.advantages)
    cut_off = clipped_ratio * batch.advantages < ratio * batch.advantages

    def total(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(spoken, values, 0.0))

    gap = jnp.where(spoken, scores.logprobs - batch.logprobs, 0.0)
    mismatch = jnp.abs(gap)
    return LossSums(
        loss=-total(gain + entropy_coefficient * scores.entropy),
        entropy=total(scores.entropy),
        clipped=total(cut_off.astype(jnp.float32)),
        kl=total(jnp.exp(gap) - 1.0 - gap),
        mismatch=total(mismatch),
        mismatch_max=jnp.max(mismatch),
        importance=total(weight),
        truncated=total(truncated.astype(jnp.float32)),
    )


def supervised(scores: TokenScores, batch: TrajectoryBatch) -> LossSums:
    """Cross-entropy of the demonstrator's tokens: those that a policy would have written."""
    spoken = batch.turn_ids > 0
    zero = jnp.zeros((), jnp.float32)
    return LossSums(
        loss=-jnp.sum(jnp.where(spoken, scores.logprobs, 0.0)),
        entropy=jnp.sum(jnp.where(spoken, scores.entropy, 0.0)),
        clipped=zero,
        kl=zero,
        mismatch=zero,
        mismatch_max=zero,
        importance=zero,
        truncated=zero,
    )
