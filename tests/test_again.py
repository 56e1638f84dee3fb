# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs that lost their state to a lack of memory go on by themselves, by another plan.

In one process from the newest checkpoint; of several all are started again. The errors are real
ones (`hungry`).
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from earl_jax.config_file import make_config
from earl_jax.run import run
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.train import learner as learning
from tests.support import ROOT
from tests.support.placements import D8, F8, given, hungry
from tests.support.processes import free_port

AGAIN = ROOT / "gpu_scripts" / "again.sh"
ROLLOUT = {
    "num_slots": 16,
    "episodes_per_step": 16,
    "burst": 2,
    "max_turn_tokens": 4,
    "max_episode_tokens": 32,
    "context_buckets": (32,),
    "patience_s": 60.0,
}
RUN = given(ROLLOUT, (D8,), (D8, F8)) | {
    "num_steps": 4,
    "train": {"epochs": 2, "sft_steps": 0},
    "checkpoint": {"every_steps": 2},
    "eval": {"every_steps": 100, "games": 8, "final_games": 8},
}


# One process.


@pytest.mark.slow
@pytest.mark.parametrize(("failed_update", "kept_steps"), [(2, 0), (6, 2)])
def test_a_run_whose_state_is_lost_goes_on_from_its_newest_checkpoint(
    tmp_path, monkeypatch, capsys, failed_update, kept_steps
):
    """Two updates a step: the second of step 1, before any checkpoint, and the second of step 3.

    Their program had run before, so that there is no backup of the state.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_update, programs = learning._run_update, []

    def short(world, program, state, batch, controls):
        programs.append(program)
        program = hungry(donated=0) if len(programs) == failed_update else program
        return run_update(world, program, state, batch, controls)

    monkeypatch.setattr(learning, "_run_update", short)
    run(make_config(RUN), tmp_path / "run")

    notes = capsys.readouterr().out
    assert "in a program that had run before, and lost the weights" in notes
    words = f"after step {kept_steps} of 4" if kept_steps else "the run begins again"
    assert words in notes
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps = [row for row in rows if "eval" not in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["logprob_mismatch_max"] < 1e-4 for row in steps)
    # What failed is not tried again.
    ways = [(row["train_mesh"], row.get("plan")) for row in steps]
    failed, later = set(ways[:kept_steps]), set(ways[kept_steps:])
    assert len(failed) <= 1 and len(later) == 1 and not failed & later
    assert len(programs) == failed_update + 2 * (4 - kept_steps)
    assert programs[failed_update - 1] not in programs[failed_update:]
    assert programs[0] is programs[failed_update - 1]


# Several processes.


FOUR, CUT = MeshShape(data=4), MeshShape(data=2, fsdp=2)
RUN_OF_TWO = given(ROLLOUT, (FOUR,), (FOUR, CUT)) | {
    "num_steps": 3,
    "devices": {"platform": "cpu", "num_cpu_devices": 2},
    "train": {"sft_steps": 0},
    "checkpoint": {"every_steps": 1},
    "eval": {"every_steps": 100, "games": 8, "final_games": 8},
}


def short_main() -> None:
    """`python -m earl_jax.main`, of which process 1 has no memory for its second update, once."""
    from earl_jax.main import main

    run_update, updates, was_short = learning._run_update, [], Path(os.environ["WAS_SHORT"])

    def short(world, program, state, batch, controls):
        updates.append(program)
        if world.processes.index == 1 and len(updates) == 2 and not was_short.exists():
            was_short.touch()
            program = hungry(donated=0)
        return run_update(world, program, state, batch, controls)

    learning._run_update = short
    main()


CONFIG = """
from ml_collections import ConfigDict
from test_again import RUN_OF_TWO

def get_config():
    return ConfigDict(RUN_OF_TWO)
"""


@pytest.mark.slow
def test_processes_of_which_one_is_short_are_started_again_and_go_on_with_less(cache, tmp_path):
    """Two processes, each under again.sh as on a host of its own; both end, and both end well."""
    (tmp_path / "config.py").write_text(CONFIG)
    script = "import sys; sys.argv[0] = 'main'; import test_again; test_again.short_main()"
    port, workdir = free_port(), tmp_path / "run"
    environment = os.environ | {
        "XDG_CACHE_HOME": str(cache),
        "PYTHONUNBUFFERED": "1",
        "WAS_SHORT": str(tmp_path / "was_short"),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    all_of_them = []
    for number in range(2):
        settings = {
            "coordinator": f"127.0.0.1:{port}",
            "num_processes": 2,
            "process_id": number,
        }
        line = [str(AGAIN), sys.executable, "-c", script]
        line += [f"--config={tmp_path / 'config.py'}", f"--workdir={workdir}"]
        line += [f"--config.distributed.{key}={value}" for key, value in settings.items()]
        all_of_them.append(
            subprocess.Popen(
                line,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                # To end all of a script's processes at once.
                start_new_session=True,
            )
        )
    deadline_s, ends = time.monotonic() + 280, []
    try:
        for process in all_of_them:
            output, errors = process.communicate(timeout=max(1, deadline_s - time.monotonic()))
            ends.append((process.returncode, output, errors))
    finally:
        for process in all_of_them:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    for status, output, errors in ends:
        assert status == 0, f"{output}\n{errors[-4000:]}"
        # Both know whose memory was short, and of both there was one restart.
        assert re.search("error: process 1 of 2: train on .* ran out of memory", errors)
        assert errors.count("starting the run again with less (1 of 10)") == 1
        assert "(2 of 10)" not in errors
    assert "after step 1 of 3" in ends[0][1]
    rows = read_metrics(workdir / "metrics.jsonl")
    steps = [row for row in rows if "eval" not in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    ways = [(row["train_mesh"], row.get("plan")) for row in steps]
    assert ways[0] != ways[1] == ways[2]


# The script.


def again(tmp_path, body, **variables) -> tuple[subprocess.CompletedProcess, int]:
    """Runs again.sh on a script; its result, and how often the script was started."""
    count = tmp_path / "count"
    count.write_text("")
    command = ["bash", "-c", f"echo >> {count}; {body}"]
    done = subprocess.run(
        [str(AGAIN), *command],
        env=os.environ | {"EARL_JAX_RESTART_AFTER_S": "0"} | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done, len(count.read_text())


@pytest.mark.parametrize("status", [0, 1, 2, 134])
def test_a_run_that_ends_otherwise_is_not_started_again(tmp_path, status):
    done, starts = again(tmp_path, f"exit {status}")
    assert (done.returncode, starts, done.stderr) == (status, 1, "")


def test_a_run_short_of_memory_is_started_again_until_it_is_not(tmp_path):
    count = tmp_path / "count"
    done, starts = again(tmp_path, f"[[ $(wc -l < {count}) -gt 2 ]] || exit 75; exit 7")
    assert (done.returncode, starts) == (7, 3)
    assert done.stderr.count("starting the run again with less") == 2


def test_restarts_have_an_end(tmp_path):
    done, starts = again(tmp_path, "exit 75", EARL_JAX_RESTARTS="2")
    assert (done.returncode, starts) == (75, 3)
    assert "after 2 restarts; giving up" in done.stderr


def test_a_signal_goes_on_to_the_command_which_is_not_started_again(tmp_path):
    """It takes a second to save, and would end with 75."""
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    body = f"trap 'sleep 1; echo >> {saved}; exit 75' TERM; echo > {begun}; sleep 30 & wait"
    process = subprocess.Popen([str(AGAIN), "bash", "-c", body], start_new_session=True)
    try:
        deadline_s = time.monotonic() + 30
        while not begun.exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        process.terminate()
        assert process.wait(timeout=30) == 75
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert saved.read_text() == "\n"
