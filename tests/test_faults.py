# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of real runs of two processes: all end in words, and a restart goes on."""

import contextlib
import ctypes
import os
import resource
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

from earl_jax import loop, training
from earl_jax.launch.start import exit_status
from earl_jax.main import train_command
from earl_jax.run import workdir
from earl_jax.settings.errors import RunError
from earl_jax.telemetry.timing import StageTimer
from tests.support.commands import ALL, SMALL, Command, final_parameters
from tests.support.runs import config_of, steps_of

# Every step is saved, and a process that is silent for 20 s is lost.
SAVED = ALL | {
    "checkpoint.every_steps": 1,
    "distributed.heartbeat_s": 20,
}
HOST = socket.gethostname()


class Fault:
    """Sends this process a signal where it comes to a stage the `left`-th time, if it is the one.

    Stages of a step: in its second.
    """

    def __init__(self, stage: str, lost: int, number: int) -> None:
        self.stage, self.number = stage, number
        self.left = 1 if stage == "restore" else 2
        self.is_here = f"--config.distributed.process_id={lost}" in sys.argv

    def enter(self, stage: str) -> None:
        self.left -= stage == self.stage
        if self.is_here and stage == self.stage and self.left == 0:
            os.kill(os.getpid(), self.number)


def fail_in(stage: str, lost: int, number: int) -> None:
    """Runs the command with a fault in one process."""
    fault = Fault(stage, lost, number)

    class FaultyTimer(StageTimer):
        @contextlib.contextmanager
        def __call__(self, stage: str):
            with super().__call__(stage):
                fault.enter(stage)
                yield

    save, from_checkpoint = training.save, workdir.from_checkpoint

    def faulty_save(*arguments) -> None:
        save(*arguments)
        fault.enter("save")

    def faulty_restore(read, *arguments):
        def killed(*of):
            fault.enter("restore")
            return read(*of)

        return from_checkpoint(killed, *arguments)

    loop.StageTimer, training.save = FaultyTimer, faulty_save
    workdir.from_checkpoint = faulty_restore
    sys.exit(exit_status(lambda: train_command(sys.argv[1:])))


def fill_the_disk() -> None:
    """Runs the command; from its second save on no file can be as large as an array."""
    save, saved = training.save, []

    def full(*arguments) -> None:
        saved.append(1)
        if len(saved) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
        save(*arguments)

    training.save = full
    sys.exit(exit_status(lambda: train_command(sys.argv[1:])))


def have_it_turn_read_only() -> None:
    """Runs the command; from its second save on nothing can be written to its workdir.

    In a mount namespace of its own, where the folder is mounted over itself.
    """
    clone_newns = 0x20000
    assert ctypes.CDLL(None, use_errno=True).unshare(clone_newns) == 0, ctypes.get_errno()
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    save, saved = training.save, []
    (folder,) = (a.partition("=")[2] for a in sys.argv if a.startswith("--workdir="))

    def with_fault(*arguments) -> None:
        saved.append(1)
        if len(saved) == 2:
            subprocess.run(["mount", "--bind", folder, folder], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        save(*arguments)

    training.save = with_fault
    sys.exit(exit_status(lambda: train_command(sys.argv[1:])))


def faulty(cache, workdir, stage: str, lost: int, number: int) -> Command:
    program = f"import test_faults; test_faults.fail_in({stage!r}, {lost}, {int(number)})"
    return Command(cache, workdir, 2, program=program, **SAVED)


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
def alone(cache, tmp_path_factory):
    """The workdir of a run that nothing happened to."""
    return Command(cache, tmp_path_factory.mktemp("whole"), 2, **SAVED).done()


@pytest.fixture(scope="module")
def whole(alone):
    """The parameters of a run that nothing happened to."""
    return final_parameters(alone)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", ["train", "save"])
def test_a_run_that_lost_a_process_is_resumed(cache, tmp_path, whole, stage):
    run = faulty(cache, tmp_path / "w", stage, 1, signal.SIGKILL)
    run.all[1].wait(250)
    lost_s = time.monotonic()
    ends = run.ends(60)
    assert time.monotonic() - lost_s < 60
    assert ends[1][0] == -signal.SIGKILL
    assert_names(ends, 1)
    if stage == "save":
        again = Command(cache, tmp_path / "w", 2, **SAVED).done()
        for left, right in zip(whole, final_parameters(again), strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.slow
def test_a_run_of_two_processes_is_resumed_by_one(
    cache, tmp_path, alone, whole, monkeypatch, capsys
):
    """Within rounding; as many processes go on exactly."""
    folder = shutil.copytree(alone, tmp_path / "w")
    shutil.rmtree(folder / "checkpoints" / "2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
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
def test_a_process_lost_while_a_checkpoint_is_read_does_not_damage_it(cache, tmp_path, alone):
    folder = shutil.copytree(alone, tmp_path / "w")
    run = faulty(cache, folder, "restore", 0, signal.SIGKILL)
    run.all[0].wait(120)
    ends = run.ends(60)
    assert ends[0][0] == -signal.SIGKILL
    assert_names(ends, 0)
    assert not list(folder.glob("damaged_*"))
    assert sorted(path.name for path in (folder / "checkpoints").glob("[0-9]*")) == ["1", "2"]


@pytest.mark.slow
def test_checkpoint_of_which_one_process_cannot_read_its_part(cache, tmp_path, alone, whole):
    """Both take the one before: neither waits for the other, which has failed."""
    folder = shutil.copytree(alone, tmp_path / "w")
    files = list((folder / "checkpoints/2/state").glob("ocdbt.process_1/d/*"))
    assert files
    for path in files:
        os.truncate(path, path.stat().st_size // 2)
    ends = Command(cache, folder, 2, **SAVED).ends(150)
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert not any("Exception ignored" in errors for _, _, errors in ends)
    assert "the checkpoint of step 2 is damaged" in ends[0][1]
    assert "after step 1 of 2" in ends[0][1] and (folder / "damaged_2").is_dir()
    for left, right in zip(whole, final_parameters(folder), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.slow
def test_a_process_that_is_stopped_is_named(cache, tmp_path):
    run = faulty(cache, tmp_path / "w", "rollout", 1, signal.SIGSTOP)
    run.all[0].wait(270)
    run.all[1].kill()
    message = message_of(run.ends(30)[0])
    assert f"process 1 on {HOST} does not answer" in message


@pytest.mark.slow
def test_storage_that_turns_read_only_ends_all_with_one_message(cache, tmp_path):
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("mounts need root")
    program = "import test_faults; test_faults.have_it_turn_read_only()"
    run = Command(cache, tmp_path / "w", 2, program=program, **SAVED | {"num_steps": 1000})
    for end in run.ends(150):
        message = message_of(end)
        assert "cannot be written: Read-only file system" in message, message
        assert str(tmp_path / "w") in message and "in the stage " in message, message
    assert steps_of(tmp_path / "w")[-1]["step"] <= 3
    assert (tmp_path / "w/checkpoints/1").is_dir()


@pytest.mark.slow
def test_a_full_disk_is_one_message_in_the_next_step(cache, tmp_path):
    program = "import test_faults; test_faults.fill_the_disk()"
    settings = SAVED | {"num_steps": 1000, "checkpoint.every_steps": 5}
    ((status, _, errors),) = Command(cache, tmp_path / "w", 1, program=program, **settings).ends()
    assert status == 1 and errors.count("\n") == 1, errors
    line = errors
    assert line.startswith(f"error: {tmp_path / 'w' / 'checkpoints'}/10")
    assert "cannot be written: File too large" in line
    assert steps_of(tmp_path / "w")[-1]["step"] < 15, "before the next save"
    assert (tmp_path / "w/checkpoints/5").is_dir()


@pytest.mark.slow
def test_a_workdir_that_is_removed_ends_the_run_with_one_message(
    cache, tmp_path, monkeypatch, capfd
):
    """After the first step, in this process; storage of two processes turns read-only above."""
    workdir = tmp_path / "w"

    def remove() -> str:
        if workdir.exists() and (workdir / "metrics.jsonl").exists() and steps_of(workdir):
            workdir.rename(tmp_path / "moved")
        return ""

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with pytest.raises(RunError) as raised:
        train_here(workdir, remove, num_steps=1000)
    assert str(raised.value).startswith(f"--workdir={workdir} was removed, or moved")
    assert "\n" not in str(raised.value) and capfd.readouterr().err == ""
    # Orbax may have made the folder of a checkpoint again, and finished it; the run made nothing.
    assert not (workdir / "metrics.jsonl").exists()
    assert (workdir / ".saved").exists() <= any((workdir / "checkpoints").glob("[0-9]"))


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(cache, tmp_path, alone):
    workdir = shutil.copytree(alone, tmp_path / "w")
    shutil.rmtree(workdir / "checkpoints")
    ends = Command(cache, workdir, 2, **SAVED).ends()
    assert [status for status, _, _ in ends] == [2, 2], ends
    assert ends[0][2].count("error: ") == 1 and "error: " not in ends[1][2]
    assert "are gone" in ends[0][2] and "--restart" in ends[0][2]
    assert steps_of(workdir) == steps_of(alone)
    for path in (alone / "trajectories").iterdir():
        assert (workdir / "trajectories" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_a_mistake_of_one_process_ends_all_with_status_2_and_one_message(cache, tmp_path):
    """Of the second alone; both find the checkpoints gone above."""
    own = [[], [f"--workdir={tmp_path / 'own'}"]]
    ends = Command(cache, tmp_path / "w", 2, *own, **ALL).ends(120)
    assert [status for status, _, _ in ends] == [2, 2], ends
    words = "is not the same folder in process 1 as in process 0"
    assert words in ends[0][2] and "Traceback" not in ends[0][2] + ends[1][2]
    assert ends[0][2].count("error: ") == 1 and "error: " not in ends[1][2]
