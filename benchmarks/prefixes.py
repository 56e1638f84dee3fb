# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The host's time for the lookup of prompts that slots have in common, in milliseconds a round.

    uv run python -m benchmarks.prefixes

The prompts of groups begin with one system message. One slot of each group reads its prompt chunk
by chunk, and the others ask in each round whether it is there. Prompts come as arrays, made where
they are rendered (`Observation.array`); what that takes is measured beside. The last line is of
conversations in host memory that begin with one system message: the one that a prompt goes on from
is looked for. A table of rollout.md.
"""

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.pages import machine, parser_of, table
from earl_jax.engine.config import TILE_WIDTH
from earl_jax.engine.host_pages import HostPages
from earl_jax.engine.prefixes import PrefixIndex
from earl_jax.envs.text.conversation import Observation
from earl_jax.rollout.host_sessions import HostSessions, IdleSession

SLOTS, GROUP, TOKENS, SYSTEM, CHUNK = 256, 8, 16_384, 1024, 128
# Groups that come when all others have been read.
LATER = 4
# Conversations in host memory.
SESSIONS = 1000


def make_groups(number: int) -> list[list[tuple[int, ...]]]:
    """Returns the prompts of so many groups, each of its own, with a system message in common."""
    rng = np.random.default_rng(0)
    message = rng.integers(0, 150_000, SYSTEM)
    texts = [
        np.concatenate([message, rng.integers(0, 150_000, TOKENS - SYSTEM)]) for _ in range(number)
    ]
    return [[tuple(text.tolist()) for _ in range(GROUP)] for text in texts]


class Client:
    """Plays the rounds of prompts on an index, as the slots of a rollout do."""

    def __init__(self) -> None:
        self._index = PrefixIndex(num_slots=SLOTS, num_shards=1, least_tokens=TILE_WIDTH)
        # By slot: the prompt that it asks for; and the tokens of begun ones that are left to read.
        self.waiting: dict[int, np.ndarray] = {}
        self._left = np.zeros(SLOTS, np.int32)

    def give(self, first: int, prompts: Sequence[np.ndarray]) -> None:
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
        counts = np.minimum(CHUNK, self._left)
        self._left -= counts
        self._index.append(slice(None), counts)
        self._index.end_inputs()
        return 1e3 * (time.thread_time() - start_s)


def measure() -> Iterator[dict[str, Any]]:
    """Yields the milliseconds of the kinds of rounds."""
    texts, start_s = make_groups(SLOTS // GROUP + LATER), time.thread_time()
    prompts = [[Observation(ids).array for ids in each] for each in texts]
    rendered_ms = 1e3 * (time.thread_time() - start_s)
    client = Client()
    client.give(0, [prompt for each in prompts[LATER:] for prompt in each])
    # What is left of making the prompts is not collected while they are looked up.
    gc.collect()

    def line(rounds: str, times: Sequence[float]) -> dict[str, Any]:
        mean, most = statistics.mean(times), max(times)
        return {"rounds": rounds, "number": len(times), "mean, ms": mean, "most, ms": most}

    yield line(f"all {SLOTS} prompts come", [client.play()])
    waits = []
    while (number := len(client.waiting)) and len(waits) < TOKENS // CHUNK - 1:
        waits.append(client.play())
    yield line(f"{number} slots wait for the readers of their prompts", waits)
    yield line("they take the prompts over", [client.play()])
    assert not client.waiting, f"{len(client.waiting)} slots wait for nothing"
    comes = []
    for number, each in enumerate(prompts[:LATER]):
        client.give(number * GROUP, each)
        comes.append(client.play())
    yield line(f"a group of {GROUP} prompts comes", comes)
    yield line("beside: the array of a prompt", [rendered_ms / (SLOTS + LATER * GROUP)])
    yield line(f"a prompt is looked for among {SESSIONS:,} conversations", _find_sessions())


def _find_sessions() -> list[float]:
    """Returns the milliseconds in which 20 prompts find the conversations that they go on from."""
    rng, store = np.random.default_rng(0), HostSessions(HostPages(0, SLOTS), TILE_WIDTH)
    message = rng.integers(0, 150_000, SYSTEM)
    all_ids = [
        np.append(message, rng.integers(0, 150_000, TOKENS - SYSTEM)).astype(np.int32)
        for _ in range(SESSIONS)
    ]
    for ids in all_ids:
        store.add(IdleSession(ids=ids, parts=[], gone=(), least=0))
    times = []
    for ids in all_ids[:: SESSIONS // 20]:
        prompt, start_s = np.append(ids, ids[:CHUNK]), time.thread_time()
        _, common = store.find(prompt)
        times.append(1e3 * (time.thread_time() - start_s))
        assert common == TOKENS
    return times


if __name__ == "__main__":
    parser_of(__doc__, writes=False).parse_args()
    print(f"{table(list(measure()))}\n\n{machine()}")
