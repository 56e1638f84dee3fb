# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The runs of benchmarks/growing.py: what each overrides, how it is made, and what it came to."""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from earl_jax.config import Config
from earl_jax.config_file import load_config_file, make_config
from earl_jax.envs.environment import EPISODE_TOO_LONG, WIN
from earl_jax.telemetry.atomic import write_atomically
from earl_jax.telemetry.episodes import read_trajectories
from earl_jax.telemetry.metrics import read_metrics

CONFIG = Path(__file__).parent.parent / "configs" / "trail_tiny_cpu.py"
# Every episode is written down, for why it ended. Evaluations are no part of a step.
ALWAYS = (
    "log.trajectories_every_steps=1",
    "eval.every_steps=1000",
    "eval.games=2",
    "eval.final_games=2",
)
FREE = "selector.budget_bytes_per_device=0"
# Of the growing runs: more updates a step than a laptop would want, so that a step is work and not
# the start of programs; four ways to cut training, of which the last takes the least memory and is
# the slowest for short rows; all chosen from by speed.
TRAIN_MESHES = ("data=8", "data=1,fsdp=8", "data=1,fsdp=4,context=2", "data=1,fsdp=2,context=4")
GROWING = (
    "num_steps=20",
    "train.epochs=4",
    "train.demonstration_updates=10",
    f"selector.train_meshes={TRAIN_MESHES!r}",
    "selector.order=measured",
    "selector.measure=all",
    "selector.budget_bytes_per_device=2200000",
)
# To move takes a tenth of a second here: what is a twentieth faster is worth it.
BY_SPEED = (*GROWING, "selector.hysteresis=0.05")
# EARL's collapse, of a task whose transcripts lengthen under a policy that can do it: trails of 4
# steps, and one more every other RL step, to 24. It has nothing to do with meshes: one device.
COLLAPSE = (
    "num_steps=42",
    "env.trail.num_steps=24",
    "env.trail.first_steps=4",
    "env.trail.longer_every=128",
    "train.demonstration_steps=6",
    "devices.num_cpu_devices=1",
    "selector.rollout_meshes=('data=1',)",
    "selector.train_meshes=('data=1',)",
)
# The hard limit, tokens an episode: half of the 151 that a walk over the longest trail has.
LIMIT = 76
# A timed run in which more programs than these were compiled is made again. A program is kept where
# it took 0.2 s to compile: some are now and then.
FEW = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to run the config: what is overridden. `timed`: its speed counts."""

    name: str
    overrides: tuple[str, ...] = ()
    timed: bool = True

    @property
    def kind(self) -> str:
        """The first word of its name."""
        return self.name.split()[0]

    def flags(self, seed: int) -> list[str]:
        """What it overrides with this seed, as "section.key=value"."""
        return [*self.overrides, *ALWAYS, f"seed={seed}"]

    def config(self, seed: int) -> Config:
        """The config with that."""
        return make_config(load_config_file(CONFIG), self.flags(seed))

    def digest(self, seed: int) -> str:
        """What tells this run's line from one of another config file or of other overrides."""
        given = load_config_file(CONFIG).to_dict(), self.flags(seed)
        text = json.dumps(given, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def pair_overrides(rollout: str, train: str) -> tuple[str, ...]:
    """One mesh for each stage, and no other."""
    return (f"selector.rollout_meshes=('{rollout}',)", f"selector.train_meshes=('{train}',)")


def pairs_of(config: Config) -> list[tuple[str, str]]:
    """Every pair of a rollout mesh and a training mesh that the config may choose from."""
    meshes = config.selector
    return list(itertools.product(meshes.rollout_meshes, meshes.train_meshes))


def growing_config() -> Config:
    """The config of `ours`."""
    return arms([])[0].config(0)


def arms(pairs: Sequence[tuple[str, str]], fixed: Sequence[Arm] = ()) -> list[Arm]:
    """All of them: `pairs` are held, and `fixed` are pairs with a way to use them."""
    held = [
        Arm(name=f"held {' + '.join(pair)}", overrides=(*BY_SPEED, *pair_overrides(*pair)))
        for pair in pairs
    ]
    return [
        Arm(name="ours", overrides=BY_SPEED),
        *held,
        *fixed,
        Arm(name="unconstrained", overrides=(*BY_SPEED, FREE), timed=False),
        *collapse_arms(),
    ]


def fixed_arm(rollout: str, train: str, slots: int, micro_batches: int, remat: bool) -> Arm:
    """A pair in one way from the first step on, whatever memory there is: nothing is chosen."""
    way = f"{slots} slots, {micro_batches} micro-batches{', remat' if remat else ''}"
    return Arm(
        name=f"fixed {rollout} + {train}, {way}",
        overrides=(
            *GROWING,
            *pair_overrides(rollout, train),
            f"rollout.num_slots={slots}",
            f"train.micro_batches={micro_batches}",
            f"train.remat={remat}",
            "selector.order=listed",
            FREE,
        ),
    )


def collapse_arms() -> list[Arm]:
    """With the limit and without it, and otherwise alike."""
    same = (*COLLAPSE, FREE)
    limit = f"rollout.max_episode_tokens={LIMIT}"
    return [
        Arm(name=f"limit {LIMIT}", overrides=(*same, limit), timed=False),
        Arm(name="no limit", overrides=same, timed=False),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run came to, step by step. `tokens` are those of all episodes of a step.

    `seconds` are those of a step's stages, choosing and moving included. `cut` is the share of a
    step's episodes that the limit ended, `walked` the mean of the steps of the trail that they came
    to. `cold_s` is how long the whole process took with an empty cache folder, None where it never
    ran so; `wall_s` of this run, 0 where it is not timed. `compiled` programs were not in its cache
    folder before. `refused` says why it stopped for want of memory, "" where it did not, and
    `needs` the smallest budget that would have done. `turns` are tokens and seconds of all steps of
    further runs, made by turns with other arms.
    """

    arm: str
    seed: int
    digest: str = ""
    reward: list[float]
    longest: list[int]
    tokens: list[float]
    seconds: list[float]
    peak_bytes: list[int]
    where: list[str]
    cut: list[float]
    walked: list[float]
    cold_s: float | None = None
    wall_s: float = 0.0
    refused: str = ""
    needs: int | None = None
    compiled: int = 0
    turns: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    @property
    def kind(self) -> str:
        """The first word of its arm's name."""
        return self.arm.split()[0]

    @property
    def growth(self) -> float:
        """The longest episode of the run, as a multiple of the longest of its first step."""
        return max(self.longest) / self.longest[0]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all steps over seconds of all steps."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def turn_tokens_per_s(self) -> list[float]:
        """The same of each run that was made by turns."""
        return [tokens / seconds for tokens, seconds in self.turns]

    def breaks(self, budget: int) -> int | None:
        """The first step that takes more than the budget, or was refused; None where none does."""
        over = (step for step, taken in enumerate(self.peak_bytes, 1) if taken > budget)
        return next(over, len(self.reward) + 1 if self.refused else None)


def read_run(workdir: Path, **facts: Any) -> Run:
    """From its metrics, and its episodes' stop reasons."""
    path = workdir / "metrics.jsonl"
    rows = [row for row in read_metrics(path) if "eval" not in row] if path.exists() else []
    ends = [_ends(workdir, row["step"]) for row in rows]
    return Run(
        reward=[row["reward_mean"] for row in rows],
        longest=[row["context_tokens_max"] for row in rows],
        tokens=[row["context_tokens_mean"] * row["episodes"] for row in rows],
        seconds=[sum(row["stage_s"].values()) for row in rows],
        peak_bytes=[row["peak_bytes_per_device"] for row in rows],
        where=[_where(row) for row in rows],
        cut=[statistics.fmean(cut for cut, _ in each) for each in ends],
        walked=[statistics.fmean(steps for _, steps in each) for each in ends],
        **facts,
    )


def _where(row: Mapping[str, Any]) -> str:
    rung = f", {row['rung']}" if row.get("rung") else ""
    return f"{row['rollout_mesh']} + {row['train_mesh']}{rung}"


def _ends(workdir: Path, step: int) -> list[tuple[bool, int]]:
    """Of each episode, whether the limit cut it, and the steps of the trail that it walked."""
    episodes = read_trajectories(workdir / "trajectories" / f"step_{step:06d}.jsonl")
    cuts = [episode["stop_reason"] == EPISODE_TOO_LONG for episode in episodes]
    # The last turn was wrong, but of a walk that came to its end or was cut.
    wrong = [not cut and e["stop_reason"] != WIN for cut, e in zip(cuts, episodes, strict=True)]
    turns = [episode["num_turns"] for episode in episodes]
    return [(cut, n - missed) for cut, n, missed in zip(cuts, turns, wrong, strict=True)]


# Making runs.


def make_run(arm: Arm, seed: int, folder: Path) -> Run:
    """The run that counts (see benchmarks/growing.py).

    Raises ValueError where the run stopped by itself, and not for want of memory.
    """
    caches = folder / (arm.name if arm.timed else "not timed").replace(" ", "_") / "caches"
    workdir = caches.parent / f"{arm.name.replace(' ', '_')}_{seed}"
    cold_s = None
    before = _programs(caches)
    wall_s, words = _run(arm, seed, workdir, caches)
    compiled = len(_programs(caches) - before)
    if arm.timed and not words and (not before or compiled > FEW):
        cold_s, before = None if before else wall_s, _programs(caches)
        wall_s, words = _run(arm, seed, workdir, caches)
        compiled = len(_programs(caches) - before)
    need = re.search(r"smallest budget that would do is (?:about )?(\d+)", words)
    found = read_run(
        workdir,
        arm=arm.name,
        seed=seed,
        digest=arm.digest(seed),
        cold_s=cold_s,
        wall_s=wall_s if arm.timed else 0.0,
        refused=words,
        needs=int(need[1]) if need else None,
        compiled=compiled if arm.timed else 0,
    )
    if not words and len(found.reward) < arm.config(seed).num_steps:
        raise ValueError(f"{arm.name}, seed {seed}, was stopped; the same command goes on")
    return found


def _run(arm: Arm, seed: int, workdir: Path, caches: Path) -> tuple[float, str]:
    """Seconds of the whole process, and why it stopped for want of memory ("": it did not)."""
    flags = [f"--config.{flag}" for flag in arm.flags(seed)]
    start = [sys.executable, "-m", "earl_jax.main", f"--config={CONFIG}", f"--workdir={workdir}"]
    shutil.rmtree(workdir, ignore_errors=True)
    start_s = time.perf_counter()
    done = subprocess.run(
        [*start, *flags],
        env={**os.environ, "XDG_CACHE_HOME": str(caches)},
        capture_output=True,
        text=True,
        check=False,
    )
    wall_s = time.perf_counter() - start_s
    words = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    if done.returncode and not (words and "budget" in words[-1]):
        raise ValueError(f"{arm.name}, seed {seed}, ended with {done.stderr[-2000:]}")
    return wall_s, words[-1].removeprefix("error: ") if words else ""


def _programs(caches: Path) -> set[str]:
    """The compiled programs that are kept."""
    return {path.name for path in caches.glob("earl_jax/xla/*-cache")}


def read_rows(path: Path) -> list[Run]:
    """The runs that were made; none where there is no file.

    Raises ValueError for lines of another version of this benchmark.
    """
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        return [Run(**json.loads(line)) for line in lines]
    except TypeError as error:
        raise ValueError(f"{path} is of another version ({error}); --again starts over") from error


def make_runs(path: Path, all_arms: Sequence[Arm], seeds: Sequence[int], folder: Path) -> list[Run]:
    """Every arm with every seed, by turns; those in the file `path`, with this config, are kept.

    An arm that was refused memory with one seed is not run with another.
    """
    runs: list[Run] = []
    for seed, arm in itertools.product(seeds, all_arms):
        if any(run.refused for run in runs if run.arm == arm.name):
            continue
        key = (arm.name, seed, arm.digest(seed))
        made = (run for run in read_rows(path) if _key(run) == key)
        run = next(made, None)
        if run is None:
            run = make_run(arm, seed, folder)
            write_rows(path, [*read_rows(path), run])
        runs.append(run)
        said = run.refused or f"{run.tokens_per_s:,.0f} tokens/s"
        print(f"{arm.name}, seed {seed}: {said}", flush=True)
    return runs


def _key(run: Run) -> tuple[str, int, str]:
    return run.arm, run.seed, run.digest


def take_turns(
    path: Path, runs: Sequence[Run], all_arms: Sequence[Arm], folder: Path, turns: int, budget: int
) -> list[Run]:
    """The timed arms that fit the budget run again, one after the other, so often with each seed.

    A machine that others use too is slower for minutes: of runs that follow each other that can be
    told from what an arm is slower by. In the folder of `make_runs`. Turns once taken are kept.
    """
    timed = {arm.name: arm for arm in all_arms if arm.timed}
    done = list(runs)
    for seed, turn in itertools.product(sorted({run.seed for run in runs}), range(turns)):
        for k, run in enumerate(done):
            fits = run.arm in timed and run.breaks(budget) is None
            if run.seed != seed or not fits or len(run.turns) > turn:
                continue
            again = make_run(timed[run.arm], seed, folder)
            took = sum(again.tokens), sum(again.seconds)
            done[k] = dataclasses.replace(run, turns=[*run.turns, took])
            write_rows(
                path, [done[k] if _key(row) == _key(run) else row for row in read_rows(path)]
            )
            print(f"{run.arm}, seed {seed}, turn {turn + 1}: {took[1]:.1f} s", flush=True)
    return done


def write_rows(path: Path, runs: Sequence[Run]) -> None:
    """A line a run."""
    write_atomically(path, "".join(json.dumps(dataclasses.asdict(run)) + "\n" for run in runs))
