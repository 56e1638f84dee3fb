# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The choice of attention kernels: over whole rows, and over the pages of a KV cache.

Both are chosen by platform and model, rows also by length, and a setting overrides. For pages there
are our own alone, since no other kernel reads pages laid out as the engine's.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp

from earl_jax.models.attention.page_shares import PageShare
from earl_jax.models.attention.paged_attention import (
    ON_CPU,
    attend_pages,
    plan_reading,
    tile_for,
)
from earl_jax.models.attention.ring import ring_attention
from earl_jax.models.attention.rows import BLOCK_SIZE, Window
from earl_jax.models.attention.segment_blocks import attend_packed_rows
from earl_jax.models.attention.tokamax_rows import CAPABILITIES, tokamax_rows
from earl_jax.models.config import ModelConfig
from earl_jax.models.kv_cache import LayerCache, PagedCache
from earl_jax.models.layer_groups import group_layers
from earl_jax.models.tokamax_extra import tokamax_obstacle
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import Layout, MeshShape

Kernel = Literal["blockwise", "splash", "tokamax", "triton"]

_NAMES: dict[str, str] = {
    "blockwise": "our blockwise attention",
    "splash": "splash attention, a Pallas kernel",
    "tokamax": "tokamax's flash attention",
    "triton": "our Pallas kernels over rows, through Triton",
}
# By platform, the fastest first; where none of them runs, blockwise.
_BEST: dict[str | None, tuple[Kernel, ...]] = {"tpu": ("splash",), "gpu": ("tokamax", "triton")}
# The largest head of our kernels over rows.
_MOST_SIZE = 256


class Choice(NamedTuple):
    """A kernel, and the reason for it in words."""

    kernel: Kernel
    reason: str

    def __str__(self) -> str:
        return f"{_NAMES[self.kernel]}, because {self.reason}"


def choose_kernel(setting: str, layout: Layout, model: ModelConfig, length: int) -> Choice:
    """Returns the kernel for this model's rows of `length` tokens on this layout.

    `setting` is config.train.attention. The length is that of a batch, which differs from step to
    step, so the kernel is chosen when a step is traced. An abstract mesh has no platform: it takes
    `setting` unchecked.

    Raises:
        ValueError: the kernel that was asked for does not run on the layout's devices.
    """
    if setting != "auto":
        kernel = cast(Kernel, setting)
        if obstacle := _obstacle(kernel, layout, model):
            raise InputError(
                f"config.train.attention is {setting!r}, but {obstacle}: choose 'auto' or "
                "'blockwise'"
            )
        return Choice(kernel, "config.train.attention says so")
    best = _BEST.get(layout.platform)
    if best is None:
        devices = f"{layout.platform} devices" if layout.platform else "an abstract mesh"
        return Choice("blockwise", f"there is no other kernel for {devices}")
    obstacles = [_obstacle(kernel, layout, model) for kernel in best]
    if all(obstacles):
        return Choice("blockwise", str(obstacles[-1]))
    if length <= BLOCK_SIZE:
        # Its scores are made in one piece and are few, while splash pads rows to 128 tokens. Not
        # measured on a chip yet.
        return Choice("blockwise", f"rows of at most {BLOCK_SIZE} tokens are one block of it")
    first = obstacles.index(None)
    return Choice(best[first], obstacles[0] or f"the devices are {layout.platform} devices")


def _obstacle(kernel: Kernel, layout: Layout, model: ModelConfig) -> str | None:
    """Returns why the kernel does not run there, in words; None where it does."""
    if obstacle := context_obstacle(kernel, layout.shape):
        return obstacle
    if kernel == "tokamax" and model.attention_sinks:
        return "tokamax's kernel has no attention sinks, as this model's softmax has"
    if kernel == "splash" and layout.platform not in ("tpu", None):
        return f"its kernel is for TPUs and these are {layout.platform} devices"
    if kernel == "tokamax":
        return tokamax_obstacle(layout.platform, CAPABILITIES, model.compute_dtype)
    if kernel == "triton":
        if obstacle := _triton_obstacle(layout.platform):
            return obstacle
        if model.compute_dtype == "float32":
            return "its sums do not fit into registers if config.model.compute_dtype is 'float32'"
        if model.head_size > _MOST_SIZE:
            return f"its heads are at most {_MOST_SIZE} wide, and config.model.head_size is more"
    return None


def _triton_obstacle(platform: str | None) -> str | None:
    """Returns why a kernel through Triton does not run on this platform; None where it does."""
    if platform not in ("gpu", None):
        return f"its kernel is for GPUs and these are {platform} devices"
    # jax deprecates Pallas's way through Triton from 0.11 on.
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return f"jax {jax.__version__} has no Triton backend of Pallas"
    return None


def context_obstacle(setting: str, shape: MeshShape) -> str | None:
    """Returns why config.train.attention forbids a `context` axis; None where it does not.

    tokamax's kernel has no way to add up what was seen of parts of the keys.
    """
    if shape.context == 1 or setting != "tokamax":
        return None
    return f"its kernel takes whole rows and context={shape.context} cuts them"


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
    sinks_KG: jax.Array | None = None,
) -> jax.Array:
    """Computes `attention` of whole rows over themselves by this kernel, placed by `layout`.

    On a layout with a `context` axis queries, keys and values are folded (folding.py), while
    `segment_ids_BT` are those of whole rows, and what is returned is folded too.

    A `window` on the device must be one of `windows`: splash is made for a window, and the kernels
    of all of them stand in the program. Values may be smaller than keys; as kernels have one size
    of heads, zeros are put behind them.
    """
    size, key_size = value_BKSH.shape[-1], key_BKSH.shape[-1]
    if size < key_size:
        value_BKSH = jnp.pad(value_BKSH, [(0, 0)] * 3 + [(0, key_size - size)])
    query_BTKGH = layout.constrain(query_BTKGH, "BTKGH")
    is_cut = layout.shape.context > 1
    attend = _ATTEND[kernel]
    if is_cut:
        assert kernel != "tokamax", kernel
        attend = functools.partial(ring_attention, kernel=kernel)
    attend = functools.partial(attend, layout, scale=scale, softcap=softcap)
    if sinks_KG is not None:
        assert kernel != "tokamax", kernel
        attend = functools.partial(attend, sinks_KG=sinks_KG)
    sides = "BKTH" if is_cut else "BKSH"
    key_BKSH, value_BKSH = (layout.constrain(side, sides) for side in (key_BKSH, value_BKSH))
    inputs = query_BTKGH, key_BKSH, value_BKSH, segment_ids_BT
    if kernel != "splash" or not isinstance(window, jax.Array):
        return attend(*inputs, window=window)[..., :size]
    known = sorted(set(windows))
    branches = [functools.partial(attend, window=each) for each in known]
    chosen = jnp.searchsorted(jnp.array(known), window)
    return jax.lax.switch(chosen, branches, *inputs)[..., :size]


def _splash(*inputs: Any, **settings: Any) -> jax.Array:
    # Importing Pallas takes half a second, which only those who use it should wait for.
    from earl_jax.models.attention.splash import splash_rows

    return splash_rows(*inputs, **settings)


def _triton(*inputs: Any, **settings: Any) -> jax.Array:
    from earl_jax.models.attention.rows_triton import triton_rows

    return triton_rows(*inputs, **settings)


_ATTEND: dict[Kernel, Callable[..., jax.Array]] = {
    "blockwise": attend_packed_rows,
    "splash": _splash,
    "tokamax": tokamax_rows,
    "triton": _triton,
}

PagesKernel = Literal["blockwise", "triton", "pallas_tpu"]

_PAGES_NAMES: dict[PagesKernel, str] = {
    "blockwise": "our attention over pages",
    "triton": "our Pallas kernel over pages, through Triton",
    "pallas_tpu": "our Pallas kernel over pages, for TPUs",
}
# By platform; where that does not run, blockwise.
_BEST_OF_PAGES: dict[str | None, PagesKernel] = {"tpu": "pallas_tpu", "gpu": "triton"}


# Sides of matrix products in Triton; and the width of a TPU's tiles, to which the pool would be
# padded.
LEAST_SIDE, LANES = 16, 128


class PagesChoice(NamedTuple):
    """A kernel over pages, and the reason for it in words."""

    kernel: PagesKernel
    reason: str

    def __str__(self) -> str:
        return f"{_PAGES_NAMES[self.kernel]}, because {self.reason}"


def choose_pages_kernel(
    setting: str, layout: Layout | None, model: ModelConfig, page_size: int
) -> PagesChoice:
    """Returns the kernel for this model's KV cache in pages of `page_size` tokens on this layout.

    `setting` is config.rollout.attention; the model computes as the rollout does. Without a layout
    there is one device, a CPU.

    Raises:
        ValueError: the kernel that was asked for does not run on the layout's devices.
    """
    if setting == "blockwise":
        return PagesChoice("blockwise", "config.rollout.attention says so")
    platform = layout and layout.platform
    best = _BEST_OF_PAGES.get(platform) if setting == "auto" else cast(PagesKernel, setting)
    if best is None:
        devices = f"{platform} devices" if platform else "devices that are not given"
        return PagesChoice("blockwise", f"there is no other kernel for {devices}")
    where, context = ("cpu", 1) if layout is None else (platform, layout.shape.context)
    obstacle = _pages_obstacle(best, where, context, model, page_size)
    if setting == "auto":
        reason = obstacle or f"the devices are {platform} devices"
        return PagesChoice("blockwise" if obstacle else best, reason)
    if obstacle:
        raise InputError(
            f"config.rollout.attention is {setting!r}, but {obstacle}: choose 'auto' or 'blockwise'"
        )
    return PagesChoice(best, "config.rollout.attention is it")


def reads_pages_in_place(
    setting: str, platform: str, context: int, model: ModelConfig, page_size: int
) -> bool:
    """Returns True if a kernel reads pages where they are, on devices with this `context` axis."""
    best = _BEST_OF_PAGES.get(platform)
    return (
        best is not None
        and setting in ("auto", best)
        and _pages_obstacle(best, platform, context, model, page_size) is None
    )


def _pages_obstacle(
    kernel: PagesKernel, platform: str | None, context: int, model: ModelConfig, page_size: int
) -> str | None:
    """Returns why the kernel does not run there, in words; None where it does."""
    is_triton = kernel == "triton"
    if model.latent_size and not is_triton:
        return "its kernel reads keys and values, and this model's pages hold latents"
    if is_triton and (obstacle := _triton_obstacle(platform)):
        return obstacle
    if not is_triton and platform not in ("tpu", None):
        return f"its kernel is for TPUs and these are {platform} devices"
    if model.latent_size and model.compute_dtype == "float32":
        # Its products are no tensor core's there, and its sums no longer fit a program's registers.
        return "its kernel reads latents in bfloat16, and the rollout computes in float32"
    least = LEAST_SIDE if is_triton else LANES
    sizes = ("latent_size", "rope_size") if model.latent_size else ("head_size",)
    for name, size, parts in (
        ("config.rollout.page_size", page_size, context),
        *((f"config.model.{name}", getattr(model, name), 1) for name in sizes),
    ):
        own, rest = divmod(size, parts)
        fits = own >= least and not own & (own - 1) if is_triton else own % least == 0
        if rest or not fits:
            kind = "power of two of at least" if is_triton else "multiple of"
            cut = f" with context={parts}" if parts > 1 else ""
            return f"its kernel needs a {kind} {least * parts}{cut}, and {name} is {size}"
    return None


# attend(query_BTKGH, layer, reading, window, share, scatter, sinks_KG) -> out_BTKGH
AttendCache = Callable[
    [jax.Array, LayerCache, Any, int | None, PageShare, bool, jax.Array | None], jax.Array
]


def attention_over_pages(
    kernel: PagesKernel,
    platform: str | None,
    model: ModelConfig,
    cache: PagedCache,
    cached_B: jax.Array,
    counts_B: jax.Array,
    length: int,
) -> tuple[list[Any], AttendCache]:
    """Plans attention of `length` queries after the first `cached_B` tokens of each row.

    The first `counts_B` queries of a row count; rows with a count of 0 get zeros.

    Returns:
        The arrays that say what to read, by group of layers, and `look` with those of a layer's
        group and its window (None: all). The layer's pages hold the queries' own tokens already; of
        `share`, `scatter` and `sinks_KG` see `attend_pages`.
    """
    windows = [window or None for window in group_layers(model.paged_windows).windows]
    tables = [cache.table[:, group] for group in range(len(windows))]
    interpret = platform in (None, "cpu")
    if kernel == "pallas_tpu":
        from earl_jax.models.attention import paged_tpu

        group = model.num_heads // model.num_kv_heads
        shape = paged_tpu.shape_of(length, group, cache.page_size // cache.parts)
        readings = [
            (
                paged_tpu.plan_works(shape, table, cached_B, counts_B, cache.page_size, window),
                counts_B,
            )
            for table, window in zip(tables, windows, strict=True)
        ]
        attend = functools.partial(paged_tpu.attend, interpret=interpret)
    elif kernel == "triton":
        from earl_jax.models.attention import paged_triton

        readings = [(table, cached_B, counts_B) for table in tables]
        attend = functools.partial(
            paged_triton.attend, value_size=model.latent_size, interpret=interpret
        )
    else:
        tile = tile_for(platform, len(cached_B), cache.page_size // cache.parts)
        readings = [
            (plan_reading(table, cache.page_size, cached_B, counts_B, length, window, tile),)
            for table, window in zip(tables, windows, strict=True)
        ]
        attend = functools.partial(attend_pages, value_size=model.latent_size)

    def look(query_BTKGH, layer, reading, window, share, scatter, sinks_KG=None):
        return attend(
            query_BTKGH,
            layer,
            *reading,
            scale=model.attention_scale,
            softcap=model.attention_softcap,
            window=window,
            share=share,
            scatter=scatter,
            sinks_KG=sinks_KG,
        )

    return readings, look


def pages_in_words(choice: PagesChoice, platform: str, page_size: int) -> str:
    """Returns which attention over pages runs on this platform and why, in words."""
    if choice.kernel != "blockwise":
        return str(choice)
    tile = tile_for(platform, ON_CPU.rows, page_size)
    pages = "a page" if tile.pages == 1 else f"{tile.pages} pages"
    rows = f"up to {tile.rows} rows" if platform == "cpu" else "all rows"
    return f"{choice}; on {platform} devices {pages} of {rows} at a time"
