# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Signals to real runs: the first saves and ends the run, a second Ctrl-C ends it at once."""

import shlex
import signal
import sys
import time

import pytest

from tests.support.commands import ALL, Command, steps_of

# So many steps that a signal ends the run, and one line of metrics behind each.
LONG = ALL | {"num_steps": 1000, "log.trajectories_every_steps": 1000}


def last_line(output: str) -> str:
    return output.splitlines()[-1]


@pytest.mark.slow_except("SIGINT-1")
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_saves_and_the_last_line_goes_on(cache, tmp_path, name, num):
    """All processes stop at the same step, whichever of them gets the signal."""
    run = Command(cache, tmp_path / "w", num, **LONG)
    run.after_step(2)
    run.all[-1].send_signal(signal.Signals[name])
    ends = run.ends()
    assert [status for status, _, _ in ends] == [0] * num, ends
    assert f"* {name}: the run saves and ends after this step" in ends[-1][2]
    step = steps_of(run.workdir)[-1]["step"]
    assert 2 <= step < 1000 and (run.workdir / "checkpoints" / str(step)).is_dir()
    words = last_line(ends[0][1])
    saved = run.workdir / "checkpoints" / str(step)
    assert words.startswith(f"stopped by {name} after step {step}; saved in {saved}. To go on: ")
    line = shlex.split(words[words.index(sys.executable) :])
    assert line == run.all[0].args


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("num", [1, 2])
def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path, num):
    """Also while the first program is compiled, when Python runs no handler."""
    run = Command(tmp_path, tmp_path / "w", num, **LONG, **{"distributed.heartbeat_s": 10})
    run.after(lambda: (run.workdir / "config.json").exists())
    run.all[0].send_signal(signal.SIGINT)
    time.sleep(0.2)
    run.all[0].send_signal(signal.SIGINT)
    start_s = time.monotonic()
    run.all[0].wait(20)
    assert time.monotonic() - start_s < 5
    status, _, errors = run.ends(60)[0]
    assert status == 128 + signal.SIGINT and "Traceback" not in errors
    assert f"stopped at once by a second signal; {run.workdir} holds no checkpoint" in errors


@pytest.mark.slow_except("SIGINT-1")
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_before_the_first_step_ends_the_run_before_it(tmp_path, name, num):
    """While the first programs are compiled: the cache folder is empty."""
    run = Command(tmp_path, tmp_path / "w", num, **LONG)
    run.after(lambda: (run.workdir / "tokenizer").exists())
    run.all[-1].send_signal(signal.Signals[name])
    ends = run.ends()
    assert [status for status, _, _ in ends] == [0] * num, ends
    words = f"stopped by {name} before the first step; there was nothing to save. To go on: "
    assert last_line(ends[0][1]).startswith(words)
    assert not (run.workdir / "metrics.jsonl").exists()
