# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes and speeds of candidates, by hand: observed, else computed and corrected."""

import dataclasses
import math

import pytest

from benchmarks.choose import problem_on
from benchmarks.speeds import cpu_problem
from earl_jax.selector.candidates import RESERVE, Candidates
from earl_jax.selector.plans import TrainPlan
from earl_jax.selector.roofline import MODEL_ERROR
from earl_jax.selector.table import ThroughputTable, parse_key
from earl_jax.sharding.layout import MeshShape
from tests.support.placements import load_of
from tests.support.problems import (
    D2T4,
    D4T2,
    D8,
    F8,
    T8,
    HandProblem,
    hand_problem,
    rollout_key,
    rollout_on,
    train_on,
)

MODEL = {D8: 100.0, D4T2: 80.0, D2T4: 60.0, T8: 40.0}


def candidates(*observed: tuple[str, float], problem: HandProblem | None = None) -> Candidates:
    """Returns the candidates by a table of these speeds."""
    table = ThroughputTable()
    for key, speed in observed:
        table = table.with_speed(key, speed)
    return Candidates(problem or hand_problem({D8: 100.0, F8: 50.0}, MODEL), table)


def play(mesh, speed: float, tokens: int = 20, times: int = 3) -> list[tuple[str, float]]:
    return times * [(rollout_key(mesh, tokens, 8), speed)]


def on(found: Candidates, mesh, tokens: int = 20):
    """Returns the rollout's candidate on a mesh, with pages for all slots."""
    each = found.rollouts(tokens, None, math.inf)
    return next(candidate for candidate in each if candidate.plan.mesh == mesh)


def update(found: Candidates, plan: TrainPlan, length: int = 20):
    return next(candidate for candidate in found.train(length) if candidate.plan == plan)


# Bytes.


def test_known_bytes_of_a_round_are_those_without_pages_at_the_same_bucket_and_slots():
    problem = hand_problem({D8: 1.0}, MODEL)
    table = ThroughputTable().with_bytes(rollout_key(D8, 20, 8), 700)
    found = Candidates(problem, table)
    assert found.round_bytes(rollout_on(D8, 8, 3), 20) == (700 + 240, True)
    assert found.round_bytes(rollout_on(D8, 8, 5), 20) == (700 + 400, True)
    assert found.round_bytes(rollout_on(D8, 8, 3), 40) == (1000 + 240, False)
    assert found.round_bytes(rollout_on(D8, 4, 3), 20) == (1000 + 240, False)


# Pages.


def test_rollout_that_ran_out_of_memory_is_tried_with_fewer_pages_before_fewer_slots():
    """Ten slots of a row shard have ten pages each."""
    problem = page_problem(num_slots=80, budget_bytes=24_000)
    table, seen = ThroughputTable(), []
    for _ in range(7):
        (found,) = Candidates(problem, table).rollouts(100, None, problem.budget)
        seen.append((found.plan.num_slots, found.plan.pages))
        table = table.with_failure(problem.failure(found.plan, 100))
    assert seen == [(80, 100), (80, 90), (80, 75), (80, 50), (80, 25), (40, 50), (40, 45)]


def test_speed_is_that_of_the_pages_with_which_a_plan_is_tried():
    problem = page_problem(num_slots=80, budget_bytes=24_000)
    (first,) = Candidates(problem).rollouts(100, None, problem.budget)
    table = ThroughputTable().with_failure(problem.failure(first.plan, 100))
    (found,) = Candidates(problem, table).rollouts(100, None, problem.budget)
    assert (found.plan.pages, found.num_bytes) == (90, 1000 + 90 * 80)
    # Nine of ten slots at once.
    assert found.tokens_per_s == pytest.approx(0.9 * first.tokens_per_s)


def page_problem(num_slots: int, **changes) -> HandProblem:
    """Returns a problem of data=8 alone; a page takes 80 bytes."""
    problem = hand_problem({D8: 1.0}, {D8: 100.0}, **changes)
    work = dataclasses.replace(problem.work, num_slots=num_slots, num_rows=num_slots)
    return dataclasses.replace(problem, work=work)


@pytest.mark.parametrize(
    ("budget", "cache_tokens", "pages"),
    [
        # A pool of 20 pages takes 1600 bytes, beside 1000 of the rollout.
        (2600, 0, 20),
        (2600, 4000, 20),
        # It stays while a larger one that holds the tokens does not fit beside it.
        (4450, 4000, 20),
        # 4500 bytes but for 225, of 2600 beside: 20 pages; 4600 hold 22.
        (4500, 4000, 20),
        (4600, 4000, 22),
        (4600, 0, 20),
        # As many as can be of use: it need not grow again.
        (6200, 0, 40),
        (None, 0, 40),
    ],
)
def test_pool_of_live_episodes_stays_unless_a_larger_one_fits_beside_it(
    budget, cache_tokens, pages
):
    problem = page_problem(num_slots=80, budget_bytes=budget)
    live = rollout_on(D8, 80, 20)
    (found,) = Candidates(problem).moves(live, 40, cache_tokens, problem.budget)
    assert found.plan == live._replace(pages=pages)
    assert found.num_bytes == 1000 + 80 * pages + (1600 if pages > 20 else 0)
    assert found.fits(problem.budget)


def test_bytes_that_are_exact_or_far_too_many_say_that_a_pool_cannot_stay():
    """Rows of longer episodes beside it: as many bytes as were computed may not be needed."""
    problem, live = page_problem(num_slots=80, budget_bytes=2599), rollout_on(D8, 80, 20)
    for known, fits in ((0, True), (999, True), (1000, False)):
        table = ThroughputTable().with_bytes(rollout_key(D8, 40, 80), known)
        (found,) = Candidates(problem, table).moves(live, 40, 0, problem.budget)
        assert (found.plan, found.fits(problem.budget)) == (live, fits)
    # Of 2600 bytes 260 may be too many.
    for budget, fits in ((2340, True), (2339, False)):
        problem = page_problem(num_slots=80, budget_bytes=budget)
        (found,) = Candidates(problem).moves(live, 40, 0, budget)
        assert found.fits(budget) == fits
    # A pool in which no episode of so many tokens fits does not stay.
    (found,) = Candidates(problem).moves(live, 210, 0, problem.budget)
    assert found.plan.pages == 21 and not found.fits(problem.budget)


# Speeds.


def test_trusted_speed_counts_and_the_factor_of_its_mesh_carries_over_buckets():
    found = candidates(*play(D8, 30.0))
    assert (on(found, D8).tokens_per_s, on(found, D8).num_speeds) == (30.0, 3)
    # 30 of 100: so it is for longer contexts, where the mesh never ran.
    longer = on(found, D8, tokens=40)
    assert longer.tokens_per_s == pytest.approx(30.0) and longer.num_speeds == 0
    # The other stage is not corrected.
    assert update(found, train_on(D8)).tokens_per_s == 100.0


@pytest.mark.parametrize("noise", [1.1, 1.3, 1.49, 80.0])
def test_speeds_below_the_model_count_only_once_they_are_trusted(noise):
    """Until then the plan is as fast as the model says, at this context bucket and at others."""
    slow = 80 * 0.5 / noise
    once = (*play(D8, 50.0), *play(D4T2, slow, times=2), *play(D2T4, 35.0, times=1))
    # The usual factor is that of data=8 and a half; 35 of 60 is more.
    found = candidates(*once)
    assert on(found, D4T2).tokens_per_s == pytest.approx(80 * 0.5)
    assert on(found, D4T2, tokens=40).tokens_per_s == pytest.approx(80 * 0.5)
    assert on(found, D2T4).tokens_per_s == 35.0
    found = candidates(*once, *play(D4T2, slow, times=1))
    assert on(found, D4T2).tokens_per_s == pytest.approx(slow)
    assert on(found, D4T2, tokens=40).tokens_per_s == pytest.approx(slow)


def test_mesh_that_is_known_to_be_slow_counts_as_slow_at_another_bucket():
    """A quarter of what is computed: what one step there shows counts if it is more."""
    for once, counts in ((5.0, 20.0), (19.0, 20.0), (22.0, 22.0)):
        found = candidates(
            *play(D8, 100.0), *play(D4T2, 20.0), *play(D4T2, once, tokens=40, times=1)
        )
        assert on(found, D4T2, tokens=40).tokens_per_s == pytest.approx(counts)


def test_two_meshes_that_never_ran_may_be_tried_at_each_context_bucket():
    table = candidates(*play(D8, 50.0)).table
    problem = hand_problem({D8: 100.0}, MODEL)

    def trials(*tried, tokens=20):
        known = table
        for mesh in tried:
            known = known.with_speed(rollout_key(mesh, 20, 8), 0.5 * MODEL[mesh])
        may_try = lambda key: True  # noqa: E731
        found = Candidates(problem, known, may_try=may_try).rollouts(tokens, None, math.inf)
        return {c.plan.mesh: c.tokens_per_s for c in found if c.is_trial}

    # As fast as the model's error allows: computed 80, the usual factor 1/2.
    times = 0.5 * MODEL_ERROR
    assert trials() == pytest.approx({D4T2: 80 * times, D2T4: 60 * times, T8: 40 * times})
    assert trials(D4T2) == pytest.approx({D2T4: 60 * times, T8: 40 * times})
    assert trials(D4T2, T8) == {}
    # At another bucket those that ran anywhere are known, and the last one may be tried.
    assert trials(D4T2, T8, tokens=40) == pytest.approx({D2T4: 60 * times})
    one = Candidates(problem, table, may_try=lambda key: parse_key(key)[0].mesh == T8)
    assert [c.plan.mesh for c in one.rollouts(20, None, math.inf) if c.is_trial] == [T8]
    assert not any(c.is_trial for c in Candidates(problem, table).rollouts(20, None, math.inf))


def test_fewer_pages_than_wanted_are_slower_by_the_models_ratio():
    found = candidates(*play(D8, 30.0), problem=_many_slots())
    # Eight pages of 80 bytes hold all, four hold half of the 32 slots; a rollout takes 1000 bytes.
    full, half = (found.rollout(rollout_on(D8, 32, 0), 20, None, free) for free in (1640, 1320))
    assert (full.plan.pages, half.plan.pages) == (8, 4)
    assert half.tokens_per_s == pytest.approx(full.tokens_per_s / 2)


def _many_slots() -> HandProblem:
    problem = hand_problem({D8: 1.0}, MODEL)
    return dataclasses.replace(
        problem, work=dataclasses.replace(problem.work, num_slots=32, num_rows=32)
    )


@pytest.mark.parametrize(
    ("mesh", "num_slots"),
    [(MeshShape(data=8, context=2, tensor=4), 8), (MeshShape(16, tensor=4), 64)],
)
def test_slots_without_pages_are_left_out_where_pages_are_gathered_for_all(mesh, num_slots):
    """Pages of a row shard for one episode of eight slots, and of four.

    TPUs have no kernel for pages of 64 tokens: with eight slots each of eight rounds gathers eight.
    """
    problem = problem_on("v5e:8x8", "qwen2.5-7b")
    free = problem.bare_footprint(mesh, 64, 131_072).total + RESERVE * problem.budget
    free += problem.least_pages(131_072) * problem.page_bytes(mesh)

    each = Candidates(problem).rollouts(131_072, None, free)
    found = next(candidate for candidate in each if candidate.plan.mesh == mesh)
    assert found.plan.num_slots == num_slots
    all_slots = Candidates(problem).rollout(rollout_on(mesh, 64, 0), 131_072, None, free)
    gain = found.tokens_per_s / all_slots.tokens_per_s
    assert gain > 3.5 if num_slots < 64 else gain == 1.0


def test_round_of_few_live_episodes_is_corrected_as_the_mesh_is():
    model_s = candidates().live_token_s(rollout_on(T8), 1, 20)
    assert model_s == 1 / 40
    slower = candidates(*play(T8, 10.0))
    assert slower.live_token_s(rollout_on(T8), 1, 20) == pytest.approx(4 * model_s)


def test_a_rollout_is_slower_the_more_its_episodes_read():
    """At first they read a chunk of ten tokens for each turn of four, then what a load says."""
    problem = cpu_problem()
    assert problem.work.appended == 2.5

    def speed(appended: float | None) -> float:
        load = dataclasses.replace(load_of(24), appended=appended)
        (first, *_) = Candidates(problem, load=load).rollouts(24, None, math.inf)
        return first.tokens_per_s

    assert speed(5.0) < speed(None) == speed(2.5) < speed(0.0)


def test_entries_that_this_problem_cannot_have_are_ignored():
    found = candidates(
        ("train data=2,tensor=4 20 micro_batches=1,remat=full", 1e9),
        # Eight rows: no three parts, and no sixteen.
        ("train data=8 20 micro_batches=3,remat=full", 1e9),
        ("train data=8 20 micro_batches=16,remat=full", 1e9),
        ("rollout data=1,context=8 20 slots=8", 1e9),
        ("rollout data=8 20 slots=12", 1e9),
    )
    assert update(found, train_on(D8)).tokens_per_s == 100.0
    assert on(found, D8).tokens_per_s == 100.0
