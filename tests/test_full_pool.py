# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Live episodes whose pages fill the budget, under an allocator limit of as many bytes."""

import contextlib
import dataclasses
import gc
import math

import jax
import pytest

from earl_jax.engine.config import Sampling
from earl_jax.engine.pages import Pool
from earl_jax.engine.round_inputs import idle_inputs
from earl_jax.placement.moves import grow_as, grow_session, open_session
from earl_jax.placement.placement import Placement
from earl_jax.placement.stages import compiled_bytes
from earl_jax.run.build import build_run
from earl_jax.selector.candidates import RESERVE
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.selector.plans import Plans, RolloutPlan, TrainPlan
from earl_jax.selector.table import ThroughputTable, key_of
from tests.support.allocator import live_bytes, memory_limit
from tests.support.placements import D4T2, D8, F8, TINY, given
from tests.support.problems import rollout_key
from tests.support.settings import make_config

SHORT, LONG, LONGEST, SLOTS = 128, 256, 1024, 64
ROLLOUT = {
    "num_slots": SLOTS,
    "episodes_per_step": SLOTS,
    "burst": 2,
    "max_turn_tokens": 4,
    "context_buckets": (SHORT, LONG, LONGEST),
    "page_size": 16,
}
# Eight slots of a row shard have 64 pages at most, of 32 KiB each.
PAGES = 40


@pytest.fixture(scope="module")
def world():
    settings = given(ROLLOUT, (D8, D4T2), (F8,))
    return build_run(make_config(settings | {"model": TINY | {"head_size": 128}}))


@pytest.fixture(scope="module")
def table(world):
    """XLA's bytes of a rollout on data=8 up to LONG tokens, and small ones at LONGEST tokens.

    Those that are computed for so small a model on a CPU are off by more than the reserve.
    """
    plan, table = RolloutPlan(D8, SLOTS, PAGES), ThroughputTable()
    for mesh in (D8, D4T2):
        table = table.with_bytes(rollout_key(mesh, LONGEST, SLOTS), 1)
    for tokens in (SHORT, LONG):
        num_bytes = compiled_bytes(world.stages, plan, tokens)
        assert num_bytes is not None
        num_bytes = world.problem.without_pages(plan, num_bytes)
        table = table.with_bytes(key_of(plan, tokens), num_bytes)
    return table


def bytes_of(world, table, pages):
    """Returns the bytes of a rollout with so many pages at SHORT tokens, and of the trainer."""
    bare = table.program_bytes[rollout_key(D8, SHORT, SLOTS)]
    return world.problem.trainer_bytes(F8) + bare + pages * world.problem.page_bytes(D8)


@contextlib.contextmanager
def rollout_in(world, table, budget, pages, limit=None, say=lambda text: None):
    """Yields a placement, what opens a session, and the allocator, limited to the budget."""
    problem = dataclasses.replace(world.problem, budget_bytes=budget)
    placement = Placement(dataclasses.replace(world.stages, problem=problem), table, say)
    placement.plans = Plans(RolloutPlan(D8, SLOTS, pages), TrainPlan(F8, 1, "none"))
    placement.max_tokens = SHORT
    state = world.learner.init_state(F8)
    gc.collect()
    others = max(live_bytes().values()) - problem.trainer_bytes(F8)
    with memory_limit((limit or budget) + others) as allocator:
        yield placement, lambda: open_session(placement, state.params, version=0)[0], allocator


def play(session):
    """Plays a round of no episode, which takes as many bytes as any."""
    config = session.engine.config
    inputs = idle_inputs(SLOTS, config.chunk_size, config.rules.choice_branches, Sampling(), 0)
    state, _ = session.engine.play(session.policy.params, session.state, inputs)
    return dataclasses.replace(session, state=state)


def pool_address(session):
    first = jax.tree.leaves(session.state.cache.pools)[0]
    return first.addressable_shards[0].data.unsafe_buffer_pointer()


def test_a_rollout_at_a_full_pool_grows_a_context_bucket_where_it_is(world, table):
    """Its rows grow in the reserve beside the pool, which is not copied."""
    budget = math.ceil(bytes_of(world, table, PAGES) / (1 - RESERVE))
    with rollout_in(world, table, budget, 1) as (placement, opened, allocator):
        placement.choose_rollout(SHORT, None)
        assert placement.rollout == RolloutPlan(D8, SLOTS, PAGES), "all that fit"
        session = play(opened())
        before = pool_address(session)
        grown = grow_session(placement, session, SHORT + 1, PAGES, None)
        assert pool_address(grown) == before
        play(grown)
    assert (grown.max_tokens, grown.pool) == (LONG, Pool(8, PAGES))
    assert placement.rollout == RolloutPlan(D8, SLOTS, PAGES)
    assert not allocator.refused and not placement.take_log().failures
    assert 0.97 * budget < allocator.peak_bytes - (allocator.limit - budget) <= budget


def test_episodes_that_outgrow_a_full_pool_are_played_again_without_a_try(world, table):
    """One of LONGEST tokens takes 64 pages, for which half as large ones of tensor=2 have room.

    Not beside the pool that there is.
    """
    budget = math.ceil(bytes_of(world, table, PAGES) / (1 - RESERVE))
    with rollout_in(world, table, budget, PAGES) as (placement, opened, allocator):
        with pytest.raises(BudgetTooSmall):
            grow_session(placement, opened(), LONG + 1, PAGES, None)
        placement.choose_rollout(1, None)
    assert (placement.rollout.mesh, placement.max_tokens) == (D4T2, LONGEST)
    assert placement.rollout.pages >= LONGEST // 16
    assert not allocator.refused and not placement.table.failures


def test_a_pool_that_cannot_grow_beside_itself_after_all_stays(world, table):
    """The allocator holds less than the budget: what failed is left out until the rollout ends."""
    large, small = (bytes_of(world, table, pages) for pages in (400, PAGES + 20))
    notes = []
    with rollout_in(world, table, large, PAGES, small, notes.append) as (
        placement,
        opened,
        allocator,
    ):
        grown = grow_session(placement, opened(), SHORT, PAGES + 1, None)
        moved_to = placement.as_dict()
    assert grown.pool == Pool(8, PAGES)
    # 64 pages, 57 and 48.
    failures = placement.take_log().failures
    assert len(failures) == len(allocator.refused) == 3
    assert all(words.endswith("in the move there") for words in failures)
    assert notes == [f"{words}; it is not tried again in this rollout" for words in failures]
    known = placement.table.failures
    assert [failure.size[1] for failure in known] == [64 * 16, 57 * 16, 48 * 16]
    assert placement.attempt("rollout", lambda: True)
    assert not placement.table.failures
    # A replay moves to the same plan, also where there is memory for more.
    with rollout_in(world, table, large, PAGES) as (placement, opened, allocator):
        again = grow_as(placement, opened(), moved_to)
        assert placement.as_dict() == moved_to
        more = grow_session(placement, opened(), SHORT, PAGES + 1, None)
    assert again is not None and again.pool == grown.pool
    assert more.pool.pages > grown.pool.pages and not allocator.refused
