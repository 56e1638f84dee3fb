# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Two processes that take long-tailed episodes off one queue, beside fixed parts of them.

    uv run python -m benchmarks.shares [--steps=20] [--write]

Each process has a CPU device and is pinned to a core of its own. A step has 64 episodes of 1 to 24
turns (`benchmarks.asynchrony.LongTailed`), in groups of two, in 8 slots. All lines play the same
tokens. A rollout takes as long as the process that ends last; the other one waits.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.asynchrony import SETTINGS
from benchmarks.pages import replace_table, table
from benchmarks.pinned import run_pinned
from earl_jax.main import main as run_main
from earl_jax.rollout.actor import Actor
from earl_jax.telemetry.metrics import read_metrics

PAGE = Path(__file__).with_suffix(".md")
NUM = 2
# Steps at the start whose programs are compiled, or loaded.
WARM_UP = 3
# Names of the lines, and what they change.
LINES: dict[str, dict[str, Any]] = {
    "fixed parts": {},
    "fixed parts, longest first": {"order": "longest"},
    "one queue": {"order": "queue"},
}


def play(notes: str) -> None:
    """Runs the command; notes the seconds of its rollouts, and their episodes, process by process.

    Rollouts of steps have more episodes than there are slots, and those of evaluations have not.
    """
    actor_play = Actor.play

    def timed(self: Actor, session: Any, tasks: Any, share: Any, **others: Any) -> Any:
        start_s = time.perf_counter()
        rollout = actor_play(self, session, tasks, share, **others)
        if len(tasks) > self.rollout.num_slots:
            with Path(f"{notes}.{jax.process_index()}").open("a") as file:
                seconds = time.perf_counter() - start_s
                file.write(json.dumps([seconds, len(share.numbers)]) + "\n")
        return rollout

    Actor.play = timed
    run_main()


def measure(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """Runs a line. Returns its row."""
    line, workdir = LINES[name], folder / name.replace(" ", "_")
    rollout = SETTINGS["rollout"] | {
        "num_slots": 8,
        "episodes_per_step": 64,
        "order": line.get("order", "fifo"),
    }
    meshes = {"rollout_meshes": ("data=2",), "train_meshes": ("data=2",)}
    settings = SETTINGS | {
        "num_steps": WARM_UP + steps,
        "rollout": rollout,
        "selector": {"table": "model", **meshes},
        "devices": {"platform": "cpu", "num_cpu_devices": 1},
    }
    file, notes = folder / "config.py", folder / f"notes_{workdir.name}"
    file.write_text(
        "from ml_collections import ConfigDict\n"
        f"def get_config():\n    return ConfigDict({settings!r})\n"
    )
    program = f"from benchmarks import shares; shares.play({str(notes)!r})"
    run_pinned(["-c", program], [f"--config={file}", f"--workdir={workdir}"], NUM)
    each = [
        [json.loads(text) for text in Path(f"{notes}.{number}").read_text().splitlines()]
        for number in range(NUM)
    ]
    steps_of_both = list(zip(*each, strict=True))[WARM_UP:]
    last_s = [max(seconds for seconds, _ in step) for step in steps_of_both]
    both_s = [statistics.mean(seconds for seconds, _ in step) for step in steps_of_both]
    rows = [row for row in read_metrics(workdir / "metrics.jsonl") if "reward_mean" in row]
    timed = rows[WARM_UP:]
    tokens, seconds = sum(row["rollout_tokens"] for row in timed), sum(last_s)
    return {
        "": name,
        "s, the last": seconds / len(timed),
        "s, both": sum(both_s) / len(timed),
        "waiting": f"{100 * (1 - sum(both_s) / seconds):.0f} %",
        "tokens/s": tokens / seconds,
        "tokens a step": tokens / len(timed),
        "most episodes": max(number for step in steps_of_both for _, number in step),
        "dispatch s": statistics.median(row["stage_s"]["dispatch"] for row in timed),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="steps that count")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = table([measure(name, flags.steps, Path(folder)) for name in LINES])
    print(found)
    if flags.write:
        replace_table(PAGE, found)
