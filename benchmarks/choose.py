# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How long the choice of a step's meshes takes: python -m benchmarks.choose [--json].

All meshes of so many devices for both stages, those of long rows with the context axis too, each in
so many ways, with random bytes and speeds; no device is needed. The best of some choices, on one
core.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from typing import Any

from earl_jax.selector.candidates import (
    context_candidates,
    for_rows,
    rollout_candidates,
    rollout_context_candidates,
    train_candidates,
)
from earl_jax.selector.choose import Option, Settings
from earl_jax.selector.step_choice import Pair, Work, choose_step
from earl_jax.sharding.layout import MeshShape

NUM_DEVICES = (8, 64, 512, 4096)
# A dense model's and a mixture's: an expert axis gives many more meshes.
NUM_EXPERTS = (0, 128)
# Tokens of room per episode: from 8,192 on rows may be cut over `context` as well.
TOKENS = (1024, 131_072)
# Options a mesh: micro-batches and remat, or slots and pages.
WAYS = (1, 4)


def meshes_of(
    num_devices: int, num_experts: int, tokens: int
) -> tuple[list[MeshShape], list[MeshShape]]:
    """The candidates of a rollout and of training."""
    every = (num_devices, (), lambda _: None, num_experts)
    cut = (num_devices, lambda _: None, num_experts)
    return (
        rollout_candidates(*every) + for_rows(rollout_context_candidates(*cut), tokens),
        train_candidates(*every) + for_rows(context_candidates(*cut), tokens),
    )


def random_options(meshes: list[MeshShape], rng: random.Random) -> list[Option]:
    """Bytes from 1 to 99 and tokens per second from 1 to 9."""
    return [
        Option(mesh=mesh, bytes_per_device=rng.randint(1, 99), tokens_per_s=rng.uniform(1, 9))
        for mesh in meshes
    ]


def measure(repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each number of devices, experts, tokens and ways."""
    for num_devices, num_experts, tokens, ways in itertools.product(
        NUM_DEVICES, NUM_EXPERTS, TOKENS, WAYS
    ):
        rng = random.Random(0)
        to_play, to_train = meshes_of(num_devices, num_experts, tokens)
        rollouts = random_options(to_play * ways, rng)
        trains = random_options(to_train * ways, rng)
        resident = [rng.randint(1, 9) for _ in trains]
        seconds = []
        for _ in range(repeats):
            start_s = time.perf_counter()
            choose_step(
                rollouts,
                trains,
                resident_bytes=resident,
                current=Pair(to_play[0], to_train[0]),
                calm_steps=100,
                work=Work(
                    load=None,
                    rollout_places=1,
                    train_places=1,
                    rollout_tokens=1,
                    train_tokens=1,
                ),
                settings=Settings(budget_bytes=80, hysteresis=0.1, horizon_steps=20),
            )
            seconds.append(time.perf_counter() - start_s)
        yield {
            "devices": num_devices,
            "experts": num_experts,
            "tokens": tokens,
            "ways": ways,
            "rollout meshes": len(to_play),
            "training meshes": len(to_train),
            "pairs": len(rollouts) * len(trains),
            "choice ms": 1e3 * min(seconds),
        }


if __name__ == "__main__":
    from earl_jax.bench import write_table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="an object a line")
    flags = parser.parse_args()
    if flags.json:
        for row in measure(flags.repeats):
            print(json.dumps(row), flush=True)
    else:
        write_table(measure(flags.repeats))
