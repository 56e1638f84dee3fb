# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The default config on shared and on disjoint devices, in one process and in two: how it ends.

    uv run python -m benchmarks.groups [--steps=400] [--only=NAME,...] [--folder=DIR]

Eight virtual CPU devices in all. A row a way of running, as soon as it is over; wins and illegal
moves are of 512 games at temperature 1. About four minutes each on 2 cores that do nothing else.
"""

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from earl_jax.telemetry.metrics import read_metrics

# Twice of what the default config gives: half of the devices hold what all of them held.
APART = {
    "devices.num_rollout": "4",
    "selector.budget_bytes_per_device": "34000000",
    "selector.rollout_meshes": "('data=4','data=2,tensor=2')",
    "selector.train_meshes": "('data=4','data=1,fsdp=4')",
}
# The number of processes, and what differs from the default config.
WAYS = {
    "shared in one process": (1, {}),
    "shared in two processes": (2, {}),
    "4 play and 4 train in one process": (1, APART),
    "4 play and 4 train in two processes": (2, APART),
}


def main() -> None:
    """Runs one way after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", default=",".join(WAYS), help="parts of names, by commas")
    parser.add_argument("--folder", type=Path, help="where the runs are kept")
    flags = parser.parse_args()
    folder = flags.folder or Path(tempfile.mkdtemp(prefix="earl_jax_groups_"))
    print("| devices | win | illegal | host bytes | reward, last 20 steps | seconds |")
    print("|---|---|---|---|---|---|")
    for number, (name, (num, settings)) in enumerate(WAYS.items()):
        if any(part.strip() in name for part in flags.only.split(",")):
            workdir = folder / f"way_{number}"
            start = time.perf_counter()
            run(workdir, num, {"num_steps": str(flags.steps)} | settings)
            print(row(name, workdir, time.perf_counter() - start), flush=True)


def run(workdir: Path, num: int, settings: dict[str, str]) -> None:
    """The command in `num` processes. Raises CalledProcessError where one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = []
    for index in range(num):
        given = {**settings, "devices.num_cpu_devices": str(8 // num)}
        if num > 1:
            given |= {
                "distributed.coordinator": address,
                "distributed.num_processes": str(num),
                "distributed.process_id": str(index),
            }
        line = [sys.executable, "-m", "earl_jax.main", f"--workdir={workdir}"]
        line += [f"--config.{key}={value}" for key, value in given.items()]
        processes.append(subprocess.Popen(line, stdout=subprocess.DEVNULL))
    for process in processes:
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, process.args)


def row(name: str, workdir: Path, seconds: float) -> str:
    """A line of the table."""
    lines = read_metrics(workdir / "metrics.jsonl")
    steps = [line for line in lines if "eval" not in line]
    final = [line["eval"] for line in lines if "eval" in line][-1]
    rewards = [line["reward_mean"] for line in steps[-20:]]
    through_host = sum(line["dispatch_host_bytes"] + line["publish_host_bytes"] for line in steps)
    return (
        f"| {name} | {100 * final['win']:.1f} % | {100 * final['illegal']:.1f} % | {through_host} "
        f"| {sum(rewards) / len(rewards):.3f} | {seconds:.0f} |"
    )


if __name__ == "__main__":
    main()
