# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Outcomes of a rollout that several processes play, gathered so that all know the same facts.

Each process plays its part of the episodes on an engine of its own, and schedules by itself.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from earl_jax.launch.cluster import Cluster
from earl_jax.rollout.actor import Stopped
from earl_jax.rollout.collect import Rollout
from earl_jax.rollout.stats import RolloutStats
from earl_jax.telemetry.metrics import sampling_kl
from earl_jax.trajectory import Outcome


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """A rollout of all processes; the same in each of them.

    `outcomes` are in the order of the tasks, which is that of the rows on the devices; `stats` are
    those of all. `placement` is where the rollout ended (`Placement.as_dict`), in the process that
    needed the longest rows. `sampling_kl` is that of metrics.jsonl.
    """

    outcomes: list[Outcome]
    stats: RolloutStats
    placement: dict[str, Any]
    sampling_kl: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortage:
    """The end of a rollout in one process by a lack of memory, or of meshes for longer episodes.

    Where it `failed`, the devices ran out of memory at `placement` (`Placement.as_dict`).
    `outgrown` is the context bucket that it had come to, 0 where it had not grown.
    """

    words: str
    failed: bool
    placement: dict[str, Any]
    outgrown: int


class RolloutShort(RuntimeError):
    """A rollout ended so in one of several processes. All raise it, with the same shortage."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(shortage.words)
        self.shortage = shortage


def gather_outcomes(
    cluster: Cluster,
    rollout: Rollout | None,
    placement: dict[str, Any],
    shortage: Shortage | None = None,
    stopped: str = "",
) -> Played:
    """Returns the outcomes of all processes; every process calls it when its rollout has ended.

    `rollout` is None in a process that plays nothing, had a `shortage`, or was `stopped` by a
    signal of this name.

    Raises:
        Stopped: some process was stopped.
        RolloutShort: some process had a shortage; of several, the first one's.
    """
    own: Any = None
    if stopped:
        own = {"stopped": stopped}
    elif shortage is not None:
        own = {"shortage": dataclasses.asdict(shortage)}
    elif rollout is not None:
        trajectories = rollout.trajectories
        own = {
            "outcomes": [dataclasses.asdict(trajectory.outcome) for trajectory in trajectories],
            "stats": dataclasses.asdict(rollout.stats),
            "placement": placement,
            "sampling_kl": sampling_kl(trajectories),
            "tokens": sum(trajectory.num_policy_tokens for trajectory in trajectories),
        }
    parts = cluster.of_players(cluster.gather(own, "the end of a rollout"))
    for part in parts:
        if "stopped" in part:
            raise Stopped(part["stopped"])
    for part in parts:
        if "shortage" in part:
            raise RolloutShort(Shortage(**part["shortage"]))
    gaps = [part["sampling_kl"] for part in parts if part["sampling_kl"] is not None]
    weights = [part["tokens"] for part in parts if part["sampling_kl"] is not None]
    return Played(
        outcomes=[_outcome(fields) for part in parts for fields in part["outcomes"]],
        stats=total_stats([RolloutStats(**part["stats"]) for part in parts]),
        placement=max(
            (part["placement"] for part in parts),
            key=lambda where: (where["max_tokens"], where["cache_tokens"]),
        ),
        sampling_kl=float(np.average(gaps, weights=weights)) if gaps else None,
    )


def _outcome(fields: dict[str, Any]) -> Outcome:
    """Returns an outcome from its fields as JSON, in which tuples are lists."""
    tuples = {name: tuple(fields[name]) for name in ("turn_rewards", "turn_roles", "sample_starts")}
    versions = tuple((version, number) for version, number in fields["versions"])
    return Outcome(**{**fields, **tuples, "versions": versions})


def total_stats(parts: Sequence[RolloutStats]) -> RolloutStats:
    """Returns the stats of all processes: sums, but for rounds, longest contexts and times.

    The sum of tokens in flight is an upper bound: the maxima are not at one moment. Of words, such
    as how episodes were preempted, those of the first process that has some count.
    """
    greatest = ("rounds", "context_tokens_max", "env_wait_s", "full_s")

    def total(name: str) -> Any:
        each = [getattr(part, name) for part in parts]
        if isinstance(each[0], str):
            return next(filter(None, each), "")
        return max(each) if name in greatest else sum(each)

    return RolloutStats(**{f.name: total(f.name) for f in dataclasses.fields(RolloutStats)})
