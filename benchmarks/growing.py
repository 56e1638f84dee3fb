# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The growing run: contexts lengthen 16 times because the policy learns, under a byte budget.

    uv run python -m benchmarks.growing [--seeds=0,1,2] [--from=DIR]

configs/trail_tiny_cpu.py with its budget and without it, with a hard limit of tokens an episode
(EARL's collapse), and held still on one pair of meshes with what the ladder comes to in the end
(less at a time, activations computed again) from the first step on: the last with the first seed
alone, the others by turns.
For each pair of meshes that the config may choose from, held still as the config has them, it is
said at which step of the run without a budget it would have taken more than the budget. Bytes per
device are those of the selector: XLA's memory analysis of a stage's program with its KV cache, and
what the trainer leaves beside a rollout.

Writes benchmarks/growing.md, growing.jsonl (a line a run) and growing.svg. With --from, the runs
are kept in DIR, and those that are there are not made again.
"""

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning import curves_svg
from earl_jax.calibrate import Calibration
from earl_jax.config import Config
from earl_jax.config_file import load_config_file, make_config, read_workdir_config
from earl_jax.envs.environment import EPISODE_TOO_LONG
from earl_jax.main import exit_status, start_jax
from earl_jax.measurements import open_table
from earl_jax.survival import Ladder
from earl_jax.telemetry.charts import Series
from earl_jax.telemetry.episodes import read_trajectories
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.world import World

HERE = Path(__file__).parent
CONFIG = HERE.parent / "configs" / "trail_tiny_cpu.py"
# The hard limit: tokens an episode; the whole trail takes 247.
LIMIT = 192
# What the ladder comes to where contexts are longest.
SMALL = ("train.remat=True", "train.micro_batches=8")
FREE = "selector.budget_bytes_per_device=0"
# Steps at the end of a run that its reward is taken from.
LAST = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to run the config: what is overridden."""

    name: str
    overrides: tuple[str, ...] = ()

    def config(self, seed: int) -> Config:
        """Every episode is written down, for why it ended."""
        every = ("log.trajectories_every_steps=1", f"seed={seed}")
        return make_config(load_config_file(CONFIG), [*self.overrides, *every])


def arms(config: Config) -> list[Arm]:
    """Ours, without a budget, with a hard limit; and held still on what fits at any length."""
    rollout, train = config.selector.rollout_meshes[0], config.selector.train_meshes[-1]
    held = (f"selector.rollout_meshes=('{rollout}',)", f"selector.train_meshes=('{train}',)")
    return [
        Arm(name="ours"),
        Arm(name="unconstrained", overrides=(FREE,)),
        Arm(name=f"limit {LIMIT}", overrides=(f"rollout.max_episode_tokens={LIMIT}",)),
        Arm(name="held small", overrides=(*held, *SMALL, FREE)),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldPair:
    """A pair of meshes that stays. `need` is what it takes per device at each room, in bytes."""

    name: str
    need: dict[int, int]

    def breaks(self, rooms: Sequence[int], budget: int) -> int | None:
        """The first step, of steps that need these rooms, that takes more; None where none does."""
        over = (step for step, room in enumerate(rooms, 1) if self.need[room] > budget)
        return next(over, None)


def held_pairs(config: Config) -> list[HeldPair]:
    """Every pair that the config may choose from, with a KV cache for every slot to fill."""
    # Without a budget: by a compiler also where it is far above it.
    free = dataclasses.replace(config.selector, budget_bytes_per_device=0)
    world = World(dataclasses.replace(config, selector=free))
    table, _ = open_table(world)
    calibration, ladder = Calibration(world, table, print), Ladder(world)
    need: dict[str, dict[int, int]] = {}
    for room in config.rollout.context_buckets:
        pairs = itertools.product(
            calibration.rollout_options(room, 0), calibration.train_options(room)
        )
        for rollout, train in pairs:
            beside = rollout.bytes_per_device + ladder.trainer_bytes(train.mesh)
            most = max(beside, train.bytes_per_device)
            need.setdefault(f"{rollout.mesh} + {train.mesh}", {})[room] = most
    return [HeldPair(name=name, need=rooms) for name, rooms in need.items()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run came to, step by step. `tokens` are those of all episodes of a step.

    `cut` is the share of a step's episodes that the limit ended. `seconds` are those of a step's
    stages, choosing and moving included; evaluations are no part of a step.
    """

    arm: str
    seed: int
    reward: list[float]
    longest: list[int]
    tokens: list[float]
    seconds: list[float]
    peak_bytes: list[int]
    where: list[str]
    cut: list[float]

    @property
    def last_reward(self) -> float:
        """The mean of the last steps."""
        return statistics.fmean(self.reward[-LAST:])

    @property
    def growth(self) -> float:
        """The longest episode of the run, as a multiple of the longest of its first step."""
        return max(self.longest) / self.longest[0]

    def breaks(self, budget: int) -> int | None:
        """The first step that takes more than the budget; None where none does."""
        over = (step for step, taken in enumerate(self.peak_bytes, 1) if taken > budget)
        return next(over, None)


def worst_of_three(rewards: Sequence[float]) -> float:
    """The lowest mean of three steps in a row."""
    return min(statistics.fmean(rewards[step : step + 3]) for step in range(len(rewards) - 2))


def tokens_per_s(run: Run) -> float:
    """Over the run, without the steps that compiled or loaded a program.

    Those are the ones that took over three times as long as the median of the nine around them.
    """
    kept = [
        step
        for step, taken in enumerate(run.seconds)
        if taken <= 3 * statistics.median(run.seconds[max(0, step - 4) : step + 5])
    ]
    return sum(run.tokens[step] for step in kept) / sum(run.seconds[step] for step in kept)


def read_run(arm: str, seed: int, workdir: Path) -> Run:
    """From its metrics, and its episodes' stop reasons."""
    rows = [row for row in read_metrics(workdir / "metrics.jsonl") if "eval" not in row]
    return Run(
        arm=arm,
        seed=seed,
        reward=[row["reward_mean"] for row in rows],
        longest=[row["context_tokens_max"] for row in rows],
        tokens=[row["context_tokens_mean"] * row["episodes"] for row in rows],
        seconds=[sum(row["stage_s"].values()) for row in rows],
        peak_bytes=[row["peak_bytes_per_device"] for row in rows],
        where=[_where(row) for row in rows],
        cut=[_cut(workdir, row["step"]) for row in rows],
    )


def _where(row: Mapping[str, Any]) -> str:
    rung = f", {row['rung']}" if row.get("rung") else ""
    return f"{row['rollout_mesh']} + {row['train_mesh']}{rung}"


def _cut(workdir: Path, step: int) -> float:
    episodes = read_trajectories(workdir / "trajectories" / f"step_{step:06d}.jsonl")
    return statistics.fmean(e["stop_reason"] == EPISODE_TOO_LONG for e in episodes)


def make_runs(folder: Path, seeds: Sequence[int]) -> list[Run]:
    """The runs, by turns; one that is there is read."""
    found = []
    *by_turns, held = arms(Arm(name="").config(0))
    turns = [(arm, seed) for seed in seeds for arm in by_turns]
    for arm, seed in (*turns, (held, seeds[0])):
        workdir = folder / f"{arm.name.replace(' ', '_')}_{seed}"
        if not _is_complete(arm.config(seed), workdir):
            _run(arm.config(seed), workdir)
        found.append(read_run(arm.name, seed, workdir))
        if len(found[-1].reward) < arm.config(seed).num_steps:
            raise ValueError("stopped by a signal; the same command with --from goes on")
        print(f"{arm.name}, seed {seed}: {tokens_per_s(found[-1]):,.0f} tokens/s", flush=True)
    return sorted(found, key=lambda run: run.seed)


def _is_complete(config: Config, workdir: Path) -> bool:
    """Whether there is such a run, with its last evaluation."""
    path = workdir / "metrics.jsonl"
    if not path.exists() or read_workdir_config(workdir) != config:
        return False
    return any("eval" in row and row["step"] == config.num_steps for row in read_metrics(path))


def _run(config: Config, workdir: Path) -> None:
    """As `python -m earl_jax.main` does, in this process."""
    import jax

    from earl_jax.run import run

    # Programs come from the user's cache folder, for all runs alike.
    jax.clear_caches()
    run(config, workdir)


# What is written.


def curves(runs: Sequence[Run]) -> str:
    """Reward by step: ours, without a budget (dashed), and with the limit in another colour."""
    series = []
    for run in (run for run in runs if run.arm != "held small"):
        series.append(
            Series(
                name=f"{run.arm}, seed {run.seed}",
                xs=range(1, len(run.reward) + 1),
                ys=run.reward,
                color=1 if _is_limit(run) else 0,
                dashed=run.arm == "unconstrained",
            )
        )
    return curves_svg(series, label="mean reward", y_range=(-1.0, 1.0))


def _is_limit(run: Run) -> bool:
    return run.arm.startswith("limit")


def page(runs: Sequence[Run], pairs: Sequence[HeldPair], config: Config, note: str) -> str:
    """The Markdown page."""
    budget = config.selector.budget_bytes_per_device
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("jax", "jaxlib"))
    ours = [run for run in runs if run.arm == "ours"]
    lines = [
        "# The growing run",
        "",
        "`uv run python -m benchmarks.growing`: `configs/trail_tiny_cpu.py`, 8 virtual CPU devices",
        f"on {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()},",
        f"{versions}, {time.strftime('%Y-%m')}. The budget is {budget:,} bytes per device.",
        *([note] if note else []),
        "",
        *_table(runs, budget, {run.seed: tokens_per_s(run) for run in ours}),
        "",
        *_pairs_table(pairs, runs, config),
        "",
        "![reward by step](growing.svg)",
        "",
        *_learning(runs),
        "",
        *_timeline(ours[0], budget),
        "",
        *_READING,
    ]
    return "\n".join(lines) + "\n"


_READING = (
    "Bytes are exact: they are XLA's for the programs that ran. They are counted and not felt: a",
    "virtual CPU device has no memory of its own to run out of. Speeds are another matter: eight",
    "virtual devices share the machine's cores, so a mesh costs here what its collectives and its",
    "smaller matrices cost a core, and saves nothing that a network or a memory bus would. Ratios",
    "of two runs also differ by the episodes that were sampled, and by what else the machine did.",
    "",
    "A pair of meshes that is held still breaks the budget where an episode first needs a room",
    "that it has too little for; a run makes room a little earlier, when growth is foreseen. No",
    "mesh here fits the longest rows in the parts that the config names: ours comes to smaller",
    "ones there. 'held small' takes these from its first step on, and so fits too: a setting for",
    "the worst step, which somebody must know beforehand.",
    "",
    "The reward of a walk is paid when it is over. With the limit a walk that goes well is cut and",
    "paid -1 (config.rollout.unfinished_reward), so what was learnt until then is what costs the",
    "reward; without the limit nothing is cut.",
)


def _table(runs: Sequence[Run], budget: int, ours: Mapping[int, float]) -> list[str]:
    lines = [
        "| run | seed | contexts, first step to longest | most MiB per device | breaks the budget "
        "| tokens/s, ours = 1 | reward at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        step = run.breaks(budget)
        lines.append(
            f"| {run.arm} | {run.seed} | {run.longest[0]} to {max(run.longest)} ({run.growth:.0f}x)"
            f" | {max(run.peak_bytes) / 2**20:.2f} | {f'at step {step}' if step else 'never'} "
            f"| {tokens_per_s(run) / ours[run.seed]:.2f} | {run.last_reward:.3f} |"
        )
    return lines


def _pairs_table(pairs: Sequence[HeldPair], runs: Sequence[Run], config: Config) -> list[str]:
    budget, rooms = config.selector.budget_bytes_per_device, config.rollout.context_buckets
    free = [run for run in runs if run.arm == "unconstrained"]
    lines = [
        "Every pair of meshes, held still, MiB per device by room per episode, and the step at",
        f"which it breaks the budget of {budget / 2**20:.2f} MiB, seed by seed:",
        "",
        f"| rollout + training | {' | '.join(f'{room} tokens' for room in rooms)} | breaks it at |",
        "|---|" + "---|" * (len(rooms) + 1),
    ]
    for pair in pairs:
        steps = [
            pair.breaks([config.rollout.places_for(n) for n in run.longest], budget) for run in free
        ]
        cells = [f"{pair.need[room] / 2**20:.2f}" for room in rooms]
        told = ", ".join("never" if step is None else f"step {step}" for step in steps)
        lines.append(f"| {pair.name} | {' | '.join(cells)} | {told} |")
    return lines


def _learning(runs: Sequence[Run]) -> list[str]:
    """Whether the curve with a budget is the one without; and what the limit costs."""
    by_arm: dict[str, list[Run]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(run)
    ours, free = by_arm["ours"], by_arm["unconstrained"]
    (limited,) = [found for found in by_arm.values() if _is_limit(found[0])]
    apart = [
        statistics.fmean(abs(a - b) for a, b in zip(one.reward, other.reward, strict=True))
        for one, other in zip(ours, free, strict=True)
    ]
    spread = [
        statistics.fmean(abs(a - b) for a, b in zip(one.reward, other.reward, strict=True))
        for one, other in itertools.combinations(free, 2)
    ]
    lines = [
        "Mean distance between the reward curves with and without the budget, seed by seed: "
        f"{_numbers(apart)}; between those of two seeds without it: {_numbers(spread)}.",
        "",
        f"| seed | the limit first cuts at step | the three steps before | the worst three behind "
        f"| last {LAST} | cut in these | ours, worst three behind | last {LAST} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run, whole in zip(limited, ours, strict=True):
        first = next(step for step, share in enumerate(run.cut) if share > 0)
        lines.append(
            f"| {run.seed} | {first + 1} | {statistics.fmean(run.reward[first - 3 : first]):.3f} "
            f"| {worst_of_three(run.reward[first:]):.3f} | {run.last_reward:.3f} "
            f"| {statistics.fmean(run.cut[-LAST:]):.0%} "
            f"| {worst_of_three(whole.reward[first:]):.3f} | {whole.last_reward:.3f} |"
        )
    return lines


def _timeline(run: Run, budget: int) -> list[str]:
    """Where a run was from step to step."""
    lines = [
        f"Ours, seed {run.seed}, from step to step:",
        "",
        f"| steps | longest episode | meshes | most MiB per device, of {budget / 2**20:.2f} |",
        "|---|---|---|---|",
    ]
    start = 0
    for where, group in itertools.groupby(run.where):
        end = start + len(list(group))
        longest, most = max(run.longest[start:end]), max(run.peak_bytes[start:end])
        lines.append(f"| {start + 1} to {end} | {longest} | {where} | {most / 2**20:.2f} |")
        start = end
    return lines


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values) or "(one seed only)"


def command(arguments: Sequence[str]) -> None:
    """The whole command."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--from", dest="source", type=Path, help="a folder to keep the runs in")
    parser.add_argument("--note", default="", help="a sentence for the page, on the machine's load")
    flags = parser.parse_args(arguments)
    config = Arm(name="").config(0)
    start_jax(config.devices.platform, config.devices.num_cpu_devices)
    folder = flags.source or Path(tempfile.mkdtemp(prefix="earl_jax_growing_"))
    runs = make_runs(folder, [int(seed) for seed in flags.seeds.split(",")])
    lines = [json.dumps(dataclasses.asdict(run)) for run in runs]
    (HERE / "growing.jsonl").write_text("\n".join(lines) + "\n")
    (HERE / "growing.svg").write_text(curves(runs))
    (HERE / "growing.md").write_text(page(runs, held_pairs(config), config, flags.note))
    print((HERE / "growing.md").read_text())


if __name__ == "__main__":
    sys.exit(exit_status(lambda: command(sys.argv[1:])))
