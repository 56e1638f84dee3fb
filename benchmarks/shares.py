# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Two processes that take long-tailed episodes off one queue, beside fixed parts of them.

    uv run python -m benchmarks.shares [--steps=20] [--write]

Each process has a CPU device and is pinned to a core of its own. A step has 64 episodes of 1 to 24
turns (`benchmarks.asynchrony.LongTailed`) in 16 slots. All lines play the same tokens. A rollout
takes as long as its slower process; its rounds do not depend on what else the machine does.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from benchmarks.asynchrony import SETTINGS
from benchmarks.pages import replace_table, table
from earl_jax import loop
from earl_jax.main import main as run_main
from earl_jax.rollout.config import RolloutConfig
from earl_jax.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_suffix(".md")
NUM = 2
# Steps at the start whose programs are compiled, or loaded.
WARM_UP = 4
# Names of the lines, and what they change.
LINES: dict[str, dict[str, Any]] = {
    "fixed parts": {"is_fixed": True},
    "fixed parts, longest first": {"order": "longest"},
    "one queue": {},
}


def play(rounds: str, is_fixed: bool) -> None:
    """Runs the command, and notes the rounds of each of its rollouts in a file of this process."""
    if is_fixed:
        RolloutConfig.has_queue = lambda self, num_players: False
    play_all = loop.play_all

    def noted(*given: Any) -> Any:
        own, played = play_all(*given)
        with Path(f"{rounds}.{jax.process_index()}").open("a") as file:
            file.write(f"{own.stats.rounds if own else 0}\n")
        return own, played

    loop.play_all = noted
    run_main()


def measure(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """Runs a line. Returns its row."""
    line, workdir = LINES[name], folder / name.replace(" ", "_")
    rollout = SETTINGS["rollout"] | {"episodes_per_step": 64, "order": line.get("order", "fifo")}
    meshes = {"rollout_meshes": ("data=2",), "train_meshes": ("data=2",)}
    settings = SETTINGS | {
        "num_steps": WARM_UP + steps,
        "rollout": rollout,
        "selector": {"table": "model", **meshes},
        "devices": {"platform": "cpu", "num_cpu_devices": 1},
    }
    file, rounds = folder / "config.py", folder / f"rounds_{workdir.name}"
    file.write_text(
        "from ml_collections import ConfigDict\n"
        f"def get_config():\n    return ConfigDict({settings!r})\n"
    )
    given = json.dumps(str(rounds)), bool(line.get("is_fixed"))
    program = f"from benchmarks import shares; shares.play({given[0]}, {given[1]})"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cores, started = sorted(os.sched_getaffinity(0)), []
    for number in range(NUM):
        command = ["taskset", "-c", str(cores[number % len(cores)]), sys.executable, "-c", program]
        command += [f"--config={file}", f"--workdir={workdir}"]
        command += [f"--config.distributed.coordinator=127.0.0.1:{port}"]
        command += [f"--config.distributed.num_processes={NUM}"]
        command += [f"--config.distributed.process_id={number}"]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL))
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise SystemExit(f"the run with {name} ended with {statuses}")
    each = [
        [int(text) for text in Path(f"{rounds}.{number}").read_text().split()]
        for number in range(NUM)
    ]
    slower = [max(pair) for pair in zip(*each, strict=True)][WARM_UP:]
    both = [sum(pair) / NUM for pair in zip(*each, strict=True)][WARM_UP:]
    rows = [row for row in read_metrics(workdir / "metrics.jsonl") if "reward_mean" in row]
    timed = rows[WARM_UP:]
    return {
        "": name,
        "rounds of the slower": statistics.mean(slower),
        "of both, mean": statistics.mean(both),
        "rollout s, median": statistics.median(row["stage_s"]["rollout"] for row in timed),
        "dispatch s, median": statistics.median(row["stage_s"]["dispatch"] for row in timed),
        "tokens a step": statistics.mean(row["rollout_tokens"] for row in timed),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="steps that count")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = table([measure(name, flags.steps, Path(folder)) for name in LINES])
    print(found)
    if flags.write:
        replace_table(PAGE, found)
