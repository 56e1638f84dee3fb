# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Where a rollout runs, and with which weights."""

import dataclasses
from typing import TYPE_CHECKING

from earl_jax.models.parameters import Params
from earl_jax.rollout.decode_state import DecodeState
from earl_jax.rollout.pages import PageTable, Pool
from earl_jax.rollout.prefixes import PrefixIndex

if TYPE_CHECKING:
    # The engine moves pages between seats of its own.
    from earl_jax.rollout.engine import PolicyEngine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Weights on a rollout layout, and their version: the number of RL steps that made them."""

    params: Params
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """What caches hold behind a rollout: prompts that weights of this version have read.

    Who has which page, and which prompts these are. The next rollout takes both over and changes
    them, so they are good for one.
    """

    pages: PageTable
    prefixes: PrefixIndex
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rollout runs: an engine, the policy on its layout, and the state of its slots.

    The state has room for `places` tokens an episode, and the pages of `pool`. `kept` says what is
    in these already; None: nothing that counts.
    """

    engine: "PolicyEngine"
    policy: Policy
    state: DecodeState
    places: int
    pool: Pool
    kept: Kept | None = None


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
        state = engine.empty_state(places, pool)
        return Seat(engine=engine, policy=policy, state=state, places=places, pool=pool)
    state, kept = vacant.state, vacant.kept
    if (vacant.places, vacant.pool) != (places, pool):
        state = engine.grow(state, places, vacant.pool, pool)
        kept.pages.grow(pool)
    return Seat(engine=engine, policy=policy, state=state, places=places, pool=pool, kept=kept)
