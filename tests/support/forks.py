# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from one that has imported a run's modules.

To import them takes 4 s of a processor, and the tests start some two hundred processes.
"""

import atexit
import faulthandler
import multiprocessing
import multiprocessing.util  # Which waits for all of them at the end: before `_kill_all`.
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import ROOT

_FORKS = multiprocessing.get_context("forkserver")
# None of them starts JAX's backend.
_FORKS.set_forkserver_preload(
    ["earl_jax.training", "earl_jax.preflight.preflight", "transformers", "tests.support.forks"]
)
_STARTED: list["Fork"] = []


@atexit.register
def _kill_all() -> None:
    """Ends those that a failed test has left: nobody waits for them any more."""
    for fork in _STARTED:
        fork.kill()


class Fork:
    """A process that calls `function(*arguments)`, with the interface of `subprocess.Popen`."""

    def __init__(
        self,
        function: Callable[..., None],
        arguments: Sequence[Any],
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str],
        cwd: Path,
    ) -> None:
        self.args = list(args)
        self._files = [tempfile.NamedTemporaryFile() for _ in range(2)]
        names = [file.name for file in self._files]
        given = (names, str(cwd), dict(env), self.args, function, tuple(arguments))
        self._process = _FORKS.Process(target=_begin, args=given)
        self._process.start()
        _STARTED.append(self)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self.pid is not None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end. Returns its output and its errors."""
        self.wait(timeout)
        return self.output()

    def output(self) -> tuple[str, str]:
        """Returns its output and its errors up to now."""
        output, errors = (Path(file.name).read_text(errors="replace") for file in self._files)
        return output, errors


def start_python(*line: str, env: Mapping[str, str], cwd: Path = ROOT) -> Fork:
    """Starts what `python -m module ...` or `python -c program ...` does, by these arguments."""
    function = {"-m": run_main, "-c": run_program}[line[0]]
    return Fork(function, (line[1],), args=[sys.executable, *line], env=env, cwd=cwd)


def run_python(
    *line: str, cwd: Path = ROOT, timeout: float = 280.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Does what `tests.support.run_python` does, for a program that may be forked."""
    process = start_python(*line, env=os.environ | variables, cwd=cwd)
    try:
        output, errors = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(line, process.wait(), output, errors)


def run_main(module: str) -> None:
    """Runs `python -m module`; its flags are in `sys.argv`."""
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_program(program: str) -> None:
    """Runs `python -c program`, which may import from the folder that it is in."""
    exec(program, {"__name__": "__main__"})


def _begin(
    names: list[str],
    folder: str,
    variables: dict[str, str],
    line: list[str],
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    for number, name in enumerate(names, 1):
        file = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = [folder, *variables.get("PYTHONPATH", "").split(os.pathsep)]
    if line:
        sys.argv, sys.orig_argv = line[2:], line
    faulthandler.enable()
    try:
        function(*arguments)
    except Exception:
        # The functions below may end the process before the interpreter says it.
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
