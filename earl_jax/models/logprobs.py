# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy in one chunked pass: a whole row's logits never exist at once.

A token that was chosen among certain ones is scored among these: the logits of the others count as
-infinity, so that a policy that may only choose certain moves is updated by the gradient of what it
was sampled from (Huang and Ontanon, arXiv 2006.14171).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.models.attention.rows import cap
from earl_jax.sharding.layout import Layout

# The tokens that each target was chosen among: arrays of 1 + id, 0 for no further one, all 0 for
# any token. None of them: any token everywhere.
Allowed = tuple[jax.Array, ...]
# A scaled logit that has no probability, and whose product with 0 is 0.
_NEVER = -1e30


class TokenScores(NamedTuple):
    """f32[B, T] each: log-prob of the target token, entropy of the distribution that it is from."""

    logprobs: jax.Array
    entropy: jax.Array


def score_logits(
    logits_BV: jax.Array, targets_B: jax.Array, temperature: float, allowed: Allowed = ()
) -> TokenScores:
    """Returns each target's log-prob and the entropy at this temperature, in fp32; any axes."""
    return _score(logits_BV, targets_B, temperature, allowed)[0]


def _score(
    logits_BV: jax.Array, targets_B: jax.Array, temperature: float, allowed: Allowed
) -> tuple[TokenScores, jax.Array]:
    """Returns the scores, and the logarithm of the sum of all exponentials; logits are read twice.

    With the largest logit taken off, the sum that entropy is computed of is at most ln V: with all
    of them as they are it is off by 5e-5 where logits spread by 8.
    """
    scaled_BV = _among(logits_BV.astype(jnp.float32) / temperature, allowed)
    most_B = jnp.max(scaled_BV, axis=-1)
    shifted_BV = scaled_BV - most_B[..., None]
    powers_BV = jnp.exp(shifted_BV)
    total_B = jnp.sum(powers_BV, axis=-1)
    mean_B = jnp.sum(powers_BV * shifted_BV, axis=-1) / total_B
    # Compare-and-sum instead of a gather: it needs no gather of a vocabulary that is split.
    target_B = jnp.sum(shifted_BV * _hits(logits_BV, targets_B), axis=-1)
    log_total_B = jnp.log(total_B)
    scores = TokenScores(target_B - log_total_B, log_total_B - mean_B)
    return scores, log_total_B + most_B


def _hits(logits_BV: jax.Array, targets_B: jax.Array) -> jax.Array:
    """Returns bool[B, V], True at the target.

    JAX takes what is the same in all chunks out of the scan over them, and each reads it again:
    with numbers of the vocabulary alone nothing is as large as logits.
    """
    last = logits_BV.ndim - 1
    numbers_V = jax.lax.broadcasted_iota(jnp.int32, (1,) * last + logits_BV.shape[last:], last)
    return targets_B[..., None] == numbers_V


def _among(scaled_BV: jax.Array, allowed: Allowed) -> jax.Array:
    """Returns scaled logits, _NEVER where a token is not allowed."""
    if not allowed:
        return scaled_BV
    # The first is 0 where all are.
    may_BV = functools.reduce(
        jnp.logical_or,
        (_hits(scaled_BV, ids_B - 1) for ids_B in allowed),
        (allowed[0] == 0)[..., None],
    )
    return jnp.where(may_BV, scaled_BV, _NEVER)


class _Settings(NamedTuple):
    layout: Layout
    temperature: float
    softcap: float


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score_chunk(
    settings: _Settings,
    hidden_BCD: jax.Array,
    head_DV: jax.Array,
    targets_BC: jax.Array,
    allowed: Allowed,
) -> TokenScores:
    """Scores targets from hidden states, by logits in fp32 of numbers of any type.

    Backward logits are computed again. Their gradient follows from the scores without a further
    sum, by one pass over them, and is rounded to the type of the hidden states before it is
    multiplied: JAX's own would turn hidden states and head into fp32, and multiply these, at half
    of the speed of bf16 or less.
    """
    return _score_forward(settings, hidden_BCD, head_DV, targets_BC, allowed)[0]


def _score_forward(
    settings: _Settings, hidden_BCD, head_DV, targets_BC, allowed: Allowed
) -> tuple[TokenScores, Any]:
    logits_BCV = _capped_logits(settings, hidden_BCD, head_DV)
    scores, log_total_BC = _score(logits_BCV, targets_BC, settings.temperature, allowed)
    return scores, (hidden_BCD, head_DV, targets_BC, allowed, log_total_BC, scores.entropy)


def _score_backward(settings: _Settings, kept: Any, gradients: TokenScores):
    """Returns the gradients of hidden states and head.

    With p the probabilities, H the entropy and x the scaled logits: d log p_t / dx_v = 1{v = t} -
    p_v, and dH / dx_v = -p_v (log p_v + H).
    """
    hidden_BCD, head_DV, targets_BC, allowed, log_total_BC, entropy_BC = kept
    logits_BCV = _capped_logits(settings, hidden_BCD, head_DV)
    of_logprob, of_entropy = (gradient[..., None] for gradient in gradients)
    scaled_BCV = _among(logits_BCV / settings.temperature, allowed)
    logprobs_BCV = scaled_BCV - log_total_BC[..., None]
    probs_BCV = jnp.exp(logprobs_BCV)
    gradient_BCV = of_logprob * (_hits(logits_BCV, targets_BC) - probs_BCV)
    gradient_BCV -= of_entropy * probs_BCV * (logprobs_BCV + entropy_BC[..., None])
    gradient_BCV /= settings.temperature
    if settings.softcap:
        gradient_BCV *= 1 - (logits_BCV / settings.softcap) ** 2
    gradient_BCV = gradient_BCV.astype(hidden_BCD.dtype)
    of_hidden_BCD = _product("BCV,DV->BCD", gradient_BCV, head_DV)
    of_head_DV = _product("BCD,BCV->DV", hidden_BCD, gradient_BCV)
    return of_hidden_BCD.astype(hidden_BCD.dtype), of_head_DV.astype(head_DV.dtype), None, None


_score_chunk.defvjp(_score_forward, _score_backward)


def _capped_logits(settings: _Settings, hidden_BCD: jax.Array, head_DV: jax.Array) -> jax.Array:
    logits_BCV = _product("BCD,DV->BCV", hidden_BCD, head_DV)
    return cap(settings.layout.constrain(logits_BCV, "BCV"), settings.softcap)


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
    allowed_BT: Allowed = (),
) -> TokenScores:
    """Scores `targets_BT` from hidden states, `chunk_size` tokens of every row at a time.

    Logits are accumulated in fp32 whatever the compute type (rounding them to bf16 costs up to 8e-2
    in a log-prob), and recomputed in the backward pass: memory is B x chunk x V for any T. Shards
    of the `context` axis have a chunk of their own each. `softcap` is the model's `final_softcap`.
    `allowed_BT` are the tokens that each target was chosen among.
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

    settings = _Settings(layout, temperature, softcap)

    def score_chunk(chunk: tuple[jax.Array, jax.Array, Allowed]) -> TokenScores:
        hidden_BCD, targets_BC, allowed = chunk
        return _score_chunk(settings, hidden_BCD, head_DV, targets_BC, allowed)

    whole = hidden_BTD, targets_BT, allowed_BT
    if num_chunks == 1:
        return score_chunk(whole)
    # Chunks along T, so that rows stay where they are.
    scores = jax.lax.map(score_chunk, jax.tree.map(split, whole))
    return TokenScores(*(join(score) for score in scores))
