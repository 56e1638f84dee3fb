# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Streaming and asynchronous training beside the synchronous loop, on long-tailed episodes.

    uv run python -m benchmarks.asynchrony [--steps=40] [--write]

Two CPU devices of a core each: one plays and one trains, or both do both in turn. Episodes have 1
to 24 turns of a log-normal number (median 3, sigma 1.0), so that the longest of a batch is many
times the mean; the policy is not trained to end its turns, a stop string does. Each run is a
process of its own, with the same tasks. The first steps do not count, which compile or load
programs; shapes that come up later are compiled in the steps that count, so give the command twice,
and the second time they come from the cache. A line's tokens/s are those trained on in the steps
that count, by the seconds from the first to the last of them.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pages import replace_table, table
from earl_jax.envs.environment import Start, StepResult
from earl_jax.telemetry.metrics import read_metrics

HERE = Path(__file__).parent
LONGEST = 24
# Steps at the start whose programs are compiled, or loaded.
WARM_UP = 6
MODEL = {"num_layers": 2, "width": 128, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 512}
SETTINGS: dict[str, Any] = {
    "env": {"name": "benchmarks.asynchrony:LongTailed"},
    "algorithm": "grpo",
    "model": {**MODEL, "compute_dtype": "float32"},
    "rollout": {
        "num_slots": 16,
        "episodes_per_step": 16,
        "group_size": 2,
        "chunk_size": 8,
        "burst": 4,
        "max_turn_tokens": 24,
        "context_buckets": (512,),
        "stop_strings": tuple("abcdefghijklmnopqrstuvwxyz0123456789"),
    },
    "devices": {"platform": "cpu", "num_cpu_devices": 2},
    "train": {"learning_rate": 1e-4, "epochs": 1},
    "eval": {"every_steps": 10_000, "games": 2, "final_games": 2},
    "checkpoint": {"every_steps": 10_000},
    "log": {"trajectories_every_steps": 10_000, "report_every_steps": 10_000},
}
SHARED = {"rollout_meshes": ("data=2",), "train_meshes": ("data=2",)}
APART = {"rollout_meshes": ("data=1",), "train_meshes": ("data=1",)}
# Names of the lines, and what they change.
LINES: dict[str, dict[str, Any]] = {
    "synchronous, devices apart": {"apart": True},
    "synchronous, devices shared": {},
    "streaming in 4 parts, apart": {"apart": True, "parts": 4},
    "asynchronous, shared, staleness 2": {"staleness": 2},
    "asynchronous, apart, staleness 1": {"apart": True, "staleness": 1},
    "asynchronous, apart, staleness 4": {"apart": True, "staleness": 4},
    "the same, streaming in 4 parts": {"apart": True, "staleness": 4, "parts": 4},
    "asynchronous, apart, staleness 4, wait": {"apart": True, "staleness": 4, "rule": "wait"},
    "the same, kv kept": {"apart": True, "staleness": 4, "rule": "wait", "kv": "keep"},
}


class LongTailed:
    """Takes a log-normal number of replies; its reward depends on their lengths."""

    def __init__(self, *, seed: int) -> None:
        turns = random.Random(f"length {seed}").lognormvariate(1.1, 1.0)
        self._left, self._reward = max(1, min(LONGEST, round(turns))), 0.0

    def start(self) -> Start:
        """Returns the first message."""
        return Start(text=f"{self._left} to go")

    def step(self, reply: str) -> StepResult:
        """Counts a reply."""
        self._left -= 1
        reward = (len(reply) % 5) / 5
        if not self._left:
            return StepResult(text="", reward=reward, done=True, stop_reason="end")
        return StepResult(text=f"{self._left} to go", reward=reward, done=False)


def settings_of(line: dict[str, Any], steps: int) -> dict[str, Any]:
    """Returns the settings of a line's run."""
    settings = {**SETTINGS, "num_steps": steps}
    settings["selector"] = {"table": "model", **(APART if "apart" in line else SHARED)}
    if "apart" in line:
        settings["devices"] = {**settings["devices"], "num_rollout": 1}
    kept = {name: line[name] for name in ("rule", "kv", "parts") if name in line}
    settings["asynchrony"] = {"max_staleness": line.get("staleness", 0), **kept}
    return settings


def measure(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """Runs a line in a process of its own. Returns its row."""
    workdir, file = folder / name.replace(" ", "_"), folder / "config.py"
    file.write_text(
        "from ml_collections import ConfigDict\n"
        f"def get_config():\n    return ConfigDict({settings_of(LINES[name], steps)!r})\n"
    )
    line = [sys.executable, "-m", "earl_jax.main", f"--config={file}", f"--workdir={workdir}"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    subprocess.run(line, check=True, env=environment, stdout=subprocess.DEVNULL)
    metrics = [row for row in read_metrics(workdir / "metrics.jsonl") if "reward_mean" in row]
    counted = metrics[WARM_UP:]
    seconds = counted[-1]["time_s"] - counted[0]["time_s"]
    tokens = sum(row["train_tokens"] for row in counted[1:])
    lags: dict[int, int] = {}
    for row in counted:
        for lag, number in enumerate(row["staleness_tokens"]):
            lags[lag] = lags.get(lag, 0) + number
    return {
        "": name,
        "tokens/s": tokens / seconds,
        "s a step": seconds / (len(counted) - 1),
        "tokens an episode": statistics.mean(row["context_tokens_mean"] for row in counted),
        "longest": max(row["context_tokens_max"] for row in counted),
        "mean staleness": sum(lag * number for lag, number in lags.items()) / sum(lags.values()),
        "most": max(row["version_lag_max"] for row in counted),
    }


def main() -> None:
    """Runs all lines and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    flags = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in LINES:
            rows.append(measure(name, flags.steps, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    base = rows[0]["tokens/s"]
    text = table([{**row, "ratio": row["tokens/s"] / base} for row in rows])
    print(text)
    if flags.write:
        replace_table(HERE / "asynchrony.md", text)


if __name__ == "__main__":
    main()
