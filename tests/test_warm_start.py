# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A warm start ends: its moments leave the state, the selector's bytes and the checkpoints."""

import dataclasses
import gc
import shutil

import jax
import pytest

from earl_jax.loop import rl_step
from earl_jax.placement.placement import Placement
from earl_jax.run.build import build_run
from earl_jax.run.saved_position import resume
from earl_jax.run.saver import save
from earl_jax.selector.candidates import Candidates
from earl_jax.selector.choose import choose_plans, full_step
from earl_jax.selector.footprint import device_bytes
from earl_jax.selector.plans import Plans, RolloutPlan, TrainPlan
from earl_jax.selector.table import ThroughputTable, key_of
from earl_jax.train.checkpoint import Checkpoints
from earl_jax.train.learner import Learner
from earl_jax.training import train
from tests.support.allocator import live_bytes
from tests.support.commands import APART, Command
from tests.support.placements import D8, EIGHT_SLOTS, F8, TINY, begin
from tests.support.runs import (
    assert_equal,
    bits,
    cut_off,
    final_parameters,
    final_state,
    steps_of,
)
from tests.support.settings import make_config

SETTINGS = {
    "num_steps": 3,
    "model": TINY,
    "rollout": {**EIGHT_SLOTS, "context_buckets": (64,)},
    "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("fsdp=8",), "table": "model"},
    "train": {"sft_steps": 2, "learning_rate": 3e-3},
}


@pytest.fixture(scope="module")
def world():
    return build_run(make_config(SETTINGS))


def test_moments_go_and_a_run_goes_on_from_each_step_as_if_it_had_not_stopped(world, tmp_path):
    """Bit for bit from before and behind the last step of a warm start of two."""
    whole, (placement, position) = tmp_path / "whole", begin(world)
    held = []
    with Checkpoints(whole / "checkpoints", keep=5) as checkpoints:
        while position.step < 3:
            position, record = rl_step(world, placement, position)
            assert len(record.sft_updates) == (position.step <= 2)
            save(world, placement, checkpoints, position)
            checkpoints.wait()
            gc.collect()
            held.append(live_bytes()[jax.devices()[0]])
    own = device_bytes(world.problem.sizes.sft_moments, F8)
    # With the counter of its updates.
    assert own and held[0] - held[1] == own + 4 and held[1] == held[2]
    saved = [final_state(whole, step).keys() for step in (1, 2, 3)]
    assert ["sft_optimizer" in keys for keys in saved] == [True, False, False]
    assert not placement.problem.sizes.sft_moments and world.problem.sizes.sft_moments
    for step in (1, 2):
        folder = tmp_path / str(step)
        for each in range(1, step + 1):
            shutil.copytree(whole / "checkpoints" / str(each), folder / "checkpoints" / str(each))
        with Checkpoints(folder / "checkpoints", keep=5) as checkpoints:
            again, placement = resume(world, checkpoints, folder, print)
        assert again.step == step and (again.state.sft_optimizer is not None) == (step < 2)
        assert bool(placement.problem.sizes.sft_moments) == (step < 2)
        while again.step < 3:
            again, _ = rl_step(world, placement, again)
        assert bits(again.state) == bits(position.state)
    for sft in (False, True):
        assert world.learner.program(placement.train, sft=sft)._cache_size() == 1


@pytest.mark.slow
def test_the_reference_is_the_policy_behind_the_supervised_steps(tmp_path, monkeypatch):
    """In the compute type, bit for bit, and what a resumed run goes on with; a teacher stays."""
    given = SETTINGS | {"algorithm_args": {"kl_coefficient": 0.1}}
    given |= {"checkpoint": {"every_steps": 1, "keep": 5}}
    given["model"] = TINY | {"compute_dtype": "bfloat16"}
    copies = []
    copy = Learner.reference_copy
    monkeypatch.setattr(
        Learner, "reference_copy", lambda *own: copies.append(copy(*own)) or copies[-1]
    )
    train(make_config(given), tmp_path / "run")
    # One program for both steps.
    assert len(copies) == 2 and copies[0] is copies[1] and copies[0]._cache_size() == 1
    states = [final_state(tmp_path / "run", step) for step in (1, 2, 3)]

    def rounded(tree):
        return bits(jax.tree.map(lambda leaf: leaf.astype("bfloat16"), tree))

    first, second, third = (rounded(state["params"]) for state in states)
    assert [bits(state["reference"]) for state in states] == [first, second, second]
    assert first != second != third
    again = cut_off(tmp_path / "run", tmp_path / "again", 2)
    train(make_config(given), again)
    assert bits(final_state(again, 3)) == bits(states[2])
    given["reference_from"] = str(tmp_path / "run")
    train(make_config(given), tmp_path / "taught")
    state = final_state(tmp_path / "taught", 3)
    assert bits(state["reference"]) == third != rounded(state["params"])


@pytest.mark.slow
def test_an_asynchronous_run_ends_its_warm_start_and_goes_on(tmp_path):
    """From its last step with the moments; its batches come in parts, to devices of their own."""
    given = SETTINGS | {
        "algorithm": "grpo",
        "algorithm_args": {},
        "devices": {"num_rollout": 4},
        "rollout": SETTINGS["rollout"] | {"patience_s": 10.0, "group_size": 2},
        "selector": {"rollout_meshes": ("data=4",), "train_meshes": ("fsdp=4",), "table": "model"},
        "asynchrony": {"max_staleness": 1, "parts": 2},
        "eval": {"every_steps": 100, "games": 8, "final_games": 8},
        "checkpoint": {"every_steps": 1, "keep": 5},
    }
    config, whole = make_config(given), tmp_path / "whole"
    train(config, whole)
    again = cut_off(whole, tmp_path / "again", 1)
    train(config, again)
    for folder in (whole, again):
        assert [line["step"] for line in steps_of(folder)] == [1, 2, 3]
        saved = [final_state(folder, step).keys() for step in (1, 2, 3)]
        assert ["sft_optimizer" in keys for keys in saved] == [True, False, False]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_end_their_warm_start_alike_and_go_on(tmp_path):
    """Two of which one trains: bit for bit as if they had not stopped."""
    settings = APART | {"train.sft_steps": 2, "num_steps": 3, "checkpoint.every_steps": 1}
    settings |= {"checkpoint.keep": 5, "train.schedule": "constant"}
    settings |= {"train.final_learning_rate": 0.0}
    two = Command(tmp_path / "two", 2, **settings).done()
    again = cut_off(two, tmp_path / "again", 1)
    Command(again, 2, **settings).done()
    assert_equal(*map(final_parameters, (two, again)))
    for folder in (two, again):
        files = [folder / f"checkpoints/{step}/state/_METADATA" for step in (1, 2, 3)]
        has = ["sft_optimizer" in file.read_text() for file in files]
        assert has == [True, False, False]


# The selector.


def test_bytes_of_the_moments_count_while_they_are_there(world):
    before, behind = world.problem, world.problem.behind_warm_start()
    own, plan = device_bytes(before.sizes.sft_moments, F8), before.train_plans(64)[0]
    assert plan.mesh == F8 and behind.behind_warm_start() is behind
    cold = build_run(make_config(SETTINGS | {"train": {"sft_steps": 0}})).problem
    assert dataclasses.asdict(behind.sizes) == dataclasses.asdict(cold.sizes)
    for find in (
        lambda problem: problem.trainer_bytes(F8),
        lambda problem: problem.moments_bytes(F8),
        lambda problem: problem.update_footprint(plan, 64).total,
        lambda problem: Candidates(problem).update_bytes(plan, 64)[0],
    ):
        assert find(before) - find(behind) == own > 0
    # Those of a program are without them, wherever it was compiled.
    table = ThroughputTable().with_bytes(key_of(plan, 64), 1000)
    found = [Candidates(each, table).update_bytes(plan, 64) for each in (before, behind)]
    assert found == [(1000 + own, True), (1000, True)]


def test_a_plan_that_ran_out_of_memory_beside_them_may_be_tried_behind_it(world):
    plans = (TrainPlan(F8, 1, "none"), RolloutPlan(D8, 8, 2))
    for plan in plans:
        placement = Placement(world.stages, ThroughputTable())
        placement.fail("train", 64, plan)
        known = placement.table
        assert known.failure_of(placement.problem.failure(plan, 64))
        placement.end_warm_start()
        assert not known.failure_of(placement.problem.failure(plan, 64))
        # And one that did so without them fails beside them too.
        placement.fail("train", 64, plan)
        assert placement.table.failure_of(world.problem.failure(plan, 64))


def test_another_plan_may_be_chosen_behind_it(world):
    """The config's own, for which a device has too little memory beside the moments."""
    behind = dataclasses.replace(world.problem.behind_warm_start(), budget_bytes=10**9)
    (first, *_), step = behind.train_plans(64), full_step(behind, 64)
    need = behind.update_footprint(first, 64).total
    own = device_bytes(world.problem.sizes.sft_moments, F8)

    def chosen(problem):
        problem = dataclasses.replace(problem, budget_bytes=need + own // 2)
        return choose_plans(Candidates(problem), step, Plans(), only="train").train

    found = chosen(world.problem)
    assert found.plan != first and found.num_bytes <= need + own // 2
    assert chosen(behind).plan == first
