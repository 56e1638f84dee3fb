# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Trajectories and outcomes with given rewards."""

from earl_jax.trajectory import Outcome, Trajectory, Turn


def make_trajectory(
    episode, turn_rewards, *, group=0, role="x", stop_reason="win", turn_roles=()
) -> Trajectory:
    """A prompt, then per reward one reply of two tokens and an answer of three."""
    turns = [Turn(author="environment", text="", token_ids=(9, 8))]
    for _ in turn_rewards:
        turns.append(Turn(author="policy", text="", token_ids=(4, 2)))
        turns.append(Turn(author="environment", text="", token_ids=(9, 5, 8)))
    return Trajectory(
        episode=episode,
        group=group,
        role=role,
        turns=tuple(turns),
        turn_rewards=tuple(turn_rewards),
        stop_reason=stop_reason,
        row=0,
        turn_roles=turn_roles,
    )


def make_outcome(episode: int = 0, reward: float = 1.0, **fields) -> Outcome:
    """An episode of one turn and 9 tokens, of which the policy sampled 4."""
    given = {
        "group": 0, "role": "x", "turn_rewards": (reward,), "stop_reason": "win", "num_turns": 1,
        "num_tokens": 9, "num_policy_tokens": 4, "sample_starts": (0,), "versions": ((0, 4),),
    }  # fmt: skip
    return Outcome(episode=episode, **(given | fields))
