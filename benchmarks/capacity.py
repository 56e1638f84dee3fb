# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The longest episode that a fixed budget holds on 8 devices, by rollout mesh.

    uv run python -m benchmarks.capacity [--write]

One episode per row shard, beside a trainer on data=1,fsdp=8. An episode fits if the bytes do that
the selector computes, and XLA's memory analysis of the rollout's program at that length. Keys and
values of a token are 48 KiB, so that pages take nearly all of the budget. With --write the table
goes into capacity.md.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pages import parser_of, show, table
from earl_jax.config.file import make_config
from earl_jax.launch.start import start_jax
from earl_jax.placement.stages import Stages, compiled_bytes
from earl_jax.run.build import build_run
from earl_jax.selector.plans import RolloutPlan
from earl_jax.selector.problem import Problem
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape

BUDGET = 2**30
PAGE = Path(__file__).with_suffix(".md")
MESHES = (
    "data=8",
    "data=4,tensor=2",
    "data=2,tensor=4",
    "tensor=8",
    "data=4,context=2",
    "data=2,context=4",
    "context=8",
    "data=2,context=2,tensor=2",
)
TRAINER = MeshShape(fsdp=8)
MODEL = {
    "num_layers": 3,
    "width": 16,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_size": 256,
    "ffn_size": 32,
}
GIVEN = {
    "devices": {"platform": "cpu", "num_cpu_devices": 8},
    "algorithm": "reinforce",
    "env": {"name": "trail"},
    "model": MODEL,
    "rollout": {
        "num_slots": 8,
        "episodes_per_step": 8,
        "group_size": 1,
        "chunk_size": 8,
        "burst": 4,
        "max_turn_tokens": 4,
        "context_buckets": (64, 128),
        "page_size": 64,
    },
    "selector": {"rollout_meshes": MESHES},
}


def longest(fits: Callable[[int], bool], unit: int) -> int:
    """Returns the largest multiple of `unit` that fits; all smaller ones do too. 0 for none."""
    high = unit
    while fits(high):
        high *= 2
    low = high // 2 if high > unit else 0
    while high - low > unit:
        middle = (low + high) // 2 // unit * unit
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def plan_for(problem: Problem, mesh: MeshShape, tokens: int) -> RolloutPlan:
    """Returns the smallest rollout on a mesh that holds an episode of so many tokens."""
    return RolloutPlan(mesh, problem.slot_numbers(mesh)[-1], problem.least_pages(tokens))


def row_of(stages: Stages, mesh: MeshShape) -> dict[str, Any]:
    """Returns a mesh's row."""
    problem, unit = stages.problem, stages.problem.work.page_size
    resident = problem.trainer_bytes(TRAINER)

    def computed(tokens: int) -> int:
        plan = plan_for(problem, mesh, tokens)
        return problem.round_footprint(plan, tokens).total + resident

    def by_xla(tokens: int) -> int:
        found = compiled_bytes(stages, plan_for(problem, mesh, tokens), tokens)
        assert found is not None, "a program ran out of memory when it was compiled"
        return found + resident

    tokens = longest(lambda length: computed(length) <= problem.budget, unit)
    if not tokens:
        raise InputError(f"{problem.budget_bytes} bytes hold no episode on {mesh}; give more")
    while (exact := by_xla(tokens)) > problem.budget:
        tokens -= max(unit, tokens // 100 // unit * unit)
    return {
        "rollout mesh": str(mesh),
        "longest episode": tokens,
        "computed MiB": computed(tokens) / 2**20,
        "XLA's MiB": exact / 2**20,
    }


def capacity_rows() -> list[dict[str, Any]]:
    """Returns the table."""
    stages = build_run(make_config(GIVEN, [f"selector.budget_bytes_per_device={BUDGET}"])).stages
    rows = [row_of(stages, MeshShape.parse(mesh)) for mesh in MESHES]
    first = rows[0]["longest episode"]
    return [row | {f"{MESHES[0]} = 1": row["longest episode"] / first} for row in rows]


if __name__ == "__main__":
    flags = parser_of(__doc__).parse_args()
    start_jax("cpu", 8)
    show(table(capacity_rows()), PAGE, write=flags.write)
