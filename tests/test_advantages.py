# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Advantages are the arithmetic of their papers, done here by hand."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_jax.algorithms.advantages import (
    assign_credit,
    centred,
    centred_outcomes,
    discounted_returns,
    group_relative,
    group_shares,
    is_useless,
    leave_one_out,
    moving_means,
    next_averages,
    overlong_penalty,
    reinforce,
)
from earl_jax.algorithms.algorithms import ALGORITHMS, outcomes_differ
from earl_jax.algorithms.sequences import normalized
from earl_jax.algorithms.settings import DapoSettings, GrpoSettings, ReinforceSettings, RlooSettings
from earl_jax.settings.errors import InputError
from earl_jax.trajectory import FAILURES
from tests.support.trajectories import make_trajectory

GRPO, REINFORCE = ALGORITHMS["grpo"], ALGORITHMS["reinforce"]
PLAIN_GRPO = dataclasses.replace(GRPO, settings=GrpoSettings(normalize_advantages=False))


def assert_rows(rows, expected) -> None:
    assert [len(row) for row in rows] == [len(row) for row in expected]
    for row, values in zip(rows, expected, strict=True):
        np.testing.assert_allclose(row, values, rtol=1e-12, atol=1e-12)


# Returns.


@pytest.mark.parametrize(
    ("rewards", "discount", "returns"),
    [
        ((0.0, 0.0, 1.0), 0.5, (0.25, 0.5, 1.0)),
        # 3; -2 + 0.1 * 3; 1 + 0.1 * -1.7
        ((1.0, -2.0, 3.0), 0.1, (0.83, -1.7, 3.0)),
        ((1.0, 2.0, 3.0), 1.0, (6.0, 5.0, 3.0)),
        ((1.0, 2.0, 3.0), 0.0, (1.0, 2.0, 3.0)),
        ((-1.0,), 0.7, (-1.0,)),
        ((), 0.7, ()),
    ],
)
def test_a_return_is_its_reward_and_the_discounted_later_ones(rewards, discount, returns):
    assert_rows([discounted_returns(rewards, discount)], [returns])


# GRPO.


def test_grpo_of_rewards_1_to_6_in_groups_of_three():
    # Mean 2 of (1, 2, 3), variance (1 + 0 + 1) / 3: deviation sqrt(2/3) = 0.8165, so -1.2247, 0,
    # 1.2247. The same around 5 for (4, 5, 6).
    edge = 1 / math.sqrt(2 / 3)
    assert edge == pytest.approx(1.2247, abs=1e-4)
    advantages = group_relative(
        [(1,), (2,), (3,), (4,), (5,), (6,)], [0, 0, 0, 1, 1, 1], normalize=True
    )
    assert_rows(advantages, [[-edge], [0], [edge], [-edge], [0], [edge]])


def test_the_deviation_of_a_sample_is_that_of_n_minus_1():
    # Of (1, 2, 3): (1 + 0 + 1) / 2 = 1; of the pair (4, 8): 8, so 2 / sqrt(8); 0 for one alone.
    rewards, groups = [(1,), (2,), (3,), (4,), (8,), (5,)], [0, 0, 0, 1, 1, 2]
    rows = group_relative(rewards, groups, normalize=True, of_sample=True)
    assert_rows(rows, [[-1], [0], [1], [-(0.5**0.5)], [0.5**0.5], [0]])
    pairs = enumerate(zip(rewards, groups, strict=True))
    episodes = [make_trajectory(i, row, group=group) for i, (row, group) in pairs]
    for name in ("grpo", "dapo", "gspo", "cispo"):
        algorithm = ALGORITHMS[name]
        own = dataclasses.replace(algorithm.settings, deviation="sample")
        assert_rows(algorithm.advantages(episodes, own), rows)


def test_groups_are_found_by_name_wherever_their_episodes_lie():
    advantages = group_relative(
        [(6,), (1,), (4,), (3,), (5,), (2,)], list("baabba"), normalize=True
    )
    # Group a: 1, 4, 2 has mean 7/3 and variance (16 + 25 + 1) / 9 / 3 = 14/9.
    # Group b: 6, 3, 5 has mean 14/3 and variance (16 + 25 + 1) / 9 / 3 = 14/9.
    unit = 1 / (3 * math.sqrt(14 / 9))
    assert_rows(advantages, [[4 * unit], [-4 * unit], [5 * unit], [-5 * unit], [unit], [-unit]])


@pytest.mark.parametrize("algorithm", [GRPO, PLAIN_GRPO, REINFORCE])
@pytest.mark.parametrize("reward", [100.1, 0.1, -1e-8, 1e12 / 3, 0.0])
@pytest.mark.parametrize("size", [2, 3, 7, 64])
def test_equal_outcomes_have_advantages_of_exactly_zero(algorithm, reward, size):
    """The mean of 7 times 100.1 is rounded; what is left must not be scaled to a deviation of 1."""
    group = [make_trajectory(i, (reward,)) for i in range(size)]
    assert not assign_credit(algorithm, group).advantages.any()


@pytest.mark.parametrize("baseline", ["batch", "group", "ema", "none"])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 100.1, 1e6])
@pytest.mark.parametrize("average", [0.3, -1.0])
@pytest.mark.parametrize("size", [7, 64])
def test_equal_returns_are_not_scaled_by_the_noise_of_their_rounding(
    baseline, scale, average, size
):
    """REINFORCE: what is left of the return behind its baseline, zeros or the same for all.

    Both roles have returns of -scale; role o's average is off by rounding, which is no difference.
    """
    settings = ReinforceSettings(baseline=baseline)
    algorithm = dataclasses.replace(REINFORCE, settings=settings)
    played = [make_trajectory(i, (-scale,), role="xo"[i % 2]) for i in range(size)]
    averages = {"x": average * scale, "o": math.nextafter(average * scale, 10.0)}
    found = assign_credit(algorithm, played, averages).advantages[:, 0]
    left = {"ema": -scale - average * scale, "none": -scale}.get(baseline, 0.0)
    np.testing.assert_allclose(found, np.full(size, left), rtol=1e-6, atol=1e-9 * scale)


@pytest.mark.parametrize("normalize", [True, False])
def test_outcomes_that_differ_by_rounding_are_equal(normalize):
    # 0.1 + 0.2 and 0.3 differ by 5.6e-17.
    rewards = [(0.1, 0.2), (0.3,), (0.3,), (-1.0,)]
    advantages = group_relative(rewards, [0, 0, 0, 1], normalize=normalize)
    assert all(not row.any() for row in advantages)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_normalised_grpo_sees_differences_of_any_scale(scale):
    # Mean 2, deviation 1 of (1, 3); the same in units of any size.
    advantages = group_relative([(scale,), (3 * scale,)], [0, 0], normalize=True)
    assert_rows(advantages, [[-1], [1]])


def test_centred_values_are_exact_on_a_large_offset():
    # 2^53 / 8 + (0, 1, 2): the mean of the values is exact only as an offset from the first.
    assert centred([2.0**50, 2.0**50 + 2e6, 2.0**50 + 4e6]).tolist() == [-2e6, 0, 2e6]
    assert centred([]).size == 0


def test_grpo_gives_every_turn_the_outcome_of_its_episode():
    # Outcomes 1 and -1: mean 0, deviation 1.
    advantages = group_relative([(0.25, 0.0, 0.75), (-1.0,)], [0, 0], normalize=True)
    assert_rows(advantages, [[1, 1, 1], [-1]])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=8),
    st.floats(0.25, 4.0),
    st.floats(-5, 5),
)
def test_normalised_grpo_ignores_scale_and_offset_of_the_rewards(rewards, scale, offset):
    advantages = group_relative([(r,) for r in rewards], [0] * len(rewards), normalize=True)
    moved = group_relative(
        [(scale * r + offset,) for r in rewards], [0] * len(rewards), normalize=True
    )
    np.testing.assert_allclose(moved, advantages, atol=1e-9)
    assert np.sum(advantages) == pytest.approx(0, abs=1e-9)
    if len(set(rewards)) > 1:
        assert np.std(advantages) == pytest.approx(1)


# REINFORCE.


def test_reinforce_with_nothing_to_compare_is_zero_and_finite():
    assert reinforce([], [], discount=0.5, normalize=True) == []
    assert_rows(reinforce([(1, 1)], ["x"], discount=0.5, normalize=True), [[0, 0]])
    assert_rows(reinforce([(1,), (1,)], ["x", "x"], discount=0.5, normalize=True), [[0], [0]])


def test_reinforce_with_the_baseline_of_a_group_or_none():
    """Groups 0 and 1, rewards 1, 3 and 10, 4: minus their means 2 and 7, or as they are."""
    episodes = [
        make_trajectory(i, (reward,), group=group)
        for i, (reward, group) in enumerate([(1.0, 0), (10.0, 1), (3.0, 0), (4.0, 1)])
    ]

    def table(**fields):
        plain = ReinforceSettings(normalize_advantages=False, **fields)
        return assign_credit(dataclasses.replace(REINFORCE, settings=plain), episodes)[1][:, 0]

    assert table(baseline="group").tolist() == [-1, 3, 1, -3]
    assert table(baseline="none").tolist() == [1, 10, 3, 4]
    assert table(baseline="batch").tolist() == [-3.5, 5.5, -1.5, -0.5]


# REINFORCE with a moving average of each role.


def test_moving_means_by_hand():
    """Role x: 1, then 0.9 * 1 + 0.1 * 0; role o begins with its first batch, in both turns."""
    first = moving_means({}, [(1,)], ["x"], discount=0.5, decay=0.9)
    assert first == {"x": 1.0}
    rewards, roles = [(0,), (0, 1), (0,), (3,)], ["x", "o", "x", "o"]
    both = moving_means(first, rewards, roles, discount=0.5, decay=0.9)
    # Returns of o: 0 + 0.5 * 1 and 1, of mean 0.75; and 3. Each episode counts once.
    assert both == {"x": pytest.approx(0.9), "o": pytest.approx((0.75 + 3) / 2)}
    assert first == {"x": 1.0}, "the averages before are left as they are"


def test_advantages_are_relative_to_the_roles_average_before_the_batch():
    """No average is 0; failed episodes are in none; normalised by the deviation of the batch."""
    plain = ReinforceSettings(
        turn_discount=1.0, baseline="ema", baseline_decay=0.5, normalize_advantages=False
    )
    algorithm = dataclasses.replace(REINFORCE, settings=plain)
    played = [
        make_trajectory(0, (1.0,), role="x"),
        make_trajectory(1, (0.0, 3.0), role="o"),
        make_trajectory(2, (5.0,), role="x"),
        make_trajectory(3, (99.0,), role="x", stop_reason="environment_error"),
    ]
    before = {"x": 1.0}
    _, table = assign_credit(algorithm, played, before)
    np.testing.assert_array_equal(table[:, :2], [[0, 0], [3, 3], [4, 0], [0, 0]])
    scaled = dataclasses.replace(plain, normalize_advantages=True)
    _, scaled = assign_credit(dataclasses.replace(algorithm, settings=scaled), played, before)
    np.testing.assert_allclose(scaled, table / np.std([0, 3, 3, 4]), rtol=1e-6)
    assert next_averages(algorithm, played, before) == {"x": 2.0, "o": 3.0}
    # SPIRAL's settings: 0.95 of the average stays, and nothing is scaled.
    spiral = ALGORITHMS["spiral"]
    _, table = assign_credit(spiral, played, before)
    np.testing.assert_array_equal(table[:, :2], [[0, 0], [3, 3], [4, 0], [0, 0]])
    found = next_averages(spiral, played, before)
    assert found == {"x": pytest.approx(0.95 + 0.05 * 3), "o": 3.0}
    # Other baselines keep no average.
    assert next_averages(REINFORCE, played, {"x": 1.0}) == {}
    assert next_averages(GRPO, played, {"x": 1.0}) == {}


# Self-play: an episode is each of its sides.


def test_each_side_of_self_play_is_credited_with_its_own_rewards_and_average():
    """Turns x, o, x of rewards 0, -1, 1: returns 1, 1 of x and -1 of o, minus 0.5 and -0.25."""
    won = make_trajectory(0, (0.0, -1.0, 1.0), turn_roles=("x", "o", "x"))
    lost = make_trajectory(1, (-1.0, 1.0), turn_roles=("x", "o"))
    # x's third reply was not answered, and its first move of the last game was illegal.
    cut = make_trajectory(2, (0.0, -2.0), turn_roles=("x", "o", "x"), stop_reason="turn_too_long")
    alone = make_trajectory(3, (-2.0,), stop_reason="illegal")
    played, before = [won, lost, cut, alone], {"x": 0.5, "o": -0.25}
    spiral = ALGORITHMS["spiral"]
    counts, table = assign_credit(spiral, played, before)
    assert counts.all()
    expected = [[0.5, -0.75, 0.5], [-1.5, 1.25, 0], [-0.5, -1.75, 0], [-2.5, 0, 0]]
    np.testing.assert_array_equal(table[:, :3], expected)
    # Of x: returns 1, -1, 0, -2; of o: -1, 1, -2.
    assert next_averages(spiral, played, before) == {
        "x": pytest.approx(0.95 * 0.5 + 0.05 * -0.5),
        "o": pytest.approx(0.95 * -0.25 + 0.05 * -2 / 3),
    }


def test_groups_of_self_play_compare_a_side_with_the_same_side():
    """x: 1 and -1 are kept; o's equal rewards are not, and get no advantage."""
    played = [
        make_trajectory(0, (1.0, 0.5), turn_roles=("x", "o")),
        make_trajectory(1, (-1.0, 0.5), turn_roles=("x", "o")),
    ]
    for algorithm in (PLAIN_GRPO, dataclasses.replace(PLAIN_GRPO, keep_group=outcomes_differ)):
        counts, table = assign_credit(algorithm, played)
        assert counts.all()
        np.testing.assert_array_equal(table[:, :2], [[1, 0], [-1, 0]])
    assert group_shares(algorithm, played) == {"equal_groups": 0.5, "dropped_groups": 0.5}


KL_REWARD = RlooSettings(kl_coefficient=0.5, kl_estimator="k1", kl_in="reward")


@pytest.mark.parametrize(
    "algorithm",
    [
        ALGORITHMS["ppo"],
        ALGORITHMS["tba"],
        dataclasses.replace(ALGORITHMS["rloo"], settings=KL_REWARD),
    ],
    ids=["ppo", "tba", "rloo with penalties"],
)
def test_sums_over_an_episode_are_refused_in_self_play(algorithm):
    played = [make_trajectory(i, (0, i), turn_roles=("x", "o")) for i in range(2)]
    with pytest.raises(InputError, match="turns of an episode for those of one side"):
        assign_credit(algorithm, played)
    assert assign_credit(ALGORITHMS["rloo"], played).counts.all()


# RLOO.


def test_rloo_by_hand():
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; equal ones; one alone.
    rewards = [(1,), (0.5,), (2, 0), (6,), (0.5,), (9,)]
    rows = leave_one_out(rewards, [7, 3, 7, 7, 3, 1])
    assert_rows(rows, [[-3], [0], [-1.5, -1.5], [4.5], [0], [0]])
    assert leave_one_out([], []) == []


# REINFORCE++.


def test_centred_outcomes_by_hand():
    # Outcomes 1, 2, 3, 6 have mean 3; of groups (1, 3) and (2, 6) the means are 2 and 4.
    rewards = [(1,), (2,), (1, 2), (6,)]
    assert_rows(centred_outcomes(rewards), [[-2], [-1], [0, 0], [3]])
    assert_rows(centred_outcomes(rewards, [0, 1, 0, 1]), [[-1], [-2], [1, 1], [2]])
    for equal in (centred_outcomes([(0.1,)] * 7), centred_outcomes([(1,), (2,)], [0, 1])):
        assert all(not row.any() for row in equal)
    assert centred_outcomes([]) == centred_outcomes([], []) == []


NORMALIZED = jax.jit(normalized)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 100.1, 1e6])
def test_normalised_tokens_are_of_any_scale_and_never_noise(scale):
    mask, places = np.arange(64)[None] % 3 > 0, np.arange(64)[None]
    values = np.where(places < 32, np.float32(scale), np.float32(3 * scale))
    found = np.asarray(NORMALIZED(values, mask))[mask]
    assert found.mean() == pytest.approx(0, abs=1e-5) and found.std() == pytest.approx(1, rel=1e-5)
    equal = np.full((1, 64), scale, np.float32)
    near = np.where(places % 5, equal, equal * np.float32(1 + 1e-7))
    for noise in (near, equal):
        assert not np.any(NORMALIZED(noise, mask))
    assert not np.any(NORMALIZED(values, np.zeros_like(mask)))


# DAPO.


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0), (80, 0), (85, -0.25), (95, -0.75), (100, -1), (1000, -1)]
)
def test_the_penalty_of_a_long_episode(tokens, penalty):
    assert overlong_penalty(tokens, 100, 20) == penalty
    assert overlong_penalty(tokens, 0, 0) == 0


def test_dapo_punishes_length_and_leaves_out_groups_of_equal_rewards():
    """Replies of 2 tokens a turn; at most 6 with a buffer of 4: 2, 4, 6 tokens cost 0, 0.5, 1.

    Group 0 is 1 - 0, 1 - 0.5, 0 - 1: mean 1/6. Group 1 has equal rewards, though its lengths
    differ.
    """
    settings = DapoSettings(overlong_tokens=6, overlong_buffer=4, normalize_advantages=False)
    algorithm = dataclasses.replace(ALGORITHMS["dapo"], settings=settings)
    episodes = [
        make_trajectory(0, (1.0,), group=0),
        make_trajectory(1, (0.0, 1.0), group=0),
        make_trajectory(2, (0.0, 0.0, 0.0), group=0),
        make_trajectory(3, (1.0,), group=1),
        make_trajectory(4, (0.0, 1.0), group=1),
    ]
    counts, table = assign_credit(algorithm, episodes)
    assert counts.tolist() == [True, True, True, False, False]
    np.testing.assert_allclose(table[:, 0], [5 / 6, 1 / 3, -7 / 6, 0, 0], rtol=1e-6)


def test_shares_of_groups():
    """Failed episodes are left out, then groups of one: of groups 0, 1, 2 here 0 is equal."""
    episodes = [
        make_trajectory(0, (1.0,), group=0),
        make_trajectory(1, (0.0,), group=1),
        make_trajectory(2, (1.0,), group=0),
        make_trajectory(3, (1.0,), group=1),
        make_trajectory(4, (0.0,), group=0, stop_reason="environment_error"),
        make_trajectory(5, (0.0,), group=2),
    ]
    shares = {"equal_groups": 0.5, "dropped_groups": 0.0}
    assert group_shares(GRPO, episodes) == shares
    assert group_shares(ALGORITHMS["dapo"], episodes) == shares | {"dropped_groups": 0.5}
    assert group_shares(GRPO, episodes[-1:]) == group_shares(GRPO, []) == {}


# The credit of a batch.


def test_the_table_has_a_row_per_trajectory_in_their_order():
    trajectories = [
        make_trajectory(11, (0, 0, 1), role="x"),
        make_trajectory(5, (1,), role="o"),
        make_trajectory(7, (0, -1), role="x", stop_reason="illegal"),
        make_trajectory(2, (0, -1), role="o", stop_reason="loss"),
    ]
    plain = ReinforceSettings(turn_discount=0.5, normalize_advantages=False)
    counts, table = assign_credit(dataclasses.replace(REINFORCE, settings=plain), trajectories)
    assert counts.all()
    assert table.shape == (4, 8) and table.dtype == np.float32
    expected = [[0.375, 0.75, 0], [0.75, 0, 0], [-0.375, -0.75, 0], [-0.75, 0, 0]]
    np.testing.assert_array_equal(table[:, :3], expected)
    assert not table[:, 3:].any()
    scaled = dataclasses.replace(plain, normalize_advantages=True)
    _, table = assign_credit(dataclasses.replace(REINFORCE, settings=scaled), trajectories)
    np.testing.assert_allclose(table[:, :3], np.array(expected) / 0.5625, rtol=1e-6)


@pytest.mark.parametrize("algorithm", [GRPO, REINFORCE], ids=["grpo", "reinforce"])
@pytest.mark.parametrize("failure", sorted(FAILURES))
def test_an_episode_that_its_environment_failed_counts_nowhere(algorithm, failure):
    played = [make_trajectory(0, (0.0, 1.0)), make_trajectory(1, (-1.0,))]
    failed = make_trajectory(2, (100.0, 100.0, 100.0), stop_reason=failure)
    alone = assign_credit(algorithm, played)
    together = assign_credit(algorithm, [played[0], failed, played[1]])
    assert together.counts.tolist() == [True, False, True]
    np.testing.assert_array_equal(together.advantages[[0, 2]], alone.advantages)
    assert not together.advantages[1].any()
    assert alone.advantages[0].any()


def test_a_group_that_the_algorithm_does_not_keep_counts_nowhere():
    """As in DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): equal outcomes are left out.

    The failed episode of group 1, whose reward differs, is not asked about.
    """

    def outcomes_differ(group, settings):
        return len({episode.reward for episode in group}) > 1

    trajectories = [
        make_trajectory(0, (1.0,), group=0),
        make_trajectory(1, (1.0,), group=1),
        make_trajectory(2, (0.0,), group=0),
        make_trajectory(3, (1.0,), group=1),
        make_trajectory(4, (5.0,), group=1, stop_reason="environment_error"),
    ]
    counts, table = assign_credit(
        dataclasses.replace(REINFORCE, keep_group=outcomes_differ), trajectories
    )
    assert counts.tolist() == [True, False, True, False, False]
    # The baseline is that of the episodes that count: (1 + 0) / 2, and the deviation 1/2.
    np.testing.assert_array_equal(table[:, 0], [1, 0, -1, 0, 0])


def test_a_group_is_useless_that_is_not_kept_unless_all_of_it_failed():
    def group(*rewards, stop_reason="end"):
        return [
            make_trajectory(i, (reward,), stop_reason=stop_reason)
            for i, reward in enumerate(rewards)
        ]

    failed = group(5.0, stop_reason="environment_error")
    assert is_useless(ALGORITHMS["dapo"], group(1.0, 1.0))
    assert is_useless(ALGORITHMS["dapo"], [*group(1.0, 1.0), *failed])
    assert not is_useless(ALGORITHMS["dapo"], group(1.0, 0.0))
    assert not is_useless(ALGORITHMS["dapo"], failed)
    assert not is_useless(ALGORITHMS["grpo"], group(1.0, 1.0))


def test_a_failure_before_the_first_turn_has_a_row_of_zeros():
    failed = make_trajectory(3, (), stop_reason="environment_error")
    silent = make_trajectory(4, (), stop_reason="token_limit")
    counts, table = assign_credit(PLAIN_GRPO, [failed, make_trajectory(0, (1,)), silent])
    assert table.shape == (3, 8) and not table.any()
    assert counts.tolist() == [False, True, False]


def test_a_batch_of_failures_counts_nowhere():
    failed = [make_trajectory(i, (), stop_reason="environment_error") for i in range(3)]
    for algorithm in ALGORITHMS.values():
        counts, table = assign_credit(algorithm, failed)
        assert not counts.any() and not table.any()


def test_the_table_is_wide_enough_for_every_turn():
    for turns, width in ((1, 8), (7, 8), (8, 16), (15, 16), (16, 32)):
        _, table = assign_credit(
            PLAIN_GRPO, [make_trajectory(0, (1.0,) * turns), make_trajectory(1, (0.0,))]
        )
        assert table.shape == (2, width)
        np.testing.assert_array_equal(table[0], [turns / 2] * turns + [0] * (width - turns))
