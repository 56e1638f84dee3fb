# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The programs of plans, lowered from shapes alone: for their bytes, and to compile them ahead."""

from collections.abc import Hashable
from typing import Any

from earl_jax.dispatch.packing import Shape
from earl_jax.placement.stages import Stages
from earl_jax.selector.memory import program_bytes, unless_out_of_memory
from earl_jax.selector.plans import RolloutPlan, TrainPlan
from earl_jax.sharding.layout import MeshShape


def lower_round(stages: Stages, plan: RolloutPlan, max_tokens: int) -> Any:
    """Lowers a round of the rollout with rows of `max_tokens` tokens."""
    engine = stages.engines.engine(plan.mesh, plan.num_slots)
    return engine.lower_play(max_tokens, stages.pool(plan))


def lower_update(stages: Stages, plan: TrainPlan, length: int, shape: Shape | None = None) -> Any:
    """Lowers an update of episodes of up to `length` tokens; `shape` None: a row for each."""
    rows, length = shape or Shape(stages.rollout.episodes_per_step, length)
    return stages.learner.lower(plan, rows, length)


def compiled_bytes(
    stages: Stages, plan: RolloutPlan | TrainPlan, tokens: int, *, together: bool = True
) -> int | None:
    """Compiles a plan's program; returns its bytes per device, None where memory was short for it.

    Of several processes those compile that run it; with `together` all get the largest number.
    """
    processes, is_rollout = stages.cluster, isinstance(plan, RolloutPlan)
    own: int | None = 0
    if processes.plays if is_rollout else processes.trains:

        def compiled() -> int:
            lower = lower_round if isinstance(plan, RolloutPlan) else lower_update
            return program_bytes(lower(stages, plan, tokens).compile())  # pyright: ignore

        own = unless_out_of_memory(compiled)
    if not together:
        return own
    each = processes.gather(own, f"the bytes of {plan.words()}")
    return None if None in each else max(each)


def play_key(mesh: MeshShape, num_slots: int, max_tokens: int) -> Hashable:
    """Returns the name of a round's program, for the run and the thread that compiles ahead."""
    return "play", mesh, num_slots, max_tokens


def update_key(plan: TrainPlan, shape: Shape) -> Hashable:
    """Returns the name of an update's program."""
    return "train", plan, shape
