# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs in processes of their own, for the scripts of this folder and for tests."""

import concurrent.futures
import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from earl_jax.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    """Returns a port of this machine on which nobody listens.

    One below 32768, where systems take the ports of connections from: none takes it before it is
    used.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def start(
    flags: Sequence[str],
    number: int = 1,
    *,
    pinned: bool = False,
    **options: Any,
) -> list[subprocess.Popen[str]]:
    """Starts `number` processes of one run.

    `flags` are the command's, `options` those of `Popen`. With `pinned` each has a core of its own;
    those beyond the cores share them.
    """
    port, cores, started = free_port(), sorted(os.sched_getaffinity(0)), []
    for index in range(number):
        line = ["taskset", "-c", str(cores[index % len(cores)])] if pinned else []
        line += [sys.executable, "-m", "earl_jax.main", *flags]
        if number > 1:
            line += [f"--config.distributed.coordinator=127.0.0.1:{port}"]
            line += [f"--config.distributed.num_processes={number}"]
            line += [f"--config.distributed.process_id={index}"]
        started.append(subprocess.Popen(line, cwd=ROOT, text=True, **options))
    return started


def play(
    settings: Mapping[str, Any],
    workdir: Path,
    number: int = 1,
    *,
    pinned: bool = False,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Runs settings to the end, as `start` says. Returns the metrics of its steps.

    The config file is beside the workdir. Exits where the run fails.
    """
    file = workdir.with_suffix(".py")
    file.write_text(
        "from ml_collections import ConfigDict\n"
        f"def get_config():\n    return ConfigDict({dict(settings)!r})\n"
    )
    flags = [f"--config={file}", f"--workdir={workdir}"]
    options = {"env": {**os.environ, **(environment or {})}, "stdout": subprocess.DEVNULL}
    started = start(flags, number, pinned=pinned, **options)
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise SystemExit(f"the run in {workdir} ended with {statuses}")
    return steps_of(workdir)


def on_a_core_each(run: Callable[[Any], Any], jobs: Iterable[Any], most: int) -> list[Any]:
    """Returns the result of `run` for each job; at most `most` at once, each on a core of its own.

    The processes that a job starts are on its core.
    """
    cores = sorted(os.sched_getaffinity(0))

    def pin() -> None:
        os.sched_setaffinity(0, {cores.pop()})

    number = min(most, len(cores))
    with concurrent.futures.ThreadPoolExecutor(number, initializer=pin) as pool:
        return list(pool.map(run, jobs))


def steps_of(workdir: Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run's steps, without those of evaluations."""
    path = workdir / "metrics.jsonl"
    return [row for row in read_metrics(path) if "eval" not in row] if path.exists() else []
