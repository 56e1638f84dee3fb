# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The simulator of asynchronous runs: times by hand, and the bound of the decisions it drives."""

import dataclasses
import math
import types

import pytest

from benchmarks.simulate import Setup, SimulatedService, isolated, makespan, run
from earl_jax.rollout.staleness import AsynchronyConfig

# One instance of two slots, a token a round, of which each takes one unit.
SMALL = Setup(
    devices=16, slots=2, groups=2, group_size=2, median=50.0, longest=400, saturation=1e12,
    burst=1, publish=7.0, num_steps=6,
)  # fmt: skip


def test_a_rollout_takes_as_long_as_its_slots_are_busy():
    first, second, third = lengths = [SMALL.length(episode) for episode in range(3)]
    assert len(set(lengths)) > 1
    assert makespan(SMALL, [0, 1, 2], "fifo", 1, 1) == pytest.approx(sum(lengths))
    begins = min(first, second)
    assert makespan(SMALL, [0, 1, 2], "fifo", 1, 2) == pytest.approx(
        max(first, second, begins + third)
    )
    # With one episode live on a device of saturation 1, a token takes 2.
    slow = dataclasses.replace(SMALL, saturation=1.0)
    assert makespan(slow, [0], "fifo", 1, 1) == pytest.approx(2 * first)


def test_a_synchronous_step_is_its_publish_rollout_and_update():
    expected = tokens = 0.0
    for step in (2, 3, 4, 5):
        episodes = [4 * step + i for i in range(4)]
        played = sum(map(SMALL.length, episodes))
        expected += 7.0 + makespan(SMALL, episodes, "fifo", 1, 2) + 0.5 * played
        tokens += played
    result = run(SMALL, AsynchronyConfig(), "fifo", train_s=0.5)
    assert result["speed"] == pytest.approx(tokens / expected) and result["most"] == 0


def test_new_weights_have_live_episodes_read_their_tokens_again():
    """Ten tokens in ten rounds; two are read again a round. The second time cuts the first off.

    Behind round 6 there are 6 tokens: 3 rounds to read them, so that it would end with round 13.
    Behind round 8 one of the three rounds is left, and 3 begin anew: it ends with round 15.
    """
    setup = dataclasses.replace(SMALL, lengths=(10,), read=2)
    for published, ends in (((), 10), ((6,), 13), ((6, 8), 15), ((6, 9), 16), ((0,), 10)):
        service = SimulatedService(setup, "fifo", 1, 1)
        service.submit([types.SimpleNamespace(episode=0, group=0)])
        for version, at in enumerate(published, 1):
            service.until = at
            while service.now < at:
                assert service.step() == []
            service.publish(version)
        service.until = math.inf
        (finished,) = service.step()
        assert (finished.ticket, service.num_rounds) == (0, ends)
        assert not service.is_busy
    # Beside an update a round takes longer.
    service = SimulatedService(dataclasses.replace(setup, beside=3.0), "fifo", 1, 1)
    service.submit([types.SimpleNamespace(episode=0, group=0)])
    service.until = 12.0
    assert service.step() == []
    assert service.num_rounds == 4 and service.now == pytest.approx(12.0)
    service.until = math.inf
    assert len(service.step()) == 1
    assert service.num_rounds == 10 and service.now == pytest.approx(18.0)


@pytest.mark.parametrize("order", ["fifo", "longest"])
def test_asynchronous_runs_are_faster_and_keep_the_bound(order):
    setup = dataclasses.replace(SMALL, groups=8, slots=4)
    synchronous = run(setup, AsynchronyConfig(), order, train_s=0.2)
    streaming = run(setup, AsynchronyConfig(parts=4), order, train_s=0.2)
    ahead = run(setup, AsynchronyConfig(max_staleness=2, parts=4), order, train_s=0.2)
    assert ahead["speed"] > streaming["speed"] > synchronous["speed"]
    assert streaming["most"] == 0 and 0 < ahead["most"] <= 2


def test_isolation_never_loses_to_the_worst_split():
    setup = dataclasses.replace(SMALL, devices=64, groups=16, slots=4, saturation=4.0)
    ranked = sorted(range(setup.episodes_per_step), key=lambda e: -setup.length(e))
    cut = round(len(ranked) * 0.1)
    worst = max(
        makespan(setup, ranked[:cut], "fifo", 1, 4), makespan(setup, ranked[cut:], "fifo", 3, 4)
    )
    assert isolated(setup, ranked) <= worst
