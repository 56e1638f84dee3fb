# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Where a rollout runs, and with which weights."""

import dataclasses
from typing import TYPE_CHECKING

from earl_jax.models.parameters import Params
from earl_jax.rollout.decode_state import DecodeState
from earl_jax.rollout.pages import Pool

if TYPE_CHECKING:
    # The engine moves pages between seats of its own.
    from earl_jax.rollout.engine import PolicyEngine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Weights on a rollout layout, and their version: the number of RL steps that made them."""

    params: Params
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rollout runs: an engine, the policy on its layout, and the state of its slots.

    The state has room for `places` tokens an episode, and the pages of `pool`.
    """

    engine: "PolicyEngine"
    policy: Policy
    state: DecodeState
    places: int
    pool: Pool
