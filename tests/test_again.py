# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs that lost their state to a lack of memory go on from the newest checkpoint by another plan.

One process does so by itself; several end with status 1, and their launcher starts them again. The
errors are real ones (`hungry`).
"""

import os
import re
import time
from pathlib import Path
from typing import ClassVar

import jax
import pytest

from benchmarks.runs import free_port
from earl_jax.sharding.layout import MeshShape
from earl_jax.train.learner import Learner
from earl_jax.training import train
from tests.support import ROOT
from tests.support.forks import Fork, start_python
from tests.support.placements import D8, F8, SIXTEEN_SLOTS, given, hungry
from tests.support.runs import steps_of
from tests.support.settings import make_config

RUN = given(SIXTEEN_SLOTS, (D8,), (D8, F8)) | {
    "num_steps": 4,
    "train": {"epochs": 2, "sft_steps": 0},
    "checkpoint": {"every_steps": 2},
    "eval": {"every_steps": 100, "games": 8, "final_games": 8},
}


# One process.


class Counted:
    """A task source that goes on from a number of its own; `firsts` are those of all batches."""

    firsts: ClassVar[list[int]] = []

    def __init__(self, *, num_tasks: int) -> None:
        self._num_tasks, self._next = num_tasks, 0

    def batch(self, step: int) -> list[dict]:
        first, self._next = self._next, self._next + self._num_tasks
        self.firsts.append(first)
        return [{"seed": first + i} for i in range(self._num_tasks)]

    def evaluation(self, number: int) -> list[dict]:
        return [{"seed": 10**6 + i} for i in range(number)]

    def state(self) -> dict:
        return {"next": self._next}

    def restore(self, state: dict) -> None:
        self._next = state["next"]


@pytest.mark.slow
@pytest.mark.parametrize(("failed_update", "kept_steps"), [(2, 0), (6, 2)])
def test_a_run_whose_state_is_lost_goes_on_from_its_newest_checkpoint(
    tmp_path, monkeypatch, capsys, failed_update, kept_steps
):
    """Two updates a step: the second of step 1, before any checkpoint, and the second of step 3.

    Their program had run before, so that there is no backup of the state.
    """
    # What ran out of memory is remembered there.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    update, programs = Learner.update, []

    def short(self, plan, state, batch, controls, *, sft=False):
        programs.append(self.program(plan, sft=sft))
        if len(programs) == failed_update:
            return hungry(donated=0)(state, batch, controls)
        return update(self, plan, state, batch, controls, sft=sft)

    monkeypatch.setattr(Learner, "update", short)
    monkeypatch.setattr(Counted, "firsts", [])
    train(make_config(RUN | {"tasks": {"name": f"{__name__}:Counted"}}), tmp_path / "run")
    # Behind those from which the run was built: the step that was lost came again with its tasks.
    first, *later = Counted.firsts[-5:]
    again = sorted([*range(4), kept_steps])
    assert [first, *later] == [first + 16 * step for step in again]

    notes = capsys.readouterr().out
    assert "in a program that had run before, and lost the weights" in notes
    words = f"after step {kept_steps} of 4" if kept_steps else "the run begins again"
    assert words in notes
    steps = steps_of(tmp_path / "run")
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
RUN_OF_TWO = given(SIXTEEN_SLOTS, (FOUR,), (FOUR, CUT)) | {
    "num_steps": 3,
    "devices": {"platform": "cpu", "num_cpu_devices": 2},
    "train": {"sft_steps": 0},
    "checkpoint": {"every_steps": 1},
    "distributed": {"heartbeat_s": 15},
    "eval": {"every_steps": 100, "games": 8, "final_games": 8},
}


def short_main() -> None:
    """`python -m earl_jax.main`, of which process 1 has no memory for its third update, once."""
    from earl_jax.main import main

    update, plans, was_short = Learner.update, [], Path(os.environ["WAS_SHORT"])

    def short(self, plan, state, batch, controls, *, sft=False):
        plans.append(plan)
        if jax.process_index() == 1 and len(plans) == 3 and not was_short.exists():
            was_short.touch()
            return hungry(donated=0)(state, batch, controls)
        return update(self, plan, state, batch, controls, sft=sft)

    Learner.update = short
    main()


CONFIG = """
from ml_collections import ConfigDict
from test_again import RUN_OF_TWO

def get_config():
    return ConfigDict(RUN_OF_TWO)
"""


def launch(lines: list[list[str]]) -> list[list[tuple[int, str, str]]]:
    """Returns the ends of each process, which a launcher of its own starts again after status 1."""
    ends, deadline_s = [[] for _ in lines], time.monotonic() + 360

    def start(number: int) -> Fork:
        program = "-c", "import test_again; test_again.short_main()"
        return start_python(*program, *lines[number], env=os.environ, cwd=ROOT / "tests")

    running = {number: start(number) for number in range(len(lines))}
    while running:
        assert time.monotonic() < deadline_s, [process.output() for process in running.values()]
        time.sleep(0.05)
        for number, process in list(running.items()):
            if process.poll() is not None:
                ends[number].append((process.poll(), *process.output()))
                del running[number]
                if process.poll() == 1 and len(ends[number]) < 4:
                    running[number] = start(number)
    return ends


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_processes_of_which_one_is_short_are_started_again_and_go_on_with_less(
    tmp_path, monkeypatch
):
    """Two processes, each with a launcher as on a host of its own; both end well."""
    (tmp_path / "config.py").write_text(CONFIG)
    monkeypatch.setenv("WAS_SHORT", str(tmp_path / "was_short"))
    workdir, lines = tmp_path / "run", []
    settings = {"coordinator": f"127.0.0.1:{free_port()}", "num_processes": 2}
    for number in range(2):
        line = [f"--config={tmp_path / 'config.py'}", f"--workdir={workdir}"]
        given = settings | {"process_id": number}
        lines.append(line + [f"--config.distributed.{key}={given[key]}" for key in given])
    ends = launch(lines)
    assert all((each[0][0], each[-1][0]) == (1, 0) for each in ends), ends
    # The one whose memory was short says so.
    assert re.search("error: process 1 of 2 on .*: train on .* ran out of memory", ends[1][0][2])
    # The checkpoint of step 2 may have been on its way.
    assert re.search("after step [12] of 3", ends[0][-1][1])
    steps = steps_of(workdir)
    assert [row["step"] for row in steps] == [1, 2, 3]
    ways = [(row["train_mesh"], row.get("plan")) for row in steps]
    assert ways[0] != ways[2]
