# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of `python -m earl_jax.main` in one or several processes, of eight devices in all."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.runs import free_port
from tests.support import ROOT
from tests.support.forks import Fork, start_python
from tests.support.runs import TINY

# The config that TINY is of.
CONFIG = ROOT / "configs/tictactoe_tiny_cpu.py"
# One context bucket and one mesh for each stage, so that few programs are compiled.
SMALL = TINY | {
    "num_steps": 2,
    "rollout.context_buckets": "(48,)",
    "train.sft_steps": 0,
    "train.sft_updates": 1,
    "checkpoint.every_steps": 1000,
    "eval.every_steps": 1000,
    "eval.games": 16,
    "eval.final_games": 16,
}
ALL = {
    "model.num_layers": 1,
    "selector.rollout_meshes": "('data=8',)",
    "selector.train_meshes": "('data=2,fsdp=4',)",
}
APART = {
    "model.num_layers": 1,
    "devices.num_rollout": 4,
    "selector.rollout_meshes": "('data=4',)",
    "selector.train_meshes": "('data=1,fsdp=4',)",
}


def _begin_in(folder: Path, line: list[str]) -> subprocess.Popen[str]:
    """Starts a process that imports from this folder what is there."""
    env = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(line, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


class Command:
    """`num` processes of `python -m earl_jax.main`, of eight devices in all."""

    def __init__(
        self,
        workdir: Path,
        num: int,
        *own: list[str],
        folders: Sequence[Path] = (),
        program: str = "",
        config: Path = CONFIG,
        **overrides,
    ):
        """`own` are further flags of each process; `folders` are those that it starts in.

        `program` is Python that runs in place of the command, with its flags; it may import tests
        by their names.
        With another `config` than CONFIG its own settings hold, and not `SMALL`.
        """
        port, self.workdir = free_port(), workdir
        self.all: list[Fork | subprocess.Popen[str]] = []
        for number in range(num):
            settings = (
                (SMALL if config == CONFIG else {})
                | {"devices.num_cpu_devices": 8 // num}
                | overrides
            )
            if num > 1:
                settings |= {
                    "distributed.coordinator": f"127.0.0.1:{port}",
                    "distributed.num_processes": num,
                    "distributed.process_id": number,
                }
            flags = [f"--config={config}", f"--workdir={workdir}"]
            flags += [f"--config.{key}={value}" for key, value in settings.items()]
            flags += own[number] if own else []
            line = ["-c", program, *flags] if program else ["-m", "earl_jax.main", *flags]
            if folders:
                self.all.append(_begin_in(folders[number], [sys.executable, *line]))
            else:
                folder = ROOT / "tests" if program else ROOT
                self.all.append(start_python(*line, env=os.environ, cwd=folder))

    def ends(self, timeout_s: float = 240.0) -> list[tuple[int, str, str]]:
        """Exit status, output and errors of each.

        Where one has not ended in time, the error has the stack of each thread of those that run.
        """
        # All are read at once: one whose pipe is full would wait, and the others for it.
        with concurrent.futures.ThreadPoolExecutor(len(self.all)) as pool:
            texts = [pool.submit(process.communicate) for process in self.all]
            concurrent.futures.wait(texts, timeout_s)
            late = [number for number, text in enumerate(texts) if not text.done()]
            for number in late:
                self.all[number].send_signal(signal.SIGBUS)
            concurrent.futures.wait(texts, 30)
            for process in self.all:
                process.kill()
            ends = [
                (process.returncode, *text.result())
                for process, text in zip(self.all, texts, strict=True)
            ]
        stacks = [f"process {number}:\n" + "\n".join(ends[number][1:])[-20000:] for number in late]
        assert not late, f"not ended after {timeout_s:.0f} s:\n" + "\n\n".join(stacks)
        return ends

    def done(self, timeout_s: float = 240.0) -> Path:
        """The workdir, when all have ended well."""
        for number, (status, output, errors) in enumerate(self.ends(timeout_s)):
            assert status == 0, f"process {number}: {status}\n{output}\n{errors[-4000:]}"
        return self.workdir

    def after(self, happened: Callable[[], bool], timeout_s: float = 400.0) -> None:
        """Returns when it has happened."""
        deadline_s = time.monotonic() + timeout_s
        while not happened():
            assert time.monotonic() < deadline_s, "it did not happen"
            assert all(p.poll() is None for p in self.all), [p.communicate() for p in self.all]
            time.sleep(0.02)

    def after_step(self, step: int) -> None:
        """Returns when the step is in the metrics."""
        metrics, line = self.workdir / "metrics.jsonl", f'{{"step": {step}, "time_s"'
        self.after(lambda: metrics.exists() and line in metrics.read_text())
