# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rows that decode steps computed against those that said something, by hand."""

import dataclasses

import numpy as np
import pytest

from earl_jax.engine.round_inputs import RoundOutputs
from earl_jax.rollout.load import measure_load
from earl_jax.rollout.results import Played
from earl_jax.rollout.stats import RolloutStats
from earl_jax.trajectory import Outcome
from tests.support.trajectories import make_outcome


def report(count, passes=None) -> RoundOutputs:
    counts = np.array(count)
    nothing = np.zeros((len(counts), 4), np.int32)
    return RoundOutputs(
        tokens=nothing,
        logprobs=nothing.astype(np.float32),
        count=counts,
        active=counts > 0,
        passes=None if passes is None else np.array(passes),
    )


@pytest.mark.parametrize(
    ("outputs", "shards", "rows", "idle"),
    [
        # Four slots on one device: four steps, of 4, 1, 1 and 1 rows that say something.
        (report([4, 1, 1, 1]), 1, 16, 9),
        # Two devices stop by themselves: four steps of two rows, and one.
        (report([4, 1, 1, 1]), 2, 10, 3),
        # Nobody speaks: all wait.
        (report([0, 0]), 1, 0, 0),
        # Of seven tokens in three passes four were guessed.
        (report([7, 0], [3, 0]), 1, 6, 3),
    ],
)
def test_idle_slot_counts_as_a_row_of_every_step_of_its_device(outputs, shards, rows, idle):
    stats = RolloutStats()
    stats.count_steps(outputs, shards)
    assert (stats.decode_rows, stats.idle_rows) == (rows, idle)
    stats.count_steps(outputs, shards)
    assert (stats.decode_rows, stats.idle_rows) == (2 * rows, 2 * idle)


def test_load_says_how_many_tokens_episodes_read_for_each_that_they_sampled():
    """4 of 9 and 8 of 21 tokens were sampled: 18 were read, 1.5 for each."""
    short = make_outcome()
    long = dataclasses.replace(short, num_tokens=21, num_policy_tokens=8)
    failed = dataclasses.replace(short, num_tokens=0, num_policy_tokens=0)

    def load(*outcomes: Outcome) -> tuple[float | None, int | None]:
        stats = RolloutStats(rollout_tokens=12)
        played = Played(
            outcomes=[*outcomes],
            stats=stats,
            placement={},
            gaps=[],
            dropped=[],
            refilled=[],
            num_reused=0,
        )
        found = measure_load(played, 2)
        return found.appended, found.live

    # The long one samples 4 of its 8 tokens alone: 12 in 8 steps.
    assert load(short, long) == (1.5, 2) and load(failed) == (None, None)
    # A prompt of any length is no step: 14 tokens in 10 steps.
    longer = dataclasses.replace(long, num_policy_tokens=10)
    assert load(dataclasses.replace(short, num_tokens=5000), longer)[1] == 1
    # Of four long ones two play at a time.
    assert load(long, long, long, long)[1] == 2
