# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Each algorithm on one small task with several seeds, and on Tic-Tac-Toe.

    uv run python -m benchmarks.algorithms [--only=NAME ...] [--game] [--write]

The task of staleness.py, with episodes of 1 to 4 turns: a policy of one layer that knows nothing
learns to answer one of eight letters with another. A step has 32 episodes, groups of eight that
share a task; the learning rate and the entropy bonus are the same for all, the other settings the
defaults. The table has the mean reward of a turn over tenths of the steps (1 is perfect, 0.125 is
chance): the mean over the seeds, and its standard deviation in the last tenth; "s" are a run's
seconds behind its first step, two runs at once.

The teacher of `distillation` is a run of GRPO with the seed TEACHER_SEED, which is played first.

With --game each plays configs/tictactoe_tiny_cpu.py instead, 240 steps in groups of eight with each
of GAME_SEEDS on one device, two runs at once, a core each; the table has the means of the last
evaluation, and the wins of each seed.
"""

import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import parser_of, show, table
from benchmarks.runs import ROOT, on_a_core_each, play
from benchmarks.staleness import JOBS, SETTINGS, curve_row, play_cells
from earl_jax.config.file import load_config_file
from earl_jax.telemetry.metrics import read_metrics

STEPS, GAME_STEPS = 120, 240
GAME_SEEDS, TEACHER_SEED = (0, 1, 2, 3, 4), 5
# Names of the table: algorithm, its settings, and those of config.train.
ALGORITHMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "reinforce (baseline of the batch)": ("reinforce", {}, {}),
    "reinforce (moving average)": ("reinforce", {"baseline": "ema"}, {}),
    "reinforce (each turn for itself)": ("reinforce", {"turn_discount": 0.0}, {}),
    "grpo": ("grpo", {}, {}),
    "dr_grpo": ("dr_grpo", {}, {}),
    "gigpo": ("gigpo", {}, {}),
    "gigpo (each turn for itself)": ("gigpo", {"turn_discount": 0.0}, {}),
    "dapo": ("dapo", {}, {}),
    "gspo": ("gspo", {}, {}),
    "cispo": ("cispo", {}, {}),
    "rloo": ("rloo", {}, {}),
    "reinforce_plus_plus": ("reinforce_plus_plus", {}, {}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}, {}),
    "ppo (GAE over tokens)": ("ppo", {}, {"critic": {"learning_rate": 3e-3}}),
    "ppo (GAE over turns)": ("ppo", {"gae_level": "turn"}, {"critic": {"learning_rate": 3e-3}}),
    "tba": ("tba", {"kl_coefficient": 0.1}, {}),
    "tba (a smaller coefficient)": ("tba", {"kl_coefficient": 0.02}, {}),
    "distillation": ("distillation", {}, {}),
}


def settings_of(name: str, folder: Path, seed: int) -> dict[str, Any]:
    """Returns the settings of a run; `folder` is for a teacher."""
    algorithm, arguments, train = ALGORITHMS[name]
    rollout = SETTINGS["rollout"] | {
        "num_slots": 32,
        "episodes_per_step": 32,
        "group_size": 8,
        "context_buckets": (64,),
    }
    return SETTINGS | {
        "num_steps": STEPS,
        "seed": seed,
        "env": SETTINGS["env"] | {"args": {"least_turns": 1, "most_turns": 4}},
        "algorithm": algorithm,
        "algorithm_args": arguments,
        "reference_from": teacher_of(name, settings_of, folder),
        "rollout": rollout,
        "devices": {"platform": "cpu", "num_cpu_devices": 1},
        "train": {"learning_rate": 1.5e-3, "entropy_coefficient": 0.02, **train},
    }


def game_settings_of(name: str, folder: Path, seed: int) -> dict[str, Any]:
    """Returns the settings of a run of Tic-Tac-Toe; `folder` is for a teacher."""
    algorithm, arguments, train = ALGORITHMS[name]
    config = load_config_file(ROOT / "configs" / "tictactoe_tiny_cpu.py").to_dict()
    # A reply is answered with the opponent's move alone: the state is the whole game so far.
    own = {"reinforce": {"turn_discount": 0.7}, "gigpo": {"anchor": "history"}}
    meshes = {f"{stage}_meshes": ("data=1",) for stage in ("rollout", "train")}
    return config | {
        "num_steps": GAME_STEPS,
        "seed": seed,
        "algorithm": algorithm,
        "algorithm_args": own.get(algorithm, {}) | arguments,
        "reference_from": teacher_of(name, game_settings_of, folder),
        "devices": {"platform": "cpu", "num_cpu_devices": 1},
        "rollout": config["rollout"] | {"group_size": 8},
        # Memory for a critic, on one device.
        "selector": {"table": "model", "budget_bytes_per_device": 2**30} | meshes,
        "train": config["train"] | train,
        "eval": {"every_steps": GAME_STEPS, "games": 128, "final_games": 512},
    }


def teacher_of(name: str, settings: Callable[..., dict[str, Any]], folder: Path) -> str:
    """Returns the workdir of the teacher, which is played if there is none; "" without one."""
    workdir = folder / "teacher"
    if name != "distillation":
        return ""
    if not workdir.exists():
        play(settings("grpo", folder, TEACHER_SEED), workdir)
    return str(workdir)


def game_rows(names: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Plays Tic-Tac-Toe with each algorithm and returns the table's rows."""
    runs = [game_settings_of(name, folder, seed) for name in names for seed in GAME_SEEDS]

    def run(number: int) -> dict[str, float]:
        workdir, start_s = folder / str(number), time.monotonic()
        play(runs[number], workdir)
        return last_games(workdir) | {"s": time.monotonic() - start_s}

    found = on_a_core_each(run, range(len(runs)), JOBS)
    size = len(GAME_SEEDS)
    return [game_row(name, found[size * i : size * (i + 1)]) for i, name in enumerate(names)]


def game_row(name: str, runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Returns the means over an algorithm's runs, one with each seed, and the wins of each."""
    means = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
    wins = ", ".join(f"{run['win %']:.1f}" for run in runs)
    return {"algorithm": name, "win %": means["win %"], "of each seed": wins} | means


def last_games(workdir: Path) -> dict[str, float]:
    """Returns the results of a run's last evaluation in per cent."""
    *_, last = (row["eval"] for row in read_metrics(workdir / "metrics.jsonl") if "eval" in row)
    return {f"{name} %": 100 * last[name] for name in ("win", "draw", "loss", "illegal")}


def main() -> None:
    """Runs all algorithms, or those that are named, and prints the table."""
    parser, rows = parser_of(__doc__), []
    parser.add_argument("--only", action="append", choices=ALGORITHMS, help="of these alone")
    parser.add_argument("--game", action="store_true", help="Tic-Tac-Toe")
    flags = parser.parse_args()
    if flags.only and flags.write:
        parser.error("--write replaces a whole table; leave --only out")
    names, page = flags.only or list(ALGORITHMS), Path(__file__).with_suffix(".md")
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        if flags.game:
            show(table(game_rows(names, folder)), page, write=flags.write, name="game")
            return
        cells = {name: functools.partial(settings_of, name, folder) for name in names}
        for name, runs in play_cells(cells):
            seconds = statistics.fmean(sum(run["seconds"]) for run in runs)
            row = {"algorithm": name} | curve_row([run["rewards"] for run in runs])
            rows.append(row | {"s": seconds})
            print(json.dumps(rows[-1]), flush=True)
    show(table(rows), page, write=flags.write)


if __name__ == "__main__":
    main()
