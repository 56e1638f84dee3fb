# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Conversations of an episode that has several, and the order in which its row holds them."""

import dataclasses
from collections.abc import Sequence

from earl_jax.envs.text.conversation import Conversation
from earl_jax.trajectory import Turn


@dataclasses.dataclass(frozen=True)
class Side:
    """A side or a conversation that is not on the move, and all ids of its context."""

    conversation: Conversation
    ids: tuple[int, ...]


def by_conversation(
    turns: Sequence[Turn], rewards: Sequence[float]
) -> tuple[list[Turn], list[float]]:
    """Returns turns and rewards as a row has them: a conversation is one sample of the episode.

    Messages and replies alternate, and each reply but the last has a reward. Conversations come in
    the order of their last replies, so that what follows a turn in time follows it in the row.

    Example: messages and replies of the conversations 1 2 1 with rewards 3 4 5 are those of 2 1 1
    with 4 3 5.
    """
    last = {turn.conversation: place for place, turn in enumerate(turns)}
    pairs = range(0, len(turns), 2)
    order = sorted(pairs, key=lambda place: last[turns[place].conversation])
    found, seen = list[Turn](), set[int]()
    for turn in (turn for place in order for turn in turns[place : place + 2]):
        begins = turn.conversation not in seen
        seen.add(turn.conversation)
        found.append(dataclasses.replace(turn, forks=len(seen) > 1) if begins else turn)
    return found, [rewards[place // 2] for place in order if place // 2 < len(rewards)]
