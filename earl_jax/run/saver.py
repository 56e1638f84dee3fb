# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Saving of a run: its checkpoints, the episodes that are open beside them, and its exports."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from earl_jax.models.fingerprint import fingerprint
from earl_jax.placement.placement import Placement
from earl_jax.rollout.evaluation import rating_of
from earl_jax.rollout.open_episodes import drop_episodes, write_episodes
from earl_jax.run.build import Run
from earl_jax.run.position import Position
from earl_jax.telemetry.recorder import Recorder
from earl_jax.train.checkpoint import Checkpoints
from earl_jax.train.export import Exporter, keep_exports
from earl_jax.train.saved_state import copy_to_save


@dataclasses.dataclass(kw_only=True, eq=False)
class Saver:
    """Saves and exports positions of a run. Every process has one."""

    run: Run
    placement: Placement
    recorder: Recorder
    checkpoints: Checkpoints
    workdir: Path

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
        # While this one is written a killed run goes on from the one before, whatever is kept.
        before, rules = self.checkpoints.steps(), run.config.asynchrony.episode_rules
        if run.config.asynchrony.is_on and run.cluster.plays:
            write_episodes(workdir, step, run.cluster.index, position.open_episodes, rules)
        self.placement.events.sync()
        rating = None
        if run.config.checkpoint.keep_best:
            own = rating_of(self.recorder.evaluation(step) or {})
            rating = run.cluster.gather(own, "the newest evaluation")[0]
        save(run, self.placement, self.checkpoints, position, choices, rating)
        if run.cluster.is_first:
            drop_episodes(workdir, [*before, step])
        return time.perf_counter() - start_s

    def export(self, position: Position) -> None:
        """Exports the position's policy, if config.checkpoint.export wants it."""
        for folder in export_policy(self.run, self.workdir, position):
            self.recorder.note(f"exported {folder}")


def choices_of(run: Run, placement: Placement) -> dict[str, Any]:
    """Returns what a step changes before it has ended: its plans, and the state of the tasks."""
    return {"placement": placement.as_dict(), **run.tasks.state()}


def save(
    run: Run,
    placement: Placement,
    checkpoints: Checkpoints,
    position: Position,
    choices: dict[str, Any] | None = None,
    rating: float | None = None,
) -> None:
    """Saves all that a run needs to go on as if it had never stopped; every process calls it.

    `choices` are those of the position (`choices_of`), where a step was begun since; None: those of
    now. `rating` is the mean reward of its evaluation; None: there is none.
    """
    # Before programs of all processes, whose end is waited for without a limit.
    run.cluster.barrier("a checkpoint")
    base = position.state.base
    prints: list[int | None] = []
    if base is not None:
        own = int(fingerprint(base)) if run.cluster.trains else None
        prints = [each for each in run.cluster.gather(own, "the base") if each is not None]
    state, is_copy = copy_to_save(position.state, run.stages.saved_shardings)
    checkpoints.save(
        position.step,
        state,
        {
            **(choices or choices_of(run, placement)),
            "history": position.history.as_list(),
            "throughput": placement.table.as_dict(),
            "failed_steps": position.failed_steps,
            "open_groups": list(position.open_groups),
            "oldest_step": position.oldest_step,
            "averages": dict(position.averages),
            # Pairs, whose order is kept.
            "lengths": list(position.lengths.items()),
            "played": sorted(placement.played),
            **({"base_fingerprint": prints[0]} if prints else {}),
        },
        rating,
    )
    if not is_copy:
        # The next step donates these arrays.
        checkpoints.wait()


def export_policy(run: Run, workdir: Path, position: Position) -> list[Path]:
    """Exports the position's policy, if config.checkpoint.export wants it. Returns the folders."""
    config = run.config
    wanted, at_end = config.checkpoint.export, position.step == config.num_steps
    if wanted == "auto":
        wanted = at_end and config.model.path != ""
    if not wanted:
        return []
    state = run.judged_state(position.state)
    folders = exporter_of(run).export(state, workdir / "export", position.step)
    if run.cluster.is_first:
        keep_exports(workdir, newest=config.checkpoint.keep)
    return folders


def exporter_of(run: Run) -> Exporter:
    """Returns the writer of this run's policies."""
    return Exporter(
        cluster=run.cluster,
        learner=run.learner,
        tokenizer=run.origin.tokenizer,
        spread=run.stages.spread_shardings,
        path=run.config.model.path,
        max_positions=run.config.rollout.context_buckets[-1],
    )
