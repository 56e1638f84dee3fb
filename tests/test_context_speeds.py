# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How long contexts are decides how fast a mesh is: speeds between measured rooms, and the choice.

All entries of the table are given, so that nothing is compiled or measured.
"""

import dataclasses

import pytest
from test_placement import D4T2, D8, TINY

from earl_jax.calibrate import Calibration
from earl_jax.config_file import make_config
from earl_jax.placement import Placement
from earl_jax.selector.throughput import Measurement, ThroughputTable
from earl_jax.telemetry.load import WINDOW, Load
from earl_jax.world import World

SHORT, LONG = 16, 32
GIVEN = {
    "model": TINY,
    "rollout": {
        "num_slots": 16,
        "episodes_per_step": 16,
        "burst": 2,
        "max_turn_tokens": 4,
        "context_buckets": (SHORT, LONG),
    },
    "selector": {
        "rollout_meshes": (str(D8), str(D4T2)),
        "train_meshes": (str(D8),),
        "order": "measured",
        "hysteresis": 0.0,
    },
}


@pytest.fixture(scope="module")
def world():
    return World(make_config(GIVEN))


def measurement(speed):
    return Measurement(tokens_per_s=speed, program_bytes=1, switch_s=0.0, alone_tokens_per_s=speed)


def calibration(world, speeds, **more):
    """With these tokens per second of rollouts, {(mesh, room): speed}; training takes no time.

    One slot alone is as fast as all: an empty one costs nothing (test_waves.py has what it costs).
    """
    speeds = {("rollout", mesh, room, ""): speed for (mesh, room), speed in speeds.items()}
    speeds |= {("train", D8, room, ""): 1e9 for room in (SHORT, LONG)}
    found = {
        ThroughputTable.entry(*key): measurement(speed) for key, speed in speeds.items()
    } | more
    return Calibration(world, ThroughputTable(path=None, measurements=found), lambda _: None)


def speeds_of(world, places, contexts, speeds, num_slots=None, **more):
    options = calibration(world, speeds, **more).rollout_options(
        places, 0, None, num_slots, contexts
    )
    return {option.mesh: option.tokens_per_s for option in options}


MEASURED = {(D8, SHORT): 200.0, (D8, LONG): 100.0, (D4T2, SHORT): 50.0, (D4T2, LONG): 50.0}


@pytest.mark.parametrize(
    ("contexts", "token_s"),
    [
        # 5 ms a token in room for 16, 10 ms in room for 32, and on the line between.
        ((16.0,), 0.005),
        ((32.0,), 0.010),
        ((24.0,), 0.0075),
        ((20.0,), 0.00625),
        # Below the smallest room that was measured it is as fast as there.
        ((8.0,), 0.005),
        # Of several lengths the mean of the times, which is not the time of the mean of speeds.
        ((16.0, 32.0), 0.0075),
        ((8.0, 16.0, 20.0, 24.0, 32.0), (5 + 5 + 6.25 + 7.5 + 10) / 5e3),
        # Nobody knows: episodes that fill their room.
        ((), 0.010),
    ],
)
def test_a_token_takes_what_lies_between_the_rooms_that_were_measured(world, contexts, token_s):
    found = speeds_of(world, LONG, contexts, MEASURED)
    assert found[D8] == pytest.approx(1 / token_s)
    assert found[D4T2] == pytest.approx(50.0)


def test_a_room_is_judged_by_no_larger_one(world):
    assert speeds_of(world, SHORT, (16.0, 32.0), MEASURED)[D8] == pytest.approx(200.0)


def test_a_rung_of_fewer_slots_has_speeds_of_its_own(world):
    """40 tokens/s in room for 32; the other room was not measured with 8 slots."""
    slow = measurement(40.0)
    entries = {ThroughputTable.entry("rollout", mesh, LONG, "slots=8"): slow for mesh in (D8, D4T2)}
    assert speeds_of(world, LONG, (16.0, 24.0), MEASURED, 8, **entries)[D8] == pytest.approx(40.0)
    entries[ThroughputTable.entry("rollout", D8, SHORT, "slots=8")] = measurement(80.0)
    # 12.5 ms and 25 ms a token: 12.5 and 18.75 ms.
    found = speeds_of(world, LONG, (16.0, 24.0), MEASURED, 8, **entries)
    assert found[D8] == pytest.approx(2e3 / (12.5 + 18.75))


def test_empty_slots_behind_the_last_episodes_take_time_where_a_round_of_few_does(world):
    """Lengths 16 and 32 of 16 episodes on 16 slots: half of them are empty for half of the time.

    A round of one slot takes as long as of all 16, as where nobody knows: 24 of 32 are used.
    """
    slow = Measurement(
        tokens_per_s=150.0, program_bytes=1, switch_s=0.0, alone_tokens_per_s=150.0 / 16
    )
    key = ThroughputTable.entry("rollout", D8, LONG)
    found = speeds_of(world, LONG, (16.0, 32.0), MEASURED, **{key: slow})
    # 5 and 6.67 ms a token in the two rooms.
    full = 2e3 / (5.0 + 1e3 / 150.0)
    assert found[D8] == pytest.approx(full * 24 / 32)
    nobody_knows = dataclasses.replace(slow, alone_tokens_per_s=None)
    found = speeds_of(world, LONG, (16.0, 32.0), MEASURED, **{key: nobody_knows})
    assert found[D8] == pytest.approx(full * 24 / 32)


# data=8 is twice as fast as tensor=2 in the small room, and half as fast in the large one.
CROSSING = {(D8, SHORT): 200.0, (D8, LONG): 50.0, (D4T2, SHORT): 100.0, (D4T2, LONG): 100.0}


def load(quantiles):
    """The same but for the quantiles: also the longest and the mean."""
    return Load(
        context_tokens_max=30,
        context_tokens_mean=22.0,
        context_tokens_quantiles=quantiles,
        tokens_in_flight_max=100,
        rollout_tokens=1000,
    )


MOST_ARE_SHORT, MOST_ARE_LONG = (12.0, 14.0, 15.0, 16.0, 30.0), (14.0, 28.0, 30.0, 30.0, 30.0)


@pytest.mark.parametrize(
    ("quantiles", "mesh", "rollout_s"),
    [
        # 4 x 5 ms and 5 + 14/16 x 15 = 18.125 ms: 7.625 ms a token, against 10 ms.
        (MOST_ARE_SHORT, D8, 7.625),
        # 5, 16.25 and 3 x 18.125 ms: 15.125 ms a token.
        (MOST_ARE_LONG, D4T2, 10.0),
    ],
)
def test_quantiles_of_contexts_decide_between_meshes(world, quantiles, mesh, rollout_s):
    decision = Placement(world, calibration(world, CROSSING)).choose_step(LONG, load(quantiles))
    assert decision.pair == (mesh, D8)
    assert decision.rollout.predicted_s == pytest.approx(rollout_s)


def test_the_rollout_follows_its_contexts_when_it_has_been_there_for_a_window(world):
    """The longest is as long as before: what grew is the others."""
    placement = Placement(world, calibration(world, CROSSING))
    for _ in range(WINDOW + 1):
        assert placement.choose_step(LONG, load(MOST_ARE_SHORT)).pair.rollout == D8
    decision = placement.choose_step(LONG, load(MOST_ARE_LONG))
    assert (decision.pair.rollout, decision.rollout.switched) == (D4T2, True)
    assert "leaves data=8 for data=4,tensor=2, a step 51% faster" in decision.rollout.reason
