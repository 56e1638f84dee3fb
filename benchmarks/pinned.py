# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Several processes of one run, each pinned to a core."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_pinned(program: Sequence[str], flags: Sequence[str], number: int) -> None:
    """Runs `number` processes of one run to their end; those beyond the cores share them.

    `program` are Python's own arguments, `flags` the command's. Exits if one of them fails.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cores, started = sorted(os.sched_getaffinity(0)), []
    for index in range(number):
        line = ["taskset", "-c", str(cores[index % len(cores)]), sys.executable, *program, *flags]
        if number > 1:
            line += [f"--config.distributed.coordinator=127.0.0.1:{port}"]
            line += [f"--config.distributed.num_processes={number}"]
            line += [f"--config.distributed.process_id={index}"]
        started.append(subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL))
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise SystemExit(f"the run of {number} processes ended with {statuses}: {' '.join(flags)}")
