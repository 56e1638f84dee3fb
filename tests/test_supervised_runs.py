# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of supervised updates alone: without memory for a rollout, and over several processes."""

import dataclasses
import gc
import json
from pathlib import Path

import numpy as np
import pytest

from earl_jax.engine.engine import Engine
from earl_jax.placement.placement import Placement
from earl_jax.plan import plan_command
from earl_jax.run.build import build_run, with_conversations
from earl_jax.run.evaluation import evaluate
from earl_jax.run.saved_position import read_newest
from earl_jax.run.supervised_step import supervised_step
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.selector.schedule import fits
from earl_jax.selector.table import ThroughputTable
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.training import train
from tests.support.allocator import live_bytes, memory_limit
from tests.support.placements import first_position, place
from tests.support.processes import Processes
from tests.support.runs import assert_equal, final_parameters, timeless
from tests.support.settings import make_config
from tests.support.talks import sft_run, sums

# Its weights, whole on every device, are most of what a rollout takes there.
WIDE = {
    "num_layers": 12,
    "width": 128,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_size": 16,
    "ffn_size": 1024,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Eleven conversations of about ten tokens."""
    file = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    file.write_text("\n".join(sums(11)))
    return file


def built(path: Path, **others):
    return with_conversations(build_run(make_config(sft_run(path, **others))))


# Memory.


def test_a_model_that_fits_only_without_a_rollout_starts_and_makes_no_engine(path, monkeypatch):
    wide = {"model": WIDE, "train": sft_run(path)["train"] | {"remat": "full"}}
    world = built(path, **wide)
    problem = world.problem
    (plan, *_), mesh = problem.train_plans(32), problem.meshes("rollout")[0]
    update = problem.update_footprint(plan, 32).total
    # What a rollout takes beside the trainer, even without pages.
    beside = problem.trainer_bytes(plan.mesh) + problem.bare_footprint(mesh, 8, 32).total
    limit = int(0.9 * beside)
    # It is not compiled for its bytes.
    assert 1.5 * update < limit
    tight = dataclasses.replace(problem, budget_bytes=limit)
    assert fits(tight, 32) and not fits(dataclasses.replace(tight, plays=True), 32)

    def made(*_, **__):
        raise AssertionError("an engine is made")

    monkeypatch.setattr(Engine, "__init__", made)
    gc.collect()
    placement, held = place(world, budget_bytes=limit), max(live_bytes().values(), default=0)
    with memory_limit(limit + held) as allocator:
        placement.choose_step(32, None)
        position, _ = supervised_step(world, placement, first_position(world, placement))
    assert position.step == 1 and not allocator.refused and allocator.peak_bytes > held
    line = placement.take_log().metrics()
    assert "train: stays on data=1,fsdp=8" in line["decision"]
    assert "rollout" not in line["decision"] and line["peak_bytes_per_device"] <= limit


def test_a_budget_that_is_too_small_is_one_for_training_alone(path):
    world = built(path, model=WIDE)
    placement = Placement(world.stages, ThroughputTable())
    placement.problem = dataclasses.replace(world.problem, budget_bytes=1000)
    with pytest.raises(BudgetTooSmall, match="no mesh for training") as raised:
        placement.choose_step(32, None)
    assert "num_slots" not in str(raised.value)


def test_slots_that_no_mesh_divides_are_no_error(path):
    rollout = sft_run(path)["rollout"] | {"num_slots": 6}
    selector = {"train_meshes": ("fsdp=8",)}
    built(path, rollout=rollout, selector=selector)
    with pytest.raises(ValueError, match="rollout_meshes has 'data=8'"):
        build_run(make_config(sft_run(path, rollout=rollout, algorithm="reinforce", train={})))


def test_a_plan_of_such_a_run_is_of_training_alone(path, capsys):
    flags = ["--topology=h100:1x8", "--config.model.preset=qwen2.5-7b", "--contexts=2048"]
    flags += ["--config.rollout.episodes_per_step=8", "--config.rollout.num_slots=8"]
    flags += ["--config.selector.rollout_meshes=('data=8',)"]
    plan_command([*flags, "--hbm_gib=16.5", "--json"])
    assert "a rollout" in json.loads(capsys.readouterr().out)["schedule"][0]["why"]
    flags += ["--config.algorithm=sft", f"--config.train.sft_path={path}"]
    plan_command([*flags, "--hbm_gib=16.5", "--json"])
    values = json.loads(capsys.readouterr().out)
    (stop,), (context,) = values["schedule"], values["contexts"]
    assert stop["fits"] and "rollout_mesh" not in stop
    assert context.keys() == {"context", "train"}
    plan_command([*flags, "--hbm_gib=16.5"])
    printed = capsys.readouterr().out
    assert "8 conversations a step, and nothing is played" in printed
    assert "training: an update" in printed and "rollout:" not in printed
    plan_command([*flags, "--hbm_gib=4"])
    assert "the smallest hardware" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--train_topology with config.algorithm 'sft'"):
        plan_command([*flags, "--train_topology=h100:1x1"])


def test_a_placement_without_a_rollout_is_restored(path):
    world = built(path)
    placement = Placement(world.stages, ThroughputTable())
    placement.choose_step(32, None)
    assert placement.plans.rollout is None and placement.words == ""
    again = Placement(world.stages, ThroughputTable())
    again.restore(json.loads(json.dumps(placement.as_dict())))
    assert again.plans == placement.plans and again.as_dict() == placement.as_dict()
    playing = Placement(build_run(make_config({})).stages, ThroughputTable())
    with pytest.raises(ValueError, match="its placement is not one"):
        playing.restore(placement.as_dict())


# Several processes.


def in_one_of_two(path: str, folder: str) -> list[str]:
    """Trains in this process and the other: to the end; until a signal, and then to the end."""
    config, ends = make_config(sft_run(Path(path))), []
    workdir = Path(folder) / "stopped"
    metrics = workdir / "metrics.jsonl"

    def stop() -> str:
        return "SIGTERM" if metrics.exists() and '"step": 2' in metrics.read_text() else ""

    for where, stops in (
        (Path(folder) / "steady", lambda: ""),
        (workdir, stop),
        (workdir, lambda: ""),
    ):
        ends.append(train(config, where, stops).stopped)
    return ends


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_go_on_where_they_were_stopped(path, tmp_path):
    """Bit for bit as if they had not been, and their policy can be evaluated by one process."""
    one, steady, stopped = (tmp_path / name for name in ("one", "steady", "stopped"))
    ends = Processes(2, 4, "test_supervised_runs:in_one_of_two", str(path), str(tmp_path)).results()
    words = f"stopped by SIGTERM after step 2; saved in {stopped}/checkpoints/2"
    assert ends == [["", words, ""]] * 2
    assert_equal(final_parameters(stopped), final_parameters(steady))
    train(make_config(sft_run(path)), one)
    # The same examples, and weights that differ by rounding.
    for ours, theirs in zip(final_parameters(one), final_parameters(stopped), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    each = [read_metrics(folder / "metrics.jsonl") for folder in (steady, stopped, one)]
    assert [[line["step"] for line in lines] for lines in each] == [[1, 2, 3, 4]] * 3
    assert [*map(timeless, each[0])] == [*map(timeless, each[1])]
    for ours, theirs in zip(each[2], each[1], strict=True):
        assert ours["train_tokens"] == theirs["train_tokens"]
        assert ours["policy_tokens"] == theirs["policy_tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    run, position, placement = read_newest(make_config(sft_run(path)), stopped)
    assert position.step == 4 and placement.plans.rollout is None
    assert evaluate(run, placement, position, games=8)["episodes"] == 8
    assert placement.plans.rollout is not None
