# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout that runs out of memory for real goes on with the optimizer's moments on the host."""

import json

import jax
import numpy as np
import pytest
from test_survival import D8, GIVEN, PLACES, hungry, placed

from earl_jax.calibrate import Calibration
from earl_jax.config_file import make_config
from earl_jax.joint import to_checkpoint
from earl_jax.loop import Position, rl_step
from earl_jax.placement import Placement
from earl_jax.rest import is_at_rest
from earl_jax.selector.throughput import ThroughputTable
from earl_jax.telemetry.load import LoadHistory
from earl_jax.world import World

MESHES = {"rollout_meshes": (str(D8),), "train_meshes": (str(D8),), "offload": "on"}
RESTING = "the moments in host memory during rollouts"


@pytest.fixture(scope="module")
def world():
    return World(make_config(GIVEN | {"selector": GIVEN["selector"] | MESHES}))


def begin(world):
    return Position(step=0, state=world.init_train_state(D8), history=LoadHistory())


@pytest.mark.slow
def test_a_rollout_short_of_memory_beside_the_moments_is_played_again_without_them(
    world, monkeypatch
):
    """In its third round, without a budget; the step is then the undisturbed one, bit for bit."""
    placement, engine = placed(world), world.engine(D8)
    move_state, plays = placement.move_state, engine._play_plain
    at_rest, rounds = [], []

    def moving(state, **settings):
        moved = move_state(state, **settings)
        at_rest.append(is_at_rest(moved))
        return moved

    def play(*arguments):
        rounds.append(at_rest[-1])
        enough = at_rest[-1] or len(rounds) < 3
        return (plays if enough else hungry(donated=1))(*arguments)

    monkeypatch.setattr(placement, "move_state", moving)
    # Nothing is guessed in this run.
    monkeypatch.setattr(engine, "_play_plain", play)
    assert not placement.offload
    position, record = rl_step(world, placement, begin(world))
    monkeypatch.undo()

    # Two rounds and the failed one beside the moments; then from the first round again.
    assert rounds[:3] == [False] * 3 and set(rounds[3:]) == {True} and len(rounds) > 5
    (words,) = placement.take_log().failures
    assert words.startswith(f"rollout on {D8} ran out of memory with 16 slots")
    assert RESTING not in words
    assert placement.offload and placement.rung == RESTING
    # Every slot has all its pages: nothing else is less.
    assert placement.num_slots == 16 and record.stats.parked_episodes == 0
    # And it waits there for the next rollout.
    assert is_at_rest(position.state)

    undisturbed, expected = rl_step(world, placed(world), begin(world))
    assert not is_at_rest(undisturbed.state)
    for played, wanted in zip(record.trajectories, expected.trajectories, strict=True):
        assert played == wanted
    assert record.updates == expected.updates
    left, right = (to_checkpoint(world, each.state) for each in (position, undisturbed))
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.slow
def test_the_next_run_begins_with_the_moments_out_of_the_way(world, monkeypatch):
    """What failed beside them is remembered as such."""
    placement = placed(world)

    def attempt():
        return hungry(donated=0)(np.ones(1, np.float32))

    assert placement.survive("rollout", attempt) is None
    said, table = [], placement.calibration.table
    again = ThroughputTable.from_dict(None, json.loads(json.dumps(table.as_dict())))
    assert again.failures == table.failures and len(again.failures) == 1
    resumed = Placement(world, Calibration(world, again, said.append))
    resumed.choose_step(PLACES, None)
    assert resumed.offload and resumed.rung == RESTING
    # Beside nothing it failed too: then there are fewer pages, and in the end fewer slots.
    assert resumed.survive("rollout", attempt) is None
    resumed.choose_step(PLACES, None)
    assert resumed.offload and (resumed.num_slots, resumed.pages) < (16, placement.pages)
