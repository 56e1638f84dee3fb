# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The layout of the buffer of experience rows: arithmetic on the host.

Rows and slots are cut into equal data shards, as many as divide the number of devices, of slots and
of rows. Every mesh whose data axis divides these keeps a data shard on one row shard of its own, so
which slots can write a row does not depend on the mesh.
"""

import math
from typing import NamedTuple

# In place of the number of a row, where nothing is recorded.
NO_ROW = -1


class Rows(NamedTuple):
    """The rows of each of `data_shards`: `own` ones for each batch, then `spare`, one a slot.

    Tasks are numbered; task t is number t modulo `batch_size` of its batch. The buffer holds
    `batches` of them. With one data shard there are no spare rows.

    Example: Rows(2, 3, 2) are ten buffer rows. 0 1 2 and 5 6 7 are those of a batch's six tasks;
    the slots 0 1 and 2 3 have the spare rows 3 4 and 8 9 besides.
    """

    data_shards: int
    own: int
    spare: int
    batches: int = 1

    @property
    def of_each(self) -> int:
        """Rows of a data shard."""
        return self.own * self.batches + self.spare

    @property
    def total(self) -> int:
        """Rows of the whole buffer."""
        return self.data_shards * self.of_each

    @property
    def batch_size(self) -> int:
        """The number of tasks of a batch."""
        return self.data_shards * self.own

    def own_shard(self, task: int) -> int:
        """Returns the data shard of a task's own row."""
        return task % self.batch_size // self.own

    def own_row(self, task: int) -> int:
        """Returns the buffer row of a task."""
        batch, number = divmod(task, self.batch_size)
        shard, row = divmod(number, self.own)
        return shard * self.of_each + batch % self.batches * self.own + row

    def of_shard(self, shard: int) -> range:
        """Returns the buffer rows of a data shard."""
        return range(shard * self.of_each, (shard + 1) * self.of_each)


def make_rows(*, num_rows: int, num_slots: int, num_devices: int, batches: int = 1) -> Rows:
    """Returns the rows for so many `batches` of `num_rows` tasks, and a spare one for each slot.

    The number of data shards is the greatest common divisor of the three numbers, which every data
    axis divides that a mesh of so many devices can have with these slots and rows.

    Example: 8 devices with 12 slots and 48 rows: 4 data shards, of 3 slots and 12 + 3 rows.
    """
    shards = math.gcd(num_rows, num_slots, num_devices)
    return Rows(shards, num_rows // shards, num_slots // shards if shards > 1 else 0, batches)
