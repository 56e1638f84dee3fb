# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The order of a plan's pieces, where all devices must run one program to send any.

In a round each device sends at most one piece and receives at most one, and all pieces of a round
have the same shape: what one `ppermute` carries without a byte of padding. For each shape of piece
there are as many rounds as the busiest device sends or receives (twice as many of halves, where
that keeps pairs apart), which is the least that there can be; so no link waits for more than what
the busiest one has to carry.
"""

import dataclasses
import math
import random
from collections import defaultdict
from collections.abc import Sequence

from earl_jax.sharding.ranges import Ranges
from earl_jax.sharding.transfer_plan import Piece, TransferPlan

_TRIES_PER_EDGE = 20
_STARTS = 8
_MANY_EDGES = 256
# A round more costs about as much time as so many bytes take.
_WORTH_HALVING = 64 * 2**10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """Pieces of one shape, of which each device sends at most one and receives at most one.

    `stays` is True if no piece leaves its device.
    """

    stays: bool
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def rounds_of(plan: TransferPlan, max_bytes: int | None = None) -> tuple[Round, ...]:
    """Returns the rounds of a plan: first pieces that stay on their device, then those sent.

    No piece is larger than `max_bytes`: a larger one is cut along its longest axes.
    """
    by_shape: dict[tuple[bool, tuple[int, ...]], list[Piece]] = defaultdict(list)
    for whole in plan.pieces:
        if not whole.num_bytes:
            continue
        for piece in parts_of(whole, plan.itemsize, max_bytes):
            stays = piece.source_device == piece.target_device
            shape = tuple(stop - start for start, stop in piece.index)
            by_shape[stays, shape].append(piece)
    rounds = []
    for (stays, _), pieces in sorted(by_shape.items(), reverse=True):
        numbers, tangled = _numbers(pieces)
        if tangled and (halves := _halves(pieces)):
            halved, still = _numbers(halves)
            if not still:
                pieces, numbers = halves, halved
        numbered: dict[int, list[Piece]] = defaultdict(list)
        for number, piece in zip(numbers, pieces, strict=True):
            numbered[number].append(piece)
        shape = tuple(stop - start for start, stop in pieces[0].index)
        rounds += [
            Round(stays=stays, shape=shape, pieces=tuple(numbered[number]))
            for number in sorted(numbered)
        ]
    return tuple(rounds)


def _numbers(pieces: Sequence[Piece]) -> tuple[list[int], bool]:
    """Returns each piece's round, and True if two devices send to each other in one of them.

    Which edges are coloured first decides whether they can be separated: a few orders are tried.
    """
    links = [(piece.source_device, piece.target_device) for piece in pieces]
    order = list(range(len(links)))
    first: list[int] = []
    for start in range(_STARTS if len(links) <= _MANY_EDGES else 1):
        if start:
            random.Random(start).shuffle(order)
        ordered = [links[n] for n in order]
        colours = colour(ordered)
        tangled = separate(ordered, colours)
        numbers = [0] * len(links)
        for n, number in zip(order, colours, strict=True):
            numbers[n] = number
        first = first or numbers
        if not tangled:
            return numbers, False
    return first, True


def _halves(pieces: Sequence[Piece]) -> list[Piece]:
    """Returns the pieces of one shape cut in halves; [] where they are small or odd.

    An all-to-all of four devices takes three rounds, in one of which pairs send to each other.
    Halves take six rounds without such pairs.
    """
    sizes = [stop - start for start, stop in pieces[0].index]
    even = [size for size in sizes if size % 2 == 0]
    if not even or pieces[0].num_bytes < _WORTH_HALVING:
        return []
    axis = sizes.index(max(even))
    halves = []
    for piece in pieces:
        start, stop = piece.index[axis]
        middle = (start + stop) // 2
        for part in ((start, middle), (middle, stop)):
            index = (*piece.index[:axis], part, *piece.index[axis + 1 :])
            halves.append(dataclasses.replace(piece, index=index, num_bytes=piece.num_bytes // 2))
    return halves


def separate(edges: Sequence[tuple[int, int]], colours: list[int]) -> bool:
    """Recolours until no edge has the colour of one in the other direction; True where some do.

    Two devices should not send each other something in one round: over TCP (Gloo) a round of 3 MiB
    each way took 1.29 s instead of 0.65 s at 40 Mbit/s (jax 0.10.2, 2026-11). Among four devices of
    which all send to all it cannot be avoided with one piece each way.

    A search with a fixed seed, because all processes must find the same: two colours are exchanged
    along a path of edges that alternate between them, if that leaves no more such edges than were
    there before.
    """
    choose = random.Random(0)
    reverse: dict[tuple[int, int], list[int]] = defaultdict(list)
    for n, (sender, receiver) in enumerate(edges):
        if sender != receiver:
            reverse[receiver, sender].append(n)
    at: dict[tuple[int, int, int], int] = {}
    for n, ends in enumerate(edges):
        for side in (0, 1):
            at[side, ends[side], colours[n]] = n

    def tangled(n: int) -> bool:
        return any(colours[other] == colours[n] for other in reverse[edges[n]])

    bad = {n for n in range(len(edges)) if tangled(n)}
    num_colours = 1 + max(colours, default=0)
    for _ in range(_TRIES_PER_EDGE * len(edges)):
        if not bad or num_colours == 1:
            break
        first = choose.choice(sorted(bad))
        pair = colours[first], choose.randrange(num_colours)
        if pair[0] == pair[1]:
            continue
        path = _alternating(first, pair, edges, at, colours)
        near = {*path, *(other for n in path for other in reverse[edges[n]])}
        before = sum(map(tangled, near))
        _exchange(path, pair, edges, at, colours)
        if sum(map(tangled, near)) > before:
            _exchange(path, pair, edges, at, colours)
        bad = (bad - near) | {n for n in near if tangled(n)}
    return bool(bad)


def _alternating(first: int, pair: tuple[int, int], edges, at, colours) -> list[int]:
    """Returns the edges of two colours that are connected with `first`."""
    seen, todo = {first}, [first]
    while todo:
        n = todo.pop()
        other = pair[1] if colours[n] == pair[0] else pair[0]
        for side in (0, 1):
            beside = at.get((side, edges[n][side], other))
            if beside is not None and beside not in seen:
                seen.add(beside)
                todo.append(beside)
    return sorted(seen)


def _exchange(path: Sequence[int], pair: tuple[int, int], edges, at, colours) -> None:
    for n in path:
        for side in (0, 1):
            at.pop((side, edges[n][side], colours[n]), None)
    for n in path:
        colours[n] = pair[1] if colours[n] == pair[0] else pair[0]
    for n in path:
        for side in (0, 1):
            at[side, edges[n][side], colours[n]] = n


def colour(edges: Sequence[tuple[int, int]]) -> list[int]:
    """Returns a number per edge, different for edges that share a sender or a receiver.

    As few numbers as the busiest end has edges (König 1916): where the first number that is free at
    the sender is taken at the receiver, the path of edges that alternate between it and one that is
    free at the receiver is recoloured.
    """
    at: dict[tuple[int, int, int], int] = {}  # side, device, colour -> edge
    colours = [0] * len(edges)
    for n, ends in enumerate(edges):
        ours, theirs = (_first_free(at, side, ends[side]) for side in (0, 1))
        if ours != theirs and (1, ends[1], ours) in at:
            taken = at[1, ends[1], ours]
            path = _alternating(taken, (ours, theirs), edges, at, colours)
            _exchange(path, (ours, theirs), edges, at, colours)
        colours[n] = ours
        for side in (0, 1):
            at[side, ends[side], ours] = n
    return colours


def _first_free(at: dict[tuple[int, int, int], int], side: int, device: int) -> int:
    number = 0
    while (side, device, number) in at:
        number += 1
    return number


def parts_of(piece: Piece, itemsize: int, max_bytes: int | None) -> list[Piece]:
    """Returns the piece in parts of at most `max_bytes`, equal ones but for the last."""
    if max_bytes is None or piece.num_bytes <= max_bytes:
        return [piece]
    sizes = [stop - start for start, stop in piece.index]
    axis = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[axis] == 1:
        return [piece]
    others = itemsize * math.prod(sizes) // sizes[axis]
    step = max(1, max_bytes // others)
    start, stop = piece.index[axis]
    parts = []
    for at in range(start, stop, step):
        box: list[tuple[int, int]] = list(piece.index)
        box[axis] = (at, min(at + step, stop))
        index: Ranges = tuple(box)
        size = others * (index[axis][1] - at)
        part = dataclasses.replace(piece, index=index, num_bytes=size)
        parts += parts_of(part, itemsize, max_bytes)
    return parts
