# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The optimizer's moments wait in host memory where a rollout needs their memory."""

import json

import jax
import numpy as np
import pytest

from earl_jax import loop
from earl_jax.loop import rl_step
from earl_jax.placement.moves import open_session, settle
from earl_jax.run.build import build_run
from earl_jax.selector.table import ThroughputTable
from earl_jax.train.offload import is_offloaded
from earl_jax.train.saved_state import to_checkpoint
from tests.support.placements import (
    D8,
    SIXTEEN_SLOTS,
    TOKENS,
    first_position,
    given,
    hungry,
    place,
    table_of,
    too_large_for,
)
from tests.support.settings import make_config

pytestmark = pytest.mark.usefixtures("few_objects")
OFFLOADED = "the optimizer's moments wait in host memory during rollouts"


@pytest.fixture(scope="module")
def world():
    return build_run(make_config(given(SIXTEEN_SLOTS, (D8,), (D8,), offload="on")))


def placed(world, **changes):
    table = table_of(world.problem, {D8: 4000.0}, {D8: 4000.0}, (TOKENS,))
    placement = place(world, too_large_for(table, world.problem), **changes)
    placement.choose_step(TOKENS, None)
    return placement


@pytest.fixture(scope="module")
def undisturbed(world):
    """A step with the moments on the devices, and its state as a checkpoint has it."""
    placement = placed(world)
    assert not placement.rollout.offload and placement.words == ""
    position, record = rl_step(world, placement, first_position(world, placement))
    assert not is_offloaded(position.state)
    return record, jax.tree.map(np.array, to_checkpoint(position.state, None))


def assert_same_step(world, undisturbed, position, record):
    expected, state = undisturbed
    assert record.trajectories == expected.trajectories and record.updates == expected.updates
    saved = to_checkpoint(position.state, None)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(saved)} == {"device"}
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, saved), state)


@pytest.mark.slow
def test_moments_are_offloaded_where_the_budget_does_not_hold_them(world, undisturbed, monkeypatch):
    """A step that is the same bit for bit, beside a third of the trainer."""
    whole, params = (world.problem.trainer_bytes(D8, offload) for offload in (False, True))
    assert whole == 3 * params
    placement = placed(world, budget_bytes=whole)
    assert placement.rollout.offload and placement.words == OFFLOADED
    assert placement.log.bytes_per_device < whole
    position, seen = first_position(world, placement), []

    def look(placement, params, version):
        seen.append(is_offloaded(position.state))
        return open_session(placement, params, version)

    monkeypatch.setattr("earl_jax.loop.open_session", look)
    after, record = rl_step(world, placement, position)
    assert seen == [True] and is_offloaded(after.state)
    assert_same_step(world, undisturbed, after, record)


def test_rollout_short_of_memory_beside_the_moments_is_played_again_without_them(
    world, undisturbed, monkeypatch
):
    """In its third round, without a budget; the step is then the undisturbed one, bit for bit."""
    placement, engine = placed(world), world.stages.engines.engine(D8)
    position = first_position(world, placement)
    plays = engine._play
    offloaded, rounds = [], []

    def moving(*arguments, **settings):
        moved = settle(*arguments, **settings)
        offloaded.append(is_offloaded(moved))
        return moved

    def play(*arguments):
        rounds.append(offloaded[-1])
        enough = offloaded[-1] or len(rounds) < 3
        return (plays if enough else hungry(donated=1))(*arguments)

    monkeypatch.setattr(loop, "settle", moving)
    monkeypatch.setattr(engine, "_play", play)
    position, record = rl_step(world, placement, position)
    # Two rounds and the failed one beside the moments; then from the first round again.
    assert rounds[:3] == [False] * 3 and set(rounds[3:]) == {True} and len(rounds) > 5
    (words,) = placement.take_log().failures
    assert words.startswith(f"rollout on {D8} ran out of memory with 16 slots")
    assert "moments" not in words
    assert placement.rollout.offload and placement.words == OFFLOADED
    # Every slot has all its pages: nothing else is less.
    assert placement.rollout.num_slots == 16 and record.stats.preempted_episodes == 0
    assert is_offloaded(position.state), "for the next rollout"
    assert_same_step(world, undisturbed, position, record)


def test_next_run_begins_with_the_moments_out_of_the_way(world):
    """Failures beside the moments, and then failures without them, are remembered as such."""
    placement = placed(world)

    def attempt():
        return hungry(donated=0)(np.ones(1, np.float32))

    assert placement.attempt("rollout", attempt) is None
    table = placement.table
    again = ThroughputTable.from_dict(json.loads(json.dumps(table.as_dict())))
    assert again.failures == table.failures and len(again.failures) == 1
    resumed = place(world, again)
    resumed.choose_step(TOKENS, None)
    assert resumed.rollout.offload and resumed.words == OFFLOADED
    saved = json.loads(json.dumps(resumed.as_dict()))
    restored = place(world, again)
    restored.restore(saved)
    assert restored.plans == resumed.plans
    assert resumed.attempt("rollout", attempt) is None
    resumed.choose_step(TOKENS, None)
    # The same slots, with fewer pages.
    assert resumed.rollout.num_slots == restored.rollout.num_slots
    assert resumed.rollout.pages < restored.rollout.pages
