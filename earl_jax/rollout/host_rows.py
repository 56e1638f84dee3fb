# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of experience that the host writes, of episodes whose slots have not written them.

These are episodes that went on from a checkpoint, and those whose conversations took turns or were
sampled together. All other rows never are on the host.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from earl_jax.engine.choices import allowed_table
from earl_jax.engine.engine import Session
from earl_jax.rollout.block_manager import BlockManager
from earl_jax.rollout.row_pool import RowPool
from earl_jax.trajectory import Experience, Turn


class HostRows:
    """The rows of one rollout that are to be written, between two rounds. Host-side state only."""

    def __init__(self, rows: RowPool, blocks: BlockManager) -> None:
        """`blocks` makes rows longer where they are too short."""
        self._rows, self._blocks = rows, blocks
        self._unwritten: list[tuple[int, Sequence[Turn]]] = []

    def add(self, row: int, turns: Sequence[Turn]) -> None:
        """Has the next `write` put these turns into a row."""
        self._unwritten.append((row, turns))

    def write(self, session: Session) -> Session:
        """Returns the session with these rows. What was to move or to be cleared is before."""
        unwritten, self._unwritten = self._unwritten, []
        if unwritten:
            session = self._rows.settle(session)
        for row, turns in unwritten:
            session = self._blocks.widen(session, sum(len(turn.token_ids) for turn in turns))
            experience = session.state.experience
            scored, width = experience.model_logprobs is not None, len(experience.allowed)
            fields = as_row(turns, session.max_tokens, scored=scored, choice_width=width)
            state = session.engine.row_copies.write_row(session.state, row, fields)
            session = dataclasses.replace(session, state=state)
        return session


def as_row(
    turns: Sequence[Turn], max_tokens: int, *, scored: bool, choice_width: int = 0
) -> Experience:
    """Returns a row of experience of these turns, numpy arrays [max_tokens], as an engine has it.

    With `scored` it has `model_logprobs`, which are 0 in turns without, and with `choice_width` as
    many arrays of `allowed` ids.
    """
    tokens, turn_ids, versions = np.zeros((3, max_tokens), np.int32)
    logprobs, model_logprobs = np.zeros((2, max_tokens), np.float32)
    allowed = np.zeros((choice_width, max_tokens), np.int32)
    first, number = 0, 0
    for turn in turns:
        place = slice(first, first := first + len(turn.token_ids))
        tokens[place] = turn.token_ids
        if turn.author == "policy":
            turn_ids[place] = number = number + 1
            logprobs[place], versions[place] = turn.logprobs, turn.versions
            if turn.model_logprobs:
                model_logprobs[place] = turn.model_logprobs
            if choice_width:
                given = turn.token_ids, turn.choices, turn.allowed
                allowed[:, place] = allowed_table(*given, choice_width).T
    fields: dict[str, Any] = {"tokens": tokens, "turn_ids": turn_ids, "versions": versions}
    fields |= {"logprobs": logprobs, "model_logprobs": model_logprobs if scored else None}
    fields |= {"allowed": tuple(allowed)}
    return Experience(**fields)
