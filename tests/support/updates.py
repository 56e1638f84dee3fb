# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Training steps, what they are lowered to, and learners, for a model of the test's."""

import jax
import jax.numpy as jnp

from earl_jax.algorithms.algorithm import Algorithm
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.algorithms.requirements import Networks
from earl_jax.models.config import ModelConfig
from earl_jax.sharding.layout import Layout, make_layout
from earl_jax.sharding.placing import placed_shapes
from earl_jax.train.config import TrainConfig
from earl_jax.train.learner import Learner
from earl_jax.train.state import state_shapes, state_shardings
from earl_jax.train.step import batch_shapes, make_train_step
from earl_jax.train.update import Update


def train_step(
    model: ModelConfig, config: TrainConfig, layout: Layout, vocab_size: int, **changes
) -> jax.stages.Wrapped:
    """Returns the step at temperature 1, of REINFORCE unless `changes` name another algorithm."""
    given = {"temperature": 1.0, "algorithm": ALGORITHMS["reinforce"], **changes}
    return make_train_step(Update(model, config, layout, vocab_size=vocab_size, **given))


def lowered_update(
    model: ModelConfig,
    config: TrainConfig,
    layout: Layout,
    vocab_size: int,
    shape: tuple[int, int],
    scored: tuple[str, ...] = (),
    **changes,
) -> jax.stages.Lowered:
    """Returns `train_step` for rows of this shape, as the product lowers it before there is one.

    Kernels ask the default device which chip they are for: it is the layout's first.
    """
    networks = changes.get("networks", Networks())
    state = placed_shapes(
        state_shapes(model, config, vocab_size, networks),
        state_shardings(model, config, vocab_size, layout, networks),
    )
    controls = jax.ShapeDtypeStruct((2 + networks.critic,), jnp.float32)
    with jax.default_device(layout.mesh.devices.flat[0]):  # pyright: ignore
        step = train_step(model, config, layout, vocab_size, **changes)
        return step.lower(state, batch_shapes(*shape, layout, scored=scored), controls)


def plain_learner(
    model: ModelConfig, config: TrainConfig, algorithm: Algorithm, vocab_size: int, **changes
) -> Learner:
    """Returns a learner at temperature 1, which corrects nothing, on layouts of all devices."""
    given = {"temperature": 1.0, "importance_cap": 0.0, "layout": make_layout, **changes}
    return Learner(model, config, algorithm, vocab_size=vocab_size, **given)
