# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""x"""
from typing import Any
import jax
from earl_jax.selector.memory import unless_out_of_memory
from earl_jax.sharding.reshard import reshard
PIECES = 8

def carry(state: Any, shardings: Any, chunk_bytes: int | None) -> tuple[Any, bool]:
    """The arrays where they were told to go, and whether all of them are there. Gives `state` up.

    At once, or where memory is short for that, one after the other in pieces of at most
    `chunk_bytes`: each makes room for the next. Where it is short even so, what has arrived stays,
    and the rest is where it was: they can be carried on from there, to anywhere.
    """
    if chunk_bytes is None:
        moved = unless_out_of_memory(lambda: reshard(state, shardings))
        if moved is not None:
            _free(state, moved)
            return moved, True
    leaves, structure = jax.tree.flatten(state)
    targets = jax.tree.leaves(shardings)
    for k, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        chunk = chunk_bytes or max(1, leaf.nbytes // PIECES)
        moved = unless_out_of_memory(
            lambda leaf=leaf, target=target, chunk=chunk: reshard(leaf, target, chunk_bytes=chunk)
        )
        if moved is None:
            return jax.tree.unflatten(structure, leaves), False
        _free(leaf, moved)
        leaves[k] = moved
    return jax.tree.unflatten(structure, leaves), True


def is_placed(state: Any, shardings: Any) -> bool:
    """Whether every array is where it should be, and says so by the same mesh.

    The same bytes may lie under the labels of another mesh (fsdp=8, and fsdp=4 by context=2): a
    program would be traced and compiled for these, and once more for those of its own results.
    """
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
    return all(
        leaf.sharding.mesh == where.mesh and leaf.sharding.is_equivalent_to(where, leaf.ndim)
        for leaf, where in pairs
    )


def _free(state: Any, moved: Any) -> None:
    """Frees what the moved arrays do not share."""
    kept = {
        (shard.device, shard.data.unsafe_buffer_pointer())
        for leaf in jax.tree.leaves(moved)
        for shard in leaf.addressable_shards
    }
    for leaf in jax.tree.leaves(state):
        buffers = {(s.device, s.data.unsafe_buffer_pointer()) for s in leaf.addressable_shards}
        if not buffers & kept:
            leaf.delete()


