# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes and speeds of plans, by hand: observed, else computed and corrected."""

import dataclasses

import pytest

from earl_jax.selector.estimate import Estimator
from earl_jax.selector.plans import TrainPlan
from earl_jax.selector.roofline import MODEL_ERROR
from earl_jax.selector.table import ThroughputTable, rollout_key, train_key
from tests.support.problems import (
    D2T4,
    D4T2,
    D8,
    F8,
    T8,
    HandProblem,
    hand_problem,
    rollout_on,
    train_on,
)

MODEL = {D8: 100.0, D4T2: 80.0, D2T4: 60.0, T8: 40.0}


def estimator(*observed: tuple[str, float], problem: HandProblem | None = None) -> Estimator:
    """Returns the estimates by a table of these speeds."""
    table = ThroughputTable()
    for key, speed in observed:
        table = table.with_speed(key, speed)
    return Estimator(problem or hand_problem({D8: 100.0, F8: 50.0}, MODEL), table)


def play(mesh, speed: float, tokens: int = 20, times: int = 3) -> list[tuple[str, float]]:
    return times * [(rollout_key(mesh, tokens, 8), speed)]


# Bytes.


def test_bytes_of_a_round_are_computed_with_those_of_its_pages():
    # A page of data=8 takes 80 bytes, and of tensor=2 half of that.
    found = estimator(problem=hand_problem({D8: 1.0}, MODEL, rollout_bytes={D8: 1000, D4T2: 500}))
    assert found.round_bytes(rollout_on(D8, 8, 3), 20) == (1240, False)
    assert found.round_bytes(rollout_on(D4T2, 8, 3), 20) == (620, False)


def test_known_bytes_of_a_round_are_those_without_pages_at_the_same_bucket_and_slots():
    problem = hand_problem({D8: 1.0}, MODEL)
    table = ThroughputTable().with_bytes(rollout_key(D8, 20, 8), 700)
    found = Estimator(problem, table)
    assert found.round_bytes(rollout_on(D8, 8, 3), 20) == (700 + 240, True)
    assert found.round_bytes(rollout_on(D8, 8, 5), 20) == (700 + 400, True)
    assert found.round_bytes(rollout_on(D8, 8, 3), 40) == (1000 + 240, False)
    assert found.round_bytes(rollout_on(D8, 4, 3), 20) == (1000 + 240, False)


def test_known_bytes_of_an_update_are_its_own_alone():
    problem = hand_problem({D8: 1.0}, MODEL, train_bytes={D8: 3000})
    table = ThroughputTable().with_bytes(train_key(D8, 20, 2, True), 1700)
    found = Estimator(problem, table)
    assert found.update_bytes(train_on(D8, 2), 20) == (1700, True)
    assert found.update_bytes(train_on(D8), 20) == (3000, False)
    assert found.update_bytes(TrainPlan(D8, 2, False), 20) == (1500, False)


# Speeds.


def test_without_observations_speeds_are_the_models():
    found = estimator()
    assert found.round_speed(rollout_on(D4T2, 8, 2), 20, 2) == 80.0
    assert found.update_speed(train_on(D8, 2), 20) == 50.0
    assert not found.is_round_observed(rollout_on(D8), 20)


def test_trusted_speed_counts_and_the_factor_of_its_mesh_carries_over_buckets():
    found = estimator(*play(D8, 30.0))
    assert found.round_speed(rollout_on(D8, 8, 2), 20, 2) == 30.0
    assert found.is_round_observed(rollout_on(D8), 20)
    # 30 of 100: so it is for longer contexts, and not seen there.
    assert found.round_speed(rollout_on(D8, 8, 4), 40, 4) == pytest.approx(30.0)
    assert not found.is_round_observed(rollout_on(D8), 40)
    # Of the other stage nothing is said.
    assert found.update_speed(train_on(D8), 20) == 100.0


def test_mesh_that_never_ran_is_discounted_by_the_models_error():
    found = estimator(*play(D8, 30.0), *play(D2T4, 30.0))
    # Factors 0.3 and 0.5: 0.4 is usual.
    assert found.round_speed(rollout_on(D4T2, 8, 2), 20, 2) == pytest.approx(80 * 0.4 / MODEL_ERROR)


def test_untrusted_speeds_are_no_less_than_what_nobody_has_seen():
    found = estimator(*play(D8, 50.0), *play(D4T2, 1.0, times=2), *play(D2T4, 55.0, times=1))
    # The usual factor is that of data=8, which is trusted: a half.
    assert found.round_speed(rollout_on(D4T2, 8, 2), 20, 2) == pytest.approx(80 * 0.5 / MODEL_ERROR)
    assert found.round_speed(rollout_on(D2T4, 8, 2), 20, 2) == 55.0


def test_trusted_entries_alone_make_the_factor_of_a_mesh():
    found = estimator(*play(D8, 50.0), *play(D8, 10.0, tokens=40, times=1))
    assert found.round_speed(rollout_on(D8, 8, 6), 60, 6) == pytest.approx(50.0)


def test_fewer_pages_than_wanted_are_slower_by_the_models_ratio():
    found = estimator(*play(D8, 30.0), problem=_many_slots())
    full, half = (found.round_speed(rollout_on(D8, 32, pages), 20, 8) for pages in (8, 4))
    assert half == pytest.approx(full / 2)


def _many_slots() -> HandProblem:
    problem = hand_problem({D8: 1.0}, MODEL)
    return dataclasses.replace(
        problem, work=dataclasses.replace(problem.work, num_slots=32, num_rows=32)
    )


def test_round_of_few_live_episodes_is_corrected_as_the_mesh_is():
    model_s = estimator().live_round_s(rollout_on(T8), 1, 20)
    assert model_s == 1 / 40
    slower = estimator(*play(T8, 10.0))
    assert slower.live_round_s(rollout_on(T8), 1, 20) == pytest.approx(4 * model_s)


def test_entries_that_this_problem_cannot_have_say_nothing():
    found = estimator(
        ("train data=2,tensor=4 20 micro_batches=1,remat=True", 1e9),
        # Eight rows: no three parts, and no sixteen.
        ("train data=8 20 micro_batches=3,remat=True", 1e9),
        ("train data=8 20 micro_batches=16,remat=True", 1e9),
        ("rollout data=1,context=8 20 slots=8", 1e9),
        ("rollout data=8 20 slots=12", 1e9),
    )
    assert found.update_speed(train_on(D8), 20) == 100.0
    assert found.round_speed(rollout_on(D8, 8, 2), 20, 2) == 100.0
