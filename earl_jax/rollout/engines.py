# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Engines of a run: one for each rollout mesh and number of slots, made when it is first used."""

import dataclasses
import functools

from earl_jax.engine.engine import Engine
from earl_jax.engine.pages import Pool
from earl_jax.launch.cluster import Cluster
from earl_jax.launch.layouts import Layouts
from earl_jax.models.config import ModelConfig
from earl_jax.rollout.config import RolloutConfig, make_engine_config
from earl_jax.sharding.layout import MeshShape


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Engines:
    """Makes this process's engines, and the page pools of their rollouts.

    `rollout` are the settings of all processes' rollout; `end_of_turn_ids` end a turn, and
    `choice_branches` bounds the tree of choices of a turn (0: none), and `choice_width` the tokens
    that one of it is chosen among. `batches` steps' episodes have rows at once.
    """

    rollout: RolloutConfig
    model: ModelConfig
    vocab_size: int
    cluster: Cluster
    layouts: Layouts
    seed: int
    model_logprobs: bool
    end_of_turn_ids: tuple[int, ...]
    choice_branches: int = 0
    choice_width: int = 0
    batches: int = 1

    def engine(self, shape: MeshShape, num_slots: int | None = None) -> Engine:
        """Returns the engine on this rollout mesh; `num_slots` of all processes, None: all."""
        return self._engine(shape, num_slots or self.rollout.num_slots)

    @functools.cache  # noqa: B019 - lives as long as the run
    def _engine(self, shape: MeshShape, num_slots: int) -> Engine:
        parts = self.cluster.num_parts(shape)
        own = self.rollout.part(parts)
        config = make_engine_config(
            dataclasses.replace(own, num_slots=num_slots // parts),
            self.model,
            self.vocab_size,
            num_devices=self.cluster.num_row_devices(parts),
            seed=self.seed,
            model_logprobs=self.model_logprobs,
            batches=self.batches,
        )
        rules = config.rules._replace(
            end_of_turn_ids=self.end_of_turn_ids,
            choice_branches=self.choice_branches,
            choice_width=self.choice_width,
        )
        return Engine(dataclasses.replace(config, rules=rules), self.layouts.engine(shape))

    def pool(self, shape: MeshShape, pages: int) -> Pool:
        """Returns a pool of so many pages a row shard, for an engine's part of a rollout."""
        return Pool(self.cluster.own_mesh(shape).data, pages)
