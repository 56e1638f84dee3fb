# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The planner's share of communication from 8 to 4,096 devices, and processes of this machine.

    uv run python -m benchmarks.scaling              # writes the table of scaling.md; seconds
    uv run python -m benchmarks.scaling --processes=1,2,4 --workdir=DIR   # tokens/s, a core each

A stage's share of communication is what its time loses to links: the time of the same plan less
that with links that take no time, by the speed model of the selector. No device is needed.
"""

import argparse
import dataclasses
import math
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.choose import problem_on
from benchmarks.pages import replace_table, table
from benchmarks.pinned import run_pinned
from earl_jax.selector.choose import full_step
from earl_jax.selector.plans import RolloutPlan, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.schedule import make_schedule
from earl_jax.selector.table import ThroughputTable
from earl_jax.telemetry.metrics import read_metrics

PAGE = Path(__file__).with_suffix(".md")
# By the number of devices; v5p is a torus of three axes.
TOPOLOGIES = {
    "h100": ("h100:1x8", "h100:8x8", "h100:64x8", "h100:512x8"),
    "v5p": ("v5p:2x2x2", "v5p:4x4x4", "v5p:8x8x8", "v5p:16x16x16"),
}
MODELS = ("qwen2.5-7b", "qwen2.5-72b", "qwen3-30b-a3b")
CONTEXT = 8192
# Of a row whose model fits.
COLUMNS = ("rollout", "s", "links", "training", "train s", "train links", "publish s", "step links")
# Steps of a run of processes that are not timed: their programs are compiled.
WARM = 3


def with_free_links(problem: Problem) -> Problem:
    """Returns the problem on the same devices, between which bytes move in no time."""
    hardware = dataclasses.replace(
        problem.hardware,
        link_bytes_per_s=math.inf,
        network_bytes_per_s=math.inf,
        start_s=0.0,
        hop_s=0.0,
        network_hop_s=0.0,
    )
    return dataclasses.replace(problem, hardware=hardware)


def stage_seconds(
    problem: Problem, rollout: RolloutPlan, train: TrainPlan, context: int
) -> tuple[float, float]:
    """Returns the seconds of a step's rollout and of its update, where every episode is full."""
    work, tokens = problem.work, problem.work.num_rows * context
    rows = rollout.num_slots // rollout.mesh.data
    dense = problem.dense_pages(rollout.mesh, rollout.num_slots, context)
    at_once = max(1, min(rows, rows * rollout.pages // dense))
    sizes = (rollout.mesh, rollout.num_slots, context, at_once, work.appended)
    sampled = full_step(problem, context).rollout_tokens
    return sampled / problem.round_speed(*sizes), tokens / problem.update_speed(train, context)


def planned() -> Iterator[dict[str, Any]]:
    """Yields a row of the table for each model and topology."""
    for model in MODELS:
        for topology in (name for names in TOPOLOGIES.values() for name in names):
            yield planned_row(model, topology)


def planned_row(model: str, topology: str) -> dict[str, Any]:
    """Returns the plans that a run would choose there, and what their stages take."""
    problem = problem_on(topology, model)
    row: dict[str, Any] = {
        "model": model,
        "topology": topology,
        "devices": f"{problem.hardware.num_devices:,}",
        "episodes": f"{problem.work.num_rows:,}",
    }
    (stop,) = make_schedule(problem, ThroughputTable(), [CONTEXT])
    decision = stop.decision
    if decision is None or decision.rollout is None or decision.train is None:
        return row | dict.fromkeys(COLUMNS, "-")
    plans = decision.rollout.plan, decision.train.plan
    whole = stage_seconds(problem, *plans, CONTEXT)
    free = stage_seconds(with_free_links(problem), *plans, CONTEXT)
    publish_s = problem.publish_s(plans[0].mesh)
    step_s = sum(whole) + publish_s
    cells = (
        str(plans[0].mesh),
        whole[0],
        percent(whole[0] - free[0], whole[0]),
        str(plans[1].mesh),
        whole[1],
        percent(whole[1] - free[1], whole[1]),
        publish_s,
        percent(step_s - sum(free), step_s),
    )
    return row | dict(zip(COLUMNS, cells, strict=True))


def percent(part_s: float, whole_s: float) -> str:
    """Returns the share of a time in words."""
    return f"{100 * part_s / whole_s:.0f} %"


def tokens_per_s(num: int, workdir: Path, steps: int) -> dict[str, Any]:
    """Runs the tiny config on four devices of `num` processes, each pinned to a core.

    Returns its speeds. Processes beyond the cores share them.
    """
    if num not in (1, 2, 4):
        raise SystemExit(f"--processes={num}: the run has four devices, for 1, 2 or 4 processes")
    cores, folder = len(os.sched_getaffinity(0)), workdir / f"{num}_processes"
    flags = ["--config=configs/tictactoe_tiny_cpu.py", f"--workdir={folder}"]
    flags += [f"--config.num_steps={WARM + steps}", "--config.eval.every_steps=100000"]
    # One mesh for both stages: the number of processes is all that differs.
    flags += [f"--config.devices.num_cpu_devices={4 // num}"]
    flags += [f"--config.selector.{stage}_meshes=('data=4',)" for stage in ("rollout", "train")]
    run_pinned(["-m", "earl_jax.main"], flags, num)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "eval" not in row]
    timed = [row for row in rows if row["step"] > WARM]
    return {
        "processes": num,
        "cores": min(num, cores),
        "rollout tokens/s": statistics.median(row["rollout_tokens_per_s"] for row in timed),
        "train tokens/s": statistics.median(row["train_tokens_per_s"] for row in timed),
        "steps": len(timed),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--processes", default="", help="numbers of processes to run, such as 1,2,4"
    )
    parser.add_argument("--workdir", type=Path, help="a new folder for these runs")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    flags = parser.parse_args()
    if flags.processes:
        if flags.workdir is None:
            parser.error("--processes needs a --workdir")
        numbers = map(int, flags.processes.split(","))
        print(table([tokens_per_s(number, flags.workdir, flags.steps) for number in numbers]))
    else:
        replace_table(PAGE, table(list(planned())))
