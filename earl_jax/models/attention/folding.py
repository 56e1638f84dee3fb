# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Folding of rows over the `context` axis, so that all shards have as much to do.

Token t attends to t others, so that the shard with the end of a row would work most. Therefore a
row is split into 2 C parts for C shards, and folded in the middle: shard i has the parts i and
2 C - 1 - i (Llama 3, arXiv 2407.21783, section 3.3.2). Eight tokens on two shards are
0 1 6 7 | 2 3 4 5.

The arrays of a batch come whole to every shard (28 bytes a token, where a layer's activations are
kilobytes), and are folded there, without a collective: so code that looks at neighbours (which
token is next, where a segment begins) does not know of shards. Activations are folded throughout.
Scores of tokens are gathered and unfolded: 8 bytes a token, and behind that nothing knows of shards
either.

On a mesh without a `context` axis nothing is done at all.
"""

import jax
import jax.numpy as jnp

from earl_jax.models.attention.rows import part_length
from earl_jax.sharding.layout import Layout


def fold(layout: Layout, rows_BS: jax.Array) -> jax.Array:
    """Returns whole rows folded over the `context` axis, padded with zeros; BT."""
    context = layout.shape.context
    if context == 1:
        return rows_BS
    length = rows_BS.shape[1]
    size = part_length(length, context)
    rows_BS = jnp.pad(rows_BS, ((0, 0), (0, 2 * context * size - length)))

    def take(rows_BS: jax.Array) -> jax.Array:
        shard = jax.lax.axis_index("context")
        parts = (shard, 2 * context - 1 - shard)
        return jnp.concatenate(
            [jax.lax.dynamic_slice_in_dim(rows_BS, part * size, size, axis=1) for part in parts],
            axis=1,
        )

    # By hand: XLA would cut the rows first, and send parts to and fro.
    return jax.shard_map(
        take,
        mesh=layout.mesh,
        in_specs=layout.activation_spec("BS"),
        out_specs=layout.activation_spec("BT"),
        check_vma=False,
    )(rows_BS)


def unfold(layout: Layout, folded_BT: jax.Array, length: int) -> jax.Array:
    """Returns the inverse: the `length` positions of whole rows, on every shard; BS."""
    context = layout.shape.context
    if context == 1:
        return folded_BT
    folded_BT = layout.constrain(folded_BT, "BS")
    pairs = folded_BT.reshape(len(folded_BT), context, 2, -1)
    parts_BWS = jnp.concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], axis=1)
    return parts_BWS.reshape(len(folded_BT), -1)[:, :length]
