# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Seeds of Tic-Tac-Toe, with and without supervised steps; tables and curves.

    uv run python -m benchmarks.learning [--only=SERIES] [--seeds=0,1,2,3,4] [--from=DIR] [--write]

The series are those of SERIES: "with" supervised steps, "masked" without them and with legal
replies only, "rewards" without both. With --from, runs that are in DIR/SERIES_SEED are read, and
only the others are made there. Exact results are those of benchmarks/exact.py. --write puts the
tables into benchmarks/learning.md, and the curves of "with" into benchmarks/learning.svg.
"""

import concurrent.futures
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.exact import exact_rows
from benchmarks.pages import curves_svg, parser_of, show, table, with_spread
from earl_jax.telemetry.charts import Series
from earl_jax.telemetry.metrics import read_metrics

PAGE = Path(__file__).with_suffix(".md")
CONFIG = "configs/tictactoe_tiny_cpu.py"
ONE_DEVICE = (
    "devices.num_cpu_devices=1",
    "selector.rollout_meshes=('data=1',)",
    "selector.train_meshes=('data=1',)",
)
# Overrides by the name of a series of runs.
SERIES = {
    "with": (),
    "masked": (
        "train.sft_steps=0",
        "env.args.mask_illegal=True",
        "env.args.illegal_reward=-1.0",
        "num_steps=1000",
        *ONE_DEVICE,
    ),
    "rewards": (
        "train.sft_steps=0",
        "rollout.unfinished_reward=-3.0",
        "rollout.max_turn_tokens=2",
        "algorithm_args.normalize_advantages=False",
        "train.entropy_coefficient=0.15",
        "train.final_entropy_coefficient=0.05",
        "num_steps=400",
        *ONE_DEVICE,
    ),
}
Runs = dict[int, list[dict]]


def main() -> None:
    """Runs the seeds of each series, one after the other, and prints its tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", action="append", choices=SERIES, help="of these alone")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--from", dest="source", type=Path, help="the folder of runs")
    flags = parser.parse_args()
    folder = flags.source or Path(tempfile.mkdtemp(prefix="earl_jax_learning_"))
    for name in flags.only or SERIES:
        workdirs = {int(seed): folder / f"{name}_{seed}" for seed in flags.seeds.split(",")}
        for seed, workdir in workdirs.items():
            if not (workdir / "report.html").exists():
                _run(seed, SERIES[name], workdir)
        runs = {seed: read_metrics(path / "metrics.jsonl") for seed, path in workdirs.items()}
        lines = [*_table(runs), "", *_exact(list(workdirs.values())), "", *_by_step(runs)]
        show("\n".join(lines), PAGE, write=flags.write, name=name)
        if name == "with" and flags.write:
            PAGE.with_suffix(".svg").write_text(_curves(runs))


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


def _exact(workdirs: Sequence[Path]) -> list[str]:
    """Returns the exact results of each run, and their mean."""
    # A process for each run: they may have other devices.
    with concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        rows = sum(pool.map(exact_rows, [[workdir] for workdir in workdirs]), [])
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
    """Returns the last evaluation of each seed and the seconds of its run, and their spread."""
    lasts = {seed: _percents(_evaluations(rows)[-1]) for seed, rows in runs.items()}
    seconds = {seed: max(row.get("time_s", 0.0) for row in rows) for seed, rows in runs.items()}
    found = [{"seed": seed, **last, "s": seconds[seed]} for seed, last in lasts.items()]
    worst = max(
        row["logprob_mismatch_max"] for rows in runs.values() for row in rows if "loss" in row
    )
    return [
        table(with_spread(found, "seed") if len(found) > 1 else found),
        "",
        "Largest difference between a log-prob of the engine and the trainer's in any step of any",
        f"seed: {worst:.1e} (fp32).",
    ]


def _percents(last: dict) -> dict[str, float]:
    names = {"win": "win %", "win_as_x": "as x", "win_as_o": "as o", "draw": "draw %"}
    found = {column: 100.0 * last[name] for name, column in (names | {"loss": "loss %"}).items()}
    # A turn that never ends is not a legal move either.
    return found | {"illegal %": 100.0 * (last["illegal"] + last.get("turn_too_long", 0.0))}


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
