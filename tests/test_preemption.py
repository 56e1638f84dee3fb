# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Preempted episodes: pages go to host memory and back, who is preempted, at what price."""

import dataclasses
import functools
import gc
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.engine import host_pages
from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.engine import Engine, Policy, Session
from earl_jax.engine.host_pages import HostPages
from earl_jax.engine.pages import PageTable, Pool
from earl_jax.envs.environment import Start
from earl_jax.models.layer_groups import PageRule
from earl_jax.rollout import preemption as preemption
from earl_jax.rollout import service as service_module
from earl_jax.rollout.block_manager import BlockManager
from earl_jax.rollout.config import Limits
from earl_jax.rollout.preemption import (
    Choice,
    Rates,
    Work,
    choose_preemption,
    is_worth_sending,
    rates_of,
    work_of,
)
from earl_jax.rollout.task import Prompt, Task
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.sharding.topology import CHIPS, chip_of
from tests.support.allocator import live_bytes, memory_limit
from tests.support.environments import Talker
from tests.support.episodes import (
    CONFIG,
    MODEL,
    NUM_DEVICES,
    WINDOWED,
    GrowPool,
    check_rows,
    collect,
    engine,
    tasks,
    weights,
)
from tests.support.hlo import COLLECTIVE

MESHES = [MeshShape(data=8), MeshShape(data=2, tensor=2), MeshShape(data=4, tensor=2)]


@functools.cache
def player(
    mesh: MeshShape, kv_dtype: str = "compute", burst: int = CONFIG.burst, page_size: int = 0
):
    """The engine of test_collect with another cache."""
    config = engine(burst=burst).config
    config = dataclasses.replace(config, kv_dtype=kv_dtype, page_size=page_size or config.page_size)
    return Engine(config, make_layout(mesh))


# The price.


RATES = Rates(flops=1e12, memory_bytes=2e12, host_bytes=64e9, link_bytes=450e9, call_s=0.0)
WORK = Work(
    weights=1e9, weight_bytes=2e9, pair_flops=2e5, chunk_tokens=100, block_bytes=32e6,
    block_tokens=256,
)  # fmt: skip


def test_cheaper_preemption_is_chosen_with_its_reason():
    """By hand: 4 blocks, each 0.5 ms out and 0.5 ms back; 10 chunks of 2e11 flops are 0.2 s each.

    Attention adds 2e5 * 1000^2 / 2 = 1e11 flops, 100 ms.
    """
    choice = choose_preemption(1000, WORK, RATES)
    assert choice == Choice(
        "host", "1,000 tokens: 4.0 ms to host memory and back, 2,100.0 ms to be read again"
    )
    # Chunks bound by reading the weights: 1 ms each.
    fast = dataclasses.replace(RATES, flops=1e18)
    assert choose_preemption(1000, WORK, fast).reason.endswith(" 10.0 ms to be read again")
    # A copy has its start, and takes whole blocks: 1.2 ms against one chunk of 1 ms.
    slow = dataclasses.replace(fast, call_s=1e-4)
    assert choose_preemption(100, WORK, slow)[0] == "recompute"
    assert choose_preemption(200, WORK, slow)[0] == "host"


def test_prefix_of_another_data_shard_is_copied_where_that_costs_less_than_prefill():
    """By hand: a block of 32 MB four times over a link of 450 GB/s is 0.28 ms; a chunk, 1 ms."""

    def worth(tokens, setting="auto", **changes):
        rates = dataclasses.replace(RATES, flops=1e18, **changes)
        return is_worth_sending(tokens, setting, WORK, rates)

    assert [worth(tokens) for tokens in (0, 1, 1000)] == [False, True, True]
    assert not worth(100, link_bytes=100e9), "1.28 ms"
    # Two blocks against three chunks, and against six: 3.2 ms.
    assert not worth(257, link_bytes=80e9) and worth(512, link_bytes=80e9)
    assert not worth(100, call_s=1e-3) and worth(200, call_s=1e-3)
    # Or as the config says: a chunk is 100 tokens.
    assert [worth(tokens, "on") for tokens in (99, 100)] == [False, True]
    assert not worth(1000, "off")


def test_work_of_an_engine_is_the_share_of_one_device():
    """MODEL of test_collect: by hand from its sizes, one layer."""
    engines = map(player, MESHES[:2])
    one, two = (work_of(each.config, each.layout, 1000, 32) for each in engines)
    matrices = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
    assert one.weights == matrices + 2 * 32
    assert one.weight_bytes == 4 * one.weights and one.chunk_tokens == CONFIG.chunk_size
    assert one.pair_flops == 4 * 4 * 8
    assert two.weights == one.weights / 2 and two.pair_flops == one.pair_flops / 2
    assert (one.block_bytes, two.block_bytes) == (1000, 500)


def test_chips_are_known_by_what_jax_calls_them():
    kinds = {
        "TPU v5 lite": "v5e",
        "TPU v5": "v5p",
        "TPU v5p": "v5p",
        "TPU v6 lite": "v6e",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA GB200": "gb200",
        "NVIDIA A100-SXM4-80GB": "a100",
        "TPU7x": "tpu7x",
    }
    assert {kind: chip_of(kind) for kind in kinds} == {k: CHIPS[v] for k, v in kinds.items()}
    assert chip_of("cpu") is chip_of("NVIDIA L4") is None
    assert rates_of(make_layout(MESHES[0])).host_bytes == 2e9


# The copies.

SLOT_PAGES = {1: 6, 2: 1, 5: 4, 14: 9}


def session_with_noise(mesh: MeshShape, kv_dtype: str) -> Session:
    """Pools of noise; 4 pages of 64 tokens go at a time, and 96 pages are there in all."""
    made = player(mesh, kv_dtype, page_size=64)
    shards = made.layout.num_row_shards
    pool = Pool(shards, 96 // shards)
    state = made.empty_state(64 * 12, pool)
    rng = np.random.default_rng(0)

    def noise(leaf):
        values = rng.integers(-127, 127, leaf.shape).astype(leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    layers = jax.tree.map(noise, state.cache.pools)
    state = dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, pools=layers),
        active=jax.device_put(jnp.ones_like(state.active), state.active.sharding),
    )
    policy = Policy(params=None, version=0)
    pages = PageTable(pool, num_slots=16, rule=PageRule(64))
    return Session(engine=made, policy=policy, state=state, max_tokens=64 * 12, pages=pages)


def pools(state: DecodeState) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state.cache.pools)]


def block_bytes(session: Session) -> int:
    return session.engine.page_copies.block_bytes(session.state)


def numbers(slot: int, pages) -> list[int]:
    """In the whole pool: each two slots have twelve pages, on every mesh the same."""
    return [slot // 2 * 12 + page for page in pages]


def local(session: Session, slot: int, pages) -> list[int]:
    """The same within the slot's row shard."""
    return [number % session.pool.pages for number in numbers(slot, pages)]


def local_pages(session: Session, pages) -> dict[int, list[int]]:
    """`local`, slot by slot."""
    return {slot: local(session, slot, some) for slot, some in pages.items()}


@pytest.mark.parametrize(
    ("mesh", "kv_dtype", "pinned"),
    [(MESHES[0], "compute", True), (MESHES[1], "int8", False), (MESHES[2], "int8", True)],
    ids=str,
)
def test_pages_come_back_to_other_pages_as_they_left(mesh, kv_dtype, pinned):
    session = session_with_noise(mesh, kv_dtype)
    before = pools(session.state)
    copies, host = session.engine.page_copies, HostPages(2**30, 16, pinned=pinned)
    out = {slot: list(range(number)) for slot, number in SLOT_PAGES.items()}
    state = host.copy_out(copies, session.state, local_pages(session, out))
    session = dataclasses.replace(session, state=state)
    assert host.slots == sorted(SLOT_PAGES) and 5 in host
    assert np.flatnonzero(~np.asarray(session.state.active)).tolist() == host.slots
    # Their pages are others' by then.
    cleared = jax.tree.map(jnp.zeros_like, session.state.cache.pools)
    cleared = jax.device_put(cleared, session.engine.state_shardings.cache.pools)
    state = dataclasses.replace(
        session.state, cache=dataclasses.replace(session.state.cache, pools=cleared)
    )
    session = dataclasses.replace(session, state=state)
    host.settle()
    # 2 + 1 + 1 + 3 blocks of 4 pages; slots 2 and 5 come back, 5 in the middle of a turn.
    block = sum(leaf[0].nbytes for leaf in before) * 4
    assert (host.held_bytes, host.moved_bytes, host.most_bytes) == (7 * block,) * 3
    back = {2: [11], 5: [3, 10, 0, 7]}
    awake = {2: False, 5: True}
    state = host.copy_back(copies, session.state, local_pages(session, back), awake)
    session = dataclasses.replace(session, state=state)
    assert np.flatnonzero(np.asarray(session.state.active)).tolist() == [
        slot for slot in range(16) if slot not in SLOT_PAGES or slot == 5
    ]
    for old, new in zip(before, pools(session.state), strict=True):
        expected = np.zeros_like(old)
        for slot, pages in back.items():
            expected[numbers(slot, pages)] = old[numbers(slot, out[slot])]
        np.testing.assert_array_equal(new, expected)
    assert (host.held_bytes, host.moved_bytes) == (5 * block, 9 * block)
    host.drop(1), host.drop(14), host.drop(3)
    assert (host.held_bytes, host.slots) == (0, [])


@pytest.mark.parametrize(("at_once", "blocks"), [(1, 2), (3, 3)])
def test_blocks_of_a_long_context_leave_a_few_at_a_time(at_once, blocks, few_objects, monkeypatch):
    """Three blocks at most; while one is made the one before it may still be there."""
    monkeypatch.setattr(host_pages, "BLOCKS_AT_ONCE", at_once)
    session = session_with_noise(MESHES[0], "compute")
    gc.collect()
    host, before = HostPages(2**30, 16, pinned=False), max(live_bytes().values())
    with memory_limit(None) as allocator:
        pages = local_pages(session, {14: range(12)})
        host.copy_out(session.engine.page_copies, session.state, pages)
    block = block_bytes(session)
    assert host.moved_bytes == 3 * block
    assert block <= allocator.peak_bytes - before < (blocks + 0.5) * block


@pytest.mark.slow
def test_pages_come_back_on_another_mesh():
    ours = session_with_noise(MeshShape(data=8), "int8")
    cut = MeshShape(data=2, context=2, tensor=2)
    for mesh in (MeshShape(), cut):
        theirs = session_with_noise(mesh, "int8")
        before = pools(theirs.state)
        for first, second in ((ours, theirs), (theirs, ours)):
            host = HostPages(2**30, 16)
            out = {slot: range(n) for slot, n in SLOT_PAGES.items()}
            host.copy_out(first.engine.page_copies, first.state, local_pages(first, out))
            back = {slot: [11 - page for page in range(n)] for slot, n in SLOT_PAGES.items()}
            # `put` donates: to a copy, so that the session can be used again.
            state = jax.tree.map(lambda leaf: leaf + jnp.zeros((), leaf.dtype), second.state)
            moved = host.copy_back(
                second.engine.page_copies,
                state,
                local_pages(second, back),
                dict.fromkeys(back, True),
            )
            for old, new in zip(before, pools(moved), strict=True):
                expected = old.copy()
                for slot, pages in back.items():
                    expected[numbers(slot, pages)] = old[numbers(slot, range(len(pages)))]
                np.testing.assert_array_equal(new, expected)


def test_no_collective_is_in_the_copies():
    mesh = MESHES[2]
    session = session_with_noise(mesh, "int8")
    copies, layers = session.engine.page_copies, session.state.cache.pools
    block = copies.blank(session.state)
    pages = jnp.zeros(copies.num_shards * copies.pages_a_call, jnp.int32)
    counts = jnp.zeros(copies.num_shards, jnp.int32)
    programs = [
        copies._take.lower(layers, pages),
        copies._put.lower(layers, block, pages, counts),
        copies._blank.lower(layers),
    ]
    for program in programs:
        text = program.compile().as_text()
        assert not COLLECTIVE.search(text)
    # Written where they lie: no second pool.
    analysis = programs[1].compile().memory_analysis()
    pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(layers)) // mesh.num_devices
    assert analysis.alias_size_in_bytes >= pool_bytes
    assert analysis.temp_size_in_bytes < pool_bytes


# Episodes.


@pytest.fixture(scope="module")
def never_preempted(pool):
    @functools.cache
    def play(mesh, kv_dtype, burst):
        return collect(
            pool, tasks(40), player=player(mesh, kv_dtype, burst), burst=burst, preemption="host"
        )

    return play


# Each type of the cache and burst once.
CASES = [(MESHES[0], "compute", CONFIG.burst), (MESHES[1], "int8", 1)]


@pytest.mark.parametrize(
    ("mesh", "kv_dtype", "burst"),
    [
        pytest.param(*case, id="-".join(map(str, case)), marks=[pytest.mark.slow] * (index > 0))
        for index, case in enumerate(CASES)
    ],
)
def test_an_episode_back_from_the_host_is_the_same_to_the_bit(
    pool, never_preempted, mesh, kv_dtype, burst
):
    """Pages for one episode a data shard of two slots; short bursts preempt within a turn."""
    whole = never_preempted(mesh, kv_dtype, burst)
    assert whole.stats.preempted_episodes == whole.stats.preempted_host_bytes == 0
    preempted = collect(
        pool,
        tasks(40),
        pages=5,
        grow=GrowPool(most_pages=5),
        player=player(mesh, kv_dtype, burst),
        burst=burst,
        preemption="host",
    )
    assert preempted.session.pool.pages == 5
    assert preempted.stats.preempted_episodes > 0
    assert preempted.stats.recomputed_tokens == 0
    # One block each, both ways: no context has more than one.
    block = block_bytes(preempted.session)
    assert preempted.stats.preempted_host_bytes == 2 * preempted.stats.preempted_episodes * block
    check_rows(preempted, 40)
    assert preempted.trajectories == whole.trajectories
    assert preempted.stats.prefill_tokens == whole.stats.prefill_tokens
    assert preempted.stats.rollout_tokens == whole.stats.rollout_tokens


def test_where_host_memory_is_full_episodes_are_read_again(pool, never_preempted):
    mesh, kv_dtype, burst = CASES[0]
    whole = never_preempted(mesh, kv_dtype, burst)
    block = block_bytes(whole.session)
    some = {"pages": 5, "grow": GrowPool(most_pages=5), "player": player(mesh, kv_dtype, burst)}
    some |= {"preemption": "host"}
    none = collect(pool, tasks(40), **some, preemption_host_gib=(block - 1) / 2**30)
    assert none.stats.preempted_host_bytes == 0 < none.stats.recomputed_tokens
    few = collect(pool, tasks(40), **some, preemption_host_gib=2 * block / 2**30)
    assert few.stats.preempted_host_bytes > 0 < few.stats.recomputed_tokens
    for rollout in (none, few):
        assert [t.turns[-1].token_ids for t in rollout.trajectories] == [
            t.turns[-1].token_ids for t in whole.trajectories
        ]


def test_cheaper_preemption_is_used_and_reported(pool, monkeypatch):
    """A few tokens of a tiny model are read again; a device that counts slowly copies them."""
    some = {"pages": 5, "grow": GrowPool(most_pages=5), "player": player(*CASES[0])}
    read = collect(pool, tasks(40), **some, preemption="auto")
    assert read.stats.preempted_host_bytes == 0 < read.stats.recomputed_tokens
    assert "ms to host memory and back" in read.stats.preemption
    monkeypatch.setattr(preemption, "ON_CPU", dataclasses.replace(preemption.ON_CPU, flops=1e5))
    copied = collect(pool, tasks(40), **some, preemption="auto")
    assert copied.stats.recomputed_tokens == 0 < copied.stats.preempted_host_bytes
    assert [t.turns[-1].token_ids for t in copied.trajectories] == [
        t.turns[-1].token_ids for t in read.trajectories
    ]


# Who is preempted, and how often.


class Long(Talker):
    """Its first message has another length for each episode; some answers take their time."""

    def __init__(self, task):
        super().__init__(task.args["seed"])
        self.text, self.delay_s = "8" * (1 + 5 * task.episode % 23), 0.003 * (task.episode % 4)

    def start(self):
        return Start(text=self.text, role="x")

    def step(self, reply):
        time.sleep(self.delay_s)
        return super().step(reply)


class LoggedBlocks(BlockManager):
    """Records for each row shard which episodes were preempted, and when another began or ended."""

    def __init__(self, *given):
        super().__init__(*given)
        self.log = [[] for _ in range(NUM_DEVICES)]

    def _preempt(self, session, shard):
        slots = [slot for slot in self._pages.slots_of(shard) if self._slots[slot]]
        playing = {slot for slot in slots if not self._episode(slot).preempted}
        super()._preempt(session, shard)
        [preempted] = [slot for slot in playing if self._episode(slot).preempted]
        begun = {slot for slot in playing if not self._is_new(slot)}
        assert preempted not in begun or self._priority(preempted) == min(
            map(self._priority, begun)
        )
        assert begun != {preempted}, "the longest goes on"
        if preempted in begun:
            self.log[shard].append(self._episode(preempted).ticket)

    def begin(self, slot):
        self.log[self._pages.shard(slot)].append("change")
        return super().begin(slot)

    def end(self, slot, episode=None):
        self.log[self._pages.shard(slot)].append("change")
        super().end(slot, episode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "preemption", "patience_s"),
    [(MODEL, "host", 0.0), (WINDOWED, "recompute", 60.0)],
    ids=["", "windows"],
)
def test_preemption_spares_the_longest_and_takes_none_twice_between_changes(
    pool, monkeypatch, preemption, patience_s, model
):
    """Four slots a data shard, which has pages for one whole episode; with windows some more."""
    player = engine(32, burst=1, model=model)
    managers, pages = [], player.config.page_rule.most_pages(56) + 2 * (model is WINDOWED)
    monkeypatch.setattr(
        service_module,
        "BlockManager",
        lambda *given: managers.append(LoggedBlocks(*given)) or managers[-1],
    )
    rollout = collect(
        pool,
        tasks(44),
        Long,
        num_slots=32,
        max_tokens=56,
        pages=pages,
        grow=GrowPool(most_pages=pages),
        player=player,
        params=weights(model=model),
        burst=1,
        preemption=preemption,
        patience_s=patience_s,
    )
    check_rows(rollout, 44)
    assert {t.stop_reason for t in rollout.trajectories} == {"win"}
    [manager] = managers
    times = 0
    for log in manager.log:
        for is_change, entries in itertools.groupby(log, key=lambda entry: entry == "change"):
            rows = [] if is_change else list(entries)
            assert len(set(rows)) == len(rows), log
            times += len(rows)
    assert times == rollout.stats.preempted_episodes > 0
    assert (rollout.stats.preempted_host_bytes > 0) == (preemption == "host")


class LoggedEnds(LoggedBlocks):
    """Records no beginnings."""

    def begin(self, slot):
        return BlockManager.begin(self, slot)


def test_episodes_in_step_are_preempted_at_most_once_until_one_ends(pool, monkeypatch):
    """Eight of the same length. Behind a window each has a page less in some rounds than in others.

    All have it at once, and what is free then is no reason to go on.
    """
    model = dataclasses.replace(MODEL, num_layers=3, windows=(4, 4, 0))
    config = engine(8, MeshShape(data=1), burst=1, model=model, episodes=8).config
    player = Engine(
        dataclasses.replace(config, page_size=16), make_layout(MeshShape(), jax.devices()[:1])
    )
    managers, pages = [], 4 * config.page_rule._replace(page_size=16).most_pages(160)
    monkeypatch.setattr(
        service_module,
        "BlockManager",
        lambda *given: managers.append(LoggedEnds(*given)) or managers[-1],
    )
    prompt = Prompt(token_ids=tuple(range(20, 60)))
    limits = Limits(max_turn_tokens=100)
    rollout = collect(
        pool,
        [Task(episode=i, group=i, prompt=prompt, limits=limits) for i in range(8)],
        num_slots=8,
        num_devices=1,
        max_tokens=160,
        context_buckets=(160,),
        max_turn_tokens=100,
        page_size=16,
        episodes_per_step=8,
        pages=pages,
        grow=lambda session, tokens, pages: session,
        player=player,
        params=weights(model=model, ends_turns=False),
        burst=1,
        preemption="recompute",
    )
    [[log, *_]] = [manager.log for manager in managers]
    groups = itertools.groupby(log, key=lambda entry: entry == "change")
    preempted = [list(entries) for is_change, entries in groups if not is_change]
    assert all(len(set(some)) == len(some) for some in preempted), preempted
    assert 1 < sum(map(len, preempted)) == rollout.stats.preempted_episodes
