# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Load of rollouts: measured from outcomes, and expected of the next one."""

import dataclasses
import heapq
from collections.abc import Iterable

import numpy as np

from earl_jax.rollout.config import RolloutConfig
from earl_jax.rollout.results import Played
from earl_jax.telemetry.load import Load, LoadHistory


def measure_load(played: Played, num_slots: int) -> Load:
    """Returns the load of a rollout in so many slots, for the selector.

    Of episodes that processes took off a queue it is the same whichever process played what.
    """
    contexts = [outcome.num_tokens for outcome in played.outcomes]
    sampled = [outcome.num_policy_tokens for outcome in played.outcomes]
    total, in_flight = sum(sampled), played.stats.tokens_in_flight_max
    if played.order is not None:
        in_flight, _ = grow_in_slots(contexts, num_slots)
    # Prompts and answers are appended many tokens at a time: decode steps say how long it takes.
    _, steps = grow_in_slots(sampled, num_slots)
    return Load(
        context_tokens_max=max(contexts),
        context_tokens_mean=float(np.mean(contexts)),
        tokens_in_flight_max=in_flight,
        rollout_tokens=played.stats.rollout_tokens,
        # Of hundredths there are few, so that the speeds computed with them are few too.
        appended=round(sum(contexts) / total - 1.0, 2) if total else None,
        live=max(1, round(total / steps)) if steps else None,
    )


def grow_in_slots(lengths: Iterable[int], num_slots: int) -> tuple[int, int]:
    """Returns the most tokens at once of episodes that grow alike, and the steps until all end.

    Each grows by a token a step; they begin as slots are free.

    Example: lengths 2 4 3 in two slots: the first ends at 2, when the third begins; at 4 the second
    ends with 4 tokens, beside 2 of the third: 6; at 5 the third ends.
    """
    # (end, begin) of those that play, the first to end first.
    playing: list[tuple[int, int]] = []
    most = now = begun = 0

    def end_first() -> int:
        nonlocal most, now, begun
        # All of them, that one too, have grown since they began.
        most = max(most, len(playing) * playing[0][0] - begun)
        now, begin = heapq.heappop(playing)
        begun -= begin
        return now

    for length in lengths:
        begin = end_first() if len(playing) == num_slots else 0
        heapq.heappush(playing, (begin + length, begin))
        begun += begin
    while playing:
        end_first()
    return most, now


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
