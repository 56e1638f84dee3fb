# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Each algorithm on one small task, with several seeds.

    uv run python -m benchmarks.algorithms [--write]

The task of staleness.py, with episodes of 1 to 4 turns: a policy of one layer that knows nothing
learns to answer one of eight letters with another. A step has 32 episodes, groups of eight that
share a task; learning rates are those of `ALGORITHMS`, the other settings the defaults. The table
has the mean reward of a turn over tenths of the steps (1 is perfect, 0.125 is chance): the mean
over the seeds, and its standard deviation in the last tenth.
"""

import functools
import json
from pathlib import Path
from typing import Any

from benchmarks.pages import parser_of, show, table
from benchmarks.staleness import SETTINGS, curve_row, play_cells

STEPS = 80
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
}


def settings_of(name: str, seed: int) -> dict[str, Any]:
    """Returns the settings of a run."""
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
        "rollout": rollout,
        "devices": {"platform": "cpu", "num_cpu_devices": 1},
        "train": {"learning_rate": 3e-3, "ratio": "model", **train},
    }


def main() -> None:
    """Runs all algorithms and prints the table."""
    flags, rows = parser_of(__doc__).parse_args(), []
    cells = {name: functools.partial(settings_of, name) for name in ALGORITHMS}
    for name, runs in play_cells(cells):
        rows.append({"algorithm": name} | curve_row([run["rewards"] for run in runs]))
        print(json.dumps(rows[-1]), flush=True)
    show(table(rows), Path(__file__).with_suffix(".md"), write=flags.write)


if __name__ == "__main__":
    main()
