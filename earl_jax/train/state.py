# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The state of training: its shapes, its shardings, and how it is made."""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from earl_jax.algorithms.requirements import Networks
from earl_jax.models.config import ModelConfig
from earl_jax.models.lora import adapt, adapter_specs
from earl_jax.models.parameters import (
    ParameterSpec,
    Params,
    init_parameters,
    parameter_shapes,
    parameter_shardings,
    parameter_specs,
)
from earl_jax.sharding.layout import Layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.optimizer import make_optimizer, moment_axes

# The head of the critic in its tree of parameters.
VALUE_HEAD = "value_head"
# A policy without another network.
_ALONE = Networks()


@flax.struct.dataclass(frozen=True, kw_only=True)
class TrainState:
    """The state of training: fp32 parameters, optimiser state, and the number of updates.

    With `config.lora.rank`, `params` are the adapters alone, and `base` is the frozen model that
    they adapt, on the same mesh. Without adapters `base` is None.

    `reference` is a frozen copy of the first policy, or of that behind a warm start, or a teacher,
    in the compute type: the forward pass rounds every weight to that type first, so that its
    log-probs are those of the fp32 weights. `critic` are the parameters of the value network;
    `optimizer` is `(of params, of critic)` then. Both are None unless the algorithm needs them
    (`Networks`). `ema` is the moving average of `params`, None without `config.ema_decay`.
    `sft_optimizer` is the optimizer state of `params` in the supervised updates of a warm start
    (`config.sft_steps`), None without one and behind its last step.

    Some functions return the same record of shapes or of shardings.
    """

    updates: Any
    params: Params
    optimizer: Any
    base: Params = None
    reference: Params = None
    critic: Params = None
    ema: Params = None
    sft_optimizer: Any = None

    @property
    def trained(self) -> tuple[Params, ...]:
        """The trees that are updated, each by an optimizer of its own."""
        return (self.params,) if self.critic is None else (self.params, self.critic)

    @property
    def moments(self) -> tuple[Any, ...]:
        """The optimizer state of each of `trained`, then that of supervised updates, if any."""
        each = (self.optimizer,) if self.critic is None else self.optimizer
        return each if self.sft_optimizer is None else (*each, self.sft_optimizer)

    def with_moments(self, moments: tuple[Any, ...]) -> "TrainState":
        """Returns the state with these `moments`."""
        number = len(self.trained)
        optimizer, sft = moments[0] if number == 1 else moments[:number], moments[number:]
        return dataclasses.replace(self, optimizer=optimizer, sft_optimizer=sft[0] if sft else None)

    def without_sft(self) -> "TrainState":
        """Returns the state without the optimizer state of supervised updates."""
        return dataclasses.replace(self, sft_optimizer=None)

    def like(self, state: "TrainState") -> "TrainState":
        """Returns this record of shapes or shardings for a state of before or behind a warm start.

        It is the learner's, which is of before.
        """
        return self.without_sft() if state.sft_optimizer is None else self

    def for_sft(self) -> "TrainState":
        """Returns the part of the state that a supervised update changes, as a state of its own."""
        parts = {"optimizer": self.sft_optimizer, "reference": None, "critic": None}
        return dataclasses.replace(self, **parts).without_sft()

    def after_sft(self, part: "TrainState") -> "TrainState":
        """Returns the state behind a supervised update of its `for_sft`, which is `part` now."""
        parts = {"optimizer": self.optimizer, "sft_optimizer": part.optimizer}
        return dataclasses.replace(part, **parts, reference=self.reference, critic=self.critic)


def trained_specs(model: ModelConfig, config: TrainConfig, vocab_size: int) -> tuple[Any, Any]:
    """Returns the specs of the trained parameters, and of the frozen base of adapters (or None)."""
    specs = parameter_specs(model, vocab_size)
    return (adapter_specs(specs, config.lora), specs) if config.lora.rank else (specs, None)


def optimized_specs(
    model: ModelConfig, config: TrainConfig, vocab_size: int, networks: Networks = _ALONE
) -> tuple[Any, ...]:
    """Returns the specs of the parameters that each of `TrainState.moments` belongs to."""
    trained, _ = trained_specs(model, config, vocab_size)
    critic = (critic_specs(model, vocab_size),) if networks.critic else ()
    return (trained, *critic, trained) if config.sft_steps else (trained, *critic)


def reference_specs(model: ModelConfig, vocab_size: int, networks: Networks) -> Any:
    """Returns the specs of the reference, which may be a teacher of other sizes; None for none."""
    if not networks.reference:
        return None
    return parameter_specs(*(networks.teacher or (model, vocab_size)))


def critic_specs(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Returns the specs of the critic: the decoder's, with a scalar head for the vocabulary's."""
    specs = parameter_specs(model, vocab_size)
    head = ParameterSpec(shape=(model.width,), axes="D", deviation=0.0, constant=0.0)
    return {name: spec for name, spec in specs.items() if name != "head"} | {VALUE_HEAD: head}


def policy_parameters(config: TrainConfig, params: Params, base: Params) -> Params:
    """Returns the decoder's parameters: the trained ones, or the base with its adapters."""
    return params if base is None else adapt(base, params, config.lora)


def state_shapes(
    model: ModelConfig, config: TrainConfig, vocab_size: int, networks: Networks = _ALONE
) -> TrainState:
    """Returns a TrainState as shapes, for tracing and restoring."""
    trained, frozen = trained_specs(model, config, vocab_size)
    dtype = jnp.dtype(model.compute_dtype)
    state = TrainState(
        updates=jax.ShapeDtypeStruct((), jnp.int32),
        params=parameter_shapes(trained),
        optimizer=None,
        base=parameter_shapes(frozen, dtype),
        reference=parameter_shapes(reference_specs(model, vocab_size, networks), dtype),
        critic=parameter_shapes(critic_specs(model, vocab_size)) if networks.critic else None,
        ema=parameter_shapes(trained) if config.ema_decay else None,
    )
    moments = jax.eval_shape(
        lambda trees: _first_moments(model, config, vocab_size, networks, trees), state.trained
    )
    return state.with_moments(moments)


def state_shardings(
    model: ModelConfig,
    config: TrainConfig,
    vocab_size: int,
    layout: Layout,
    networks: Networks = _ALONE,
) -> TrainState:
    """Returns the shardings of a TrainState: moments by their axes, counters replicated."""
    trained, frozen = trained_specs(model, config, vocab_size)
    everywhere = layout.parameters("")
    critic = critic_specs(model, vocab_size) if networks.critic else None
    state = TrainState(
        updates=everywhere,
        params=parameter_shardings(trained, layout),
        optimizer=None,
        base=parameter_shardings(frozen, layout),
        reference=parameter_shardings(reference_specs(model, vocab_size, networks), layout),
        critic=parameter_shardings(critic, layout) if networks.critic else None,
        ema=parameter_shardings(trained, layout) if config.ema_decay else None,
    )
    specs = optimized_specs(model, config, vocab_size, networks)
    shapes = state_shapes(model, config, vocab_size, networks).moments
    axes = tuple(map(moment_axes, shapes, specs))
    return state.with_moments(jax.tree.map(layout.parameters, axes))


def init_state(
    model: ModelConfig,
    config: TrainConfig,
    vocab_size: int,
    layout: Layout,
    seed: int,
    networks: Networks = _ALONE,
) -> TrainState:
    """Returns a state with random parameters, made on their devices; the same on every layout."""
    return _init_program(model, config, vocab_size, layout, seed, networks)()


def state_of(
    params: Params,
    model: ModelConfig,
    config: TrainConfig,
    vocab_size: int,
    layout: Layout,
    seed: int,
    networks: Networks = _ALONE,
) -> TrainState:
    """Returns the state of these parameters before the first update; they are on this layout.

    With `config.lora.rank` they are the base, and the adapters are new, drawn from `seed`.
    """
    shardings = state_shardings(model, config, vocab_size, layout, networks)
    updates = jnp.zeros((), jnp.int32, device=shardings.updates)
    state = TrainState(updates=updates, params=params, optimizer=None)
    if config.lora.rank:
        trained, _ = trained_specs(model, config, vocab_size)
        draw = jax.jit(
            lambda: init_parameters(trained, jax.random.key(seed)), out_shardings=shardings.params
        )
        state = dataclasses.replace(state, params=draw(), base=params)
    state = with_first_average(config, state)
    beside = jax.jit(
        lambda policy: _beside(policy, model, vocab_size, networks),
        out_shardings=(shardings.reference, shardings.critic),
    )
    reference, critic = beside(params)
    state = dataclasses.replace(state, reference=reference, critic=critic)
    init = jax.jit(
        lambda trees: _first_moments(model, config, vocab_size, networks, trees),
        out_shardings=shardings.moments,
    )
    return state.with_moments(init(state.trained))


def with_first_average(config: TrainConfig, state: TrainState) -> TrainState:
    """Returns the state with its parameters as their average, as before the first update."""
    if not config.ema_decay:
        return state
    where = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    # A copy: both are donated to each update.
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=where)
    return dataclasses.replace(state, ema=copy(state.params))


def _beside(
    policy: Params, model: ModelConfig, vocab_size: int, networks: Networks
) -> tuple[Params, Params]:
    """Returns the reference and the critic of a run that begins with this policy.

    A teacher of sizes of its own has zeros until it is read.
    """
    dtype, critic = jnp.dtype(model.compute_dtype), None
    if networks.critic:
        critic = first_critic(policy)
    if networks.teacher is not None:
        shapes = parameter_shapes(reference_specs(model, vocab_size, networks), dtype)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), critic
    # Copies: the parameters are donated to each update.
    reference = jax.tree.map(lambda leaf: jnp.copy(leaf.astype(dtype)), policy)
    return reference if networks.reference else None, critic


def first_critic(policy: Params) -> Params:
    """Returns the critic that begins as this policy, in fp32, in buffers of its own.

    Its head is zeros, so that its first values are 0.
    """
    trunk = {name: tree for name, tree in policy.items() if name != "head"}
    trunk = jax.tree.map(lambda leaf: jnp.copy(leaf.astype(jnp.float32)), trunk)
    return trunk | {VALUE_HEAD: jnp.zeros_like(trunk["final_norm"])}


def _first_moments(
    model: ModelConfig,
    config: TrainConfig,
    vocab_size: int,
    networks: Networks,
    trees: tuple[Params, ...],
) -> tuple[Any, ...]:
    """Returns the first `TrainState.moments` of these `trained` trees."""
    trees = (*trees, trees[0]) if config.sft_steps else trees
    specs = optimized_specs(model, config, vocab_size, networks)
    optimizers = [make_optimizer(config, each) for each in specs]
    return tuple(o.init(tree) for o, tree in zip(optimizers, trees, strict=True))


@functools.lru_cache(maxsize=64)
def _init_program(
    model: ModelConfig,
    config: TrainConfig,
    vocab_size: int,
    layout: Layout,
    seed: int,
    networks: Networks,
) -> Any:
    # Kept: it takes seconds to compile, and every measurement of the selector begins with it.
    def init() -> TrainState:
        trained, frozen = trained_specs(model, config, vocab_size)
        params, base = (init_parameters(specs, jax.random.key(seed)) for specs in (trained, frozen))
        policy = params if base is None else base
        reference, critic = _beside(policy, model, vocab_size, networks)
        state = TrainState(
            updates=jnp.zeros((), jnp.int32),
            params=params,
            optimizer=None,
            base=jax.tree.map(lambda leaf: leaf.astype(model.compute_dtype), base),
            reference=reference,
            critic=critic,
            ema=jax.tree.map(jnp.copy, params) if config.ema_decay else None,
        )
        moments = _first_moments(model, config, vocab_size, networks, state.trained)
        return state.with_moments(moments)

    shardings = state_shardings(model, config, vocab_size, layout, networks)
    return jax.jit(init, out_shardings=shardings)
