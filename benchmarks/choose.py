# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Times the choice of a step's plans: python -m benchmarks.choose.

`choose_plans` for a published model on v5e and H100 pods, as many slots and rows as devices, over
all meshes and all ways to use them. Cold: the first question of a problem, when every footprint and
speed is computed. Warm: the same question by another table, as at each later step of a run. No
device is needed; one core.
"""

import itertools
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.pages import parser_of, table
from earl_jax.config.file import make_config
from earl_jax.placement.problem import find_model, planned_problem
from earl_jax.selector.candidates import Candidates
from earl_jax.selector.choose import choose_plans, full_step
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.plans import Plans
from earl_jax.selector.problem import Problem
from earl_jax.selector.table import ThroughputTable, key_of

TOPOLOGIES = ("v5e:4x4", "h100:1x8", "h100:64x8", "v5e:64x64", "h100:512x8")
# A dense model, and a mixture: an expert axis gives many more meshes.
MODELS = ("qwen2.5-7b", "qwen3-30b-a3b")
CONTEXTS = (1024, 131_072)
REPEATS = 5


def problem_on(topology: str, model: str) -> Problem:
    """Returns the problem of a run with a slot and a row for each device, 64 at least."""
    hardware = parse_topology(topology)
    number = max(64, hardware.num_devices)
    config = make_config(
        {
            "model": {"preset": model, "compute_dtype": "bfloat16"},
            "rollout": {
                "num_slots": number,
                "episodes_per_step": number,
                "chunk_size": 128,
                "burst": 16,
                "context_buckets": CONTEXTS,
            },
        }
    )
    found, vocab_size = find_model(config, None)
    return planned_problem(config, found, vocab_size, hardware, hardware.usable_bytes)


def measure() -> Iterator[dict[str, Any]]:
    """A row for each topology, model and context that fits."""
    for topology, model, context in itertools.product(TOPOLOGIES, MODELS, CONTEXTS):
        problem = problem_on(topology, model)
        step, seconds, plans, table = full_step(problem, context), [], Plans(), ThroughputTable()
        try:
            for _ in range(1 + REPEATS):
                start_s = time.process_time()
                plans = choose_plans(Candidates(problem, table), step, plans).plans
                seconds.append(time.process_time() - start_s)
                assert plans.train is not None
                # As after a step of a run: the next question is by a table with its speed.
                key = key_of(plans.train, context)
                table = table.with_speed(key, problem.update_speed(plans.train, context))
        except ValueError:
            # Nothing fits.
            continue
        yield {
            "topology": topology,
            "model": model,
            "context": context,
            "rollout meshes": len(problem.meshes("rollout", context)),
            "training plans": len(problem.train_plans(context)),
            "cold ms": 1e3 * seconds[0],
            "warm ms": 1e3 * min(seconds[1:]),
        }


if __name__ == "__main__":
    parser_of(__doc__, writes=False).parse_args()
    print(table(list(measure())))
