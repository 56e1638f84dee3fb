# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What 8 virtual CPU devices cost against 1: a round of the engine and a training update.

    uv run python benchmarks/devices.py

Each number of devices is a process of its own; they take turns, and the best of all rounds counts.
Prints a Markdown table.
"""

import json
import subprocess
import sys

TURNS = 2
NUMBERS = (1, 2, 4, 8)


def main() -> None:
    """Measures in turns and prints the table."""
    best: dict[tuple[int, str], float] = {}
    for _ in range(TURNS):
        for number in NUMBERS:
            for stage, speed in _measure(number).items():
                best[number, stage] = max(best.get((number, stage), 0.0), speed)
    print("| devices | rollout tokens/s | against 1 | training tokens/s | against 1 |")
    print("|---|---|---|---|---|")
    for number in NUMBERS:
        rollout, train = best[number, "rollout"], best[number, "train"]
        ratios = rollout / best[1, "rollout"], train / best[1, "train"]
        print(f"| {number} | {rollout:,.0f} | {ratios[0]:.2f} | {train:,.0f} | {ratios[1]:.2f} |")


def _measure(number: int) -> dict[str, float]:
    """Returns the tokens/s of both stages on so many devices."""
    data = f"('data={number}',)"
    flags = [
        f"selector.rollout_meshes={data}",
        f"selector.train_meshes={data}",
        "selector.budget_bytes_per_device=0",
        f"devices.num_cpu_devices={number}",
    ]
    speeds = {}
    for stage in ("rollout", "train"):
        line = [sys.executable, "-m", "earl_jax.bench", stage, "--json"]
        line += [f"--config.{flag}" for flag in flags]
        done = subprocess.run(line, check=True, capture_output=True, text=True)
        speeds[stage] = json.loads(done.stdout.splitlines()[-1])["tokens/s"]
    return speeds


if __name__ == "__main__":
    main()
