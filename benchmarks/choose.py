# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How long the choice of a step's meshes takes: python -m benchmarks.choose [--json].

All meshes of so many devices for both stages, with random bytes and speeds; no device is needed.
The best of some choices, on one core.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from typing import Any

from earl_jax.selector.candidates import rollout_candidates, train_candidates
from earl_jax.selector.choose import Option, Settings
from earl_jax.selector.step_choice import Pair, Work, choose_step
from earl_jax.sharding.layout import MeshShape

NUM_DEVICES = (8, 64, 512, 4096)
# A dense model's and a mixture's: an expert axis gives many more meshes.
NUM_EXPERTS = (0, 128)


def random_options(meshes: list[MeshShape], rng: random.Random) -> list[Option]:
    """Bytes from 1 to 99 and tokens per second from 1 to 9."""
    return [
        Option(mesh=mesh, bytes_per_device=rng.randint(1, 99), tokens_per_s=rng.uniform(1, 9))
        for mesh in meshes
    ]


def measure(repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each number of devices and experts."""
    for num_devices in NUM_DEVICES:
        for num_experts in NUM_EXPERTS:
            rng = random.Random(0)
            rollouts, trains = (
                random_options(make(num_devices, (), lambda _: None, num_experts), rng)
                for make in (rollout_candidates, train_candidates)
            )
            seconds = []
            for _ in range(repeats):
                start_s = time.perf_counter()
                choose_step(
                    rollouts,
                    trains,
                    resident_bytes=[rng.randint(1, 9) for _ in trains],
                    current=Pair(rollouts[0].mesh, trains[0].mesh),
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
                "rollout meshes": len(rollouts),
                "training meshes": len(trains),
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
