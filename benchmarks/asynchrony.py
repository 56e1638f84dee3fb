# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Streaming and asynchronous training beside the synchronous loop, on long-tailed episodes.

    uv run python -m benchmarks.asynchrony [--processes | --ladder] [--repeats=1] [--write]

Two CPU devices of a core each: one plays and one trains, or both do both in turn. Episodes have 1
to 24 turns of a log-normal number (median 3, sigma 1.0), so that the longest of a batch is many
times the mean; the policy is not trained to end its turns, a stop string does. Each run is a
process of its own, with the same tasks. A line's tokens/s are those trained on in the steps that
count: the most in a row in which no program was compiled or loaded (`counted_steps`). Beside them
is what the simulation says (simulate.py), with the rounds that each episode of the run took, and
the times of its rounds and updates. Runs in parts write a trace (config.log.trace), which has when
their gradients were computed.

With --repeats all lines run in turn so many times, and each shows its run of median tokens/s: the
speed of a busy machine changes by the minute.

With --processes the asynchronous runs have two processes of a device, each pinned to a core of its
own: one plays and the other trains, so that neither's threads are in the other's way. With --ladder
these two run each line of StreamRL's ladder, synchronous ones too, in steps of four times as many
episodes as slots, in groups of four: an order of episodes makes no difference where all begin at
once.
"""

import itertools
import json
import math
import random
import re
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages import parser_of, show, table
from benchmarks.runs import play
from benchmarks.simulate import COLUMNS, SATURATION, Setup, Times, timed
from benchmarks.simulate import run as simulate
from earl_jax.envs.environment import Start, StepResult
from earl_jax.rollout.event_files import read_events
from earl_jax.rollout.staleness import AsynchronyConfig
from earl_jax.telemetry.episodes import read_trajectories
from earl_jax.telemetry.trace import read_trace, trace_file

PAGE = Path(__file__).with_suffix(".md")
STEPS = 64
MOST_TURNS = 24
# Metrics of a step: tokens that the policy sampled, and those of it that were trained on.
SAMPLED_AND_TRAINED = ("rollout_tokens", "policy_tokens")
# Seconds of compilation from which on a step's times are not its own.
COMPILED_S = 0.05
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
        "context_buckets": (384,),
        "stop_strings": tuple("abcdefghijklmnopqrstuvwxyz0123456789"),
    },
    "devices": {"platform": "cpu", "num_cpu_devices": 2},
    "train": {"learning_rate": 1e-4, "epochs": 1},
    "eval": {"every_steps": 10_000, "games": 2, "final_games": 2},
    "checkpoint": {"every_steps": 10_000},
    "log": {"trajectories_every_steps": 10_000},
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
    "staleness 4, not interrupted": {"apart": True, "staleness": 4, "kv": "finish"},
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
            ("staleness 4, not interrupted", {"staleness": 4, "kv": "finish"}),
            ("staleness 4, wait", {"staleness": 4, "rule": "wait"}),
            ("staleness 12", {"staleness": 12}),
        )
    },
}

# Those of --ladder; each has what those before it have.
FEW_SLOTS = {"episodes_per_step": 64, "group_size": 4}
LONGEST = {**FEW_SLOTS, "order": "longest"}
LADDER: dict[str, dict[str, Any]] = {
    name: {"apart": True, "processes": 2, **line}
    for name, line in {
        "synchronous": {"rollout": FEW_SLOTS},
        "longest first": {"rollout": LONGEST},
        "streaming in 4 parts": {"rollout": LONGEST, "parts": 4},
        "staleness 1": {"rollout": LONGEST, "parts": 4, "staleness": 1},
        "staleness 4": {"rollout": LONGEST, "parts": 4, "staleness": 4},
        "staleness 4, first in, first out, whole": {"rollout": FEW_SLOTS, "staleness": 4},
    }.items()
}


class LongTailed:
    """Takes a log-normal number of replies; its reward depends on their lengths."""

    def __init__(self, *, seed: int) -> None:
        turns = random.Random(f"length {seed}").lognormvariate(1.1, 1.0)
        self.num_turns = self._left = max(1, min(MOST_TURNS, round(turns)))

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
    settings = {**SETTINGS, "num_steps": STEPS, "rollout": rollout_of(line)}
    settings["selector"] = {"table": "model", **(APART if "apart" in line else SHARED)}
    if "apart" in line:
        number = line.get("processes", 1)
        changes = {"num_cpu_devices": 2 // number, "num_rollout": 1}
        settings["devices"] = {**settings["devices"], **changes}
    kept = {name: line[name] for name in ("rule", "kv", "parts") if name in line}
    settings["asynchrony"] = {"max_staleness": line.get("staleness", 0), **kept}
    log = {"trajectories_every_steps": 1, "trace": "parts" in line}
    settings["log"] = {**SETTINGS["log"], **log}
    return settings


def rollout_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.rollout of a line."""
    return {**SETTINGS["rollout"], **line.get("rollout", {})}


def measure(name: str, given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs a line in processes of its own. Returns its row."""
    workdir, num_processes = folder / name.replace(" ", "_"), given.get("processes", 1)
    environment = {"PJRT_NPROC": str(THREADS)} if "apart" in given and num_processes == 1 else None
    settings, pinned = settings_of(given), num_processes > 1
    metrics = play(settings, workdir, num_processes, pinned=pinned, environment=environment)
    first, *counted = counted_steps(metrics, given.get("staleness", 0))
    seconds = counted[-1]["time_s"] - first["time_s"]
    tokens = sum(row["train_tokens"] for row in counted)
    sampled, trained = (sum(row[name] for row in metrics) for name in SAMPLED_AND_TRAINED)
    rows = sum(row["decode_rows"] for row in counted)
    episodes, lags = read_episodes(workdir), dict[int, int]()
    for row in counted:
        for lag, number in enumerate(row["staleness_tokens"]):
            lags[lag] = lags.get(lag, 0) + number
    return {
        "": name,
        "tokens/s": tokens / seconds,
        "steps": len(counted),
        "s a step": seconds / len(counted),
        "s of new weights": statistics.mean(row["stage_s"]["publish"] for row in counted),
        "tokens an episode": statistics.mean(row["context_tokens_mean"] for row in counted),
        "longest": max(row["context_tokens_max"] for row in counted),
        "trained of sampled": trained / sampled,
        "mean staleness": sum(lag * number for lag, number in lags.items()) / sum(lags.values()),
        "most": max(row["version_lag_max"] for row in counted),
        "busy rows": 1 - sum(row["idle_rows"] for row in counted) / rows,
        "read again": sum(row.get("recomputed_tokens", 0) for row in counted) / len(counted),
        **beside_simulation(
            given,
            counted,
            read_rounds(workdir),
            episodes,
            seconds,
            read_parts(workdir, num_processes - 1) if "parts" in given else {},
            read_part_tokens(workdir, episodes, rollout_of(given)["group_size"]),
        ),
    }


def counted_steps(
    metrics: Sequence[Mapping[str, Any]], staleness: int
) -> Sequence[Mapping[str, Any]]:
    """Returns the most steps in a row in which no program was compiled or loaded.

    The first `staleness` of them are left out, some of whose episodes were played while one was
    compiled, and the last of the run, in which there is less to play.
    """
    calm = itertools.groupby(metrics[: len(metrics) - staleness], key=is_calm)
    return max((list(rows) for calm, rows in calm if calm), key=len)[staleness:]


def is_calm(row: Mapping[str, Any]) -> bool:
    """Returns whether no program was compiled or loaded in a step."""
    return row.get("compile_s", 0.0) <= COMPILED_S


class Rounds(NamedTuple):
    """Rounds of a step: those until it took its first and its last groups, and those behind."""

    first: int
    waited: int
    beside: int


def read_rounds(workdir: Path) -> dict[int, Rounds]:
    """Returns the rounds of each step of an asynchronous or streaming run; {} of a synchronous one.

    Where new weights interrupt no episode, a step waits for those before the weights too.
    """
    taken, rounds, before = [], {}, 0
    for event in read_events(workdir):
        if event["event"] == "take":
            taken.append(event["round"])
        elif event["event"] == "trained" and taken:
            rounds[event["step"]] = Rounds(
                taken[0] - before, taken[-1] - before, event["round"] - taken[-1]
            )
            taken, before = [], event["round"]
    return rounds


class PartTimes(NamedTuple):
    """Seconds of a step whose groups come in parts, as the one before it.

    Its rounds until the first part was there. Each part, from when it was there and the gradients
    before it were, until its own are. The time between the rounds before a part was there and those
    after it. All else: the update behind the gradients, and what comes before the next rounds.
    """

    first_s: float
    parts_s: tuple[float, ...]
    hand_s: float
    rest_s: float


def read_parts(workdir: Path, trainer: int) -> dict[int, PartTimes]:
    """Returns the times of each step but the first, from the traces of a run.

    Process 0 plays, and process `trainer` trains.
    """
    played, trained = (
        spans_of_steps(read_trace(trace_file(workdir, process))) for process in (0, trainer)
    )
    found = {}
    for step, spans in trained.items():
        if not all("gradients" in trained.get(each, {}) for each in (step - 1, step)):
            continue
        rollouts = played[step]["rollout"]
        ends = [0.0, *(end for _, end in spans["gradients"])]
        hands = [after[0] - before[1] for before, after in itertools.pairwise(rollouts)]
        found[step] = PartTimes(
            first_s=rollouts[0][1] - rollouts[0][0],
            parts_s=tuple(
                end - max(there, before)
                for (_, end), (_, there), before in zip(
                    spans["gradients"], spans["rollout"], ends, strict=False
                )
            ),
            hand_s=statistics.mean(hands),
            rest_s=spans["rollout"][0][0] - trained[step - 1]["gradients"][-1][1],
        )
    return found


def spans_of_steps(
    events: Sequence[Mapping[str, Any]],
) -> dict[int, dict[str, list[tuple[float, float]]]]:
    """Returns when each stage of each step began and ended, in seconds, in order."""
    found: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        stages = found.setdefault(event["args"]["step"], {})
        begin_s = event["ts"] / 1e6
        stages.setdefault(event["name"], []).append((begin_s, begin_s + event["dur"] / 1e6))
    return found


def read_part_tokens(
    workdir: Path, episodes: Sequence[tuple[int, int]], group_size: int
) -> dict[int, list[int]]:
    """Returns the tokens of the groups that each step took at a time, by its events."""
    found: dict[int, list[int]] = {}
    for event in read_events(workdir):
        if event["event"] == "take":
            taken = [g * group_size + i for g in event["groups"] for i in range(group_size)]
            tokens = sum(episodes[episode][1] for episode in taken)
            found.setdefault(event["version"] + 1, []).append(tokens)
    return found


def read_episodes(workdir: Path) -> list[tuple[int, int]]:
    """Returns the rounds that each episode of a run took where it never waited, and its tokens.

    A reply of n tokens takes n / `burst` rounds, rounded up. The message before it is read in the
    first of them. The episodes are in the order of their tasks.
    """
    found, burst = {}, SETTINGS["rollout"]["burst"]
    for path in sorted((workdir / "trajectories").glob("step_*.jsonl")):
        for episode in read_trajectories(path):
            replies = re.findall("p+", "".join(episode["wrote"]))
            number = sum(math.ceil(len(reply) / burst) for reply in replies)
            found[episode["episode"]] = (number, episode["num_tokens"])
    return [found[episode] for episode in range(len(found))]


def times_of(
    rows: Sequence[Mapping[str, Any]],
    rounds: Mapping[int, Rounds],
    seconds: float,
    rollout: Mapping[str, Any],
    parts: Mapping[int, PartTimes],
    part_tokens: Mapping[int, Sequence[int]],
    num_processes: int,
) -> tuple[Times, float]:
    """Returns the times and the rounds of the steps with the metrics `rows`, which took `seconds`.

    `rounds` are those of their events, `rollout` is config.rollout, and `parts` and `part_tokens`
    are those of a run in parts. Where no round is beside an update, nothing is read again, and each
    round has `burst` decode steps of all slots, because the host finds the stop strings.
    """
    steps = [row["step"] for row in rows]
    waited, beside = (sum(rounds[step][i] for step in steps if rounds) for i in (1, 2))
    if not beside:
        decoded = rollout["num_slots"] * rollout["burst"]
        waited = sum(row["decode_rows"] for row in rows) / decoded
    alone, alone_s = waited, sum(row["stage_s"]["rollout"] for row in rows)
    busy = 1 - sum(row["idle_rows"] for row in rows) / sum(row["decode_rows"] for row in rows)
    live = rollout["num_slots"] * busy
    if parts and num_processes > 1:
        # Rounds behind the first part are beside gradients.
        first = [step for step in steps if rounds[step].first and step in parts]
        alone = sum(rounds[step].first for step in first)
        alone_s = sum(parts[step].first_s for step in first)
        if not beside:
            # All slots are at work until then.
            live = rollout["num_slots"]
    overlaps_s = {row["step"]: row["stage_s"].get("overlap", 0.0) for row in rows}
    overlap_s = sum(overlaps_s.values())
    if beside and num_processes > 1:
        # Each has a core, and the stage has meetings beside its rounds.
        alone_s = alone * overlap_s / beside
    # Where every step found its groups finished, no round was played alone.
    round_s = alone_s / alone if alone else overlap_s / beside
    in_parts = [parts[step] for step in steps if step in parts]
    # A step whose groups came in parts has no speed of training.
    # Of two processes one plays from when rows were sent until it hears of the update's end.
    whole = [
        max(row["stage_s"]["train"], overlaps_s[row["step"]] if num_processes > 1 else 0.0)
        for row in rows
        if row.get("train_tokens_per_s") is not None
    ]
    update_s, parts_s, fixed_s, hand_s = statistics.mean(whole or [0.0]), 0.0, 0.0, 0.0
    if in_parts:
        hand_s, rest_s = (
            statistics.mean(getattr(each, name) for each in in_parts)
            for name in ("hand_s", "rest_s")
        )
        parts_s = statistics.mean(sum(each.parts_s) for each in in_parts)
        costs = [
            each
            for step in steps
            if step in parts
            for each in zip(part_tokens[step], parts[step].parts_s, strict=True)
        ]
        fixed_s = min(parts_s, fixed_cost(costs) * len(costs) / len(in_parts))
    else:
        rest_s = max(0.0, (seconds - alone_s) / len(rows) - update_s)
    times = Times(
        round_s=round_s,
        live=live,
        beside_s=overlap_s / beside if beside else round_s,
        update_s=update_s,
        rest_s=rest_s,
        parts_s=parts_s,
        fixed_s=fixed_s,
        hand_s=hand_s,
    )
    return times, (waited + beside) / len(rows)


def fixed_cost(costs: Sequence[tuple[float, float]]) -> float:
    """Returns what each takes however large it is, of sizes and seconds by least squares."""
    sizes, seconds = zip(*costs, strict=True)
    if len(set(sizes)) == 1:
        return 0.0
    return max(0.0, statistics.linear_regression(sizes, seconds).intercept)


def beside_simulation(
    line: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    rounds: Mapping[int, Rounds],
    episodes: Sequence[tuple[int, int]],
    seconds: float,
    parts: Mapping[int, PartTimes],
    part_tokens: Mapping[int, Sequence[int]],
) -> dict[str, Any]:
    """Returns the times of a step, and what a simulation says of its rounds and of the tokens/s.

    None for lines that the simulation does not have. `rows` are the metrics of the steps that
    count, which took `seconds`; `rounds` and `episodes` are those of `read_rounds` and
    `read_episodes`, and `parts` and `part_tokens` those of `read_parts` and `read_part_tokens`, of
    a line in parts.
    """
    names = (*COLUMNS.values(), "rounds a step", "simulated", "tokens/s, simulated")
    if "apart" not in line:
        return dict.fromkeys(names)
    rollout, num_parts = rollout_of(line), line.get("parts", 1)
    num_processes, keeps = line.get("processes", 1), line.get("kv") in ("keep", "finish")
    times, num_rounds = times_of(rows, rounds, seconds, rollout, parts, part_tokens, num_processes)
    # What an episode plays in a round counts as a token.
    tokens_a_round = sum(tokens for _, tokens in episodes) / sum(number for number, _ in episodes)
    tokens_a_step = statistics.mean(row["train_tokens"] for row in rows) / tokens_a_round
    setup = Setup(
        devices=2,
        devices_per_instance=1,
        slots=rollout["num_slots"],
        groups=rollout["episodes_per_step"] // rollout["group_size"],
        group_size=rollout["group_size"],
        lengths=tuple(number for number, _ in episodes),
        saturation=SATURATION,
        burst=1,
        read=0.0 if keeps else rollout["chunk_size"] / tokens_a_round,
        queued=num_processes > 1,
        num_steps=len(episodes) // rollout["episodes_per_step"],
    )
    settings = AsynchronyConfig(
        max_staleness=line.get("staleness", 0),
        rule=line.get("rule", "in_order"),
        kv=line.get("kv", "recompute"),
        parts=num_parts,
    )
    setup, unit_s, train_s = timed(setup, times, tokens_a_step, num_parts)
    first, last = rows[0]["step"] - 1, rows[-1]["step"]
    order, behind = rollout.get("order", "fifo"), setup.num_steps - last
    found = simulate(setup, settings, order, train_s, warm_up=first, cool_down=behind)
    speed = found["speed"] * tokens_a_round / unit_s
    return dict(zip(names, (*times, num_rounds, found["rounds"], speed), strict=True))


def main() -> None:
    """Runs all lines and prints the table."""
    parser = parser_of(__doc__)
    lines = parser.add_mutually_exclusive_group()
    lines.add_argument("--processes", action="store_true", help="two, each with its own core")
    lines.add_argument("--ladder", action="store_true", help="StreamRL's, in two processes")
    parser.add_argument("--repeats", type=int, default=1)
    flags = parser.parse_args()
    name, lines = "table", LINES
    if flags.processes:
        name, lines = "table of processes", PINNED
    elif flags.ladder:
        name, lines = "table of the ladder", LADDER
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in lines}
    for _ in range(flags.repeats):
        for line, given in lines.items():
            with tempfile.TemporaryDirectory() as folder:
                runs[line].append(measure(line, given, Path(folder)))
            print(json.dumps(runs[line][-1]), flush=True)
    rows = [sorted(each, key=lambda row: row["tokens/s"])[len(each) // 2] for each in runs.values()]
    base = rows[0]["tokens/s"]
    text = table([{**row, "ratio": row["tokens/s"] / base} for row in rows])
    show(text, PAGE, write=flags.write, name=name)


if __name__ == "__main__":
    main()
