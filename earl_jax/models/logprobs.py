# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy in one chunked pass: a whole row's logits never exist at once."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.models.attention.rows import cap
from earl_jax.sharding.layout import Layout


class TokenScores(NamedTuple):
    """f32[B, T] each: log-prob of the target token, entropy of the distribution that it is from."""

    logprobs: jax.Array
    entropy: jax.Array


def score_logits(logits_BV: jax.Array, targets_B: jax.Array, temperature: float) -> TokenScores:
    """Returns each target's log-prob and the entropy at this temperature, in fp32; any axes."""
    scaled_BV = logits_BV.astype(jnp.float32) / temperature
    log_total_B = jax.nn.logsumexp(scaled_BV, axis=-1)
    # Compare-and-sum instead of a gather: it needs no gather of a vocabulary that is split. JAX
    # takes what is the same in all chunks out of the scan over them, and each reads it again: with
    # numbers of the vocabulary alone, and without zeros to select, nothing is as large as logits.
    last = logits_BV.ndim - 1
    numbers_V = jax.lax.broadcasted_iota(jnp.int32, (1,) * last + logits_BV.shape[last:], last)
    hit_BV = targets_B[..., None] == numbers_V
    target_B = jnp.sum(scaled_BV * hit_BV, axis=-1)
    # From the normalised log-probs: log_total - sum(p x) cancels, and is off by 5e-5 where logits
    # spread by 8.
    logprobs_BV = scaled_BV - log_total_B[..., None]
    entropy_B = -jnp.sum(jnp.exp(logprobs_BV) * logprobs_BV, axis=-1)
    return TokenScores(target_B - log_total_B, entropy_B)


@jax.custom_vjp
def _logits(hidden_BCD: jax.Array, head_DV: jax.Array) -> jax.Array:
    """Computes logits_BCV, in fp32 of numbers of any type.

    Their gradient is rounded to that type before it is multiplied. JAX's own would turn hidden
    states and head into fp32, and multiply these, at half of the speed of bf16 or less.
    """
    return _product("BCD,DV->BCV", hidden_BCD, head_DV)


def _keep_both(hidden_BCD: jax.Array, head_DV: jax.Array) -> tuple[jax.Array, Any]:
    return _logits(hidden_BCD, head_DV), (hidden_BCD, head_DV)


def _multiply_back(kept: Any, gradient_BCV: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden_BCD, head_DV = kept
    gradient_BCV = gradient_BCV.astype(hidden_BCD.dtype)
    of_hidden_BCD = _product("BCV,DV->BCD", gradient_BCV, head_DV)
    of_head_DV = _product("BCD,BCV->DV", hidden_BCD, gradient_BCV)
    return of_hidden_BCD.astype(hidden_BCD.dtype), of_head_DV.astype(head_DV.dtype)


_logits.defvjp(_keep_both, _multiply_back)


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def score_tokens(
    layout: Layout,
    hidden_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    *,
    temperature: float,
    chunk_size: int,
    softcap: float = 0.0,
) -> TokenScores:
    """Scores `targets_BT` from hidden states, `chunk_size` tokens of every row at a time.

    Logits are accumulated in fp32 whatever the compute type (rounding them to bf16 costs up to 8e-2
    in a log-prob), and recomputed in the backward pass: memory is B x chunk x V for any T. Shards
    of the `context` axis have a chunk of their own each. `softcap` is the model's `final_softcap`.
    """
    rows, length, _ = hidden_BTD.shape
    shards = layout.shape.context
    own = length // shards
    chunk_size = min(chunk_size, own)
    num_chunks = -(-own // chunk_size)

    def split(array: jax.Array) -> jax.Array:
        """Returns chunks along a new first axis, each with tokens of every row and every shard."""
        array = array.reshape(rows, shards, own, *array.shape[2:])
        more = ((0, 0), (0, 0), (0, num_chunks * chunk_size - own))
        array = jnp.pad(array, more + ((0, 0),) * (array.ndim - 3))
        array = array.reshape(rows, shards, num_chunks, chunk_size, *array.shape[3:])
        return jnp.moveaxis(array, 2, 0).reshape(num_chunks, rows, -1, *array.shape[4:])

    def join(chunks: jax.Array) -> jax.Array:
        array = chunks.reshape(num_chunks, rows, shards, chunk_size)
        array = jnp.moveaxis(array, 0, 2).reshape(rows, shards, -1)
        return array[:, :, :own].reshape(rows, length)

    @jax.checkpoint
    def score_chunk(chunk: tuple[jax.Array, jax.Array]) -> TokenScores:
        hidden_BCD, targets_BC = chunk
        logits_BCV = _logits(hidden_BCD, head_DV)
        logits_BCV = cap(layout.constrain(logits_BCV, "BCV"), softcap)
        return score_logits(logits_BCV, targets_BC, temperature)

    if num_chunks == 1:
        return score_chunk((hidden_BTD, targets_BT))
    # Chunks along T, so that rows stay where they are.
    scores = jax.lax.map(score_chunk, (split(hidden_BTD), split(targets_BT)))
    return TokenScores(*(join(score) for score in scores))
