# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The load that the selector sees: a window of steps, and what to expect next."""

import json
import random

import pytest

from earl_jax.telemetry.load import WINDOW, Load, LoadHistory, growth_of


def load(longest, mean=1.0, in_flight=1, sampled=1):
    return Load(
        context_tokens_max=longest,
        context_tokens_mean=mean,
        tokens_in_flight_max=in_flight,
        rollout_tokens=sampled,
    )


def history(*loads):
    made = LoadHistory()
    for one in loads:
        made = made.add(one)
    return made


def test_recent_is_the_newest_step_with_the_longest_and_fullest_of_the_window():
    seen = history(load(30, 20.0, 500, 100), load(42, 25.5, 400, 110), load(28, 18.0, 450, 90))
    assert seen.recent() == load(42, 18.0, 500, 90)
    assert history(load(30, 20.0, 500, 100)).recent() == load(30, 20.0, 500, 100)


def test_averages_are_those_of_the_window():
    seen = history(load(30, 20.0, 500, 100), load(42, 25.0, 400, 110), load(28, 18.0, 450, 93))
    assert seen.averaged(load(50, 1.0, 600, 1)) == load(50, 21.0, 600, 101)


def test_a_step_is_forgotten_after_the_window():
    peak = load(100, in_flight=900)
    short = [load(10, in_flight=90)] * (WINDOW - 1)
    remembered = history(peak, *short)
    assert remembered.recent().context_tokens_max == 100
    forgotten = remembered.add(load(11))
    assert len(forgotten.steps) == WINDOW
    assert forgotten.recent().context_tokens_max == 11
    assert forgotten.recent().tokens_in_flight_max == 90


def test_a_history_comes_back_from_a_checkpoint_and_goes_on_alike():
    seen = history(*(load(n, n / 3, 7 * n, 5) for n in range(WINDOW + 3)))
    again = LoadHistory.from_list(json.loads(json.dumps(seen.as_list())))
    assert again == seen
    assert again.add(load(4)).recent() == seen.add(load(4)).recent()


# The forecast.


def test_a_forecast_without_growth_is_what_was_recent():
    assert LoadHistory().forecast() is None
    for seen in ([30], [30, 31, 32], [40, 30, 41, 29, 40, 31, 42, 30], [50, 40, 30, 20, 10]):
        steps = history(*map(load, seen))
        assert steps.forecast() == steps.recent()


def test_growth_is_the_median_slope_and_the_forecast_one_step_ahead():
    steady = history(*map(load, (10, 14, 18, 22)))
    assert steady.forecast().context_tokens_max == 26
    assert steady.forecast().growth_tokens == 4.0
    # One step among eight that is out of line: slopes of all pairs, by hand 4 in the middle.
    odd = [10, 14, 18, 60, 26, 30, 34, 38]
    assert growth_of(odd) == 4.0
    assert history(*map(load, odd)).forecast().context_tokens_max == 64
    assert growth_of([10, 10, 11, 11, 11, 12]) == pytest.approx(1 / 3)
    assert growth_of([5, 5, 5, 5]) == 0.0


def test_growth_is_distinguished_from_noise():
    """Few windows without a trend are taken for growing, and most growing ones are."""
    rng = random.Random(0)
    flat = [[rng.randint(0, 100) for _ in range(WINDOW)] for _ in range(1000)]
    growing = [[20 * k + rng.randint(0, 40) for k in range(WINDOW)] for _ in range(1000)]
    assert sum(growth_of(counts) > 0 for counts in flat) < 20
    assert sum(growth_of(counts) > 0 for counts in growing) > 900
