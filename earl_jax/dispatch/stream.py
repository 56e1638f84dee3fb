# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rows sent to the trainer as their episodes finish, one by one, while others are played.

    stream = RowStream(experience, layout, length=512)
    stream.send(session_experience, [(3, 0), (5, 1)])    # rows 3 and 5 are done: places 0 and 1
    ...
    delivery = dispatch(stream.take(), layout, length=512, ...)    # nothing is left to move

A send returns at once: what is cut, sent and written follows in the devices' queues.

Rows may be made in some processes and wanted in others: every process then calls all of this alike,
with the rows of all as one array (a handle where it has none, `reshard.absent_array`) and the moves
of all, which they tell each other first; and the rows follow when all have called.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from earl_jax.sharding.chunks import zeros_on
from earl_jax.sharding.layout import Layout
from earl_jax.sharding.ranges import process_of, shard_ranges
from earl_jax.sharding.reshard import absent_array, reshard
from earl_jax.trajectory import Experience


class RowStream:
    """A batch of rows on the training layout that fills as episodes finish.

    Host-side state: the shards as they are by now, and who has sent how much. `moved_bytes` counts
    what has changed device since the last `take`, in all processes.
    """

    def __init__(self, like: Experience, layout: Layout, *, length: int) -> None:
        """An empty batch of as many rows as `like` has, `length` places each.

        Args:
            like: the engine's buffers, or their shapes; None fields stay None.
            layout: where the trainer wants rows.
            length: tokens per row of the batch; what a row has more is cut, and must not count.

        Raises:
            ValueError: the rows do not divide over the layout.
        """
        rows = like.tokens.shape[0]
        self._sharding = layout.activations("NS")
        if rows % layout.num_row_shards:
            raise ValueError(
                f"{rows} rows do not divide over the {layout.num_row_shards} row shards of "
                f"{layout}; choose a multiple"
            )
        self._shape, self._length = (rows, length), length
        self._dtypes = jax.tree.map(lambda field: field.dtype, like)
        self._ranges = shard_ranges(self._sharding, self._shape)
        self._devices = {
            device.id: SingleDeviceSharding(device) for device in self._sharding.addressable_devices
        }
        fields = jax.tree.leaves(self._dtypes)
        self._row_bytes = length * sum(dtype.itemsize for dtype in fields)
        self._sent_bytes: Counter[int] = Counter()
        self._begin()

    def _begin(self) -> None:
        self._filled: set[int] = set()
        self.moved_bytes = 0
        # Made when the first row comes: a batch that was taken is in use until then.
        self._shards: dict[int, Experience] = {}

    @property
    def shards(self) -> dict[int, Experience]:
        """Each device's part of the batch by now, in this process; zeros where no row came."""
        self._shards = self._shards or {
            device: jax.tree.map(
                lambda dtype, device=device, ranges=ranges: zeros_on(
                    self._devices[device], (ranges[0][1] - ranges[0][0], self._length), dtype
                ),
                self._dtypes,
            )
            for device, ranges in self._ranges.items()
            if device in self._devices
        }
        return self._shards

    @property
    def num_missing(self) -> int:
        """The number of batch rows still missing."""
        return self._shape[0] - len(self._filled)

    def send(self, experience: Experience, moves: Iterable[tuple[int, int]]) -> None:
        """Sends rows of the engine's buffers to places of the batch: pairs (row, place).

        A row comes from the device itself that wants it, where that holds it, else from the holder
        that has sent least, of the same process where there is one. The buffers are only read.

        Raises:
            ValueError: a row that is not there, a place that is not there or has its row already.
        """
        sharding = experience.tokens.sharding
        held = shard_ranges(sharding, experience.tokens.shape)
        processes = process_of(sharding, self._sharding)
        devices = {device.id: device for device in sharding.device_set | self._sharding.device_set}
        shards, target = _shards_by_device(experience), self.shards
        rows, size = experience.tokens.shape[0], self._shape[0]
        for row, place in moves:
            if not 0 <= row < rows or not 0 <= place < size or place in self._filled:
                raise ValueError(
                    f"row {row} of {rows} is to go to place {place} of {size}"
                    + (", which has its row already" if place in self._filled else "")
                )
            self._filled.add(place)
            holders = [d for d, ranges in held.items() if ranges[0][0] <= row < ranges[0][1]]
            for (sender, _), ends in self._senders(place, holders, processes).items():
                cut = None
                if sender in shards:
                    cut = _cut_row(shards[sender], row - held[sender][0][0], self._length)
                arrived = self._deliver(cut, devices[sender], [devices[end] for end in ends])
                for end, piece in arrived.items():
                    target[end] = _write_row(target[end], piece, place - self._ranges[end][0][0])

    def _senders(
        self, place: int, holders: Sequence[int], processes: Mapping[int, int]
    ) -> dict[tuple[int, int], list[int]]:
        """Returns the devices that want this batch row, by its sender and their process."""
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for device, ranges in self._ranges.items():
            first, stop = ranges[0]
            if not first <= place < stop:
                continue
            near = [holder for holder in holders if processes[holder] == processes[device]]
            sender = min(near or holders, key=self._sent_bytes.__getitem__)
            if device in holders:
                sender = device
            else:
                self._sent_bytes[sender] += self._row_bytes
                self.moved_bytes += self._row_bytes
            groups[sender, processes[device]].append(device)
        return groups

    def _deliver(
        self, cut: Experience | None, sender: Any, ends: Sequence[Any]
    ) -> dict[int, Experience]:
        """A row on those devices of one process, by their ids; none that are not this process's.

        `cut` is None where the sender is not.
        """
        if sender.process_index == ends[0].process_index:
            return (
                {}
                if cut is None
                else {end.id: jax.device_put(cut, SingleDeviceSharding(end)) for end in ends}
            )
        source, goal = (
            NamedSharding(Mesh(np.array(devices, dtype=object), ("device",)), PartitionSpec())
            for devices in ([sender], ends)
        )
        shape = (1, self._length)
        if cut is None:
            row = jax.tree.map(lambda dtype: absent_array(shape, dtype, source), self._dtypes)
        else:
            row = jax.tree.map(
                lambda field: jax.make_array_from_single_device_arrays(shape, source, [field]), cut
            )
        return _shards_by_device(reshard(row, jax.tree.map(lambda _: goal, row)))

    def take(self) -> Experience:
        """The full batch, on the layout; the stream begins a new one.

        Raises:
            ValueError: places are without a row.
        """
        if self.num_missing:
            missing = sorted(set(range(self._shape[0])) - self._filled)
            raise ValueError(
                f"{len(missing)} of {self._shape[0]} places have no row yet, the first of them "
                f"{missing[0]}; send their rows before the batch is taken"
            )
        shards = list(self.shards.values())
        batch = jax.tree.map(
            lambda dtype, *parts: jax.make_array_from_single_device_arrays(
                self._shape, self._sharding, list(parts), dtype=dtype
            ),
            self._dtypes,
            *shards,
        )
        self._begin()
        return batch


def _shards_by_device(experience: Experience) -> dict[int, Experience]:
    fields, tree = jax.tree.flatten(experience)
    by_device: dict[int, list[jax.Array]] = {}
    for field in fields:
        for shard in field.addressable_shards:
            by_device.setdefault(shard.device.id, []).append(shard.data)
    return {device: jax.tree.unflatten(tree, parts) for device, parts in by_device.items()}


@functools.partial(jax.jit, static_argnums=2)
def _cut_row(shard: Experience, row: Any, length: int) -> Experience:
    def one(field: jax.Array) -> jax.Array:
        cut = lax.dynamic_slice_in_dim(field, row, 1)[:, :length]
        return jnp.pad(cut, ((0, 0), (0, length - cut.shape[1])))

    return jax.tree.map(one, shard)


@functools.partial(jax.jit, donate_argnums=0)
def _write_row(shard: Experience, row: Experience, place: Any) -> Experience:
    return jax.tree.map(
        lambda field, piece: lax.dynamic_update_slice_in_dim(field, piece, place, axis=0),
        shard,
        row,
    )
