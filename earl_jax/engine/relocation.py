# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Moves of sessions: live episodes go on with another engine, more tokens or another pool."""

import dataclasses
import math
from typing import Any

import jax

from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.engine import Engine, Session
from earl_jax.engine.pages import Pool
from earl_jax.models.layer_groups import pages_for
from earl_jax.sharding.reshard import reshard


def relocate(
    session: Session,
    engine: Engine,
    max_tokens: int,
    pool: Pool,
) -> Session:
    """Moves live episodes and their weights: to another engine, more tokens, another pool.

    Nothing comes to the host. `session` stays as it is, so that its episodes survive a lack of
    memory; arrays that both have are shared. Devices hold the old pool, the new one, and where
    both the mesh and the pool change one more beside them. Pages are gathered on the layout that
    has fewer row shards, where none leaves its own if one number divides the other; else on one
    that can cut both pools (`reachable_pool`).

    Args:
        session: the session to move, between two rounds.
        engine: the engine to move to, with as many slots.
        max_tokens: tokens an episode, no fewer than before.
        pool: at least `session.pages.least_pages(pool.shards)` pages in each of the row shards of
            `engine`. Prompts that idle slots keep are given up where there are not enough for them.

    Returns:
        The new session, when it is there.

    Raises:
        ValueError: the pool does not hold the live episodes.
        JaxRuntimeError: there is too little memory.
    """
    assert max_tokens >= session.max_tokens, f"{max_tokens} tokens, {session.max_tokens} before"
    pages, source = session.pages.regroup(pool)

    def repack(on: Engine, state: DecodeState) -> DecodeState:
        if (max_tokens, pool) == (session.max_tokens, session.pool):
            return state
        state = on.repack(state, max_tokens, session.pool, source if pool != session.pool else None)
        return on.give_pages(state, pages.as_array(pages_for(max_tokens, engine.config.page_size)))

    def move(tree: Any, shardings: Any) -> Any:
        # Weights may have been let go, for others that arrive behind the move.
        same = engine is session.engine or tree is None
        return tree if same else reshard(tree, shardings)

    params = move(session.policy.params, engine.parameter_shardings)
    if _gathers_there(session.pool, pool):
        state = repack(engine, move(session.state, engine.state_shardings))
    else:
        state = move(repack(session.engine, session.state), engine.state_shardings)
    params, state = jax.block_until_ready((params, state))
    policy = dataclasses.replace(session.policy, params=params)
    return dataclasses.replace(
        session, engine=engine, policy=policy, state=state, max_tokens=max_tokens, pages=pages
    )


def reachable_pool(old: Pool, new: Pool) -> Pool:
    """Returns `new`, with a few pages less where neither layout could cut both pools.

    Example: 3 pages in each of 6 row shards, and 5 in each of 4: 4 do not divide 18, nor 6 20. With
    3 pages in each of 4 the 12 pages can be cut in 6, and so be gathered before they move.
    """
    if old.total % new.shards == 0 or new.total % old.shards == 0:
        return new
    unit = old.shards // math.gcd(old.shards, new.shards)
    return new._replace(pages=new.pages // unit * unit)


def _gathers_there(old: Pool, new: Pool) -> bool:
    """Returns True if pages are gathered behind the move, on the layout of the pool `new`."""
    here, there = new.total % old.shards == 0, old.total % new.shards == 0
    assert here or there, f"{old} and {new} are on no layout together (reachable_pool)"
    return there and (new.shards < old.shards or not here)
