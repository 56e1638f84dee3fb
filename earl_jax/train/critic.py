# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Values of the critic: a decoder of the policy's shape with a scalar head for the vocabulary's.

Its parameters are made in state.py (`critic_specs`, `first_critic`).
"""

import jax
import jax.numpy as jnp

from earl_jax.models.attention.folding import unfold
from earl_jax.models.attention.kernels import choose_kernel
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows
from earl_jax.models.parameters import Params
from earl_jax.sharding.layout import Layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.state import VALUE_HEAD
from earl_jax.trajectory import TrajectoryBatch


def critic_values(
    model: ModelConfig, config: TrainConfig, layout: Layout, params: Params, batch: TrajectoryBatch
) -> jax.Array:
    """Returns the value of the state that each token was chosen in, f32[N,T].

    Token t has the value of the tokens before it, from the hidden state at t - 1; the first of each
    segment has 0.
    """
    length = batch.tokens.shape[1]
    hidden_BTD = forward_rows(
        model,
        layout,
        params,
        batch.tokens,
        batch.segment_ids,
        remat=config.remat,
        kernel=choose_kernel(config.attention, layout, model, length).kernel,
    )
    head_D = params[VALUE_HEAD].astype(hidden_BTD.dtype)
    values_BT = jnp.einsum("BTD,D->BT", hidden_BTD, head_D, preferred_element_type=jnp.float32)
    return after_token_before(unfold(layout, values_BT, length), batch.segment_ids)


def after_token_before(values_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Moves what was computed at each token to the next one of its segment; the first gets 0."""
    before_BT = jnp.pad(segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
    begins_BT = (segment_ids_BT != before_BT) & (segment_ids_BT > 0)
    return jnp.where(begins_BT, 0.0, jnp.pad(values_BT[:, :-1], ((0, 0), (1, 0))))
