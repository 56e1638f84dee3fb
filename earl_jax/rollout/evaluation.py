# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluation: the policy plays a fixed set of tasks, and nothing is learnt."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from earl_jax.envs.environment import STOPPED
from earl_jax.loop import Position, expected_tokens, play_all
from earl_jax.placement.placement import Placement
from earl_jax.rollout.episode import Task
from earl_jax.trajectory import Outcome, Trajectory, mean_metrics
from earl_jax.world import World


def evaluate(
    world: World, placement: Placement, position: Position, *, games: int
) -> dict[str, Any]:
    """Plays the first `games` evaluation tasks with the newest weights.

    Returns:
        What became of them, for metrics.jsonl (`summarize`).
    """
    load = position.history.recent()
    tasks = world.evaluation_tasks(games)
    rows = world.config.rollout.episodes_per_step
    outcomes: list[Outcome] = []
    for first in range(0, games, rows):

        def attempt(batch: Sequence[Task] = tasks[first : first + rows]) -> list[Outcome]:
            session, _ = placement.sessions.open(
                world.policy(position.state), version=position.step
            )
            sampling = world.config.eval.sampling
            rollout, played = play_all(world, placement, session, batch, load, sampling)
            if rollout:
                # The next batch, and the next step's episodes, are played with the same weights.
                placement.sessions.keep(rollout.session)
            return played.outcomes

        placement.choose_rollout(expected_tokens(world, load), load)
        while (found := placement.attempt("rollout", attempt)) is None:
            placement.choose_rollout(expected_tokens(world, load), load)
        outcomes += found
    env = world.config.env
    return summarize(outcomes, env.title, env.plural)


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
