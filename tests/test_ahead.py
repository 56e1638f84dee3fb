# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What longer contexts need is compiled in the background, and the run finds it."""

import threading
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from test_placement import (
    CUBE,
    D4T2,
    D8,
    GIVEN,
    LISTED,
    LONG,
    SHORT,
    STANDING,
    go_on,
    live_seat,
)

from earl_jax.ahead import CompileAhead, Wanted, wanted_programs
from earl_jax.calibrate import Calibration
from earl_jax.config_file import make_config
from earl_jax.estimates import train_estimate
from earl_jax.placement import Placement
from earl_jax.remembered import Question
from earl_jax.rollout.pages import Pool, roomier_pages
from earl_jax.selector.throughput import Measurement, ThroughputTable
from earl_jax.telemetry.load import Load, LoadHistory
from earl_jax.world import World


def test_more_pages_come_in_steps():
    """The scale is 1, 2, 3, 5, 8, 12, 18, 27: half as many again, rounded up."""
    assert [roomier_pages(n) for n in (1, 2, 3, 4, 6, 7, 9, 10)] == [2, 3, 5, 5, 8, 12, 12, 18]


@pytest.fixture(scope="module")
def world():
    selector = LISTED | {"order": "listed", "compile_ahead": "on"}
    return World(make_config(GIVEN | {"selector": selector}))


def placed(world, places, pages, measurements=None):
    table = ThroughputTable(path=None, measurements=measurements or {})
    placement = Placement(world, Calibration(world, table, lambda text: None))
    placement.restore(STANDING | {"places": places, "pages": pages})
    return placement


def history_of(*longest):
    loads = [
        Load(
            context_tokens_max=tokens,
            context_tokens_mean=tokens,
            tokens_in_flight_max=8 * tokens,
            rollout_tokens=8,
        )
        for tokens in longest
    ]
    return LoadHistory(steps=tuple(loads))


def keys(world, places, history, pages=1):
    return [wanted.key for wanted in wanted_programs(world, placed(world, places, pages), history)]


def test_more_pages_and_the_next_configured_room_are_always_wanted(world):
    """A page holds 16 tokens, and a lane has one slot: the long room is two pages."""
    longer = [
        ("relocate", D8, D8, 8, SHORT, Pool(8, 1), LONG, Pool(8, 2)),
        ("play", D8, 8, LONG, Pool(8, 2)),
    ]
    assert keys(world, SHORT, LoadHistory()) == [
        ("play", D8, 8, SHORT, Pool(8, 1)),
        *longer,
        *longer,
        ("move", D8, CUBE),
    ]


def test_a_mesh_that_cannot_hold_the_next_room_is_not_prepared(world, monkeypatch):
    """Its training, its rounds, and the way there: what is in use is."""
    monkeypatch.setattr(world, "budget_bytes", 1000)
    found = keys(world, LONG, history_of(15, 18, 21, 24), 2)
    assert [key[:2] for key in found] == [
        ("play", D8),
        *[("relocate", D8), ("play", D8)] * 2,
        ("train", D8),
    ]


def test_a_room_that_no_config_names_is_wanted_where_contexts_grow_towards_it(world):
    in_use = ("play", D8, 8, LONG, Pool(8, 2))
    # From step to step 3 tokens more, and 24 now: 33 in three steps do not fit 32 places.
    assert keys(world, LONG, history_of(24, 24, 24, 24), 2) == [in_use]
    assert keys(world, LONG, history_of(14, 17, 20, 23), 2) == [in_use]
    found = keys(world, LONG, history_of(15, 18, 21, 24), 2)
    rung = world.first_train_rung
    assert found[0] == in_use
    assert [key[:4] for key in found[1:5:2]] == [("relocate", D8, D8, 8)] * 2
    assert [key[:4] for key in found[2:5:2]] == [("play", D8, 8, 2 * LONG)] * 2
    assert found[5:] == [
        ("move", D8, CUBE),
        *(("train", mesh, 2 * LONG, rung) for mesh in world.train_candidates),
        *(("measured", mesh, 8, 0, 2 * LONG) for mesh in (D8, D4T2)),
    ]


def test_the_way_to_train_that_would_be_chosen_is_compiled_first():
    """The first way surely breaks the budget in the next room: one that may not is next."""
    world = World(make_config(GIVEN | {"selector": LISTED | {"compile_ahead": "on"}}))
    first, room = world.first_train_rung, 2 * LONG
    world.budget_bytes = train_estimate(world, D8, room, first).least - 1
    found = keys(world, LONG, history_of(15, 18, 21, 24), 2)
    _, mesh, length, way = next(key for key in found if key[0] == "train")
    assert (mesh, length) == (D8, room) and way != first
    assert train_estimate(world, D8, room, way).least <= world.budget_bytes


def outgrown(world, monkeypatch):
    """A placement at SHORT whose next room the budget holds on data=4,tensor=2 alone."""
    monkeypatch.setattr(world, "budget_bytes", 5_000_000)
    needs = {(D8, SHORT): 1, (D4T2, SHORT): 1, (D8, LONG): 9_000_000, (D4T2, LONG): 1}
    table = {
        ThroughputTable.entry("rollout", mesh, places): Measurement(
            tokens_per_s=None, program_bytes=size, switch_s=0.0
        )
        for (mesh, places), size in needs.items()
    }
    return placed(world, SHORT, 1, table)


def test_the_way_of_live_episodes_to_where_they_must_go_is_wanted(world, monkeypatch):
    placement = outgrown(world, monkeypatch)
    found = [wanted.key for wanted in wanted_programs(world, placement, LoadHistory())]
    way = [
        ("relocate", D8, D4T2, 8, SHORT, Pool(8, 1), LONG, Pool(4, 4)),
        ("play", D4T2, 8, LONG, Pool(4, 4)),
    ]
    assert found[0] == ("play", D8, 8, SHORT, Pool(8, 1)) and found[1:5] == [*way, *way]


@pytest.fixture
def programs(tmp_path):
    """JAX's persistent cache, empty, and for every program."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in names]
    compilation_cache.reset_cache()
    # What other tests compiled in this process would not be compiled again.
    jax.clear_caches()
    for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
        jax.config.update(name, value)
    kinds = ("jit_on_shard-*", "jit_step-*", "jit_repack-*", "jit_widen-*", "jit_move_all-*")
    yield lambda: {path.name for kind in kinds for path in tmp_path.glob(kind)}
    compilation_cache.reset_cache()
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


@pytest.mark.slow
def test_the_run_finds_what_was_compiled_ahead(world, programs):
    """A room that no config names, a round in it, an update on its rows: all programs are there."""
    placement = placed(world, LONG, 2)
    seat = live_seat(types.SimpleNamespace(world=world), placement)
    known = programs()
    with CompileAhead(print) as ahead:
        ahead.look(world, placement, history_of(15, 18, 21, 24))
        ahead.settle()
    compiled = programs()
    # Rounds on both meshes, with every slot's own pages, and updates on both; more pages, wider
    # rows, and a move.
    assert len(compiled - known) == 7
    grown = placement.make_room(seat, LONG + 1, 2, None)
    assert (grown.places, grown.pool) == (2 * LONG, Pool(8, 4))
    assert go_on(grown)[1].count.sum() > 0
    placement.calibration.train_options(2 * LONG)
    assert programs() == compiled
    state = world.init_train_state(D8)
    placement.train_mesh = CUBE
    placement.move_state(state)
    assert programs() == compiled


@pytest.mark.slow
def test_live_episodes_find_all_that_takes_them_to_another_mesh(world, programs, monkeypatch):
    placement = outgrown(world, monkeypatch)
    seat = live_seat(types.SimpleNamespace(world=world), placement)
    with CompileAhead(print) as ahead:
        ahead.look(world, placement, LoadHistory())
        ahead.settle()
    compiled = programs()
    moved = placement.make_room(seat, SHORT + 1, 2, None)
    assert (moved.engine, moved.places) == (world.engine(D4T2), LONG)
    assert go_on(moved)[1].count.sum() > 0
    assert programs() == compiled


def test_what_cannot_be_compiled_is_said_and_the_run_goes_on(world):
    def fail():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too large")

    said = []
    with CompileAhead(said.append) as ahead:
        ahead.ask([Wanted("large", fail)])
        ahead.settle()
        ahead.ask([])
    assert said == ["could not compile ahead for large: RESOURCE_EXHAUSTED: too large"]


# What compiling took, and how much of it the run waited for.


def small(name, scale, wait=None):
    """A program that no other test has; it is lowered when `wait` is set."""

    def lower():
        if wait is not None:
            assert wait.wait(60)
        return jax.jit(lambda x: jnp.sin(x * scale).sum()).lower(jnp.ones(7))

    return Wanted(name, lower)


def test_what_was_compiled_before_it_is_needed_is_hidden():
    with CompileAhead(print) as ahead:
        ahead.ask([small("a", 1.25), small("b", 1.375)])
        ahead.settle()
        jnp.ones(7).block_until_ready()
        ahead.take_times()
        # Nothing of it is said before it is used, and then once.
        assert ahead.take_times() == (0.0, 0.0)
        ahead.hand_over("a")
        first = ahead.take_times()
        assert first.total_s > 0 and first.waited_s == 0
        ahead.hand_over("a")
        assert ahead.take_times() == (0.0, 0.0)
        # What nobody compiled ahead the run waits for.
        small("c", 1.5).lower().compile()
        own = ahead.take_times()
        assert own.total_s == own.waited_s > 0


def test_the_run_waits_for_a_program_under_way_and_makes_what_was_not_begun():
    go, said = threading.Event(), []
    with CompileAhead(said.append) as ahead:
        ahead.ask([small("first", 1.625, go), small("second", 1.75, go)])
        while ahead.is_idle or "first" in ahead._pending:
            pass
        ahead.hand_over("second")
        ahead.take_times()
        threading.Timer(0.2, go.set).start()
        ahead.hand_over("first")
        assert ahead.is_idle
        times = ahead.take_times()
        assert 0 < times.waited_s <= times.total_s
        # It was given to the run.
        ahead.ask([small("second", 1.75)])
        assert ahead.is_idle


# Rooms that are measured while the run goes on.


@pytest.fixture(scope="module")
def measuring():
    """A world whose meshes go by their speeds, with too few steps to try other ways."""
    selector = GIVEN["selector"] | {"compile_ahead": "on"}
    return World(make_config(GIVEN | {"num_steps": 1, "selector": selector}))


def speeds(*rooms, without=()):
    """Equal speeds of all candidates in these rooms, but for some entries."""
    entries = [
        ThroughputTable.entry(stage, mesh, room)
        for room in rooms
        for stage, other in (("rollout", D4T2), ("train", CUBE))
        for mesh in (D8, other)
    ]
    known = Measurement(tokens_per_s=100.0, program_bytes=1000, switch_s=0.0)
    return {entry: known for entry in entries if entry not in without}


def test_the_next_configured_room_is_compiled_as_far_as_it_is_not_timed(measuring):
    def found(table):
        placement = placed(measuring, SHORT, 1, table)
        wanted = wanted_programs(measuring, placement, LoadHistory())
        return [key[:4] for key in (w.key for w in wanted) if key[0] in ("train", "measured")]

    rung = measuring.first_train_rung
    trains = [("train", mesh, LONG, rung) for mesh in (D8, CUBE)]
    rollouts = [("measured", mesh, 8, 0) for mesh in (D8, D4T2)]
    assert found(speeds(SHORT)) == [*trains, *rollouts]
    # What is most likely in use then is wanted all the same.
    assert found(speeds(SHORT, LONG, without=[f"rollout {D4T2} {LONG}"])) == [
        trains[0],
        rollouts[1],
    ]


@pytest.mark.slow
def test_only_the_first_room_is_measured_before_the_first_step(measuring):
    missing = f"train {D8} {LONG}"
    placement = placed(measuring, SHORT, 1, speeds(SHORT, LONG, without=[missing]))
    used, table = [], placement.calibration.table
    placement.calibration.about_to_use = used.append
    placement.prepare(SHORT)
    placement.choose_step(SHORT, None)
    assert placement.calibration.table is table and used == []
    placement.measure_room(LONG)
    assert used == [("train", D8, LONG, measuring.first_train_rung)]
    found = placement.calibration.table.measurements
    assert found.keys() - table.measurements.keys() == {missing}
    assert found[missing].tokens_per_s > 0
    # The meshes in use are those that they were.
    assert (placement.places, placement.in_rollout, placement.in_training) == (SHORT, D8, D8)


def test_a_room_is_measured_when_contexts_come_near_and_nothing_is_compiled(measuring):
    placement = placed(measuring, SHORT, 1, speeds(SHORT))
    near, far = history_of(4, 6, 8, 10), history_of(2, 3, 4, 5)
    go = threading.Event()
    with CompileAhead(print) as ahead:
        rooms = [ahead.room_to_measure(measuring, placement, h) for h in (near, far)]
        # In three steps they are 16, and 8; by 3 tokens a step 19.
        assert rooms == [None, None]
        near = history_of(4, 7, 10, 13)
        assert ahead.room_to_measure(measuring, placement, near) == LONG
        ahead.ask([small("other", 1.875, go)])
        assert ahead.room_to_measure(measuring, placement, near) is None
        go.set()
        ahead.settle()
        assert ahead.room_to_measure(measuring, placement, near) == LONG


@pytest.mark.slow
def test_live_episodes_do_not_wait_for_a_room_to_be_timed(measuring):
    """Of the mesh that they stay on the compiler says the bytes; the next step asks for speeds."""
    placement = placed(measuring, SHORT, 1, speeds(SHORT))
    seat = live_seat(types.SimpleNamespace(world=measuring), placement)
    before = placement.calibration.table.measurements.keys()
    grown = placement.make_room(seat, SHORT + 1, 2, None)
    assert (grown.engine.layout.shape, grown.places) == (D8, LONG)
    after = placement.calibration.table.measurements
    assert after.keys() - before == {f"rollout {D8} {LONG}"}
    found = after[f"rollout {D8} {LONG}"]
    assert found.tokens_per_s is None and found.program_bytes > 0


def test_what_there_is_no_memory_to_time_beside_the_run_has_not_failed(measuring):
    def fail():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too large")

    def answered(is_beside_run):
        calibration, asked = placed(measuring, SHORT, 1).calibration, []
        calibration.is_beside_run = is_beside_run
        question = Question(
            stage="train",
            mesh=D8,
            places=LONG,
            size=(LONG, 16, 1),
            most=10**9,
            measure=lambda: asked.append(1) or fail(),
            lower=small("", 2.0).lower,
        )
        answers = [calibration.answer(question) for _ in range(2)]
        assert answers[0] == answers[1] and answers[0].tokens_per_s is None
        assert answers[0].program_bytes > 0 and len(asked) == 1
        return len(calibration.table.failures)

    assert [answered(beside) for beside in (True, False)] == [0, 1]
