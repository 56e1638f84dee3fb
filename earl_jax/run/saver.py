# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Saving of a run: its checkpoints, the episodes that are open beside them, and its exports."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from earl_jax.placement.placement import Placement
from earl_jax.rollout.evaluation import rating_of
from earl_jax.rollout.open_episodes import drop_episodes, write_episodes
from earl_jax.run.build import Run
from earl_jax.run.exports import export_policy
from earl_jax.run.position import Position
from earl_jax.run.resumed_episodes import episode_rules
from earl_jax.run.saved_position import save
from earl_jax.telemetry.recorder import Recorder
from earl_jax.train.checkpoint import Checkpoints


@dataclasses.dataclass(kw_only=True, eq=False)
class Saver:
    """Saves and exports positions of a run. Every process has one.

    `sync_events` returns when the events of this process are on its disk; None: it is a synchronous
    run, without any.
    """

    run: Run
    placement: Placement
    recorder: Recorder
    checkpoints: Checkpoints
    workdir: Path
    sync_events: Callable[[], None] | None = None

    def is_due(self, step: int) -> bool:
        """Returns True for steps that are saved: the last, and one every so many."""
        config = self.run.config
        return step == config.num_steps or step % config.checkpoint.every_steps == 0

    def save(self, position: Position, choices: dict[str, Any]) -> float:
        """Saves a checkpoint, and what the open episodes of this process have.

        Returns the seconds that the run waited for it.
        """
        start_s = time.perf_counter()
        run, workdir, step = self.run, self.workdir, position.step
        before: list[int] = []
        if self.sync_events is not None and run.cluster.plays:
            # While this one is written a killed run goes on from the one before, whatever is kept.
            before, rules = self.checkpoints.steps(), episode_rules(run.config)
            write_episodes(workdir, step, run.cluster.index, position.open_episodes, rules)
            self.sync_events()
        rating = None
        if run.config.checkpoint.keep_best:
            own = rating_of(self.recorder.evaluation(step) or {})
            rating = run.cluster.gather(own, "the newest evaluation")[0]
        save(run, self.placement, self.checkpoints, position, choices, rating)
        if self.sync_events is not None and run.cluster.is_first:
            drop_episodes(workdir, [*before, step])
        return time.perf_counter() - start_s

    def export(self, position: Position) -> None:
        """Exports the position's policy, if config.checkpoint.export wants it."""
        for folder in export_policy(self.run, self.workdir, position):
            self.recorder.note(f"exported {folder}")
