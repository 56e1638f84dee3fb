# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Episodes that play away from home: which row each slot writes, and when rows are brought home."""

import dataclasses

from earl_jax.engine.row_copies import RowMove
from earl_jax.engine.scheduler import Rows
from earl_jax.engine.session import Session


class Guests:
    """The rows of one rollout's slots. Host-side state only.

    `count` says how many episodes were guests.
    """

    def __init__(self, rows: Rows, num_slots: int) -> None:
        self._rows, self._slots_per_shard = rows, num_slots // rows.data_shards
        # By slot: what a guest left in its row.
        self._leaving: dict[int, RowMove] = {}
        self._is_due = False
        self.count = 0

    def begin(self, slot: int, row: int) -> int:
        """The place that this slot writes for an episode, in the whole buffer."""
        if self._rows.data_shard(row) == slot // self._slots_per_shard:
            return self._rows.home(row)
        self.count += 1
        self._is_due |= slot in self._leaving
        return self._rows.guest(slot)

    def end(self, slot: int, row: int, place: int, tokens: int) -> None:
        """The slot's episode is over; of what it wrote so many tokens count."""
        home = self._rows.home(row)
        if place != home and tokens:
            self._leaving[slot] = RowMove(place, home, tokens)

    def settle(self, session: Session, *, at_last: bool = False) -> Session:
        """The session before its next round: rows that slots need again are home.

        `at_last` there is none, and all are.
        """
        if not (self._is_due or at_last and self._leaving):
            return session
        moves = list(self._leaving.values())
        self._leaving, self._is_due = {}, False
        state = session.engine.row_copies.bring_home(session.state, moves)
        return dataclasses.replace(session, state=state)
