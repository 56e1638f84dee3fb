# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Losses of single tokens, and the statistics of log-probs that they are made of."""

import jax
import jax.numpy as jnp

from earl_jax.algorithms.algorithm import KlEstimator, RewardFacts, TokenFacts, TokenLosses
from earl_jax.algorithms.sequences import aggregate, group_means, sequence_sums

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


def log_linear_proximal(logprobs: jax.Array, behaviour: jax.Array, lag: jax.Array) -> jax.Array:
    """Returns log-probs of the proximal policy, interpolated: A-3PO (arXiv 2512.06547).

    behaviour / lag + (1 - 1 / lag) * logprobs, without a gradient. `lag`, at least 1, is how many
    versions the one that the step ends with is ahead of the one that sampled, and the proximal
    policy is one behind it: of a token that this one sampled, lag is 1 and the result `behaviour`.
    """
    gap = jax.lax.stop_gradient(logprobs) - behaviour
    return behaviour + (1.0 - 1.0 / jnp.maximum(lag, 1.0)) * gap


def truncated_importance(
    proximal: jax.Array, behaviour: jax.Array, cap: float
) -> tuple[jax.Array, jax.Array]:
    """Returns importance weights min(proximal / behaviour, cap), and 1.0 for those cut, else 0.0.

    Ionides 2008, eq. 4; as the weights of decoupled PPO in AReaL (arXiv 2505.24298, eq. 5). They
    have no gradient.
    """
    weight = jax.lax.stop_gradient(likelihood_ratio(proximal, behaviour))
    return jnp.minimum(weight, cap), (weight > cap).astype(jnp.float32)


def importance_weights(
    facts: TokenFacts, correction: str, cap: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the weight of each token for a correction, and 1.0 for those cut, else 0.0; f32[B,T].

    "truncated": `truncated_importance` of the token. "truncated_sequence": that of the product of
    proximal / behaviour over the token's sequence. "masked": proximal / behaviour where it lies in
    [1 / cap, cap], or 0 (IcePop, arXiv 2510.18855). No weight has a gradient.
    """
    assert facts.proximal is not None
    if correction == "masked":
        weight = jax.lax.stop_gradient(likelihood_ratio(facts.proximal, facts.behaviour))
        is_cut = (weight > cap) | (weight < 1.0 / cap)
        return jnp.where(is_cut, 0.0, weight), is_cut.astype(jnp.float32)
    if correction == "truncated_sequence":
        gaps = jnp.clip(facts.proximal - facts.behaviour, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return truncated_importance(sequence_sums(gaps, facts.sequences), jnp.zeros_like(gaps), cap)
    return truncated_importance(facts.proximal, facts.behaviour, cap)


def sequence_ratio(facts: TokenFacts) -> jax.Array:
    """Returns GSPO's ratio of each token's sequence (arXiv 2507.18071, eq. 7), f32[B,T].

    It is exp of the mean over the sequence's tokens of log(policy / old). The gradient is that of
    GSPO-token (eq. 13), ratio times that of the token's own log-prob; where all tokens of a
    sequence have the same advantage, their mean loss has the value and the gradient of eq. 5.
    """
    gaps = jnp.clip(facts.logprobs - facts.old, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    sums, lengths = (
        sequence_sums(values, facts.sequences)
        for values in (jax.lax.stop_gradient(gaps), facts.mask.astype(jnp.float32))
    )
    ratio = jnp.exp(sums / jnp.maximum(lengths, 1.0))
    return ratio * jnp.exp(facts.logprobs - jax.lax.stop_gradient(facts.logprobs))


def clipped_surrogate(
    facts: TokenFacts,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    ratio: jax.Array | None = None,
) -> TokenLosses:
    """Computes PPO's clipped objective, -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    arXiv 1707.06347, eq. 7, with bounds of their own on each side (arXiv 2503.14476, eq. 10);
    r is `ratio`, or policy / old (see `TokenFacts.old`). With `dual_clip` above 0 the gain of a
    token with A < 0 is at least dual_clip * A (arXiv 1912.09729). Logs `clip_fraction` and
    `dual_clip_fraction`, the fractions of tokens that each clip cut off.
    """
    ratio = likelihood_ratio(facts.logprobs, facts.old) if ratio is None else ratio
    gain = ratio * facts.advantages
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * facts.advantages
    is_clipped = clipped < gain
    # At a bound both are equal, and the gradient of a minimum would be the mean of theirs.
    lower = jnp.where(is_clipped, clipped, gain)
    metrics = {"clip_fraction": is_clipped.astype(jnp.float32)}
    if dual_clip:
        least = dual_clip * facts.advantages
        is_cut = (facts.advantages < 0) & (lower < least)
        lower = jnp.where(is_cut, least, lower)
        metrics["dual_clip_fraction"] = is_cut.astype(jnp.float32)
    return TokenLosses(losses=-lower, metrics=metrics)


def clipped_weight(facts: TokenFacts, *, clip_low: float, clip_high: float) -> TokenLosses:
    """Computes CISPO's objective, -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy.

    arXiv 2506.13585, eq. 4 and 5, r = policy / old. The clip cuts weights, so that every token
    keeps a gradient. Logs `clip_fraction`, the fraction of tokens whose weight was cut.
    """
    ratio = jax.lax.stop_gradient(likelihood_ratio(facts.logprobs, facts.old))
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return TokenLosses(
        losses=-weight * facts.advantages * facts.logprobs,
        metrics={"clip_fraction": (weight != ratio).astype(jnp.float32)},
    )


def policy_kl(logprobs: jax.Array, reference: jax.Array, estimator: KlEstimator) -> jax.Array:
    """Returns an estimate of KL(policy, reference) at tokens that the policy sampled.

    With r = reference / policy (Schulman, joschu.net/blog/kl-approx.html): k1 is -log r, k2 is
    (log r)^2 / 2, k3 is r - 1 - log r.
    """
    if estimator == "k3":
        return kl_estimate(reference, logprobs)
    gap = jnp.clip(logprobs - reference, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return gap if estimator == "k1" else 0.5 * gap**2


def reward_penalties(
    facts: TokenFacts | RewardFacts, coefficient: float, estimator: KlEstimator
) -> jax.Array:
    """Returns `coefficient` times `policy_kl` of the policy that the ratio is relative to.

    f32[B,T], 0 where `mask` is not True. It has no gradient, and is the same in all updates of a
    batch.
    """
    assert facts.reference is not None, "settings.needs names the reference"
    distance = policy_kl(facts.old, facts.reference, estimator)
    return coefficient * jnp.where(facts.mask, jax.lax.stop_gradient(distance), 0.0)


def balanced_log_ratios(facts: RewardFacts) -> jax.Array:
    """Returns r / beta - log Z of each token's sequence, where `rewards` are r / beta; f32[B,T].

    log Z is the mean over the sequences of a group of log reference(y) + r / beta - log policy(y),
    under the policy that the step begins with (`old`): VarGrad's estimate (arXiv 2503.18929). It
    does not depend on what is added to all rewards of a group. A sequence without a token of the
    mask counts nowhere.
    """
    assert facts.reference is not None and facts.groups is not None, "the algorithm needs them"
    gaps = jnp.where(facts.mask, facts.old - facts.reference, 0.0)
    found = facts.rewards - sequence_sums(gaps, facts.sequences)
    log_z, _ = group_means(found, facts.mask, facts.sequences, facts.groups)
    return jnp.where(facts.mask, facts.rewards - log_z, 0.0)


def trajectory_balance(facts: TokenFacts) -> TokenLosses:
    """Computes the mean over sequences of (log policy(y) - log reference(y) - advantage)^2.

    With advantages of `balanced_log_ratios` that is the trajectory-balance loss in its VarGrad form
    (arXiv 2503.18929), (log Z + log policy(y) - log reference(y) - r / beta)^2, log Z without a
    gradient. Log-probs are the updated policy's in every update, but log Z stays the step's
    first. Logs `balance_error`, the absolute value of what is squared, and `reference_kl` (k3).
    """
    assert facts.reference is not None, "the algorithm needs it"
    log_ratios = sequence_sums(facts.logprobs - facts.reference, facts.sequences)
    errors = jnp.where(facts.mask, log_ratios - facts.advantages, 0.0)
    aggregation = aggregate(facts, "sequence", 1)
    metrics = {
        "balance_error": jnp.abs(errors),
        "reference_kl": policy_kl(facts.logprobs, facts.reference, "k3"),
    }
    return TokenLosses(losses=errors**2, metrics=metrics, aggregation=aggregation)


def cross_entropy(facts: TokenFacts) -> TokenLosses:
    """Returns the negative log-likelihood of the tokens of the mask: supervised fine-tuning."""
    return TokenLosses(losses=-facts.logprobs, metrics={})
