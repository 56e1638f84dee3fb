# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Which waiting episode gets which slot: lanes, plain arithmetic on the host.

Rows of experience and slots are cut into `num_lanes` equal lanes, as many as there are devices. An
episode only ever uses a slot of its row's lane, so on every mesh whose data axis divides the number
of lanes a slot and its row are on the same data shard, and who sits where does not depend on the
mesh.
"""

import collections
from collections.abc import Sequence


class LaneScheduler:
    """Hands free slots to waiting rows, lane by lane, in the order of the rows."""

    def __init__(self, rows: Sequence[int], *, num_rows: int, num_slots: int, num_lanes: int):
        """`rows` wait; they are numbers below `num_rows`.

        Raises:
            ValueError: slots or rows do not divide into lanes.
        """
        for field, number in (("num_slots", num_slots), ("episodes_per_step", num_rows)):
            if number % num_lanes:
                raise ValueError(
                    f"config.rollout.{field} is {number}, which does not divide over {num_lanes} "
                    f"devices; choose a multiple of {num_lanes}"
                )
        self._slots_per_lane = num_slots // num_lanes
        rows_per_lane = num_rows // num_lanes
        self._waiting = [collections.deque[int]() for _ in range(num_lanes)]
        for row in rows:
            self._waiting[row // rows_per_lane].append(row)

    @property
    def num_waiting(self) -> int:
        """How many rows have no slot yet."""
        return sum(map(len, self._waiting))

    def next_row(self, slot: int) -> int | None:
        """The row that this free slot takes now, or None where its lane has none waiting."""
        waiting = self._waiting[slot // self._slots_per_lane]
        return waiting.popleft() if waiting else None
