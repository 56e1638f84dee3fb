# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Summaries of evaluations of a fixed set of tasks."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from earl_jax.envs.environment import STOPPED
from earl_jax.telemetry.episodes import failures_of
from earl_jax.trajectory import FAILURES, Outcome, Trajectory, mean_metrics


def summarize(
    episodes: Sequence[Trajectory | Outcome], name: str, plural: str = "episodes", samples: int = 1
) -> dict[str, Any]:
    """Returns their number, mean reward and turns, and the means of what environments reported.

    And the fraction of episodes for each limit that cut them, such as turn_too_long. All means are
    over the episodes that did not fail (FAILURES), and are not there where all did. Where some
    failed, `failed_share` is their share of all, and `failure` their most frequent reason. The
    number of all is there under `plural`, such as "games", too. Each `samples` episodes in a row
    are of one task: with several there is the mean of `best_of` too.
    """
    own: dict[str, Any] = {"name": name, "episodes": len(episodes), plural: len(episodes)}
    whole = [episode for episode in episodes if episode.stop_reason not in FAILURES]
    found: dict[str, Any] = {}
    if whole:
        reasons = [episode.stop_reason for episode in whole]
        own["reward_mean"] = float(np.mean([episode.reward for episode in whole]))
        own["turns_mean"] = float(np.mean([episode.num_turns for episode in whole]))
        found |= mean_metrics(whole)
        found |= {word: reasons.count(word) / len(whole) for word in STOPPED if word in reasons}
    failures = failures_of(episodes)
    if failures.reasons:
        own |= {"failed_share": failures.share, "failure": failures.reasons[0]}
    if samples > 1:
        tasks = [episodes[i : i + samples] for i in range(0, len(episodes), samples)]
        rewards = [[e.reward for e in each if e.stop_reason not in FAILURES] for each in tasks]
        sizes = [size for size in (2**power for power in range(1, 31)) if size < samples]
        best = {f"reward_best_of_{n}": best_of(rewards, n) for n in (*sizes, samples)}
        own |= {name: mean for name, mean in best.items() if mean is not None}
    return own | {key: value for key, value in found.items() if key not in own}


def best_of(rewards: Sequence[Sequence[float]], size: int) -> float | None:
    """Returns the mean over tasks of the expected best reward of `size` of their samples.

    Over the tasks that have so many; None: none has. Without bias, over all choices of `size` of a
    task's samples. For rewards of 0 and 1 this is pass@k of arXiv 2107.03374, eq. 1.
    """
    means = [np.sort(each) @ _best_shares(len(each), size) for each in rewards if len(each) >= size]
    return float(np.mean(means)) if means else None


@functools.cache
def _best_shares(num_samples: int, size: int) -> np.ndarray:
    """Returns the share of all choices of `size` samples in which each of them is the best.

    Of the sorted samples the i-th (from 1) is the best of C(i - 1, size - 1) of C(S, size) choices.
    """
    total = math.comb(num_samples, size)
    return np.array([math.comb(i, size - 1) / total for i in range(num_samples)])


def why_no_means(evaluation: Mapping[str, Any]) -> str:
    """Returns a sentence for an evaluation whose episodes all failed; "" for others."""
    if evaluation.get("failed_share") != 1:
        return ""
    return f"no means: all {evaluation['episodes']} episodes failed, as {evaluation['failure']}"


def rating_of(evaluation: Mapping[str, Any]) -> float | None:
    """Returns what the best checkpoints have most of: the mean reward; None where there is none.

    Of an evaluation that played nothing it is the held-out loss, negative.
    """
    if "episodes" in evaluation:
        return evaluation.get("reward_mean")
    loss = evaluation.get("sft_loss", math.nan)
    return -loss if math.isfinite(loss) else None
