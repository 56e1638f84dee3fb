# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Exports of a run's policy, as checkpoints that `transformers` can read."""

from pathlib import Path

from earl_jax.run.build import Run
from earl_jax.run.position import Position
from earl_jax.train.export import Exporter, keep_exports


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
