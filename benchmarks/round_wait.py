# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The wait for environments before a round, simulated: turns a second by `patience_s`.

    uv run python -m benchmarks.round_wait [--write]

A round takes the same time whoever plays in it. A turn takes 1, 2 or 4 to 12 rounds, an environment
the seconds of its kind and length, each at once in a thread of its own. There is no noise, and no
time of the host. Everybody begins together.
"""

import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.pages import parser_of, show, table
from earl_jax.envs.round_wait import RoundWait

PAGE = Path(__file__).with_suffix(".md")
PATIENCE: tuple[float | str, ...] = (0.0, 0.03, "auto")
ROUNDS_S, SLOTS, TURNS, LENGTHS_S = (0.003, 0.03, 0.3), (8, 64), (1, 2, 8), (0.001, 0.01, 0.1, 1.0)
# Seconds of a slot's environment, where its kind's are `length_s` long.
KINDS: dict[str, Callable[[random.Random, int, float], float]] = {
    "equally slow": lambda rng, slot, length_s: length_s * rng.uniform(0.9, 1.1),
    "exponential": lambda rng, slot, length_s: rng.expovariate(1 / length_s),
    "one slow": lambda rng, slot, length_s: length_s if slot == 0 else 1e-4,
    "quick": lambda rng, slot, length_s: 1e-4,
    "half slow": lambda rng, slot, length_s: length_s if slot % 2 else 1e-4,
}


def turns_a_s(
    patience_s: float | str, round_s: float, num_slots: int, turn: int, kind: str, length_s: float
) -> float:
    """Returns the turns a second of 40 turns a slot."""
    rng = random.Random(0)

    def rounds() -> int:
        return max(1, round(turn * rng.uniform(0.5, 1.5))) if turn > 1 else 1

    left = {slot: rounds() for slot in range(num_slots)}
    # When answers come, of which slot, and when the environment was asked.
    coming: list[tuple[float, int, float]] = []
    new, slow = set[int](), set[int]()
    now_s, done = 0.0, 0

    def take() -> int:
        """Takes the answers that are there now; returns their number."""
        number = 0
        while coming and coming[0][0] <= now_s:
            at_s, slot, asked_s = heapq.heappop(coming)
            (slow.add if at_s - asked_s > round_s else slow.discard)(slot)
            new.discard(slot)
            left[slot], number = rounds(), number + 1
        return number

    while done < 40 * num_slots:
        wait, start_s, answered = RoundWait(round_s, len(left)), now_s, 0
        while True:
            answered += take()
            if patience_s == "auto":
                left_s = wait.left_s(now_s, len(new - slow), answered)
            else:
                left_s = start_s + float(patience_s) - now_s if new else 0.0
            next_s = coming[0][0] if coming else float("inf")
            if left and now_s + max(0.0, left_s) < next_s:
                now_s += max(0.0, left_s)
                break
            now_s = next_s
        now_s += round_s
        new.clear()
        for slot in list(left):
            left[slot] -= 1
            if not left[slot]:
                del left[slot]
                new.add(slot)
                heapq.heappush(coming, (now_s + KINDS[kind](rng, slot, length_s), slot, now_s))
                done += 1
    return done / now_s


def cells() -> Iterator[dict[str, Any]]:
    """Yields for each case the turns a second over those of the best patience."""
    names = ("round_s", "slots", "rounds a turn", "environments", "their s")
    kinds = [kind for kind in KINDS if kind != "quick"]
    for case in itertools.product(ROUNDS_S, SLOTS, TURNS, kinds, LENGTHS_S):
        found = {each: turns_a_s(each, *case) for each in PATIENCE}
        best = max(found.values())
        yield dict(zip(names, case, strict=True)) | {p: found[p] / best for p in PATIENCE}


def summary(every: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields a line for each patience: the turns a second over those of the best, by `round_s`."""
    for patience_s in PATIENCE:
        line: dict[str, Any] = {"`patience_s`": f"{patience_s}"}
        for round_s in ROUNDS_S:
            of_round = [each[patience_s] for each in every if each["round_s"] == round_s]
            name = f"rounds of {1e3 * round_s:g} ms"
            line[f"{name}, mean"] = f"{statistics.mean(of_round):.2f}"
            line[f"{name}, worst"] = f"{min(of_round):.2f}"
        yield line


def one_slow() -> Iterator[dict[str, Any]]:
    """Yields the turns a second of 8 slots, one with a slow environment, over those of 7 alone."""
    for round_s, turn in itertools.product(ROUNDS_S, TURNS):
        line: dict[str, Any] = {"round_s": f"{round_s}", "rounds a turn": turn}
        for each in PATIENCE:
            slow = turns_a_s(each, round_s, 8, turn, "one slow", 1.0)
            line[f"{each}"] = f"{slow / turns_a_s(each, round_s, 7, turn, 'quick', 1.0):.2f}"
        yield line


def main() -> None:
    """Simulates all cases, and prints the tables."""
    args = parser_of(__doc__).parse_args()
    every = list(cells())
    show(table(list(summary(every))), PAGE, write=args.write, name="all")
    worst = sorted((e for e in every if e["auto"] < 0.97 * e[0.03]), key=lambda e: e["auto"])
    lines = [{f"{k}": f"{v:.2f}" if k in PATIENCE else f"{v}" for k, v in e.items()} for e in worst]
    show(table(lines), PAGE, write=args.write, name="worse")
    show(table(list(one_slow())), PAGE, write=args.write, name="slow")


if __name__ == "__main__":
    main()
