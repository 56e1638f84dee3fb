# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Real processes of `jax.distributed` on this machine, started by tests.

A test names a function as `module:function`, where a test module is found by its name alone. Each
process calls the function, with the devices of all processes there, and returns its result as JSON.
"""

import importlib
import json
import os
import signal
import sys
import time
from typing import Any

from benchmarks.runs import free_port
from tests.support import ROOT
from tests.support.forks import Fork
from tests.support.programs import sharing_programs

RESULT = "result: "


class Processes:
    """`num` processes with `devices` CPU devices each, that run `function(*arguments)`."""

    def __init__(self, num: int, devices: int, function: str, *arguments: Any) -> None:
        address = f"127.0.0.1:{free_port()}"
        self.started_s = time.monotonic()
        self.errors: list[str] = []
        self.all = [
            Fork(
                begin,
                (address, num, number, devices, function, arguments),
                env=os.environ,
                cwd=ROOT / "tests",
            )
            for number in range(num)
        ]

    def results(self, timeout_s: float = 250.0) -> list[Any]:
        """Returns the result of each process; its stderr is in `errors` then.

        Raises AssertionError with its output where one failed.
        """
        ends = self.ends(timeout_s)
        self.errors = [errors for _, _, errors in ends]
        for n, (status, output, errors) in enumerate(ends):
            assert status == 0, f"process {n} ended with {status}:\n{output}\n{errors[-4000:]}"
        return [
            json.loads(line.removeprefix(RESULT))
            for _, output, _ in ends
            for line in output.splitlines()
            if line.startswith(RESULT)
        ]

    def ends(self, timeout_s: float = 120.0) -> list[tuple[int, str, str]]:
        """Exit status and output of each; those that still run after the time are killed."""
        ends = []
        try:
            for process in self.all:
                left_s = self.started_s + timeout_s - time.monotonic()
                output, errors = process.communicate(timeout=max(0.1, left_s))
                ends.append((process.returncode, output, errors))
        finally:
            for process in self.all:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    process.communicate()
        return ends


def begin(
    address: str, num: int, number: int, devices: int, name: str, arguments: tuple[Any, ...]
) -> None:
    """A process of them."""
    os.environ["PJRT_NPROC"] = "32"  # see main.start_jax
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.distributed.initialize(
        address,
        num_processes=num,
        process_id=number,
        initialization_timeout=200,
        heartbeat_timeout_seconds=100,
        shutdown_timeout_seconds=100,
    )
    module, _, function = name.partition(":")
    given = json.loads(json.dumps(arguments))
    with sharing_programs():
        result = getattr(importlib.import_module(module), function)(*given)
    # In one write, because Gloo writes to the same stream.
    sys.stdout.write(f"\n{RESULT}{json.dumps(result)}\n")
    sys.stdout.flush()
