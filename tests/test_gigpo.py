# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""GiGPO: turns that answer the same state are compared, beside whole episodes."""

import dataclasses
import json
import math

import numpy as np
import pytest

from earl_jax.algorithms.advantages import assign_credit, sides_of, state_relative
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.algorithms.settings import GigpoSettings
from earl_jax.rollout.gather import _outcome
from earl_jax.trajectory import Trajectory, Turn

GIGPO = ALGORITHMS["gigpo"]


def played(episode, *turns, group=0, role="", turn_roles=()) -> Trajectory:
    """An episode of (message, reply, reward) for each turn."""
    texts = [(m, r) for m, r, _ in turns]
    return Trajectory(
        episode=episode,
        group=group,
        role=role,
        turns=tuple(
            turn
            for message, reply in texts
            for turn in (
                Turn(author="environment", text=message, token_ids=(1,)),
                Turn(author="policy", text=reply, token_ids=(2,)),
            )
        ),
        turn_rewards=tuple(reward for *_, reward in turns),
        stop_reason="end",
        row=0,
        turn_roles=turn_roles,
    )


def with_settings(**settings):
    return dataclasses.replace(GIGPO, settings=GigpoSettings(**settings))


# Returns with a discount of 1/2: 1/2 and 1; 0 and 0.
RIGHT = played(0, ("a", "x", 0.0), ("b", "y", 1.0))
WRONG = played(1, ("a", "x", 0.0), ("a", "z", 0.0))


def test_turns_in_the_same_state_are_compared_by_hand():
    """State a has returns 1/2, 0, 0: 1/3, -1/6, -1/6 of mean 1/6, and a deviation of sqrt(1/18)."""
    rewards, groups = [(0.0, 1.0), (0.0, 0.0)], [0, 0]
    states = [("a", "b"), ("a", "a")]
    plain = state_relative(rewards, states, groups, discount=0.5, normalize=False)
    np.testing.assert_allclose(plain, [[1 / 3, 0], [-1 / 6, -1 / 6]], atol=1e-15)
    scaled = state_relative(rewards, states, groups, discount=0.5, normalize=True)
    half = math.sqrt(2) / 2
    np.testing.assert_allclose(scaled, [[math.sqrt(2), 0], [-half, -half]], atol=1e-12)
    # In groups of their own nothing is compared but the two turns of one episode, which are equal.
    apart = state_relative(rewards, states, [0, 1], discount=0.5, normalize=True)
    np.testing.assert_array_equal(apart, np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("anchor", "expected"),
    [
        ("message", [[1 + 2 * math.sqrt(2), 1], [-1 - math.sqrt(2), -1 - math.sqrt(2)]]),
        # The second turns have different histories; the first ones have returns 1/2 and 0.
        ("history", [[3, 1], [-3, -1]]),
    ],
)
def test_an_advantage_is_the_episode_s_and_the_weighted_turn_s(anchor, expected):
    algorithm = with_settings(turn_weight=2.0, turn_discount=0.5, anchor=anchor)
    counts, table = assign_credit(algorithm, [RIGHT, WRONG])
    assert counts.all()
    np.testing.assert_allclose(table[:, :2], expected, rtol=1e-6)


def test_a_turn_without_a_reward_is_none_and_its_state_is_not_another_s():
    """Rewards are those of the first turns, states those of all."""
    short = dataclasses.replace(RIGHT, turn_rewards=(0.0,))
    _, table = assign_credit(with_settings(turn_discount=0.0), [short, RIGHT, WRONG])
    # Each turn in state a has the return 0: only the episodes differ.
    outcomes = np.array([0.0, 1.0, 0.0])
    expected = (outcomes - outcomes.mean()) / outcomes.std()
    np.testing.assert_allclose(table[:, 0], expected, rtol=1e-6)
    assert table[0, 1] == 0


def test_states_are_equal_where_the_texts_are():
    states, others = RIGHT.turn_states, WRONG.turn_states
    assert states[0] == others[0] and states[0].message == others[1].message
    assert states[0].history != others[1].history
    # Roles, and where a message ends, are part of a state.
    spoken = [("tool", "1"), ("tool", "2")], [("tool", "1\n2")], [("user", "1\n2")]
    each = [dataclasses.replace(RIGHT.turns[0], text="1\n2", messages=tuple(m)) for m in spoken]
    asked = [dataclasses.replace(RIGHT, turns=(turn, *RIGHT.turns[1:])) for turn in each]
    assert len({episode.turn_states[0].message for episode in asked}) == 3
    one, other = (
        played(0, ("a", "bc", 0.0), ("", "", 0.0)),
        played(0, ("a", "b", 0.0), ("c", "", 0)),
    )
    assert one.turn_states[1].history != other.turn_states[1].history


def test_a_side_of_self_play_has_its_own_states():
    """x sees a and c, o sees b: what the other one saw is no part of either history."""
    turns = [("a", "1", 0.0), ("b", "2", 0.0), ("c", "3", 1.0)]
    game = played(0, *turns, role="x", turn_roles=("x", "o", "x"))
    alone = played(1, turns[0], turns[2], role="x")
    x, o = sides_of([game])
    assert x.episode.turn_states == alone.turn_states and len(o.episode.turn_states) == 1
    assert o.episode.turn_states == played(2, turns[1], role="o").turn_states


def test_states_survive_the_exchange_between_processes():
    outcome = RIGHT.outcome
    assert _outcome(json.loads(json.dumps(dataclasses.asdict(outcome)))) == outcome
    both = [assign_credit(GIGPO, each).advantages for each in ([RIGHT, WRONG], [outcome, WRONG])]
    np.testing.assert_array_equal(*both)
