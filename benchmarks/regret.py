# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Regret of the selector against exhaustive measurement by real steps, where the mesh matters.

    uv run python -m benchmarks.regret [--write]

At each point (few slots and rows, long turns, wide models; 8 virtual CPU devices) every pair of a
rollout mesh and a training mesh runs real steps with nothing else to choose from, in rounds of all
pairs; a pair's step is the median. Then the selector runs with an empty throughput table, which its
own steps feed, and may choose from all pairs. `first` is the pair of its first step, by the speed
model alone, `settles on` that of most of its last ten; each is slower than the best by so much.
Compiling counts for none: programs are the same for all. The policy is random, and learns next to
nothing.

With --write the table goes into regret.md.
"""

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages import parser_of, show, table
from earl_jax.config.file import make_config
from earl_jax.launch.start import start_jax
from earl_jax.settings.remat import Remat

PAGE = Path(__file__).with_suffix(".md")
BASE = {
    "devices": {"platform": "cpu", "num_cpu_devices": 8},
    "algorithm": "reinforce",
    "env": {"name": "trail"},
    "rollout": {"patience_s": 10.0, "group_size": 1, "chunk_size": 8, "burst": 8},
    "train": {"learning_rate": 1e-6, "sft_steps": 0},
}
NARROW = {"width": 64, "num_heads": 8, "num_kv_heads": 8, "head_size": 8, "ffn_size": 128}
WIDE = {"width": 512, "num_heads": 8, "num_kv_heads": 8, "head_size": 64, "ffn_size": 2048}
CONTEXT = {
    "rollout_meshes": ("data=4,tensor=2", "data=2,tensor=4", "data=4,context=2", "tensor=8"),
    "train_meshes": ("data=4,tensor=2", "data=4,context=2", "data=1,fsdp=4,context=2", "context=8"),
}

FEW = {
    "rollout_meshes": ("data=8", "data=2,tensor=4", "tensor=8"),
    "train_meshes": ("data=8", "data=1,fsdp=8", "data=4,tensor=2", "data=1,fsdp=2,tensor=4"),
}


class Pair(NamedTuple):
    """The plans of both stages, as (mesh, number of slots) and (mesh, micro-batches, remat)."""

    rollout: tuple[str, int]
    train: tuple[str, int, Remat]

    def __str__(self) -> str:
        return f"{self.rollout[0]} + {self.train[0]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A model, so many slots and rows, and turns of so many tokens; `selector` names meshes."""

    name: str
    slots: int
    rows: int
    turn: int
    model: Mapping[str, Any]
    selector: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def config(self) -> Any:
        """Returns its config; one context bucket holds every episode."""
        bucket = 64 * -(-(self.turn + 48) // 64)
        rollout = {
            "num_slots": self.slots,
            "episodes_per_step": self.rows,
            "max_turn_tokens": self.turn,
            "context_buckets": (bucket,),
        }
        return make_config(
            BASE
            | {
                "model": dict(self.model),
                "selector": dict(self.selector),
                "rollout": BASE["rollout"] | rollout,
            }
        )


POINTS = (
    Point(name="one slot", slots=1, rows=2, turn=64, model=NARROW),
    Point(name="two slots, long turns", slots=2, rows=2, turn=200, model=NARROW),
    Point(
        name="four long rows, context", slots=4, rows=4, turn=448, model=NARROW, selector=CONTEXT
    ),
    Point(name="eight rows, wide", slots=8, rows=8, turn=16, model=WIDE, selector=FEW),
    Point(name="two rows, wide", slots=2, rows=2, turn=32, model=WIDE),
)


def measure(point: Point, rounds: int = 2, steps: int = 4, own_steps: int = 50) -> dict[str, Any]:
    """Returns a point's row.

    Of so many `rounds` of all pairs, `steps` of a pair in a round, and `own_steps` of the selector.
    """
    from earl_jax.profiling.stages import placement_on
    from earl_jax.run.build import build_run

    world = build_run(point.config())
    bucket = world.config.rollout.context_buckets[0]
    rollouts = world.problem.meshes("rollout", bucket)
    trains = world.problem.meshes("train", bucket)
    seconds: dict[Pair, list[float]] = {}
    # The first round compiles and is not counted.
    for number in range(1 + rounds):
        for rollout, train in itertools.product(rollouts, trains):
            taken = run_steps(world, placement_on(world, rollout, train), steps if number else 1)
            if number:
                for pair, step_s in taken:
                    seconds.setdefault(pair, []).append(step_s)
    own = run_steps(world, placement_on(world, None, None), own_steps)
    for number, (pair, step_s) in enumerate(own, 1):
        print(f"step {number}: {pair}, {step_s:.3f} s", file=sys.stderr, flush=True)
    # Ways of a mesh that no pair ran with are timed by our own steps.
    for pair in {pair for pair, _ in own} - seconds.keys():
        seconds[pair] = [step_s for other, step_s in own if other == pair]
    step_s = {pair: statistics.median(each) for pair, each in seconds.items()}
    return {"point": point.name, "pairs": len(rollouts) * len(trains)} | summary(
        step_s, [pair for pair, _ in own]
    )


def run_steps(world: Any, placement: Any, steps: int) -> list[tuple[Pair, float]]:
    """Returns the pair and the seconds of each of the first `steps` steps of a run."""
    from earl_jax.loop import rl_step
    from earl_jax.rollout.load import expected_tokens
    from earl_jax.run.position import Position
    from earl_jax.telemetry.load import LoadHistory

    placement.choose_step(expected_tokens(world.stages.rollout, None), None)
    state = world.learner.init_state(placement.train.mesh)
    position, taken = Position(step=0, state=state, history=LoadHistory()), []
    for _ in range(steps):
        position, record = rl_step(world, placement, position)
        rollout, train = placement.plans
        pair = Pair(
            (str(rollout.mesh), rollout.num_slots),
            (str(train.mesh), train.micro_batches, train.remat),
        )
        taken.append((pair, sum(record.stage_s.values())))
    return taken


def summary(step_s: Mapping[Pair, float], own: Sequence[Pair]) -> dict[str, Any]:
    """Returns the best pair, and how much slower our first is, and that of most of the last ten.

    The last step alone may be the first one of a trial.
    """
    best = min(step_s, key=lambda pair: step_s[pair])
    worst = max(step_s.values())
    first, last = own[0], statistics.mode(own[-10:])
    return {
        "best": str(best),
        "best s": step_s[best],
        "worst, best = 1": worst / step_s[best],
        "first": str(first),
        "first slower by": step_s[first] / step_s[best] - 1.0,
        "settles on": str(last),
        "slower by": step_s[last] / step_s[best] - 1.0,
        "switches": sum(a != b for a, b in itertools.pairwise(own)),
    }


if __name__ == "__main__":
    flags, rows = parser_of(__doc__).parse_args(), []
    start_jax("cpu", 8)
    for point in POINTS:
        rows.append(measure(point))
        print(f"{rows[-1]}", file=sys.stderr, flush=True)
    show(table(rows), PAGE, write=flags.write)
