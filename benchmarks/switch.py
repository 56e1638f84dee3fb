# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The stall of a change of mesh: python -m earl_jax.bench switch --config=configs/X.py.

From the first mesh of each stage to each of the others that the config may choose from: the trainer
with its optimizer, new weights for a rollout, and weights with live KV caches in the middle of a
rollout. The columns:

- `compile s`: the move's programs, the first time, where no earlier run has left them in the user's
  cache folder; `cached s` where one has;
- `stalled ms`: the move and nothing else, the median behind warm-up;
- `copy ms`: beside it in the same process, a plain copy of as many bytes as must change device;
- `writing ms`: a plain copy, on each device, of as many bytes as a device holds afterwards.
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
from earl_jax.dispatch.weights import publish
from earl_jax.engine.pages import dense_pool, pages_for
from earl_jax.engine.session import Policy, Session, empty_session, relocate
from earl_jax.selector.memory import resident_bytes
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.ranges import shard_ranges
from earl_jax.sharding.reshard import reshard
from earl_jax.sharding.transfer_plan import plan_transfers
from earl_jax.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switch:
    """One change of mesh: `run` makes what is there afterwards, and gives up nothing.

    `size` is what a device holds of it then, `moved` what changes device, in bytes; None where
    pages are regrouped on the way.
    """

    what: str
    source: MeshShape
    target: MeshShape
    size: int
    moved: int | None
    run: Callable[[], Any]


def measure(config: Config, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each switch."""
    for switch in _switches(World(config)):
        yield _row(switch, repeats)


def _switches(world: World) -> Iterator[Switch]:
    rollout, train = world.problem.rollout_meshes, world.problem.train_meshes
    state = world.init_train_state(train[0])
    for mesh in train[1:]:
        shardings = world.train_state_shardings(mesh)
        yield Switch(
            what="trainer",
            source=train[0],
            target=mesh,
            size=resident_bytes(state, shardings),
            moved=_moved_bytes(state, shardings),
            run=functools.partial(reshard, state, shardings),
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
    session = _full_session(world, rollout[0], params)
    for mesh in rollout[1:]:
        engine = world.engine(mesh)
        there = _full_pool(world, mesh)
        shapes = (engine.parameter_shapes, engine.state_shapes(session.max_tokens, there))
        shardings = (engine.parameter_shardings, engine.state_shardings)

        def run(engine: Any = engine, there: Any = there) -> Any:
            moved = relocate(session, engine, session.max_tokens, there)
            return moved.policy.params, moved.state

        yield Switch(
            what="live rollout",
            source=rollout[0],
            target=mesh,
            size=resident_bytes(shapes, shardings),
            moved=None
            if there != session.pool
            else _moved_bytes((session.policy.params, session.state), shardings),
            run=run,
        )


def _full_pool(world: World, mesh: MeshShape) -> Any:
    rollout = world.config.rollout
    max_tokens, size = rollout.context_buckets[-1], rollout.tokens_a_page
    return dense_pool(mesh.data, rollout.num_slots, max_tokens, size)


def _full_session(world: World, mesh: MeshShape, params: Any) -> Session:
    """Returns a session whose slots have all their pages, at the last context bucket."""
    engine, max_tokens = world.engine(mesh), world.config.rollout.context_buckets[-1]
    weights = publish(params, engine.parameter_shapes, engine.parameter_shardings).params
    policy = Policy(params=weights, version=0)
    session = empty_session(engine, policy, max_tokens, _full_pool(world, mesh))
    for slot in range(engine.config.num_slots):
        session.pages.hold(slot, max_tokens)
    table = session.pages.as_array(pages_for(max_tokens, engine.config.page_size))
    return dataclasses.replace(session, state=engine.give_pages(session.state, table))


def _row(switch: Switch, repeats: int) -> dict[str, Any]:
    jax.clear_caches()
    first_s = _once(switch.run)
    # What the cache folder holds by now is read again.
    jax.clear_caches()
    cached_s = _once(switch.run)
    stalled_s, copy_s, writing_s = seconds(
        switch.run, copy_of(switch.moved or 0), writing_of(switch.size), repeats=repeats
    )
    return {
        "what": switch.what,
        "from": str(switch.source),
        "to": str(switch.target),
        "MiB a device": switch.size / 2**20,
        "moved MiB": None if switch.moved is None else switch.moved / 2**20,
        "compile s": first_s - stalled_s,
        "cached s": cached_s - stalled_s,
        "stalled ms": 1e3 * stalled_s,
        "copy ms": 1e3 * copy_s if switch.moved else None,
        "times a copy": stalled_s / copy_s if switch.moved else None,
        "writing ms": 1e3 * writing_s,
        "times writing": stalled_s / writing_s,
    }


def writing_of(size: int) -> Callable[[], Any]:
    """Returns what copies so many bytes on every device."""
    parts = [jnp.ones(size, jnp.uint8, device=device) for device in jax.devices()]
    return lambda: list(map(jnp.copy, parts))


def _once(run: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start_s


def _moved_bytes(arrays: Any, shardings: Any) -> int:
    """Returns the bytes that change device."""
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
