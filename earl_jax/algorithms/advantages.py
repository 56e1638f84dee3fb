# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Advantages: how much better than expected each turn was, from rewards, on the host in fp64.

Every process has the small facts of all episodes and computes the same table from them; the tokens
of a turn look their advantage up on the devices, by `turn_ids`.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from earl_jax.algorithms.algorithm import Algorithm, Episode
from earl_jax.trajectory import FAILURES

# Values that differ by less than this part of the largest are equal: sums of rewards are rounded.
_EQUAL = 1e-9


class Credit(NamedTuple):
    """Credit of N episodes: flags of those trained on, bool[N], and advantages, f32[N,M].

    Advantages are 0 behind an episode's last turn and where the episode does not count.
    """

    counts: np.ndarray
    advantages: np.ndarray


def assign_credit(algorithm: Algorithm, episodes: Sequence[Episode]) -> Credit:
    """Returns the credit of a batch.

    An episode that its environment failed is not the policy's doing: it counts nowhere. Nor does an
    episode without a rewarded turn, or a group that the algorithm does not keep. M is a power of
    two above the largest number of turns, so that few programs are compiled for it.
    """
    groups: dict[int, list[int]] = {}
    for index, episode in enumerate(episodes):
        if episode.stop_reason not in FAILURES and episode.turn_rewards:
            groups.setdefault(episode.group, []).append(index)
    counts = np.zeros(len(episodes), bool)
    for members in groups.values():
        counts[members] = algorithm.keep_group([episodes[i] for i in members], algorithm.settings)
    num_turns = max(8, 1 << max(episode.num_turns for episode in episodes).bit_length())
    table = np.zeros((len(episodes), num_turns), np.float32)
    counted = [int(index) for index in np.flatnonzero(counts)]
    rows = algorithm.advantages([episodes[i] for i in counted], algorithm.settings)
    for index, row in zip(counted, rows, strict=True):
        table[index, : len(row)] = row
    return Credit(counts=counts, advantages=table)


def discounted_returns(turn_rewards: Sequence[float], discount: float) -> np.ndarray:
    """Returns each turn's reward plus, discounted once per later turn, those that follow.

    Rewards 0, 0, 1 with discount 0.5 give 0.25, 0.5, 1.
    """
    returns = np.zeros(len(turn_rewards), np.float64)
    following = 0.0
    for turn in reversed(range(len(turn_rewards))):
        following = turn_rewards[turn] + discount * following
        returns[turn] = following
    return returns


def centred(values: Sequence[float]) -> np.ndarray:
    """Returns the values minus their mean; exact zeros where all are equal up to rounding."""
    values_N = np.asarray(values, np.float64)
    if not values_N.size or np.ptp(values_N) <= _EQUAL * np.abs(values_N).max():
        return np.zeros_like(values_N)
    # The mean of the differences: that of the values themselves is rounded on their scale.
    differences_N = values_N - values_N[0]
    return differences_N - math.fsum(differences_N) / len(differences_N)


def deviation(centred_N: np.ndarray) -> float:
    """Returns the population standard deviation, sqrt(sum x^2 / N), of values of mean 0."""
    return math.sqrt(math.fsum(centred_N**2) / max(1, len(centred_N)))


def reinforce(
    turn_rewards: Sequence[Sequence[float]],
    roles: Sequence[Hashable],
    *,
    discount: float,
    normalize: bool,
) -> list[np.ndarray]:
    """REINFORCE with per-turn credit: return minus a baseline (Williams 1992, eq. 11).

    The baseline of a turn is the mean return of all episodes of the batch in the same role at the
    same turn. With `normalize`, advantages are divided by their population standard deviation over
    the batch.
    """
    rows = [discounted_returns(rewards, discount) for rewards in turn_rewards]
    compared: dict[tuple[Hashable, int], list[int]] = {}
    for index, (role, row) in enumerate(zip(roles, rows, strict=True)):
        for turn in range(len(row)):
            compared.setdefault((role, turn), []).append(index)
    for (_, turn), members in compared.items():
        for index, value in zip(members, centred([rows[i][turn] for i in members]), strict=True):
            rows[index][turn] = value
    if normalize and rows:
        every = np.concatenate(rows)
        scale = deviation(every - every.mean()) if every.any() else 0.0
        rows = [row / scale for row in rows] if scale else rows
    return rows


def group_relative(
    turn_rewards: Sequence[Sequence[float]], groups: Sequence[Hashable], *, normalize: bool
) -> list[np.ndarray]:
    """GRPO's advantages of outcomes (arXiv 2402.03300, section 4.1.2).

    Outcome minus the mean of its group, with `normalize` divided by the group's population standard
    deviation (that of N, not of N - 1); without it, Dr. GRPO (arXiv 2503.20783, eq. 3). Every turn
    of an episode gets the same. A group whose outcomes are equal gets zeros, whatever their scale.
    """
    outcomes = [math.fsum(rewards) for rewards in turn_rewards]
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = [np.zeros(len(rewards)) for rewards in turn_rewards]
    for indices in members.values():
        values = centred([outcomes[i] for i in indices])
        scale = deviation(values) if normalize else 1.0
        for index, value in zip(indices, values, strict=True):
            advantages[index] += value / (scale or 1.0)
    return advantages
