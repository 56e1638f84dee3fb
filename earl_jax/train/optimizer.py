# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The optimiser (optax) and what changes from step to step: learning rate and entropy bonus."""

import numpy as np
import optax

from earl_jax.train.config import TrainConfig


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns clipped Adam(W) of learning rate 1; the step multiplies by its RL step's rate.

    The rate is not part of the optimiser because it follows RL steps, and one RL step may make
    several updates.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(b1=config.adam_b1, b2=config.adam_b2),
        optax.add_decayed_weights(config.weight_decay),
    )


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
