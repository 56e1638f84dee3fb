# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The scoring of a batch: forward passes of the policy, the reference and the critic.

And the advantages of tokens that are made of them, on the devices.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.algorithms.algorithm import Algorithm, RewardFacts
from earl_jax.models.attention.folding import fold, unfold
from earl_jax.models.attention.kernels import choose_kernel
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows_routed, head_weights
from earl_jax.models.logprobs import TokenScores, score_tokens
from earl_jax.models.moe.routing import Routing
from earl_jax.models.parameters import Params
from earl_jax.sharding.layout import Layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.state import VALUE_HEAD, TrainState, policy_parameters
from earl_jax.trajectory import TrajectoryBatch

# Fields of a TrajectoryBatch that are computed before its first update.
Scored = Collection[str]


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
    return score_routed(model, config, layout, temperature, params, batch)[0]


def score_routed(
    model: ModelConfig,
    config: TrainConfig,
    layout: Layout,
    temperature: float,
    params: Params,
    batch: TrajectoryBatch,
) -> tuple[TokenScores, Routing | None]:
    """Returns `score_batch`, and the routers' statistics; None for a dense model."""
    hidden_BTD, routing = _hidden_states(model, config, layout, params, batch)
    length = batch.tokens.shape[1]
    next_BT, allowed_BT = jax.tree.map(
        lambda ids_BT: fold(layout, jnp.pad(ids_BT[:, 1:], ((0, 0), (0, 1)))),
        (batch.tokens, batch.allowed),
    )
    scores = score_tokens(
        layout,
        hidden_BTD,
        head_weights(params).astype(hidden_BTD.dtype),
        next_BT,
        allowed_BT=allowed_BT,
        temperature=temperature,
        chunk_size=config.logprob_chunk,
        softcap=model.final_softcap,
    )
    whole = (unfold(layout, score, length) for score in scores)
    return TokenScores(*(after_token_before(score, batch.segment_ids) for score in whole)), routing


def critic_values(
    model: ModelConfig, config: TrainConfig, layout: Layout, params: Params, batch: TrajectoryBatch
) -> jax.Array:
    """Returns the value of the state that each token was chosen in, f32[N,T].

    The critic is a decoder of the policy's shape with a scalar head for the vocabulary's (its
    parameters are made in state.py). Token t has the value of the tokens before it, from the hidden
    state at t - 1; the first of each segment has 0.
    """
    hidden_BTD, _ = _hidden_states(model, config, layout, params, batch)
    head_D = params[VALUE_HEAD].astype(hidden_BTD.dtype)
    values_BT = jnp.einsum("BTD,D->BT", hidden_BTD, head_D, preferred_element_type=jnp.float32)
    return after_token_before(unfold(layout, values_BT, batch.tokens.shape[1]), batch.segment_ids)


def _hidden_states(
    model: ModelConfig, config: TrainConfig, layout: Layout, params: Params, batch: TrajectoryBatch
) -> tuple[jax.Array, Routing | None]:
    """Returns the hidden states of a batch, and the routers' statistics (decoder.py)."""
    return forward_rows_routed(
        model,
        layout,
        params,
        batch.tokens,
        batch.segment_ids,
        remat=config.remat,
        kernel=choose_kernel(config.attention, layout, model, batch.tokens.shape[1]).kernel,
    )


def after_token_before(values_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Moves what was computed at each token to the next one of its segment; the first gets 0."""
    before_BT = jnp.pad(segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
    begins_BT = (segment_ids_BT != before_BT) & (segment_ids_BT > 0)
    return jnp.where(begins_BT, 0.0, jnp.pad(values_BT[:, :-1], ((0, 0), (1, 0))))


def make_scorer(
    model: ModelConfig,
    config: TrainConfig,
    layout: Layout,
    *,
    temperature: float,
    scored: Scored = ("proximal",),
    teacher: ModelConfig | None = None,
) -> Any:
    """Returns the jitted `score(state, batch) -> batch` with the fields that passes give.

    Of the fields that `scored` names, "proximal" are log-probs under the state's policy,
    "reference" those under the frozen reference, or the base of its adapters, and "values" those of
    the state's critic. In as many parts as an update has micro-batches. Donates nothing. The
    reference is a `teacher` of this model, if it is not None.
    """

    def score(state: TrainState, batch: TrajectoryBatch) -> TrajectoryBatch:
        parts = split_rows(batch, config.micro_batches, layout)

        def in_parts(one: Callable[[TrajectoryBatch], jax.Array]) -> jax.Array:
            found = jax.lax.map(one, parts)
            return layout.constrain(found.swapaxes(0, 1).reshape(batch.tokens.shape), "NS")

        def logprobs(params: Params, model: ModelConfig = model) -> jax.Array:
            return in_parts(
                lambda part: score_batch(model, config, layout, temperature, params, part).logprobs
            )

        found = {}
        if "proximal" in scored:
            found["proximal"] = logprobs(policy_parameters(config, state.params, state.base))
        if "reference" in scored:
            reference = state.base if state.reference is None else state.reference
            found["reference"] = logprobs(reference, teacher or model)
        if "values" in scored:
            found["values"] = in_parts(
                lambda part: critic_values(model, config, layout, state.critic, part)
            )
        return dataclasses.replace(batch, **found)

    return jax.jit(score)


def make_estimator(algorithm: Algorithm, layout: Layout) -> Any:
    """Returns the jitted `estimate(parts) -> parts` of a tuple of scored batches of rewards.

    The parts get the advantages of their tokens, by `algorithm`, and with a critic what its values
    are to predict. The algorithm is given the rows of all parts together, so that what it takes
    over a batch, such as a mean, is that of the whole step however it is cut. Donates nothing.
    """

    def estimate(parts: tuple[TrajectoryBatch, ...]) -> tuple[TrajectoryBatch, ...]:
        whole = with_estimates(_joined(parts), algorithm)
        sizes = [part.tokens.shape for part in parts]
        starts = itertools.accumulate((rows for rows, _ in sizes), initial=0)

        def own(field: jax.Array | None, start: int, rows: int, length: int) -> Any:
            if field is None:
                return None
            return layout.constrain(field[start : start + rows, :length], "NS")

        return tuple(
            dataclasses.replace(
                part,
                advantages=own(whole.advantages, start, *size),
                returns=own(whole.returns, start, *size),
                groups=None,
            )
            for part, start, size in zip(parts, starts, sizes, strict=False)
        )

    return jax.jit(estimate)


def _joined(parts: Sequence[TrajectoryBatch]) -> TrajectoryBatch:
    """Returns the rows of all parts as one batch, padded to the longest."""
    longest = max(part.tokens.shape[1] for part in parts)

    def rows_of(*fields: jax.Array) -> jax.Array:
        padded = [jnp.pad(each, ((0, 0), (0, longest - each.shape[1]))) for each in fields]
        return jnp.concatenate(padded)

    return jax.tree.map(rows_of, *parts)


def with_estimates(batch: TrajectoryBatch, algorithm: Algorithm) -> TrajectoryBatch:
    """Returns a batch of rewards with the tokens' advantages; with a critic, and with returns."""
    mask = batch.turn_ids > 0

    def masked(field: jax.Array | None) -> Any:
        return None if field is None else jnp.where(mask, field, 0.0)

    facts = RewardFacts(
        mask=mask,
        sequences=batch.segment_ids,
        turns=batch.turn_ids,
        rewards=masked(batch.advantages),
        values=masked(batch.values),
        old=masked(batch.logprobs if batch.proximal is None else batch.proximal),
        reference=masked(batch.reference),
        groups=batch.groups,
    )
    if algorithm.token_advantages is not None:
        advantages = algorithm.token_advantages(facts, algorithm.settings)
        return dataclasses.replace(batch, advantages=advantages, groups=None)
    assert algorithm.critic is not None
    found = algorithm.critic.estimate(facts, algorithm.settings)
    return dataclasses.replace(batch, advantages=found.advantages, returns=found.returns)


def split_rows(batch: TrajectoryBatch, micro_batches: int, layout: Layout) -> TrajectoryBatch:
    """Returns micro-batches along a first axis, each with rows of every shard."""

    def split(field_BT: jax.Array) -> jax.Array:
        rows, length = field_BT.shape
        parts = field_BT.reshape(rows // micro_batches, micro_batches, length).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(parts, layout.activations(".NS"))

    return jax.tree.map(split, batch)
