# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Live episodes that move between meshes in the middle of a rollout; how long they may become.

Meshes differ in the number of row shards, and the KV cache's pool with them.
"""

import dataclasses
import functools
import itertools

import jax
import pytest

from earl_jax.engine.config import Sampling
from earl_jax.engine.engine import Engine, Policy, Session
from earl_jax.engine.pages import PageTable, Pool
from earl_jax.engine.relocation import reachable_pool, relocate
from earl_jax.engine.rows import make_rows
from earl_jax.models.config import ModelConfig
from earl_jax.models.layer_groups import pages_for
from earl_jax.rollout.service import RolloutService
from earl_jax.selector.memory import program_bytes
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.telemetry.host_bytes import HostByteCounter
from tests.support.environments import Lecture, Talker
from tests.support.episodes import (
    CONFIG,
    LATENT,
    MODEL,
    WINDOWED,
    GrowPool,
    assert_same_episodes,
    check_rows,
    collect,
    tasks,
    weights,
)
from tests.support.episodes import engine as make_engine
from tests.support.shardings import resident_bytes

MESHES = [
    MeshShape(data=8),
    MeshShape(data=2, tensor=2, context=2),
    MeshShape(data=4, tensor=2),
    MeshShape(data=1, context=4, tensor=2),
]
# Every ordered pair of them, as a way that comes to its start again.
TOUR = [0, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3]


def player(mesh: MeshShape, model: ModelConfig = MODEL) -> Engine:
    """The engine of tests.support.episodes, on this mesh."""
    return make_engine(mesh=mesh, model=model)


class Moving(RolloutService):
    """Moves all live episodes to the next mesh of its tour before each round."""

    # As many that sixteen live episodes are short of them.
    rounds = host_bytes = pages = 0
    tour = TOUR

    def _move_the_last(self, session: Session) -> Session:
        self.rounds += 1
        there = player(MESHES[self.tour[self.rounds % len(self.tour)]], session.engine.config.model)
        shards = there.layout.num_row_shards
        least = session.pages.least_pages(shards)
        with HostByteCounter() as counter:
            moved = relocate(
                session, there, session.max_tokens, Pool(shards, max(self.pages // shards, least))
            )
            assert jax.tree.map(lambda leaf: leaf.sharding, moved.state) == there.state_shardings
        Moving.host_bytes += counter.num_bytes or 0
        return moved


def lecture(task):
    return Lecture(task.args["seed"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "tour"), [(WINDOWED, TOUR), (LATENT, [0, 1])], ids=["windows", "latents"]
)
def test_episodes_that_move_every_round_sample_the_same_tokens(pool, monkeypatch, model, tour):
    """Over every pair of meshes. Some are preempted on one and come back from the host on another.

    Prompts are taken over. Episodes give up their pages behind windows.
    """
    monkeypatch.setattr(Moving, "tour", tour)
    first = player(MESHES[0], model)
    monkeypatch.setattr(Moving, "pages", first.config.page_rule.most_pages(64) * 8)
    given = {"sampling": Sampling(temperature=0.0), "max_tokens": 64, "share_prefixes": True}
    given |= {"player": first, "params": weights(model=model)}
    still = collect(pool, tasks(44), lecture, **given)
    monkeypatch.setattr("tests.support.episodes.RolloutService", Moving)
    services = []
    moved = collect(
        pool,
        tasks(44),
        lecture,
        pages=Moving.pages // 8,
        grow=lambda session, tokens, pages: session,
        services=services,
        preemption="host",
        copy_prefixes="on",
        **given,
    )
    assert services[0].rounds > len(TOUR)
    assert (moved.stats.preempted_episodes > 0, still.stats.preempted_episodes) == (True, 0)
    assert moved.stats.preempted_host_bytes > 0
    assert moved.stats.shared_tokens > 0
    assert_same_episodes(still.trajectories, moved.trajectories)
    check_rows(moved, 44)
    assert Moving.host_bytes == 0


@pytest.mark.parametrize(
    ("here", "there", "old", "new"),
    [
        # Pages that are gathered, rows that are widened, and weights and state that move.
        (0, 1, Pool(8, 4), Pool(2, 16)),
        (1, 0, Pool(2, 16), Pool(8, 5)),
        (0, 0, Pool(8, 4), Pool(8, 6)),
        (0, 0, Pool(8, 4), Pool(8, 4)),
    ],
    ids=["merged", "split", "more pages", "longer rows"],
)
def test_slots_have_their_pages_behind_a_move(here, there, old, new):
    before, after = player(MESHES[here]), player(MESHES[there])
    session = numbered_session(before, old)
    for slot, tokens in ((1, 3), (5, 9), (6, 24), (14, 32)):
        session.pages.hold(slot, tokens)
    with HostByteCounter() as counter:
        moved = relocate(session, after, 48, new)
    assert counter.num_bytes == 0
    assert (moved.max_tokens, moved.pool, moved.state.cache.num_pages) == (48, new, new.total)
    assert jax.tree.map(lambda leaf: leaf.sharding, moved.state) == after.state_shardings
    assert contents(moved) == contents(session)
    assert sum(map(len, contents(moved))) == 1 + 2 + 3 + 4


@pytest.mark.slow
def test_six_devices_in_two_row_shards_and_in_three():
    """No number divides the other: pages go between row shards."""
    model = dataclasses.replace(MODEL, num_heads=6, num_kv_heads=6, ffn_size=66)
    config = dataclasses.replace(
        make_engine().config, model=model, vocab_size=318, num_slots=6, num_rows=12
    )
    ours, theirs = (
        Engine(config, make_layout(shape, jax.devices()[:6]))
        for shape in (MeshShape(data=2, tensor=3), MeshShape(data=3, tensor=2))
    )
    for (here, there), odd in itertools.product(((ours, theirs), (theirs, ours)), (False, True)):
        shards = here.layout.num_row_shards
        # Of pools of 14 and 21 pages neither can be cut as the other.
        session = numbered_session(here, Pool(shards, 7 if odd else 12 // shards))
        for slot in range(6):
            session.pages.hold(slot, 9 if slot % 3 else 5)
        shards = there.layout.num_row_shards
        pool = reachable_pool(session.pool, Pool(shards, 7 if odd else 18 // shards))
        assert pool.pages == (6 if odd else 18 // shards)
        moved = relocate(session, there, 32, pool)
        assert contents(moved) == contents(session)


def test_a_pool_loses_few_pages_so_that_one_layout_can_cut_both():
    # 18 pages in 4 parts and 20 in 6 cannot be cut; 12 can. 12 in 4 parts can, and 30 in 2.
    assert reachable_pool(Pool(6, 3), Pool(4, 5)) == Pool(4, 3)
    assert reachable_pool(Pool(6, 2), Pool(4, 5)) == Pool(4, 5)
    assert reachable_pool(Pool(2, 3), Pool(6, 5)) == Pool(6, 5)


def numbered_session(engine: Engine, pool: Pool) -> Session:
    """Pools in which page z of every layer is full of z + 1."""
    state = engine.empty_state(32, pool)

    def number(leaf):
        values = jax.numpy.arange(1, len(leaf) + 1, dtype=leaf.dtype)
        full = jax.numpy.broadcast_to(values.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf.shape)
        return jax.device_put(full, leaf.sharding)

    layers = jax.tree.map(number, state.cache.pools)
    state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, pools=layers))
    config = engine.config
    pages = PageTable(pool, num_slots=config.num_slots, rule=config.page_rule)
    params = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape), engine.parameter_shapes)
    policy = Policy(params=engine.load_params(params), version=0)
    return Session(engine=engine, policy=policy, state=state, max_tokens=32, pages=pages)


def contents(session: Session) -> list[list[float]]:
    """By slot, what is in its pages of the first layer."""
    table = session.pages.as_array(pages_for(session.max_tokens, session.engine.config.page_size))
    keys = jax.device_get(session.state.cache.pools[0].key)
    return [
        [float(keys[page].mean()) for page in row[: session.pages.num_held(slot)]]
        for slot, row in enumerate(table[:, 0])
    ]


# How long an episode may become.

# Keys and values of a token are 48 KiB, cut over up to eight heads; in the rows of experience, of
# which data=1 has all sixteen, it is 256 bytes.
LARGE = ModelConfig(num_layers=1, width=16, num_heads=8, num_kv_heads=8, head_size=768, ffn_size=32)
FIRST = 1024
CUTS = [MeshShape(data=8), MeshShape(data=2, context=2, tensor=2), MeshShape(data=1, tensor=8)]


@functools.cache
def large_engine(mesh: MeshShape, num_slots: int = 8, page_size: int = 64) -> Engine:
    rows = make_rows(num_rows=num_slots, num_slots=num_slots, num_devices=8)
    config = dataclasses.replace(
        make_engine().config,
        model=LARGE,
        num_slots=num_slots,
        num_rows=rows.total,
        page_size=page_size,
    )
    return Engine(config, make_layout(mesh))


@functools.cache
def bytes_of(mesh: MeshShape, max_tokens: int) -> int:
    """Returns the bytes of a round with pages for one episode of this length in each row shard."""
    engine = large_engine(mesh)
    pool = Pool(engine.layout.num_row_shards, pages_for(max_tokens, 64))
    return program_bytes(engine.lower_play(max_tokens, pool).compile())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", CUTS[1:], ids=str)
def test_the_longest_episode_of_a_budget_grows_with_tensor_and_context(mesh):
    """1:4:8 within 10 %, by XLA's memory analysis of the whole round."""
    budget = bytes_of(CUTS[0], FIRST)
    times = mesh.tensor * mesh.context
    assert (
        bytes_of(mesh, int(0.9 * times * FIRST))
        <= budget
        < bytes_of(mesh, int(1.1 * times * FIRST))
    )


class Sage(Talker):
    """One long reply."""

    def step(self, reply: str):
        return dataclasses.replace(super().step(reply), done=True, stop_reason="win", text="")


@pytest.mark.slow
def test_one_episode_of_eight_devices_memory_is_played_in_one_slot(pool):
    """The budget is the bytes a device in which data=8 holds 16 tokens an episode."""
    mesh, tokens, num_slots = CUTS[-1], 8 * 16, 1
    engine = large_engine(mesh, num_slots, 16)

    def pool_bytes(on: Engine, cut: Pool) -> int:
        layers = on.state_shapes(16, cut).cache.pools
        return resident_bytes(layers, on.state_shardings.cache.pools)

    whole = Pool(1, 8)
    assert pool_bytes(engine, whole) == pool_bytes(large_engine(CUTS[0], 8, 16), Pool(8, 1))
    rollout = collect(
        pool, tasks(1), lambda task: Sage(0), player=engine, num_slots=num_slots,
        episodes_per_step=num_slots,
        params=weights(model=LARGE, ends_turns=False), max_tokens=tokens, pages=8,
        max_turn_tokens=tokens, max_episode_tokens=tokens, burst=CONFIG.burst, num_devices=8,
        grow=GrowPool(most_pages=8),
    )  # fmt: skip
    assert rollout.session.pool == whole
    assert [t.num_tokens for t in rollout.trajectories] == [tokens]
    check_rows(rollout, 1)


# Numbers of slots.


@pytest.mark.slow
@pytest.mark.parametrize(("num_slots", "meshes"), [(1, MESHES[3:4]), (12, MESHES[1:2])])
def test_slots_need_not_divide_over_the_devices(pool, num_slots, meshes):
    """Only over the data axis: the same episodes on every mesh that it divides."""
    rows = make_rows(num_rows=24, num_slots=num_slots, num_devices=8)
    config = dataclasses.replace(make_engine().config, num_slots=num_slots, num_rows=rows.total)
    alone = collect(pool, tasks(20))
    for mesh in meshes:
        rollout = collect(
            pool, tasks(20), player=Engine(config, make_layout(mesh)), num_slots=num_slots,
            episodes_per_step=24, num_devices=8,
        )  # fmt: skip
        assert_same_episodes(alone.trajectories, rollout.trajectories)
        check_rows(rollout, 20)
