# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Stages: the parts of a run that a placement acts on, and the programs of plans."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from earl_jax.config.config import Config
from earl_jax.dispatch.packing import Shape
from earl_jax.launch.cluster import Cluster
from earl_jax.launch.layouts import Layouts
from earl_jax.models.checkpoints.hf_read import Checkpoint
from earl_jax.models.config import ModelConfig
from earl_jax.rollout.config import RolloutConfig
from earl_jax.rollout.engines import Engines
from earl_jax.selector.memory import program_bytes, unless_out_of_memory
from earl_jax.selector.plans import Plan, RolloutPlan, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.sharding.layout import Layout, MeshShape
from earl_jax.train.learner import Learner
from earl_jax.train.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stages:
    """Rollout and training of a run, and the problem of placing them.

    `feeds_table`: real steps feed the throughput table. Conversations to learn from have up to
    `example_tokens` tokens, those that are held out `held_out_tokens`; 0: there are none.
    """

    problem: Problem
    cluster: Cluster
    layouts: Layouts
    engines: Engines
    learner: Learner
    rollout: RolloutConfig
    feeds_table: bool = False
    example_tokens: int = 0
    held_out_tokens: int = 0

    def pool(self, plan: RolloutPlan) -> Any:
        """Returns the page pool of this process's part of a rollout."""
        return self.engines.pool(plan.mesh, plan.pages)

    def spread_shardings(self, devices: Sequence[Any]) -> TrainState:
        """Returns shardings of a TrainState that is cut over these devices, for files."""
        return self.learner.spread_over(
            devices, lambda shape: self.problem.weights_obstacle(shape) is None
        )

    @property
    def saved_shardings(self) -> TrainState | None:
        """The shardings of a saved TrainState; None if it is saved as it is placed."""
        return None if self.cluster.all_train else self.spread_shardings(self.cluster.devices)


def make_learner(
    config: Config,
    model: ModelConfig,
    vocab_size: int,
    layout: Callable[[MeshShape], Layout],
    checkpoint: Checkpoint | None = None,
    *,
    trains: bool = True,
    choice_width: int = 0,
) -> Learner:
    """Returns the trainer of a run of this config, or of a plan for one; arguments as `Learner`'s.

    Raises ValueError for adapters that this model cannot have.
    """
    return Learner(
        model,
        config.train,
        config.make_algorithm(),
        vocab_size=vocab_size,
        temperature=config.train_temperature,
        importance_cap=config.importance_cap,
        has_versions=config.asynchrony.max_staleness > 0,
        networks=config.networks,
        layout=layout,
        seed=config.seed,
        checkpoint=checkpoint,
        trains=trains,
        choice_width=choice_width,
    )


def lower_round(stages: Stages, plan: RolloutPlan, max_tokens: int) -> Any:
    """Lowers a round of the rollout with rows of `max_tokens` tokens."""
    engine = stages.engines.engine(plan.mesh, plan.num_slots)
    return engine.lower_play(max_tokens, stages.pool(plan))


def lower_update(stages: Stages, plan: TrainPlan, length: int, shape: Shape | None = None) -> Any:
    """Lowers an update of episodes of up to `length` tokens; `shape` None: a row for each."""
    rows, length = shape or Shape(stages.rollout.episodes_per_step, length)
    return stages.learner.lower(plan, rows, length)


def compiled_bytes(stages: Stages, plan: Plan, tokens: int) -> int | None:
    """Compiles a plan's program; returns its bytes per device to all, None if too many."""
    processes, own = stages.cluster, 0

    def compiled() -> int:
        lower = lower_round if plan.stage == "rollout" else lower_update
        return program_bytes(lower(stages, plan, tokens).compile())  # pyright: ignore

    if processes.plays if plan.stage == "rollout" else processes.trains:
        own = unless_out_of_memory(compiled)
    each = processes.gather(own, f"the bytes of {plan.words()}")
    return None if None in each else max(each)
