# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Guesses of bytes and speeds, against numbers worked out by hand."""

import pytest

from earl_jax.selector.choose import Option
from earl_jax.selector.guesses import (
    Candidate,
    beside_fastest,
    busy_slots,
    busy_tokens_per_s,
    fill_in,
    rivals,
    tried_ways,
    worth_measuring,
    worth_trying,
)
from earl_jax.selector.ladder import TrainRung
from earl_jax.sharding.layout import MeshShape

ONE, TWO, THREE = (MeshShape(data=8 // n, tensor=n) for n in (1, 2, 4))


def known(mesh, num_bytes, speed, *, computed):
    option = Option(mesh=mesh, bytes_per_device=num_bytes, tokens_per_s=speed)
    return Candidate(
        option=option,
        computed_bytes=computed[0],
        least_bytes=0,
        computed_tokens_per_s=computed[1],
    )


def unknown(mesh, num_bytes, speed, *, least, way=""):
    option = Option(
        mesh=mesh, bytes_per_device=num_bytes, tokens_per_s=None, is_computed=True, way=way
    )
    return Candidate(
        option=option, computed_bytes=num_bytes, least_bytes=least, computed_tokens_per_s=speed
    )


def test_a_guess_is_as_wrong_as_what_was_measured_on_its_mesh():
    # Measured: 200 bytes instead of 160, 30 tokens/s instead of 60.
    first = known(ONE, 200, 30.0, computed=(160, 60.0))
    second = fill_in([first, unknown(ONE, 80, 40.0, least=20, way="in 2 micro-batches")])[1]
    assert (second.bytes_per_device, second.tokens_per_s) == (100, 20.0)
    assert second.is_computed and second.is_guess and second.slack_bytes == 10


def test_a_guess_on_another_mesh_has_the_median_of_all_factors_and_bytes_as_computed():
    options = fill_in(
        [
            known(ONE, 100, 30.0, computed=(100, 60.0)),
            known(TWO, 100, 80.0, computed=(100, 80.0)),
            unknown(THREE, 90, 40.0, least=60),
        ]
    )
    # The median of 0.5 and 1.
    assert options[2].tokens_per_s == pytest.approx(30.0)
    assert (options[2].bytes_per_device, options[2].slack_bytes) == (90, 30)
    assert [option.is_guess for option in options] == [False, False, True]


def test_what_was_measured_stays_as_it_is_and_nothing_measured_leaves_the_roofline():
    measured = known(ONE, 100, 30.0, computed=(50, 60.0))
    assert fill_in([measured]) == [measured.option]
    assert fill_in([unknown(ONE, 9, 40.0, least=9)])[0].tokens_per_s == 40.0


def test_bytes_that_are_given_are_never_guessed_away():
    # Half of what was computed, by the other program; but 70 are parameters and moments.
    options = fill_in([known(ONE, 50, 1.0, computed=(100, 1.0)), unknown(ONE, 100, 1.0, least=70)])
    assert (options[1].bytes_per_device, options[1].slack_bytes) == (70, 0)


def option(mesh, speed, guess=True, rung=None):
    return Option(mesh=mesh, bytes_per_device=1, tokens_per_s=speed, is_guess=guess, rung=rung)


def test_what_is_chosen_by_a_guess_is_measured_first():
    options = [option(ONE, 10.0, guess=False), option(ONE, 12.0, rung=TrainRung(1, True))]
    assert worth_measuring(options, [True, True], 1, doubts_all=False) == [1]
    assert worth_measuring(options, [True, True], 0, doubts_all=False) == []
    assert worth_measuring(options, [True, True], 0, doubts_all=True) == [1]


def test_what_may_be_as_fast_is_measured_the_best_of_each_mesh_only():
    options = [
        option(ONE, 10.0, guess=False),
        option(TWO, 8.0, rung=TrainRung(1, True)),
        option(TWO, 7.0, rung=TrainRung(2, True)),
        option(THREE, 6.0),
        option(ONE, 9.0, rung=TrainRung(2, False)),
    ]
    everything = [True] * 5
    # 8 x 1.5 is more than 10, 6 x 1.5 is not; 7 is not the best of its mesh, nor is 9.
    for doubts_all in (True, False):
        assert worth_measuring(options, everything, 0, doubts_all=doubts_all) == [1]
        # What cannot be is nobody's rival.
        some = [True, False, True, True, True]
        assert worth_measuring(options, some, 0, doubts_all=doubts_all) == [2]


def test_of_a_mesh_that_was_measured_a_slower_guess_is_believed_where_all_are_measured():
    options = [
        option(ONE, 10.0, guess=False),
        option(TWO, 5.0, guess=False),
        option(TWO, 8.0, rung=TrainRung(2, True)),
    ]
    assert worth_measuring(options, [True] * 3, 0, doubts_all=False) == []
    assert worth_measuring(options, [True] * 3, 0, doubts_all=True) == [2]


def ways(**speeds):
    """All ways of two meshes, measured where a speed is given: "b2r" is ONE in 2 with remat."""
    found = []
    for letter, mesh in (("a", TWO), ("b", ONE)):
        for number in (1, 2, 4, 8):
            for again in (False, True):
                speed = speeds.get(f"{letter}{number}{'r' if again else ''}")
                rung = TrainRung(number, again)
                found.append(option(mesh, speed or 9.0, guess=speed is None, rung=rung))
    return found


def tried(possible=lambda option: True, **speeds):
    options = ways(**speeds)
    number = beside_fastest(options, [possible(option) for option in options])
    return None if number is None else (options[number].mesh, options[number].rung)


def test_beside_the_fastest_way_are_the_next_numbers_of_micro_batches_and_the_other_remat():
    assert tried() is None
    assert tried(a1=10.0) == (TWO, (2, False))
    assert tried(a1=10.0, b1=11.0) == (ONE, (2, False))
    assert tried(a1=10.0, a2=9.0) == (TWO, (1, True))
    # From what is faster it goes on, and its neighbours are more and fewer.
    assert tried(a1=10.0, a2=12.0) == (TWO, (4, False))
    assert tried(a1=10.0, a2=12.0, a4=8.0) == (TWO, (2, True))
    assert tried(a4=10.0, a4r=9.0, a8=9.0) == (TWO, (2, False))
    # A top: what is farther away is not asked for, however fast it was guessed.
    assert tried(a1=10.0, a1r=9.0, a2=8.0) is None


def test_what_cannot_be_is_no_neighbour_and_no_top():
    few = dict(a1=10.0, a1r=9.0)
    assert tried(lambda option: option.rung.micro_batches != 2, **few) == (TWO, (4, False))
    assert tried(lambda option: option.mesh == ONE, a1=10.0, b1=1.0) == (ONE, (2, False))


def test_what_is_nearly_as_fast_as_the_best_measured_is_a_rival():
    found = ways(a1=10.0, a2=8.0, b1=7.0, a4=11.0)
    every = [True] * len(found)
    at = {(o.mesh, tuple(o.rung)): n for n, o in enumerate(found)}
    # 11 / 1.3 is 8.46; guesses are none, however fast.
    assert rivals(found, every) == [at[TWO, (1, False)], at[TWO, (4, False)]]
    # 10 / 1.3 is 7.69.
    possible = [o.rung != (4, False) for o in found]
    assert rivals(found, possible) == [at[TWO, (1, False)], at[TWO, (2, False)]]
    # One alone has nobody to be compared with.
    possible = [o.rung == (4, False) for o in found]
    assert rivals(found, possible) == []


def test_ways_are_tried_for_a_tenth_of_the_steps_time():
    # 400 steps of half a second.
    assert worth_trying(20.0, 0.5, 400) and not worth_trying(20.1, 0.5, 400)
    found = tried_ways(ways(a1=10.0, b1=9.0, a2=8.0, b1r=7.0), TrainRung(1, False))
    assert [(o.mesh, o.rung) for o in found] == [(TWO, (2, False)), (ONE, (1, True))]


def test_rounds_of_some_slots_are_on_the_line_between_one_and_all():
    # 8 slots say 80 tokens a second: 0.1 s for a token of each. One alone says 20: 0.05 s.
    assert busy_tokens_per_s(80.0, 20.0, 8, 8) == pytest.approx(80.0)
    assert busy_tokens_per_s(80.0, 20.0, 8, 1) == pytest.approx(20.0)
    # 4.5 slots are half of the way: 0.075 s.
    assert busy_tokens_per_s(80.0, 20.0, 8, 4.5) == pytest.approx(60.0)
    assert busy_tokens_per_s(80.0, None, 8, 4) == pytest.approx(40.0)


def test_slots_are_busy_as_far_as_there_are_pages_for_them():
    # 64 slots want 800 tokens a lane: 12.5 for each of them.
    assert busy_slots(800, 800, 64, 64) == busy_slots(1600, 800, 64, 64) == 64
    assert busy_slots(400, 800, 64, 64) == 32
    # Half of the slots want half of the pages.
    assert busy_slots(400, 800, 64, 32) == 32
    assert busy_slots(200, 800, 64, 32) == 16
    assert busy_slots(1, 800, 64, 64) == 1
