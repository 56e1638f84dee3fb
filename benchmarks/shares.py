# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Two processes that take long-tailed episodes off one queue, beside fixed parts of them.

    uv run python -m benchmarks.shares [--write]

Each process has a CPU device and is pinned to a core of its own. A step has 64 episodes of 1 to 24
turns (`benchmarks.asynchrony.LongTailed`), in groups of two, in 8 slots. All lines play the same
tokens. A rollout takes as long as the process that ends last; the other one waits.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks import runs
from benchmarks.asynchrony import SETTINGS
from benchmarks.pages import parser_of, show, table
from earl_jax.main import main as run_main
from earl_jax.rollout.actor import Actor

PAGE = Path(__file__).with_suffix(".md")
NUM = 2
# Steps at the start whose programs are compiled, or loaded, and those that count.
WARM_UP, STEPS = 3, 20
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


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Runs a line. Returns its row."""
    line, workdir = LINES[name], folder / name.replace(" ", "_")
    rollout = SETTINGS["rollout"] | {
        "num_slots": 8,
        "episodes_per_step": 64,
        "order": line.get("order", "fifo"),
    }
    meshes = {"rollout_meshes": ("data=2",), "train_meshes": ("data=2",)}
    settings = SETTINGS | {
        "num_steps": WARM_UP + STEPS,
        "rollout": rollout,
        "selector": {"table": "model", **meshes},
        "devices": {"platform": "cpu", "num_cpu_devices": 1},
    }
    notes = folder / f"notes_{workdir.name}"
    program = f"from benchmarks import shares; shares.play({str(notes)!r})"
    rows = runs.play(settings, workdir, NUM, program=["-c", program], pinned=True)
    each = [
        [json.loads(text) for text in Path(f"{notes}.{number}").read_text().splitlines()]
        for number in range(NUM)
    ]
    steps_of_both = list(zip(*each, strict=True))[WARM_UP:]
    last_s = [max(seconds for seconds, _ in step) for step in steps_of_both]
    both_s = [statistics.mean(seconds for seconds, _ in step) for step in steps_of_both]
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
    flags = parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = table([measure(name, Path(folder)) for name in LINES])
    show(found, PAGE, write=flags.write)
