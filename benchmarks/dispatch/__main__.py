# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Between processes: the dispatcher against rank 0 that gathers and scatters.

    sudo uv run python -m benchmarks.dispatch [--workers=4,8,16]

Every worker is a process of `jax.distributed` with one CPU device, on a host of its own where
network namespaces can be made (root and iproute2). Workers each made rows of fp32 log-probs of
EARL's sizes, 46, 93 and 187 MiB a worker at 8K, 16K and 32K tokens (arXiv 2510.05943), divided by
`--scale`; a trainer with a tensor axis wants them, so that each member of a group gets a copy.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.dispatch.network import Host, namespaces
from benchmarks.pages import parser_of, table
from benchmarks.runs import ROOT, free_port

EARL_MIB = {8192: 46, 16384: 93, 32768: 187}
TIMEOUT_S = 3600.0
MARK = "measured: "


def measure(num: int, flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each size and way, with `num` workers."""
    with contextlib.ExitStack() as stack:
        hosts, limited = _open_hosts(stack, num, flags)
        measured = _run(hosts, flags, limited)
    for sizes in zip(*measured, strict=True):
        yield from _rows(num, sizes, flags, limited)


def _open_hosts(
    stack: contextlib.ExitStack, num: int, flags: argparse.Namespace
) -> tuple[list[Host], bool]:
    """Returns so many hosts for as long as the stack is open, and whether links are limited."""
    if not flags.loopback:
        try:
            return stack.enter_context(namespaces(num, flags.mbit, flags.window)), True
        except RuntimeError as error:
            print(
                f"no network namespaces here ({error}); on plain loopback, where only the counts "
                "of bytes say something about a network",
                file=sys.stderr,
            )
    return [Host("127.0.0.1") for _ in range(num)], False


def _run(hosts: Sequence[Host], flags: argparse.Namespace, limited: bool) -> list[list[Any]]:
    """Returns what each worker measured, size by size."""
    num = len(hosts)
    shared = {
        "num": num,
        "address": hosts[0].address,
        # Its neighbour is likely to be free too.
        "port": free_port(),
        "tensor": min(flags.tensor, num),
        "context": 1024,
        "limited": limited,
        "repeats": flags.repeats,
        "worker_bytes": [int(mib * 2**20 / flags.scale) for mib in EARL_MIB.values()],
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(num)]
        workers = []
        try:
            for rank, (host, log) in enumerate(zip(hosts, logs, strict=True)):
                command = [*host.prefix, sys.executable, "-m", "benchmarks.dispatch.worker"]
                with log.open("w") as output:
                    workers.append(
                        subprocess.Popen(
                            [*command, json.dumps({**shared, "rank": rank})],
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            cwd=ROOT,
                            env={**os.environ, "OMP_NUM_THREADS": "1"},
                        )
                    )
            _wait(workers, logs)
            return [_measured(log.read_text()) for log in logs]
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()


def _wait(workers: Sequence[Any], logs: Sequence[Path]) -> None:
    """Returns when all have ended. One that fails leaves the others waiting for it."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(worker.poll() is None for worker in workers):
        for worker, log in zip(workers, logs, strict=True):
            if worker.poll():
                raise RuntimeError(f"a worker ended with an error:\n{log.read_text()[-3000:]}")
        if time.monotonic() > deadline_s:
            output = "\n".join(log.read_text()[-500:] for log in logs)
            raise RuntimeError(f"the workers are not done after {TIMEOUT_S:g} s:\n{output}")
        time.sleep(0.2)


def _measured(text: str) -> list[Any]:
    line = next(line for line in text.splitlines() if line.startswith(MARK))
    return json.loads(line.removeprefix(MARK))


def _rows(
    num: int, sizes: Sequence[dict[str, Any]], flags: argparse.Namespace, limited: bool
) -> Iterator[dict[str, Any]]:
    first, rate = sizes[0], flags.mbit * 1e6 / 8
    # What rank 0 takes in, and then sends: a copy for each member but itself.
    gathered = first["worker_bytes"] * (num - 1) * (1 + min(flags.tensor, num))
    for way in ("dispatch", "gather"):
        runs = list(zip(*(size["runs"][way] for size in sizes), strict=True))
        spans = [max(r["end_s"] for r in run) - min(r["start_s"] for r in run) for run in runs]
        counted = [run[0]["link_bytes"] for run in runs if run[0]["link_bytes"]]
        is_ours, median_s = way == "dispatch", statistics.median(spans)
        busiest = first["busiest_bytes"] if is_ours else gathered
        yield {
            "workers": num,
            "way": way,
            "network": f"{flags.mbit:g} Mbit/s" if limited else "loopback",
            "MiB a worker": first["worker_bytes"] / 2**20,
            "median ms": 1e3 * median_s,
            "over the busiest link": median_s * rate / busiest if limited else None,
            "through rank 0 MiB": (first["rank_0_bytes"] if is_ours else gathered) / 2**20,
            "counted there MiB": statistics.median(counted) / 2**20 if counted else None,
            "busiest host MiB": busiest / 2**20,
            "total MiB": (first["moved_bytes"] if is_ours else gathered) / 2**20,
        }


def main() -> None:
    """Measures each number of workers and prints a table."""
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--workers", default="4,8,16", help="numbers of processes")
    parser.add_argument("--scale", type=float, default=16, help="divides EARL's sizes (16)")
    parser.add_argument("--tensor", type=int, default=4, help="members of a trainer's group (4)")
    parser.add_argument("--mbit", type=float, default=100, help="rate of a link, Mbit/s (100)")
    parser.add_argument(
        "--window", type=int, default=64, help="KiB of a TCP connection under way; 0: the kernel's"
    )
    parser.add_argument("--repeats", type=int, default=3, help="the median of so many (3)")
    parser.add_argument("--loopback", action="store_true", help="no namespaces")
    parser.add_argument("--json", action="store_true", help="an object a line")
    flags = parser.parse_args()
    for num in map(int, flags.workers.split(",")):
        rows = list(measure(num, flags))
        print("\n".join(map(json.dumps, rows)) if flags.json else table(rows), flush=True)


if __name__ == "__main__":
    main()
