# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Times one stage of a config: python -m earl_jax.bench {dispatch,rollout,train,switch}."""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.config.file import BENCH_CONFIG, load_config_file, make_config
from earl_jax.config.flags import config_parser, parse_with_overrides
from earl_jax.dispatch.pack import dispatch
from earl_jax.dispatch.plan import plan_dispatch
from earl_jax.dispatch.weights import publish
from earl_jax.engine.pages import Pool, dense_pool, pages_for
from earl_jax.engine.session import Policy, Session, empty_session, relocate
from earl_jax.launch.start import exit_status, start_jax
from earl_jax.placement.moves import move_state
from earl_jax.placement.placement import Placement
from earl_jax.placement.rollouts import play_all
from earl_jax.run import Run, build_run
from earl_jax.selector.plans import TrainPlan
from earl_jax.selector.table import ThroughputTable
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.reshard import reshard
from earl_jax.train.step import batch_shapes
from earl_jax.trajectory import Experience

_HELP = """\
Times a stage of a run on this machine and prints a Markdown table, or with --json an object a line.

  rollout   the first step's episodes with random weights, on each rollout mesh of the config
  train     one update on full rows, on each training mesh of the config
  dispatch  a step's experience from each rollout mesh to each training mesh, and the weights back
  switch    the move of a trainer, or of a rollout with live KV caches, from the first mesh of the
            stage to each of the others

Episodes and rows have the length of the last of config.rollout.context_buckets. A time is the
median of --repeats runs after one that compiles. "copy ms" is a plain copy, timed in turn with the
stage, of as many bytes as change device.

example:
  python -m earl_jax.bench dispatch --config=configs/tictactoe_tiny_cpu.py --config.seed=1
"""


def rollout_rows(run: Run, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields the time of a rollout on each mesh."""
    tokens, tasks = run.config.rollout.context_buckets[-1], run.tasks.training(0)
    for mesh in run.problem.rollout_meshes_for(tokens):
        placement = placement_on(run, mesh, None)
        placement.choose_step(tokens, None)
        state = move_state(placement, run.learner.init_state(placement.train.mesh), to_play=True)

        found: list[Any] = []

        def play(placement: Placement = placement, state: Any = state, found: Any = found) -> None:
            session, _ = placement.sessions.open(run.learner.policy(state), version=0)
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
    for mesh in run.problem.train_meshes_for(length):
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
    fields = Experience(tokens=numbers, turn_ids=numbers, logprobs=logprobs, versions=numbers)  # pyright: ignore
    for train_mesh in run.problem.train_meshes_for(length):
        params = run.learner.policy(run.learner.init_state(train_mesh))
        for rollout_mesh in run.problem.rollout_meshes_for(length):
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
    """Yields the time of each change of mesh, away from the first one of its stage."""
    rollout, train = run.problem.rollout_meshes, run.problem.train_meshes
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
    rows, layout = run.config.rollout.episodes_per_step, run.stages.layouts.train(plan.mesh)
    shapes = batch_shapes(rows, length, layout, scored=run.learner.scored)
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
    rollout = run.config.rollout
    return dense_pool(
        mesh.data, rollout.num_slots, rollout.context_buckets[-1], rollout.tokens_a_page
    )


def _full_session(run: Run, mesh: MeshShape, params: Any) -> Session:
    """Returns a session whose slots have all their pages, at the last context bucket."""
    engine, max_tokens = run.stages.engines.engine(mesh), run.config.rollout.context_buckets[-1]
    weights = publish(params, engine.parameter_shapes, engine.parameter_shardings).params
    policy = Policy(params=weights, version=0)
    session = empty_session(engine, policy, max_tokens, _full_pool(run, mesh))
    for slot in range(engine.config.num_slots):
        session.pages.hold(slot, max_tokens)
    table = session.pages.as_array(pages_for(max_tokens, engine.config.page_size))
    return dataclasses.replace(session, state=engine.give_pages(session.state, table))


def bench_command(arguments: Sequence[str]) -> None:
    """Runs the whole command."""
    parser = config_parser("bench", _HELP, BENCH_CONFIG)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each row (3)")
    parser.add_argument("--json", action="store_true", help="an object a line")
    flags, overrides = parse_with_overrides(parser, arguments)
    config = make_config(load_config_file(flags.config), overrides)
    start_jax(config.devices.platform, config.devices.num_cpu_devices)
    for number, row in enumerate(STAGES[flags.stage](build_run(config), flags.repeats)):
        if flags.json:
            print(json.dumps(row), flush=True)
            continue
        if not number:
            print(f"| {' | '.join(row)} |\n{'|---' * len(row)}|")
        print(f"| {' | '.join(map(_cell, row.values()))} |", flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)


def main() -> None:
    """Runs the command of the console."""
    sys.exit(exit_status(lambda: bench_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
