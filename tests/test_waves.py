# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Slots at work while episodes end, by hand."""

import pytest

from earl_jax.selector.waves import MOST_ROWS, busy_shares, times_as_long


def test_slots_are_empty_behind_the_last_episode_that_waits():
    """Lengths 1, 3, 1, 3 on two slots: 1 and 3 begin, the third at 1, the fourth at 2.

    They end at 1, 3, 2 and 5: two at work until 3, one from there to 5.
    """
    assert dict(busy_shares((1.0, 3.0), 4, 2)) == pytest.approx({1: 0.4, 2: 0.6})
    # All at once: four until 1, two until 3.
    assert dict(busy_shares((1.0, 3.0), 4, 4)) == pytest.approx({2: 2 / 3, 4: 1 / 3})
    # More slots than episodes.
    assert dict(busy_shares((2.0,), 3, 8)) == {3: 1.0}


def test_what_an_empty_slot_costs_says_how_many_are_best():
    """The 8 slot seconds above are 5 s on two slots and 3 s on four, where rounds take the same.

    With all slots always at work they would be 4 s and 2 s.
    """
    assert times_as_long((1.0, 3.0), 4, 2, 1.0) == pytest.approx(5 / 4)
    assert times_as_long((1.0, 3.0), 4, 4, 1.0) == pytest.approx(3 / 2)
    # One slot in a fourth of the time of four, two in a half: each second costs what is at work.
    assert times_as_long((1.0, 3.0), 4, 4, 0.25) == pytest.approx(1.0)
    # One in half of the time of two: 3 + 2 / 2 s.
    assert times_as_long((1.0, 3.0), 4, 2, 0.5) == pytest.approx(1.0)
    # One in 0.7 of the time of four, two in 0.8: 1 + 2 x 0.8 s.
    assert times_as_long((1.0, 3.0), 4, 4, 0.7) == pytest.approx(2.6 / 2)


def test_episodes_of_one_length_lose_nothing_but_in_the_last_wave():
    assert times_as_long((7.0,) * 5, 128, 64, 0.3) == pytest.approx(1.0)
    assert times_as_long((7.0,), 96, 64, 1.0) == pytest.approx(128 / 96)
    assert times_as_long((7.0,), 5, 1, 1.0) == pytest.approx(1.0)


def test_many_episodes_are_counted_by_so_many_at_a_time():
    lengths = (3.0, 5.0, 8.0, 13.0, 60.0)
    few = times_as_long(lengths, MOST_ROWS, 64, 0.4)
    assert times_as_long(lengths, 8 * MOST_ROWS, 512, 0.4) == pytest.approx(few, rel=0.02)
