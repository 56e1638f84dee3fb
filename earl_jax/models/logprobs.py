# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy in one chunked pass: a whole row's logits never exist at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.models.attention import cap
from earl_jax.sharding.layout import Layout


class TokenScores(NamedTuple):
    """f32[B, T] each: log-prob of the target token, entropy of the distribution that it is from."""

    logprobs: jax.Array
    entropy: jax.Array


def score_logits(logits_BV: jax.Array, targets_B: jax.Array, temperature: float) -> TokenScores:
    """Log-prob of each target and entropy at this sampling temperature, fp32. Any leading axes."""
    scaled_BV = logits_BV.astype(jnp.float32) / temperature
    log_total_B = jax.nn.logsumexp(scaled_BV, axis=-1)
    # Compare-and-sum instead of a gather: it needs no gather of a vocabulary that is split.
    hit_BV = targets_B[..., None] == jax.lax.broadcasted_iota(
        jnp.int32, logits_BV.shape, logits_BV.ndim - 1
    )
    target_B = jnp.sum(jnp.where(hit_BV, scaled_BV, 0.0), axis=-1)
    # From the normalised log-probs: log_total - sum(p x) cancels, and is off by 5e-5 where logits
    # spread by 8.
    logprobs_BV = scaled_BV - log_total_B[..., None]
    entropy_B = -jnp.sum(jnp.exp(logprobs_BV) * logprobs_BV, axis=-1)
    return TokenScores(target_B - log_total_B, entropy_B)


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
    in a log-prob), and recomputed in the backward pass: memory is B x chunk x V for any T.
    `softcap` is the model's `final_softcap`.
    """
    rows, length, _ = hidden_BTD.shape
    if length <= chunk_size:
        chunk_size = length
    pad = -length % chunk_size
    hidden_BTD = jnp.pad(hidden_BTD, ((0, 0), (0, pad), (0, 0)))
    targets_BT = jnp.pad(targets_BT, ((0, 0), (0, pad)))
    num_chunks = (length + pad) // chunk_size

    @jax.checkpoint
    def score_chunk(chunk: tuple[jax.Array, jax.Array]) -> TokenScores:
        hidden_BCD, targets_BC = chunk
        logits_BCV = jnp.einsum(
            "BCD,DV->BCV", hidden_BCD, head_DV, preferred_element_type=jnp.float32
        )
        logits_BCV = cap(layout.constrain(logits_BCV, "BCV"), softcap)
        return score_logits(logits_BCV, targets_BC, temperature)

    if num_chunks == 1:
        return score_chunk((hidden_BTD, targets_BT))
    # Chunks along T, so that rows stay where they are.
    hidden = hidden_BTD.reshape(rows, num_chunks, chunk_size, -1).swapaxes(0, 1)
    targets = targets_BT.reshape(rows, num_chunks, chunk_size).swapaxes(0, 1)
    scores = jax.lax.map(score_chunk, (hidden, targets))
    return TokenScores(*(s.swapaxes(0, 1).reshape(rows, length + pad)[:, :length] for s in scores))
