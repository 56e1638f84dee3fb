# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Streaming and asynchronous training beside the synchronous loop, on long-tailed episodes.

    uv run python -m benchmarks.asynchrony [--processes] [--write]

Two CPU devices of a core each: one plays and one trains, or both do both in turn. Episodes have 1
to 24 turns of a log-normal number (median 3, sigma 1.0), so that the longest of a batch is many
times the mean; the policy is not trained to end its turns, a stop string does. Each run is a
process of its own, with the same tasks. The first steps do not count, which compile or load
programs. A line's tokens/s are those trained on in the steps that count, by the seconds from the
first to the last of them, without those that programs took which were compiled or loaded there
(`compile_excess_s`): which shapes come up, and when, depends on time in an asynchronous run. Beside
them is what the simulation says (simulate.py), with the lengths of the run and the times of its
rounds and updates.

With --processes the asynchronous runs have two processes of a device, each pinned to a core of its
own: one plays and the other trains, so that neither's threads are in the other's way.
"""

import json
import math
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pages import parser_of, show, table
from benchmarks.runs import play
from benchmarks.simulate import Setup
from benchmarks.simulate import run as simulate
from earl_jax.envs.environment import Start, StepResult
from earl_jax.envs.tasks import Seeds
from earl_jax.rollout.events import EVENTS, read_events
from earl_jax.rollout.staleness import AsynchronyConfig

PAGE = Path(__file__).with_suffix(".md")
STEPS = 40
LONGEST = 24
# Steps at the start whose programs are compiled, or loaded.
WARM_UP = 6
# Seconds of compilation from which on a step's times are not its own.
COMPILED_S = 0.05
# Tokens of an episode and of its environment in a round, about: a turn has 11 on the average, and
# takes one round for its message and the first tokens of the reply, and one for every 4 more.
TOKENS_A_ROUND = 6
MODEL = {"num_layers": 2, "width": 128, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 512}
SETTINGS: dict[str, Any] = {
    "env": {"name": "benchmarks.asynchrony:LongTailed"},
    "algorithm": "grpo",
    "model": {**MODEL, "compute_dtype": "float32"},
    "rollout": {
        "num_slots": 16,
        "episodes_per_step": 16,
        "group_size": 2,
        "chunk_size": 64,
        "burst": 4,
        "max_turn_tokens": 24,
        "context_buckets": (512,),
        "stop_strings": tuple("abcdefghijklmnopqrstuvwxyz0123456789"),
    },
    "devices": {"platform": "cpu", "num_cpu_devices": 2},
    "train": {"learning_rate": 1e-4, "epochs": 1},
    "eval": {"every_steps": 10_000, "games": 2, "final_games": 2},
    "checkpoint": {"every_steps": 10_000},
    "log": {"trajectories_every_steps": 10_000, "report_every_steps": 10_000},
}
SHARED = {"rollout_meshes": ("data=2",), "train_meshes": ("data=2",)}
# Threads of XLA's CPU client where devices are apart. The package has more, for collectives, which
# these lines have none of; with so many the threads of an update crowd out those of a round.
THREADS = 4
APART = {"rollout_meshes": ("data=1",), "train_meshes": ("data=1",)}
# Names of the lines, and what they change.
LINES: dict[str, dict[str, Any]] = {
    "synchronous, devices apart": {"apart": True},
    "synchronous, devices shared": {},
    "streaming in 4 parts, apart": {"apart": True, "parts": 4},
    "asynchronous, shared, staleness 2": {"staleness": 2},
    "asynchronous, apart, staleness 1": {"apart": True, "staleness": 1},
    "asynchronous, apart, staleness 4": {"apart": True, "staleness": 4},
    "the same, kv kept": {"apart": True, "staleness": 4, "kv": "keep"},
    "asynchronous, apart, staleness 12": {"apart": True, "staleness": 12},
    "staleness 4, streaming in 4 parts": {"apart": True, "staleness": 4, "parts": 4},
    "asynchronous, apart, staleness 4, wait": {"apart": True, "staleness": 4, "rule": "wait"},
}

# Those of --processes: what is synchronous has one process with both cores.
PINNED: dict[str, dict[str, Any]] = {
    "synchronous, devices apart": {"apart": True},
    "synchronous, devices shared": {},
    **{
        f"two processes, {words}": {"apart": True, "processes": 2, **changes}
        for words, changes in (
            ("staleness 1", {"staleness": 1}),
            ("staleness 4", {"staleness": 4}),
            ("staleness 4, kv kept", {"staleness": 4, "kv": "keep"}),
            ("staleness 4, wait", {"staleness": 4, "rule": "wait"}),
            ("staleness 12", {"staleness": 12}),
        )
    },
}


class LongTailed:
    """Takes a log-normal number of replies; its reward depends on their lengths."""

    def __init__(self, *, seed: int) -> None:
        turns = random.Random(f"length {seed}").lognormvariate(1.1, 1.0)
        self.num_turns = self._left = max(1, min(LONGEST, round(turns)))

    def start(self) -> Start:
        """Returns the first message."""
        return Start(text=f"{self._left} to go")

    def step(self, reply: str) -> StepResult:
        """Counts a reply."""
        self._left -= 1
        reward = (len(reply) % 5) / 5
        if not self._left:
            return StepResult(text="", reward=reward, done=True, stop_reason="end")
        return StepResult(text=f"{self._left} to go", reward=reward, done=False)


def settings_of(line: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a line's run."""
    settings = {**SETTINGS, "num_steps": STEPS}
    settings["selector"] = {"table": "model", **(APART if "apart" in line else SHARED)}
    if "apart" in line:
        number = line.get("processes", 1)
        changes = {"num_cpu_devices": 2 // number, "num_rollout": 1}
        settings["devices"] = {**settings["devices"], **changes}
    kept = {name: line[name] for name in ("rule", "kv", "parts") if name in line}
    settings["asynchrony"] = {"max_staleness": line.get("staleness", 0), **kept}
    return settings


def measure(name: str, given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs a line in processes of its own. Returns its row."""
    workdir, number = folder / name.replace(" ", "_"), given.get("processes", 1)
    environment = {"PJRT_NPROC": str(THREADS)} if "apart" in given and number == 1 else None
    settings, pinned = settings_of(given), number > 1
    metrics = play(settings, workdir, number, pinned=pinned, environment=environment)
    counted = metrics[WARM_UP:]
    compiled_s = compile_excess_s(counted[1:])
    seconds = counted[-1]["time_s"] - counted[0]["time_s"] - compiled_s
    tokens = sum(row["train_tokens"] for row in counted[1:])
    rows = sum(row["decode_rows"] for row in counted)
    lags: dict[int, int] = {}
    for row in counted:
        for lag, number in enumerate(row["staleness_tokens"]):
            lags[lag] = lags.get(lag, 0) + number
    return {
        "": name,
        "tokens/s": tokens / seconds,
        "s a step": seconds / (len(counted) - 1),
        "tokens an episode": statistics.mean(row["context_tokens_mean"] for row in counted),
        "longest": max(row["context_tokens_max"] for row in counted),
        "mean staleness": sum(lag * number for lag, number in lags.items()) / sum(lags.values()),
        "most": max(row["version_lag_max"] for row in counted),
        "busy rows": 1 - sum(row["idle_rows"] for row in counted) / rows,
        "read again": sum(row.get("recomputed_tokens", 0) for row in counted) / len(counted),
        "compiling s": compiled_s,
        **beside_simulation(given, counted[1:], read_rounds(workdir), seconds),
    }


def compile_excess_s(rows: list[dict[str, Any]]) -> float:
    """Returns the seconds that steps with compiled or loaded programs took because of them.

    These are what the stages of the trainer took beyond their medians, because tracing counts too.
    Nothing is played meanwhile. Other stages have their programs behind the first steps.
    """
    stages, others = ("dispatch", "train"), ordinary(rows)
    usual = {name: statistics.median(row["stage_s"][name] for row in others) for name in stages}
    compiled = [row for row in rows if row not in others]
    return sum(max(0.0, row["stage_s"][name] - usual[name]) for row in compiled for name in stages)


def ordinary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the steps in which no program was compiled or loaded."""
    return [row for row in rows if row.get("compile_s", 0.0) <= COMPILED_S]


def read_rounds(workdir: Path) -> dict[int, tuple[int, int]]:
    """Returns the rounds that each step waited for its groups, and those beside its update."""
    if not (workdir / EVENTS).exists():
        return {}
    published, taken, rounds = {}, {}, {}
    for event in read_events(workdir):
        if event["event"] == "publish":
            published[event["version"] + 1] = event["round"]
        elif event["event"] == "take":
            taken[event["step"] + 1] = event["round"]
        elif event["event"] == "trained":
            step = event["step"]
            waited = taken[step] - published.get(step, 0)
            rounds[step] = (waited, event["round"] - taken[step])
    return rounds


def beside_simulation(
    line: dict[str, Any],
    rows: list[dict[str, Any]],
    rounds: dict[int, tuple[int, int]],
    seconds: float,
) -> dict[str, Any]:
    """Returns the rounds of a step, and what a simulation says of them and of the tokens/s.

    None for lines that the simulation does not have, or that have no rounds beside updates.
    `rows` are the metrics of the steps that count, which took `seconds`.
    """
    if "apart" not in line or "staleness" not in line or "parts" in line:
        return dict.fromkeys(("rounds a step", "simulated", "tokens/s, simulated"))
    waited, beside = (sum(rounds[row["step"]][i] for row in rows) for i in (0, 1))
    stage_s = {
        name: sum(row["stage_s"].get(name, 0.0) for row in rows) for name in ("rollout", "overlap")
    }
    beside_s = stage_s["overlap"] / beside
    # Where every step found its groups finished, no round was played alone.
    alone_s = stage_s["rollout"] / waited if waited else beside_s
    tokens = sum(row["train_tokens"] for row in rows)
    train_s = len(rows) * statistics.mean(row["stage_s"]["train"] for row in ordinary(rows))
    tokens_a_turn = sum(row["context_tokens_mean"] for row in rows)
    tokens_a_turn /= sum(row["turns_mean"] for row in rows)
    rollout = SETTINGS["rollout"]
    number, size = rollout["episodes_per_step"], rollout["group_size"]
    steps = rows[-1]["step"]
    source = Seeds(seed=0, num_tasks=number // size, environment=LongTailed)
    turns = [LongTailed(**task).num_turns for step in range(steps) for task in source.batch(step)]
    # In units of the time in which a round alone plays one token of an episode.
    unit_s = alone_s / TOKENS_A_ROUND
    setup = Setup(
        devices=2,
        devices_per_instance=1,
        slots=rollout["num_slots"],
        groups=number // size,
        group_size=size,
        lengths=tuple(round(each * tokens_a_turn) for each in turns for _ in range(size)),
        saturation=math.inf,
        burst=TOKENS_A_ROUND,
        read=0 if line.get("kv") == "keep" else rollout["chunk_size"],
        publish=max(0.0, seconds - stage_s["rollout"] - train_s) / len(rows) / unit_s,
        beside=beside_s / alone_s,
        num_steps=steps,
    )
    settings = AsynchronyConfig(max_staleness=line["staleness"], rule=line.get("rule", "in_order"))
    found = simulate(setup, settings, "fifo", train_s / tokens / unit_s, warm_up=WARM_UP + 1)
    return {
        "rounds a step": (waited + beside) / len(rows),
        "simulated": found["rounds"],
        "tokens/s, simulated": found["speed"] / unit_s,
    }


def main() -> None:
    """Runs all lines and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--processes", action="store_true", help="two, each with its own core")
    flags = parser.parse_args()
    rows, lines = [], PINNED if flags.processes else LINES
    with tempfile.TemporaryDirectory() as folder:
        for name, given in lines.items():
            rows.append(measure(name, given, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    base = rows[0]["tokens/s"]
    text = table([{**row, "ratio": row["tokens/s"] / base} for row in rows])
    name = "table of processes" if flags.processes else "table"
    show(text, PAGE, write=flags.write, name=name)


if __name__ == "__main__":
    main()
