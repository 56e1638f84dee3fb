# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How an attention kernel is cut over devices: XLA cannot cut a kernel itself."""

from collections.abc import Callable

import jax

from earl_jax.sharding.layout import Layout


def on_each_shard(layout: Layout, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`attend(query_BTKGH, key_BKSH, value_BKSH, numbers_BT)` on each device's rows and heads.

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
