# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The state of training: its shapes, its shardings, and how it is made."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from earl_jax.models.config import ModelConfig
from earl_jax.models.lora import adapt, adapter_specs
from earl_jax.models.parameters import (
    Params,
    init_parameters,
    parameter_shapes,
    parameter_shardings,
    parameter_specs,
)
from earl_jax.sharding.layout import Layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.optimizer import make_optimizer, moment_axes
from earl_jax.trajectory import TrajectoryBatch


@flax.struct.dataclass(frozen=True, kw_only=True)
class TrainState:
    """The state of training: fp32 parameters, optimiser state, and the number of updates.

    With `config.lora.rank`, `params` are the adapters alone, and `base` is the frozen model that
    they adapt, on the same mesh. Without adapters `base` is None. `critic` are the
    parameters of a second network that is trained beside the policy, None without one; `optimizer`
    is of `(params, critic)` then.

    Some functions return the same record of shapes or of shardings.
    """

    updates: Any
    params: Params
    optimizer: Any
    base: Params = None
    critic: Any = None

    @property
    def trained(self) -> Any:
        """The tree that the optimizer updates."""
        return self.params if self.critic is None else (self.params, self.critic)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Critic:
    """A second network: `specs` of its parameters, and `values(params, batch) -> f32[B,T]`."""

    specs: Any
    values: Callable[[Any, TrajectoryBatch], jax.Array]


def trained_specs(model: ModelConfig, config: TrainConfig, vocab_size: int) -> tuple[Any, Any]:
    """Returns the specs of the trained parameters, and of the frozen base of adapters (or None)."""
    specs = parameter_specs(model, vocab_size)
    return (adapter_specs(specs, config.lora), specs) if config.lora.rank else (specs, None)


def optimized_specs(
    model: ModelConfig, config: TrainConfig, vocab_size: int, critic: Critic | None = None
) -> Any:
    """Returns the specs of the tree that the optimizer updates (`TrainState.trained`)."""
    trained, _ = trained_specs(model, config, vocab_size)
    return (trained, critic.specs) if critic else trained


def policy_parameters(config: TrainConfig, params: Params, base: Params) -> Params:
    """Returns the decoder's parameters: the trained ones, or the base with its adapters."""
    return params if base is None else adapt(base, params, config.lora)


def state_shapes(
    model: ModelConfig, config: TrainConfig, vocab_size: int, critic: Critic | None = None
) -> TrainState:
    """Returns a TrainState as shapes, for tracing and restoring."""
    trained, frozen = trained_specs(model, config, vocab_size)
    state = TrainState(
        updates=jax.ShapeDtypeStruct((), jnp.int32),
        params=parameter_shapes(trained),
        optimizer=None,
        base=parameter_shapes(frozen, jnp.dtype(config.lora.base_dtype)),
        critic=critic and parameter_shapes(critic.specs),
    )
    optimizer = make_optimizer(config, optimized_specs(model, config, vocab_size, critic))
    return dataclasses.replace(state, optimizer=jax.eval_shape(optimizer.init, state.trained))


def state_shardings(
    model: ModelConfig,
    config: TrainConfig,
    vocab_size: int,
    layout: Layout,
    critic: Critic | None = None,
) -> TrainState:
    """Returns the shardings of a TrainState: moments by their axes, counters replicated."""
    trained, frozen = trained_specs(model, config, vocab_size)
    everywhere = layout.parameters("")
    state = TrainState(
        updates=everywhere,
        params=parameter_shardings(trained, layout),
        optimizer=None,
        base=parameter_shardings(frozen, layout),
        critic=critic and parameter_shardings(critic.specs, layout),
    )
    axes = moment_axes(
        state_shapes(model, config, vocab_size, critic).optimizer,
        optimized_specs(model, config, vocab_size, critic),
    )
    return dataclasses.replace(state, optimizer=jax.tree.map(layout.parameters, axes))


def init_state(
    model: ModelConfig,
    config: TrainConfig,
    vocab_size: int,
    layout: Layout,
    seed: int,
    critic: Critic | None = None,
) -> TrainState:
    """Returns a state with random parameters, made on their devices; the same on every layout."""
    return _init_program(model, config, vocab_size, layout, seed, critic)()


def state_of(
    params: Params,
    model: ModelConfig,
    config: TrainConfig,
    vocab_size: int,
    layout: Layout,
    seed: int,
) -> TrainState:
    """Returns the state of these parameters before the first update; they are on this layout.

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
    optimizer = make_optimizer(config, optimized_specs(model, config, vocab_size))
    init = jax.jit(optimizer.init, out_shardings=shardings.optimizer)
    updates = jnp.zeros((), jnp.int32, device=shardings.updates)
    return TrainState(updates=updates, params=params, optimizer=init(params), base=base)


@functools.lru_cache(maxsize=64)
def _init_program(
    model: ModelConfig,
    config: TrainConfig,
    vocab_size: int,
    layout: Layout,
    seed: int,
    critic: Critic | None,
) -> Any:
    # Kept: it takes seconds to compile, and every measurement of the selector begins with it.
    def init() -> TrainState:
        trained, frozen = trained_specs(model, config, vocab_size)
        base = init_parameters(frozen, jax.random.key(seed))
        state = TrainState(
            updates=jnp.zeros((), jnp.int32),
            params=init_parameters(trained, jax.random.key(seed)),
            optimizer=None,
            base=jax.tree.map(lambda leaf: leaf.astype(config.lora.base_dtype), base),
            critic=critic and init_parameters(critic.specs, jax.random.key(seed)),
        )
        optimizer = make_optimizer(config, optimized_specs(model, config, vocab_size, critic))
        return dataclasses.replace(state, optimizer=optimizer.init(state.trained))

    return jax.jit(init, out_shardings=state_shardings(model, config, vocab_size, layout, critic))
