# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays from process to process by their hosts, where the devices have no path of their own.

The plan is that of `exchange.py`: the index ranges that each target lacks, and no others. Each is
cut on the device that holds it, read to its host, carried by the `HostChannel`, and written into
the target's shard where it is wanted. What several devices of a process want is carried there once.
Between devices of one process everything goes as it always does, past the host.

All reads are `jax.device_get`, so that `telemetry.host_bytes` counts each byte where it leaves a
device: in the process that sends it. Putting bytes on a device reads nothing.
"""

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from earl_jax.sharding.chunks import cut_box, offset, write_box, zeros_on
from earl_jax.sharding.exchange import Shipment
from earl_jax.sharding.host_channel import PART_BYTES, HostChannel, open_channel
from earl_jax.sharding.ranges import Ranges, shard_ranges
from earl_jax.sharding.rounds import parts_of
from earl_jax.sharding.transfer_plan import Piece, TransferPlan

# What lies in the memory of process 0 at once, and on the devices beside sources and results.
BATCH_BYTES = 64 * 2**20
_WHAT = "arrays by the hosts"


class Letter(NamedTuple):
    """A box of a leaf that goes from a device to some devices of one process."""

    leaf: int
    index: Ranges
    num_bytes: int
    source: int
    targets: tuple[int, ...]
    sender: int
    receiver: int


@functools.lru_cache(maxsize=128)
def batches_of(
    plans: tuple[TransferPlan, ...], max_bytes: int | None = None
) -> tuple[tuple[Letter, ...], ...]:
    """The letters of these plans, as every process goes through them.

    A batch has no more than `max_bytes`, and a letter a part of that, or one element: letters of a
    batch are under way together, and those of the next begin when they have arrived.
    """
    most = BATCH_BYTES if max_bytes is None else max_bytes
    batches: list[list[Letter]] = []
    room = 0
    for leaf, plan in enumerate(plans):
        for pieces in _together(plan):
            first, targets = pieces[0], tuple(piece.target_device for piece in pieces)
            ends = plan.process_of[first.source_device], plan.process_of[targets[0]]
            for part in parts_of(first, plan.itemsize, min(PART_BYTES, max(1, most // 2))):
                if part.num_bytes > room or not batches:
                    batches.append([])
                    room = most
                room -= part.num_bytes
                letter = Letter(
                    leaf, part.index, part.num_bytes, first.source_device, targets, *ends
                )
                batches[-1].append(letter)
    return tuple(map(tuple, batches))


def _together(plan: TransferPlan) -> Iterator[list[Piece]]:
    """Pieces that are one letter: the same box, for devices of a process that nobody there has."""
    together: dict[Any, list[Piece]] = defaultdict(list)
    for piece in plan.pieces:
        if piece.num_bytes:
            there = plan.process_of[piece.target_device]
            stays = plan.process_of[piece.source_device] == there
            together[piece.index, piece.target_device if stays else (there,)].append(piece)
    yield from together.values()


def exchange_by_hosts(
    arrays: Sequence[jax.Array], shipments: Sequence[Shipment], max_bytes: int | None = None
) -> list[jax.Array]:
    """Carries out plans of the route "rounds", as `exchange`; every process must call it alike.

    It returns when everything has arrived here, and what went from here has arrived there. Beside
    the arrays and what becomes of them a device holds no more than about `max_bytes`.

    Raises:
        PeerLost: another process ended, or let this one wait for longer than the channel's
            `timeout_s`.
    """
    channel = open_channel()
    leaves = [_Leaf.of(*each) for each in zip(arrays, shipments, strict=True)]
    for batch in batches_of(tuple(shipment.plan for shipment in shipments), max_bytes):
        _carry_batch(channel, leaves, batch)
    return [leaf.whole() for leaf in leaves]


def _carry_batch(channel: HostChannel, leaves: Sequence["_Leaf"], batch: Sequence[Letter]) -> None:
    turn, here = channel.next_turn(), channel.index
    for letter in batch:
        if letter.sender == letter.receiver == here:
            leaves[letter.leaf].write(letter, leaves[letter.leaf].cut(letter))
    envelopes = envelopes_of(batch)
    sent = [(n, letters) for n, letters in enumerate(envelopes) if letters[0].sender == here]
    for n, letters in sent:
        data = b"".join(leaves[letter.leaf].read(letter) for letter in letters)
        channel.put(turn, str(n), data, _WHAT)
        channel.sent_bytes += len(data)
    come = [(n, letters) for n, letters in enumerate(envelopes) if letters[0].receiver == here]
    for n, letters in come:
        data, at = memoryview(channel.take(turn, str(n), _WHAT)), 0
        for letter in letters:
            leaves[letter.leaf].receive(letter, data[at : at + letter.num_bytes])
            at += letter.num_bytes
    for leaf in leaves:
        leaf.settle()
    # Nobody runs ahead of those that he sends to: the store has the letters of one batch.
    for sender in sorted({letters[0].sender for _, letters in come}):
        channel.put(turn, f"{here} has all of {sender}", b"yes", _WHAT)
    for receiver in sorted({letters[0].receiver for _, letters in sent}):
        channel.take(turn, f"{receiver} has all of {here}", _WHAT)


def envelopes_of(batch: Sequence[Letter]) -> list[list[Letter]]:
    """The letters between processes, those that go the same way together as far as they fit."""
    envelopes: list[list[Letter]] = []
    newest: dict[tuple[int, int], list[Letter]] = {}
    room: Counter[tuple[int, int]] = Counter()
    for letter in batch:
        way = letter.sender, letter.receiver
        if letter.sender == letter.receiver:
            continue
        if letter.num_bytes > room[way]:
            newest[way], room[way] = [], PART_BYTES
            envelopes.append(newest[way])
        newest[way].append(letter)
        room[way] -= letter.num_bytes
    return envelopes


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Leaf:
    """An array on this process's devices: its shards, and those of the target as they fill."""

    shipment: Shipment
    shards: dict[int, jax.Array]
    held: dict[int, Ranges]
    wanted: dict[int, Ranges]
    max_tokens: dict[int, SingleDeviceSharding]
    filled: dict[int, jax.Array]
    written: list[jax.Array]

    @classmethod
    def of(cls, array: jax.Array, shipment: Shipment) -> "_Leaf":
        """Nothing has arrived yet."""
        move = shipment.move
        max_tokens = {
            device.id: SingleDeviceSharding(device) for device in move.target.addressable_devices
        }
        return cls(
            shipment=shipment,
            shards={shard.device.id: shard.data for shard in array.addressable_shards},
            held=shard_ranges(move.source, move.shape),
            wanted=shard_ranges(move.target, move.shape),
            max_tokens=max_tokens,
            filled={},
            written=[],
        )

    def cut(self, letter: Letter) -> jax.Array:
        """The box, on the device that holds it, in the type that it travels in."""
        shard, held = self.shards[letter.source], self.held[letter.source]
        carried_as = self.shipment.move.carried_as
        if letter.index == held and shard.dtype == carried_as:
            return shard
        return cut_box(shard, offset(letter.index, held), _shape(letter.index), carried_as)

    def read(self, letter: Letter) -> bytes:
        """The box on the host, which is where it is counted."""
        return jax.device_get(self.cut(letter)).tobytes()

    def receive(self, letter: Letter, data: memoryview) -> None:
        """Writes what has come from another process."""
        bits = np.frombuffer(data, np.dtype(self.shipment.move.carried_as))
        self.write(letter, bits.reshape(_shape(letter.index)))

    def write(self, letter: Letter, piece: jax.Array | np.ndarray) -> None:
        """Puts the box on all devices that want it."""
        for device in letter.targets:
            arrived = jax.device_put(piece, self.max_tokens[device])
            if (
                letter.index == self.wanted[device]
                and arrived.dtype == self.shipment.move.arrives_as
            ):
                self.filled[device] = arrived
                self.written.append(arrived)
                continue
            at = offset(letter.index, self.wanted[device])
            self.filled[device], mark = write_box(self._shard(device), arrived, at)
            self.written.append(mark)

    def settle(self) -> None:
        """Returns when all that was written is there."""
        jax.block_until_ready(self.written)
        self.written.clear()

    def whole(self) -> jax.Array:
        """The array on its target's devices."""
        move, shards = self.shipment.move, [self._shard(device) for device in self.max_tokens]
        return jax.make_array_from_single_device_arrays(
            move.shape, move.target, shards, dtype=move.arrives_as
        )

    def _shard(self, device: int) -> jax.Array:
        """As it is by now; zeros where nothing has come."""
        if device in self.filled:
            return self.filled[device]
        move = self.shipment.move
        return zeros_on(
            self.max_tokens[device], move.target.shard_shape(move.shape), move.arrives_as
        )


def _shape(index: Ranges) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in index)
