# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention split over devices by hand, where XLA cannot split it or does so badly."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from earl_jax.sharding.layout import Layout


def on_each_shard(layout: Layout, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Runs `attend(query_BTKGH, key_BKSH, value_BKSH, numbers_BT)` on each device's rows and heads.

    No collective: no head looks at another's keys.
    """
    sides = layout.activation_spec("BKSH")
    queries = layout.activation_spec("BTKGH")
    return jax.shard_map(
        attend,
        mesh=layout.mesh,
        in_specs=(queries, sides, sides, layout.activation_spec("BT")),
        out_specs=queries,
        check_vma=False,
    )


def on_own_heads(
    layout: Layout | None, attend: Callable[..., Any], *, by_hand: bool = False
) -> Callable[..., Any]:
    """Runs `attend(new, pages, numbers)` on each device's heads, inside the engine's `shard_map`.

    `new` are BTK..., `pages` ZK..., `numbers` the same for all heads; it returns what is BTKGH and
    the pages. Between heads there is no collective; but where there are some over `context`, XLA
    would gather all heads before each of them, unless `tensor` is written by hand as well. A kernel
    that XLA cannot split is run `by_hand` on whatever axes are left, those of size 1 too, which
    Mosaic asks for.
    """
    if layout is None:
        return attend
    shape, axes = layout.shape, {"tensor"}
    if by_hand:
        cut_pages = ("context",) if shape.context > 1 else ()
        axes = set(layout.mesh.axis_names).difference(
            layout.by_hand((*layout.row_axes, *cut_pages))
        )
        if not axes:
            return attend
    elif shape.context == 1 or shape.tensor == 1:
        return attend
    tokens, pages = P(None, None, "tensor"), P(None, "tensor")
    return jax.shard_map(
        attend,
        in_specs=(tokens, pages, P()),
        out_specs=(tokens, pages),
        axis_names=axes,
        check_vma=False,
    )
