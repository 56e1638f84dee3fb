# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluation games: the policy plays a fixed set, half on each side, and nothing is learnt."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from earl_jax.envs.environment import DRAW, ILLEGAL, LOSS, WIN
from earl_jax.loop import Position, expected_tokens, play_all
from earl_jax.placement.placement import Placement
from earl_jax.rollout.episode import Task
from earl_jax.trajectory import Outcome, Trajectory, outcome_fractions
from earl_jax.world import World


def evaluate(
    world: World, placement: Placement, position: Position, *, games: int
) -> dict[str, Any]:
    """Plays the first `games` evaluation games with the newest weights.

    Returns:
        The fractions for metrics.jsonl.
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
    return summarize(outcomes, world.config.env.title)


def summarize(trajectories: Sequence[Trajectory | Outcome], name: str) -> dict[str, Any]:
    """Fractions by outcome over all games and by side; "win", "draw", "loss", "illegal" always."""
    fractions = dict.fromkeys((WIN, DRAW, LOSS, ILLEGAL), 0.0) | outcome_fractions(trajectories)
    sides = {
        f"{WIN}_as_{role}": float(
            np.mean([t.stop_reason == WIN for t in trajectories if t.role == role])
        )
        for role in sorted({t.role for t in trajectories if t.role})
    }
    return {
        "name": name,
        "games": len(trajectories),
        **fractions,
        **sides,
        "reward_mean": float(np.mean([t.reward for t in trajectories])),
        "turns_mean": float(np.mean([t.num_turns for t in trajectories])),
    }
