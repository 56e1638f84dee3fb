# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The training step: one jitted update under a mesh with all axes of sharding/axes.py."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from earl_jax.models.attention.folding import fold, unfold
from earl_jax.models.attention.kernels import choose_kernel
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows_routed, head_weights
from earl_jax.models.logprobs import TokenScores, score_tokens
from earl_jax.models.lora import adapt, adapter_specs
from earl_jax.models.moe.routing import Routing, balance_loss, load_of_experts
from earl_jax.models.parameters import (
    Params,
    init_parameters,
    parameter_shapes,
    parameter_shardings,
    parameter_specs,
)
from earl_jax.sharding.layout import Layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.losses import LossSums, policy_gradient, supervised
from earl_jax.train.optimizer import make_optimizer
from earl_jax.trajectory import TrajectoryBatch

Objective = Literal["policy_gradient", "supervised"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that training changes: fp32 parameters, optimiser state, and the number of updates.

    With `config.lora.rank`, `params` are the adapters alone, and `base` is what they adapt: it lies
    on the same mesh and is never changed. Without adapters `base` is None.

    The same record holds shapes or shardings where a function says so.
    """

    updates: Any
    params: Params
    optimizer: Any
    base: Params = None


class UpdateMetrics(NamedTuple):
    """Means over the policy's tokens of one update, read in one transfer; see `LossSums`.

    `balance_loss`, `expert_load_max` and `expert_load_entropy` are those of a mixture's routers
    over all tokens (routing.py), and None for a dense model.

    Scalars on the device inside the step, floats behind `read_metrics`.
    """

    loss: Any
    entropy: Any
    clip_fraction: Any
    kl: Any
    mismatch_mean: Any
    mismatch_max: Any
    importance_mean: Any
    truncated_fraction: Any
    grad_norm: Any
    tokens: Any
    balance_loss: Any = None
    expert_load_max: Any = None
    expert_load_entropy: Any = None


def trained_specs(model: ModelConfig, config: TrainConfig, vocab_size: int) -> tuple[Any, Any]:
    """What is trained and, where that is adapters, the base that is not (else None)."""
    specs = parameter_specs(model, vocab_size)
    return (adapter_specs(specs, config.lora), specs) if config.lora.rank else (specs, None)


def policy_parameters(config: TrainConfig, params: Params, base: Params) -> Params:
    """What the decoder computes with: the trained parameters, or the base with its adapters."""
    return params if base is None else adapt(base, params, config.lora)


def state_shapes(model: ModelConfig, config: TrainConfig, vocab_size: int) -> TrainState:
    """A TrainState as shapes, for tracing and restoring."""
    trained, frozen = trained_specs(model, config, vocab_size)
    params = parameter_shapes(trained)
    return TrainState(
        updates=jax.ShapeDtypeStruct((), jnp.int32),
        params=params,
        optimizer=jax.eval_shape(make_optimizer(config).init, params),
        base=parameter_shapes(frozen, jnp.dtype(config.lora.base_dtype)),
    )


def state_shardings(
    model: ModelConfig, config: TrainConfig, vocab_size: int, layout: Layout
) -> TrainState:
    """Where a TrainState lives: moments beside their parameter, counters everywhere."""
    shapes = state_shapes(model, config, vocab_size)
    trained, frozen = trained_specs(model, config, vocab_size)
    params = parameter_shardings(trained, layout)
    everywhere = layout.parameters("")
    optimizer = optax.tree_utils.tree_map_params(
        make_optimizer(config),
        lambda _, sharding: sharding,
        shapes.optimizer,
        params,
        transform_non_params=lambda _: everywhere,
    )
    base = parameter_shardings(frozen, layout)
    return TrainState(updates=everywhere, params=params, optimizer=optimizer, base=base)


def init_state(
    model: ModelConfig, config: TrainConfig, vocab_size: int, layout: Layout, seed: int
) -> TrainState:
    """Random parameters, made where they live. The same values on every layout."""
    return _init_program(model, config, vocab_size, layout, seed)()


def state_of(
    params: Params,
    model: ModelConfig,
    config: TrainConfig,
    vocab_size: int,
    layout: Layout,
    seed: int,
) -> TrainState:
    """These parameters, which lie on this layout, before the first update.

    With `config.lora.rank` they are the base, and the adapters are new, drawn from `seed`.
    """
    shardings = state_shardings(model, config, vocab_size, layout)
    base = None
    if config.lora.rank:
        trained, _ = trained_specs(model, config, vocab_size)
        draw = jax.jit(
            lambda: init_parameters(trained, jax.random.key(seed)), out_shardings=shardings.params
        )
        params, base = draw(), params
    init = jax.jit(make_optimizer(config).init, out_shardings=shardings.optimizer)
    updates = jnp.zeros((), jnp.int32, device=shardings.updates)
    return TrainState(updates=updates, params=params, optimizer=init(params), base=base)


@functools.lru_cache(maxsize=64)
def _init_program(
    model: ModelConfig, config: TrainConfig, vocab_size: int, layout: Layout, seed: int
) -> Any:
    # Kept: it takes seconds to compile, and every measurement of the selector begins with it.
    def init() -> TrainState:
        trained, frozen = trained_specs(model, config, vocab_size)
        params = init_parameters(trained, jax.random.key(seed))
        base = init_parameters(frozen, jax.random.key(seed))
        return TrainState(
            updates=jnp.zeros((), jnp.int32),
            params=params,
            optimizer=make_optimizer(config).init(params),
            base=jax.tree.map(lambda leaf: leaf.astype(config.lora.base_dtype), base),
        )

    return jax.jit(init, out_shardings=state_shardings(model, config, vocab_size, layout))


def score_batch(
    model: ModelConfig,
    config: TrainConfig,
    layout: Layout,
    temperature: float,
    params: Params,
    batch: TrajectoryBatch,
) -> TokenScores:
    """Log-prob of every token of the batch given those before it, and entropy there; f32[N,T].

    Place t is scored from the hidden state at t - 1; place 0 gets zeros.
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
    return TokenScores(*(jnp.pad(score[:, :-1], ((0, 0), (1, 0))) for score in whole)), routing


def make_train_step(
    model: ModelConfig,
    config: TrainConfig,
    layout: Layout,
    *,
    vocab_size: int,
    temperature: float,
    objective: Objective,
    importance_cap: float = 0.0,
) -> Any:
    """The jitted `step(state, batch, controls) -> (state, metrics f32[M])`.

    `controls` is f32[2]: learning rate and entropy coefficient. Donates `state`. Gradients of the
    micro-batches add up as sums and are divided once by all the policy's tokens; routers are to be
    balanced within each micro-batch, which counts by the policy's tokens in it. A frozen base goes
    through in the buffers that it came in. Read the metrics with `read_metrics`. `importance_cap`
    above 0 corrects for who sampled (`losses.policy_gradient`); with more than one update a batch,
    give `batch.proximal` then, by `make_scorer`.
    """
    optimizer = make_optimizer(config)
    shardings = state_shardings(model, config, vocab_size, layout)

    def loss_sums(
        params: Params, base: Params, batch: TrajectoryBatch, entropy_coefficient: jax.Array
    ):
        params = policy_parameters(config, params, base)
        scores, routing = _score_batch(model, config, layout, temperature, params, batch)
        if objective == "supervised":
            sums = supervised(scores, batch)
        else:
            sums = policy_gradient(
                scores,
                batch,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                entropy_coefficient=entropy_coefficient,
                importance_cap=importance_cap,
            )
        if routing is not None and config.balance_coefficient:
            weight = config.balance_coefficient * jnp.sum(batch.turn_ids > 0)
            sums = sums._replace(loss=sums.loss + weight * balance_loss(model, routing))
        return sums.loss, (sums, routing)

    # Jitted so that it is traced once, for its shapes and for its use; in its place all the same.
    gradients = jax.jit(jax.grad(loss_sums, has_aux=True), inline=True)

    def step(state: TrainState, batch: TrajectoryBatch, controls: jax.Array):
        rate, entropy_coefficient = controls[0], controls[1]
        grads, (sums, routing) = _accumulate(
            lambda part: gradients(state.params, state.base, part, entropy_coefficient),
            batch,
            config.micro_batches,
            layout,
        )
        tokens = jnp.maximum(jnp.sum(batch.turn_ids > 0), 1).astype(jnp.float32)
        grads = jax.tree.map(lambda grad: grad / tokens, grads)
        direction, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = jax.tree.map(lambda p, d: p - rate * d, state.params, direction)
        metrics = UpdateMetrics(
            loss=sums.loss / tokens,
            entropy=sums.entropy / tokens,
            clip_fraction=sums.clipped / tokens,
            kl=sums.kl / tokens,
            mismatch_mean=sums.mismatch / tokens,
            mismatch_max=sums.mismatch_max,
            importance_mean=sums.importance / tokens,
            truncated_fraction=sums.truncated / tokens,
            grad_norm=optax.tree.norm(grads),
            tokens=tokens,
            **_routing_metrics(model, routing),
        )
        state = dataclasses.replace(
            state, updates=state.updates + 1, params=params, optimizer=optimizer_state
        )
        return state, jnp.stack([metric for metric in metrics if metric is not None])

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, layout.parameters("")))


def _routing_metrics(model: ModelConfig, routing: Routing | None) -> dict[str, jax.Array]:
    """The fields of UpdateMetrics that a mixture has and a dense model has not."""
    if routing is None:
        return {}
    load = load_of_experts(routing)
    return {
        "balance_loss": balance_loss(model, routing),
        "expert_load_max": load.busiest,
        "expert_load_entropy": load.entropy,
    }


def _accumulate(
    gradients: Callable[[TrajectoryBatch], tuple[Params, tuple[LossSums, Routing | None]]],
    batch: TrajectoryBatch,
    micro_batches: int,
    layout: Layout,
) -> tuple[Params, tuple[LossSums, Routing | None]]:
    """Sums of all that `gradients` gives over micro-batches, each with rows of every shard."""
    if micro_batches == 1:
        return gradients(batch)

    def add(total: Any, part: TrajectoryBatch) -> tuple[Any, None]:
        found = gradients(part)
        grads, (sums, routing) = jax.tree.map(jnp.add, total, found)
        worst = jnp.maximum(total[1][0].mismatch_max, found[1][0].mismatch_max)
        return (grads, (sums._replace(mismatch_max=worst), routing)), None

    parts = _split(batch, micro_batches, layout)
    zeros = jax.tree.map(
        lambda shape: jnp.zeros(shape.shape, shape.dtype),
        jax.eval_shape(gradients, jax.tree.map(lambda field: field[0], parts)),
    )
    total, _ = jax.lax.scan(add, zeros, parts)
    return total


def _split(batch: TrajectoryBatch, micro_batches: int, layout: Layout) -> TrajectoryBatch:
    """Micro-batches along a first axis, each with rows of every shard."""

    def split(field_BT: jax.Array) -> jax.Array:
        rows, length = field_BT.shape
        parts = field_BT.reshape(rows // micro_batches, micro_batches, length).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(parts, layout.activations(".NS"))

    return jax.tree.map(split, batch)


def make_scorer(
    model: ModelConfig, config: TrainConfig, layout: Layout, *, temperature: float
) -> Any:
    """The jitted `score(state, batch) -> batch` with `proximal`: what this state makes of it.

    In as many parts as an update has micro-batches. Donates nothing.
    """

    def score(state: TrainState, batch: TrajectoryBatch) -> TrajectoryBatch:
        params = policy_parameters(config, state.params, state.base)
        parts = _split(batch, config.micro_batches, layout)
        logprobs = jax.lax.map(
            lambda part: score_batch(model, config, layout, temperature, params, part).logprobs,
            parts,
        )
        proximal_BT = logprobs.swapaxes(0, 1).reshape(batch.tokens.shape)
        return dataclasses.replace(batch, proximal=layout.constrain(proximal_BT, "NS"))

    return jax.jit(score)


def read_metrics(metrics: jax.Array) -> UpdateMetrics:
    """The one read of an update: ten numbers to the host, thirteen of a mixture."""
    return UpdateMetrics(*(float(number) for number in np.asarray(metrics)))


def batch_shapes(
    rows: int, length: int, layout: Layout, *, with_proximal: bool = False
) -> TrajectoryBatch:
    """A TrajectoryBatch as placed shapes, for tracing."""

    def shape(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=layout.activations("NS"))

    return TrajectoryBatch(
        tokens=shape(jnp.int32),
        segment_ids=shape(jnp.int32),
        turn_ids=shape(jnp.int32),
        logprobs=shape(jnp.float32),
        versions=shape(jnp.int32),
        advantages=shape(jnp.float32),
        proximal=shape(jnp.float32) if with_proximal else None,
    )
