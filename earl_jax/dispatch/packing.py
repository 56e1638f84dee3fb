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
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.sharding.layout import Layout
from earl_jax.sharding.reshard import absent_array
from earl_jax.trajectory import TrajectoryBatch

# Numbers of rows that a run has for a length and a plan: a program is compiled for each.
MOST_COUNTS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """A plan that places N episodes in `num_rows` rows of `length` tokens; i32[N] each.

    `order` has the episodes in the order of their places, `starts` their first place, counted
    through all rows, and `lengths` their tokens; `offsets` are the samples before them in their
    row. Episodes without tokens come last, behind the last place.

    Example: lengths 3, 0, 6, 2 in rows of 8 are rows (2, 3) and (0): order 2 3 0 1,
    starts 0 6 8 16, lengths 6 2 3 0.
    """

    num_rows: int
    length: int
    order: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray

    @property
    def fill(self) -> float:
        """The fraction of places that hold a token."""
        return float(self.lengths.sum() / (self.num_rows * self.length))


class RowRule(NamedTuple):
    """The numbers of rows that an update can have.

    They are at most `most` rows, in micro-batches of at most `most / micro_batches` rows, each of
    which has as many rows of each of the row `shards`. So no update needs more memory than one of
    `most` rows.
    """

    most: int
    micro_batches: int
    shards: int

    def parts(self, rows: int) -> int:
        """Returns the number of micro-batches of an update of so many rows."""
        return max(1, -(-rows * self.micro_batches // self.most))

    def round_up(self, rows: int) -> int:
        """Returns the smallest possible number that is not below `rows`."""
        unit = self.parts(min(rows, self.most)) * self.shards
        return min(self.most, max(1, -(-rows // unit)) * unit)

    def choose(self, needed: int, known: Iterable[int]) -> int:
        """Returns the number of rows for a batch that needs `needed`, one of few in a run.

        A known number is taken if it is little more than needed. A new number has headroom of a
        40th for each known one, so that five of them hold 1.7 times the rows of the first. The last
        of MOST_COUNTS is `most`. Of 32, 40, 48 and 64 parts, 40 filled rows best over steps of 128
        episodes (benchmarks/packing.md).
        """
        known = [rows for rows in known if self.round_up(rows) == rows]
        enough = min((rows for rows in known if rows >= needed), default=self.most)
        if len(known) >= MOST_COUNTS - 1:
            return enough
        return min(enough, self.round_up(math.ceil(needed * (1 + len(known) / 40))))


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


def plan_packing(
    lengths: Sequence[int],
    length: int,
    rule: RowRule,
    known: Iterable[int] = (),
    num_samples: Sequence[int] | None = None,
) -> Packing:
    """Plans to place episodes in rows of `length` tokens.

    Args:
        lengths: tokens of each of N episodes; 0 for one that does not count.
        length: tokens of a row.
        rule: the numbers of rows that the update can have.
        known: numbers of rows that were used before.
        num_samples: samples of each episode; None where each has one.

    Raises:
        ValueError: an episode is longer than a row.
    """
    rows = best_fit(lengths, length)
    num_rows = rule.choose(max(1, len(rows)), known)
    samples = [1] * len(lengths) if num_samples is None else num_samples
    order, starts, offsets = [], [], []
    for row, episodes in enumerate(rows):
        start, offset = row * length, 0
        for episode in episodes:
            order.append(episode)
            starts.append(start)
            offsets.append(offset)
            start += int(lengths[episode])
            offset += samples[episode]
    absent = [episode for episode, size in enumerate(lengths) if not size]
    order += absent
    starts += [num_rows * length] * len(absent)
    offsets += [0] * len(absent)
    sizes = [int(lengths[episode]) for episode in order]
    tables = [np.array(table, np.int32) for table in (order, starts, sizes, offsets)]
    return Packing(
        num_rows=num_rows,
        length=length,
        **dict(zip(("order", "starts", "lengths", "offsets"), tables, strict=True)),
    )


def pack_rows(batch: TrajectoryBatch, packing: Packing, layout: Layout) -> TrajectoryBatch:
    """Returns the batch, an episode a row on `layout`, in the rows of `packing` on `layout`.

    Places without a token hold zeros. Every process of the layout calls it with the same packing;
    one without a part of the layout gets a batch of which it has no part.
    """
    tables = (packing.order, packing.starts, packing.lengths)
    zeros = np.zeros_like(packing.offsets)
    packed = {}
    for field in dataclasses.fields(batch):
        rows = getattr(batch, field.name)
        if rows is None:
            continue
        if not rows.sharding.addressable_devices:
            shape = (packing.num_rows, packing.length)
            packed[field.name] = absent_array(shape, rows.dtype, layout.activations("NS"))
            continue
        added = packing.offsets if field.name == "segment_ids" else zeros
        packed[field.name] = _gather(layout, packing.num_rows)(rows, *tables, added)
    return TrajectoryBatch(**packed)


@functools.lru_cache(maxsize=64)
def _gather(layout: Layout, num_rows: int) -> Any:
    """Returns the jitted gather of one field to `num_rows` packed rows, plus `added` by episode."""
    own_rows = num_rows // layout.num_row_shards

    def gather(
        rows_NS: jax.Array,
        order_N: jax.Array,
        starts_N: jax.Array,
        lengths_N: jax.Array,
        added_N: jax.Array,
    ) -> jax.Array:
        all_NS = jax.lax.all_gather(rows_NS, layout.row_axes, axis=0, tiled=True)
        length = all_NS.shape[1]
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
