# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Drafting by prompt lookup: the tokens that followed the last few ids of a row before.

It needs no second model, only a comparison of a row's ids with its last n-gram. Games, tool
transcripts and code repeat themselves.
"""

import jax
import jax.numpy as jnp


def look_up(
    ids_BP: jax.Array, lengths_B: jax.Array, *, ngram: int, draft: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the ids that followed the last `ngram` ids of each row where these stood before.

    Where they stood several times it is the latest time with `draft` ids behind it; where there is
    none, the earliest, which has the most ids behind it.

    Example: behind the row 5 6 7 8 5 6, with an `ngram` of 2, 5 6 stood at its beginning, where
    7 8 5 6 followed: a `draft` of 3 is 7 8 5, one of 8 is 7 8 5 6.

    Args:
        ids_BP: i32, of which the first `lengths_B[b]` of row b are known.
        lengths_B: i32.
        ngram: how many ids must be the same, at least 1.
        draft: the most ids to return, at least 1.

    Returns:
        drafts_BK i32, of which the first counts_B [B] of each row count; 0 where its last ids stand
        nowhere before.
    """
    width = ids_BP.shape[1]
    positions_1P, last_B1 = jnp.arange(width)[None, :], lengths_B[:, None] - 1
    # Position p is an earlier end of the n-gram, with its first id in the row and an id behind it.
    same_BP = (positions_1P >= ngram - 1) & (positions_1P < last_B1)
    for back in range(ngram):
        id_B1 = jnp.take_along_axis(ids_BP, last_B1 - back, axis=1, mode="clip")
        same_BP &= jnp.roll(ids_BP, back, axis=1) == id_B1
    rank_BP = jnp.where(last_B1 - positions_1P >= draft, positions_1P, -1 - positions_1P)
    found_B1 = jnp.argmax(jnp.where(same_BP, rank_BP, -1 - width), axis=1, keepdims=True)
    from_BK = found_B1 + 1 + jnp.arange(draft)[None, :]
    drafts_BK = jnp.take_along_axis(ids_BP, from_BK, axis=1, mode="clip")
    counts_B = jnp.minimum(draft, last_B1 - found_B1)[:, 0]
    return drafts_BK, jnp.where(jnp.any(same_BP, axis=1), counts_B, 0)
