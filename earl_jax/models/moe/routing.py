# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Routers: the experts that they choose, how these spread, and the loss that evens it out."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from earl_jax.models.config import ModelConfig
from earl_jax.sharding.axes import MESH_AXES
from earl_jax.sharding.layout import Layout


def router_probabilities(
    config: ModelConfig, x_TD: jax.Array, router_DX: jax.Array, bias_X: jax.Array | None = None
) -> jax.Array:
    """Returns each expert's probability, f32[..., X] for any compute type; D is the last axis.

    A softmax over experts, or each a sigmoid.
    """
    logits_TX = jnp.einsum("...D,DX->...X", x_TD, router_DX, preferred_element_type=jnp.float32)
    if bias_X is not None:
        bias_X = bias_X.astype(jnp.float32)
        logits_TX += jnp.expand_dims(bias_X, range(logits_TX.ndim - 1))
    if config.router_scores == "sigmoid":
        return jax.nn.sigmoid(logits_TX)
    return jax.nn.softmax(logits_TX, axis=-1)


def choose_experts(
    config: ModelConfig, probability_TX: jax.Array, correction_X: jax.Array | None = None
) -> jax.Array:
    """Returns the experts of each token i32[..., U], the best first.

    With `expert_groups` they are in a token's best groups (arXiv 2405.04434, section 2.2.2). A
    correction, of the model's own, is added before both choices (arXiv 2412.19437, section 2.1.2).
    """
    score_TX = jax.lax.stop_gradient(probability_TX)
    if correction_X is not None:
        score_TX += jnp.expand_dims(jax.lax.stop_gradient(correction_X), range(score_TX.ndim - 1))
    groups = config.expert_groups
    if groups > 1:
        # Groups along the axis before the last.
        grouped = score_TX.reshape(*score_TX.shape[:-1], groups, -1)
        best = jnp.sum(jax.lax.top_k(grouped, config.group_score)[0], axis=-1)
        _, chosen = jax.lax.top_k(best, config.groups_per_token)
        is_chosen = jnp.any(jax.nn.one_hot(chosen, groups, dtype=bool), axis=-2)
        score_TX = jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(score_TX.shape)
    return jax.lax.top_k(score_TX, config.experts_per_token)[1]


class Routing(NamedTuple):
    """Statistics of routers, f32[..., X] each: the axes before X are rows, layers, or both.

    `chosen` counts the tokens that were sent to each expert, `probability` adds up what the router
    gave each. Sums over tokens, so that rows and micro-batches add up.

    Example: two tokens, one expert each of two, probabilities (3/4, 1/4) and (5/8, 3/8): chosen
    (2, 0), probability (11/8, 5/8).
    """

    chosen: jax.Array
    probability: jax.Array


def routing_of_rows(
    config: ModelConfig,
    layout: Layout,
    x_BTD: jax.Array,
    layer: Any,
    real_BT: jax.Array,
) -> Routing:
    """`count_routing` of a layer's router on the trainer's layout; nothing is added up over rows.

    The first axis has rows, of each shard of the `context` axis for itself.

    The router is asked once more than for the mixture, where each device has the tokens of others
    too: beside the experts' arithmetic that is little.
    """
    # By hand, because XLA need not know that a top_k can be cut over rows and their parts, of which
    # each has sums of its own.
    count = jax.shard_map(
        functools.partial(count_routing, config),
        mesh=layout.mesh,
        in_specs=(layout.activation_spec("BT."), P(), layout.activation_spec("BT"), P(), P()),
        out_specs=P((*layout.row_axes, "context")),
        axis_names=set(MESH_AXES),
        check_vma=False,
    )
    others = layer.get("router_bias"), layer.get("router_correction")
    return count(x_BTD, layer["router"], real_BT, *others)


def count_routing(
    config: ModelConfig,
    x_BTD: jax.Array,
    router_DX: jax.Array,
    real_BT: jax.Array,
    bias_X: jax.Array | None = None,
    correction_X: jax.Array | None = None,
) -> Routing:
    """Returns the statistics of a router over the `real` tokens of each row, f32[B, X] each.

    Sigmoids are scaled to a sum of 1 over experts (arXiv 2412.19437, eq. 18).
    """
    probability_BTX = router_probabilities(config, x_BTD, router_DX, bias_X)
    experts_BTU = choose_experts(config, probability_BTX, correction_X)
    if config.router_scores == "sigmoid":
        total_BT = jnp.sum(probability_BTX, axis=-1, keepdims=True)
        probability_BTX = probability_BTX / (total_BT + 1e-20)
    hit_BTUX = jax.nn.one_hot(experts_BTU, config.num_experts, dtype=bool)
    hit_BTUX &= real_BT[:, :, None, None]
    return Routing(
        chosen=jnp.sum(hit_BTUX, axis=(1, 2), dtype=jnp.float32),
        probability=jnp.sum(jnp.where(real_BT[..., None], probability_BTX, 0.0), axis=1),
    )


def balance_loss(config: ModelConfig, routing: Routing) -> jax.Array:
    """Returns the load-balancing loss of Switch Transformers (arXiv 2101.03961, eq. 4).

    X * sum_x f_x P_x: f is the share of the tokens that an expert was sent, and has no gradient; P
    is its mean probability. A token has `experts_per_token` experts, so that the shares add up to
    as many, which is also the loss of even routers. `transformers` scales it so, but takes f and P
    of all layers together, where one layer's crowded expert hides behind the next one's idle one.

    `routing` is f32[L, X]; the loss is a mean over layers. Without tokens, 0.
    """
    tokens_L = jnp.sum(routing.chosen, axis=-1) / config.experts_per_token
    products_L = jnp.sum(routing.chosen * routing.probability, axis=-1)
    return jnp.mean(config.num_experts * products_L / jnp.maximum(tokens_L, 1.0) ** 2)


class LoadOfExperts(NamedTuple):
    """Scalars, each of the layer in which it is worst.

    `busiest` is the load of the busiest expert over the mean load: 1 where all are alike, at most
    num_experts / experts_per_token. `entropy` is that of the experts' shares, in nats: at most the
    logarithm of num_experts.
    """

    busiest: jax.Array
    entropy: jax.Array


def load_of_experts(routing: Routing) -> LoadOfExperts:
    """Returns how even the loads of experts are. `routing` is f32[L, X]."""
    total_L = jnp.maximum(jnp.sum(routing.chosen, axis=-1, keepdims=True), 1.0)
    share_LX = routing.chosen / total_L
    logs_LX = jnp.log(jnp.where(share_LX > 0, share_LX, 1.0))
    return LoadOfExperts(
        busiest=jnp.max(share_LX) * share_LX.shape[-1],
        entropy=jnp.min(-jnp.sum(share_LX * logs_LX, axis=-1)),
    )
