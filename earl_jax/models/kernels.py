# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Which attention kernel whole rows get: chosen by platform, overridden by a setting.

Only rows of training have a choice. The engine's chunks stand at places of their own in a cache
(`attention.attention` is what serves them): none of these kernels takes such queries.
"""

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.models.attention import Places, Window, attention
from earl_jax.sharding.layout import Layout

Kernel = Literal["blockwise", "splash"]

_NAMES: dict[str, str] = {
    "blockwise": "our blockwise attention",
    "splash": "splash attention, a Pallas kernel",
}


class Choice(NamedTuple):
    """A kernel, and in words why it is that one."""

    kernel: Kernel
    reason: str

    def __str__(self) -> str:
        return f"{_NAMES[self.kernel]}, because {self.reason}"


def choose_kernel(setting: str, layout: Layout) -> Choice:
    """The kernel for rows on this layout; `setting` is config.train.attention.

    Raises:
        ValueError: the kernel that was asked for does not run on the layout's platform.
    """
    platform = layout.platform
    if setting == "blockwise":
        return Choice("blockwise", "config.train.attention says so")
    if setting == "splash":
        if platform not in ("tpu", None):
            raise ValueError(
                f"config.train.attention is 'splash', a kernel for TPUs; this mesh has {platform} "
                "devices: choose 'auto' or 'blockwise'"
            )
        return Choice("splash", "config.train.attention says so")
    assert setting == "auto", setting
    if platform == "tpu":
        return Choice("splash", "the devices are TPUs")
    if platform is None:
        return Choice("blockwise", "the mesh is abstract")
    return Choice("blockwise", f"no other kernel is offered for {platform} devices")


def attend_rows(
    kernel: Kernel,
    layout: Layout,
    query_BTKGH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    scale: float,
    softcap: float = 0.0,
    window: Window = None,
    windows: Sequence[int] = (),
) -> jax.Array:
    """`attention` of whole rows over themselves, by this kernel. Placed as `layout` says.

    A `window` on the device must be one of `windows`: a kernel is made for a window, and those of
    all of them stand in the program.
    """
    query_BTKGH = layout.constrain(query_BTKGH, "BTKGH")
    key_BKSH = layout.constrain(key_BKSH, "BKSH")
    value_BKSH = layout.constrain(value_BKSH, "BKSH")
    inputs = query_BTKGH, key_BKSH, value_BKSH, segment_ids_BT
    if kernel == "splash":
        # Importing Pallas takes half a second, which only those who use it should wait for.
        from earl_jax.models.splash import splash_rows

        splash = functools.partial(splash_rows, layout, scale=scale, softcap=softcap)
        if not isinstance(window, jax.Array):
            return splash(*inputs, window=window)
        known = sorted(set(windows))
        branches = [functools.partial(splash, window=size) for size in known]
        return jax.lax.switch(jnp.searchsorted(jnp.array(known), window), branches, *inputs)
    order_BT = jax.lax.broadcasted_iota(jnp.int32, segment_ids_BT.shape, 1)
    places = Places(order_BT, segment_ids_BT)
    return attention(
        query_BTKGH,
        key_BKSH,
        value_BKSH,
        places,
        places,
        scale=scale,
        softcap=softcap,
        window=window,
    )
