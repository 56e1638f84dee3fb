# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The simulator of asynchronous runs: times by hand, and the bound of the decisions it drives."""

import dataclasses
import math
import types

import pytest

from benchmarks.pages import read_table
from benchmarks.simulate import (
    ERROR,
    HELD_OUT,
    LADDER,
    MEASURED,
    TWO_PROCESSES,
    Setup,
    SimulatedService,
    Step,
    held_out,
    isolated,
    makespan,
    measured_times,
    recalls,
    run,
    summary,
)
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


def test_a_ranker_without_error_begins_with_the_longest_of_each_step():
    setup = dataclasses.replace(SMALL, lengths=(10, 30, 20, 40, 7, 90), groups=1, group_size=4)
    service = SimulatedService(dataclasses.replace(setup, error=0.0), "fifo", 1, 1)
    service.submit([types.SimpleNamespace(episode=e, group=e) for e in range(6)])
    ended = []
    while service.is_busy:
        ended += [each.ticket for each in service.step()]
    # Four are of the first step, two of the second.
    assert ended == [3, 1, 2, 0, 5, 4]


def test_a_synchronous_step_is_its_publish_rollout_and_update():
    expected = tokens = 0.0
    for step in (2, 3, 4, 5):
        episodes = [4 * step + i for i in range(4)]
        played = sum(map(SMALL.length, episodes))
        expected += 7.0 + makespan(SMALL, episodes, "fifo", 1, 2) + 0.5 * played
        tokens += played
    result = run(SMALL, AsynchronyConfig(), "fifo", train_s=0.5)
    assert result["speed"] == pytest.approx(tokens / expected) and result["most"] == 0


def test_steps_at_both_ends_of_a_run_are_left_out():
    """Two slots and a publish of 7. Steps 1 and 2 of four take 7 + 6 + 4 and 7 + 9 + 5.5."""
    setup = dataclasses.replace(SMALL, groups=1, lengths=(10, 4, 6, 2, 9, 2, 5, 1), num_steps=4)
    found = run(setup, AsynchronyConfig(), "fifo", train_s=0.5, warm_up=1, cool_down=1)
    times = {"speed": 19 / 38.5, "step": 19.25, "rounds": 7.5}
    lengths = {"length": 4.75, "trained": 1, "beyond": 0, "dropped": 0, "most": 0}
    assert found == pytest.approx(times | lengths)


def test_tokens_beyond_the_bound_and_dropped_ones_are_those_of_the_steps_that_count():
    """Step 1 trains on tokens of version 0, step 2 on 3 of them, and 4 of version 1; bound 1."""

    def episode(*had: tuple[int, int]):
        return types.SimpleNamespace(num_tokens=had[-1][1], oldest_version=had[0][0], had=had)

    trained = [[episode((0, 9))], [episode((0, 5))], [episode((0, 3), (1, 7)), episode((2, 1))]]
    dropped = [[], [episode((0, 16))], []]
    steps = [Step(10.0 * n, 5 * n, *of) for n, of in enumerate(zip(trained, dropped, strict=True))]
    found = summary([*steps, Step(30.0, 16, [], [])], first=1, last=3, bound=1)
    assert found == pytest.approx(
        {
            "speed": 13 / 20,
            "step": 10.0,
            "rounds": 5.5,
            "length": 13 / 3,
            "trained": (13 / 3) / (29 / 4),
            "beyond": 3 / 13,
            "dropped": 16 / 29,
            "most": 2,
        }
    )


def test_long_episodes_on_an_instance_of_their_own_end_sooner():
    """One of 100 tokens and nine of 10 on two instances of five slots; a round takes 1 + live.

    Together: 10 rounds of 6, and 90 of 2. With the long one alone it takes 100 rounds of 2, and the
    others 10 of 6 and 10 of 5. With one of the others beside it there are 10 rounds of 3 and 90 of
    2, and on one instance all take 20 of 6, 10 of 3 and 70 of 2.
    """
    setup = dataclasses.replace(
        SMALL, devices=32, slots=5, groups=10, group_size=1, lengths=(100, *[10] * 9), saturation=1
    )
    assert makespan(setup, range(10), "fifo", 2, 5) == 10 * 6 + 90 * 2
    assert isolated(setup, range(10)) == 100 * 2
    # Of three instances two are a wide one, whose rounds take 0.665 (1 + live / 47).
    three = dataclasses.replace(setup, devices=48, lengths=(200, *[10] * 9))
    wide = isolated(three, range(10), wide=True)
    assert wide == pytest.approx(200 * 0.665 * (1 + 1 / 47))


def test_new_weights_have_live_episodes_read_their_tokens_again():
    """Ten tokens in ten rounds; two are read again a round. The second time cuts the first off.

    Behind round 6 there are 6 tokens: 3 rounds to read them, in the last of which the episode goes
    on, so that it would end with round 12. Behind round 7 one of two rounds is left, and 2 begin
    anew: it ends with round 13. Behind round 9 there are 7 tokens, and 3 rounds more.
    """
    setup = dataclasses.replace(SMALL, lengths=(10,), read=2)
    for published, ends, had in (
        ((), 10, [(0, 10)]),
        ((6,), 12, [(0, 6), (1, 10)]),
        ((6, 7), 13, [(0, 6), (1, 6), (2, 10)]),
        ((6, 9), 15, [(0, 6), (1, 7), (2, 10)]),
        ((0,), 10, [(1, 10)]),
    ):
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
        assert finished.trajectory.had == had
        assert not service.is_busy
    # Beside an update a round takes longer.
    service = SimulatedService(dataclasses.replace(setup, beside=3.0), "fifo", 1, 1)
    service.submit([types.SimpleNamespace(episode=0, group=0)])
    service.until = service.trains_until = 12.0
    assert service.step() == []
    assert service.num_rounds == 4 and service.now == pytest.approx(12.0)
    service.until = math.inf
    assert len(service.step()) == 1
    assert service.num_rounds == 10 and service.now == pytest.approx(18.0)


def test_live_episodes_end_before_new_weights_where_these_interrupt_none():
    """Groups of two in two slots; lengths 10 4, 6 2, 9 2, 5 1, of which three groups are open.

    Step 0 has its group with round 10, at 17, and its update until 18.4; with round 12 episode 3
    ends too, and so the second group, at 19. Of the third one episode 4 plays until round 19, at
    26; episode 5 waits until the weights are there, at 33. Beside an update of 0.8 it plays one
    round, and then until round 21, beside episode 6, which ends with 24, at 38. Step 2 has its
    weights at 45, and beside its update of 1.1 the last episode plays. Step 3 ends at 53.1 + 0.6.

    Interrupted, episode 5 begins with round 12 and the last ones with 14 and 19: step 1 has its
    weights at 26, step 2 its at 34 and its group with round 19, at 40, and step 3 its at 48.1.
    """
    setup = dataclasses.replace(SMALL, groups=1, lengths=(10, 4, 6, 2, 9, 2, 5, 1), num_steps=4)
    for kv, seconds, rounds in (("finish", 53.7, 25), ("keep", 48.7, 20)):
        settings = AsynchronyConfig(max_staleness=2, kv=kv)
        found = run(setup, settings, "fifo", train_s=0.1, warm_up=0)
        assert found["step"] == pytest.approx(seconds / 4)
        assert found["rounds"] == pytest.approx(rounds / 4)


def test_gradients_of_parts_are_computed_while_the_others_are_played():
    """Three groups of two, which end with rounds 5, 9 and 40; a token takes 1.

    The first is there at 7 + 5, and its gradients at 12 + 8 = 20. Its rows are sent until 13, so
    that the second is there at 17. Its gradients begin at 20 and are there at 34. The third is
    there at 18 + 31 = 49, and its gradients at 49 + 41 = 90.

    Where rounds beside gradients take 3, three of them end at 22, and the second part is there at
    23, and its gradients at 37. From 24 to 39 five rounds are played beside them, and the third
    part is there at 39 + 26 = 65. Where the second one waits for the gradients of the first, 3
    rounds are played until then, and the third is there at 21 + 28 = 49 as well.

    Where each part takes 10 more, they are there at 30, 54 and 105, and with half as long for a
    token at 26, 43 and 79.5.
    """
    lengths = (5, 3, 9, 5, 40, 1) * 3
    setup = dataclasses.replace(SMALL, slots=6, groups=3, lengths=lengths, num_steps=3, hand=1.0)
    for changes, expected in (
        ({}, 90),
        ({"beside": 3.0}, 106),
        ({"queued": True}, 90),
        ({"part": 10.0}, 105),
        ({"part": 10.0, "part_token": 0.5}, 79.5),
    ):
        given = dataclasses.replace(setup, **changes)
        found = run(given, AsynchronyConfig(parts=3), "fifo", train_s=1.0, warm_up=0)
        assert found["step"] == pytest.approx(expected)
        assert found["speed"] == pytest.approx(63 / expected)


@pytest.mark.parametrize("rule", ["in_order", "wait", "drop"])
def test_episodes_that_are_trained_on_are_as_long_as_those_of_the_tasks_unless_some_are_dropped(
    rule,
):
    """All steps count. Long episodes go through more than one update, and are dropped."""
    setup = dataclasses.replace(SMALL, groups=8, slots=16, num_steps=12)
    settings = AsynchronyConfig(max_staleness=1, rule=rule)
    found = run(setup, settings, "fifo", train_s=0.01, warm_up=0)
    number = setup.num_steps * setup.episodes_per_step
    mean = sum(map(setup.length, range(number))) / number
    if rule == "drop":
        assert found["length"] < 0.9 * mean
    else:
        assert found["length"] == pytest.approx(mean)


def test_predictions_are_as_good_as_they_say():
    setup = Setup(groups=512, by_task=0.5)
    episodes = range(setup.episodes_per_step)
    lengths = [setup.length(episode) for episode in episodes]
    assert [setup.predicted(episode, 0.0) for episode in episodes[:50]] == lengths[:50]
    ranker = recalls([setup.predicted(episode, ERROR) for episode in episodes], lengths)
    assert ranker[20] == pytest.approx(0.87, abs=0.02)
    prompt = recalls([setup.by_prompt(episode) for episode in episodes], lengths)
    assert 0.3 < prompt[20] < ranker[20]
    # Where the task decides all, a prompt says all.
    exact = dataclasses.replace(setup, by_task=1.0, longest=10**9)
    assert [round(exact.by_prompt(e)) for e in range(99)] == [exact.length(e) for e in range(99)]


@pytest.mark.parametrize("measured", [TWO_PROCESSES, LADDER])
def test_the_simulation_with_measured_times_is_near_the_real_runs(measured):
    """More than the real runs' own columns say: the lengths are drawn here."""
    for row in measured_times(measured, (2,)):
        assert row["2 devices"] == pytest.approx(row["2 devices, real"], rel=0.1), row


@pytest.mark.parametrize(("lines", "error"), [(HELD_OUT[0], 0.05), (HELD_OUT[1], 0.1)])
def test_the_times_of_one_run_say_how_fast_others_of_its_kind_are(lines, error):
    rows = held_out(*lines)
    assert len(rows) > 1 and max(abs(row["real"] - 1) for row in rows) > 0.2
    for row in rows:
        assert row["simulated"] == pytest.approx(row["real"], rel=error), row


@pytest.mark.parametrize(
    ("name", "number"), [("table", 9), ("table of processes", 7), ("table of the ladder", 6)]
)
def test_the_simulations_on_the_page_are_within_a_tenth_of_its_runs(name, number):
    rows = [row for row in read_table(MEASURED, name) if row["tokens/s, simulated"]]
    assert len(rows) == number
    for row in rows:
        simulated, real = float(row["tokens/s, simulated"]), float(row["tokens/s"])
        assert simulated == pytest.approx(real, rel=0.1), row
