# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A reward for answers to questions of mathematics, which math-verify compares."""

import contextlib
import importlib.util
import json
import queue
import select
import subprocess
import sys
from typing import Any, NamedTuple

from earl_jax.envs import _math_child
from earl_jax.settings.errors import InputError

# Seconds for a comparison, beyond what the process allows itself (`_math_child.SECONDS`).
_PATIENCE_S = 8.0
_NUM_PROCESSES = 2
# The processes that are idle; None: one that is to be started.
_idle: queue.SimpleQueue[subprocess.Popen[str] | None] = queue.SimpleQueue()
for _ in range(_NUM_PROCESSES):
    _idle.put(None)


class Compared(NamedTuple):
    """True for each that holds: the right answer is one, the reply has one, and they are equal."""

    has_gold: bool
    answered: bool
    equal: bool


def correct(reply: str, *, answer: str | float, **row: Any) -> dict[str, float]:
    r"""Pays 1 for a reply whose answer equals the row's, else 0; for config.tasks.reward.

    math-verify finds the answer of a reply: what is in `\boxed{}`, or else the last LaTeX between
    dollar signs, expression or number. `answer` is LaTeX or a number: "1/2", 0.5 and "\frac{1}{2}"
    are equal. Two other processes compare them. What takes them more than a few seconds, or too
    much memory, is not equal. The metric `answered` is 1 if the reply has an answer.

    Raises ValueError where math-verify is not installed, and for an `answer` that it cannot read.
    """
    del row
    if importlib.util.find_spec("math_verify") is None:
        raise InputError(
            "math-verify is not installed; uv sync --extra math, or pip install math-verify"
        )
    gold = answer if isinstance(answer, str) else repr(answer)
    compared = _compare(gold, reply)
    if not compared.has_gold:
        raise InputError(f"the answer {answer!r:.60} of a row is none that math-verify can read")
    return {"reward": float(compared.equal), "answered": float(compared.answered)}


def _compare(gold: str, reply: str) -> Compared:
    process, line = _idle.get(), ""
    try:
        if process is not None:
            line = _ask(process, gold, reply)
        if not line:
            # One that had ended, or a reply that ends it: then it does so again.
            _end(process)
            process = _start()
            line = _ask(process, gold, reply)
    except OSError as error:
        raise ConnectionError(f"no process for math-verify: {error}") from error
    finally:
        if not line:
            _end(process)
            process = None
        _idle.put(process)
    return Compared(*json.loads(line)) if line else Compared(True, True, False)


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        (sys.executable, _math_child.__file__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
    )


def _ask(process: subprocess.Popen[str], gold: str, reply: str) -> str:
    """Returns the process's line of answer; "" where it ends, or takes too long."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps([gold, reply]) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    is_there = select.select([process.stdout], [], [], _PATIENCE_S)[0]
    return process.stdout.readline() if is_there else ""


def _end(process: subprocess.Popen[str] | None) -> None:
    if process is not None:
        process.kill()
        # Closes its pipes, with whatever was not written.
        with contextlib.suppress(BrokenPipeError), process:
            pass
