# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers that overflow in a run: no update is made from them, none is saved, and the run ends."""

import io
import os
import threading
import time
import types

import numpy as np
import pytest

from earl_jax.config.file import make_config
from earl_jax.envs.environment import StepResult, check_step
from earl_jax.envs.games.trail import Trail
from earl_jax.launch.start import exit_status
from earl_jax.run import step_log
from earl_jax.settings.errors import RunError
from earl_jax.telemetry.progress import Progress
from earl_jax.telemetry.recorder import Recorder
from earl_jax.training import train
from tests.support import wait_until
from tests.support.placements import TINY
from tests.support.runs import final_parameters, steps_of

GIVEN = {
    "num_steps": 9,
    "model": TINY,
    "env": {
        "name": "tests.test_numbers:Huge",
        "args": {"num_stones": 4, "num_steps": 4, "mask_illegal": True},
    },
    "rollout": {
        "num_slots": 8,
        "episodes_per_step": 8,
        "group_size": 1,
        "max_turn_tokens": 4,
        "context_buckets": (64,),
        "unfinished_reward": 0.0,
        "patience_s": 10.0,
    },
    "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",), "table": "model"},
    "algorithm": "reinforce",
    "algorithm_args": {"normalize_advantages": False},
    "train": {"ratio": "model"},
    "checkpoint": {"every_steps": 1},
    "eval": {"every_steps": 100, "games": 2, "final_games": 2},
}


@pytest.fixture(autouse=True)
def ends_behind_two_steps(monkeypatch):
    monkeypatch.setattr(step_log, "MOST_SKIPPED_STEPS", 2)


class Huge(Trail):
    """A trail whose rewards are as large as float32 allows, of either sign by the seed."""

    def __init__(self, *, seed=0, index=0, **settings):
        super().__init__(seed=seed, index=index, **settings)
        self.sign = 1.0 if seed % 2 else -1.0

    def step(self, reply):
        return StepResult(done=True, reward=self.sign * 3.4e38, stop_reason="huge")


def test_rewards_are_numbers_of_float32():
    for reward in (3.4e38, -3.4e38, 0):
        check_step(StepResult(done=True, reward=reward, stop_reason="over"))
    for reward in (1e300, -1e39, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"from -3.40282e\+38 to 3.40282e\+38; got"):
            check_step(StepResult(done=True, reward=reward, stop_reason="over"))


@pytest.fixture
def slow_disk(monkeypatch):
    """Holds the checkpoint of step 1 until the run writes the batch that it ends with."""
    rename, write, ends = os.rename, step_log.write_batch, threading.Event()

    def slow_rename(source, target, **options):
        if "orbax-checkpoint-tmp" in str(source):
            assert ends.wait(120)
            time.sleep(0.5)
        rename(source, target, **options)

    def last_write(path, batch):
        assert not (path.parent / "checkpoints" / "1").exists(), "it is still being written"
        write(path, batch)
        ends.set()

    monkeypatch.setattr(os, "rename", slow_rename)
    monkeypatch.setattr(step_log, "write_batch", last_write)


def test_a_run_whose_updates_are_not_finite_ends_with_its_batch(tmp_path, capsys, slow_disk):
    """And, as at any exception, when the checkpoint that was being written is whole.

    The threads of its environments end too.
    """
    workdir, before = tmp_path / "run", set(threading.enumerate())
    with pytest.raises(RunError, match=r"no update could be made in 2 steps in a row"):
        train(make_config(GIVEN), workdir)
    assert "step 2: 1 of 1 updates were skipped" in capsys.readouterr().out
    lines = steps_of(workdir)
    assert [line["skipped_updates"] for line in lines] == [1, 1]
    assert not np.isfinite(lines[-1]["loss"]), "a metric does not hide it"
    with np.load(workdir / "skipped_step_000002.0.npz") as batch:
        assert batch["tokens"].shape == batch["advantages"].shape == (8, 64)
        assert np.abs(batch["advantages"]).max() > 1e38
        # What the stones of the trail were chosen among.
        assert batch["allowed.0"].any() and batch["allowed.0"].shape == (8, 64)
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == {"1"}
    assert all(np.isfinite(leaf).all() for leaf in final_parameters(workdir, 1))
    own = [each for each in {*threading.enumerate()} - before if "environment" in each.name]
    assert wait_until(lambda: not any(each.is_alive() for each in own))


def test_the_batch_is_named_that_a_process_that_trains_has_written(tmp_path):
    """The first process only plays here, and has no batch."""
    trainers = (types.SimpleNamespace(process_index=1),)
    cluster = types.SimpleNamespace(trains=False, train_devices=trainers)
    with Progress(1, io.StringIO()) as progress:
        log = step_log.StepLog(
            run=types.SimpleNamespace(config=make_config(GIVEN), cluster=cluster),
            placement=None,
            recorder=Recorder(tmp_path, progress),
            workdir=tmp_path,
            ahead=None,
            skipped_steps=1,
        )
        record = types.SimpleNamespace(step=2, updates=[{}], sft_updates=[], skipped_updates=1)
        with pytest.raises(RunError, match=r"skipped_step_000002\.1\.npz"):
            log.check_updates(record)


@pytest.mark.slow
def test_steps_without_an_update_are_counted_over_a_resume(tmp_path):
    assert not train(make_config(GIVEN, ["num_steps=1"]), tmp_path / "run").stopped
    with pytest.raises(RunError, match="no update could be made in 2 steps in a row"):
        train(make_config(GIVEN), tmp_path / "run")
    lines = steps_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]


@pytest.mark.slow
def test_a_learning_rate_of_1e9_ends_with_status_1_and_saves_no_nan(tmp_path, capsys):
    env = {"name": "trail", "args": GIVEN["env"]["args"]}
    config = make_config({**GIVEN, "env": env}, ["train.learning_rate=1e9"])
    assert exit_status(lambda: train(config, tmp_path / "run") and None) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "not finite" in line
    steps = [int(path.name) for path in (tmp_path / "run/checkpoints").iterdir()]
    assert steps and max(steps) < 9
    for step in steps:
        assert all(np.isfinite(leaf).all() for leaf in final_parameters(tmp_path / "run", step))
