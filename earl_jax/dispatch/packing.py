# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Packing: episodes of unequal lengths share rows, so that training does not pay for padding.

Data in: a TrajectoryBatch with an episode a row, and the lengths of all episodes on the host of
every process. Data out: the same tokens in fewer rows, an episode whole and its tokens in a row
beside each other, with segment ids that are distinct within a row.

The host plans (`plan_packing`), the devices gather (`pack_rows`). Each device holds a field of the
rows of all row shards during the gather, 4 bytes a token, one field after the other.
"""

import bisect
import dataclasses
import functools
import heapq
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.sharding.layout import Layout
from earl_jax.sharding.placing import absent_array
from earl_jax.trajectory import TrajectoryBatch

# Shapes that packed batches of a run have for a context bucket and a plan: a program is compiled
# for each. A batch that none of them holds has a row for each episode.
MOST_SHAPES = 6
# A known shape is taken if it has at most the share SPARE more positions than the tightest one. A
# new shape has the share HEADROOM more than its batch needs, the last one LAST_HEADROOM. Found over
# 12 runs of 50 steps of 128 and 512 log-normal lengths (benchmarks/packing.md).
SPARE, HEADROOM, LAST_HEADROOM = 0.06, 0.03, 0.06
# Where updates are much shorter than a compilation, new shapes have more headroom: as much as costs
# a compilation in so many updates, at most MOST_HEADROOM.
HEADROOM_UPDATES, MOST_HEADROOM = 100, 0.5


class Shape(NamedTuple):
    """The shape of a batch: `rows` of `length` tokens."""

    rows: int
    length: int

    @property
    def positions(self) -> int:
        """The number of tokens that it holds."""
        return self.rows * self.length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """A plan that places N episodes in rows of this shape; i32[N] each.

    `order` has the episodes in the order of their positions, `starts` their first position, counted
    through all rows, and `lengths` their tokens; `offsets` are the samples before them in their
    row. Episodes without tokens come last, behind the last position.

    Example: lengths 3, 0, 6, 2 in rows of 8 are rows (2, 3) and (0): order 2 3 0 1,
    starts 0 6 8 16, lengths 6 2 3 0.
    """

    shape: Shape
    order: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray

    @property
    def fill(self) -> float:
        """The fraction of positions that hold a token."""
        return float(self.lengths.sum() / self.shape.positions)


class RowRule(NamedTuple):
    """The shapes that an update can have, by its plan and the context bucket of its episodes.

    `most` episodes of up to `length` tokens fit an update with a row for each. A micro-batch has at
    most the tokens of `most / micro_batches` such rows, and as many rows on each of the row
    `shards`. So no update needs more memory than one with a row for each episode.
    """

    most: int
    micro_batches: int
    shards: int
    length: int

    @property
    def largest(self) -> Shape:
        """A row for each episode."""
        return Shape(self.most, self.length)

    def parts(self, shape: Shape) -> int:
        """Returns the number of micro-batches of an update of this shape, with equal rows in each.

        A shape of another rule may need more than its positions would: 15 rows that do not go into
        2 micro-batches go into 3.
        """
        parts, rows = self.least_parts(shape), shape.rows // self.shards
        return next((n for n in range(parts, rows + 1) if rows % n == 0), 1)

    def least_parts(self, shape: Shape) -> int:
        """Returns the number of micro-batches that the positions of a shape need."""
        parts = -(-shape.positions // (self.most // self.micro_batches * self.length))
        return max(1, min(parts, shape.rows // self.shards))

    @property
    def shapes(self) -> Sequence[Shape]:
        """All shapes, by their positions: as many rows as there can be, each little longer."""
        return _shapes(self)


@functools.lru_cache(maxsize=64)
def _shapes(rule: RowRule) -> list[Shape]:
    length, found = rule.length, dict[int, Shape]()
    most = rule.most // rule.micro_batches // rule.shards
    # Lengths that vector units like, in steps of a 64th.
    step = -(-max(1, length // 64) // 8) * 8
    for parts in range(1, rule.micro_batches + 1):
        for rows in range(1, most + 1):
            # Longer rows up to the positions of a row more.
            longest = min((rows + 1) * length - 1, most * length) // rows
            for each in range(length, longest + 1, step):
                shape = Shape(parts * rows * rule.shards, each)
                if rule.least_parts(shape) == parts:
                    found.setdefault(shape.positions, shape)
    return [found[positions] for positions in sorted(found)]


def best_fit(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Returns the episodes of each row: best-fit decreasing, rows in the order of their first.

    An episode goes to the row with the least space that holds it (Johnson 1974: at most 11/9 of the
    fewest rows). Episodes of 0 tokens are in no row.

    Raises:
        ValueError: an episode is longer than a row.
    """
    rows: list[list[int]] = []
    # (free tokens, row) of all rows, ascending.
    free: list[tuple[int, int]] = []
    for episode in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = int(lengths[episode])
        if size > length:
            raise ValueError(f"an episode of {size} tokens does not fit rows of {length}")
        if not size:
            break
        at = bisect.bisect_left(free, (size, -1))
        if at == len(free):
            rows.append([])
            space, row = length, len(rows) - 1
        else:
            space, row = free.pop(at)
        rows[row].append(episode)
        bisect.insort(free, (space - size, row))
    return rows


@dataclasses.dataclass(kw_only=True)
class ShapeHistory:
    """The shapes of a run's batches for a context bucket, in the order of their first use.

    `wasted` are the positions that batches had beyond the tightest shape since the newest shape,
    as a number of whole updates.
    """

    shapes: list[Shape] = dataclasses.field(default_factory=list)
    wasted: float = 0.0

    def choose(self, lengths: Sequence[int], rule: RowRule, program_updates: float) -> Shape:
        """Returns the shape of a batch of these episodes, one of few in a run, and remembers it.

        It is the tightest that holds them, or a known one, or a new one with headroom. A new one is
        worth its compilation, which takes as long as `program_updates` updates, when known ones
        have wasted as much. With MOST_SHAPES known, a larger batch has a row for each episode.
        """
        holds = _Holds(lengths)
        tightest = holds.first(rule.shapes, sum(lengths)) or rule.largest
        known = sorted((s for s in self.shapes if s in rule.shapes), key=lambda s: s.positions)
        enough = holds.first(known, tightest.positions)
        # The last is for batches that are larger than all before.
        is_late = len(known) >= MOST_SHAPES - 1
        if enough:
            excess = enough.positions / tightest.positions - 1
            if is_late or excess <= SPARE or self.wasted + excess <= program_updates:
                self.wasted += excess
                return enough
        if len(known) >= MOST_SHAPES:
            return rule.largest
        least = (LAST_HEADROOM if is_late else HEADROOM) if known else 0.0
        headroom = max(least, min(MOST_HEADROOM, program_updates / HEADROOM_UPDATES))
        new = holds.first(rule.shapes, (1 + headroom) * tightest.positions) or rule.largest
        self.add(new, rule)
        return new

    def add(self, shape: Shape, rule: RowRule) -> None:
        """Remembers a shape; that with a row for each episode is always known."""
        self.wasted = 0.0
        if shape not in self.shapes and shape != rule.largest:
            self.shapes.append(shape)


class _Holds:
    """Finds shapes that hold these episodes."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths, self._rows = lengths, dict[int, int]()

    def first(self, shapes: Iterable[Shape], positions: float) -> Shape | None:
        """Returns the first shape of so many positions or more that holds them; None for none."""
        return next((s for s in shapes if s.positions >= positions and self._holds(s)), None)

    def _holds(self, shape: Shape) -> bool:
        if shape.length not in self._rows:
            self._rows[shape.length] = len(best_fit(self._lengths, shape.length))
        return self._rows[shape.length] <= shape.rows


def plan_packing(
    lengths: Sequence[int],
    rule: RowRule,
    shape: Shape,
    num_samples: Sequence[int] | None = None,
) -> Packing:
    """Plans to place episodes in rows.

    Args:
        lengths: tokens of each of N episodes; 0 for one that does not count.
        rule: the shapes that the update can have.
        shape: that of the batch, which holds the episodes.
        num_samples: samples of each episode; None where each has one.

    Raises:
        ValueError: an episode is longer than a row.
    """
    rows = balance_rows(best_fit(lengths, shape.length), lengths, shape, rule)
    samples = [1] * len(lengths) if num_samples is None else num_samples
    order, starts, offsets = [], [], []
    for row in sorted(rows):
        start, offset = row * shape.length, 0
        for episode in rows[row]:
            order.append(episode)
            starts.append(start)
            offsets.append(offset)
            start += int(lengths[episode])
            offset += samples[episode]
    absent = [episode for episode, size in enumerate(lengths) if not size]
    order += absent
    starts += [shape.positions] * len(absent)
    offsets += [0] * len(absent)
    sizes = [int(lengths[episode]) for episode in order]
    tables = [np.array(table, np.int32) for table in (order, starts, sizes, offsets)]
    return Packing(
        shape=shape, **dict(zip(("order", "starts", "lengths", "offsets"), tables, strict=True))
    )


def balance_rows(
    rows: Sequence[Sequence[int]], lengths: Sequence[int], shape: Shape, rule: RowRule
) -> dict[int, Sequence[int]]:
    """Returns these rows by their positions in the batch, so that all shards have as much to do.

    Rows have as many tokens each; attention's pairs of tokens, which are squares of lengths, are
    evened out over the row shards of each micro-batch: a row goes where fewest are (Graham 1969).
    """
    parts, shard_rows = rule.parts(shape), shape.rows // rule.shards
    pairs = [sum(int(lengths[episode]) ** 2 for episode in row) for row in rows]
    # (pairs, rows, micro-batch, shard): a micro-batch has every `parts`-th row of each shard.
    least = [(0, 0, part, shard) for part in range(parts) for shard in range(rule.shards)]
    placed: dict[int, Sequence[int]] = {}
    for row in sorted(range(len(rows)), key=lambda row: -pairs[row]):
        total, count, part, shard = heapq.heappop(least)
        placed[shard * shard_rows + count * parts + part] = rows[row]
        if count + 1 < shard_rows // parts:
            heapq.heappush(least, (total + pairs[row], count + 1, part, shard))
    return placed


def pack_rows(batch: TrajectoryBatch, packing: Packing, layout: Layout) -> TrajectoryBatch:
    """Returns the batch, an episode a row on `layout`, in the rows of `packing` on `layout`.

    Positions without a token hold zeros. Every process of the layout calls it with the same
    packing; one without a part of the layout gets a batch of which it has no part.
    """
    tables = (packing.order, packing.starts, packing.lengths)
    zeros = np.zeros_like(packing.offsets)

    def pack(rows: jax.Array, added: np.ndarray) -> jax.Array:
        if not rows.sharding.addressable_devices:
            return absent_array(packing.shape, rows.dtype, layout.activations("NS"))
        return _gather(layout, packing.shape)(rows, *tables, added)

    added: Any = jax.tree.map(lambda _: zeros, batch)
    return jax.tree.map(pack, batch, dataclasses.replace(added, segment_ids=packing.offsets))


@functools.lru_cache(maxsize=64)
def _gather(layout: Layout, shape: Shape) -> Any:
    """Returns the jitted gather of one field to packed rows, plus `added` by episode."""
    own_rows, length = shape.rows // layout.num_row_shards, shape.length

    def gather(
        rows_NS: jax.Array,
        order_N: jax.Array,
        starts_N: jax.Array,
        lengths_N: jax.Array,
        added_N: jax.Array,
    ) -> jax.Array:
        all_NS = jax.lax.all_gather(rows_NS, layout.row_axes, axis=0, tiled=True)
        first = jax.lax.axis_index(layout.row_axes) * own_rows * length
        place_P = first + jnp.arange(own_rows * length)
        # The last episode that begins at the place or before it; -1: there is none.
        entry_P = jnp.searchsorted(starts_N, place_P, side="right").astype(jnp.int32) - 1
        within_P = place_P - starts_N[entry_P]
        inside_P = (entry_P >= 0) & (within_P < lengths_N[entry_P])
        taken_P = all_NS[order_N[entry_P], jnp.where(inside_P, within_P, 0)]
        taken_P = taken_P + added_N[entry_P].astype(taken_P.dtype)
        return jnp.where(inside_P, taken_P, 0).reshape(own_rows, length)

    spec, whole = layout.activation_spec("NS"), layout.activation_spec(".")
    # By hand: XLA would gather each field for every device of the mesh.
    shared = jax.shard_map(
        gather,
        mesh=layout.mesh,
        in_specs=(spec, whole, whole, whole, whole),
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(shared, out_shardings=layout.activations("NS"))


def add_rows(batch: TrajectoryBatch, num_rows: int) -> TrajectoryBatch:
    """Returns the batch with rows of padding behind it, `num_rows` in all, where it is."""
    missing = num_rows - batch.tokens.shape[0]
    if not missing:
        return batch
    shardings = jax.tree.map(lambda field: field.sharding, batch)

    def pad(batch: TrajectoryBatch) -> TrajectoryBatch:
        return jax.tree.map(lambda field: jnp.pad(field, ((0, missing), (0, 0))), batch)

    return jax.jit(pad, out_shardings=shardings)(batch)
