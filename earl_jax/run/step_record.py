# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The records of steps: what they played and learnt, and their lines of metrics."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from earl_jax.rollout.results import Played
from earl_jax.rollout.stats import RolloutStats
from earl_jax.selector.plans import RolloutPlan
from earl_jax.telemetry.episodes import Failures, failures_of
from earl_jax.telemetry.load import Load
from earl_jax.telemetry.metrics import Metrics
from earl_jax.trajectory import (
    FAILURES,
    Experience,
    Outcome,
    Trajectory,
    TrajectoryBatch,
    mean_metrics,
)

# Metrics of a step's first epoch: with one update, measured before it has changed the policy.
_OF_FIRST_EPOCH = ("entropy", "logprob_mismatch_mean", "logprob_mismatch_max")
# Those of its first update, of asynchronous runs: any later one has changed the policy.
_OF_FIRST_UPDATE = ("kept_kv_gap_mean", "kept_kv_gap_max")
# Metrics of an update that say something of examples that nobody sampled.
_OF_UPDATE = (
    "loss", "entropy", "policy_tokens", "grad_norm",
    "balance_loss", "expert_load_max", "expert_load_entropy",
)  # fmt: skip


@dataclasses.dataclass(kw_only=True)
class PlayedStep:
    """A step's episodes: this process's (None where it plays nothing), and those of all.

    They were played with `plan`, in rows of `max_tokens` tokens. Row i of `experience` is that of
    `trajectories[i]`; rows of zeros may follow (`RowOrder`). Of processes that play together only
    the first has trajectories. Where the episodes went to the trainer as they were finished, there
    is no experience.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The record of one step, of all processes; `trajectories` and times are this process's.

    `trained` are those of the `outcomes` that were trained on. Their tokens of policies before the
    `oldest_version` are beyond the bound; with `masks_overdue` they were left out. `updates` are
    the metrics of the updates from the step's batch; supervised ones are apart. The `batches` of
    the update are kept where one was skipped.
    """

    step: int
    trajectories: list[Trajectory]
    outcomes: list[Outcome]
    trained: list[Outcome]
    oldest_version: int
    masks_overdue: bool
    sampling_kl: float | None
    stats: RolloutStats
    load: Load
    rollout_mesh: str
    rollout_max_tokens: int
    learning_rate: float
    entropy_coefficient: float
    updates: list[Metrics]
    num_epochs: int
    sft_updates: list[Metrics]
    batches: list[TrajectoryBatch]
    packing_fill: float
    is_streamed: bool
    dispatch_bytes: int
    dispatch_host_bytes: int | None
    publish_bytes: int
    publish_host_bytes: int | None
    stage_s: dict[str, float]
    group_shares: dict[str, float]
    dropped: list[Outcome]
    refilled: list[Outcome]
    num_reused: int

    @property
    def failures(self) -> Failures:
        """The episodes that failed, of all processes."""
        return failures_of(self.outcomes)

    def metrics(self) -> dict[str, Any]:
        """Returns its part of a line of metrics.jsonl."""
        outcomes, load, stage_s = self.outcomes, self.load, self.stage_s
        failures = self.failures
        whole = [outcome.reward for outcome in outcomes if outcome.stop_reason not in FAILURES]
        train_tokens = sum(o.num_tokens for o in self.trained) * self.num_epochs
        in_epoch = len(self.updates) // self.num_epochs
        first, last = of_epoch(self.updates[:in_epoch]), of_epoch(self.updates[-in_epoch:])
        return {
            "step": self.step,
            "reward_mean": np.mean(whole) if whole else None,
            "reward_std": np.std(whole) if whole else None,
            "episodes": len(outcomes),
            "failed_share": failures.share,
            "failure": failures.reasons[0] if failures.reasons else None,
            **self.group_shares,
            "env": mean_metrics(outcomes) or None,
            "turns_mean": np.mean([o.num_turns for o in outcomes]),
            "context_tokens_mean": load.context_tokens_mean,
            "context_tokens_max": max(o.num_tokens for o in outcomes),
            "rollout_tokens_per_s": (
                load.rollout_tokens / (stage_s["rollout"] + stage_s.get("overlap", 0.0))
            ),
            **self.stats.metrics(),
            "train_tokens": train_tokens,
            # The stage of a batch in parts is what was left when the last one came.
            "train_tokens_per_s": None if self.is_streamed else train_tokens / stage_s["train"],
            "packing_fill": self.packing_fill,
            "stage_s": stage_s,
            "rollout_mesh": self.rollout_mesh,
            "rollout_max_tokens": self.rollout_max_tokens,
            "dispatch_bytes": self.dispatch_bytes,
            "dispatch_host_bytes": self.dispatch_host_bytes,
            "publish_bytes": self.publish_bytes,
            "publish_host_bytes": self.publish_host_bytes,
            "sampling_kl": self.sampling_kl,
            **lag_metrics(
                self.step - 1, self.trained, self.oldest_version, masks=self.masks_overdue
            ),
            **dropped_metrics(self.dropped),
            "refilled_groups": len({outcome.group for outcome in self.refilled}) or None,
            "reused_groups": self.num_reused or None,
            **last,
            **{name: first[name] for name in _OF_FIRST_EPOCH},
            **{n: self.updates[0][n] for n in _OF_FIRST_UPDATE if n in self.updates[0]},
            "learning_rate": self.learning_rate,
            "entropy_coefficient": self.entropy_coefficient,
            "skipped_updates": self.skipped_updates,
            "sft_loss": self.sft_updates[-1]["loss"] if self.sft_updates else None,
        }

    @property
    def skipped_updates(self) -> int:
        """The number of updates that were skipped, because they were not finite."""
        return count_skipped(self.updates + self.sft_updates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedRecord:
    """The record of one supervised step, of all processes; times are this process's.

    `lengths` are the tokens of its examples; the `batches` are kept where the update was skipped.
    """

    step: int
    lengths: list[int]
    updates: list[Metrics]
    batches: list[TrajectoryBatch]
    learning_rate: float
    packing_fill: float
    stage_s: dict[str, float]

    def metrics(self) -> dict[str, Any]:
        """Returns its part of a line of metrics.jsonl."""
        tokens, update = sum(self.lengths), self.updates[0]
        return {
            "step": self.step,
            "context_tokens_mean": float(np.mean(self.lengths)),
            "context_tokens_max": max(self.lengths),
            "train_tokens": tokens,
            "train_tokens_per_s": tokens / self.stage_s["train"],
            "packing_fill": self.packing_fill,
            "stage_s": self.stage_s,
            **{name: update[name] for name in _OF_UPDATE if name in update},
            "learning_rate": self.learning_rate,
            "skipped_updates": self.skipped_updates,
        }

    @property
    def skipped_updates(self) -> int:
        """The number of updates that were skipped, because they were not finite."""
        return count_skipped(self.updates)


def of_epoch(updates: Sequence[Metrics]) -> Metrics:
    """Returns the metrics of an epoch: means over the tokens of its updates, and maxima.

    `policy_tokens` are those of all its updates.
    """
    if len(updates) == 1:
        return updates[0]
    tokens = [update["policy_tokens"] for update in updates]
    # Of updates without a token, which have learnt nothing, each counts alike.
    weights = tokens if any(tokens) else None
    names = {name: [update[name] for update in updates] for name in updates[0]}
    means = {
        name: max(values) if name.endswith("_max") else float(np.average(values, weights=weights))
        for name, values in names.items()
    }
    return means | {"policy_tokens": sum(tokens)}


def count_skipped(updates: Sequence[Metrics]) -> int:
    """Returns how many updates were skipped, because they were not finite."""
    return int(sum(each["skipped_updates"] for each in updates))


def lag_metrics(
    version: int, trained: Sequence[Outcome], oldest: int, *, masks: bool
) -> dict[str, Any]:
    """Returns how many versions the policy of `version` is ahead of who sampled what it trains on.

    `staleness_tokens` has the number of tokens by this lag, from 0 on. `overdue_tokens` are those
    that policies before the version `oldest` sampled; if the step `masks` them their loss is left
    out, and they count nowhere else. No lag of no tokens.
    """
    tokens: collections.Counter[int] = collections.Counter()
    overdue = 0
    for outcome in trained:
        for sampled, number in outcome.versions:
            is_overdue = sampled < oldest
            overdue += number if is_overdue else 0
            tokens[version - sampled] += 0 if is_overdue and masks else number
    tokens = +tokens
    most, number = max(tokens, default=0), tokens.total()
    return {
        "version_lag_max": most if number else None,
        "version_lag_mean": sum(lag * n for lag, n in tokens.items()) / number if number else None,
        "staleness_tokens": [tokens[lag] for lag in range(most + 1)] if number else None,
        "overdue_tokens": overdue or None,
    }


def dropped_metrics(dropped: Sequence[Outcome]) -> dict[str, Any]:
    """Returns what is lost with episodes that were given up because they were too old.

    A mean length that is far from that of the trained ones is a bias.
    """
    lost = [outcome.num_policy_tokens for outcome in dropped]
    return {
        "stale_episodes": len(lost) or None,
        "stale_tokens": sum(lost) or None,
        "stale_tokens_mean": float(np.mean(lost)) if lost else None,
    }
