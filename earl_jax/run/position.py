# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The position of a run: what it goes on from behind a step."""

import dataclasses
from collections.abc import Mapping

from earl_jax.rollout.open_episodes import OpenEpisode
from earl_jax.telemetry.load import LoadHistory
from earl_jax.train.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """The state of a run after `step` RL steps: its weights, and its history of the load.

    In the last `failed_steps` steps every episode failed, and the updates of the last
    `skipped_steps` were all skipped (`TrainConfig`), where it was read from a checkpoint. The tasks
    of the `open_groups` were begun and not trained on, in an asynchronous run, and the source goes
    on with those of `oldest_step`; None: of the oldest open group, or else of the next step.
    `averages` are the algorithm's (`Algorithm.averages`). `lengths` are the last ones of tasks in a
    run with config.rollout.order "longest" (`rollout.scheduler.next_lengths`). `open_episodes` have
    what this process's episodes of open groups had then, by number; those of all processes where it
    was read.
    """

    step: int
    state: TrainState
    history: LoadHistory
    failed_steps: int = 0
    skipped_steps: int = 0
    open_groups: tuple[int, ...] = ()
    open_episodes: Mapping[int, OpenEpisode] = dataclasses.field(default_factory=dict)
    oldest_step: int | None = None
    averages: Mapping[str, float] = dataclasses.field(default_factory=dict)
    lengths: Mapping[int, int] = dataclasses.field(default_factory=dict)
