# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The trainer's forward pass over whole rows: logits, and scores of each next token."""

from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.models.attention.rows import cap
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows, head_weights
from earl_jax.models.logprobs import TokenScores, score_logits, score_tokens
from earl_jax.sharding.layout import Layout, MeshShape, make_layout


def row_logits(
    model: ModelConfig, params: Any, tokens_BT: Any, segments_BT: Any = None, layout: Any = None
) -> jax.Array:
    """f32[B, T, V], on one device unless there is a layout; rows are one segment unless given."""
    layout = layout or make_layout(MeshShape(), jax.devices()[:1])
    segments_BT = jnp.ones_like(tokens_BT) if segments_BT is None else segments_BT
    hidden_BTD = forward_rows(model, layout, params, tokens_BT, segments_BT)
    logits_BTV = jnp.einsum("BTD,DV->BTV", hidden_BTD, head_weights(params))
    return cap(logits_BTV, model.final_softcap)


def next_logprobs(logits_BTV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """The log-prob of each token but the first, behind those before it."""
    return jax.vmap(lambda logits, ids: score_logits(logits, ids, 1.0).logprobs)(
        logits_BTV[:, :-1], tokens_BT[:, 1:]
    )


def next_scores(
    layout: Layout, params: Any, hidden_BTD: jax.Array, tokens_BT: Any, **settings: float
) -> TokenScores:
    """The scores of each token but the first, as the trainer computes them in chunks."""
    head, targets = head_weights(params), tokens_BT[:, 1:]
    given = {"temperature": 1.0, "chunk_size": 64, **settings}
    return score_tokens(layout, hidden_BTD[:, :-1], head, targets, **given)
