# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The points of selector_regret.py: how a pair's step is timed, what it lost, and their file."""

import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Pair(NamedTuple):
    """The numbers of a rollout mesh and of a training mesh, in the order of the candidates."""

    rollout: int
    train: int


def regret(step_s: Mapping[Pair, float], chosen: Pair) -> tuple[float, Pair]:
    """By what fraction the chosen pair's step is longer than the best one's, and which that is."""
    best = min(step_s, key=lambda pair: step_s[pair])
    return step_s[chosen] / step_s[best] - 1.0, best


def pairs_within(
    rollout_bytes: Sequence[int],
    train_bytes: Sequence[int],
    resident_bytes: Sequence[int],
    budget: int | None,
) -> list[Pair]:
    """The pairs that the budget holds: the rollout beside what its trainer leaves on a device."""
    most = float("inf") if budget is None else budget
    pairs = itertools.product(range(len(rollout_bytes)), range(len(train_bytes)))
    return [
        Pair(r, t)
        for r, t in pairs
        if train_bytes[t] <= most and rollout_bytes[r] + resident_bytes[t] <= most
    ]


# A pair gets no more rounds that is so many times the best after the first round, and after others.
FAR = (2.0, 1.3)


def rivals(step_s: Mapping[Pair, float], chosen: Pair, rounds: int) -> list[Pair]:
    """The pairs that may still be the best after so many rounds, and the chosen one."""
    most = FAR[min(rounds, len(FAR)) - 1] * min(step_s.values())
    return [pair for pair, seconds in step_s.items() if seconds <= most or pair == chosen]


class Timed:
    """Something that is run a number of times; the shortest counts: disturbance only adds to it."""

    def __init__(self, run: Callable[[], Any]) -> None:
        """Runs nothing yet."""
        self._run, self.rounds, self.least_s = run, 0, float("inf")

    def once(self) -> None:
        """Runs it; before the first time once more, which compiles."""
        if not self.rounds:
            self._run()
        start_s = time.perf_counter()
        self._run()
        self.least_s = min(self.least_s, time.perf_counter() - start_s)
        self.rounds += 1


def time_pairs(
    rollouts: Mapping[int, Timed],
    trains: Mapping[int, Timed],
    pairs: Sequence[Pair],
    chosen: Pair,
    repeats: int,
) -> dict[Pair, float]:
    """Seconds of each pair's step. All take turns: what else the machine does falls on all."""
    left, number = list(pairs), 1
    while True:
        found = [rollouts[pair.rollout] for pair in left] + [trains[pair.train] for pair in left]
        behind = [timed for timed in dict.fromkeys(found) if timed.rounds < number]
        for timed in behind:
            timed.once()
        step_s = {p: rollouts[p.rollout].least_s + trains[p.train].least_s for p in pairs}
        left = rivals(step_s, chosen, number)
        if number < repeats:
            number += 1
        elif not behind:
            return step_s


def summary(lost: Sequence[float]) -> str:
    """How many points are within 5 and 10 % of the best, in words."""
    if not lost:
        return "no point was measured"
    near, within = (sum(one <= most for one in lost) for most in (0.05, 0.10))
    return (
        f"{near} of {len(lost)} points at most 5 % slower than the best ({near / len(lost):.0%}), "
        f"{within} at most 10 %, the worst {max(lost):.1%}"
    )


class Kept:
    """The file of points, and the selector's measurements beside it; nothing where `path` is None.

    What was measured for another config, or otherwise, is another thing (`same`).
    """

    def __init__(self, path: Path | None, config: Any, **how: Any) -> None:
        """Reads what there is."""
        told = json.dumps([dataclasses.asdict(config), how], sort_keys=True, default=str)
        self._path, self.same = path, hashlib.sha256(told.encode()).hexdigest()[:12]
        there = path is not None and path.exists()
        self.rows = [json.loads(line) for line in path.read_text().splitlines()] if there else []

    def has(self, kind: str, room: int) -> bool:
        """Whether this point is there."""
        key = (self.same, kind, room)
        return any((r.get("same"), r.get("load"), r.get("room")) == key for r in self.rows)

    def append(self, row: Mapping[str, Any]) -> None:
        """One more point."""
        self.rows.append({"same": self.same, **row})
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")

    def table(self) -> Any:
        """The selector's measurements for this config: it makes each once."""
        from earl_jax.selector.throughput import ThroughputTable

        if self._path is None:
            return None
        path = self._path.with_name(f"{self._path.stem}-{self.same}.table.json")
        if not path.exists():
            return ThroughputTable(path=path, measurements={})
        return ThroughputTable.from_dict(path, json.loads(path.read_text()))
