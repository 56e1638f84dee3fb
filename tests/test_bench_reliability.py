# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/reliability kills as often as it was asked to, and sees what grows."""

import json
import signal
import subprocess
import sys

import pytest

from benchmarks import reliability
from earl_jax.config.file import load_config_file, make_config
from earl_jax.config.train_flags import parse_flags
from tests.support import ROOT


def test_runs_that_are_done_early_are_followed_by_others_until_enough_were_killed(
    tmp_path, monkeypatch
):
    """Every other run is done when it was started, and the others do not end by themselves."""
    started = []

    def start(workdir, settings, num):
        is_done = len(started) % 2 == 0
        line = [sys.executable, "-c", "" if is_done else "import time; time.sleep(600)"]
        process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
        if is_done:
            process.wait(60)
        started.append((workdir, process))
        return [process]

    monkeypatch.setattr(reliability, "start", start)
    workdirs = reliability.kill_often(tmp_path, {}, 1, kills=4, run_s=0.01)
    statuses = [process.returncode for _, process in started]
    assert statuses == [0, -signal.SIGKILL] * 4 + [0]
    assert len(workdirs) == 5, "each run was let finish"
    assert workdirs == list(dict.fromkeys(workdir for workdir, _ in started))


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({}, []),
        ({"resident, MiB": 1111.0}, ["resident, MiB grew from 1000 at step 50 to 1111"]),
        ({"threads": 29, "open files": 48}, ["threads grew from 20 at step 50 to 29"]),
    ],
)
def test_growth_between_the_first_quarter_and_the_end_is_reported(end, words):
    row = {"step": 50, "resident, MiB": 1000.0, "threads": 20, "open files": 40, "seconds": 1}
    rows = [row | {"step": 25, "resident, MiB": 500.0}, row, *[row] * 5, row | {"step": 200} | end]
    assert reliability.grown(rows) == words


@pytest.mark.parametrize("kind", reliability.KINDS)
def test_every_kind_is_a_config(kind):
    changed, num = reliability.KINDS[kind]
    flags, overrides = parse_flags(reliability.flags_of({**reliability.SMALL, **changed}, num))
    config = make_config(load_config_file(ROOT / flags.config), overrides)
    assert config.devices.num_cpu_devices == 8 // num
    assert (config.asynchrony.max_staleness > 0) == kind.startswith("asynchronous")


OWN, STALE = ([0, 1], [2, 3]), {"version_lag_max": reliability.STALENESS + 1}


@pytest.mark.parametrize(
    ("taken", "line", "in_order", "drop"),
    [
        (OWN, {}, True, True),
        (([0, 2], [1, 5]), {}, False, True),
        (([0, 1], [1, 2]), {}, False, False),
        (([0, 1], [2]), {}, False, False),
        (OWN, STALE, False, False),
        (OWN, {"step": 3}, False, False),
    ],
    ids=["own tasks", "other tasks", "twice", "lost", "too old", "no second step"],
)
def test_tasks_are_trained_on_once_in_their_step_and_with_drop_in_any(
    tmp_path, taken, line, in_order, drop
):
    (tmp_path / "trajectories").mkdir()
    lines, flat = [], {"logprobs": [], "turn_rewards": [], "reward": 0.0}
    for step, episodes in enumerate(taken, start=1):
        lines.append({"step": step, "version_lag_max": reliability.STALENESS})
        path = tmp_path / "trajectories" / f"step_{step:06d}.jsonl"
        path.write_text("".join(json.dumps({"episode": e, **flat}) + "\n" for e in episodes))
    lines = [*lines[:-1], {**lines[-1], **line}, {"step": 2, "eval": {}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    settings = {"rollout.episodes_per_step": 2, "num_steps": 2}
    for rule, expected in ((None, in_order), ("drop", drop)):
        given = settings | ({"asynchrony.rule": rule} if rule else {})
        assert reliability.is_each_task_trained_on_once(tmp_path, given) == expected
