# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Learning under staleness: the naive loss beside the decoupled one, with several seeds.

    uv run python -m benchmarks.staleness [--rate=R --steps=N] [--write]

A tiny policy learns from nothing to answer letters: it is shown one of eight and replies with one
(its `choices`), at best the letter three places on. Episodes have 2 to 12 such turns, and so end at
different times. Two CPU devices: one plays, one trains. Every run is a process of its own; two of
them run at once, because only what is learnt is measured here, and no time.

The table has the mean reward of a turn (1 is perfect) over the last tenth of the steps, and over
all of them: the mean over the seeds, and their standard deviation. Behind these are the points of
the curve, means over tenths of the steps. With --write the numbers on the page are drawn too
(`draw`), in benchmarks/staleness.svg.
"""

import concurrent.futures
import functools
import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import curves_svg, parser_of, read_table, show, table
from benchmarks.runs import play
from earl_jax.envs.environment import Start, StepResult
from earl_jax.telemetry.charts import Series

PAGE = Path(__file__).with_suffix(".md")
LETTERS = "abcdefgh"
LAGS = (0, 1, 4, 8, 16)
# Names of the losses, and config.train.correction.
LOSSES = {"naive": "none", "decoupled": "truncated"}
POINTS = 10
# Of each cell, and runs at once.
SEEDS, JOBS, STEPS = 5, 2, 240
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
    "train": {"learning_rate": 4e-4, "epochs": 4, "entropy_coefficient": 0.02},
    "eval": {"every_steps": 10_000, "games": 2, "final_games": 2},
    "checkpoint": {"every_steps": 10_000},
    "log": {"trajectories_every_steps": 10_000},
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


def settings_of(loss: str, lag: int, rate: float, steps: int, seed: int) -> dict[str, Any]:
    """Returns the settings of a run with this learning rate and so many steps."""
    train = {**SETTINGS["train"], "correction": LOSSES[loss], "learning_rate": rate}
    return {
        **SETTINGS,
        "num_steps": steps,
        "seed": seed,
        "train": train,
        "asynchrony": {"max_staleness": lag},
    }


def run_config(settings: dict[str, Any], workdir: Path) -> dict[str, Any]:
    """Runs settings in a process of their own.

    Returns the reward of a turn by step, the seconds of each step but the first, and lags.
    """
    rows = play(settings, workdir)
    times = [row["time_s"] for row in rows]
    return {
        "rewards": [row["reward_mean"] / row["turns_mean"] for row in rows],
        "seconds": [end - begin for begin, end in itertools.pairwise(times)],
        "lag": statistics.mean(row.get("version_lag_mean", 0.0) for row in rows),
        "most": max(row.get("version_lag_max", 0) for row in rows),
        "sample size": statistics.mean(row["effective_sample_size"] for row in rows),
    }


def play_cells(
    cells: Mapping[Any, Callable[[int], dict[str, Any]]],
) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Yields each cell's name and its runs; it gives the settings of a seed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(JOBS) as pool,
    ):
        for index, (name, settings) in enumerate(cells.items()):
            each = [(settings(s), Path(folder) / f"{index}_{s}") for s in range(SEEDS)]
            yield name, list(pool.map(lambda run: run_config(*run), each))


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


def curves_of(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns the chart of a table's rows: a colour for each eta, naive runs dashed.

    Curves are means over the seeds. Bars beside their ends are one standard deviation of the seeds
    above and below the last point, in the order of the rows.
    """
    steps = [int(name) for name in rows[0] if name.isdecimal()]
    series = list[Series]()
    for place, row in enumerate(rows):
        name, color = f"{row['loss']}, eta {row['eta']}", LAGS.index(int(row["eta"]))
        curve = functools.partial(Series, color=color, dashed=row["loss"] == "naive")
        series.append(curve(name=name, xs=steps, ys=[float(row[str(step)]) for step in steps]))
        end, spread = float(row["reward at the end"]), float(row["spread"])
        bar = [steps[-1] * (1.02 + 0.01 * place)] * 2
        series.append(curve(name=f"{name}, end", xs=bar, ys=[end - spread, end + spread]))
    return curves_svg(series, label="reward of a turn", y_range=(0.1, 1.1))


def draw() -> None:
    """Draws the curves of the page's table."""
    PAGE.with_suffix(".svg").write_text(curves_of(read_table(PAGE, "table")))


def main() -> None:
    """Runs all cells and prints the table."""
    parser, rows = parser_of(__doc__), []
    parser.add_argument("--rate", type=float, default=SETTINGS["train"]["learning_rate"])
    parser.add_argument("--steps", type=int, default=STEPS)
    flags = parser.parse_args()
    cells = {
        (loss, lag): functools.partial(settings_of, loss, lag, flags.rate, flags.steps)
        for lag in LAGS
        for loss in LOSSES
    }
    for (loss, lag), runs in play_cells(cells):
        rows.append(summary(loss, lag, runs))
        print(json.dumps(rows[-1]), flush=True)
    show(table(rows), PAGE, write=flags.write)
    if flags.write:
        draw()


if __name__ == "__main__":
    main()
