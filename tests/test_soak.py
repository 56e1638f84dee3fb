# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A soak: a client does everything in any order, and nothing is lost, wrong or left behind."""

import gc
import threading

import jax
import pytest

from benchmarks.soak import soak
from tests.support import wait_until


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "windows"), [(2_000, ()), (4_000, (4, 0, 0))])
def test_every_token_of_a_client_that_does_everything_is_exact(num_tokens, windows):
    """It submits, aborts, swaps weights and pauses; environments are slow and fail; pages are few.

    With windows episodes give up the pages behind them. What else holds is checked by
    `benchmarks.soak.Findings.check`: each episode ends once, and as its environment does.
    """
    found = soak(num_tokens, seed=1, windows=windows)
    assert found.stats.rollout_tokens >= num_tokens


@pytest.mark.slow
def test_nothing_leaks():
    """Neither arrays on the devices nor threads, of environments that hung too."""
    left, threads = [], threading.active_count()
    for _ in range(2):
        soak(2_000, seed=1)
        gc.collect()
        # What is made once is no leak.
        left.append(len(jax.live_arrays()))
        assert wait_until(lambda: threading.active_count() <= threads)
    assert left[0] == left[1]
