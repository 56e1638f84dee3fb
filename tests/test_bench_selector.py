# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks regret, capacity and start: their figures by hand, and tiny runs of them."""

import pytest

from benchmarks import capacity, start
from benchmarks.capacity import GIVEN, MESHES, longest, plan_for, row_of
from benchmarks.regret import POINTS, Pair, Point, measure, summary
from benchmarks.start import count_programs
from earl_jax.placement.problem import find_model, make_problem
from earl_jax.placement.stages import Stages
from earl_jax.run.build import build_run
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.problem import Problem
from earl_jax.sharding.layout import MeshShape
from tests.support import ROOT
from tests.support.settings import make_config


def pair(rollout: str, train: str, slots: int = 8) -> Pair:
    return Pair((rollout, slots), (train, 1, "none"))


# Regret.


def test_regret_of_the_first_and_of_the_last_choice_by_hand():
    step_s = {pair("a", "x"): 3.0, pair("a", "y"): 2.0, pair("b", "x"): 5.0}
    # Most of the last ten steps are with a + x; the last one is the first of a trial.
    own = [*[pair("b", "x")] * 8, *[pair("a", "x")] * 6, pair("a", "y")]
    found = summary(step_s, own)
    assert (found["best"], found["best s"], found["worst, best = 1"]) == ("a + y", 2.0, 2.5)
    assert (found["first"], found["first slower by"]) == ("b + x", 1.5)
    assert (found["settles on"], found["slower by"], found["switches"]) == ("a + x", 0.5, 2)
    assert summary(step_s, [pair("a", "y")])["slower by"] == 0.0


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_points_leave_more_than_one_pair_to_choose_from(point):
    world = build_run(point.config())
    bucket = world.config.rollout.context_buckets[0]
    rollouts = world.problem.meshes("rollout", bucket)
    trains = world.problem.meshes("train", bucket)
    assert len(rollouts) * len(trains) > 2
    # On most points the usual pair is not even possible.
    usual = MeshShape(data=8)
    assert (usual in rollouts and usual in trains) == (point.rows == 8)


@pytest.mark.slow
def test_regret_of_a_tiny_point():
    model = {"num_layers": 1, "width": 16, "num_heads": 2, "num_kv_heads": 2, "head_size": 8}
    meshes = {"rollout_meshes": ("data=4,tensor=2",), "train_meshes": ("data=8", "data=1,fsdp=8")}
    point = Point(
        name="tiny", slots=8, rows=8, turn=4, model=model | {"ffn_size": 16}, selector=meshes
    )
    row = measure(point, rounds=1, steps=1, own_steps=2)
    assert row["pairs"] == 2 and row["best s"] > 0
    pairs = {f"data=4,tensor=2 + {train}" for train in meshes["train_meshes"]}
    assert {row["best"], row["first"], row["settles on"]} <= pairs
    assert row["slower by"] >= 0


# Capacity.


def capacity_problem(budget: int) -> Problem:
    config = make_config(GIVEN)
    model, vocab_size = find_model(config, None)
    return make_problem(config, model, vocab_size, parse_topology("cpu:8"), budget_bytes=budget)


def test_longest_episode_grows_by_tensor_times_context():
    """1:2:4:8 within 10 %, by computed bytes."""
    problem = capacity_problem(2**30)

    def most(mesh: MeshShape) -> int:
        def fits(tokens: int) -> bool:
            plan = plan_for(problem, mesh, tokens)
            return problem.round_footprint(plan, tokens).total <= problem.budget

        return longest(fits, 64)

    first = most(MeshShape(data=8))
    for mesh in map(MeshShape.parse, MESHES):
        assert most(mesh) / first == pytest.approx(mesh.tensor * mesh.context, rel=0.1)


def small_stages(budget: int) -> Stages:
    small = ["model.num_layers=1", "rollout.burst=1", f"selector.budget_bytes_per_device={budget}"]
    return build_run(make_config(GIVEN, small)).stages


def test_row_of_capacity_is_shortened_until_xlas_bytes_fit(monkeypatch):
    stages, mesh, budget = small_stages(2**24), MeshShape(data=4, tensor=2), 2**24
    # Of which the pages that fit follow by hand: far fewer than by computed bytes.
    by_page = 4 * stages.problem.page_bytes(mesh)
    monkeypatch.setattr(capacity, "compiled_bytes", lambda _, plan, __: plan.pages * by_page)
    row = row_of(stages, mesh)
    pages = (budget - stages.problem.trainer_bytes(MeshShape(fsdp=8))) // by_page
    assert row["longest episode"] == 64 * pages > 0
    assert row["computed MiB"] < row["XLA's MiB"] <= 16


@pytest.mark.slow
def test_row_of_capacity_fits_by_computed_and_by_xlas_bytes():
    row = row_of(small_stages(2**24), MeshShape(data=4, tensor=2))
    assert row["rollout mesh"] == "data=4,tensor=2"
    assert max(row["computed MiB"], row["XLA's MiB"]) <= 16
    # A token's pages are 8 KiB of a device.
    assert 0 < row["longest episode"] / 128 < row["XLA's MiB"]


# The start.


def test_programs_are_counted_by_what_jax_says_of_them():
    log = (
        "WARNING:jax._src.dispatch:Finished XLA compilation of jit(step) in 1.5 sec\n"
        "WARNING: Persistent compilation cache hit for 'jit_on_shard' with key 'jit_on_shard-ab'\n"
        "WARNING:jax._src.dispatch:Finished XLA compilation of jit(on_shard) in 0.25 sec\n"
        "WARNING:jax._src.dispatch:Finished XLA compilation of jit(on_shard) in 2.0 sec\n"
        "WARNING:jax._src.dispatch:Finished XLA compilation of jit(move_all) in 0.5 sec\n"
        "WARNING:jax._src.dispatch:Finished XLA compilation of jit(iota) in 1e-2 sec\n"
    )
    assert count_programs(log) == {
        "stages' programs": "2 round, 1 update",
        "of them loaded": 1,
        "s of them": 3.75,
        "small programs": 2,
        "of these loaded": 0,
        "s of these": 0.51,
    }


@pytest.mark.slow
def test_run_is_ended_behind_its_first_step(tmp_path):
    config = ROOT / "configs/tictactoe_tiny_cpu.py"
    small = ["model.num_layers=1", "rollout.num_slots=8", "rollout.episodes_per_step=16"]
    overrides = [f"--config.{one}" for one in small]
    row = start.start(config, overrides, tmp_path / "run", tmp_path / "cache")
    assert row["s to the first step"] > row["s of that step"] > 0
    # Supervised and RL updates are two programs of one name.
    assert "1 round" in row["stages' programs"] and " update" in row["stages' programs"]
    assert row["small programs"] > 2 and row["of them loaded"] == row["of these loaded"] == 0
    with pytest.raises(ValueError, match="the run ended before a step"):
        start.start(config, ["--config.num_steps=0"], tmp_path / "none", tmp_path / "cache")
