# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""In which order the pieces of a plan go, where all devices must run one program to send any.

In a round each device sends at most one piece and receives at most one, and all pieces of a round
have the same shape: what one `ppermute` carries without a byte of padding. No schedule has fewer
rounds: for each shape of piece there are as many as the busiest device sends or receives.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence

from earl_jax.sharding.ranges import Ranges
from earl_jax.sharding.transfer_plan import Piece, TransferPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """Pieces of one shape, of which each device sends at most one and receives at most one.

    `stays` says that no piece leaves its device.
    """

    stays: bool
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def rounds_of(plan: TransferPlan, max_bytes: int | None = None) -> tuple[Round, ...]:
    """The rounds of a plan: first what stays on its device, then what is sent.

    No piece is larger than `max_bytes`: a larger one is cut along its longest axes.
    """
    by_shape: dict[tuple[bool, tuple[int, ...]], list[Piece]] = defaultdict(list)
    for whole in plan.pieces:
        if not whole.num_bytes:
            continue
        for piece in _cut(whole, plan.itemsize, max_bytes):
            stays = piece.source_device == piece.target_device
            shape = tuple(stop - start for start, stop in piece.index)
            by_shape[stays, shape].append(piece)
    rounds = []
    for (stays, shape), pieces in sorted(by_shape.items(), reverse=True):
        colours = colour([(p.source_device, p.target_device) for p in pieces])
        numbered: dict[int, list[Piece]] = defaultdict(list)
        for number, piece in zip(colours, pieces, strict=True):
            numbered[number].append(piece)
        rounds += [
            Round(stays=stays, shape=shape, pieces=tuple(numbered[number]))
            for number in sorted(numbered)
        ]
    return tuple(rounds)


def colour(edges: Sequence[tuple[int, int]]) -> list[int]:
    """A number per (sender, receiver), different for edges that share a sender or a receiver.

    As few numbers as the busiest end has edges (König 1916): where the first number that is free at
    the sender is taken at the receiver, the path of edges that alternate between it and one that is
    free at the receiver is recoloured.
    """
    taken: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)  # end -> colour -> edge
    colours = [0] * len(edges)
    for n, (sender, receiver) in enumerate(edges):
        ends = ("sender", sender), ("receiver", receiver)
        ours, theirs = (_first_free(taken[end]) for end in ends)
        if ours != theirs and ours in taken[ends[1]]:
            _swap(taken, colours, edges, ends[1], ours, theirs)
        colours[n] = ours
        for end in ends:
            taken[end][ours] = n
    return colours


def _swap(taken, colours, edges, end: tuple[str, int], first: int, second: int) -> None:
    """Exchanges two colours along the path from `end` that begins with `first`."""
    path, colour = [], first
    while colour in taken[end]:
        edge = taken[end][colour]
        path.append(edge)
        sender, receiver = edges[edge]
        end = ("receiver", receiver) if end[0] == "sender" else ("sender", sender)
        colour = second if colour == first else first
    for edge in path:
        for end in (("sender", edges[edge][0]), ("receiver", edges[edge][1])):
            taken[end].pop(colours[edge], None)
    for edge in path:
        colours[edge] = second if colours[edge] == first else first
        for end in (("sender", edges[edge][0]), ("receiver", edges[edge][1])):
            taken[end][colours[edge]] = edge


def _first_free(taken: dict[int, int]) -> int:
    colour = 0
    while colour in taken:
        colour += 1
    return colour


def _cut(piece: Piece, itemsize: int, max_bytes: int | None) -> list[Piece]:
    """The piece in parts of at most `max_bytes`, equal ones but for the last."""
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
        parts += _cut(part, itemsize, max_bytes)
    return parts
