# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Scores of a policy's answers by a library, in processes that may do nothing but compute."""

import atexit
import contextlib
import json
import queue
import select
import subprocess
import sys
from typing import Any

from earl_jax.envs.processes import _scorer_child
from earl_jax.envs.processes.sandbox import own_variables, readable_paths

# Seconds of a processor for an answer; it may take four times as long in all.
SECONDS = 2
_MEMORY_BYTES = 2**32
# For a library to be imported, on a busy machine.
_START_S = 120.0
_NUM_PROCESSES = 2


class Scorer:
    """Scores answers by one of `_scorer_child.SCORERS`, two at a time; threads may share it.

    Its processes begin with the first answer, and end with this one, however it ends.
    """

    def __init__(self, kind: str):
        self._kind = kind
        # The processes that are idle; None: one that is to be started.
        self._idle: queue.SimpleQueue[subprocess.Popen[str] | None] = queue.SimpleQueue()
        for _ in range(_NUM_PROCESSES):
            self._idle.put(None)
        atexit.register(self._end_all)

    def _end_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                _end(self._idle.get_nowait())

    def __call__(self, *arguments: Any) -> Any:
        """Returns the score; None where it took too long or too much memory, or ended its process.

        Raises ConnectionError where there is no process.
        """
        process, line = self._idle.get(), ""
        try:
            if process is not None:
                line = _ask(process, arguments)
            if not line:
                # One that has ended since.
                _end(process)
                process = self._start()
                line = _ask(process, arguments)
        except OSError as error:
            raise ConnectionError(f"no process for {self._kind}: {error}") from error
        finally:
            if not line:
                _end(process)
                process = None
            self._idle.put(process)
        if not line:
            raise ConnectionError(f"the process for {self._kind} has ended")
        return json.loads(line)

    def _start(self) -> subprocess.Popen[str]:
        limits = {
            "paths": readable_paths(),
            "seconds": SECONDS,
            "memory_bytes": _MEMORY_BYTES,
        }
        arguments = (_scorer_child.__file__, self._kind, json.dumps(limits))
        process = subprocess.Popen(
            (sys.executable, "-P", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env=own_variables(),
        )
        if _line(process, _START_S) != "ready\n":
            _end(process)
            raise ConnectionError(f"the process for {self._kind} does not start")
        return process


def _ask(process: subprocess.Popen[str], arguments: tuple[Any, ...]) -> str:
    """Returns the process's line of answer; "" where it ends, or takes too long."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(arguments) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return _line(process, 8 * SECONDS)


def _line(process: subprocess.Popen[str], timeout_s: float) -> str:
    assert process.stdout is not None
    # Not select, which knows 1,024 descriptors.
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    return process.stdout.readline() if poll.poll(1000 * timeout_s) else ""


def _end(process: subprocess.Popen[str] | None) -> None:
    if process is not None:
        process.kill()
        # Closes its pipes, with whatever was not written.
        with contextlib.suppress(BrokenPipeError), process:
            pass
