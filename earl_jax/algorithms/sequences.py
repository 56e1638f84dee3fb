# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Sums over the sequences of a row, and the aggregation of token losses.

A sequence is the tokens of a row with one number in `TokenFacts.sequences`, which follow each
other: one sample of an episode. The sums are scans, whose order of additions does not depend on the
device; a scatter's would on a GPU.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from earl_jax.algorithms.algorithm import Aggregation, RewardFacts, TokenFacts

# Deviations of fp32 values below this part of the largest are noise.
_ROUNDING = 1e-6

AggregationName = Literal["token", "sequence", "constant"]


def sums_from(values_BT: jax.Array, sequences_BT: jax.Array, discount: float = 1.0) -> jax.Array:
    """Returns for each token the sum of its sequence from that token on, f32[B,T].

    Each later value counts `discount` times less. Values 1 2 3 4 in sequences 1 1 1 2 give 6 5 3 4.
    """
    ends_BT = sequences_BT != jnp.pad(sequences_BT[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    return running_sums(values_BT, jnp.where(ends_BT, 0.0, discount), reverse=True)


def sequence_sums(values_BT: jax.Array, sequences_BT: jax.Array) -> jax.Array:
    """Returns for each token the sum over its sequence, f32[B,T].

    Values 1 2 3 4 in sequences 1 1 1 2 give 6 6 6 4.
    """
    before_BT = jnp.pad(sequences_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    kept_BT = jnp.where(sequences_BT != before_BT, 0.0, 1.0)
    until_BT = running_sums(values_BT, kept_BT, reverse=False)
    return until_BT + sums_from(values_BT, sequences_BT) - values_BT


def group_sums(values_BT: jax.Array, groups_BT: jax.Array) -> jax.Array:
    """Returns for each token the sum over the tokens of all rows with its number, f32[B,T].

    Values 1 2 3 4 with the groups 1 2 2 1 give 5 5 5 5. Numbers are at least 0.
    """
    groups_N, values_N = groups_BT.reshape(-1), values_BT.reshape(-1)
    order_N = jnp.argsort(groups_N, stable=True)
    sums_1N = sequence_sums(values_N[order_N][None], groups_N[order_N][None])
    return sums_1N[0, jnp.argsort(order_N)].reshape(values_BT.shape)


def group_means(
    values_BT: jax.Array, mask_BT: jax.Array, sequences_BT: jax.Array, groups_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns for each token the mean over the sequences of its group, and their number, f32[B,T].

    Values are the same at all tokens of a sequence. A sequence without a token of the mask counts
    nowhere.
    """
    mask_BT = mask_BT.astype(jnp.float32)
    shares_BT = mask_BT / jnp.maximum(sequence_sums(mask_BT, sequences_BT), 1.0)
    counts_BT = group_sums(shares_BT, groups_BT)
    sums_BT = group_sums(shares_BT * values_BT, groups_BT)
    return sums_BT / jnp.maximum(counts_BT, 1.0), counts_BT


def episode_numbers(facts: RewardFacts) -> jax.Array:
    """Returns a number for the episode of each token in its row, i32[B,T].

    Each episode begins with the sample that has its first turn. Sequences 1 1 2 2 3 3 with turns
    0 1 0 2 0 1 give 1 1 1 1 2 2.
    """
    before_BT = jnp.pad(facts.sequences[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    has_first_BT = sequence_sums(jnp.where(facts.turns == 1, 1.0, 0.0), facts.sequences) > 0
    begins_BT = (facts.sequences != before_BT) & has_first_BT
    return jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32)


def running_sums(values_BT: jax.Array, kept_BT: jax.Array, *, reverse: bool) -> jax.Array:
    """Returns at each token its value plus `kept` times the sum before it, f32[B,T].

    "Before" is in the scan's direction: with `reverse` the sum at t holds that at t + 1.
    """

    def add(earlier: tuple, later: tuple) -> tuple:
        (sum_before, kept_before), (sum_after, kept_after) = earlier, later
        return sum_after + kept_after * sum_before, kept_before * kept_after

    sums_BT, _ = jax.lax.associative_scan(add, (values_BT, kept_BT), axis=1, reverse=reverse)
    return sums_BT


def normalized(values_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Returns values of mean 0 and population deviation 1 over the mask, 0 elsewhere, f32[B,T].

    Zeros where they differ by no more than the rounding of fp32.
    """
    largest = jnp.max(jnp.where(mask_BT, values_BT, -jnp.inf))
    # Differences, which are exact zeros where all are equal: a mean is rounded.
    below_BT = jnp.where(mask_BT, values_BT - largest, 0.0)
    count = jnp.maximum(jnp.sum(mask_BT), 1)
    centred_BT = jnp.where(mask_BT, below_BT - jnp.sum(below_BT) / count, 0.0)
    scale = jnp.sqrt(jnp.sum(centred_BT**2) / count)
    noise = _ROUNDING * jnp.max(jnp.where(mask_BT, jnp.abs(values_BT), 0.0))
    is_noise = scale <= noise
    return jnp.where(is_noise, 0.0, centred_BT / jnp.where(is_noise, 1.0, scale))


def aggregate(facts: TokenFacts, kind: AggregationName, num_tokens: int) -> Aggregation | None:
    """Returns the aggregation of this name; None for "token", which is the default of the update.

    "token": the mean over all tokens of the batch (DAPO, arXiv 2503.14476, eq. 12). "sequence": the
    mean over sequences of the mean over a sequence's tokens (GRPO, arXiv 2402.03300, eq. 3).
    "constant": the mean over sequences of the sum over a sequence's tokens divided by `num_tokens`,
    whatever its length (Dr. GRPO, arXiv 2503.20783). A sequence without a token of the
    mask counts nowhere.
    """
    if kind == "token":
        return None
    mask_BT = facts.mask.astype(jnp.float32)
    shares_BT = mask_BT / jnp.maximum(sequence_sums(mask_BT, facts.sequences), 1.0)
    weights_BT = shares_BT if kind == "sequence" else mask_BT / num_tokens
    return Aggregation(weights=weights_BT, shares=shares_BT)
