# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Files and folders are replaced as a whole, whatever ends the process or the machine."""

import os
import signal
import subprocess
import sys

import pytest

from earl_jax.telemetry.atomic import replacing, write_atomically

KILLED = """
import os, signal, sys
from pathlib import Path
from earl_jax.telemetry.atomic import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.mkdir()
    (temporary / "one").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_in_the_middle_of_a_folder_leaves_none_and_the_next_writer_begins_anew(tmp_path):
    path = tmp_path / "tokenizer"
    done = subprocess.run([sys.executable, "-c", KILLED, path])
    assert done.returncode == -signal.SIGKILL
    assert [each.name for each in tmp_path.iterdir()] == ["tokenizer.tmp"]
    with replacing(path) as temporary:
        temporary.mkdir()
        (temporary / "two").write_text("whole")
    assert list(tmp_path.iterdir()) == [path]
    assert [each.name for each in path.iterdir()] == ["two"]


def test_a_writer_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(OSError, match="full"), replacing(path) as temporary:
        temporary.write_text("ne")
        raise OSError("full")
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "old"
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "gone" / "file", "new")
    assert not (tmp_path / "gone").exists(), "a folder that was removed is not made again"


def test_files_are_on_the_disk_before_the_name_is_and_then_the_name(tmp_path, monkeypatch):
    """As Linux knows the descriptors: a machine that loses its power has the old or the new."""
    order, path = [], tmp_path / "folder"
    sync, replace = os.fsync, os.replace

    def syncs(number):
        sync(number)
        order.append(os.readlink(f"/proc/self/fd/{number}").removeprefix(f"{tmp_path}"))

    def replaces(*names):
        order.append("renamed")
        replace(*names)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "replace", replaces)
    with replacing(path) as temporary:
        (temporary / "in").mkdir(parents=True)
        (temporary / "in" / "file").write_text("whole")
    assert sorted(order[:3]) == ["/folder.tmp", "/folder.tmp/in", "/folder.tmp/in/file"]
    assert order[3:] == ["renamed", ""]
