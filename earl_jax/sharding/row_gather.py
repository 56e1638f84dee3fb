# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Gathers chosen rows of arrays that are cut by rows, inside a program that is manual over them."""

from typing import TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


def gather_rows(tree: Tree, rows_N: jax.Array, row_axes: tuple[str, ...]) -> Tree:
    """Returns this shard's equal part of the rows of these numbers, in this order, bit for bit.

    Each shard adds up its part of what all have read; a number that is no row's gives zeros. N
    divides by the number of shards. Fields are of 4 bytes a position.
    """
    num_rows = jax.tree.leaves(tree)[0].shape[0]
    local_N = local_rows(rows_N, jax.lax.axis_index(row_axes) * num_rows, num_rows)

    def one(field: jax.Array) -> jax.Array:
        read_NP = as_bits(field).at[local_N].get(mode="fill", fill_value=0)
        mine = jax.lax.psum_scatter(read_NP, row_axes, scatter_dimension=0, tiled=True)
        return jax.lax.bitcast_convert_type(mine, field.dtype)

    return jax.tree.map(one, tree)


def local_rows(rows_K: jax.Array, first_row: jax.Array, num_rows: int) -> jax.Array:
    """Returns row numbers within this shard; one past its end for rows of other shards."""
    here_K = (rows_K >= first_row) & (rows_K < first_row + num_rows)
    return jnp.where(here_K, rows_K - first_row, num_rows)


def as_bits(field: jax.Array) -> jax.Array:
    """Returns the bits of numbers of 4 bytes, of which a sum with zeros changes none."""
    return jax.lax.bitcast_convert_type(field, jnp.int32)
