# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The critic: a decoder of the policy's shape with a scalar head in place of the vocabulary's.

It begins with the model's weights and a head of zeros, so that its first values are 0.
"""

from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.models.attention.folding import unfold
from earl_jax.models.attention.kernels import choose_kernel
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows
from earl_jax.models.parameters import ParameterSpec, Params, parameter_specs
from earl_jax.sharding.layout import Layout
from earl_jax.train.config import TrainConfig
from earl_jax.trajectory import TrajectoryBatch

_HEAD = "value_head"


def critic_specs(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Returns the tree of parameter specs."""
    specs = parameter_specs(model, vocab_size)
    head = ParameterSpec(shape=(model.width,), axes="D", deviation=0.0, constant=0.0)
    return {name: spec for name, spec in specs.items() if name != "head"} | {_HEAD: head}


def first_critic(policy: Params) -> Params:
    """Returns the critic that begins as this policy, in fp32, in buffers of its own."""
    trunk = {name: tree for name, tree in policy.items() if name != "head"}
    trunk = jax.tree.map(lambda leaf: jnp.copy(leaf.astype(jnp.float32)), trunk)
    return trunk | {_HEAD: jnp.zeros_like(trunk["final_norm"])}


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
    head_D = params[_HEAD].astype(hidden_BTD.dtype)
    values_BT = jnp.einsum("BTD,D->BT", hidden_BTD, head_D, preferred_element_type=jnp.float32)
    return after_token_before(unfold(layout, values_BT, length), batch.segment_ids)


def after_token_before(values_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Moves what was computed at each token to the next one of its segment; the first gets 0."""
    before_BT = jnp.pad(segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
    begins_BT = (segment_ids_BT != before_BT) & (segment_ids_BT > 0)
    return jnp.where(begins_BT, 0.0, jnp.pad(values_BT[:, :-1], ((0, 0), (1, 0))))
