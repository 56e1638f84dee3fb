# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The host's time for the lookup of prompts that slots have in common, in milliseconds a round.

uv run python -m benchmarks.prefixes [--slots=256] [--group=8] [--tokens=16384] [--system=1024]

The prompts of groups begin with one system message. One slot of each group reads its prompt chunk
by chunk, and the others ask in each round whether it is there.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.pages import machine, table
from earl_jax.engine.config import TILE_WIDTH
from earl_jax.engine.prefixes import PrefixIndex

CHUNK = 128


def make_groups(groups: int, group: int, tokens: int, system: int) -> list[list[list[int]]]:
    """Returns the prompts of groups, each a list of its own, with a system message in common."""
    rng = np.random.default_rng(0)
    message = rng.integers(0, 150_000, system)
    texts = [
        np.concatenate([message, rng.integers(0, 150_000, tokens - system)]) for _ in range(groups)
    ]
    return [[text.tolist() for _ in range(group)] for text in texts]


class Client:
    """Plays the rounds of prompts on an index, as the slots of a rollout do."""

    def __init__(self, index: PrefixIndex, num_slots: int) -> None:
        self._index, self._num_slots = index, num_slots
        # By slot: the prompt that it asks for; and the tokens of begun ones that are left to read.
        self.waiting: dict[int, list[int]] = {}
        self._left: dict[int, int] = {}

    def give(self, first: int, prompts: Sequence[list[int]]) -> None:
        """Gives prompts to the slots from the first on."""
        self.waiting |= {first + slot: prompt for slot, prompt in enumerate(prompts)}

    def play(self) -> float:
        """Plays a round. Returns the milliseconds of processor time that the index took."""
        start_s = time.thread_time()
        for slot, prompt in list(self.waiting.items()):
            shared = self._index.find(slot, prompt)
            if shared is not None:
                self._index.begin(slot, prompt, shared)
                self._left[slot] = len(prompt) - shared.length
                del self.waiting[slot]
        for slot in range(self._num_slots):
            number = min(CHUNK, self._left.get(slot, 0))
            self._index.append(slot, number)
            if number:
                self._left[slot] -= number
        self._index.end_inputs()
        return 1e3 * (time.thread_time() - start_s)


def measure(index: Any, slots: int, group: int, tokens: int, system: int) -> Iterator[dict]:
    """Yields the milliseconds of the kinds of rounds."""
    client, later = Client(index, slots), 4
    prompts = make_groups(slots // group + later, group, tokens, system)
    client.give(0, [prompt for each in prompts[later:] for prompt in each])

    def line(rounds: str, times: Sequence[float]) -> dict[str, Any]:
        mean, most = statistics.mean(times), max(times)
        return {"rounds": rounds, "number": len(times), "mean, ms": mean, "most, ms": most}

    yield line(f"all {slots} prompts come", [client.play()])
    waits = []
    while (number := len(client.waiting)) and len(waits) < tokens // CHUNK - 1:
        waits.append(client.play())
    yield line(f"{number} slots wait for the readers of their prompts", waits)
    yield line("they take the prompts over", [client.play()])
    assert not client.waiting, f"{len(client.waiting)} slots wait for nothing"
    comes = []
    for number, each in enumerate(prompts[:later]):
        client.give(number * group, each)
        comes.append(client.play())
    yield line(f"a group of {group} prompts comes", comes)


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--system", type=int, default=1024)
    flags = parser.parse_args()
    index = PrefixIndex(num_slots=flags.slots, num_shards=1, least_tokens=TILE_WIDTH)
    print(table(list(measure(index, flags.slots, flags.group, flags.tokens, flags.system))))
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
