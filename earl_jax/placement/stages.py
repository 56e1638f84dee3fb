# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Stages: the parts of a run that a placement acts on."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from earl_jax.launch.cluster import Cluster
from earl_jax.launch.layouts import Layouts
from earl_jax.rollout.config import RolloutConfig
from earl_jax.rollout.engines import Engines
from earl_jax.selector.plans import RolloutPlan
from earl_jax.selector.problem import Problem
from earl_jax.train.learner import Learner
from earl_jax.train.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stages:
    """Rollout and training of a run, and the problem of placing them.

    `feeds_table`: real steps feed the throughput table. A move under way holds `chunk_bytes` of a
    device; None: all of it at once.
    """

    problem: Problem
    cluster: Cluster
    layouts: Layouts
    engines: Engines
    learner: Learner
    rollout: RolloutConfig
    feeds_table: bool = False
    chunk_bytes: int | None = None

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
