# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Sampling by two-level inverse CDF: one random number a row, not one a vocabulary entry.

For 16 rows x 151,936 entries on a CPU: 2.0 ms against 115 ms for `jax.random.categorical`.
"""

import jax
import jax.numpy as jnp

BLOCK_SIZE = 512


def sample(
    uniform_B: jax.Array, logits_BV: jax.Array, temperature_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token per row, and its log-prob.

    Args:
        uniform_B: f32 in [0, 1), one per row.
        logits_BV: f32.
        temperature_B: f32 per row; 0 takes the most likely token.

    Returns:
        tokens_B i32, and logprobs_B f32: under the distribution that the token was drawn from, or,
        where the temperature is 0, under the untempered one.
    """
    greedy_B = temperature_B <= 0
    scaled_BV = logits_BV / jnp.where(greedy_B, 1.0, temperature_B)[:, None]
    top_B = jnp.max(scaled_BV, axis=-1)
    mass_BV = jnp.exp(scaled_BV - top_B[:, None])
    drawn_B = _inverse_cdf(uniform_B, mass_BV)
    tokens_B = jnp.where(greedy_B, jnp.argmax(logits_BV, axis=-1), drawn_B).astype(jnp.int32)
    chosen_B = jnp.take_along_axis(scaled_BV, tokens_B[:, None], axis=-1)[:, 0]
    return tokens_B, chosen_B - top_B - jnp.log(jnp.sum(mass_BV, axis=-1))


def _inverse_cdf(uniform_B: jax.Array, mass_BV: jax.Array) -> jax.Array:
    """The first entry at which the running sum of the mass exceeds uniform x total."""
    rows, vocab = mass_BV.shape
    mass_BPQ = jnp.pad(mass_BV, ((0, 0), (0, -vocab % BLOCK_SIZE))).reshape(rows, -1, BLOCK_SIZE)
    mass_BP = jnp.sum(mass_BPQ, axis=-1)
    sums_BP = jnp.cumsum(mass_BP, axis=-1)
    threshold_B = uniform_B * sums_BP[:, -1]
    block_B = _first_above(sums_BP, mass_BP, threshold_B)
    before_B = jnp.where(
        block_B > 0, jnp.take_along_axis(sums_BP, block_B[:, None] - 1, axis=-1)[:, 0], 0.0
    )
    mass_BQ = jnp.take_along_axis(mass_BPQ, block_B[:, None, None], axis=1)[:, 0]
    entry_B = _first_above(jnp.cumsum(mass_BQ, axis=-1), mass_BQ, threshold_B - before_B)
    return block_B * BLOCK_SIZE + entry_B


def _first_above(sums_BP: jax.Array, mass_BP: jax.Array, threshold_B: jax.Array) -> jax.Array:
    """The first entry with mass whose running sum is above the threshold, else the last with mass.

    Only entries with mass, because XLA adds in a tree: a running sum may rise, or fall, by a
    rounding error where nothing was added.
    """
    has_mass_BP = mass_BP > 0
    above_BP = has_mass_BP & (sums_BP > threshold_B[:, None])
    last_B = sums_BP.shape[-1] - 1 - jnp.argmax(has_mass_BP[:, ::-1], axis=-1)
    return jnp.where(jnp.any(above_BP, axis=-1), jnp.argmax(above_BP, axis=-1), last_B)


def token_uniforms(key: jax.Array, seeds_B: jax.Array, positions_B: jax.Array) -> jax.Array:
    """A token's random number depends on its episode's seed and its place, on nothing else."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, seed), position))

    return jax.vmap(one)(seeds_B, positions_B)
