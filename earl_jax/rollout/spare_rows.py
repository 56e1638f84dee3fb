# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The buffer row that each slot of a rollout writes, and the copies from spare to own rows."""

import dataclasses

from earl_jax.engine.row_copies import RowMove
from earl_jax.engine.rows import Rows
from earl_jax.engine.session import Session


class SpareRows:
    """The spare rows of one rollout's slots. Host-side state only.

    `num_borrowed` counts the episodes that played in a borrowed slot.
    """

    def __init__(self, rows: Rows, num_slots: int) -> None:
        self._rows, self._slots_per_shard = rows, num_slots // rows.data_shards
        # By slot: the copy of a finished episode's spare row that is still to be made.
        self._pending: dict[int, RowMove] = {}
        self._is_due = False
        self.num_borrowed = 0

    def begin(self, slot: int, row: int) -> int:
        """Returns the buffer row that this slot writes for task `row`."""
        if self._rows.data_shard(row) == slot // self._slots_per_shard:
            return self._rows.own_row(row)
        self.num_borrowed += 1
        self._is_due |= slot in self._pending
        return self._rows.spare_row(slot)

    def end(self, slot: int, row: int, buffer_row: int, tokens: int) -> None:
        """Notes that the slot's episode is over, with so many tokens in `buffer_row`."""
        own = self._rows.own_row(row)
        if buffer_row != own and tokens:
            self._pending[slot] = RowMove(buffer_row, own, tokens)

    def settle(self, session: Session, *, at_last: bool = False) -> Session:
        """Returns the session with spare rows copied that a slot is about to write again.

        With `at_last` all pending copies are made.
        """
        if not (self._is_due or at_last and self._pending):
            return session
        moves = list(self._pending.values())
        self._pending, self._is_due = {}, False
        state = session.engine.row_copies.move_rows(session.state, moves)
        return dataclasses.replace(session, state=state)
