# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Episodes that a step has played, and its record behind its updates."""

import dataclasses

from earl_jax.algorithms.advantages import counted, group_shares
from earl_jax.config.config import Config
from earl_jax.placement.parts import fill_of
from earl_jax.placement.updates import StepUpdate
from earl_jax.rollout.results import Played
from earl_jax.run.step_record import StepRecord, count_skipped
from earl_jax.selector.plans import RolloutPlan
from earl_jax.telemetry.load import Load
from earl_jax.telemetry.metrics import Metrics
from earl_jax.trajectory import Experience, Trajectory


@dataclasses.dataclass(kw_only=True)
class PlayedStep:
    """A step's episodes: this process's (None where it plays nothing), and those of all.

    They were played with `plan`, in rows of `max_tokens` tokens. Row i of `experience` is that of
    `trajectories[i]`; rows of zeros may follow (`RowOrder`). Of processes that play together only
    the first has trajectories. Where the episodes went to the trainer as they were finished, they
    are in the `update`, and there is no experience.
    """

    plan: RolloutPlan
    max_tokens: int
    trajectories: list[Trajectory]
    experience: Experience | None
    played: Played
    load: Load
    publish_bytes: int
    publish_host_bytes: int | None
    dispatch_host_bytes: int | None = 0
    update: StepUpdate | None = None


def record_of(
    config: Config,
    step: int,
    done: PlayedStep,
    update: StepUpdate,
    updates: list[Metrics],
    *,
    ended_on: tuple[str, int],
    host_bytes: tuple[int | None, int | None],
    stage_s: dict[str, float],
) -> StepRecord:
    """Returns the record of the step behind `step` others.

    Of the metrics `updates` the first are those of `update`. The rollout ended on the mesh and in
    the context bucket of `ended_on`. `host_bytes` are those of dispatch and of publishing.
    """
    algorithm, outcomes = update.placement.stages.learner.algorithm, done.played.outcomes
    return StepRecord(
        step=step + 1,
        trajectories=done.trajectories,
        outcomes=outcomes,
        trained=counted(algorithm, outcomes),
        oldest_version=step - config.asynchrony.max_staleness,
        masks_overdue=config.asynchrony.rule == "mask",
        sampling_kl=done.played.sampling_kl,
        stats=done.played.stats,
        load=done.load,
        rollout_mesh=ended_on[0],
        rollout_max_tokens=ended_on[1],
        learning_rate=float(update.controls[0]),
        entropy_coefficient=float(update.controls[1]),
        updates=updates[: update.num_updates],
        num_epochs=config.train.epochs,
        sft_updates=updates[update.num_updates :],
        batches=[part.batch for part in update.parts] if count_skipped(updates) else [],
        packing_fill=fill_of(update.parts),
        is_streamed=done.update is not None,
        dispatch_bytes=sum(part.moved_bytes for part in update.parts),
        dispatch_host_bytes=host_bytes[0],
        publish_bytes=done.publish_bytes,
        publish_host_bytes=host_bytes[1],
        stage_s=stage_s,
        group_shares=group_shares(algorithm, [*outcomes, *done.played.refilled]),
        dropped=done.played.dropped,
        refilled=done.played.refilled,
        num_reused=done.played.num_reused,
    )
