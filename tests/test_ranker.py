# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The ranker of lengths of benchmarks/ranker.py: its regression, recalls and times by hand."""

import math

import jax
import numpy as np
import pytest

from benchmarks.ranker import (
    PAPER,
    Letters,
    Ranker,
    Twice,
    as_good_as,
    last_states,
    makespan,
    ranked,
    signals,
)
from benchmarks.simulate import Setup, recalls
from earl_jax.models.decoder import forward_rows
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.episodes import MODEL, weights


def test_the_regression_is_that_of_log_lengths_with_a_penalty_of_each_features_variance():
    """Feature -1 -1 1 1 and logs 1 1 3 3: sums 4 and 8, products 4 and 4, and a penalty of 1."""
    features, lengths = np.array([[-1.0], [-1.0], [1.0], [1.0]]), np.exp([1.0, 1.0, 3.0, 3.0])
    ranker = Ranker.new(1).learn(features, lengths)
    np.testing.assert_allclose(ranker.gram_FF, [[4, 0], [0, 4]])
    np.testing.assert_allclose(ranker.moments_F, [8, 4])
    weight = 4 / (4 + 1)
    expected = ranker.expected(np.array([[-1.0], [0.0], [2.0]]))
    np.testing.assert_allclose(np.log(expected), [2 - weight, 2, 2 + 2 * weight], rtol=1e-6)
    # A larger unit changes nothing: the penalty goes with the variance.
    large = Ranker.new(1).learn(100 * features, lengths)
    np.testing.assert_allclose(large.expected(np.array([[200.0]])), expected[2:], rtol=1e-6)


def test_a_step_counts_less_than_the_next_one():
    """Two steps of a constant: logs 1 and 3 count 0.9 and 1, so that 3.9 / 1.9 is expected."""
    ranker = Ranker.new(1).learn(np.zeros((1, 1)), np.exp([1.0]))
    ranker = ranker.learn(np.zeros((1, 1)), np.exp([3.0]))
    assert ranker.expected(np.zeros((1, 1)))[0] == pytest.approx(math.exp(3.9 / 1.9))


def test_states_are_those_behind_the_last_token_of_each_prompt():
    """Prompts of three and five tokens, padded to eight, beside each of them alone."""
    params = jax.tree.map(np.asarray, weights())
    params["layers"] = jax.tree.map(lambda *layers: np.stack(layers), *params["layers"])
    layout = make_layout(MeshShape(), jax.devices()[:1])
    tokens = np.zeros((2, 8), np.int32)
    tokens[0, :3], tokens[1, :5] = (7, 8, 9), (7, 8, 9, 10, 11)
    found = last_states(MODEL, layout, params, tokens, np.array([3, 5], np.int32))
    for row, length in enumerate((3, 5)):
        alone = tokens[row : row + 1, :length]
        hidden = forward_rows(MODEL, layout, params, alone, np.ones_like(alone))
        np.testing.assert_allclose(found[row], hidden[0, -1], rtol=1e-4, atol=1e-5)


def test_recalls_are_shares_of_the_longest_episodes():
    lengths = list(range(40, 0, -1))
    assert recalls([float(n) for n in lengths], lengths) == {20: 1.0, 10: 1.0, 5: 1.0}
    # The four longest are taken for the shortest: of 8 4 are found, of 4 none, of 2 none.
    wrong = [0.0] * 4 + [float(n) for n in lengths[4:]]
    assert recalls(wrong, lengths) == {20: 0.5, 10: 0.0, 5: 0.0}


def test_errors_are_as_large_as_the_recall_allows():
    lengths = [Setup().length(episode) for episode in range(512)]
    assert recalls(as_good_as(lengths, PAPER[20]), lengths)[20] == pytest.approx(0.87, abs=0.01)


# An instance of one slot and one of two, a token a round; groups of two episodes.
SMALL = {"devices": 16, "groups": 2, "group_size": 2, "burst": 1, "saturation": 1e12}


def test_what_is_told_of_a_group_orders_it_before_anything_has_ended():
    """Three slots: 2 2 9 begin, and the second 9 behind a 2; or 9 9 2."""
    setup = Setup(**SMALL, slots=3, lengths=(2, 2, 9, 9))
    assert makespan(setup) == pytest.approx(11)
    # One of each group begins, and of nothing that has come to any length the first one.
    assert makespan(setup, "longest") == pytest.approx(11)
    told = [2.0, 9.0]
    assert makespan(setup, "longest", told=told) == pytest.approx(9)
    # When the prompts are read the three have begun.
    assert makespan(setup, "longest", told=told, at_prompt=True) == pytest.approx(11)


def test_a_prompt_that_is_read_orders_the_episodes_that_begin_later():
    """Two slots: 2 9 begin. Behind round 2 both groups have come to 2 tokens, and one goes on."""
    setup = Setup(**SMALL, slots=2, lengths=(2, 2, 9, 9))
    assert makespan(setup, "longest") == pytest.approx(2 + 2 + 9)
    told = [2.0, 9.0]
    assert makespan(setup, "longest", told=told, at_prompt=True) == pytest.approx(2 + 9)
    assert ranked([1.0, 3.0, 2.0, 3.0]) == [1, 3, 2, 0]


def test_gains_are_the_times_of_first_in_first_out_by_those_of_the_orders():
    """Three slots: 2 3 9 and then 8, which ends behind round 10; or 9 8 3 and then 2."""
    setup = Setup(**SMALL, slots=3, lengths=(2, 3, 9, 8))
    found = signals(setup, [2, 3, 9, 8], {"told": [2.5, 8.5]})
    recall, gain = found["lengths known"]
    assert gain == pytest.approx(10 / 9) and recall == {20: 1.0, 10: 1.0, 5: 1.0}
    assert found["told"][1] == pytest.approx(10 / 9)


def test_tasks_of_the_last_steps_are_those_of_the_first_measured_ones():
    source = Twice(seed=3, num_tasks=2, num_again=2, first_again=4)
    steps = [[task["seed"] for task in source.batch(step)] for step in range(6)]
    assert steps[4:] == steps[2:4] and len({seed for each in steps for seed in each}) == 8
    asked = Letters(seed=steps[0][0])
    assert asked.start().text == Letters(seed=steps[4][0] - 4).start().text
    reply = " ".join("a" * asked.number)
    assert asked.step(reply).reward == 1.0
