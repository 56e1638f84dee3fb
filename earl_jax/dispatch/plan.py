# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The cost of moving a batch (or any tree) from one layout to another, before the move.

Pure: it reads shapes, dtypes and shardings only, so a switch on 256 chips is planned on a laptop
with `jax.ShapeDtypeStruct`s on abstract meshes. `sharding.reshard` makes the same plans to carry
them out.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from earl_jax.sharding.plan_text import bytes_text, device_table_lines, table_lines
from earl_jax.sharding.ranges import check_divides, process_of, shard_ranges
from earl_jax.sharding.transfer_plan import (
    MAX_PRINTED_LINES,
    Traffic,
    TransferPlan,
    plan_transfers,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatchPlan(Traffic):
    """The `TransferPlan` of each named leaf of a tree, and their sums.

    `moved_bytes` is exact for leaves that go as pieces and the lower bound for compiled ones.
    """

    leaves: tuple[tuple[str, TransferPlan], ...]

    @functools.cached_property
    def link_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes per (source device, target device) over all leaves."""
        return _sum_counts(plan.link_bytes for _, plan in self.leaves)

    @functools.cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes per sending device."""
        return _sum_counts(plan.sent_bytes for _, plan in self.leaves)

    @functools.cached_property
    def received_bytes(self) -> dict[int, int]:
        """Bytes per receiving device."""
        return _sum_counts(plan.received_bytes for _, plan in self.leaves)

    @functools.cached_property
    def kept_bytes(self) -> dict[int, int]:
        """Bytes per device that it needs and already holds."""
        return _sum_counts(plan.kept_bytes for _, plan in self.leaves)

    def __str__(self) -> str:
        """One line per leaf and their sum, who sends how much to whom, and each device's share."""
        rows = [
            (
                name,
                plan.shape,
                plan.route,
                *map(bytes_text, (plan.moved_bytes, plan.in_place_bytes)),
            )
            for name, plan in self.leaves
        ]
        total = ("total", "", "", bytes_text(self.moved_bytes), bytes_text(self.in_place_bytes))
        lines = table_lines(("leaf", "shape", "route", "moved", "in place"), [*rows, total])
        if self.link_bytes:
            path = self.leaves[0][1].path
            links = [
                (*link, bytes_text(size), path(*link))
                for link, size in list(self.link_bytes.items())[:MAX_PRINTED_LINES]
            ]
            lines += ["", *table_lines(("from", "to", "bytes", "path"), links)]
            if len(self.link_bytes) > MAX_PRINTED_LINES:
                lines.append(f"... and {len(self.link_bytes) - MAX_PRINTED_LINES} more links")
        shares = device_table_lines(self.sent_bytes, self.received_bytes, self.kept_bytes)
        return "\n".join([*lines, "", *shares])


def plan_dispatch(tree: Any, shardings: Any) -> DispatchPlan:
    """Plans to move `tree` to `shardings`, a tree of the same structure.

    Args:
      tree: leaves with `shape`, `dtype` and `sharding`: a `TrajectoryBatch` of `jax.Array`s, or of
        `jax.ShapeDtypeStruct`s where the hardware is absent.
      shardings: one sharding per leaf; devices count as the same where their ids are.

    Raises:
      ValueError: if the structures differ or a shape does not divide over its target.
    """
    named_leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    targets, target_structure = jax.tree_util.tree_flatten(shardings)
    if structure != target_structure:
        raise ValueError(
            "plan_dispatch needs one sharding per leaf, in the same structure; the leaves are "
            f"{structure}, the shardings {target_structure}"
        )
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in named_leaves]
    for name, (_, leaf), target in zip(names, named_leaves, targets, strict=True):
        if isinstance(target, NamedSharding):
            check_divides(name, leaf.shape, target)
    plans = plan_transfers(
        [
            (
                leaf.shape,
                leaf.dtype.itemsize,
                shard_ranges(leaf.sharding, leaf.shape),
                shard_ranges(target, leaf.shape),
            )
            for (_, leaf), target in zip(named_leaves, targets, strict=True)
        ],
        process_of=process_of(*(leaf.sharding for _, leaf in named_leaves), *targets),
    )
    return DispatchPlan(leaves=tuple(zip(names, plans, strict=True)))


def _sum_counts(parts: Iterable[Mapping[Any, int]]) -> dict[Any, int]:
    total: Counter[Any] = Counter()
    for part in parts:
        total.update(part)
    return dict(sorted(total.items()))
