# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a change of mesh costs: python -m earl_jax.bench switch --config=configs/X.py.

From the first mesh of each stage to each of the others, between the meshes that the config may
choose from: new weights for a rollout, the trainer with its optimiser, and weights with live KV
caches in the middle of a rollout. The phases of a switch:

- `plan ms`: who sends what to whom, the first time (it is kept then);
- `compile s`: the move's program, where no earlier run has left it in the user's cache folder and
  none was compiled ahead; `cached s` where one has;
- `stalled ms`: the move and nothing else, the median behind warm-up; `program ms`: the same
  compiled programs called by themselves, which is the floor: what is above it is Python's;
- `tables ms`: of a live rollout, the table of its pages from the host to the new mesh.

Beside them, in the same process, plain copies: `copy ms` of as many bytes as must change device,
`writing ms` of as many as are written on all devices, those that come from the same device too.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.dispatch.within import copy_of, seconds
from earl_jax.config import Config
from earl_jax.rollout.seat import Policy, Seat, empty_seat, relocate
from earl_jax.selector.memory import resident_bytes
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.moves import Move, carrier, viewed
from earl_jax.sharding.ranges import shard_ranges
from earl_jax.sharding.reshard import lower_moves, reshard
from earl_jax.sharding.schedule import make_schedule
from earl_jax.sharding.transfer_plan import plan_transfers
from earl_jax.weights import program_of, publish
from earl_jax.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switch:
    """One change of mesh: `run` makes what is there afterwards, and gives up nothing.

    `size` is what a device holds of it then, `moved` what changes device, in bytes. `programs`
    makes what calls the compiled programs of `run` alone. `give` brings the tables of what has
    moved, None where there are none.
    """

    what: str
    source: MeshShape
    target: MeshShape
    size: int
    moved: int
    plan_s: float
    run: Callable[[], Any]
    programs: Callable[[], Callable[[], Any]]
    give: Callable[[Any], Any] | None = None


def measure(config: Config, repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each switch."""
    for switch in _switches(World(config)):
        yield _row(switch, repeats)


def _switches(world: World) -> Iterator[Switch]:
    rollout, train = world.rollout_candidates, world.train_candidates
    state = world.init_train_state(train[0])
    for mesh in train[1:]:
        shardings = world.train_state_shardings(mesh)
        moved, plan_s = _planned(state, shardings)
        yield Switch(
            what="trainer",
            source=train[0],
            target=mesh,
            size=resident_bytes(state, shardings),
            moved=moved,
            plan_s=plan_s,
            run=lambda shardings=shardings: reshard(state, shardings),
            programs=functools.partial(_programs, state, shardings),
        )
    params = world.policy(state)
    for mesh in rollout:
        engine = world.engine(mesh)
        goal = (engine.parameter_shapes, engine.parameter_shardings)
        yield Switch(
            what="new weights",
            source=train[0],
            target=mesh,
            size=resident_bytes(*goal),
            moved=publish(params, *goal).moved_bytes,
            plan_s=0.0,
            run=lambda goal=goal: publish(params, *goal).params,
            programs=lambda goal=goal: functools.partial(program_of(params, *goal), params),
        )
    seat = _seat(world, rollout[0], params)
    for mesh in rollout[1:]:
        engine = world.engine(mesh)
        # The pages' gathering into as many parts as the mesh has row shards is in `run` alone.
        arrays, pool = (seat.policy.params, seat.state), world.pool_for(mesh, seat.places)
        shardings = (engine.parameter_shardings, engine.state_shardings)
        moved, plan_s = _planned(arrays, shardings)
        yield Switch(
            what="live rollout",
            source=rollout[0],
            target=mesh,
            size=resident_bytes(arrays, shardings),
            moved=moved,
            plan_s=plan_s,
            run=lambda engine=engine, pool=pool: _arrays(relocate(seat, engine, seat.places, pool)),
            programs=functools.partial(_programs, arrays, shardings),
        )


def _arrays(seat: Seat) -> Any:
    return seat.policy.params, seat.state


def _seat(world: World, mesh: MeshShape, params: Any) -> Seat:
    """Every slot with all its pages, at the last room that is configured."""
    engine, places = world.engine(mesh), world.config.rollout.context_buckets[-1]
    pool = world.pool_for(mesh, places)
    weights = publish(params, engine.parameter_shapes, engine.parameter_shardings).params
    return empty_seat(engine, Policy(params=weights, version=0), places, pool)


def _row(switch: Switch, repeats: int) -> dict[str, Any]:
    jax.clear_caches()
    first_s = _once(switch.run)
    # What the cache folder holds by now is read again.
    jax.clear_caches()
    cached_s = _once(switch.run)
    stalled_s, program_s, copy_s, writing_s = seconds(
        switch.run,
        switch.programs(),
        copy_of(switch.moved),
        writing_of(switch.size),
        repeats=repeats,
    )
    copy_s = copy_s if switch.moved else 0.0
    there = jax.block_until_ready(switch.run())
    tables_s = _once(lambda: switch.give(there)) if switch.give else None
    return {
        "what": switch.what,
        "from": str(switch.source),
        "to": str(switch.target),
        "MiB a device": switch.size / 2**20,
        "moved MiB": switch.moved / 2**20,
        "plan ms": 1e3 * switch.plan_s,
        "compile s": first_s - stalled_s,
        "cached s": cached_s - stalled_s,
        "stalled ms": 1e3 * stalled_s,
        "program ms": 1e3 * program_s,
        "tables ms": None if tables_s is None else 1e3 * tables_s,
        "copy ms": 1e3 * copy_s,
        "times a copy": stalled_s / copy_s if copy_s else None,
        "writing ms": 1e3 * writing_s,
        "times writing": stalled_s / writing_s,
    }


def writing_of(size: int) -> Callable[[], Any]:
    """Every device copies so many bytes of its own."""
    parts = [jnp.ones(size, jnp.uint8, device=device) for device in jax.devices()]
    return lambda: list(map(jnp.copy, parts))


def _once(run: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start_s


def _programs(arrays: Any, shardings: Any) -> Callable[[], list[Any]]:
    """What calls the compiled programs of a `reshard` and does nothing else."""
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), arrays
    )
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(shardings), strict=True)
    moves = [
        (leaf, Move(leaf.shape, leaf.dtype, leaf.sharding, to, leaf.dtype)) for leaf, to in pairs
    ]
    seen = [
        viewed(leaf, carrier(leaf.dtype)) if move.goes_as_bits else leaf for leaf, move in moves
    ]
    groups = make_schedule(tuple(move for _, move in moves), None).compiled
    calls = [
        functools.partial(lowered.compile(), tuple(seen[k] for k in group))
        for lowered, group in zip(lower_moves(shapes, shardings), groups, strict=True)
    ]
    return lambda: [call() for call in calls]


def _planned(arrays: Any, shardings: Any) -> tuple[int, float]:
    """Bytes that change device, and how long it took to find out."""
    start_s = time.perf_counter()
    moved = _moved_bytes(arrays, shardings)
    return moved, time.perf_counter() - start_s


def _moved_bytes(arrays: Any, shardings: Any) -> int:
    """Bytes that change device."""
    plans = plan_transfers(
        [
            (
                leaf.shape,
                leaf.dtype.itemsize,
                shard_ranges(leaf.sharding, leaf.shape),
                shard_ranges(target, leaf.shape),
            )
            for leaf, target in zip(
                jax.tree.leaves(arrays), jax.tree.leaves(shardings), strict=True
            )
        ]
    )
    return sum(plan.moved_bytes for plan in plans)
