# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of preempted slots in host memory: copied out of the pools, and back again.

Copies leave a device while its next round runs, and are waited for a round later. A slot's pages
may go back to other pages, and to another mesh: they are kept in pieces as they lay on the devices,
each with its corner: the first of its heads, and of its positions.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.page_copies import LEAVE, SLEEP, WAKE, PageCopies
from earl_jax.models.kv_cache import LayerCache

_HOST_MEMORY = "pinned_host"
# Blocks of a device that are under way at once, each of `page_copies.TOKENS_A_CALL` tokens: until
# they have arrived they are on the device beside its pool.
BLOCKS_AT_ONCE = 16
# The axes of a piece [L,P,K,...]: those from K on may be cut.
_PAGES, _HEADS = 1, 2
_Corner = tuple[int, ...]


@dataclasses.dataclass(kw_only=True)
class Part:
    """A slot's share of a block: `count` pages, and per array its pieces by corner.

    `num_bytes` are those of all pieces. Of a mesh that spans processes each has its devices' here.
    """

    count: int
    num_bytes: int
    pieces: list[dict[_Corner, Any]]


class HostPages:
    """Slots' pages in host memory. Host-side state only.

    `moved_bytes` counts copies in both directions, `most_bytes` is the most that was held at once.
    """

    def __init__(self, limit_bytes: int, num_slots: int, *, pinned: bool | None = None) -> None:
        """Holds at most `limit_bytes` of pages of engines with so many slots.

        With `pinned` they are arrays in the backend's own host memory, which links reach without a
        detour; None: where the devices are no CPUs, and have such memory.
        """
        self._limit_bytes, self._num_slots, self._pinned = limit_bytes, num_slots, pinned
        self._slots: dict[int, list[Part]] = {}
        # Parts whose pieces are still arrays on the devices.
        self._leaving: list[Part] = []
        self.held_bytes = self.most_bytes = self.moved_bytes = 0

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    @property
    def slots(self) -> list[int]:
        """The slots whose pages are here, in their order."""
        return sorted(self._slots)

    def has_space(self, block_bytes: int, pages_a_block: int, num_pages: Sequence[int]) -> bool:
        """Returns whether slots with so many pages each fit too, in blocks of so many pages."""
        blocks = sum(-(-number // pages_a_block) for number in num_pages)
        return self.held_bytes + blocks * block_bytes <= self._limit_bytes

    def drop(self, slot: int) -> None:
        """Drops the slot's pages, if there are any."""
        self.release(self._slots.pop(slot, []))

    def give(self, slot: int) -> list[Part]:
        """Returns the slot's pages, which are the caller's from now on, until `release`."""
        return self._slots.pop(slot)

    def take_back(self, slot: int, parts: list[Part]) -> None:
        """Makes pages that were given away those of a slot, which has none."""
        assert slot not in self._slots
        self._slots[slot] = parts

    def release(self, parts: Sequence[Part]) -> None:
        """Drops pages."""
        for part in parts:
            self.held_bytes -= part.num_bytes
            self._leaving = [other for other in self._leaving if other is not part]

    def settle(self) -> None:
        """Waits for copies that leave the devices, and frees the devices' own."""
        for part in self._leaving:
            part.pieces = [
                {corner: _to_numpy(piece) for corner, piece in pieces.items()}
                for pieces in part.pieces
            ]
        self._leaving = []

    def copy_out(
        self, copies: PageCopies, state: DecodeState, pages: Mapping[int, Sequence[int]]
    ) -> DecodeState:
        """Begins to copy these slots' pages, numbered within their shards; the slots fall asleep.

        Whatever runs on the devices from now on may write over them.
        """
        if not pages:
            return state
        size, block_bytes = copies.pages_a_call, copies.block_bytes(state)
        pinned = self._keeps_pinned(copies)
        waiting = self._by_shard(
            copies,
            {slot: [list(some) for some in _batched(pages[slot], size)] for slot in sorted(pages)},
        )
        for number, calls in enumerate(_in_turn(waiting), 1):
            numbers = np.zeros((copies.num_shards, size), np.int32)
            for shard, (_, some) in calls.items():
                numbers[shard, : len(some)] = some
            block, sent = copies.take(state, numbers), []
            for shard, (slot, some) in calls.items():
                pieces = _pieces(block, shard, size, pinned)
                part = Part(count=len(some), num_bytes=block_bytes, pieces=pieces)
                self._slots.setdefault(slot, []).append(part)
                sent.append(pieces)
                if not pinned:
                    self._leaving.append(part)
                self._count(part, holds=True)
            if number % BLOCKS_AT_ONCE == 0:
                jax.block_until_ready(sent)
                self.settle()
        return self._mark(copies, state, dict.fromkeys(pages, SLEEP))

    def copy_back(
        self,
        copies: PageCopies,
        state: DecodeState,
        pages: Mapping[int, Sequence[int]],
        awake: Mapping[int, bool],
    ) -> DecodeState:
        """Writes the pages that are held of these slots to other pages, as many as there were.

        Slots that are `awake` go on in the middle of a turn. Donates the pools of `state`.
        """
        if not pages:
            return state
        self.settle()
        size, todo = copies.pages_a_call, {}
        for slot in sorted(pages):
            parts = self._slots.pop(slot)
            assert sum(part.count for part in parts) == len(pages[slot])
            todo[slot] = list(zip(parts, _batched(pages[slot], size), strict=True))
        for number, calls in enumerate(_in_turn(self._by_shard(copies, todo)), 1):
            numbers = np.zeros((copies.num_shards, size), np.int32)
            counts = np.zeros(copies.num_shards, np.int32)
            parts = {}
            for shard, (_, (part, some)) in calls.items():
                numbers[shard, : part.count] = some
                counts[shard], parts[shard] = part.count, part
                self._count(part, holds=False)
            blank = copies.blank(state)
            state = copies.put(state, _fill(blank, copies.block_shardings, parts), numbers, counts)
            if number % BLOCKS_AT_ONCE == 0:
                jax.block_until_ready(state.cache.pools)
        marks = {slot: WAKE if awake[slot] else SLEEP for slot in pages}
        return self._mark(copies, state, marks)

    def _keeps_pinned(self, copies: PageCopies) -> bool:
        if self._pinned is not None:
            return self._pinned
        device = next(iter(jax.tree.leaves(copies.block_shardings)[0].addressable_devices))
        kinds = {memory.kind for memory in device.addressable_memories()}
        return device.platform != "cpu" and _HOST_MEMORY in kinds

    def _count(self, part: Part, *, holds: bool) -> None:
        number = part.num_bytes
        self.moved_bytes += number
        self.held_bytes += number if holds else -number
        self.most_bytes = max(self.most_bytes, self.held_bytes)

    def _by_shard(
        self, copies: PageCopies, todo: Mapping[int, list[Any]]
    ) -> dict[int, collections.deque]:
        """Returns (slot, entry) for every row shard, in the order of its slots."""
        slots_a_shard = self._num_slots // copies.num_shards
        queues: dict[int, collections.deque] = collections.defaultdict(collections.deque)
        for slot, entries in todo.items():
            queues[slot // slots_a_shard].extend((slot, entry) for entry in entries)
        return queues

    def _mark(
        self, copies: PageCopies, state: DecodeState, marks: Mapping[int, int]
    ) -> DecodeState:
        column = np.full(self._num_slots, LEAVE, np.int32)
        for slot, mark in marks.items():
            column[slot] = mark
        return copies.mark(state, column)


def _batched(pages: Sequence[int], size: int) -> list[Sequence[int]]:
    return [pages[first : first + size] for first in range(0, len(pages), size)]


def _in_turn(queues: Mapping[int, collections.deque]) -> Any:
    """Yields one entry of every row shard that has any left, until none has."""
    while any(queues.values()):
        yield {shard: queue.popleft() for shard, queue in queues.items() if queue}


def _pieces(block: LayerCache, shard: int, size: int, pinned: bool) -> list[dict[_Corner, Any]]:
    """Returns row shard `shard`'s pieces of a block, on their way to the host."""
    found = []
    for leaf in jax.tree.leaves(block):
        pieces = {}
        for piece in leaf.addressable_shards:
            corner = _corner(piece)
            if (piece.index[_PAGES].start or 0) // size != shard or corner in pieces:
                continue
            if pinned:
                host = SingleDeviceSharding(piece.device, memory_kind=_HOST_MEMORY)
                pieces[corner] = jax.device_put(piece.data, host)
            else:
                piece.data.copy_to_host_async()
                pieces[corner] = piece.data
        found.append(pieces)
    return found


def _corner(piece: Any) -> _Corner:
    """Returns where a device's piece of an array begins, along the axes from K on."""
    return tuple(along.start or 0 for along in piece.index[_HEADS:])


def _to_numpy(piece: Any) -> np.ndarray:
    """Returns the piece in the host's own memory: on a CPU `asarray` would hold the device's."""
    return np.array(piece)


def _fill(blank: LayerCache, shardings: LayerCache, parts: Mapping[int, Part]) -> LayerCache:
    """Returns a block with the parts of these row shards, blank for the others."""
    leaves, structure = jax.tree.flatten(blank)
    filled = []
    for number, (leaf, sharding) in enumerate(zip(leaves, jax.tree.leaves(shardings), strict=True)):
        arrays = []
        for piece in leaf.addressable_shards:
            size = piece.data.shape[_PAGES]
            part = parts.get((piece.index[_PAGES].start or 0) // size)
            if part is None:
                arrays.append(piece.data)
                continue
            shape = piece.data.shape[_HEADS:]
            found = _window(part.pieces[number], _corner(piece), shape, piece.device)
            arrays.append(jax.device_put(found, SingleDeviceSharding(piece.device)))
        filled.append(jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays))
    return jax.tree.unflatten(structure, filled)


def _window(
    pieces: Mapping[_Corner, Any], corner: _Corner, shape: tuple[int, ...], device: Any
) -> Any:
    """Returns the window of this shape from a corner on, along the axes from K on, for a device."""
    whole = pieces.get(corner)
    if whole is not None and whole.shape[_HEADS:] == shape:
        is_near = isinstance(whole, np.ndarray) or whole.devices() == {device}
        return whole if is_near else np.asarray(whole)
    # Another mesh cuts them otherwise.
    arrays = {first: np.asarray(piece) for first, piece in pieces.items()}
    ends = np.max([np.add(first, a.shape[_HEADS:]) for first, a in arrays.items()], axis=0)
    like = next(iter(arrays.values()))
    joined = np.empty((*like.shape[:_HEADS], *ends), like.dtype)
    for first, array in arrays.items():
        joined[_along(first, array.shape[_HEADS:])] = array
    return joined[_along(corner, shape)]


def _along(corner: _Corner, shape: tuple[int, ...]) -> tuple[slice, ...]:
    cut = [slice(first, first + n) for first, n in zip(corner, shape, strict=True)]
    return (*[slice(None)] * _HEADS, *cut)
