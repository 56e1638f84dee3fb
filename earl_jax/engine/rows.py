# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The layout of the buffer of experience rows: arithmetic on the host.

Rows and slots are cut into equal data shards, as many as divide the number of devices, of slots and
of rows. Every mesh whose data axis divides these keeps a data shard on one row shard of its own, so
which episode writes which row does not depend on the mesh.

An episode may play in a slot of another data shard than that of its row (a borrowed slot). It then
writes the spare row of that slot, which is copied to its own row when the episode is over
(row_copies.py).
"""

import math
from typing import NamedTuple


class Rows(NamedTuple):
    """The rows of each of `data_shards`: first `own`, one a task, then `spare`, one a slot.

    Without spare rows (0) episodes play in slots of their own data shard only.

    Example: Rows(2, 3, 2) are ten buffer rows. 0 1 2 and 5 6 7 are those of tasks 0 to 5; the
    slots 0 1 and 2 3 have the spare rows 3 4 and 8 9.
    """

    data_shards: int
    own: int
    spare: int

    @property
    def total(self) -> int:
        """Rows of the whole buffer."""
        return self.data_shards * (self.own + self.spare)

    def data_shard(self, row: int) -> int:
        """Returns the data shard of a task's row."""
        return row // self.own

    def own_row(self, row: int) -> int:
        """Returns the buffer row of task `row`."""
        return row + self.data_shard(row) * self.spare

    def spare_row(self, slot: int) -> int:
        """Returns the buffer row of a slot's spare row."""
        return slot + (slot // self.spare + 1) * self.own


def make_rows(*, num_rows: int, num_slots: int, num_devices: int, spare: bool = True) -> Rows:
    """Returns the rows for so many tasks; with `spare`, a spare one for each slot.

    The number of data shards is the greatest common divisor of the three numbers, which every data
    axis divides that a mesh of so many devices can have with these slots and rows.

    Example: 8 devices with 12 slots and 48 rows: 4 data shards, of 3 slots and 12 + 3 rows.
    """
    shards = math.gcd(num_rows, num_slots, num_devices)
    return Rows(shards, num_rows // shards, num_slots // shards if spare and shards > 1 else 0)
