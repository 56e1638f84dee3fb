# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Trajectories with given rewards."""

from earl_jax.trajectory import Trajectory, Turn


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
