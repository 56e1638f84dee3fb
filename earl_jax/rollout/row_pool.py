# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The rows of experience of a rollout's slots: free, written, or held by the client. Host-side.

An episode writes a row of its slot's data shard. When it is over the client holds the row until it
gives it back. Where all rows of a data shard are held while a task waits for one of its slots, a
held row is copied to a data shard that has a free one.
"""

import dataclasses
from collections.abc import Callable, Sequence

from earl_jax.engine.engine import Session
from earl_jax.engine.row_copies import RowMove
from earl_jax.engine.rows import NO_ROW, Rows
from earl_jax.trajectory import Trajectory


@dataclasses.dataclass(kw_only=True)
class Finished:
    """A finished episode, by the number of its task; `trajectory.row` is its device row.

    The row holds the episode until the client releases it. Its number may change in a later step,
    here too.
    """

    ticket: int
    trajectory: Trajectory

    @property
    def row(self) -> int:
        """The row of `session.state.experience`; it is 0 behind the episode."""
        return self.trajectory.row


class RowPool:
    """The rows of one rollout. `num_of_other_shards` tasks began in another shard than theirs."""

    def __init__(self, rows: Rows, num_slots: int, lose_row: Callable[[int], None]) -> None:
        """`lose_row` is called with each row that holds another episode from the next round on."""
        self._rows, self._slots_per_shard = rows, num_slots // rows.data_shards
        self._lose_row = lose_row
        # Dicts for sets that keep their order.
        shards = range(rows.data_shards)
        self._free = [dict.fromkeys(rows.of_shard(shard)) for shard in shards]
        self._held: list[dict[int, Finished]] = [{} for _ in shards]
        self._written: set[int] = set()
        self._moves: list[RowMove] = []
        self.num_of_other_shards = 0

    def offer(self, slots: Sequence[int]) -> list[int]:
        """Returns those of these slots that can all have a row (`take`)."""
        most = sum(map(len, self._free))
        left = [len(free) + len(held) for free, held in zip(self._free, self._held, strict=True)]
        offered = []
        for slot in slots:
            shard = slot // self._slots_per_shard
            if left[shard] and len(offered) < most:
                left[shard] -= 1
                offered.append(slot)
        return offered

    def take(self, slot: int, ticket: int) -> int:
        """Returns the row that this slot writes for the task: its own one where that is free."""
        shard = slot // self._slots_per_shard
        self.num_of_other_shards += self._rows.own_shard(ticket) != shard
        if not self._free[shard]:
            self._move_away(shard)
        free, row = self._free[shard], self._rows.own_row(ticket)
        # Spare rows come last, and are taken first by tasks of other data shards.
        row = row if row in free else next(reversed(free))
        del free[row]
        self._lose_row(row)
        if row in self._written:
            self._moves.append(RowMove(row, NO_ROW, 0))
        self._written.add(row)
        return row

    def _move_away(self, shard: int) -> None:
        """Moves the row that is held the longest to the data shard with the most free rows."""
        row, finished = next(iter(self._held[shard].items()))
        there = max(range(self._rows.data_shards), key=lambda other: len(self._free[other]))
        target, _ = self._free[there].popitem()
        self._held[there][target] = self._held[shard].pop(row)
        self._free[shard][row] = None
        self._lose_row(target)
        self._written.add(target)
        self._moves.append(RowMove(row, target, finished.trajectory.num_tokens))
        finished.trajectory = dataclasses.replace(finished.trajectory, row=target)

    def hold(self, finished: Finished) -> None:
        """Notes that the client holds the row of this episode."""
        self._held[self._shard(finished.row)][finished.row] = finished

    def release(self, row: int) -> None:
        """Takes a row back that is held, or that an aborted episode wrote."""
        shard = self._shard(row)
        self._held[shard].pop(row, None)
        self._free[shard][row] = None

    def is_held(self, row: int) -> bool:
        """Returns whether the client holds this row."""
        return 0 <= row < self._rows.total and row in self._held[self._shard(row)]

    def _shard(self, row: int) -> int:
        return row // self._rows.of_each

    def settle(self, session: Session) -> Session:
        """Returns the session with rows moved, and those cleared that are written again."""
        moves, self._moves = self._moves, []
        return move_rows(session, moves)


def move_rows(session: Session, moves: Sequence[RowMove]) -> Session:
    """Makes the moves, one after the other in effect. Donates the rows."""
    state = session.state
    for call in calls_of(moves, session.engine.config.num_slots):
        state = session.engine.row_copies.move_rows(state, call)
    return dataclasses.replace(session, state=state)


def calls_of(moves: Sequence[RowMove], most: int) -> list[list[RowMove]]:
    """Returns the moves in calls of at most `most`, which reads all rows before it writes one.

    Example: 1 -> 3, 0 -> 1 and 3 -> 0 are two calls, because the last reads what the first writes.
    """
    calls: list[list[RowMove]] = []
    targets: set[int] = set()
    for move in moves:
        if not calls or len(calls[-1]) == most or targets & {move.source, move.target}:
            calls.append([])
            targets = set()
        calls[-1].append(move)
        targets |= {move.target} - {NO_ROW}
    return calls
