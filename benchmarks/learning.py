# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Seeds of Tic-Tac-Toe, with and without supervised steps; tables and curves.

    uv run python -m benchmarks.learning [--seeds=0,1,2,3,4] [--masked=0] [--rewards=0] [--from=DIR]

Writes benchmarks/learning.md and benchmarks/learning.svg. With --from, runs that are in
DIR/with_N, DIR/masked_N and DIR/rewards_N are read, and only the others are made there. Exact
results are those of benchmarks/exact.py.
"""

import argparse
import importlib.metadata
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.exact import exact_rows
from benchmarks.pages import curves_svg, table
from earl_jax.telemetry.charts import Series
from earl_jax.telemetry.metrics import read_metrics

HERE = Path(__file__).parent
CONFIG = "configs/tictactoe_tiny_cpu.py"
# Overrides by the name of a series of runs.
SERIES = {
    "with": (),
    "masked": (
        "train.sft_steps=0",
        "env.args.mask_illegal=True",
        "env.args.illegal_reward=-1.0",
        "train.ratio=model",
        "num_steps=300",
    ),
    "rewards": (
        "train.sft_steps=0",
        "rollout.unfinished_reward=-3.0",
        "rollout.max_turn_tokens=2",
        "algorithm_args.normalize_advantages=False",
        "train.entropy_coefficient=0.15",
        "train.final_entropy_coefficient=0.05",
        "num_steps=400",
    ),
}
Runs = dict[int, list[dict]]


def main() -> None:
    """Runs the seeds, one after the other, and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2,3,4", help="with supervised steps")
    parser.add_argument("--masked", default="0", help="seeds of legal replies only")
    parser.add_argument("--rewards", default="0", help="seeds of rewards alone")
    parser.add_argument("--from", dest="source", type=Path)
    flags = parser.parse_args()
    folder = flags.source or Path(tempfile.mkdtemp(prefix="earl_jax_learning_"))
    found: dict[str, Runs] = {name: {} for name in SERIES}
    for name, seeds in zip(SERIES, (flags.seeds, flags.masked, flags.rewards), strict=True):
        for seed in map(int, seeds.split(",")):
            workdir = folder / f"{name}_{seed}"
            if not (workdir / "report.html").exists():
                _run(seed, SERIES[name], workdir)
            found[name][seed] = read_metrics(workdir / "metrics.jsonl")
    exact = {
        name: exact_rows([folder / f"{name}_{seed}" for seed in runs])
        for name, runs in found.items()
    }
    (HERE / "learning.svg").write_text(_curves(found["with"]))
    (HERE / "learning.md").write_text(_page(found, exact))
    print((HERE / "learning.md").read_text())


def _run(seed: int, overrides: Sequence[str], workdir: Path) -> None:
    line = [sys.executable, "-m", "earl_jax.main", f"--config={CONFIG}", f"--config.seed={seed}"]
    line += [f"--config.{override}" for override in overrides]
    subprocess.run([*line, f"--workdir={workdir}"], check=True)


def _evaluations(rows: list[dict]) -> list[dict]:
    return [{"step": row["step"], **row["eval"]} for row in rows if "eval" in row]


def _curves(runs: dict[int, list[dict]]) -> str:
    series = []
    for seed, rows in runs.items():
        points = _evaluations(rows)
        steps = [point["step"] for point in points]
        for name, dashed in (("win", False), ("illegal", True)):
            values = [100.0 * point[name] for point in points]
            label = f"{name}, seed {seed}"
            series.append(Series(name=label, xs=steps, ys=values, color=seed, dashed=dashed))
    return curves_svg(series, label="% of games", y_range=(0.0, 100.0))


def _page(found: dict[str, Runs], exact: dict[str, list[dict]]) -> str:
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("jax", "open_spiel"))
    lines = [
        "# Learning Tic-Tac-Toe, with and without supervised steps",
        "",
        f"`uv run python -m benchmarks.learning`: for each seed `python -m earl_jax.main "
        f"--config={CONFIG} --config.seed=N`.",
        f"{platform.machine()}, 2 cores, Python {platform.python_version()}, {versions},",
        f"{time.strftime('%Y-%m')}. 512 games against the random opponent, half on each side, at",
        "temperature 1. Random legal play wins 43.7 %, the best possible 96.7 %. Exact results are",
        "those of all games of the last policy, each with its probability (benchmarks/exact.py);",
        "against exact play (minimax) the best possible is to draw all games.",
        "",
        "## With supervised steps",
        "",
        "In its first 120 steps the policy is also trained on games of random legal moves.",
        "",
        *_table(found["with"]),
        "",
        *_exact(exact["with"]),
        "",
        "![win (solid) and illegal (dashed) by step](learning.svg)",
        "",
        *_by_step(found["with"]),
        "",
        "## Without, legal replies only",
        "",
        "The policy begins with random weights and may reply with legal moves only",
        f"({_settings('masked')}).",
        "",
        *_table(found["masked"]),
        "",
        *_exact(exact["masked"]),
        "",
        *_by_step(found["masked"]),
        "",
        "## Without, from rewards alone",
        "",
        "The policy begins with random weights and learns from rewards alone what a move is, which",
        f"moves are legal, and which win ({_settings('rewards')}).",
        "",
        *_table(found["rewards"]),
        "",
        *_exact(exact["rewards"]),
        "",
        *_by_step(found["rewards"]),
    ]
    return "\n".join(lines) + "\n"


def _settings(name: str) -> str:
    return ", ".join(f"`{override}`" for override in SERIES[name])


def _exact(rows: list[dict]) -> list[str]:
    """Returns the exact results of each run, and their mean."""
    lines = []
    for opponent in ("random", "minimax"):
        own = [row for row in rows if row["opponent"] == opponent]
        names = [name for name in own[0] if name.endswith("%")]
        means = {name: sum(row[name] for row in own) / len(own) for name in names}
        lines += [{"seed": row["run"].rpartition("_")[2]} | _but_run(row) for row in own]
        lines.append({"seed": "mean", "opponent": opponent} | means)
    return ["Exact results:", "", *table(lines).split("\n")]


def _but_run(row: dict) -> dict:
    return {name: value for name, value in row.items() if name != "run"}


def _table(runs: Runs) -> list[str]:
    """Returns the last evaluation of each seed, their mean and standard deviation."""
    columns = ("win %", "as x", "as o", "draw %", "loss %", "illegal %")
    lasts = {seed: _percents(_evaluations(rows)[-1]) for seed, rows in runs.items()}
    columns_of, found = [*zip(*lasts.values(), strict=True)], [*lasts.items()]
    found.append(("mean", [*map(statistics.fmean, columns_of)]))
    if len(lasts) > 1:
        found.append(("deviation", [*map(statistics.stdev, columns_of)]))
    rows = [
        f"| {name} | " + " | ".join(f"{value:.1f}" for value in values) + " |"
        for name, values in found
    ]
    worst = max(
        row["logprob_mismatch_max"] for rows in runs.values() for row in rows if "loss" in row
    )
    return [
        f"| seed | {' | '.join(columns)} |",
        "|---" * (1 + len(columns)) + "|",
        *rows,
        "",
        "Largest difference between a log-prob of the engine and the trainer's in any step of any",
        f"seed: {worst:.1e} (fp32).",
    ]


def _percents(last: dict) -> list[float]:
    # A turn that never ends is not a legal move either.
    illegal = last["illegal"] + last.get("turn_too_long", 0.0)
    shares = [last[name] for name in ("win", "win_as_x", "win_as_o", "draw", "loss")]
    return [100.0 * share for share in (*shares, illegal)]


def _by_step(runs: Runs) -> list[str]:
    lines = [
        "| step | " + " | ".join(f"win / illegal, seed {seed}" for seed in runs) + " |",
        "|---|" + "---|" * len(runs),
    ]
    for points in zip(*(_evaluations(rows) for rows in runs.values()), strict=True):
        cells = [f"{100 * p['win']:.0f} / {100 * p['illegal']:.0f}" for p in points]
        lines.append(f"| {points[0]['step']} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
