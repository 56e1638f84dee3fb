# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One run, one workdir: the second process is refused; a run that begins again loses nothing."""

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from earl_jax.launch.lock import locked, set_aside
from earl_jax.run.workdir import named_where_removed
from earl_jax.settings.errors import InputError, RunError

HOLD = """
import sys
from pathlib import Path
from earl_jax.launch.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=-1, stdout=-1, text=True
    )
    assert holder.stdout.readline() == "held\n"
    words = f"is in use by another run .process {holder.pid} on {socket.gethostname()}"
    for call in (lambda: locked(tmp_path).__enter__(), lambda: set_aside(tmp_path)):
        with pytest.raises(InputError, match=words):
            call()
    # However it ends.
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with locked(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def test_a_file_system_without_locks_leaves_the_workdir_unlocked(tmp_path, monkeypatch):
    def unknown(*_) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with locked(tmp_path), locked(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def test_errors_in_a_workdir_that_was_removed_say_so(tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()
    with locked(workdir):
        with pytest.raises(FileNotFoundError), named_where_removed(workdir):
            (workdir / "no" / "file").write_text("")
        shutil.rmtree(workdir)
        with pytest.raises(RunError, match=f"--workdir={workdir} was removed"):
            with named_where_removed(workdir):
                (workdir / "file").write_text("")


def test_a_workdir_set_aside_keeps_its_files(tmp_path):
    workdir = tmp_path / "run"
    assert set_aside(workdir) is None
    for number in (1, 2):
        workdir.mkdir()
        assert set_aside(workdir) is None, "there is nothing in it"
        (workdir / "metrics.jsonl").write_text(f"{number}")
        assert set_aside(workdir) == tmp_path / f"run.old_{number}"
        assert not workdir.exists()
    kept = [(tmp_path / f"run.old_{number}/metrics.jsonl").read_text() for number in (1, 2)]
    assert kept == ["1", "2"]
