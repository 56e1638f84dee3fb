# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The optimizer (optax) and what changes from step to step: learning rate and entropy bonus.

What an optimizer does to a parameter goes by the parameter's axes: which are inputs of a matrix,
which outputs, and which (layers, experts) count matrices of their own.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from earl_jax.models.parameters import ParameterSpec, is_spec
from earl_jax.train.config import TrainConfig

# Letters that count matrices: layers and experts.
_STACKED = "LE"
# Single letters that are the inputs of a matrix: all others before the last letter are (heads).
_INPUTS = "DFRVA"
# Root mean square of a Muon update, that of AdamW's (Moonlight, arXiv 2502.16982, section 2.2), so
# that both have learning rates of one size.
_MUON_RMS = 0.2
# Adafactor (arXiv 1804.04235): the least inputs and outputs of a matrix that is factored, the
# largest RMS of an update, what is added to squared gradients, and the power of the second moments'
# decay, 1 - t^-0.8 at update t (algorithm 4).
_LEAST_FACTORED = 128
_MAX_RMS = 1.0
_LEAST_SQUARE = 1e-30
_DECAY_POWER = 0.8


def make_optimizer(config: TrainConfig, specs: Any) -> optax.GradientTransformation:
    """Returns config.train.optimizer behind clipping, with learning rate 1.

    `specs` are those of the trained parameters. The step multiplies by its RL step's rate: it is
    not part of the optimizer because it follows RL steps, and one RL step may make several updates.
    """
    dtype, b1, b2 = config.momentum_dtype, config.adam_b1, config.adam_b2
    adam = optax.scale_by_adam(b1, b2, config.adam_eps, mu_dtype=dtype)
    match config.optimizer:
        case "adamw":
            scale = adam
        case "lion":
            scale = optax.scale_by_lion(b1, b2, mu_dtype=dtype)
        case "adafactor":
            scale = optax.chain(_factored(specs), _clipped(specs))
        case "muon":
            scale = _muon(specs, adam, dtype)
    decays = jax.tree.map(is_decayed, specs, is_leaf=is_spec)
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        scale,
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )


def _factored(specs: Any) -> optax.GradientTransformation:
    """Returns Adafactor's scaling of gradients by second moments (arXiv 1804.04235, algorithm 4).

    As optax's scale_by_factored_rms, but it factors the matrix of each layer and expert, inputs by
    outputs whatever axes they have, in place of the two largest axes. Rows are the mean squares
    over outputs, columns those over inputs, with the parameter's other axes.
    """

    def tree_of(one: Callable[..., Any], *trees: Any) -> list[Any]:
        """Returns the trees of the results of `one`, a tuple for each parameter."""
        leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)
        found = map(one, leaves, *(structure.flatten_up_to(tree) for tree in trees))
        return [structure.unflatten(part) for part in zip(*found, strict=True)]

    def first(spec: ParameterSpec, param: jax.Array) -> tuple[Any, ...]:
        sides, none = _factored_axes(spec), optax.MaskedNode()
        if sides is None:
            return none, none, jnp.zeros_like(param)
        inputs, outputs = sides
        return jnp.zeros_like(param.mean(outputs)), jnp.zeros_like(param.mean(inputs)), none

    def init(params: Any) -> optax.FactoredState:
        return optax.FactoredState(jnp.zeros((), jnp.int32), *tree_of(first, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        kept = 1.0 - (state.count + 1.0) ** -_DECAY_POWER

        def one(spec: ParameterSpec, grad: jax.Array, *moments: Any) -> tuple[Any, ...]:
            sides, squares = _factored_axes(spec), grad**2 + _LEAST_SQUARE

            def mean(moment: jax.Array, axes: tuple[int, ...]) -> jax.Array:
                return kept * moment + (1.0 - kept) * squares.mean(axes)

            row, column, full = moments
            if sides is None:
                full = mean(full, ())
                return grad * full**-0.5, row, column, full
            inputs, outputs = sides
            row, column = mean(row, outputs), mean(column, inputs)
            rows = jnp.expand_dims(row, outputs)
            rows = rows / rows.mean(inputs, keepdims=True)
            scaled = grad * rows**-0.5 * jnp.expand_dims(column, inputs) ** -0.5
            return scaled, row, column, full

        scaled, *moments = tree_of(one, updates, state.v_row, state.v_col, state.v)
        return scaled, optax.FactoredState(optax.safe_increment(state.count), *moments)

    return optax.GradientTransformation(init, update)


def _clipped(specs: Any) -> optax.GradientTransformation:
    """Returns Adafactor's clip: updates of at most RMS 1 (section 6), of each layer and expert."""

    def clip(spec: ParameterSpec, update: jax.Array) -> jax.Array:
        own = tuple(at for at, letter in enumerate(spec.axes) if letter not in _STACKED)
        rms = jnp.sqrt(jnp.mean(update**2, axis=own, keepdims=True))
        return update / jnp.maximum(1.0, rms / _MAX_RMS)

    return optax.stateless(lambda updates, _: jax.tree.map(clip, specs, updates, is_leaf=is_spec))


def _factored_axes(spec: ParameterSpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the axes of a matrix's inputs and outputs; None for what is not factored."""
    found = _matrix_axes(spec)
    sizes = [math.prod(spec.shape[axis] for axis in side) for side in found or ()]
    return found if found and min(sizes) >= _LEAST_FACTORED else None


def _muon(
    specs: Any, others: optax.GradientTransformation, dtype: str
) -> optax.GradientTransformation:
    """Returns Muon for matrices beside another optimizer for all else."""

    def of_matrices(found: Callable[[ParameterSpec, optax.contrib.MuonDimensionNumbers], Any]):
        def one(spec: ParameterSpec) -> Any:
            axes = muon_axes(spec)
            return optax.MaskedNode() if axes is None else found(spec, axes)

        return jax.tree.map(one, specs, is_leaf=is_spec)

    def factor(spec: ParameterSpec, axes: optax.contrib.MuonDimensionNumbers) -> float:
        sides = (axes.reduction_axis, axes.output_axis)
        sizes = [math.prod(spec.shape[axis] for axis in side) for side in sides]  # pyright: ignore
        return _MUON_RMS * math.sqrt(max(sizes))

    factors = of_matrices(factor)
    matrices = optax.chain(
        optax.contrib.scale_by_muon(
            mu_dtype=dtype, weight_dimension_numbers=of_matrices(lambda _, axes: axes)
        ),
        optax.stateless(lambda updates, _: jax.tree.map(lambda u, f: f * u, updates, factors)),
    )
    labels = jax.tree.map(
        lambda spec: "others" if muon_axes(spec) is None else "matrices", specs, is_leaf=is_spec
    )
    return optax.partition({"matrices": matrices, "others": others}, labels)


def matrix_axes(axes: str) -> tuple[str, str] | None:
    """Returns the letters of a matrix's inputs and of its outputs; None for no matrix.

    Query LDKGH is D by KGH in each layer, out LKGHD is KGH by D, a norm LD and a bias LKGH none.
    """
    own = "".join(letter for letter in axes if letter not in _STACKED)
    if len(own) < 2 or not set(own) & set(_INPUTS):
        return None
    return (own[0], own[1:]) if own[0] in _INPUTS else (own[:-1], own[-1])


def _matrix_axes(spec: ParameterSpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the axes of an array that are a matrix's inputs and outputs; None for no matrix."""
    found = matrix_axes(spec.axes)
    if found is None:
        return None
    inputs, outputs = (tuple(map(spec.axes.index, letters)) for letters in found)
    return inputs, outputs


def is_decayed(spec: ParameterSpec) -> bool:
    """Returns True if weight decay applies: to matrices, not to norms, biases and embeddings."""
    found = matrix_axes(spec.axes)
    return found is not None and found[0] != "V"


def muon_axes(spec: ParameterSpec) -> optax.contrib.MuonDimensionNumbers | None:
    """Returns the axes of a matrix that Muon makes orthogonal; None for what AdamW updates.

    Those are vectors, the embedding and the head (Moonlight, section 2.2).
    """
    found = _matrix_axes(spec)
    if found is None or "V" in spec.axes:
        return None
    return optax.contrib.MuonDimensionNumbers(*found)


def moment_axes(moments: Any, specs: Any) -> Any:
    """Returns the axes of each array of an optimizer's state, a letter per axis, as strings.

    `moments` are the state as shapes. An array belongs to the parameter whose path ends its own. A
    factored moment lacks the inputs or the outputs of a matrix; counters have "".
    """
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    by_path = {tuple(path): spec for path, spec in leaves}

    def axes(path: Any, leaf: Any) -> str:
        ends = (by_path.get(tuple(path[start:])) for start in range(len(path)))
        spec = next((spec for spec in ends if spec is not None), None)
        if spec is None:
            return ""
        sizes, lacking = dict(zip(spec.axes, spec.shape, strict=True)), matrix_axes(spec.axes) or ()
        kept = ("".join(each for each in spec.axes if each not in lost) for lost in ("", *lacking))
        return next(
            letters for letters in kept if leaf.shape == tuple(sizes[each] for each in letters)
        )

    return jax.tree_util.tree_map_with_path(axes, moments)


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """Returns the learning rate of RL step `step` (from 0): linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    falling = max(1, num_steps - config.warmup_steps)
    first, last = config.learning_rate, config.final_learning_rate
    schedule = {
        "constant": optax.constant_schedule(first),
        "linear": optax.linear_schedule(first, last, falling),
        # Not optax's `alpha`, the ratio of the two: a rate of 0 is allowed.
        "cosine": lambda count: last + optax.cosine_decay_schedule(first - last, falling)(count),
    }[config.schedule]
    return float(np.asarray(schedule(step - config.warmup_steps)))


def critic_learning_rate(config: TrainConfig, step: int) -> float:
    """Returns the critic's learning rate of RL step `step`: linear warm-up, then constant."""
    return config.critic.learning_rate * min(1.0, (step + 1) / (config.warmup_steps + 1))


def entropy_coefficient(config: TrainConfig, step: int, num_steps: int) -> float:
    """Returns the entropy bonus of RL step `step`: linear from the first value to the last."""
    schedule = optax.linear_schedule(
        config.entropy_coefficient, config.final_entropy_coefficient, max(1, num_steps - 1)
    )
    return float(np.asarray(schedule(step)))
