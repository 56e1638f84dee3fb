# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a change of mesh costs: python -m earl_jax.bench switch --config=configs/X.py.

From the first mesh of each stage to each of the others, between the meshes that the config may
choose from: new weights for a rollout, the trainer with its optimiser, and weights with live KV
caches in the middle of a rollout. Seconds stalled are those of the move and of nothing else, the
median behind warm-up; the copy is of as many bytes as must change device, in the same process. A
switch that compiles its move first takes `compile s` more where no earlier run has left the program
in the user's cache folder, and `cached s` more where one has.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks.dispatch.within import copy_of, seconds
from earl_jax.config import Config
from earl_jax.rollout.seat import Policy, Seat
from earl_jax.selector.memory import resident_bytes
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.ranges import shard_ranges
from earl_jax.sharding.reshard import reshard
from earl_jax.sharding.transfer_plan import plan_transfers
from earl_jax.weights import publish
from earl_jax.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switch:
    """One change of mesh: `run` makes what is there afterwards, and gives up nothing.

    `size` is what a device holds of it then, `moved` what changes device, in bytes.
    """

    what: str
    source: MeshShape
    target: MeshShape
    size: int
    moved: int
    run: Callable[[], Any]


def measure(config: Config, repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each switch."""
    for switch in _switches(World(config)):
        yield _row(switch, repeats)


def _switches(world: World) -> Iterator[Switch]:
    rollout, train = world.rollout_candidates, world.train_candidates
    state = world.init_train_state(train[0])
    for mesh in train[1:]:
        shardings = world.train_state_shardings(mesh)
        yield Switch(
            what="trainer",
            source=train[0],
            target=mesh,
            size=resident_bytes(state, shardings),
            moved=_moved_bytes(state, shardings),
            run=lambda shardings=shardings: reshard(state, shardings),
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
            run=lambda goal=goal: publish(params, *goal).params,
        )
    seat = _seat(world, rollout[0], params)
    for mesh in rollout[1:]:
        engine = world.engine(mesh)
        arrays = (seat.policy.params, seat.state)
        shardings = (engine.parameter_shardings, engine.state_shardings)
        yield Switch(
            what="live rollout",
            source=rollout[0],
            target=mesh,
            size=resident_bytes(arrays, shardings),
            moved=_moved_bytes(arrays, shardings),
            run=lambda arrays=arrays, shardings=shardings: reshard(arrays, shardings),
        )


def _seat(world: World, mesh: MeshShape, params: Any) -> Seat:
    """Every slot with all its pages, at the last room that is configured."""
    engine, places = world.engine(mesh), world.config.rollout.context_buckets[-1]
    pool = world.pool_for(places)
    weights = publish(params, engine.parameter_shapes, engine.parameter_shardings).params
    return Seat(
        engine=engine,
        policy=Policy(params=weights, version=0),
        state=engine.empty_state(places, pool),
        places=places,
        pool=pool,
    )


def _row(switch: Switch, repeats: int) -> dict[str, Any]:
    jax.clear_caches()
    first_s = _once(switch.run)
    # What the cache folder holds by now is read again.
    jax.clear_caches()
    cached_s = _once(switch.run)
    stalled_s, copy_s = seconds(switch.run, copy_of(switch.moved), repeats=repeats)
    copy_s = copy_s if switch.moved else 0.0
    return {
        "what": switch.what,
        "from": str(switch.source),
        "to": str(switch.target),
        "MiB a device": switch.size / 2**20,
        "moved MiB": switch.moved / 2**20,
        "stalled ms": 1e3 * stalled_s,
        "copy ms": 1e3 * copy_s,
        "times a copy": stalled_s / copy_s if copy_s else None,
        "compile s": first_s - stalled_s,
        "cached s": cached_s - stalled_s,
    }


def _once(run: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start_s


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
