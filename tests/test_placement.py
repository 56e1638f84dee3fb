# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Plans in use on eight devices: what they are chosen by, and what moves where they change."""

import dataclasses
import functools
import itertools
import json
import math
import random
import re

import jax
import numpy as np
import pytest

from earl_jax.engine.config import Sampling
from earl_jax.engine.round_inputs import RoundInputs
from earl_jax.engine.sampling import sampling_rows
from earl_jax.placement.moves import grow_session, move_state, open_session, tail_plan
from earl_jax.placement.placement import Placement
from earl_jax.placement.updates import sft
from earl_jax.rollout.load import expected_load, expected_tokens
from earl_jax.run.build import build_run
from earl_jax.selector.choose import HORIZON_STEPS, BudgetTooSmall
from earl_jax.selector.plans import TrainPlan
from earl_jax.selector.table import ThroughputTable
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.host_bytes import HostByteCounter
from earl_jax.telemetry.load import WINDOW, LoadHistory
from earl_jax.train.backup import StateLost
from tests.support.placements import (
    CUBE,
    D4T2,
    D8,
    F8,
    given,
    load_of,
    place,
    standing,
    table_of,
    too_large_for,
)
from tests.support.settings import make_config

SHORT, LONG = 16, 32
SLOTS = 16
ROLLOUT = {
    "num_slots": SLOTS,
    "episodes_per_step": 16,
    "burst": 2,
    "max_turn_tokens": 4,
    "context_buckets": (SHORT, LONG),
    "page_size": 16,
}
# data=8 is the faster mesh of both stages.
TRAIN, PLAY = {D8: 2000.0, CUBE: 1000.0}, {D8: 2000.0, D4T2: 1000.0}


@pytest.fixture(scope="module")
def world():
    return build_run(make_config(given(ROLLOUT, (D8, D4T2), (D8, CUBE))))


@pytest.fixture(scope="module")
def table(world):
    """Trusted speeds of both meshes of both stages."""
    return table_of(world.problem, TRAIN, PLAY, (SHORT, LONG))


def stand(placement, rollout=D8, train=D8, pages=2):
    """A placement in use on these meshes at SHORT tokens."""
    placement.restore(standing(rollout, train, SHORT, num_slots=SLOTS, pages=pages))
    return placement


def on_host(tree):
    return jax.tree.map(np.array, tree)


def test_a_backup_is_made_where_the_hosts_memory_holds_one(world):
    """It has the state once, though all eight devices of data=8 do, and preempted episodes."""
    first = world.learner.init_state(D8)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(first) if leaf.ndim)
    for missing in (0, 1):
        state, held = world.learner.init_state(D8), whole + 4 * 2**30 - missing
        hardware = dataclasses.replace(world.problem.hardware, host_memory_bytes=held)
        problem = dataclasses.replace(world.problem, hardware=hardware)
        backup = Placement(
            dataclasses.replace(world.stages, problem=problem), ThroughputTable()
        ).backup
        backup.save("step", state)
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        if missing:
            with pytest.raises(StateLost):
                backup.restore(state)
        else:
            jax.tree.map(np.testing.assert_array_equal, backup.restore(state), first)


# Choosing.


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_grow_and_shrink_cause_no_storm_of_switches(seed):
    """Forty steps; a context that was never so long may move a stage at once, and back.

    Beside that plans that fit are left after a window of steps at the earliest.
    """
    rng, world = random.Random(seed), four_buckets()
    buckets = world.config.rollout.context_buckets
    table = table_of(world.problem, {}, {}, buckets)
    for tokens in buckets:
        speeds = [{mesh: rng.uniform(500.0, 2000.0) for mesh in m} for m in ((D8, CUBE), PLAY)]
        table = table_of(world.problem, *speeds, (tokens,)).over(table)
    placement = place(world, table)
    history, longest, moves, most, news = LoadHistory(), 12, [], 0, 0
    for step in range(40):
        longest = max(4, min(120, int(longest * rng.choice([1.0, 1.0, 1.2, 0.8, 2.0, 0.5]))))
        plans = [placement.plans]
        foreseen = expected_load(world.stages.rollout, history)
        placement.choose_step(expected_tokens(world.stages.rollout, foreseen), foreseen)
        plans.append(placement.plans)
        history = history.add(load_of(longest))
        placement.choose_training(history.recent())
        plans.append(placement.plans)
        bucket = max(placement.max_tokens, world.stages.rollout.max_tokens_for(longest))
        if bucket > most:
            most, news = bucket, news + 1
        for one, other in itertools.pairwise(plans):
            if None not in (*one, *other):
                moves += [step for a, b in zip(one, other, strict=True) if a.mesh != b.mesh]
    # Both stages may move at once.
    assert len(moves) <= 2 * (news + 40 // WINDOW)


@functools.cache
def four_buckets():
    rollout = {**ROLLOUT, "context_buckets": (16, 32, 64, 128)}
    return build_run(make_config(given(rollout, (D8, D4T2), (D8, CUBE))))


def test_trainer_stays_where_the_longest_of_recent_rows_fits(world, table):
    """The longest episode comes and goes; the mesh that holds it does not."""
    table = too_large_for(table, world.problem, train=((D8, LONG),))
    placement = place(world, table, budget_bytes=10**9)
    placement.choose_step(SHORT, None)
    history, meshes = LoadHistory(), []
    for longest in (SHORT, LONG, SHORT, LONG, SHORT):
        history = history.add(load_of(longest))
        placement.choose_training(history.recent())
        meshes.append(placement.train.mesh)
    assert meshes == [D8, CUBE, CUBE, CUBE, CUBE]


def test_contexts_count_as_they_are_if_their_expected_growth_fits_nowhere(world, table):
    nowhere = {"train": ((D8, LONG), (CUBE, LONG)), "rollout": ((D8, LONG), (D4T2, LONG))}
    table = too_large_for(table, world.problem, **nowhere)
    placement = place(world, table, budget_bytes=10**9)
    growing = dataclasses.replace(load_of(18), growth_tokens=4.0)
    placement.choose_step(20, growing)
    assert (placement.max_tokens, placement.length) == (SHORT, SHORT)
    with pytest.raises(BudgetTooSmall):
        placement.choose_step(20, load_of(18))


def test_a_choice_lasts_no_longer_than_the_run(world, table):
    placement, horizon = place(world, table), HORIZON_STEPS
    lasts = []
    for placement.steps_left in (None, 1000, horizon - 1, 1):
        lasts.append(placement.step_of(SHORT, None).lasts)
    assert lasts == [horizon, horizon, horizon - 1, 1]


def test_step_after_one_whose_episodes_all_failed_is_chosen(world, table):
    """A rollout without a token, and so a load of zeros."""
    placement = place(world, table)
    placement.choose_step(SHORT, None)
    before, nothing = placement.plans, dataclasses.replace(load_of(0), tokens_in_flight_max=0)
    assert nothing.rollout_tokens == 0 and nothing.context_tokens_mean == 0
    history = LoadHistory().add(nothing)
    placement.choose_training(history.recent())
    foreseen = expected_load(world.stages.rollout, history)
    placement.choose_step(expected_tokens(world.stages.rollout, foreseen), foreseen)
    assert placement.plans == before
    assert tail_plan(placement, history.recent()) is None


def test_budget_too_small_changes_nothing_and_the_one_it_names_is_enough(world, table):
    table = too_large_for(table, world.problem)

    def chosen(budget):
        placement = stand(place(world, table, budget_bytes=budget))
        before = placement.as_dict()
        try:
            return placement.choose_rollout(LONG, None)
        except BudgetTooSmall as error:
            assert placement.as_dict() == before
            words = (
                f"budget_bytes_per_device is {budget} .* smallest budget that would do is (\\d+)"
            )
            return int(re.search(words, str(error))[1])

    # One episode's pages beside the trainer, and a byte for the round.
    least = 2 * world.problem.page_bytes(D4T2) + world.problem.trainer_bytes(D8) + 1
    assert chosen(1000) == chosen(least - 1) == least
    assert chosen(least).rollout.plan.mesh == D4T2


def test_restored_placement_chooses_alike(world, table):
    table = too_large_for(table, world.problem, rollout=((D8, LONG),))
    placement = stand(place(world, table, budget_bytes=10**9))
    placement.choose_step(LONG, load_of(SHORT))
    saved = json.loads(json.dumps(placement.as_dict()))
    again = place(world, table, budget_bytes=10**9)
    again.restore(saved)
    assert again.as_dict() == saved and saved["rollout"][0] == str(D4T2)
    for tokens in (LONG, 10):
        step = again.choose_step(tokens, load_of(tokens))
        assert step == placement.choose_step(tokens, load_of(tokens))
    assert again.as_dict() == placement.as_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"rollout": None},
        {"rollout": ["data=8", 16]},
        {"rollout": ["dbta=8", 16, 2, False]},
        {"train": ["data=8", "many", "none"]},
        {"train": ["data=8", 1, False]},
        {"max_tokens": "long"},
        {"calm_steps": None},
    ],
)
def test_restore_refuses_what_is_no_placement(world, change):
    placement = place(world)
    before = placement.as_dict()
    with pytest.raises(ValueError, match="its placement is not one"):
        placement.restore({**standing(D8, D8, SHORT), **change})
    missing = standing(D8, D8, SHORT)
    del missing[next(iter(change))]
    with pytest.raises(ValueError, match="its placement is not one"):
        placement.restore(missing)
    assert placement.as_dict() == before


# Rollouts that move.


def live_inputs(engine):
    """Every slot starts an episode with two tokens of its own, and speaks."""
    slots = engine.config.num_slots
    chunk = np.zeros((slots, engine.config.chunk_size), np.int32)
    chunk[:, :2] = np.arange(2 * slots).reshape(slots, 2)
    return RoundInputs(
        chunk=chunk,
        count=np.full(slots, 2),
        restart=np.ones(slots, np.int32),
        begin_turn=np.ones(slots, np.int32),
        seed=1000 + np.arange(slots),
        row=np.arange(slots),
        sampling=sampling_rows(Sampling(temperature=0.0), slots),
        version=3,
    )


def live_session(world, placement):
    """A session on data=8 in the middle of every slot's first turn, with a page for each."""
    session, _ = open_session(placement, world.learner.init_state(D8).params, version=3)
    for slot in range(SLOTS):
        session.pages.hold(slot, 4)
    state = session.engine.give_pages(session.state, session.pages.as_array(1))
    state, report = session.engine.play(session.policy.params, state, live_inputs(session.engine))
    assert report.count.sum() > 0 and report.active.any()
    return dataclasses.replace(session, state=state)


def test_larger_context_bucket_on_the_same_mesh_keeps_live_episodes(world, table):
    placement = stand(place(world, table))
    session = live_session(world, placement)
    params, cached = session.policy.params, np.array(session.state.cached)
    grown = grow_session(placement, session, SHORT + 1, 2, None)
    assert grown.engine is session.engine and grown.policy.params is params
    # Memory that is left over holds pages for every slot.
    assert (grown.max_tokens, grown.pool.pages) == (LONG, 4)
    assert grown.state.experience.tokens.shape == (grown.engine.config.num_rows, LONG)
    np.testing.assert_array_equal(np.array(grown.state.cached), cached)
    assert cached.all() and placement.take_log().switch_s == 0.0


def test_session_keeps_its_two_pages_if_the_budget_holds_no_more_beside_them(world, table):
    """One more is asked for, and four are all that can be of use; a twentieth stays free."""
    only = {"rollout_meshes_named": (str(D8),), "train_meshes_named": (str(D8),)}
    exact = too_large_for(table, world.problem)
    page, beside = world.problem.page_bytes(D8), world.problem.trainer_bytes(D8)
    # Keys and values of one layer's two heads: 16 positions of 8 fp32 numbers.
    assert page == 2 * 2 * 16 * 8 * 4
    params = world.learner.init_state(D8).params

    def holding(pages):
        return math.ceil((beside + 1 + pages * page) / 0.95)

    def pages_with(budget):
        placement = stand(place(world, exact, budget_bytes=budget, **only))
        session, _ = open_session(placement, params, version=0)
        return grow_session(placement, session, LONG, 3, None).pool.pages

    least = beside + 1 + 2 * page
    budgets = (None, holding(6), holding(6) - page, holding(5) - page, least)
    assert [pages_with(budget) for budget in budgets] == [4, 4, 3, 2, 2]
    with pytest.raises(BudgetTooSmall, match=f"the smallest budget that would do is {least} "):
        pages_with(least - 1)


# The trainer.


def train_on(placement, mesh):
    placement.plans = placement.plans._replace(train=TrainPlan(mesh, 1, "none"))
    return placement


def test_trainer_moves_bit_for_bit_between_all_meshes_and_not_through_the_host(world, table):
    placement = stand(place(world, table))
    state = world.learner.init_state(D8)
    # Moments that are not zero, so that a mix-up would show.
    state = dataclasses.replace(
        state, optimizer=jax.tree.map(lambda x: x + x.size, state.optimizer)
    )
    state = jax.device_put(state, world.learner.state_shardings(D8))
    expected = [leaf.tobytes() for leaf in jax.tree.leaves(on_host(state))]
    assert move_state(placement, state) is state, "it is there already"
    assert placement.take_log().switch_s == 0.0
    for there in (CUBE, MeshShape(data=2, context=4), D8):
        with HostByteCounter() as counter:
            state = move_state(train_on(placement, there), state)
        assert counter.num_bytes == 0 and placement.take_log().switch_s > 0
        shardings = world.learner.state_shardings(there)
        for leaf, where in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
            assert leaf.sharding.mesh == where.mesh
            assert leaf.sharding.is_equivalent_to(where, leaf.ndim)
        assert [leaf.tobytes() for leaf in jax.tree.leaves(on_host(state))] == expected
        on_one = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
        # Beside two counters of updates.
        assert on_one == world.problem.trainer_bytes(there) + 8


@pytest.mark.slow
def test_state_under_another_meshs_labels_is_relabelled_and_its_program_made_once(table):
    """fsdp=8, and fsdp=4 by context=2: the same bytes on the same devices."""
    there = MeshShape(fsdp=4, context=2)
    train = {"sft_steps": 1, "sft_updates": 2}
    world = build_run(make_config({**given(ROLLOUT, (D8,), (F8, there)), "train": train}))
    placement = place(world)
    placement.restore(standing(D8, there, SHORT, num_slots=SLOTS, pages=2))
    state = world.learner.init_state(F8)

    def buffers(state):
        shards = state.params["embed"].addressable_shards
        return [shard.data.unsafe_buffer_pointer() for shard in shards]

    before = buffers(state)
    moved = move_state(placement, state)
    mesh = world.stages.layouts.train(there).mesh
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(moved)} == {mesh}
    assert buffers(moved) == before
    assert int(sft(placement, moved, world.tasks.examples(0, 2), LONG)[0].updates) == 2
    program = world.learner.program(placement.train, sft=True)
    assert program._cache_size() == 1
