# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Contexts that grow 16 times under a byte budget: ours beside every static pair of meshes.

    uv run python -m benchmarks.growing [--fitting] [--folder=DIR] [--write]

Runs of configs/trail_tiny_cpu.py, each a process of its own:

- `ours` may choose from all meshes below, by the throughput table;
- `static A + B` rolls out on A and trains on B from the first step to the last, under the same
  budget. It may use them as ours may: fewer slots, more micro-batches, remat.

Each runs twice: "cold" from an empty folder of compiled programs and observed
speeds, then "warm" with what the cold run left there. Tokens/s are tokens of all steps over seconds
of all steps, choosing, moving and compiling included. A run ends where no plan fits the budget.

With --fitting only those static pairs run that fit the budget to the end, by computed bytes: three
of eight, the only ones whose speed is compared with ours.

Each run is a line of DIR/rows.jsonl (--folder=DIR) as soon as it is over; the same command goes on
where it was stopped. With --write the table goes into growing.md.
"""

import dataclasses
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import parser_of, show, table
from benchmarks.runs import steps_of
from earl_jax.config.file import load_config_file, make_config
from earl_jax.placement.problem import find_model, make_problem
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.schedule import fits

PAGE = Path(__file__).with_suffix(".md")
CONFIG = PAGE.parents[1] / "configs" / "trail_tiny_cpu.py"
ROLLOUT_MESHES = ("data=8", "data=4,tensor=2")
TRAIN_MESHES = ("data=8", "data=1,fsdp=8", "data=1,fsdp=4,context=2", "data=1,fsdp=2,context=4")
BUDGET = 2_200_000
CACHES = ("cold", "warm")
# More updates a step than a laptop would want, so that a step is work and not the start of
# programs.
GROWING = (
    "train.epochs=4",
    "train.sft_updates=10",
    "selector.table=auto",
    f"selector.budget_bytes_per_device={BUDGET}",
)
# Evaluations are no part of a step.
ALWAYS = ("eval.every_steps=1000", "eval.games=2", "eval.final_games=2")
# Steps of a run; rewards of so many last ones are averaged.
STEPS, LAST = 20, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to run the config: its name, and what it overrides."""

    name: str
    overrides: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run by its metrics: a value a step. `wall_s` is of the whole process.

    `refused` says why no plan was left ("" where it ended by itself), and `needs` the smallest
    budget that would have done.
    """

    arm: str
    seed: int
    cache: str
    wall_s: float
    refused: str
    needs: int | None
    reward: list[float]
    longest: list[int]
    tokens: list[float]
    seconds: list[float]
    peak_bytes: list[int]
    meshes: list[str]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all steps over seconds of all steps."""
        return sum(self.tokens) / sum(self.seconds) if self.seconds else 0.0

    @property
    def switches(self) -> int:
        """The number of steps on other meshes than the step before."""
        return sum(a != b for a, b in itertools.pairwise(self.meshes))

    def breaks(self, budget: int) -> int | None:
        """Returns the first step over the budget, or without a plan; None where there is none."""
        over = (step for step, taken in enumerate(self.peak_bytes, 1) if taken > budget)
        return next(over, len(self.reward) + 1 if self.refused else None)


def arms() -> list[Arm]:
    """Returns all arms, ours first."""

    def pair(rollout: Sequence[str], train: Sequence[str]) -> tuple[str, ...]:
        return (f"selector.rollout_meshes={rollout!r}", f"selector.train_meshes={train!r}")

    static = [
        Arm(name=f"static {rollout} + {train}", overrides=(*GROWING, *pair((rollout,), (train,))))
        for rollout, train in itertools.product(ROLLOUT_MESHES, TRAIN_MESHES)
    ]
    return [Arm(name="ours", overrides=(*GROWING, *pair(ROLLOUT_MESHES, TRAIN_MESHES))), *static]


def fits_to_the_end(arm: Arm) -> bool:
    """Returns True if the arm's meshes fit the budget in all context buckets, by computed bytes."""
    config = make_config(load_config_file(CONFIG), [*arm.overrides, *ALWAYS])
    model, vocab_size = find_model(config, None)
    hardware = parse_topology(f"cpu:{config.devices.num_cpu_devices}")
    problem = make_problem(config, model, vocab_size, hardware, budget_bytes=BUDGET)
    return all(fits(problem, tokens) for tokens in config.rollout.context_buckets)


def play(arm: Arm, folder: Path) -> Iterator[Run]:
    """Yields the arm's runs, cold before warm.

    Raises ValueError where one stopped by itself, and not because no plan fits.
    """
    own = folder / f"{arm.name.replace(' ', '_')}"
    shutil.rmtree(own, ignore_errors=True)
    line = [sys.executable, "-m", "earl_jax.main", f"--config={CONFIG}"]
    flags = (*arm.overrides, *ALWAYS, f"num_steps={STEPS}")
    for cache in CACHES:
        workdir = own / cache
        start_s = time.perf_counter()
        done = subprocess.run(
            [*line, f"--workdir={workdir}", *(f"--config.{flag}" for flag in flags)],
            env={**os.environ, "XDG_CACHE_HOME": str(own / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )
        errors = [row for row in done.stderr.splitlines() if row.startswith("error: ")]
        if done.returncode and not (errors and "budget" in errors[-1]):
            raise ValueError(f"{arm.name} ended with {done.stderr[-2000:]}")
        words = errors[-1].removeprefix("error: ") if done.returncode else ""
        wall_s = time.perf_counter() - start_s
        yield read_run(workdir, arm=arm.name, seed=0, cache=cache, wall_s=wall_s, refused=words)


def read_run(workdir: Path, *, refused: str, **facts: Any) -> Run:
    """Returns a run by what it left in its folder."""
    rows = steps_of(workdir)
    need = re.search(r"smallest budget that would do is (?:about )?(\d+)", refused)
    return Run(
        refused=refused,
        needs=int(need[1]) if need else None,
        reward=[row["reward_mean"] for row in rows],
        longest=[row["context_tokens_max"] for row in rows],
        tokens=[row["context_tokens_mean"] * row["episodes"] for row in rows],
        seconds=[sum(row["stage_s"].values()) for row in rows],
        peak_bytes=[row["peak_bytes_per_device"] for row in rows],
        meshes=[f"{row['rollout_mesh']} + {row['train_mesh']}" for row in rows],
        **facts,
    )


def page_rows(runs: Sequence[Run], budget: int) -> list[dict[str, Any]]:
    """Returns the table; speeds are beside those of ours with the same seed and cache."""
    ours = {(run.seed, run.cache): run.tokens_per_s for run in runs if run.arm == "ours"}
    rows = []
    for run in runs:
        broken = run.breaks(budget)
        need = f", needs {run.needs / 2**20:.2f} MiB" if run.needs else ""
        beside = ours.get((run.seed, run.cache))
        rows.append(
            {
                "run": run.arm,
                "seed": run.seed,
                "cache": run.cache,
                "contexts": f"{run.longest[0]} to {max(run.longest)}" if run.longest else None,
                "breaks the budget": f"step {broken}{need}" if broken else "no",
                "most MiB/device": max(run.peak_bytes, default=0) / 2**20,
                "switches": run.switches,
                "process s": run.wall_s,
                "tokens/s": run.tokens_per_s,
                "ours = 1": run.tokens_per_s / beside if beside and broken is None else None,
                f"reward, last {LAST} steps": statistics.fmean(run.reward[-LAST:])
                if run.reward
                else None,
            }
        )
    return rows


def command(arguments: Sequence[str]) -> None:
    """Runs the command."""
    parser = parser_of(__doc__)
    fitting = "no static pair that does not fit the budget to the end"
    parser.add_argument("--fitting", action="store_true", help=fitting)
    parser.add_argument("--folder", type=Path, help="where runs and caches are kept")
    flags = parser.parse_args(arguments)
    folder = flags.folder or Path(tempfile.mkdtemp(prefix="earl_jax_growing_"))
    kept = folder / "rows.jsonl"
    lines = kept.read_text().splitlines() if kept.exists() else []
    runs = [Run(**json.loads(line)) for line in lines]
    for arm in arms():
        if {run.cache for run in runs if run.arm == arm.name} == set(CACHES):
            continue
        if flags.fitting and not fits_to_the_end(arm):
            continue
        new = list(play(arm, folder))
        runs += new
        with kept.open("a") as file:
            file.writelines(json.dumps(dataclasses.asdict(run)) + "\n" for run in new)
        print(table(page_rows(new, BUDGET)), flush=True)
    print()
    show(table(page_rows(runs, BUDGET)), PAGE, write=flags.write)


if __name__ == "__main__":
    command(sys.argv[1:])
