# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One queue for several processes against fixed parts, simulated: the time of a rollout.

    uv run python -m benchmarks.one_queue [--write]

Episodes come in groups of eight. A slot decodes a token a step, a step takes the same time whoever
is in it, and one process may be slower than the others. Lengths are log-normal, cut at 30 times
their median; three fifths of their variance are the group's. What a process takes, and when, is
decided by the product's own `Share`. There is no time of the host.
"""

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.pages import parser_of, show, table
from earl_jax.launch.cluster import Cluster
from earl_jax.rollout.share import share_of
from earl_jax.rollout.task import Task

PAGE = Path(__file__).with_suffix(".md")
SPEEDS, PROCESSES, FILLS, SIGMAS = (1.0, 0.8, 0.5), (2, 8), (2, 4, 8), (0.5, 1.0)
SLOTS, GROUP, SEEDS = 64, 8, 20


def lengths_of(num_groups: int, sigma: float, rng: random.Random) -> list[float]:
    """Returns the lengths of the groups' episodes, in medians."""
    lengths = list[float]()
    for _ in range(num_groups):
        common = rng.gauss(0, math.sqrt(0.6))
        each = (common + rng.gauss(0, math.sqrt(0.4)) for _ in range(GROUP))
        lengths += [min(30.0, math.exp(sigma * number)) for number in each]
    return lengths


def seconds(lengths: Sequence[float], speeds: Sequence[float], *, queue: bool) -> float:
    """Returns when the last episode is over, of processes with these speeds."""
    tasks = [Task(episode=number, group=number // GROUP) for number in range(len(lengths))]
    part = len(tasks) // len(speeds)
    taken = itertools.count()
    counts = list[int]()

    def add_to(counter: int, number: int, doing: str) -> int:
        counts.append(number)
        return sum(counts[:-1])

    def share(player: int) -> Any:
        def cut(items: Sequence[Any]) -> list[Sequence[Any]]:
            size = len(items) // len(speeds)
            return [items[size * i : size * (i + 1)] for i in range(len(speeds))]

        cluster = SimpleNamespace(
            players=range(len(speeds)),
            own=lambda items: cut(items)[player],
            parts=cut,
            new_counter=lambda: 0,
            add_to=add_to,
        )
        rows = 2 * part if queue else part
        return share_of(tasks, cast("Cluster", cluster), SLOTS, rows)

    shares = [share(player) for player in range(len(speeds))]
    waiting = [list(share.numbers) for share in shares]
    # When a slot is free, a number that orders slots of one moment, and the slot's process.
    free = [(0.0, next(taken), player) for player in range(len(speeds)) for _ in range(SLOTS)]
    heapq.heapify(free)
    end = 0.0
    while free:
        now, _, player = heapq.heappop(free)
        end = max(end, now)
        if not waiting[player]:
            waiting[player] += shares[player].take(1)
        if waiting[player]:
            length = lengths[waiting[player].pop(0)]
            heapq.heappush(free, (now + length / speeds[player], next(taken), player))
    return end


def rows() -> Iterator[dict[str, Any]]:
    """Yields for each case the time with fixed parts over that with one queue."""
    for speed, processes, fills, sigma in itertools.product(SPEEDS, PROCESSES, FILLS, SIGMAS):
        rng, gains = random.Random(0), list[float]()
        for _ in range(SEEDS):
            lengths = lengths_of(processes * fills * SLOTS // GROUP, sigma, rng)
            speeds = [speed] + [1.0] * (processes - 1)
            fixed, one = (seconds(lengths, speeds, queue=queue) for queue in (False, True))
            gains.append(fixed / one)
        yield {
            "speed of one process": speed,
            "processes": processes,
            "episodes a slot": fills,
            "sigma of lengths": sigma,
            "fixed parts / one queue": f"{statistics.fmean(gains):.2f}",
            "spread": f"{statistics.stdev(gains):.2f}",
        }


def main() -> None:
    """Simulates all cases, and prints the table."""
    args = parser_of(__doc__).parse_args()
    show(table(list(rows())), PAGE, write=args.write)


if __name__ == "__main__":
    main()
