# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Programs of longer contexts are compiled in the background, and the run finds them."""

import json
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from earl_jax.dispatch.packing import Shape
from earl_jax.placement.compile_ahead import (
    CompileAhead,
    compiles_ahead,
    promising_plans,
    wanted_programs,
)
from earl_jax.placement.packing import plan_batch, shape_ahead
from earl_jax.placement.stages import lower_round, lower_update
from earl_jax.run.build import build_run
from earl_jax.selector.plans import TrainPlan
from earl_jax.selector.table import TRUSTED, ThroughputTable
from earl_jax.telemetry.compile_clock import CompileClock
from earl_jax.telemetry.load import LoadHistory
from tests.support.placements import (
    CUBE,
    D4T2,
    D8,
    given,
    history_of,
    place,
    standing,
    table_of,
    too_large_for,
)
from tests.support.problems import rollout_key, train_key
from tests.support.settings import make_config

SHORT, LONG = 16, 32
ROLLOUT = {
    "num_slots": 8,
    "episodes_per_step": 16,
    "burst": 2,
    "max_turn_tokens": 4,
    "context_buckets": (SHORT, LONG),
    "page_size": 16,
}


@pytest.fixture(scope="module")
def run():
    settings = given(ROLLOUT, (D8, D4T2), (D8, CUBE))
    return build_run(make_config(settings))


def placed(run, max_tokens, table=None, **changes):
    speeds = {D8: 4000.0, CUBE: 1000.0}, {D8: 4000.0, D4T2: 1000.0}
    table = table or table_of(run.problem, *speeds, (SHORT, LONG, 2 * LONG))
    placement = place(run, table, **changes)
    placement.restore(standing(D8, D8, max_tokens, pages=max_tokens // 16))
    # Of a step before: 1.1 times as many fit 8 rows of LONG tokens, one for each shard.
    placement.trained_tokens = 160
    return placement


def keys(run, max_tokens, history, **changes):
    placement = placed(run, max_tokens, **changes)
    return list(wanted_programs(placement, history))


def test_programs_of_the_next_configured_context_are_always_wanted(run):
    update, play = train_key(D8, LONG, 1, "none"), rollout_key(D8, LONG, 8)
    assert keys(run, SHORT, LoadHistory()) == [update, play]


def test_rows_of_a_packed_batch_are_known_after_the_first_step_and_stay(run):
    placement, plan = placed(run, SHORT), TrainPlan(D8, 1, "none")
    placement.trained_tokens = 0
    (play,) = wanted_programs(placement, LoadHistory())
    assert play == rollout_key(D8, LONG, 8)
    placement.trained_tokens = 160
    assert shape_ahead(placement, plan, LONG) == (8, LONG)
    placement.trained_tokens = 500
    assert shape_ahead(placement, plan, LONG) == (8, LONG)
    # A batch that needs 5 rows has the 8 of the program that was compiled ahead.
    assert plan_batch(placement, [30] * 5 + [0] * 11, LONG).shape == (8, LONG)
    assert placement.row_shapes[str(LONG)].shapes == [(8, LONG)]
    # One that needs 16 has a row for each episode, which is no number to remember.
    assert plan_batch(placement, [30] * 16, LONG).shape == (16, LONG)
    assert placement.row_shapes[str(LONG)].shapes == [(8, LONG)]
    again = placed(run, SHORT)
    again.restore(json.loads(json.dumps(placement.as_dict())))
    assert again.row_shapes == placement.row_shapes


def test_nothing_is_wanted_beyond_the_configured_contexts(run):
    assert keys(run, LONG, history_of(15, 18, 21, 24)) == []


def test_programs_of_the_plans_that_longer_contexts_will_have_are_wanted(run):
    """The budget holds LONG tokens on other meshes only."""
    speeds = {D8: 4000.0, CUBE: 1000.0}, {D8: 4000.0, D4T2: 1000.0}
    table = table_of(run.problem, *speeds, (SHORT, LONG))
    table = too_large_for(table, run.problem, train=((D8, LONG),), rollout=((D8, LONG),))
    train, play = keys(run, SHORT, LoadHistory(), table=table, budget_bytes=10**9)
    assert (train, play) == (train_key(CUBE, LONG, 1, "none"), rollout_key(D4T2, LONG, 8))
    # A row for each of the mesh's four shards.
    placement = placed(run, SHORT, table, budget_bytes=10**9)
    assert shape_ahead(placement, TrainPlan(CUBE, 1, "none"), LONG) == (4, 48)


def test_nothing_is_compiled_ahead_on_the_processor_that_computes_or_where_runs_are_equal(run):
    assert not compiles_ahead("auto", run.cluster)
    chips = SimpleNamespace(devices=[SimpleNamespace(platform="gpu")])
    assert compiles_ahead("auto", chips)
    assert not compiles_ahead("model", chips) and not compiles_ahead("table.json", chips)
    with CompileAhead(print, is_on=False) as ahead:
        ahead.look(placed(run, SHORT), LoadHistory())
        assert not ahead._futures


def test_mesh_that_never_ran_is_tried_when_its_programs_are_compiled():
    """Both are as fast by the model, whose error could make the other one half as fast again."""
    # No episode may come to the next context bucket.
    short = ROLLOUT | {"max_episode_tokens": SHORT}
    settings = given(short, (D8, D4T2), (D8,), table="auto")
    placement = placed(build_run(make_config(settings)), SHORT, ThroughputTable())
    object.__setattr__(placement.problem, "round_speed", lambda *_: 1000.0)
    history, key, go = history_of(12, 12, 12), rollout_key(D4T2, SHORT, 8), threading.Event()

    def wanted():
        return list(wanted_programs(placement, history))

    def chosen():
        placement.choose_step(12, history.recent())
        return placement.rollout.mesh

    assert wanted() == [], "no speed is known yet"
    for _ in range(TRUSTED):
        assert chosen() == D8
        placement.add_speed(placement.rollout, SHORT, 500.0)
        placement.add_speed(placement.train, SHORT, 1e6)
    with CompileAhead(print) as ahead:
        placement.may_try = ahead.is_compiled
        assert chosen() == D8
        assert wanted() == [key]
        # Another one in its place, which is quick to compile.
        ahead.request({key: small(2.25, go)})
        assert chosen() == D8, "it is being compiled"
        go.set()
        ahead.settle()
        assert chosen() == D4T2
    assert promising_plans(placement, history.recent()) == []


@pytest.fixture
def programs(tmp_path):
    """JAX's persistent cache, empty, and for every program: the names of rounds and updates."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in names]
    compilation_cache.reset_cache()
    # What other tests compiled in this process would not be compiled again.
    jax.clear_caches()
    for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
        jax.config.update(name, value)
    kinds = ("jit_on_shard-*", "jit_step-*")
    yield lambda: {path.name for kind in kinds for path in tmp_path.glob(kind)}
    compilation_cache.reset_cache()
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


@pytest.mark.slow
def test_run_finds_what_was_compiled_ahead(run, programs):
    placement = placed(run, SHORT)
    with CompileAhead(print) as ahead:
        ahead.look(placement, LoadHistory())
        ahead.settle()
        assert ahead.is_compiled(rollout_key(D8, LONG, 8))
    compiled = programs()
    assert len(compiled) == 2
    # What the run calls itself: the same programs, traced again.
    jax.clear_caches()
    placement.choose_step(LONG, None)
    lower_round(run.stages, placement.rollout, LONG).compile()
    lower_update(run.stages, placement.train, LONG, Shape(8, LONG)).compile()
    assert programs() == compiled


def test_failed_compilation_is_reported_and_the_run_goes_on():
    def fail():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too large")

    notes = []
    with CompileAhead(notes.append) as ahead:
        ahead.request({"large": fail})
        ahead.settle()
        assert not ahead.is_compiled("large")
        ahead.request({})
    assert notes == ["could not compile ahead for large: RESOURCE_EXHAUSTED: too large"]


# How long the run waits.


def small(scale, wait=None, begun=None):
    """Lowers a program that no other test has, when `wait` is set."""

    def lower():
        if begun is not None:
            begun.set()
        if wait is not None:
            assert wait.wait(60)
        return jax.jit(lambda x: jnp.sin(x * scale).sum()).lower(jnp.ones(7))

    return lower


def test_run_waits_for_what_is_not_compiled_before_its_use():
    with CompileAhead(print) as ahead:
        ahead.request({"a": small(1.25), "b": small(1.375)})
        ahead.settle()
        jnp.ones(7).block_until_ready()
        ahead.take_waited_s()
        assert ahead.is_compiled("a") and not ahead.is_compiled("c")
        ahead.hand_over("a")
        assert ahead.is_compiled("a") and ahead.is_compiled("b")
        waited_s = [ahead.take_waited_s()]
        ahead.hand_over("b")
        waited_s.append(ahead.take_waited_s())
        # A loaded machine may pause one of them.
        assert min(waited_s) < 0.01
        ahead.hand_over("a")
        assert ahead.take_waited_s() == 0.0
        # What nobody compiled ahead the run waits for.
        small(1.5)().compile()
        assert ahead.take_waited_s() > 0


def test_run_waits_for_a_program_under_way_and_makes_what_was_not_begun():
    go, begun = threading.Event(), threading.Event()
    with CompileAhead(print) as ahead:
        ahead.request({"first": small(1.625, go, begun), "second": small(1.75, go)})
        assert begun.wait(60)
        ahead.hand_over("second")
        ahead.take_waited_s()
        threading.Timer(0.2, go.set).start()
        ahead.hand_over("first")
        assert go.is_set() and ahead.take_waited_s() > 0
        # It was given to the run, which makes it itself.
        ahead.request({"second": small(1.75, threading.Event())})
        ahead.settle()
        assert ahead.is_compiled("second")


def test_programs_are_counted_but_for_those_of_one_thread():
    clock = CompileClock()
    clock.start()
    one, other = small(1.875)(), small(1.9375)()
    clock.take_number(but=None)
    thread = threading.Thread(target=other.compile)
    thread.start()
    thread.join()
    one.compile()
    assert clock.take_number(but=thread) == 1
    assert clock.take_number(but=None) == 0, "all were taken"
    small(1.96875)().compile()
    clock.stop()
    assert clock.take_number(but=None) >= 1
