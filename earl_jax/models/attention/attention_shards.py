# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention split over devices by hand, where XLA cannot split it or does so badly."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from earl_jax.sharding.layout import Layout


def on_own_heads(
    layout: Layout | None,
    attend: Callable[..., Any],
    *,
    by_hand: bool = False,
    one_key: bool = False,
) -> Callable[..., Any]:
    """Runs `attend(new, pages, sinks, numbers)` on a device's heads, in the engine's `shard_map`.

    `new` are BTK..., `pages` ZK..., `sinks` KG or None, `numbers` the same for all heads; it
    returns what is BTKGH and the pages. With `one_key` there is one key for all heads of queries
    (K is 1), which each device has; `new` begins with BTKGH, whose G is cut instead of K. Between
    heads there is no collective; but where there are some over `context`, XLA would gather all
    heads before each of them, unless `tensor` is written by hand as well; and it would gather heads
    that it joins with positions (`one_key`). A kernel that XLA cannot split is run `by_hand` on
    whatever axes are left, those of size 1 too, which Mosaic asks for.
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
    elif shape.tensor == 1 or (shape.context == 1 and not one_key):
        return attend
    query = new = P(None, None, "tensor")
    pages, sinks = P(None, "tensor"), P("tensor")
    if one_key:
        query, pages, sinks = P(None, None, None, "tensor"), P(), P(None, "tensor")
        new = (query, P(), P())
    return jax.shard_map(
        attend,
        in_specs=(new, pages, sinks, P()),
        out_specs=(query, pages),
        axis_names=axes,
        check_vma=False,
    )
