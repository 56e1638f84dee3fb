# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Losses of single tokens, and the statistics of log-probs that they are made of."""

import jax
import jax.numpy as jnp

from earl_jax.algorithms.algorithm import TokenFacts, TokenLosses

# Larger differences of log-probs are cut here: e^20 is 5e8, and its products are finite in fp32.
_MAX_LOG_RATIO = 20.0


def likelihood_ratio(logprobs: jax.Array, old: jax.Array) -> jax.Array:
    """Returns exp(logprobs - old), between e^-20 and e^20; beyond these it has no gradient."""
    return jnp.exp(jnp.clip(logprobs - old, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def kl_estimate(logprobs: jax.Array, other: jax.Array) -> jax.Array:
    """Returns r - 1 - log r with r = exp(logprobs - other), an estimate of KL(other, policy).

    It is k3 of Schulman (joschu.net/blog/kl-approx.html): unbiased for tokens sampled from `other`,
    and never negative.
    """
    gap = jnp.clip(logprobs - other, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return jnp.exp(gap) - 1.0 - gap


def truncated_importance(
    proximal: jax.Array, behaviour: jax.Array, cap: float
) -> tuple[jax.Array, jax.Array]:
    """Returns importance weights min(proximal / behaviour, cap), and 1.0 for those cut, else 0.0.

    Ionides 2008, eq. 4; as the weights of decoupled PPO in AReaL (arXiv 2505.24298, eq. 5). They
    have no gradient.
    """
    weight = jax.lax.stop_gradient(likelihood_ratio(proximal, behaviour))
    return jnp.minimum(weight, cap), (weight > cap).astype(jnp.float32)


def clipped_surrogate(facts: TokenFacts, *, clip_low: float, clip_high: float) -> TokenLosses:
    """Computes PPO's clipped objective, -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    arXiv 1707.06347, eq. 7, with bounds of their own on each side (arXiv 2503.14476, eq. 10);
    r = policy / old (see `TokenFacts.old`). Logs `clip_fraction`, the fraction of tokens that the
    clip cut off.
    """
    ratio = likelihood_ratio(facts.logprobs, facts.old)
    gain = ratio * facts.advantages
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * facts.advantages
    return TokenLosses(
        losses=-jnp.minimum(gain, clipped),
        metrics={"clip_fraction": (clipped < gain).astype(jnp.float32)},
    )


def cross_entropy(facts: TokenFacts) -> TokenLosses:
    """Returns the negative log-likelihood of the tokens of the mask: supervised fine-tuning."""
    return TokenLosses(losses=-facts.logprobs, metrics={})
