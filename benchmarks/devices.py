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
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TURNS = 2
CHILD = """
import json, sys
from earl_jax.config_file import load_config_file, make_config
from earl_jax.main import start_jax
number = int(sys.argv[1])
config = make_config(load_config_file("configs/tictactoe_tiny_cpu.py"), [
    f"selector.rollout_meshes=('data={number}',)", f"selector.train_meshes=('data={number}',)",
    "selector.budget_bytes_per_device=0", "selector.measure_rounds=20",
    f"devices.num_cpu_devices={number}"])
start_jax("cpu", number)
from earl_jax.calibrate import Calibration
from earl_jax.selector.throughput import ThroughputTable
from earl_jax.world import World
calibration = Calibration(World(config), ThroughputTable(path=None, measurements={}), print)
calibration.rollout_options(40, 0)
calibration.train_options(40)
print(json.dumps(calibration.table.as_dict()))
"""


def main() -> None:
    """Measures in turns and prints the table."""
    best: dict[tuple[int, str], float] = {}
    for _ in range(TURNS):
        for number in (1, 2, 4, 8):
            for stage, speed in _measure(number).items():
                best[number, stage] = max(best.get((number, stage), 0.0), speed)
    print("| devices | rollout tokens/s | against 1 | training tokens/s | against 1 |")
    print("|---|---|---|---|---|")
    for number in (1, 2, 4, 8):
        rollout, train = best[number, "rollout"], best[number, "train"]
        ratios = rollout / best[1, "rollout"], train / best[1, "train"]
        print(f"| {number} | {rollout:,.0f} | {ratios[0]:.2f} | {train:,.0f} | {ratios[1]:.2f} |")


def _measure(number: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "child.py"
        script.write_text(CHILD)
        done = subprocess.run(
            [sys.executable, str(script), str(number)],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
    entries = json.loads(done.stdout.splitlines()[-1])
    return {entry.split()[0]: values["tokens_per_s"] for entry, values in entries.items()}


if __name__ == "__main__":
    main()
