# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/reliability kills as often as it was asked to, and sees what grows."""

import signal
import subprocess
import sys

import pytest

from benchmarks import reliability


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
