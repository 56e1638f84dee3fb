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
import numpy as np
import optax

from earl_jax.models.parameters import ParameterSpec, is_spec
from earl_jax.train.config import TrainConfig

# Letters that count matrices: layers and experts.
_STACKED = "LE"
# Single letters that are the inputs of a matrix: all others before the last letter are (heads).
_INPUTS = "DFRV"
# Root mean square of a Muon update, that of AdamW's (Moonlight, arXiv 2502.16982, section 2.2), so
# that both have learning rates of one size.
_MUON_RMS = 0.2


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
            scale = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
        case "muon":
            scale = _muon(specs, adam, dtype)
    decays = jax.tree.map(is_decayed, specs, is_leaf=is_spec)
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        scale,
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )


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


def is_decayed(spec: ParameterSpec) -> bool:
    """Returns True if weight decay applies: to matrices, not to norms, biases and embeddings."""
    found = matrix_axes(spec.axes)
    return found is not None and found[0] != "V"


def muon_axes(spec: ParameterSpec) -> optax.contrib.MuonDimensionNumbers | None:
    """Returns the axes of a matrix that Muon makes orthogonal; None for what AdamW updates.

    Those are vectors, the embedding and the head (Moonlight, section 2.2).
    """
    found = matrix_axes(spec.axes)
    if found is None or "V" in spec.axes:
        return None
    inputs, outputs = (tuple(map(spec.axes.index, letters)) for letters in found)
    return optax.contrib.MuonDimensionNumbers(inputs, outputs)


def moment_axes(moments: Any, specs: Any) -> Any:
    """Returns the axes of each array of an optimizer's state, a letter per axis, as strings.

    `moments` are the state as shapes. An array belongs to the parameter whose path ends its own. A
    factored moment lacks one of the parameter's axes; counters and placeholders have "".
    """
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    by_path = {tuple(path): spec for path, spec in leaves}

    def axes(path: Any, leaf: Any) -> str:
        ends = (by_path.get(tuple(path[start:])) for start in range(len(path)))
        spec = next((spec for spec in ends if spec is not None), None)
        if spec is None:
            return ""
        kept = [(spec.shape, spec.axes)] + [
            (spec.shape[:at] + spec.shape[at + 1 :], spec.axes[:at] + spec.axes[at + 1 :])
            for at in range(len(spec.shape))
        ]
        return next((letters for shape, letters in kept if shape == leaf.shape), "")

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
