# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How much better than expected each turn was: small arithmetic on small host facts.

Every estimator maps rewards to a table f32[N, M]: one advantage per episode and turn (M is at least
the largest number of turns; places behind an episode's last turn are 0). The tokens of a turn share
its advantage; they look it up on the devices, by `turn_ids`.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from earl_jax.train.config import TrainConfig
from earl_jax.trajectory import FAILURES, Trajectory

# Below this deviation a group's rewards count as equal, and nothing is to be learnt from them.
MIN_DEVIATION = 1e-6


def discounted_returns(turn_rewards: Sequence[float], discount: float) -> np.ndarray:
    """Return of each turn: its reward and, discounted once per later turn, those that follow.

    Rewards 0, 0, 1 with discount 0.5 give 0.25, 0.5, 1.
    """
    returns = np.zeros(len(turn_rewards), np.float64)
    following = 0.0
    for turn in reversed(range(len(turn_rewards))):
        following = turn_rewards[turn] + discount * following
        returns[turn] = following
    return returns


def turn_table(rows: Sequence[np.ndarray], num_turns: int) -> np.ndarray:
    """Rows of different lengths as one f32[N, num_turns], zeros behind each row's end."""
    table = np.zeros((len(rows), num_turns), np.float32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


def reinforce(
    turn_rewards: Sequence[Sequence[float]],
    roles: Sequence[Hashable],
    *,
    discount: float,
    normalize: bool,
) -> list[np.ndarray]:
    """REINFORCE with per-turn credit (Williams 1992): return minus a baseline.

    The baseline of a turn is the mean return of all episodes of the batch in the same role at the
    same turn: what a policy can expect from there, on that side. With `normalize`, advantages are
    divided by their standard deviation over the batch.
    """
    returns = [discounted_returns(rewards, discount) for rewards in turn_rewards]
    at_turn: dict[tuple[Hashable, int], list[float]] = {}
    for role, row in zip(roles, returns, strict=True):
        for turn, value in enumerate(row):
            at_turn.setdefault((role, turn), []).append(value)
    baseline = {place: np.mean(values) for place, values in at_turn.items()}
    advantages = [
        np.array([value - baseline[role, turn] for turn, value in enumerate(row)])
        for role, row in zip(roles, returns, strict=True)
    ]
    if normalize and advantages:
        deviation = float(np.std(np.concatenate(advantages)))
        if deviation > MIN_DEVIATION:
            advantages = [row / deviation for row in advantages]
    return advantages


def grpo(
    turn_rewards: Sequence[Sequence[float]], groups: Sequence[Hashable], *, normalize: bool
) -> list[np.ndarray]:
    """Group-relative advantages of the outcome (GRPO, arXiv 2402.03300, section 4.1.2).

    (outcome - mean of its group), divided by the group's standard deviation with `normalize`
    (without: Dr. GRPO, arXiv 2503.20783); every turn of an episode gets the same. A group whose
    outcomes are all equal gets zeros.
    """
    outcomes = [float(sum(rewards)) for rewards in turn_rewards]
    members: dict[Hashable, list[float]] = {}
    for group, outcome in zip(groups, outcomes, strict=True):
        members.setdefault(group, []).append(outcome)
    advantages = []
    for group, outcome, rewards in zip(groups, outcomes, turn_rewards, strict=True):
        deviation = float(np.std(members[group]))
        scale = 1.0 / deviation if normalize and deviation > MIN_DEVIATION else 1.0
        advantage = (outcome - float(np.mean(members[group]))) * scale
        advantages.append(np.full(len(rewards), advantage))
    return advantages


def advantage_table(config: TrainConfig, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """f32[N, M]: the advantage of every episode's turns, by the configured estimator.

    Episodes that their environment failed are not the policy's doing: they get zeros and are no
    part of any baseline. M is a power of two, so that few programs are compiled for it.
    """
    num_turns = max(8, 1 << max(t.num_turns for t in trajectories).bit_length())
    learnable = [t for t in trajectories if t.stop_reason not in FAILURES and t.turn_rewards]
    rewards = [t.turn_rewards for t in learnable]
    if config.advantage == "grpo":
        groups = [t.group for t in learnable]
        rows = grpo(rewards, groups, normalize=config.normalize_advantages)
    else:
        rows = reinforce(
            rewards,
            [t.role for t in learnable],
            discount=config.turn_discount,
            normalize=config.normalize_advantages,
        )
    by_episode = {t.episode: row for t, row in zip(learnable, rows, strict=True)}
    nothing = np.zeros(0)
    return turn_table([by_episode.get(t.episode, nothing) for t in trajectories], num_turns)
