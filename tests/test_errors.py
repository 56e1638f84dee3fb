# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Exit status of a command: 2 for a mistake in what was given, 1 for every other error."""

import errno
import importlib.util
import os
import subprocess
import sys

import pytest

from earl_jax.launch.agreement import open_shared_workdir
from earl_jax.launch.cluster import processes_only
from earl_jax.launch.start import exit_status
from earl_jax.run.saved_position import read_newest
from earl_jax.settings.errors import InputError, writes_below
from earl_jax.train.checkpoint import Checkpoints
from tests.support import ROOT, run_python
from tests.support.settings import make_config

# A machine with a plugin for GPUs, and without one.
ABSENT = """
import importlib.util, sys
import jax
from earl_jax.launch.start import exit_status, start_jax

def absent():
    raise RuntimeError("Unable to initialize backend 'cuda':\\n  no GPU is visible")

jax.devices, importlib.util.find_spec = absent, lambda name: True
sys.exit(exit_status(lambda: start_jax("gpu", 1)))
"""

# Writes more than a pipe holds, at once or at the end.
MANY_LINES = """
import sys
from earl_jax.launch.start import exit_status

sys.exit(exit_status(lambda: print("line\\n" * int(sys.argv[1]))))
"""


def ends_with(error: Exception):
    def command() -> None:
        raise error

    return command


def test_mistake_in_what_was_given_is_one_message_and_status_2(capsys):
    assert exit_status(lambda: None) == 0
    assert exit_status(ends_with(InputError("config.seed is -1; give 0 or more"))) == 2
    assert capsys.readouterr().err == "error: config.seed is -1; give 0 or more\n"


@pytest.mark.parametrize("lines", [10, 100_000])
def test_reader_that_leaves_ends_a_command_without_a_word(lines):
    with subprocess.Popen(
        [sys.executable, "-c", MANY_LINES, str(lines)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_pipe_that_breaks_elsewhere_is_an_error():
    with pytest.raises(BrokenPipeError):
        exit_status(ends_with(BrokenPipeError(errno.EPIPE, "a socket")))


def test_a_disk_that_is_full_or_broken_is_one_message_and_status_1(tmp_path, capsys):
    """As the system says it, and as tensorstore and safetensors do in errors of their own."""
    numbers = errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS
    errors = [OSError(number, os.strerror(number), str(tmp_path / "a")) for number in numbers]
    errors += [
        ValueError(
            f'RESOURCE_EXHAUSTED: Error writing local file "{tmp_path}/a": Failed to write 19065 '
            "bytes to file 11: No space left on device [os_error_code='28']"
        ),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ]
    wrapped = RuntimeError("the save failed")
    wrapped.__cause__ = errors[0]
    for error in (*errors, wrapped):
        assert exit_status(ends_with(error)) == 1
        (line,) = capsys.readouterr().err.splitlines()
        where = "a file" if error is errors[-1] else tmp_path / "a"
        assert line.startswith(f"error: {where} cannot be written: ")
        assert "give the same command again" in line


def test_a_write_to_a_full_disk_names_the_folder(tmp_path, capsys):
    def write(number, *name):
        with writes_below(tmp_path):
            raise OSError(number, os.strerror(number), *name)

    for name, where in ((), f"a file, most likely one below {tmp_path},"), (("/b",), "/b"):
        assert exit_status(lambda name=name: write(errno.ENOSPC, *name)) == 1
        assert capsys.readouterr().err.startswith(f"error: {where} cannot be written: No space")
    with pytest.raises(ConnectionRefusedError) as refused:
        write(errno.ECONNREFUSED)
    assert refused.value.filename is None


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), FileNotFoundError(2, "No such file"), RuntimeError("lost")]
)
def test_other_errors_keep_their_traceback_and_end_with_1(error, capsys):
    with pytest.raises(type(error)):
        exit_status(ends_with(error))
    assert capsys.readouterr().err == ""


def test_only_a_folder_that_may_not_be_written_is_the_mistake_of_a_workdir(tmp_path):
    def opened(error: Exception) -> None:
        open_shared_workdir(processes_only(1.0), tmp_path, ends_with(error))

    for number in (errno.EACCES, errno.EROFS, errno.ENOTDIR):
        with pytest.raises(InputError, match="cannot be used: .*; name one that you may write"):
            opened(OSError(number, os.strerror(number)))
    with pytest.raises(OSError, match="No space"):
        opened(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(ValueError, match="a bug") as raised:
        opened(ValueError("a bug"))
    assert not isinstance(raised.value, InputError)


def test_a_run_under_way_without_a_checkpoint_says_so_before_anything_is_built(tmp_path):
    (tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir(parents=True)
    with pytest.raises(InputError, match="holds no checkpoint yet: there is none in .*checkpoints"):
        read_newest(make_config({}), tmp_path)


def test_checkpoints_that_cannot_be_read_are_closed(tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    closed, close = [], Checkpoints.close
    monkeypatch.setattr(Checkpoints, "close", lambda self: closed.append(close(self)))
    with pytest.raises(InputError, match="holds no checkpoint that can be read"):
        read_newest(make_config({}), tmp_path)
    assert "the checkpoint of step 2 is damaged" in capsys.readouterr().err and len(closed) == 1


def test_devices_that_an_installed_plugin_does_not_find_end_with_status_2():
    done = run_python("-c", ABSENT)
    assert done.returncode == 2
    words = "JAX cannot start it here: Unable to initialize backend 'cuda': no GPU is visible"
    assert done.stderr == f"error: config.devices.platform is 'gpu', but {words}\n"


@pytest.mark.slow_except("gpu*")
@pytest.mark.parametrize(
    ("platform", "plugins", "extra"),
    [
        ("gpu", ("jax_cuda12_plugin", "jax_cuda13_plugin"), "pip install 'jax[cuda13]'"),
        ("tpu", ("libtpu",), "pip install 'jax[tpu]'"),
    ],
    ids=["gpu", "tpu"],
)
def test_devices_whose_plugin_is_absent_end_with_status_2_and_the_extra(
    tmp_path, platform, plugins, extra
):
    if any(map(importlib.util.find_spec, plugins)):
        pytest.skip(f"a plugin for {platform} is installed here")
    flags = [f"--config.devices.platform={platform}", f"--workdir={tmp_path / 'run'}"]
    done = run_python("-m", "earl_jax.main", *flags)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: config.devices.platform is {platform!r}, but JAX's plugin")
    assert extra in line
    assert not (tmp_path / "run").exists()
