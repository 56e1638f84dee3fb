# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Between processes: the dispatcher against rank 0 that gathers and scatters.

Every worker is a process of `jax.distributed` with one CPU device, on a host of its own where
network namespaces can be made. Workers each made rows of fp32 log-probs of EARL's sizes, 46, 93 and
187 MiB a worker at 8K, 16K and 32K tokens (arXiv 2510.05943), scaled down; a trainer with a tensor
axis wants them, so that each member of a group gets a copy.
"""

import contextlib
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.dispatch.network import Host, namespaces

ROOT = Path(__file__).parent.parent.parent
EARL_MIB = {8192: 46, 16384: 93, 32768: 187}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: `scale` divides EARL's sizes, `mbit_per_s` is the rate of each link.

    `window_kib` is what a TCP connection has under way at most (`network.namespaces`).
    """

    workers: tuple[int, ...] = (4, 8, 16)
    scale: float = 16
    tensor: int = 4
    mbit_per_s: float = 100.0
    window_kib: int = 64
    repeats: int = 3
    timeout_s: float = 3600.0
    loopback: bool = False


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A dict for each number of workers, size and way."""
    for num in settings.workers:
        with contextlib.ExitStack() as stack:
            hosts, limited = open_hosts(stack, num, settings)
            measured = _run(hosts, settings, limited)
        for sizes in zip(*measured, strict=True):
            yield from _rows(num, sizes, settings, limited)


def open_hosts(
    stack: contextlib.ExitStack, num: int, settings: Settings
) -> tuple[list[Host], bool]:
    """So many hosts for as long as the stack is open, and whether their links are limited."""
    if not settings.loopback:
        try:
            hosts = namespaces(num, settings.mbit_per_s, settings.window_kib)
            return stack.enter_context(hosts), True
        except RuntimeError as error:
            print(
                f"no network namespaces here ({error}); on plain loopback, where only the counts "
                "of bytes say something about a network",
                file=sys.stderr,
            )
    return [Host("127.0.0.1") for _ in range(num)], False


def _run(hosts: Sequence[Host], settings: Settings, limited: bool) -> list[list[dict[str, Any]]]:
    """What each worker measured, size by size."""
    num = len(hosts)
    shared = {
        "num": num,
        "address": hosts[0].address,
        "port": _free_ports(),
        "tensor": min(settings.tensor, num),
        "context": 1024,
        "limited": limited,
        "repeats": settings.repeats,
        "worker_bytes": [int(mib * 2**20 / settings.scale) for mib in EARL_MIB.values()],
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(num)]
        workers = []
        try:
            for rank, (host, log) in enumerate(zip(hosts, logs, strict=True)):
                command = [sys.executable, "-m", "benchmarks.dispatch.worker"]
                with log.open("w") as output:
                    workers.append(
                        subprocess.Popen(
                            [*host.prefix, *command, json.dumps({**shared, "rank": rank})],
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            cwd=ROOT,
                            # One thread of a linear algebra library would not be used, and 16
                            # processes of many threads are in each other's way.
                            env={**os.environ, "OMP_NUM_THREADS": "1"},
                        )
                    )
            _wait(workers, logs, settings.timeout_s)
            return [_measured(log.read_text()) for log in logs]
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()


def _wait(workers: Sequence[Any], logs: Sequence[Path], timeout_s: float) -> None:
    """Until all have ended well. One that fails leaves the others waiting for it."""
    deadline_s = time.monotonic() + timeout_s
    while any(worker.poll() is None for worker in workers):
        for worker, log in zip(workers, logs, strict=True):
            if worker.poll():
                raise RuntimeError(f"a worker ended with an error:\n{log.read_text()[-3000:]}")
        if time.monotonic() > deadline_s:
            output = "\n".join(log.read_text()[-500:] for log in logs)
            raise RuntimeError(f"the workers are not done after {timeout_s:g} s:\n{output}")
        time.sleep(0.2)


def _measured(text: str) -> list[dict[str, Any]]:
    mark = "measured: "
    line = next(line for line in text.splitlines() if line.startswith(mark))
    return json.loads(line.removeprefix(mark))


def _free_ports() -> int:
    """A port that is free now; its neighbour is likely to be."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return min(free.getsockname()[1], 65_000)


def _rows(
    num: int, sizes: Sequence[dict[str, Any]], settings: Settings, limited: bool
) -> Iterator[dict[str, Any]]:
    first = sizes[0]
    rate = settings.mbit_per_s * 1e6 / 8
    tensor = min(settings.tensor, num)
    # What rank 0 takes in, and then sends: a copy for each member but itself.
    taken, given = (num - 1), (num - 1) * tensor
    for way in ("dispatch", "gather"):
        runs = list(zip(*(size["runs"][way] for size in sizes), strict=True))
        spans = [max(r["end_s"] for r in run) - min(r["start_s"] for r in run) for run in runs]
        if way == "dispatch":
            busiest, total = first["busiest_bytes"], first["moved_bytes"]
            through, link = first["rank_0_bytes"], first["busiest_pair_bytes"]
            needs_s = busiest / rate
        else:
            total = through = first["worker_bytes"] * (taken + given)
            busiest, needs_s = through, through / rate
            link = first["worker_bytes"] * (1 + tensor)
        busy = [sum(r["cpu_s"] for r in run) / span for run, span in zip(runs, spans, strict=True)]
        counted = [run[0]["link_bytes"] for run in runs if run[0]["link_bytes"]]
        median_s = statistics.median(spans)
        yield {
            "workers": num,
            "way": way,
            "network": f"{settings.mbit_per_s:g} Mbit/s" if limited else "loopback",
            "MiB a worker": first["worker_bytes"] / 2**20,
            "median ms": 1e3 * median_s,
            "busiest link needs ms": 1e3 * needs_s if limited else None,
            "over that": median_s / needs_s if limited else None,
            "through rank 0 MiB": through / 2**20,
            "counted there MiB": statistics.median(counted) / 2**20 if counted else None,
            "busiest host MiB": busiest / 2**20,
            "busiest pair MiB": link / 2**20,
            "total MiB": total / 2**20,
            "cores busy": statistics.median(busy),
            "peak of rank 0 MiB": max(run[0]["peak_bytes"] for run in runs) / 2**20,
            "spans_s": spans,
        }
