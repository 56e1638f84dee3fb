# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The wait for environments before a round: by hand, against the best one, and in a rollout."""

import math
import random
import time

import pytest

from earl_jax.envs.round_wait import RoundWait
from earl_jax.rollout.rounds import Rounds
from tests.support.episodes import assert_same_episodes, check_rows, collect, open_service, tasks


def test_a_wait_by_hand():
    wait = RoundWait(round_s=0.3, num_working=4)
    assert wait.left_s(7.0, num_awaited=2, num_answered=0) == pytest.approx(2 * 0.3 / 4)
    assert wait.left_s(7.02, num_awaited=1, num_answered=1) == pytest.approx((0.3 - 0.08) / 5)
    # 5 slots lost 0.05 s more each, and what was at stake is lost.
    assert wait.left_s(7.07, num_awaited=1, num_answered=1) == pytest.approx(-0.03 / 5)


def test_a_wait_costs_nothing_while_no_slot_has_work():
    wait = RoundWait(round_s=0.02, num_working=0)
    assert wait.left_s(1.0, num_awaited=16, num_answered=0) == math.inf
    assert wait.left_s(9.0, num_awaited=15, num_answered=1) == pytest.approx(15 * 0.02)
    assert wait.left_s(9.1, num_awaited=1, num_answered=15) == pytest.approx((0.02 - 0.1) / 15)


def test_answers_that_were_there_before_have_work():
    wait = RoundWait(round_s=0.5, num_working=1)
    assert wait.left_s(3.0, num_awaited=2, num_answered=4) == pytest.approx(2 * 0.5 / 5)


def test_nobody_waits_for_nothing():
    assert RoundWait(round_s=0.3, num_working=0).left_s(1.0, num_awaited=0, num_answered=3) == 0
    assert RoundWait(round_s=0.3, num_working=4).left_s(1.0, num_awaited=0, num_answered=0) == 0


def lost_slot_s(until_s: float, came_s: list[float], num_working: int, round_s: float) -> float:
    """Returns the slot-seconds that are lost where a round begins then."""
    there = [at for at in came_s if at <= until_s]
    waited = num_working * until_s + sum(until_s - at for at in there)
    return waited + round_s * (len(came_s) - len(there))


@pytest.mark.parametrize("seed", range(200))
def test_at_most_twice_what_the_best_wait_loses(seed):
    """Whenever the answers come; the best one ends at once or with one of them."""
    rng = random.Random(seed)
    num_working, round_s = rng.randint(1, 9), rng.choice([0.01, 0.1, 1.0])
    came_s = sorted(rng.expovariate(1 / rng.choice([0.001, 0.1, 1.0])) for _ in range(8))
    best = min(lost_slot_s(at, came_s, num_working, round_s) for at in (0.0, *came_s))
    wait, now_s = RoundWait(round_s, num_working), 0.0
    for number, at in enumerate((*came_s, math.inf)):
        left_s = wait.left_s(now_s, len(came_s) - number, number)
        if now_s + left_s <= at:
            now_s += max(0.0, left_s)
            break
        now_s = at
    assert lost_slot_s(now_s, came_s, num_working, round_s) <= 2 * best * (1 + 1e-9)


@pytest.fixture(scope="module")
def games(pool):
    """Forty games on sixteen slots, in rounds that wait for all environments."""
    return collect(pool, tasks(40))


@pytest.mark.parametrize("round_s", [0.0, 60.0])
def test_tokens_are_the_same_however_long_a_round_takes(pool, games, monkeypatch, round_s):
    """Rounds that take a minute wait for all environments, as those with that patience do."""
    seconds = property(lambda rounds: round_s, lambda rounds, value: None)
    monkeypatch.setattr(Rounds, "round_s", seconds, raising=False)
    rollout = collect(pool, tasks(40), patience_s="auto")
    check_rows(rollout, 40)
    assert_same_episodes(games.trajectories, rollout.trajectories)
    if round_s:
        assert rollout.stats.rounds == games.stats.rounds


def test_the_time_of_a_round_is_measured(pool):
    """From the second round on: the first one may compile."""
    service = open_service(pool, patience_s="auto")
    guess = service._rounds.round_s
    service.submit(tasks(20))
    service.step()
    assert service._rounds.round_s == guess
    start_s = time.perf_counter()
    service.step()
    took_s = time.perf_counter() - start_s
    assert guess / 2 < service._rounds.round_s < (guess + took_s) / 2
    service.close()
