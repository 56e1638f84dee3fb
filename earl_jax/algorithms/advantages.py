# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Advantages: how much better than expected each turn was, from rewards, on the host in fp64.

Every process has the small facts of all episodes and computes the same table from them; the tokens
of a turn look their advantage up on the devices, by `turn_ids`.
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from earl_jax.algorithms.algorithm import Algorithm, Episode
from earl_jax.settings.errors import InputError
from earl_jax.trajectory import FAILURES, Trajectory

# Values that differ by less than this part of the largest are equal: sums of rewards are rounded.
_EQUAL = 1e-9

E = TypeVar("E", bound=Episode)


class Credit(NamedTuple):
    """Credit of N episodes: flags of those trained on, bool[N], and advantages, f32[N,M].

    Advantages are 0 behind an episode's last turn and where the episode does not count.
    """

    counts: np.ndarray
    advantages: np.ndarray


class Side(NamedTuple):
    """A side of the `index`-th episode, as an episode of its own, and its turns there from 0."""

    episode: Episode
    index: int
    turns: list[int]


def sides_of(episodes: Sequence[Episode]) -> list[Side]:
    """Returns the sides that the policy played, those of an episode of self-play one by one.

    A side has its own role, turns, rewards and states; the number of tokens is that of the whole
    episode. Turns x, o, x with rewards 0, -1, 1 are x with rewards 0, 1 and o with -1.
    """
    found = []
    for index, episode in enumerate(episodes):
        own: dict[str, list[int]] = {} if episode.turn_rewards else {episode.role: []}
        for turn in range(len(episode.turn_rewards)):
            role = episode.turn_roles[turn] if episode.turn_roles else episode.role
            own.setdefault(role, []).append(turn)
        for role, turns in own.items():
            rewards = tuple(episode.turn_rewards[turn] for turn in turns)
            given: dict[str, Any] = {"role": role, "turn_rewards": rewards, "turn_roles": ()}
            view = episode
            if episode.turn_roles:
                view = episode.outcome if isinstance(episode, Trajectory) else episode
                given["turn_states"] = tuple(view.turn_states[turn] for turn in turns)
            found.append(Side(dataclasses.replace(view, **given), index, turns))
    return found


def assign_credit(
    algorithm: Algorithm, episodes: Sequence[Episode], averages: Mapping[str, float] | None = None
) -> Credit:
    """Returns the credit of a batch; `averages` are those before it (`next_averages`).

    An episode that its environment failed is not the policy's doing: it counts nowhere. Nor does an
    episode without a rewarded turn, or a group that the algorithm does not keep. Each side of
    self-play is an episode of its own (`sides_of`), compared with those of its role; the episode
    counts if one of them does. M is a power of two above the largest number of turns, so that few
    programs are compiled for it.

    Raises ValueError for self-play with an algorithm that does not allow it.
    """
    if any(episode.turn_roles for episode in episodes) and not algorithm.allows_self_play:
        raise InputError(
            "the environment lets the policy play several sides, and the algorithm, with its "
            "settings, takes all turns of an episode for those of one side; set config.algorithm "
            "to another one, such as 'spiral'"
        )
    counts = _counts(algorithm, episodes)
    own = [side for side in sides_of(episodes) if counts[side.index]]
    num_turns = max(8, 1 << max(episode.num_turns for episode in episodes).bit_length())
    table = np.zeros((len(episodes), num_turns), np.float32)
    given: tuple[Any, ...] = ([side.episode for side in own], algorithm.settings)
    if algorithm.averages is not None:
        given = (*given, averages or {})
    rows = algorithm.advantages(*given)
    for side, row in zip(own, rows, strict=True):
        table[side.index, side.turns] = row
    return Credit(counts=counts, advantages=table)


def next_averages(
    algorithm: Algorithm, episodes: Sequence[Episode], averages: Mapping[str, float]
) -> dict[str, float]:
    """Returns the algorithm's moving averages behind a batch, of the episodes that count.

    They are part of a run's position; {} for an algorithm that has none.
    """
    if algorithm.averages is None:
        return {}
    own = [side.episode for side in sides_of(counted(algorithm, episodes))]
    return algorithm.averages(averages, own, algorithm.settings)


def counted(algorithm: Algorithm, episodes: Sequence[E]) -> list[E]:
    """Returns the episodes that are trained on."""
    counts = _counts(algorithm, episodes)
    return [episode for episode, counts_it in zip(episodes, counts, strict=True) if counts_it]


def is_useless(algorithm: Algorithm, group: Sequence[Episode]) -> bool:
    """Returns True for a group that the algorithm does not keep.

    One whose episodes all failed is none: it is there to be seen among the failures.
    """
    return bool(_counted_groups(group)) and not _counts(algorithm, group).any()


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


def centred(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns the values minus their mean; exact zeros where all are equal up to rounding."""
    values_N = np.asarray(values, np.float64)
    if not values_N.size or np.ptp(values_N) <= _EQUAL * np.abs(values_N).max():
        return np.zeros_like(values_N)
    # The mean of the differences: that of the values themselves is rounded on their scale.
    differences_N = values_N - values_N[0]
    return differences_N - math.fsum(differences_N) / len(differences_N)


def deviation(centred_N: np.ndarray, *, of_sample: bool = False) -> float:
    """Returns the standard deviation, sqrt(sum x^2 / N), of values of mean 0.

    It is that of a population, or `of_sample` with N - 1 in place of N. 0 for a single value.
    """
    return math.sqrt(math.fsum(centred_N**2) / max(1, len(centred_N) - of_sample))


def reinforce(
    turn_rewards: Sequence[Sequence[float]],
    compared: Sequence[Hashable] | None,
    *,
    discount: float,
    normalize: bool,
    baselines: Sequence[float] = (),
) -> list[np.ndarray]:
    """REINFORCE with per-turn credit: return minus a baseline (Williams 1992, eq. 11).

    The baseline of a turn is the mean return, at the same turn, of the episodes with the same entry
    in `compared`, such as a role; None is no baseline but that of `baselines`, one an episode for
    all its turns. With `normalize`, advantages are divided by their population standard deviation
    over the batch; if they differ by no more than the rounding of the returns, they stay as they
    are, because their deviation is rounding noise.
    """
    rows = [discounted_returns(rewards, discount) for rewards in turn_rewards]
    noise = _EQUAL * max((float(np.abs(row).max()) for row in rows if row.size), default=0.0)
    if baselines:
        rows = [row - baseline for row, baseline in zip(rows, baselines, strict=True)]
    members_of: dict[tuple[Hashable, int], list[int]] = {}
    for index, entry in enumerate(compared or ()):
        for turn in range(len(rows[index])):
            members_of.setdefault((entry, turn), []).append(index)
    for (_, turn), members in members_of.items():
        for index, value in zip(members, centred([rows[i][turn] for i in members]), strict=True):
            rows[index][turn] = value
    if normalize and rows:
        scale = deviation(centred(np.concatenate(rows)))
        rows = [row / scale for row in rows] if scale > noise else rows
    return rows


def moving_means(
    averages: Mapping[str, float],
    turn_rewards: Sequence[Sequence[float]],
    roles: Sequence[str],
    *,
    discount: float,
    decay: float,
) -> dict[str, float]:
    """Returns the moving average of the returns of each role, with those of a batch (SPIRAL).

    arXiv 2506.24119, section 3.2: decay times the average before, plus 1 - decay times the mean
    over the role's episodes in the batch, of each one's mean over its turns. A role's first batch
    is its first average. With decay 0.9, an average of 1 and returns 0, 0 give 0.9.
    """
    found, returns = dict(averages), dict[str, list[float]]()
    for rewards, role in zip(turn_rewards, roles, strict=True):
        returns.setdefault(role, []).append(discounted_returns(rewards, discount).mean())
    for role, values in returns.items():
        mean = math.fsum(values) / len(values)
        found[role] = decay * found[role] + (1 - decay) * mean if role in found else mean
    return found


def group_relative(
    turn_rewards: Sequence[Sequence[float]],
    groups: Sequence[Hashable],
    *,
    normalize: bool,
    of_sample: bool = False,
    penalties: Sequence[float] = (),
) -> list[np.ndarray]:
    """GRPO's advantages of outcomes (arXiv 2402.03300, section 4.1.2).

    Outcome minus the mean of its group, with `normalize` divided by the group's standard deviation,
    that of a population or `of_sample`; without it, Dr. GRPO (arXiv 2503.20783, eq. 3). Every turn
    of an episode gets the same. A group whose outcomes are equal gets zeros, whatever their scale.
    `penalties`, one an episode, are added to the outcomes.
    """
    outcomes = outcomes_of(turn_rewards)
    if penalties:
        outcomes = [sum(pair) for pair in zip(outcomes, penalties, strict=True)]
    values = np.zeros(len(outcomes))
    for indices in _members(groups):
        values[indices] = centred([outcomes[i] for i in indices])
        scale = deviation(values[indices], of_sample=of_sample) if normalize else 1.0
        values[indices] /= scale or 1.0
    return _at_every_turn(values, turn_rewards)


def state_relative(
    turn_rewards: Sequence[Sequence[float]],
    states: Sequence[Sequence[Hashable]],
    groups: Sequence[Hashable],
    *,
    discount: float,
    normalize: bool,
    of_sample: bool = False,
) -> list[np.ndarray]:
    """GiGPO's advantages of turns (arXiv 2505.10978, eq. 7 and 8).

    The discounted return of a turn minus the mean of those of the group's turns in the same state,
    with `normalize` divided by their standard deviation, that of a population or `of_sample`. A
    turn whose state no other has gets 0.
    """
    rows = [discounted_returns(rewards, discount) for rewards in turn_rewards]
    members_of: dict[Hashable, list[tuple[int, int]]] = {}
    for index, row in enumerate(rows):
        for turn in range(len(row)):
            members_of.setdefault((groups[index], states[index][turn]), []).append((index, turn))
    found = [np.zeros_like(row) for row in rows]
    for members in members_of.values():
        values = centred([rows[index][turn] for index, turn in members])
        scale = deviation(values, of_sample=of_sample) if normalize else 1.0
        for (index, turn), value in zip(members, values / (scale or 1.0), strict=True):
            found[index][turn] = value
    return found


def leave_one_out(
    turn_rewards: Sequence[Sequence[float]], groups: Sequence[Hashable]
) -> list[np.ndarray]:
    """RLOO's advantages: outcome minus the mean of the others of its group (arXiv 2402.14740).

    That is n / (n - 1) times the outcome minus the mean of all n. An episode alone in its group
    gets 0. Every turn of an episode gets the same.
    """
    outcomes = outcomes_of(turn_rewards)
    values = np.zeros(len(outcomes))
    for indices in _members(groups):
        factor = len(indices) / max(1, len(indices) - 1)
        values[indices] = factor * centred([outcomes[i] for i in indices])
    return _at_every_turn(values, turn_rewards)


def centred_outcomes(
    turn_rewards: Sequence[Sequence[float]], groups: Sequence[Hashable] | None = None
) -> list[np.ndarray]:
    """Returns outcomes minus their mean in the batch, or with `groups` in their group.

    Every turn of an episode gets the same. Zeros where all that are compared are equal.
    """
    outcomes = outcomes_of(turn_rewards)
    values = np.zeros(len(outcomes))
    for indices in [range(len(outcomes))] if groups is None else _members(groups):
        values[indices] = centred([outcomes[i] for i in indices])
    return _at_every_turn(values, turn_rewards)


def overlong_penalty(num_tokens: int, most: int, buffer: int) -> float:
    """Returns DAPO's soft penalty of a long episode (arXiv 2503.14476, eq. 13).

    0 up to most - buffer tokens, then linearly down to -1 at `most` tokens and beyond; 0 where
    `most` is 0. Of 100 tokens with a buffer of 20: 80 gives 0, 95 gives -0.75.
    """
    over = num_tokens - (most - buffer)
    return -min(over / buffer, 1.0) if most and over > 0 else 0.0


def has_different_outcomes(turn_rewards: Sequence[Sequence[float]]) -> bool:
    """Returns False where all outcomes are equal up to rounding."""
    return bool(centred(outcomes_of(turn_rewards)).any())


def group_shares(algorithm: Algorithm, episodes: Sequence[Episode]) -> dict[str, float]:
    """Returns shares of the groups of several episodes, failed ones left out; {} without any.

    Sides of self-play are groups of their own.

    `equal_groups`: all outcomes are equal. `dropped_groups`: the algorithm does not keep the group.
    """
    members = [sides for sides in _counted_groups(episodes) if len(sides) > 1]
    groups = [[side.episode for side in sides] for sides in members]
    equal = [not has_different_outcomes([e.turn_rewards for e in group]) for group in groups]
    dropped = [not algorithm.keep_group(group, algorithm.settings) for group in groups]
    if not groups:
        return {}
    return {"equal_groups": float(np.mean(equal)), "dropped_groups": float(np.mean(dropped))}


def outcomes_of(turn_rewards: Sequence[Sequence[float]]) -> list[float]:
    """Returns the sum of each episode's rewards."""
    return [math.fsum(rewards) for rewards in turn_rewards]


def _counts(algorithm: Algorithm, episodes: Sequence[Episode]) -> np.ndarray:
    """Returns True for each episode that is trained on, bool[N]."""
    counts = np.zeros(len(episodes), bool)
    for sides in _counted_groups(episodes):
        if algorithm.keep_group([side.episode for side in sides], algorithm.settings):
            counts[[side.index for side in sides]] = True
    return counts


def _counted_groups(episodes: Sequence[Episode]) -> list[list[Side]]:
    """Returns each group's sides of one role, without failures and unrewarded ones."""
    counted = [
        side
        for side in sides_of(episodes)
        if side.episode.stop_reason not in FAILURES and side.turns
    ]
    groups = _members([(side.episode.group, side.episode.role) for side in counted])
    return [[counted[i] for i in indices] for indices in groups]


def _members(groups: Sequence[Hashable]) -> list[list[int]]:
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return list(members.values())


def _at_every_turn(values: np.ndarray, turn_rewards: Sequence[Sequence[float]]) -> list[np.ndarray]:
    pairs = zip(values, turn_rewards, strict=True)
    return [np.full(len(rewards), value) for value, rewards in pairs]
