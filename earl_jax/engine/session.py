# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Where a rollout runs, and with which weights; and how live episodes move elsewhere."""

import dataclasses
from typing import Any

import jax

from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.engine import Engine
from earl_jax.engine.pages import PageTable, Pool, pages_for
from earl_jax.engine.prefixes import PrefixIndex
from earl_jax.models.parameters import Params
from earl_jax.sharding.placing import placed_shapes
from earl_jax.sharding.reshard import lower_moves, reshard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Weights on a rollout layout, and their version: the number of RL steps that made them."""

    params: Params
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """The prompts in a session's caches behind a rollout, which weights of this version have read.

    The next rollout takes them over and changes them, so they are good for one.
    """

    prefixes: PrefixIndex
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """Where a rollout runs: an engine, the policy on its layout, and the state of its slots.

    The state has room for `places` tokens an episode. `pages` says which slot has which page: the
    host's view of the state's cache, whose pool has as many parts as the layout has row shards.
    `kept` says which prompts are in pages of idle slots; None: none that count.
    """

    engine: Engine
    policy: Policy
    state: DecodeState
    max_tokens: int
    pages: PageTable
    kept: Kept | None = None

    def __post_init__(self) -> None:
        """Checks that the pool is cut as the layout is."""
        shards = self.engine.layout.num_row_shards
        assert self.pool.shards == shards, f"{self.pool} on {self.engine.layout}"

    @property
    def pool(self) -> Pool:
        """The pages that there are."""
        return self.pages.pool


def empty_session(engine: Engine, policy: Policy, max_tokens: int, pool: Pool) -> Session:
    """Returns a session with nobody in any slot."""
    return Session(
        engine=engine,
        policy=policy,
        state=engine.empty_state(max_tokens, pool),
        max_tokens=max_tokens,
        pages=_no_pages(engine, pool),
    )


def _no_pages(engine: Engine, pool: Pool) -> PageTable:
    config = engine.config
    return PageTable(pool, num_slots=config.num_slots, page_size=config.page_size)


def vacate(session: Session) -> Session:
    """What a rollout leaves for the next under the same weights: its caches, no weights, no rows.

    `session` is good for nothing more, but its experience stays as it is.
    """
    nobody = dataclasses.replace(session.policy, params=None)
    return dataclasses.replace(session, policy=nobody, state=session.engine.renew(session.state))


def open_session(
    engine: Engine,
    policy: Policy,
    max_tokens: int,
    pool: Pool,
    vacant: Session | None = None,
) -> Session:
    """Returns a session for a rollout: the vacant one (`vacate`) where it fits, else an empty one.

    It is good for the same version of the policy on the same engine, if it has no more room.
    """
    if (
        vacant is None
        or vacant.kept is None
        or vacant.engine is not engine
        or vacant.policy.version != policy.version
        or vacant.max_tokens > max_tokens
        or vacant.pool.pages > pool.pages
    ):
        return empty_session(engine, policy, max_tokens, pool)
    return dataclasses.replace(relocate(vacant, engine, max_tokens, pool), policy=policy)


def relocate(
    session: Session,
    engine: Engine,
    max_tokens: int,
    pool: Pool,
    *,
    chunk_bytes: int | None = None,
) -> Session:
    """Moves live episodes and their weights: to another engine, more room, another pool.

    Nothing comes to the host. `session` stays as it is, so that its episodes outlive a lack of
    memory; what both have in common they share. Devices hold the old pool, the new one, and where
    both the mesh and the pool change one more beside them. Pages are gathered on the layout that
    has fewer row shards, where none leaves its own if one number divides the other.

    Args:
        session: where they are, between two rounds.
        engine: where they go on, with as many slots.
        max_tokens: room for so many tokens an episode, no less than there is.
        pool: at least `session.pages.least_pages(pool.shards)` pages in each of the row shards of
            `engine`. Prompts that idle slots keep are given up where there are not enough for them.
        chunk_bytes: as for `reshard`.

    Returns:
        The new session, when it is there.

    Raises:
        ValueError: the pool does not hold the live episodes.
        JaxRuntimeError: there is too little memory.
    """
    assert max_tokens >= session.max_tokens, f"{max_tokens} places, {session.max_tokens} before"
    pages, source = session.pages.regroup(pool)

    def repack(on: Engine, state: DecodeState) -> DecodeState:
        if (max_tokens, pool) == (session.max_tokens, session.pool):
            return state
        state = on.repack(state, max_tokens, session.pool, source if pool != session.pool else None)
        return on.give_pages(state, pages.as_array(pages_for(max_tokens, engine.config.page_size)))

    def move(tree: Any, shardings: Any) -> Any:
        same = engine is session.engine
        return tree if same else reshard(tree, shardings, chunk_bytes=chunk_bytes)

    params = move(session.policy.params, engine.parameter_shardings)
    if pool.shards < session.pool.shards:
        state = repack(engine, move(session.state, engine.state_shardings))
    else:
        state = move(repack(session.engine, session.state), engine.state_shardings)
    params, state = jax.block_until_ready((params, state))
    policy = dataclasses.replace(session.policy, params=params)
    return dataclasses.replace(
        session, engine=engine, policy=policy, state=state, max_tokens=max_tokens, pages=pages
    )


def lower_relocation(
    here: Engine, there: Engine, max_tokens: int, old: Pool, room: int, new: Pool
) -> list[Any]:
    """The programs of `relocate` from `places` and `old` to `room` and `new`, from shapes alone.

    Without chunks. They are to be compiled before the move; there may be none.
    """
    late = new.shards < old.shards
    lowered = (there if late else here).lower_repack(max_tokens, old, room, new)
    if here is there:
        return lowered
    params = placed_shapes(here.parameter_shapes, here.parameter_shardings)
    shapes = here.state_shapes(max_tokens, old) if late else here.state_shapes(room, new)
    state = placed_shapes(shapes, here.state_shardings)
    return [
        *lowered,
        *lower_moves(params, there.parameter_shardings),
        *lower_moves(state, there.state_shardings),
    ]
