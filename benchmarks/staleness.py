# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What staleness does to learning: the naive loss beside the decoupled one, with several seeds.

    uv run python -m benchmarks.staleness [--seeds=5] [--steps=120] [--jobs=2] [--write]

A tiny policy learns from nothing to answer letters: it is shown one of eight and replies with one
(its `choices`), at best the letter three places on. Episodes have 2 to 12 such turns, and so end at
different times. Two CPU devices: one plays, one trains. Every run is a process of its own; `--jobs`
of them run at once, because only what is learnt is measured here, and no time.

The table has the mean reward of a turn (1 is perfect) over the last tenth of the steps, and over
all of them: the mean over the seeds, and their standard deviation. Behind these are the points of
the curve, means over tenths of the steps.
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import replace_table, table
from earl_jax.envs.environment import Start, StepResult
from earl_jax.telemetry.metrics import read_metrics

HERE = Path(__file__).parent
LETTERS = "abcdefgh"
LAGS = (0, 1, 4, 8, 16)
# Names of the losses, and config.train.correction.
LOSSES = {"naive": "none", "decoupled": "truncated"}
POINTS = 10
SETTINGS: dict[str, Any] = {
    "env": {"name": "benchmarks.staleness:Answers"},
    "algorithm": "reinforce",
    # A turn's reward depends on its own reply only.
    "algorithm_args": {"turn_discount": 0.0},
    "model": {
        "num_layers": 1,
        "width": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 128,
        "compute_dtype": "float32",
    },
    "rollout": {
        # So many that finished groups wait for the trainer, as old as the bound allows.
        "num_slots": 128,
        "episodes_per_step": 16,
        "group_size": 2,
        "chunk_size": 16,
        "burst": 2,
        "max_turn_tokens": 4,
        "context_buckets": (256,),
    },
    "devices": {"platform": "cpu", "num_cpu_devices": 2, "num_rollout": 1},
    "selector": {"table": "model", "rollout_meshes": ("data=1",), "train_meshes": ("data=1",)},
    # Replies are drawn from the letters, and scored among all tokens.
    "train": {"learning_rate": 1.5e-3, "epochs": 4, "ratio": "model"},
    "eval": {"every_steps": 10_000, "games": 2, "final_games": 2},
    "checkpoint": {"every_steps": 10_000},
    "log": {"trajectories_every_steps": 10_000, "report_every_steps": 10_000},
}


class Answers:
    """Shows a letter a turn; the reply is worth 1 if it is the letter three places on."""

    def __init__(self, *, least_turns: int = 2, most_turns: int = 12, seed: int) -> None:
        rng = random.Random(f"answers {seed}")
        number = rng.randint(least_turns, most_turns)
        self._letters = [rng.choice(LETTERS) for _ in range(number)]
        self._turn = 0

    def all_choices(self) -> tuple[str, ...]:
        """Returns the letters."""
        return tuple(LETTERS)

    def start(self) -> Start:
        """Returns the first letter."""
        return Start(text=self._letters[0], choices=tuple(LETTERS))

    def step(self, reply: str) -> StepResult:
        """Rewards the reply, and shows the next letter."""
        place = LETTERS.index(self._letters[self._turn])
        reward = float(reply.strip() == LETTERS[(place + 3) % len(LETTERS)])
        self._turn += 1
        if self._turn == len(self._letters):
            return StepResult(text="", reward=reward, done=True, stop_reason="end")
        text = self._letters[self._turn]
        return StepResult(text=text, reward=reward, done=False, choices=tuple(LETTERS))


def settings_of(loss: str, lag: int, seed: int, steps: int) -> dict[str, Any]:
    """Returns the settings of a run."""
    train = {**SETTINGS["train"], "correction": LOSSES[loss]}
    asynchrony = {"max_staleness": lag}
    return {**SETTINGS, "num_steps": steps, "seed": seed, "train": train, "asynchrony": asynchrony}


def run_config(settings: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """Runs settings in a process of their own.

    Returns the reward of a turn by step, the seconds of each step but the first, and lags.
    """
    file = folder / f"{name}.py"
    file.write_text(
        "from ml_collections import ConfigDict\n"
        f"def get_config():\n    return ConfigDict({settings!r})\n"
    )
    line = [sys.executable, "-m", "earl_jax.main", f"--config={file}"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    subprocess.run(
        [*line, f"--workdir={folder / name}"],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    rows = [row for row in read_metrics(folder / name / "metrics.jsonl") if "reward_mean" in row]
    times = [row["time_s"] for row in rows]
    return {
        "rewards": [row["reward_mean"] / row["turns_mean"] for row in rows],
        "seconds": [end - begin for begin, end in itertools.pairwise(times)],
        "lag": statistics.mean(row.get("version_lag_mean", 0.0) for row in rows),
        "most": max(row.get("version_lag_max", 0) for row in rows),
        "sample size": statistics.mean(row["effective_sample_size"] for row in rows),
    }


def curve_row(runs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Returns columns of rewards by step: the end, all steps, and points of the mean's curve.

    The points are means over tenths of the steps, and the end is the last of them.
    """
    tenth = len(runs[0]) // POINTS
    curves = [
        [statistics.mean(run[i * tenth : (i + 1) * tenth]) for i in range(POINTS)] for run in runs
    ]
    last, every = [curve[-1] for curve in curves], [statistics.mean(curve) for curve in curves]
    row = {
        "reward at the end": statistics.mean(last),
        "spread": statistics.stdev(last) if len(last) > 1 else 0.0,
        "of all steps": statistics.mean(every),
        "its spread": statistics.stdev(every) if len(last) > 1 else 0.0,
    }
    points = [statistics.mean(values) for values in zip(*curves, strict=True)]
    return row | {f"{(i + 1) * tenth}": point for i, point in enumerate(points)}


def summary(loss: str, lag: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a row of the table."""
    row = {
        "loss": loss,
        "eta": lag,
        "mean lag": statistics.mean(run["lag"] for run in runs),
        "most": max(run["most"] for run in runs),
        "sample size": statistics.mean(run["sample size"] for run in runs),
    }
    return row | curve_row([run["rewards"] for run in runs])


def main() -> None:
    """Runs all cells and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--lags", default=",".join(map(str, LAGS)), help="numbers, by commas")
    parser.add_argument("--write", action="store_true", help="the table into staleness.md")
    flags = parser.parse_args()
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool,
    ):
        for lag in map(int, flags.lags.split(",")):
            for loss in LOSSES:

                def play(seed: int, loss: str = loss, lag: int = lag) -> dict[str, Any]:
                    settings = settings_of(loss, lag, seed, flags.steps)
                    return run_config(settings, f"{loss}_{lag}_{seed}", Path(folder))

                runs = pool.map(play, range(flags.seeds))
                rows.append(summary(loss, lag, list(runs)))
                print(json.dumps(rows[-1]), flush=True)
    text = table(rows)
    print(text)
    if flags.write:
        replace_table(HERE / "staleness.md", text)


if __name__ == "__main__":
    main()
