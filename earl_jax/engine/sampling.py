# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Sampling by two-level inverse CDF: one random number a row, not one a vocabulary entry.

For 16 rows x 151,936 entries on a CPU: 2.0 ms against 115 ms for `jax.random.categorical`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.engine.choices import FREE, Choices, next_branches
from earl_jax.engine.config import Sampling

BLOCK_SIZE = 512
# Logits divided by less may overflow: the token is the likeliest then, as at temperature 0.
LEAST_TEMPERATURE = 1e-5
# Masses relative to the likeliest token's lie in [0, 1]. As floats of one sign they are ordered as
# their bits are, of which the highest that can be set is the 29th.
_MASS_BITS = 30


class SamplingRows(NamedTuple):
    """A `Sampling` per row, on the host or the devices: f32[B], i32[B], f32[B], f32[B]."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any


def sampling_rows(settings: Sampling, rows: int) -> SamplingRows:
    """Returns the same settings for every row, as numpy arrays."""
    return SamplingRows(
        temperature=np.full(rows, settings.temperature, np.float32),
        top_k=np.full(rows, settings.top_k, np.int32),
        top_p=np.full(rows, settings.top_p, np.float32),
        min_p=np.full(rows, settings.min_p, np.float32),
    )


def set_row(rows: SamplingRows, row: int, settings: Sampling) -> None:
    """Writes the settings of one row into rows on the host."""
    for column, name in zip(rows, SamplingRows._fields, strict=True):
        column[row] = getattr(settings, name)


def sample(
    uniform_B: jax.Array,
    logits_BV: jax.Array,
    settings: SamplingRows,
    *,
    truncates: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Draws one token per row. Returns it with its log-prob.

    A row's token depends on its own numbers only, whatever the other rows' settings are.

    Args:
        uniform_B: f32 in [0, 1), one per row.
        logits_BV: f32.
        settings: per row.
        truncates: False: no row has a `top_k`, a `top_p` or a `min_p`.

    Returns:
        tokens_B i32, and logprobs_B f32: under the distribution that the token was drawn from, or,
        where the temperature is below LEAST_TEMPERATURE, under the untempered one. Log-probs are
        NaN where logits are not finite.
    """
    greedy_B = settings.temperature < LEAST_TEMPERATURE
    scaled_BV = logits_BV / jnp.where(greedy_B, 1.0, settings.temperature)[:, None]
    top_B = jnp.max(scaled_BV, axis=-1)
    mass_BV = jnp.exp(scaled_BV - top_B[:, None])
    if truncates:
        mass_BV = _cut(mass_BV, settings)
    drawn_B = _inverse_cdf(uniform_B, mass_BV)
    tokens_B = jnp.where(greedy_B, jnp.argmax(logits_BV, axis=-1), drawn_B).astype(jnp.int32)

    chosen_B = jnp.take_along_axis(scaled_BV, tokens_B[:, None], axis=-1)[:, 0]
    logprobs_B = chosen_B - top_B - jnp.log(jnp.sum(mass_BV, axis=-1))
    # 0, or NaN where the largest logit is not a finite number.
    fault_B = top_B - top_B
    return tokens_B, logprobs_B + fault_B


def draw(
    uniform_B: jax.Array,
    logits_BV: jax.Array,
    choices: Choices | None,
    settings: SamplingRows,
    *,
    truncates: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Runs `sample`; a slot that is at a node draws from its allowed tokens alone.

    The logits of these few are gathered: no mask is laid over the vocabulary, unrestricted slots
    keep every bit, and where all are unrestricted nothing is computed.
    """
    anything = sample(uniform_B, logits_BV, settings, truncates=truncates)
    if choices is None:
        return anything
    held_B = choices.node != FREE

    def among() -> tuple[jax.Array, jax.Array]:
        next_BJ = next_branches(choices)
        logits_BJ = jnp.take_along_axis(logits_BV, choices.tokens, axis=1)
        # Unrestricted slots are drawn here too, from arbitrary tokens, and the result is dropped.
        logits_BJ = jnp.where(next_BJ | ~held_B[:, None], logits_BJ, -jnp.inf)
        position_B, logprobs_B = sample(uniform_B, logits_BJ, settings, truncates=truncates)
        tokens_B = jnp.take_along_axis(choices.tokens, position_B[:, None], axis=1)[:, 0]
        return (
            jnp.where(held_B, tokens_B, anything[0]),
            jnp.where(held_B, logprobs_B, anything[1]),
        )

    return jax.lax.cond(jnp.any(held_B), among, lambda: anything)


def model_logprobs(
    logits_BV: jax.Array, tokens_B: jax.Array, choices: Choices | None = None
) -> jax.Array:
    """Returns log-probs of tokens under the model itself: untempered, nothing cut off. f32[B].

    With `choices` those of a slot that is at a node are among its allowed tokens.
    """
    chosen_B = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=-1)[:, 0]
    logprobs_B = chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)
    if choices is None:
        return logprobs_B
    next_BJ = next_branches(choices)
    logits_BJ = jnp.take_along_axis(logits_BV, choices.tokens, axis=1)
    total_B = jax.nn.logsumexp(jnp.where(next_BJ, logits_BJ, -jnp.inf), axis=-1)
    return jnp.where(choices.node != FREE, chosen_B - total_B, logprobs_B)


def _cut(mass_BV: jax.Array, settings: SamplingRows) -> jax.Array:
    """Returns the mass, 0 where `top_k`, `top_p` and `min_p` cut it off.

    `mass_BV` is relative to the likeliest token, whose mass is 1. Rows that cut nothing keep every
    bit, and where no row cuts anything nothing is computed: two conditions, which on GPUs the host
    reads.
    """
    # Their thresholds are found by bisection and not in a sorted row: sorting 16 x 151,936 entries
    # takes 501 ms on a CPU.
    cuts_B = settings.temperature >= LEAST_TEMPERATURE

    def cut_rank(mass_BV: jax.Array) -> jax.Array:
        def enough(kept_BV: jax.Array) -> jax.Array:
            return jnp.sum(kept_BV, axis=-1) >= settings.top_k

        return jnp.where((cuts_B & (settings.top_k > 0))[:, None], _keep(mass_BV, enough), mass_BV)

    def cut_share(mass_BV: jax.Array) -> jax.Array:
        wanted_B = settings.top_p * jnp.sum(mass_BV, axis=-1)

        def enough(kept_BV: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(kept_BV, mass_BV, 0.0), axis=-1) >= wanted_B

        return jnp.where((cuts_B & (settings.top_p < 1))[:, None], _keep(mass_BV, enough), mass_BV)

    def same(mass_BV: jax.Array) -> jax.Array:
        return mass_BV

    mass_BV = jax.lax.cond(jnp.any(cuts_B & (settings.top_k > 0)), cut_rank, same, mass_BV)
    mass_BV = jax.lax.cond(jnp.any(cuts_B & (settings.top_p < 1)), cut_share, same, mass_BV)
    least_B = jnp.where(cuts_B, settings.min_p, 0.0)
    return jnp.where(mass_BV >= least_B[:, None], mass_BV, 0.0)


def _keep(mass_BV: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns the mass above the highest threshold at which it is `enough(kept_BV)`.

    Bisects the bits of the threshold, highest first. A threshold of 0 keeps all and is taken
    unasked; one above 1, where nothing is enough, would not keep the likeliest token.
    """

    def set_bit(index: jax.Array, bits_B: jax.Array) -> jax.Array:
        tried_B = bits_B | (1 << (_MASS_BITS - 1 - index))
        threshold_B = jax.lax.bitcast_convert_type(tried_B, jnp.float32)
        return jnp.where(enough(mass_BV >= threshold_B[:, None]), tried_B, bits_B)

    none_B = jnp.zeros(mass_BV.shape[0], jnp.int32)
    bits_B = jax.lax.fori_loop(0, _MASS_BITS, set_bit, none_B)
    threshold_B = jnp.minimum(jax.lax.bitcast_convert_type(bits_B, jnp.float32), 1.0)
    return jnp.where(mass_BV >= threshold_B[:, None], mass_BV, 0.0)


def _inverse_cdf(uniform_B: jax.Array, mass_BV: jax.Array) -> jax.Array:
    """Returns the first entry at which the running sum of the mass exceeds uniform x total."""
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
    """Returns the first entry with a running sum above the threshold, else the last with mass.

    Only entries with mass, because XLA adds in a tree: a running sum may rise, or fall, by a
    rounding error where nothing was added.
    """
    has_mass_BP = mass_BP > 0
    above_BP = has_mass_BP & (sums_BP > threshold_B[:, None])
    last_B = sums_BP.shape[-1] - 1 - jnp.argmax(has_mass_BP[:, ::-1], axis=-1)
    return jnp.where(jnp.any(above_BP, axis=-1), jnp.argmax(above_BP, axis=-1), last_B)


def token_uniforms(key: jax.Array, seeds_B: jax.Array, positions_B: jax.Array) -> jax.Array:
    """Returns a token's random number, which only its episode's seed and its position decide."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, seed), position))

    return jax.vmap(one)(seeds_B, positions_B)
