# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Summaries of evaluations of a fixed set of tasks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from earl_jax.envs.environment import STOPPED
from earl_jax.telemetry.episodes import failures_of
from earl_jax.trajectory import Outcome, Trajectory, mean_metrics


def summarize(
    episodes: Sequence[Trajectory | Outcome], name: str, plural: str = "episodes", samples: int = 1
) -> dict[str, Any]:
    """Returns their number, mean reward and turns, and the means of what environments reported.

    And the fraction of episodes for each reason that is not the environment's, such as
    turn_too_long; and as `failure` the most frequent reason of those that failed, whose rewards are
    part of the mean. Their number is there under `plural`, such as "games", too. Each `samples`
    episodes in a row are of one task: with several there is the mean of `best_of` too.
    """
    reasons = [episode.stop_reason for episode in episodes]
    stopped = {reason: reasons.count(reason) / len(reasons) for reason in STOPPED}
    own = {
        "name": name,
        "episodes": len(episodes),
        plural: len(episodes),
        "reward_mean": float(np.mean([episode.reward for episode in episodes])),
        "turns_mean": float(np.mean([episode.num_turns for episode in episodes])),
    }
    if samples > 1:
        rewards = np.array([episode.reward for episode in episodes]).reshape(-1, samples)
        sizes = [size for size in (2**power for power in range(1, 31)) if size < samples]
        own |= {f"reward_best_of_{n}": best_of(rewards, n) for n in (*sizes, samples)}
    found: dict[str, Any] = {**mean_metrics(episodes)}
    found |= {word: part for word, part in stopped.items() if part}
    if failures := failures_of(episodes).reasons:
        found["failure"] = failures[0]
    return own | {key: value for key, value in found.items() if key not in own}


def best_of(rewards_TS: np.ndarray, size: int) -> float:
    """Returns the mean over tasks of the expected best reward of `size` of their samples.

    Without bias, over all choices of so many of the S samples of each of T tasks: of the sorted
    samples the i-th (from 1) is the best of C(i - 1, size - 1) of C(S, size) choices. For rewards
    of 0 and 1 this is pass@k of arXiv 2107.03374, eq. 1.
    """
    num_samples = rewards_TS.shape[1]
    total = math.comb(num_samples, size)
    shares = [math.comb(i, size - 1) / total for i in range(num_samples)]
    return float(np.mean(np.sort(rewards_TS, axis=1) @ np.array(shares)))


def rating_of(evaluation: Mapping[str, Any]) -> float | None:
    """Returns what the best checkpoints have most of: the mean reward; None where there is none.

    Of an evaluation that played nothing it is the held-out loss, negative.
    """
    if "reward_mean" in evaluation:
        return evaluation["reward_mean"]
    loss = evaluation.get("sft_loss", math.nan)
    return -loss if math.isfinite(loss) else None
