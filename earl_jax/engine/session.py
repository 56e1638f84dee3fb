# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Where a rollout runs, and with which weights; and how live episodes move elsewhere."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.pages import PageTable, Pool, pages_for
from earl_jax.engine.prefixes import PrefixIndex
from earl_jax.models.parameters import Params
from earl_jax.sharding.placing import placed_shapes
from earl_jax.sharding.reshard import lower_moves, reshard

if TYPE_CHECKING:
    # The engine moves pages between seats of its own.
    from earl_jax.engine.engine import PolicyEngine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Weights on a rollout layout, and their version: the number of RL steps that made them."""

    params: Params
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """The prompts in a seat's caches behind a rollout, which weights of this version have read.

    The next rollout takes them over and changes them, so they are good for one.
    """

    prefixes: PrefixIndex
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rollout runs: an engine, the policy on its layout, and the state of its slots.

    The state has room for `places` tokens an episode. `pages` says which slot has which page: the
    host's view of the state's cache, whose pool has as many parts as the layout has row shards.
    `kept` says which prompts are in pages of idle slots; None: none that count.
    """

    engine: "PolicyEngine"
    policy: Policy
    state: DecodeState
    places: int
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


def empty_seat(engine: "PolicyEngine", policy: Policy, places: int, pool: Pool) -> Seat:
    """Returns a seat with nobody in any slot."""
    return Seat(
        engine=engine,
        policy=policy,
        state=engine.empty_state(places, pool),
        places=places,
        pages=_no_pages(engine, pool),
    )


def _no_pages(engine: "PolicyEngine", pool: Pool) -> PageTable:
    config = engine.config
    return PageTable(pool, num_slots=config.num_slots, page_size=config.page_size)


def vacate(seat: Seat) -> Seat:
    """What a rollout leaves for the next under the same weights: its caches, no weights, no rows.

    `seat` is good for nothing more, but its experience stays as it is.
    """
    nobody = dataclasses.replace(seat.policy, params=None)
    return dataclasses.replace(seat, policy=nobody, state=seat.engine.renew(seat.state))


def open_seat(
    engine: "PolicyEngine", policy: Policy, places: int, pool: Pool, vacant: Seat | None = None
) -> Seat:
    """A seat for a rollout: a vacant one (`vacate`) where it is good for this, else an empty one.

    It is good for the same version of the policy on the same engine, if it has no more room.
    """
    if (
        vacant is None
        or vacant.kept is None
        or vacant.engine is not engine
        or vacant.policy.version != policy.version
        or vacant.places > places
        or vacant.pool.pages > pool.pages
    ):
        return empty_seat(engine, policy, places, pool)
    return dataclasses.replace(relocate(vacant, engine, places, pool), policy=policy)


def relocate(
    seat: Seat,
    engine: "PolicyEngine",
    places: int,
    pool: Pool,
    *,
    chunk_bytes: int | None = None,
) -> Seat:
    """Moves live episodes and their weights: to another engine, more room, another pool.

    Nothing comes to the host. `seat` stays as it is, so that its episodes outlive a lack of memory;
    what both have in common they share. Devices hold the old pool, the new one, and where both the
    mesh and the pool change one more beside them. Pages are gathered on the layout that has fewer
    row shards, where none leaves its own if one number divides the other.

    Args:
        seat: where they are, between two rounds.
        engine: where they go on, with as many slots.
        places: room for so many tokens an episode, no less than there is.
        pool: at least `seat.pages.least_pages(pool.shards)` pages in each of the row shards of
            `engine`. Prompts that idle slots keep are given up where there are not enough for them.
        chunk_bytes: as for `reshard`.

    Returns:
        The new seat, when it is there.

    Raises:
        ValueError: the pool does not hold the live episodes.
        JaxRuntimeError: there is too little memory.
    """
    assert places >= seat.places, f"{places} places, {seat.places} before"
    pages, source = seat.pages.regroup(pool)

    def repack(on: "PolicyEngine", state: DecodeState) -> DecodeState:
        if (places, pool) == (seat.places, seat.pool):
            return state
        state = on.repack(state, places, seat.pool, source if pool != seat.pool else None)
        return on.give_pages(state, pages.as_array(pages_for(places, engine.config.page_size)))

    def move(tree: Any, shardings: Any) -> Any:
        same = engine is seat.engine
        return tree if same else reshard(tree, shardings, chunk_bytes=chunk_bytes)

    params = move(seat.policy.params, engine.parameter_shardings)
    if pool.shards < seat.pool.shards:
        state = repack(engine, move(seat.state, engine.state_shardings))
    else:
        state = move(repack(seat.engine, seat.state), engine.state_shardings)
    params, state = jax.block_until_ready((params, state))
    policy = dataclasses.replace(seat.policy, params=params)
    return dataclasses.replace(
        seat, engine=engine, policy=policy, state=state, places=places, pages=pages
    )


def lower_relocation(
    here: "PolicyEngine", there: "PolicyEngine", places: int, old: Pool, room: int, new: Pool
) -> list[Any]:
    """The programs of `relocate` from `places` and `old` to `room` and `new`, from shapes alone.

    Without chunks. They are to be compiled before the move; there may be none.
    """
    late = new.shards < old.shards
    lowered = (there if late else here).lower_repack(places, old, room, new)
    if here is there:
        return lowered
    params = placed_shapes(here.parameter_shapes, here.parameter_shardings)
    shapes = here.state_shapes(places, old) if late else here.state_shapes(room, new)
    state = placed_shapes(shapes, here.state_shardings)
    return [
        *lowered,
        *lower_moves(params, there.parameter_shardings),
        *lower_moves(state, there.state_shardings),
    ]
