# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rows sent to the trainer as their episodes finish, one by one, while others are played.

    stream = RowStream(experience, layout, length=512)
    stream.send(seat_experience, [(3, 0), (5, 1)])    # rows 3 and 5 are done: places 0 and 1
    ...
    delivery = dispatch(stream.take(), layout, length=512, ...)    # nothing is left to move

A send returns at once: what is cut, sent and written follows in the devices' queues.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding

from earl_jax.sharding.chunks import zeros_on
from earl_jax.sharding.layout import Layout
from earl_jax.sharding.ranges import shard_ranges
from earl_jax.trajectory import Experience


class RowStream:
    """A batch of rows on the training layout that fills as episodes finish.

    Host-side state: the shards as they are by now, and who has sent how much. `moved_bytes` counts
    what has changed device since the last `take`.
    """

    def __init__(self, like: Experience, layout: Layout, *, length: int) -> None:
        """An empty batch of as many rows as `like` has, `length` places each.

        Args:
            like: the engine's buffers, or their shapes; None fields stay None.
            layout: where the trainer wants rows, on devices of this process.
            length: tokens per row of the batch; what a row has more is cut, and must not count.

        Raises:
            ValueError: the rows do not divide over the layout, or go to another process.
        """
        rows = like.tokens.shape[0]
        self._sharding = layout.activations("NS")
        if not self._sharding.is_fully_addressable:
            raise ValueError(
                f"a RowStream sends to devices of its own process; {layout} has others. Send whole "
                "batches there, by dispatch()"
            )
        if rows % layout.num_row_shards:
            raise ValueError(
                f"{rows} rows do not divide over the {layout.num_row_shards} row shards of "
                f"{layout}; choose a multiple"
            )
        self._shape, self._length = (rows, length), length
        self._dtypes = jax.tree.map(lambda field: field.dtype, like)
        self._ranges = shard_ranges(self._sharding, self._shape)
        self._devices = {
            device.id: SingleDeviceSharding(device) for device in self._sharding.device_set
        }
        self._sent_bytes: Counter[int] = Counter()
        self._begin()

    def _begin(self) -> None:
        self._filled: set[int] = set()
        self.moved_bytes = 0
        # Made when the first row comes: a batch that was taken is in use until then.
        self._shards: dict[int, Experience] = {}

    @property
    def shards(self) -> dict[int, Experience]:
        """What each device has by now of its places, by its id; zeros where no row came yet."""
        self._shards = self._shards or {
            device: jax.tree.map(
                lambda dtype, device=device, ranges=ranges: zeros_on(
                    self._devices[device], (ranges[0][1] - ranges[0][0], self._length), dtype
                ),
                self._dtypes,
            )
            for device, ranges in self._ranges.items()
        }
        return self._shards

    @property
    def num_missing(self) -> int:
        """How many places have no row yet."""
        return self._shape[0] - len(self._filled)

    def send(self, experience: Experience, moves: Iterable[tuple[int, int]]) -> None:
        """Sends rows of the engine's buffers to places of the batch: pairs (row, place).

        A row comes from the device itself that wants it, where that holds it, else from the holder
        that has sent least. The buffers are only read.

        Raises:
            ValueError: a row that is not there, a place that is not there or has its row already.
        """
        held = shard_ranges(experience.tokens.sharding, experience.tokens.shape)
        shards, target = _shards_by_device(experience), self.shards
        rows, places = experience.tokens.shape[0], self._shape[0]
        for row, place in moves:
            if not 0 <= row < rows or not 0 <= place < places or place in self._filled:
                raise ValueError(
                    f"row {row} of {rows} is to go to place {place} of {places}"
                    + (", which has its row already" if place in self._filled else "")
                )
            self._filled.add(place)
            holders = [d for d, ranges in held.items() if ranges[0][0] <= row < ranges[0][1]]
            cut: dict[int, Any] = {}
            for device in self._ranges:
                first, stop = self._ranges[device][0]
                if not first <= place < stop:
                    continue
                sender = self._sender(device, holders)
                if sender not in cut:
                    start = row - held[sender][0][0]
                    cut[sender] = _cut_row(shards[sender], start, self._length)
                arrived = jax.device_put(cut[sender], self._devices[device])
                if sender != device:
                    size = sum(field.nbytes for field in jax.tree.leaves(arrived))
                    self._sent_bytes[sender] += size
                    self.moved_bytes += size
                target[device] = _write_row(target[device], arrived, place - first)

    def _sender(self, device: int, holders: Sequence[int]) -> int:
        if device in holders:
            return device
        return min(holders, key=self._sent_bytes.__getitem__)

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
            lambda *parts: jax.make_array_from_single_device_arrays(
                self._shape, self._sharding, list(parts)
            ),
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
