# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Summaries of evaluations of a fixed set of tasks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from earl_jax.envs.environment import STOPPED
from earl_jax.trajectory import Outcome, Trajectory, mean_metrics


def summarize(
    episodes: Sequence[Trajectory | Outcome], name: str, plural: str = "episodes"
) -> dict[str, Any]:
    """Returns their number, mean reward and turns, and the means of what environments reported.

    And the fraction of episodes for each reason that is not the environment's, such as
    turn_too_long. Their number is there under `plural`, such as "games", too.
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
    found = mean_metrics(episodes) | {word: part for word, part in stopped.items() if part}
    return own | {key: value for key, value in found.items() if key not in own}


def rating_of(evaluation: Mapping[str, Any]) -> float | None:
    """Returns what the best checkpoints have most of: the mean reward; None where there is none.

    Of an evaluation that played nothing it is the held-out loss, negative.
    """
    if "reward_mean" in evaluation:
        return evaluation["reward_mean"]
    loss = evaluation.get("sft_loss", math.nan)
    return -loss if math.isfinite(loss) else None
