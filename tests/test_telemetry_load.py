# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The load that the selector sees: a window of steps, and what to expect next."""

import dataclasses
import json

import pytest

from earl_jax.telemetry.load import WINDOW, Load, LoadHistory


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


def test_nothing_is_expected_before_the_first_step():
    assert LoadHistory().recent() is None
    assert LoadHistory().as_list() == []


def test_recent_is_the_newest_step_with_the_longest_and_fullest_of_the_window():
    seen = history(load(30, 20.0, 500, 100), load(42, 25.5, 400, 110), load(28, 18.0, 450, 90))
    assert seen.recent() == load(42, 18.0, 500, 90)
    assert history(load(30, 20.0, 500, 100)).recent() == load(30, 20.0, 500, 100)


def test_a_step_is_forgotten_after_the_window():
    peak = load(100, in_flight=900)
    short = [load(10, in_flight=90)] * (WINDOW - 1)
    remembered = history(peak, *short)
    assert remembered.recent().context_tokens_max == 100
    forgotten = remembered.add(load(11))
    assert len(forgotten.steps) == WINDOW
    assert forgotten.recent().context_tokens_max == 11
    assert forgotten.recent().tokens_in_flight_max == 90


def test_adding_leaves_the_old_history_as_it_was():
    before = history(load(1))
    before.add(load(2))
    assert before == history(load(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.steps = ()


def test_a_history_comes_back_from_a_checkpoint_and_goes_on_alike():
    seen = history(*(load(n, n / 3, 7 * n, 5) for n in range(WINDOW + 3)))
    again = LoadHistory.from_list(json.loads(json.dumps(seen.as_list())))
    assert again == seen
    assert again.add(load(4)).recent() == seen.add(load(4)).recent()
