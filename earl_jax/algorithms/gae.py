# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""PPO's critic: generalised advantage estimates on the devices, and the loss of values.

The steps of an episode are the policy's own tokens, or its turns. What the environment wrote is no
step: the value of a step is compared with that of the policy's next one, across the answers between
them, and across the samples of an episode that forks. A row may hold several episodes.
"""

import jax
import jax.numpy as jnp

from earl_jax.algorithms.algorithm import Estimates, RewardFacts, TokenLosses, ValueFacts
from earl_jax.algorithms.losses import reward_penalties
from earl_jax.algorithms.sequences import normalized, running_sums, sequence_sums
from earl_jax.algorithms.settings import PpoSettings


def advantage_estimates(facts: RewardFacts, settings: PpoSettings) -> Estimates:
    """Returns GAE's advantages and returns of a batch, at the level that the settings say.

    A return is the advantage plus the value; with "turn" every token of a turn has the turn's.
    """
    assert facts.values is not None, "there is a critic"
    turns_BT, is_first_BT, is_last_BT = _turns(facts)
    penalties_BT = jnp.zeros_like(facts.rewards)
    if settings.penalizes_rewards:
        penalties_BT = reward_penalties(facts, settings.kl_coefficient, settings.kl_estimator)
    if settings.gae_level == "token":
        steps_BT = facts.mask
        rewards_BT = jnp.where(is_last_BT, facts.rewards, 0.0) - penalties_BT
    else:
        steps_BT = is_first_BT
        rewards_BT = facts.rewards - sequence_sums(penalties_BT, turns_BT)
    advantages_BT = step_advantages(
        rewards_BT, steps_BT, facts, gamma=settings.gamma, gae_lambda=settings.gae_lambda
    )
    returns_BT = jnp.where(steps_BT, advantages_BT + facts.values, 0.0)
    if settings.gae_level == "turn":
        # Of each turn one summand is not 0.
        advantages_BT, returns_BT = (
            jnp.where(facts.mask, sequence_sums(each, turns_BT), 0.0)
            for each in (advantages_BT, returns_BT)
        )
    if settings.normalize_advantages:
        advantages_BT = normalized(advantages_BT, facts.mask)
    return Estimates(advantages=advantages_BT, returns=returns_BT)


def step_advantages(
    rewards_BT: jax.Array,
    steps_BT: jax.Array,
    facts: RewardFacts,
    *,
    gamma: float,
    gae_lambda: float,
) -> jax.Array:
    """Returns GAE (arXiv 1506.02438, eq. 16) where `steps_BT` is True, 0 elsewhere; f32[B,T].

    d = reward + gamma * (value of the next step) - value, and A = d + gamma * lambda * (A of the
    next step). The value behind an episode's last step is 0: whatever ended it, nothing follows.
    """
    assert facts.values is not None, "there is a critic"
    next_BT, is_followed_BT = _next_steps(steps_BT, facts)
    next_values_BT = jnp.where(is_followed_BT, _at(facts.values, next_BT), 0.0)
    errors_BT = jnp.where(steps_BT, rewards_BT + gamma * next_values_BT - facts.values, 0.0)
    decay_BT = jnp.where(is_followed_BT, gamma * gae_lambda, 0.0)
    # Between steps the sum goes through as it is.
    sums_BT = running_sums(errors_BT, jnp.where(steps_BT, decay_BT, 1.0), reverse=True)
    return jnp.where(steps_BT, sums_BT, 0.0)


def value_loss(facts: ValueFacts, settings: PpoSettings) -> TokenLosses:
    """Returns half the squared error of each value, or of the clipped value where that is larger.

    As in the code of arXiv 1707.06347. Logs `value_clip_fraction`, the fraction of tokens at which
    the clipped one was larger.
    """
    losses, metrics = (facts.values - facts.returns) ** 2, {}
    if settings.value_clip:
        change = jnp.clip(facts.values - facts.old, -settings.value_clip, settings.value_clip)
        clipped = (facts.old + change - facts.returns) ** 2
        is_clipped = clipped > losses
        metrics["value_clip_fraction"] = is_clipped.astype(jnp.float32)
        losses = jnp.where(is_clipped, clipped, losses)
    return TokenLosses(losses=0.5 * losses, metrics=metrics)


def _turns(facts: RewardFacts) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a number for each run of tokens of one turn, and the first and last of the policy's.

    Example: turns 0 1 1 0 2 give 0 1 1 2 3; first 0 1 0 0 1; last 0 0 1 0 1.
    """
    changes_BT = (facts.turns[:, 1:] != facts.turns[:, :-1]) | (
        facts.sequences[:, 1:] != facts.sequences[:, :-1]
    )
    begins_BT = jnp.pad(changes_BT, ((0, 0), (1, 0)), constant_values=True)
    ends_BT = jnp.pad(changes_BT, ((0, 0), (0, 1)), constant_values=True)
    numbers_BT = jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32) - 1
    return numbers_BT, begins_BT & facts.mask, ends_BT & facts.mask


def _next_steps(steps_BT: jax.Array, facts: RewardFacts) -> tuple[jax.Array, jax.Array]:
    """Returns the place of the next step behind each token, and True where it is of its episode.

    An episode's turns are numbered on through its samples, and each episode begins with turn 1: in
    another sequence a later turn is of the same episode, and no other.
    """
    length = steps_BT.shape[1]
    order_BT = jax.lax.broadcasted_iota(jnp.int32, steps_BT.shape, 1)
    from_here_BT = jax.lax.cummin(jnp.where(steps_BT, order_BT, length), axis=1, reverse=True)
    next_BT = jnp.pad(from_here_BT[:, 1:], ((0, 0), (0, 1)), constant_values=length)
    is_there_BT, next_BT = next_BT < length, jnp.minimum(next_BT, length - 1)
    is_same_BT = _at(facts.sequences, next_BT) == facts.sequences
    is_later_BT = _at(facts.turns, next_BT) > facts.turns
    return next_BT, is_there_BT & (is_same_BT | is_later_BT)


def _at(values_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values_BT, positions_BT, axis=1)
