# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Placements whose speeds and bytes are given by a test, and programs that run out of memory."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.engine.engine import Session
from earl_jax.loop import rl_step
from earl_jax.placement.moves import move_state, open_session
from earl_jax.placement.placement import Placement
from earl_jax.rollout.config import Limits
from earl_jax.rollout.task import Task
from earl_jax.rollout.tasks import Tasks
from earl_jax.run.build import Run, build_run
from earl_jax.run.position import Position
from earl_jax.run.step_record import StepRecord
from earl_jax.selector.problem import Problem
from earl_jax.selector.table import TRUSTED, ThroughputTable
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import Load, LoadHistory
from tests.support.problems import rollout_key, train_key
from tests.support.settings import make_config

D8, D4T2 = MeshShape(data=8), MeshShape(data=4, tensor=2)
F8, CUBE = MeshShape(fsdp=8), MeshShape(data=2, fsdp=2, tensor=2)

# One layer whose heads and widths divide over two devices.
TINY = {
    "num_layers": 1,
    "width": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_size": 8,
    "ffn_size": 16,
}
# A rollout of eight episodes of short replies, whose context buckets a test adds.
EIGHT_SLOTS = {"num_slots": 8, "episodes_per_step": 8, "max_turn_tokens": 2}
# One of sixteen episodes of at most 32 tokens; all answers are there when a round begins.
TOKENS = 32
SIXTEEN_SLOTS = {
    "num_slots": 16,
    "episodes_per_step": 16,
    "burst": 2,
    "max_turn_tokens": 4,
    "max_episode_tokens": TOKENS,
    "context_buckets": (TOKENS,),
    "patience_s": 60.0,
}
# Bytes per device that no budget of a test holds.
TOO_LARGE = 10**12


def given(
    rollout: Mapping[str, Any],
    rollout_meshes: tuple[MeshShape, ...],
    train_meshes: tuple[MeshShape, ...],
    **selector: Any,
) -> dict[str, Any]:
    """Returns the settings of a tiny run on these meshes, whose table stays as a test gives it."""
    meshes = {
        "rollout_meshes": tuple(map(str, rollout_meshes)),
        "train_meshes": tuple(map(str, train_meshes)),
    }
    return {
        "model": TINY,
        "rollout": dict(rollout),
        "selector": {"table": "model", **meshes, **selector},
    }


def table_of(
    problem: Problem,
    train: Mapping[MeshShape, float],
    rollout: Mapping[MeshShape, float],
    buckets: tuple[int, ...],
) -> ThroughputTable:
    """Returns a table of trusted tokens/s of the config's plans on each mesh at each bucket."""
    table, work = ThroughputTable(), problem.work
    for tokens in buckets:
        for mesh, speed in train.items():
            key = train_key(mesh, tokens, work.micro_batches, work.remat)
            table = _trusted(table, key, speed)
        for mesh, speed in rollout.items():
            table = _trusted(table, rollout_key(mesh, tokens, work.num_slots), speed)
            # With fewer slots, where that is possible, a rollout is much slower.
            for slots in problem.slot_numbers(mesh)[1:]:
                table = _trusted(table, rollout_key(mesh, tokens, slots), speed / 4)
    return table


def _trusted(table: ThroughputTable, key: str, speed: float) -> ThroughputTable:
    for _ in range(TRUSTED):
        table = table.with_speed(key, speed)
    return table


def too_large_for(
    table: ThroughputTable,
    problem: Problem,
    *,
    train: tuple[tuple[MeshShape, int], ...] = (),
    rollout: tuple[tuple[MeshShape, int], ...] = (),
    in_one_part: tuple[tuple[MeshShape, int], ...] = (),
) -> ThroughputTable:
    """Returns the table in which plans on (mesh, context bucket) take TOO_LARGE, all others 1 byte.

    Updates on those of `in_one_part` do so unless they go in micro-batches.
    """
    buckets = {key.split(" ")[2] for key in (*table.speeds, *table.program_bytes)}
    buckets |= {str(t) for _, t in train}
    for tokens in sorted(map(int, buckets)):
        for plan in problem.train_plans(tokens):
            where = (plan.mesh, tokens)
            large = where in train or where in in_one_part and plan.micro_batches == 1
            key = train_key(plan.mesh, tokens, plan.micro_batches, plan.remat)
            table = table.with_bytes(key, TOO_LARGE if large else 1)
        for mesh in problem.meshes("rollout", tokens):
            for slots in problem.slot_numbers(mesh):
                large = (mesh, tokens) in rollout
                key = rollout_key(mesh, tokens, slots)
                table = table.with_bytes(key, TOO_LARGE if large else 1)
    return table


def place(
    world: Run,
    table: ThroughputTable | None = None,
    say: Callable[[str], None] = lambda text: None,
    **changes: Any,
) -> Placement:
    """Returns a Placement by this table, of the world's problem with these fields changed."""
    placement = Placement(world.stages, table or ThroughputTable(), say)
    placement.problem = dataclasses.replace(world.problem, **changes)
    return placement


def standing(
    rollout: MeshShape,
    train: MeshShape,
    max_tokens: int,
    *,
    num_slots: int = 8,
    pages: int = 1,
    **changes: Any,
) -> dict[str, Any]:
    """Returns `Placement.as_dict` of a run on these meshes."""
    return {
        "rollout": [str(rollout), num_slots, pages, False],
        "train": [str(train), 1, "none"],
        "max_tokens": max_tokens,
        "row_shapes": {},
        "calm_steps": 0,
        "most_tokens": max_tokens,
        "most_length": max_tokens,
        **changes,
    }


def load_of(tokens: int, *, mean: float | None = None, slots: int = 8) -> Load:
    """Returns the load of a step whose longest episode has so many tokens."""
    return Load(
        context_tokens_max=tokens,
        context_tokens_mean=tokens / 2 if mean is None else mean,
        tokens_in_flight_max=slots * tokens,
        rollout_tokens=2 * slots * tokens,
    )


def history_of(*longest: int) -> LoadHistory:
    """Returns the history of steps with these longest episodes."""
    return LoadHistory(steps=tuple(map(load_of, longest)))


def first_position(world: Run, placement: Placement) -> Position:
    """Returns where a run begins, with random weights on the training mesh in use."""
    state = world.learner.first_state(placement.train.mesh)
    state = move_state(placement, state, to_play=True)
    return Position(step=0, state=state, history=LoadHistory())


def begin(world: Run) -> tuple[Placement, Position]:
    """Returns the start of a run, without a workdir."""
    placement = place(world)
    placement.choose_step(world.config.rollout.context_buckets[0], None)
    return placement, first_position(world, placement)


def with_session(settings: Mapping[str, Any]) -> tuple[Run, Session, Placement]:
    """Returns a Run of these settings, the first session of its rollout, and the Placement."""
    world = build_run(make_config(settings))
    placement, position = begin(world)
    session, _ = open_session(placement, world.learner.policy(position.state), version=0)
    assert session is not None
    return world, session, placement


def one_step(world: Run) -> StepRecord:
    """Takes the first RL step of a run, without a workdir; returns its record."""
    return rl_step(world, *begin(world))[1]


def hungry(donated: int) -> Any:
    """Returns a program that wants an array of 141 TB: XLA's own RESOURCE_EXHAUSTED.

    Argument number `donated` goes with it.
    """

    def run(*arguments: Any) -> Any:
        seed = jax.tree.leaves(arguments[-1])[0].reshape(-1)[0].astype(jnp.float32)
        kept = jax.tree.map(lambda leaf: leaf, arguments[donated])
        return kept, jnp.zeros((2**23, 2**22)) + seed

    return jax.jit(run, donate_argnums=donated)


class BriefTasks(Tasks):
    """Every fifth episode may say 16 tokens, the others two."""

    def training(self, step: int) -> list[Task]:
        return [
            dataclasses.replace(task, limits=Limits(max_turn_tokens=2 if task.episode % 5 else 16))
            for task in super().training(step)
        ]
