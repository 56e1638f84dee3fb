# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Times of a rollout, an update, a dispatch and a change of mesh, as rows of a table.

Each function of STAGES yields a row for each mesh, or pair of meshes, of the run's config. A time
is the median of `repeats` calls after one that compiles.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.dispatch.pack import dispatch
from earl_jax.dispatch.plan import plan_dispatch
from earl_jax.dispatch.weights import publish
from earl_jax.engine.engine import Policy, Session, empty_session
from earl_jax.engine.pages import Pool, dense_pool
from earl_jax.engine.relocation import relocate
from earl_jax.models.layer_groups import pages_for
from earl_jax.placement.moves import move_state, open_session
from earl_jax.placement.placement import Placement
from earl_jax.placement.rollouts import play_all
from earl_jax.run.build import Run
from earl_jax.selector.plans import TrainPlan
from earl_jax.selector.table import ThroughputTable
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.reshard import reshard
from earl_jax.trajectory import Experience


def rollout_rows(run: Run, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields the time of a rollout on each mesh."""
    tokens, tasks = run.config.rollout.context_buckets[-1], run.tasks.training(0)
    for mesh in run.problem.meshes("rollout", tokens):
        placement = placement_on(run, mesh, None)
        placement.choose_step(tokens, None)
        state = move_state(placement, run.learner.init_state(placement.train.mesh), to_play=True)

        found: list[Any] = []

        def play(placement: Placement = placement, state: Any = state, found: Any = found) -> None:
            session, _ = open_session(placement, run.learner.policy(state), version=0)
            found.append(play_all(run.actor, placement, session, tasks, None)[1].stats)

        (seconds,) = median_seconds(play, repeats=repeats)
        stats = found[-1]
        yield {
            "mesh": str(mesh),
            "slots": placement.rollout.num_slots,
            "s": seconds,
            "tokens": stats.rollout_tokens,
            "tokens/s": stats.rollout_tokens / seconds,
        }


def train_rows(run: Run, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields the time of an update on each mesh."""
    rollout = run.config.rollout
    length, num_rows = rollout.context_buckets[-1], rollout.episodes_per_step
    for mesh in run.problem.meshes("train", length):
        placement = placement_on(run, None, mesh)
        placement.choose_step(length, None)
        placement.length = length
        plan = placement.choose_training().train.plan  # pyright: ignore
        (seconds,) = median_seconds(update_of(run, plan, length), repeats=repeats)
        yield {
            "mesh": str(mesh),
            "micro-batches": plan.micro_batches,
            "remat": plan.remat,
            "s": seconds,
            "tokens": num_rows * length,
            "tokens/s": num_rows * length / seconds,
        }


def dispatch_rows(run: Run, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields the time of experience to, and of weights from, each training mesh."""
    length, num = run.config.rollout.context_buckets[-1], run.config.rollout.episodes_per_step
    numbers, logprobs = np.zeros((num, length), np.int32), np.zeros((num, length), np.float32)
    names = {"tokens": numbers, "turn_ids": numbers, "logprobs": logprobs, "versions": numbers}
    given: Any = names | {"allowed": (numbers,) * run.learner.choice_width}
    fields = Experience(**given)
    for train_mesh in run.problem.meshes("train", length):
        params = run.learner.policy(run.learner.init_state(train_mesh))
        for rollout_mesh in run.problem.meshes("rollout", length):
            engine = run.stages.engines.engine(rollout_mesh)
            rows = run.stages.layouts.engine(rollout_mesh).activations("NS")
            send = partial(
                dispatch,
                jax.device_put(fields, rows),
                run.stages.layouts.train(train_mesh),
                length=length,
                lengths=np.full(num, length),
                advantages=np.zeros((num, 1)),
            )
            goal = engine.parameter_shapes, engine.parameter_shardings
            back = partial(publish, params, *goal)
            sides = str(rollout_mesh), str(train_mesh)
            for what, source, target, moved, move in (
                ("experience", *sides, send().plan.moved_bytes, lambda send=send: send().batch),
                ("weights", *sides[::-1], back().moved_bytes, lambda back=back: back().params),
            ):
                yield _moving(what, source, target, moved, move, repeats)


def switch_rows(run: Run, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields the time of each change of mesh, away from the first one of its stage.

    Raises ValueError where both stages have one mesh.
    """
    rollout, train = run.problem.meshes("rollout"), run.problem.meshes("train")
    if len(rollout) == len(train) == 1:
        raise InputError(
            f"rollouts have one mesh here ({rollout[0]}), and so has training ({train[0]}), so "
            "that nothing moves: name several in config.selector.rollout_meshes or "
            "config.selector.train_meshes, or take more devices"
        )
    state = run.learner.init_state(train[0])
    for mesh in train[1:]:
        goal = run.learner.state_shardings(mesh)
        moved, move = plan_dispatch(state, goal).moved_bytes, partial(reshard, state, goal)
        yield _moving("trainer", str(train[0]), str(mesh), moved, move, repeats)
    session = _full_session(run, rollout[0], run.learner.policy(state))
    for mesh in rollout[1:]:
        engine, pool = run.stages.engines.engine(mesh), _full_pool(run, mesh)
        move = partial(relocate, session, engine, session.max_tokens, pool)
        live, goal = _live(session), (engine.parameter_shardings, engine.state_shardings)
        # Where the number of row shards changes, pages are regrouped on the way.
        same = pool == session.pool
        moved = plan_dispatch(live, goal).moved_bytes if same else None

        def arrays(move: Callable[[], Session] = move) -> Any:
            return _live(move())

        yield _moving("live rollout", str(rollout[0]), str(mesh), moved, arrays, repeats)


STAGES = {
    "dispatch": dispatch_rows,
    "rollout": rollout_rows,
    "train": train_rows,
    "switch": switch_rows,
}


def placement_on(run: Run, rollout: MeshShape | None, train: MeshShape | None) -> Placement:
    """Returns a placement that may use these meshes only; None: all that the config may use."""
    placement = Placement(run.stages, ThroughputTable())
    placement.problem = dataclasses.replace(
        run.problem,
        rollout_meshes_named=(str(rollout),) if rollout else run.problem.rollout_meshes_named,
        train_meshes_named=(str(train),) if train else run.problem.train_meshes_named,
    )
    return placement


def update_of(run: Run, plan: TrainPlan, length: int) -> Callable[[], Any]:
    """Returns a function that trains once on full rows of `length` tokens."""
    shapes = run.learner.batch_shapes(plan, run.config.rollout.episodes_per_step, length)
    batch = jax.tree.map(
        lambda shape: jax.device_put(np.ones(shape.shape, shape.dtype), shape.sharding), shapes
    )
    program, state = run.learner.program(plan), run.learner.init_state(plan.mesh)
    controls = np.zeros_like(run.learner.controls(0, 1))

    def update() -> Any:
        nonlocal state
        state, metrics = program(state, batch, controls)
        return metrics

    return update


def median_seconds(*functions: Callable[[], Any], repeats: int) -> list[float]:
    """Returns the median time of each function; they alternate, after one call that compiles."""
    spans: list[list[float]] = [[] for _ in functions]
    for _ in range(1 + repeats):
        for function, own in zip(functions, spans, strict=True):
            start_s = time.perf_counter()
            jax.block_until_ready(function())
            own.append(time.perf_counter() - start_s)
    return [statistics.median(own[1:]) for own in spans]


def _moving(
    what: str, source: str, target: str, moved: int | None, move: Callable[[], Any], repeats: int
) -> dict[str, Any]:
    """Returns the row of a move, timed beside a plain copy of as many bytes."""
    seconds, copy_s = median_seconds(move, _copy_of(moved or 0), repeats=repeats)
    return {
        "what": what,
        "from": source,
        "to": target,
        "moved MiB": None if moved is None else moved / 2**20,
        "ms": 1e3 * seconds,
        "copy ms": 1e3 * copy_s if moved else None,
    }


def _copy_of(num_bytes: int) -> Callable[[], Any]:
    """Returns a copy of so many bytes in equal shares, each from a device to the next one."""
    devices = jax.devices()
    share = max(1, num_bytes // len(devices))
    parts = [jnp.ones(share, jnp.uint8, device=device) for device in devices]
    if len(devices) == 1:
        return lambda: jnp.copy(parts[0])
    return lambda: jax.device_put(parts, [*devices[1:], devices[0]])


def _live(session: Session) -> tuple[Any, Any]:
    return session.policy.params, session.state


def _full_pool(run: Run, mesh: MeshShape) -> Pool:
    rollout, rule = run.config.rollout, run.stages.engines.engine(mesh).config.page_rule
    return dense_pool(mesh.data, rollout.num_slots, rollout.context_buckets[-1], rule)


def _full_session(run: Run, mesh: MeshShape, params: Any) -> Session:
    """Returns a session whose slots have all their pages, at the last context bucket."""
    engine, max_tokens = run.stages.engines.engine(mesh), run.config.rollout.context_buckets[-1]
    weights = publish(params, engine.parameter_shapes, engine.parameter_shardings).params
    policy = Policy(params=weights, version=0)
    session = empty_session(engine, policy, max_tokens, _full_pool(run, mesh))
    for slot in range(engine.config.num_slots):
        session.pages.skip(slot, session.pages.rule.num_gone(max_tokens))
        session.pages.hold(slot, max_tokens)
    table = session.pages.as_array(pages_for(max_tokens, engine.config.page_size))
    return dataclasses.replace(session, state=engine.give_pages(session.state, table))
