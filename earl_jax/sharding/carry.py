# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Moves of a tree between placements that give up the source, also where memory is short."""

from collections.abc import Callable
from typing import Any

import jax

from earl_jax.sharding.reshard import reshard

# An array that moves alone, because memory is short, moves in so many pieces.
PIECES = 8


def carry(
    tree: Any,
    shardings: Any,
    attempt: Callable[[Callable[[], Any]], Any | None],
) -> tuple[Any, bool]:
    """Moves arrays to `shardings` and frees their source buffers.

    All arrays move at once. Where memory is too short for that, they move one after the other, in
    pieces of an eighth of the array, and each frees its source before the next moves.
    `attempt(work)` returns the result of `work`, or None where a device ran out of memory.

    Returns:
        The tree, and True if all arrays have moved. Where memory is too short even for one array in
        pieces, arrays that have moved stay there and the others are where they were: the tree can
        be carried on to any shardings.
    """
    moved = attempt(lambda: jax.block_until_ready(reshard(tree, shardings)))
    if moved is not None:
        free_sources(tree, moved)
        return moved, True
    leaves, structure = jax.tree.flatten(tree)
    targets = jax.tree.leaves(shardings)
    for k, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        chunk = max(1, leaf.nbytes // PIECES)

        def move(leaf: Any = leaf, target: Any = target, chunk: int = chunk) -> Any:
            return jax.block_until_ready(reshard(leaf, target, chunk_bytes=chunk))

        moved = attempt(move)
        if moved is None:
            return jax.tree.unflatten(structure, leaves), False
        free_sources(leaf, moved)
        leaves[k] = moved
    return jax.tree.unflatten(structure, leaves), True


def is_placed(tree: Any, shardings: Any) -> bool:
    """Returns True if every array has the given sharding, on the same mesh.

    The same bytes may be labelled by another mesh (fsdp=8, and fsdp=4 by context=2): a program
    would be traced and compiled for these labels, and once more for those of its own results.
    """
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    return all(
        leaf.sharding.mesh == where.mesh and leaf.sharding.is_equivalent_to(where, leaf.ndim)
        for leaf, where in pairs
    )


def free_sources(tree: Any, moved: Any) -> None:
    """Deletes the arrays of `tree` that share no buffer with those of `moved`."""
    kept = {
        (shard.device, shard.data.unsafe_buffer_pointer())
        for leaf in jax.tree.leaves(moved)
        for shard in leaf.addressable_shards
    }
    for leaf in jax.tree.leaves(tree):
        buffers = {(s.device, s.data.unsafe_buffer_pointer()) for s in leaf.addressable_shards}
        if not buffers & kept:
            leaf.delete()
