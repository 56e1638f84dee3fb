# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The one legend: every letter that a suffix, an einsum or a sharding rule uses.

    B  rows: episodes in training, slots in the engine     V  vocabulary
    T  tokens of a query or a training row                 D  model width
    S  tokens of a page of the KV cache, or keys           F  feed-forward size
    L  layers (stacked)                                    K  key/value heads
    H  size of a head                                      G  query heads per key/value head
    N  rows of an experience buffer                        C  chunk of tokens
    P  blocks of a blocked vocabulary                      Q  entries of such a block
    R  rank of an adapter
    E  experts of a layer                                  X  the same, as a router scores them
    U  experts that one token uses                         M  pairs of a token and its expert
    A  numbers of a latent: of queries, of keys and values, with a rotated key beside it or without
    Z  pages of the KV cache                               Y  pages of a row
    I  tokens of a short convolution                       O  numbers of a value, where of a key
                                                              there are H
    J  branches of the tree of a turn's allowed replies     W  parts of a folded row

A mesh has five axes, always in this order, those that talk most innermost: `data` splits rows,
`fsdp` splits rows too and stores each parameter in pieces that are gathered for use, `context`
splits the tokens of a row (and stores parameters as `fsdp` does; in a rollout it splits chunks, and
the tokens of every page), `expert` splits experts, `tensor`
splits heads, feed-forward and vocabulary.
"""

LETTERS = "BTSLDFKGHVNCPQREXUMAZYJWIO"

MESH_AXES = ("data", "fsdp", "context", "expert", "tensor")
