# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The training step: one jitted update under a mesh with all axes of sharding/axes.py.

Or two programs for a batch that comes in parts: one that adds up gradients, one that applies them.
The mathematics is in update.py.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.models.parameters import Params
from earl_jax.sharding.layout import Layout
from earl_jax.train.scoring import score_batch, split_rows
from earl_jax.train.state import TrainState, policy_parameters
from earl_jax.train.update import Totals, Update, add_stream, add_totals
from earl_jax.trajectory import TrajectoryBatch


def make_train_step(update: Update) -> Any:
    """Returns the jitted `step(state, batch, controls) -> (state, metrics)`.

    `controls` is f32[2]: learning rate and entropy coefficient; with a critic its learning rate,
    and last, where the update has versions, that of the weights that the step begins with. Donates
    `state`; a frozen base or reference goes through in the buffers that it came in, and so does a
    critic that the algorithm does not train. `metrics` are f32 scalars by name, of the policy's
    tokens; read them with `read_metrics`.
    """

    def step(state: TrainState, batch: TrajectoryBatch, controls: jax.Array):
        return update.apply(state, update.totals(state, batch, controls), controls)

    outputs = update.shardings, update.layout.parameters("")
    return jax.jit(step, donate_argnums=0, out_shardings=outputs)


class PartSteps(NamedTuple):
    """The jitted functions of an update whose batch comes in parts.

    `accumulate(state, part, controls, totals)` returns the `Totals` with those of a further part,
    and donates them; they are None before the first. `apply(state, totals, controls)` returns the
    state and the metrics as `make_train_step` does from a batch of all parts, and donates `state`.
    """

    accumulate: Any
    apply: Any


def make_part_steps(update: Update) -> PartSteps:
    """Returns the functions of an update in parts."""
    everywhere = update.layout.parameters("")

    def accumulate(
        state: TrainState, part: TrajectoryBatch, controls: jax.Array, totals: Totals | None
    ) -> Totals:
        more = update.totals(state, part, controls)
        return more if totals is None else add_totals(totals, more)

    outputs = (update.shardings, everywhere)
    return PartSteps(
        jax.jit(accumulate, donate_argnums=3, out_shardings=totals_shardings(update)),
        jax.jit(update.apply, donate_argnums=0, out_shardings=outputs),
    )


def totals_shardings(update: Update) -> Totals:
    """Returns the shardings of an update's totals, one for each of their fields but gradients."""
    shardings, everywhere = update.shardings, update.layout.parameters("")
    grads = (shardings.params, shardings.critic)[: 1 + update.trains_critic]
    everything: Any = everywhere
    return Totals(grads, everything, everything, everything)


def make_stream_step(update: Update, supervised: Update, weight: float) -> Any:
    """Returns the jitted `add(state, batch, controls, totals)` of a supervised stream.

    It returns the totals of `update` with `weight` times the mean loss by `supervised` of a batch,
    and donates them. `controls` are those of `supervised`.
    """

    def add(
        state: TrainState, batch: TrajectoryBatch, controls: jax.Array, totals: Totals
    ) -> Totals:
        return add_stream(totals, supervised.totals(state, batch, controls), weight)

    # Its bytes are counted with all of the state, which stays beside it: moments too.
    return jax.jit(add, donate_argnums=3, out_shardings=totals_shardings(update), keep_unused=True)


def make_loss_sums(update: Update) -> Any:
    """Returns the jitted `sums(params, base, batch)`: the sum of the losses of a batch, the tokens.

    They are those of an update by `update`, without a gradient, in as many parts as an update has
    micro-batches. `params` and `base` are of a TrainState. Donates nothing.
    """
    config, layout = update.config, update.layout

    def sums(params: Params, base: Params, batch: TrajectoryBatch) -> tuple[jax.Array, jax.Array]:
        policy = policy_parameters(config, params, base)

        def one(part: TrajectoryBatch) -> jax.Array:
            scores = score_batch(update.model, config, layout, update.temperature, policy, part)
            return update.loss_sums(scores, part, jnp.zeros(2))["loss"]

        losses = jax.lax.map(one, split_rows(batch, config.micro_batches, layout))
        return jnp.sum(losses), jnp.sum(batch.turn_ids > 0)

    return jax.jit(sums, out_shardings=layout.parameters(""))


def read_metrics(metrics: dict[str, jax.Array]) -> dict[str, float]:
    """Reads an update's metrics to the host; its only read."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def batch_shapes(
    rows: int,
    length: int,
    layout: Layout,
    *,
    scored: Collection[str] = (),
    choice_width: int = 0,
) -> TrajectoryBatch:
    """Returns a TrajectoryBatch as placed shapes, with the fields that `scored` names."""

    def shape(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=layout.activations("NS"))

    return TrajectoryBatch(
        tokens=shape(jnp.int32),
        segment_ids=shape(jnp.int32),
        turn_ids=shape(jnp.int32),
        logprobs=shape(jnp.float32),
        versions=shape(jnp.int32),
        allowed=tuple(shape(jnp.int32) for _ in range(choice_width)),
        **{name: shape(jnp.float32) for name in {"advantages", *scored}},
    )
