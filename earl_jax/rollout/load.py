# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Load of rollouts: measured from outcomes, and expected of the next one."""

import dataclasses

import numpy as np

from earl_jax.rollout.config import RolloutConfig
from earl_jax.rollout.gather import Played
from earl_jax.telemetry.load import Load, LoadHistory


def measure_load(played: Played) -> Load:
    """Returns the load of a rollout, for the selector."""
    contexts = [outcome.num_tokens for outcome in played.outcomes]
    return Load(
        context_tokens_max=max(contexts),
        context_tokens_mean=float(np.mean(contexts)),
        tokens_in_flight_max=played.stats.tokens_in_flight_max,
        rollout_tokens=played.stats.rollout_tokens,
    )


def expected_load(rollout: RolloutConfig, history: LoadHistory) -> Load | None:
    """Returns the load to expect next, in which contexts grow no further than they may.

    Nor than the configured context buckets, unless contexts are longer already: programs for a
    larger bucket are compiled when an episode needs it, and not because growth may go on. None
    before the first step.
    """
    load, recent = history.forecast(), history.recent()
    if load is None or recent is None:
        return None
    longest = recent.context_tokens_max
    most = max(longest, rollout.context_buckets[-1] - rollout.round_tokens)
    most = min(load.context_tokens_max, most, rollout.max_episode_tokens or most)
    growth = min(load.growth_tokens, max(0, most - longest))
    return dataclasses.replace(load, context_tokens_max=most, growth_tokens=growth)


def expected_tokens(rollout: RolloutConfig, load: Load | None) -> int:
    """Returns the tokens that an episode of the next rollout may come to.

    As many as recent ones and a round more, but no more than they may have.
    """
    if load is None:
        return rollout.context_buckets[0]
    expected = load.context_tokens_max + rollout.round_tokens
    return min(expected, rollout.max_episode_tokens or expected)
