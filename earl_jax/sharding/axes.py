# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The one legend: every letter that a suffix, an einsum or a sharding rule uses.

    B  rows: episodes in training, slots in the engine     V  vocabulary
    T  tokens of a query or a training row                 D  model width
    S  places of the KV cache                              F  feed-forward size
    L  layers (stacked)                                    K  key/value heads
    H  size of a head                                      G  query heads per key/value head
    N  rows of an experience buffer                        C  chunk of tokens
    P  blocks of a blocked vocabulary                      Q  entries of such a block
    R  rank of an adapter

A mesh has three axes, always in this order: `data` splits rows, `fsdp` splits rows too and stores
each parameter in pieces that are gathered for use, `tensor` splits heads, feed-forward and
vocabulary.
"""

LETTERS = "BTSLDFKGHVNCPQR"

MESH_AXES = ("data", "fsdp", "tensor")
