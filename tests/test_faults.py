# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of real runs of two processes: all end in words, and a restart goes on."""

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from earl_jax import training
from earl_jax.launch.start import exit_status
from earl_jax.main import train_command
from earl_jax.run import saved_position, saver
from earl_jax.settings.errors import RunError
from earl_jax.telemetry.metrics import read_metrics
from tests.support import ROOT
from tests.support.commands import ALL, SMALL, Command
from tests.support.runs import (
    assert_equal,
    command,
    config_of,
    cut_off,
    environment,
    final_parameters,
    steps_of,
    timeless,
)

# Every step is saved, and a process that is silent for 15 s is lost.
SAVED = ALL | {"checkpoint.every_steps": 1, "distributed.heartbeat_s": 15}
HOST = socket.gethostname()


def die_in(stage: str, lost: int) -> None:
    """Runs the command; process `lost` is killed in its second save, or as it reads one."""
    is_here, saved = f"--config.distributed.process_id={lost}" in sys.argv, []
    save, from_checkpoint = saver.save, saved_position.from_checkpoint

    def faulty_save(*arguments) -> None:
        save(*arguments)
        saved.append(1)
        if is_here and stage == "save" and len(saved) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def faulty_restore(read, *arguments):
        def killed(*of):
            if is_here and stage == "restore":
                os.kill(os.getpid(), signal.SIGKILL)
            return read(*of)

        return from_checkpoint(killed, *arguments)

    saver.save, saved_position.from_checkpoint = faulty_save, faulty_restore
    sys.exit(exit_status(lambda: train_command(sys.argv[1:])))


def have_it_turn_read_only() -> None:
    """Runs the command; from its second save on nothing can be written to its workdir.

    In a mount namespace of its own, where the folder is mounted over itself.
    """
    clone_newns = 0x20000
    assert ctypes.CDLL(None, use_errno=True).unshare(clone_newns) == 0, ctypes.get_errno()
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    save, saved = saver.save, []
    (folder,) = (a.partition("=")[2] for a in sys.argv if a.startswith("--workdir="))

    def with_fault(*arguments) -> None:
        saved.append(1)
        if len(saved) == 2:
            subprocess.run(["mount", "--bind", folder, folder], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        save(*arguments)

    saver.save = with_fault
    sys.exit(exit_status(lambda: train_command(sys.argv[1:])))


# A command twice, first with $1 bytes at $2 and then with room; $3 has its ends and its workdir.
ON_A_SMALL_DISK = """
size=$1 disk=$2 kept=$3; shift 3
mount -t tmpfs -o size=$size none $disk || exit
for time in 1 2; do
  "$@" > $kept/output_$time 2> $kept/errors_$time; echo $? > $kept/status_$time
  mount -o remount,size=1g $disk || exit
done
cp -r $disk/w $kept
"""


def of_a_namespace(folder: Path) -> list[str]:
    """Returns what a command is given to, to see mounts of its own; skips where none can be."""
    for each in (["unshare", "-m"], ["unshare", "-rm"]):
        line = [*each, "mount", "-t", "tmpfs", "none", str(folder)]
        if shutil.which("unshare") and not subprocess.run(line, capture_output=True).returncode:
            return each
    pytest.skip("no namespace with mounts of its own can be made here")


def faulty(workdir, stage: str, lost: int) -> Command:
    program = f"import test_faults; test_faults.die_in({stage!r}, {lost})"
    return Command(workdir, 2, program=program, **SAVED)


# Lines that libraries write before the message where a process is lost: XLA its log and a stack
# trace as its own thread aborts, orbax the traceback of a save under way (at most 42 were seen).
FROM_LIBRARIES = 60


def message_of(end: tuple[int, str, str]) -> str:
    """The one message of a process that ended with status 1: the last line of its stderr."""
    status, _, errors = end
    assert status == 1, errors
    *others, message = errors.splitlines()
    assert message.startswith("error: ") and "Start all processes again" in message, errors
    assert not any(line.startswith("error: ") for line in others), errors
    assert len(others) <= FROM_LIBRARIES, errors
    return message


def train_here(workdir: Path, stop: Callable[[], str] = lambda: "", **changes) -> None:
    """Trains as `Command` with SAVED in one process, which is this one with its eight devices."""
    training.train(config_of(SMALL | SAVED | changes), workdir, stop)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The workdir of a run that nothing happened to."""
    return Command(tmp_path_factory.mktemp("whole"), 2, **SAVED).done()


@pytest.fixture(scope="module")
def whole(alone):
    """The parameters of a run that nothing happened to."""
    return final_parameters(alone)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_lost_a_process_is_resumed(tmp_path, alone, whole):
    """In its second save; of runs that play together, one is lost in any stage of a step.

    Where one process cannot read its part of the newest checkpoint both take the one before:
    neither waits for the other, which has failed.
    """
    folder = tmp_path / "w"
    run = faulty(folder, "save", 1)
    run.all[1].wait(250)
    lost_s = time.monotonic()
    ends = run.ends(60)
    assert time.monotonic() - lost_s < 60
    assert ends[1][0] == -signal.SIGKILL
    assert_names(ends, 1)
    # As if its second checkpoint had been finished, and were damaged.
    shutil.rmtree(folder / "checkpoints/2", ignore_errors=True)
    shutil.copytree(alone / "checkpoints/2", folder / "checkpoints/2")
    files = list((folder / "checkpoints/2/state").glob("ocdbt.process_1/d/*"))
    assert files
    for path in files:
        os.truncate(path, path.stat().st_size // 2)
    ends = Command(folder, 2, **SAVED).ends()
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert not any("Exception ignored" in errors for _, _, errors in ends)
    assert "the checkpoint of step 2 is damaged" in ends[0][1]
    assert "after step 1 of 2" in ends[0][1] and (folder / "damaged_2").is_dir()
    assert_equal(whole, final_parameters(folder))


@pytest.mark.slow
def test_a_run_of_two_processes_is_resumed_by_one(tmp_path, alone, whole, capsys):
    """Within rounding; as many processes go on exactly."""
    folder = cut_off(alone, tmp_path / "w", 1)
    train_here(folder)
    assert "after step 1 of 2" in capsys.readouterr().out
    for left, right in zip(whole, final_parameters(folder), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


def assert_names(ends: list[tuple[int, str, str]], lost: int) -> None:
    """The process that is left says which was lost, and in which stage it was itself."""
    message = message_of(ends[1 - lost])
    assert f"process {1 - lost}" in message and "in the stage " in message
    assert f"process {lost} on {HOST} has ended" in message


@pytest.mark.slow
def test_a_process_lost_while_a_checkpoint_is_read_does_not_damage_it(tmp_path, alone):
    folder = shutil.copytree(alone, tmp_path / "w")
    run = faulty(folder, "restore", 0)
    run.all[0].wait(120)
    ends = run.ends(60)
    assert ends[0][0] == -signal.SIGKILL
    assert_names(ends, 0)
    assert not list(folder.glob("damaged_*"))
    assert sorted(path.name for path in (folder / "checkpoints").glob("[0-9]*")) == ["1", "2"]


@pytest.mark.slow
def test_storage_that_turns_read_only_ends_all_with_one_message(tmp_path):
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("mounts need root")
    program = "import test_faults; test_faults.have_it_turn_read_only()"
    run = Command(tmp_path / "w", 2, program=program, **SAVED | {"num_steps": 1000})
    for end in run.ends():
        message = message_of(end)
        assert "cannot be written: Read-only file system" in message, message
        assert str(tmp_path / "w") in message and "in the stage " in message, message
    assert steps_of(tmp_path / "w")[-1]["step"] <= 4
    assert (tmp_path / "w/checkpoints/1").is_dir()


@pytest.mark.slow
def test_a_run_whose_disk_was_full_goes_on_when_there_is_space(tmp_path):
    """With a disk that holds some of its checkpoints; it ends as one that had room."""
    disk, kept, whole = (tmp_path / name for name in ("disk", "kept", "whole"))
    disk.mkdir()
    kept.mkdir()
    prefix = of_a_namespace(disk)
    settings = {"num_steps": 6, "checkpoint.keep": 6, "log.trajectories_every_steps": 1}
    train_here(whole, **settings)

    # Room for three and a half checkpoints; one may take twice its bytes while it is written.
    each = bytes_below(whole / "checkpoints/1")
    size = bytes_below(whole) - bytes_below(whole / "checkpoints") + 7 * each // 2
    line = command("main", f"--workdir={disk / 'w'}", **(SMALL | SAVED | settings))
    given = [*prefix, "sh", "-c", ON_A_SMALL_DISK, "sh", str(size), str(disk), str(kept), *line]
    subprocess.run(given, cwd=ROOT, env=environment(), check=True, timeout=250)

    read = {path.name: path.read_text() for path in kept.glob("*_*")}
    assert read["status_1"] == "1\n" and read["errors_1"].count("\n") == 1, read
    # Which file finds no room depends on what else is being written.
    assert read["errors_1"].startswith("error: ") and f"{disk / 'w'}" in read["errors_1"], read
    assert "cannot be written: No space left on device" in read["errors_1"]
    assert read["status_2"] == "0\n", read
    (step,) = re.findall(r"after step (\d) of 6", read["output_2"])
    assert 1 <= int(step) < 6

    def lines(workdir: Path) -> list[dict]:
        return [timeless(line) for line in read_metrics(workdir / "metrics.jsonl")]

    assert lines(kept / "w") == lines(whole)
    for path in (whole / "trajectories").iterdir():
        assert (kept / "w/trajectories" / path.name).read_text() == path.read_text()
    assert_equal(final_parameters(whole), final_parameters(kept / "w"))


def bytes_below(folder: Path) -> int:
    """Returns the bytes that the files below take on a disk."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_workdir_that_is_removed_ends_the_run_with_one_message(tmp_path, capfd):
    """After the first step, in this process; storage of two processes turns read-only above."""
    workdir = tmp_path / "w"

    def remove() -> str:
        if workdir.exists() and (workdir / "metrics.jsonl").exists() and steps_of(workdir):
            workdir.rename(tmp_path / "moved")
        return ""

    with pytest.raises(RunError) as raised:
        train_here(workdir, remove, num_steps=1000)
    assert str(raised.value).startswith(f"--workdir={workdir} was removed, or moved")
    assert "\n" not in str(raised.value) and capfd.readouterr().err == ""
    # Orbax may have made the folder of a checkpoint again, and finished it; the run made nothing.
    assert not (workdir / "metrics.jsonl").exists()
    assert (workdir / ".saved").exists() <= any((workdir / "checkpoints").glob("[0-9]"))
