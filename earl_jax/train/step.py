# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The training step: one jitted update under a mesh with all axes of sharding/axes.py."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax

from earl_jax.algorithms.algorithm import Algorithm, TokenFacts
from earl_jax.algorithms.losses import importance_weights, kl_estimate, likelihood_ratio
from earl_jax.models.attention.folding import fold, unfold
from earl_jax.models.attention.kernels import choose_kernel
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows_routed, head_weights
from earl_jax.models.logprobs import TokenScores, score_tokens
from earl_jax.models.moe.routing import Routing, balance_loss, load_of_experts
from earl_jax.models.parameters import (
    Params,
)
from earl_jax.sharding.layout import Layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.optimizer import make_optimizer
from earl_jax.train.state import (
    Critic,
    TrainState,
    optimized_specs,
    policy_parameters,
    state_shardings,
)
from earl_jax.trajectory import TrajectoryBatch

# What a state is scored for before it is updated: fields of a TrajectoryBatch.
Scored = Collection[str]
# Sums over tokens that are no metrics by themselves.
_DIVISOR, _RATIO, _RATIO_SQUARED = "divisor", "ratio", "ratio_squared"


def score_batch(
    model: ModelConfig,
    config: TrainConfig,
    layout: Layout,
    temperature: float,
    params: Params,
    batch: TrajectoryBatch,
) -> TokenScores:
    """Returns the log-prob of every token given those before it, and the entropy there; f32[N,T].

    Token t is scored from the hidden state at t - 1; the first of each segment gets zeros.
    """
    return _score_batch(model, config, layout, temperature, params, batch)[0]


def _score_batch(
    model: ModelConfig,
    config: TrainConfig,
    layout: Layout,
    temperature: float,
    params: Params,
    batch: TrajectoryBatch,
) -> tuple[TokenScores, Routing | None]:
    hidden_BTD, routing = forward_rows_routed(
        model,
        layout,
        params,
        batch.tokens,
        batch.segment_ids,
        remat=config.remat,
        kernel=choose_kernel(config.attention, layout, model, batch.tokens.shape[1]).kernel,
    )
    length = batch.tokens.shape[1]
    next_BT = jnp.pad(batch.tokens[:, 1:], ((0, 0), (0, 1)))
    scores = score_tokens(
        layout,
        hidden_BTD,
        head_weights(params).astype(hidden_BTD.dtype),
        fold(layout, next_BT),
        temperature=temperature,
        chunk_size=config.logprob_chunk,
        softcap=model.final_softcap,
    )
    whole = (unfold(layout, score, length) for score in scores)
    shifted = (jnp.pad(score[:, :-1], ((0, 0), (1, 0))) for score in whole)
    before_BT = jnp.pad(batch.segment_ids[:, :-1], ((0, 0), (1, 0)))
    begins_BT = (batch.segment_ids != before_BT) & (batch.segment_ids > 0)
    return TokenScores(*(jnp.where(begins_BT, 0.0, score) for score in shifted)), routing


def make_train_step(
    model: ModelConfig,
    config: TrainConfig,
    layout: Layout,
    *,
    vocab_size: int,
    temperature: float,
    algorithm: Algorithm,
    importance_cap: float = 0.0,
    critic: Critic | None = None,
) -> Any:
    """Returns the jitted `step(state, batch, controls) -> (state, metrics)`.

    `controls` is f32[2]: learning rate and entropy coefficient. Donates `state`; a frozen base goes
    through in the buffers that it came in. `metrics` are f32 scalars by name, of the policy's
    tokens; read them with `read_metrics`.

    Gradients of the micro-batches add up as sums and are divided once by all the policy's tokens,
    or by what the loss's `Aggregation` says. Routers are to be balanced within each micro-batch,
    which counts by its part of that divisor.

    An update whose loss, gradient or step is not finite is skipped: parameters and moments stay as
    they are. So they do for a batch without a token of the policy, which is not counted as skipped.

    `importance_cap` above 0 corrects for who sampled: the ratio is relative to the proximal policy,
    and the loss of each token is weighted with `importance_weights` of config.correction. With more
    than one update a batch, give the batch what `make_scorer` computes.
    """
    optimizer = make_optimizer(config, optimized_specs(model, config, vocab_size, critic))
    shardings = state_shardings(model, config, vocab_size, layout, critic)

    def loss_sums(trained: Any, base: Params, batch: TrajectoryBatch, bonus: jax.Array):
        params, critic_params = trained if critic else (trained, None)
        params = policy_parameters(config, params, base)
        scores, routing = _score_batch(model, config, layout, temperature, params, batch)
        facts = token_facts(
            scores,
            batch,
            with_proximal=importance_cap > 0 or "proximal" in algorithm.all_needs,
            values=critic.values(critic_params, batch) if critic else None,
        )
        losses, metrics, aggregation = algorithm.loss(facts, algorithm.settings)
        if importance_cap:
            correction = "truncated" if config.correction == "auto" else config.correction
            weight, cut = importance_weights(facts, correction, importance_cap)
            losses = losses * weight
            metrics = metrics | {"importance_mean": weight, "truncated_fraction": cut}
        mismatch = jnp.abs(facts.logprobs - facts.behaviour)
        losses -= bonus * facts.entropy
        ratio = likelihood_ratio(facts.logprobs, facts.behaviour)
        metrics = metrics | {
            "loss": losses if aggregation is None else losses * aggregation.weights,
            "entropy": facts.entropy,
            "kl": kl_estimate(facts.logprobs, facts.behaviour),
            "logprob_mismatch_mean": mismatch,
            "logprob_mismatch_max": mismatch,
            _RATIO: ratio,
            _RATIO_SQUARED: ratio**2,
            _DIVISOR: jnp.ones_like(losses) if aggregation is None else aggregation.shares,
        }
        sums = {name: _total(name, values, facts.mask) for name, values in metrics.items()}
        if routing is not None and config.balance_coefficient:
            weight = config.balance_coefficient * sums[_DIVISOR]
            sums["loss"] += weight * balance_loss(model, routing)
        return sums["loss"], (sums, routing)

    # Jitted so that it is traced once, for its shapes and for its use; in its place all the same.
    gradients = jax.jit(jax.grad(loss_sums, has_aux=True), inline=True)

    def step(state: TrainState, batch: TrajectoryBatch, controls: jax.Array):
        rate, bonus = controls[0], controls[1]
        grads, (sums, routing) = _accumulate(
            lambda part: gradients(state.trained, state.base, part, bonus),
            batch,
            config.micro_batches,
            layout,
        )
        count = jnp.sum(batch.turn_ids > 0)
        tokens = jnp.maximum(count, 1).astype(jnp.float32)
        divisor = jnp.where(count > 0, sums.pop(_DIVISOR), 1.0)
        grads = jax.tree.map(lambda grad: grad / divisor, grads)
        direction, moments = optimizer.update(grads, state.optimizer, state.trained)
        norms = jnp.stack([sums["loss"], optax.tree.norm(grads), rate * optax.tree.norm(direction)])
        is_finite = jnp.isfinite(norms).all()
        # Without a token the moments alone would move the parameters.
        is_taken = is_finite & (count > 0)
        trained, moments = jax.tree.map(
            lambda after, before: jnp.where(is_taken, after, before),
            (jax.tree.map(lambda p, d: p - rate * d, state.trained, direction), moments),
            (state.trained, state.optimizer),
        )
        params, critic_params = trained if critic else (trained, None)
        ratios, squares = sums.pop(_RATIO), sums.pop(_RATIO_SQUARED)
        metrics = {
            name: jnp.where(count > 0, value, 0.0) if _is_maximum(name) else value / tokens
            for name, value in sums.items()
        }
        metrics |= {
            "loss": sums["loss"] / divisor,
            # Kish's (sum w)^2 / sum w^2, as a fraction of the tokens.
            "effective_sample_size": ratios**2 / (tokens * jnp.maximum(squares, 1e-30)),
            "grad_norm": norms[1],
            "policy_tokens": tokens,
            "skipped_updates": 1.0 - is_finite,
        }
        state = dataclasses.replace(
            state,
            updates=state.updates + is_taken,
            params=params,
            critic=critic_params,
            optimizer=moments,
        )
        return state, metrics | _routing_metrics(model, routing)

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, layout.parameters("")))


def token_facts(
    scores: TokenScores,
    batch: TrajectoryBatch,
    *,
    with_proximal: bool = False,
    values: jax.Array | None = None,
) -> TokenFacts:
    """Returns the facts of a batch, zeros wherever the policy did not sample a token that counts.

    Without `batch.proximal` the update is the batch's first, and the proximal policy this one.
    """
    mask = batch.turn_ids > 0

    def masked(field: jax.Array) -> jax.Array:
        return jnp.where(mask, field, 0.0)

    proximal = None
    if with_proximal:
        current = jax.lax.stop_gradient(scores.logprobs)
        proximal = masked(current if batch.proximal is None else batch.proximal)
    return TokenFacts(
        mask=mask,
        sequences=batch.segment_ids,
        logprobs=masked(scores.logprobs),
        entropy=masked(scores.entropy),
        behaviour=masked(batch.logprobs),
        advantages=masked(batch.advantages),
        proximal=proximal,
        reference=jax.tree.map(masked, batch.reference),
        values=jax.tree.map(masked, values),
    )


def _is_maximum(name: str) -> bool:
    return name.endswith("_max")


def _total(name: str, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the sum or the maximum of a metric over the tokens of the mask; -inf of no tokens."""
    values = values.astype(jnp.float32)
    if _is_maximum(name):
        return jnp.max(jnp.where(mask, values, -jnp.inf))
    return jnp.sum(jnp.where(mask, values, 0.0))


def _combined(total: dict[str, jax.Array], part: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {
        name: (jnp.maximum if _is_maximum(name) else jnp.add)(total[name], part[name])
        for name in total
    }


def _routing_metrics(model: ModelConfig, routing: Routing | None) -> dict[str, jax.Array]:
    """Returns the metrics of a mixture of experts, none for a dense model."""
    if routing is None:
        return {}
    load = load_of_experts(routing)
    return {
        "balance_loss": balance_loss(model, routing),
        "expert_load_max": load.busiest,
        "expert_load_entropy": load.entropy,
    }


def _accumulate(
    gradients: Callable[[TrajectoryBatch], tuple[Any, tuple[dict[str, Any], Routing | None]]],
    batch: TrajectoryBatch,
    micro_batches: int,
    layout: Layout,
) -> tuple[Any, tuple[dict[str, Any], Routing | None]]:
    """Returns the sums of `gradients` over micro-batches, each with rows of every shard."""
    if micro_batches == 1:
        return gradients(batch)

    def add(total: Any, part: TrajectoryBatch) -> tuple[Any, None]:
        grads, (sums, routing) = total
        more_grads, (more_sums, more_routing) = gradients(part)
        grads, routing = jax.tree.map(jnp.add, (grads, routing), (more_grads, more_routing))
        return (grads, (_combined(sums, more_sums), routing)), None

    parts = _split(batch, micro_batches, layout)
    shapes = jax.eval_shape(gradients, jax.tree.map(lambda field: field[0], parts))
    zeros, (sums, routing) = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    sums = {name: zero - jnp.inf if _is_maximum(name) else zero for name, zero in sums.items()}
    total, _ = jax.lax.scan(add, (zeros, (sums, routing)), parts)
    return total


def _split(batch: TrajectoryBatch, micro_batches: int, layout: Layout) -> TrajectoryBatch:
    """Returns micro-batches along a first axis, each with rows of every shard."""

    def split(field_BT: jax.Array) -> jax.Array:
        rows, length = field_BT.shape
        parts = field_BT.reshape(rows // micro_batches, micro_batches, length).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(parts, layout.activations(".NS"))

    return jax.tree.map(split, batch)


def make_scorer(
    model: ModelConfig,
    config: TrainConfig,
    layout: Layout,
    *,
    temperature: float,
    scored: Scored = ("proximal",),
) -> Any:
    """Returns the jitted `score(state, batch) -> batch` with the log-probs that `scored` names.

    "proximal": under the state's policy; "reference": under the frozen base of its adapters. In as
    many parts as an update has micro-batches. Donates nothing.
    """

    def score(state: TrainState, batch: TrajectoryBatch) -> TrajectoryBatch:
        parts = _split(batch, config.micro_batches, layout)

        def logprobs(trained: Params) -> jax.Array:
            params = policy_parameters(config, trained, state.base)
            of_parts = jax.lax.map(
                lambda part: score_batch(model, config, layout, temperature, params, part).logprobs,
                parts,
            )
            return layout.constrain(of_parts.swapaxes(0, 1).reshape(batch.tokens.shape), "NS")

        found = {}
        if "proximal" in scored:
            found["proximal"] = logprobs(state.params)
        if "reference" in scored:
            found["reference"] = logprobs(jax.tree.map(jnp.zeros_like, state.params))
        return dataclasses.replace(batch, **found)

    return jax.jit(score)


def read_metrics(metrics: dict[str, jax.Array]) -> dict[str, float]:
    """Reads an update's metrics to the host; its only read."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def batch_shapes(rows: int, length: int, layout: Layout, *, scored: Scored = ()) -> TrajectoryBatch:
    """Returns a TrajectoryBatch as placed shapes, with the fields that `scored` names."""

    def shape(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=layout.activations("NS"))

    return TrajectoryBatch(
        tokens=shape(jnp.int32),
        segment_ids=shape(jnp.int32),
        turn_ids=shape(jnp.int32),
        logprobs=shape(jnp.float32),
        versions=shape(jnp.int32),
        advantages=shape(jnp.float32),
        **{name: shape(jnp.float32) for name in scored},
    )
