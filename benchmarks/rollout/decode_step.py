# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a decode step cannot do without: its matrices, and attention over its contexts.

Each is compiled alone, in a loop of steps as long as a burst. What the engine's step takes beyond
both is everything else: norms, rotations, writes to the cache, sampling, experience, the round's
orders and report.
"""

import collections
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import Params


def step_floors(
    model: ModelConfig, params: Params, *, batch: int, context: int, steps: int, repeats: int
) -> dict[str, float]:
    """Seconds of one step: "matrices" for `batch` tokens, "cache" for contexts of this length."""
    x_BD = jnp.ones((batch, model.width), jnp.float32)
    heads = (batch, model.num_kv_heads, model.num_query_groups, model.head_size)
    side = (batch, model.num_kv_heads, context, model.head_size)
    keys = jax.random.split(jax.random.key(0), 2 * model.num_layers)
    sides = [jax.random.normal(key, side) for key in keys]
    caches = list(zip(sides[::2], sides[1::2], strict=True))

    @jax.jit
    def matrices(params: Params, x_BD: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, steps, lambda _, x: _matrices(params, x), x_BD)

    @jax.jit
    def cache(caches: Any, query_BKGH: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, steps, lambda _, query: _reads(caches, query), query_BKGH)

    return {
        "matrices": _best(lambda: matrices(params, x_BD), repeats) / steps,
        "cache": _best(lambda: cache(caches, jnp.ones(heads, jnp.float32)), repeats) / steps,
    }


# What holds other operations, and what is none.
_NO_OPERATION = re.compile(r"while|conditional|call|end: |ThunkExecutor|Threadpool|Slinky|\$")


def operation_kinds(folder: Path) -> dict[str, float]:
    """Shares of the time of XLA's operations by kind, the largest first, from a profiler's trace.

    A kind is an operation's name without its number, such as "dot"; fusions have names of their
    parts. Of the CPU client's threads.
    """
    (file,) = folder.rglob("*.xplane.pb")
    taken = collections.Counter[str]()
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            if line.name.startswith("tf_XLA"):
                for event in line.events:
                    if not _NO_OPERATION.match(event.name):
                        taken[re.sub(r"[.\d]*$", "", event.name)] += event.duration_ns
    return {kind: ns / taken.total() for kind, ns in taken.most_common()}


def _matrices(params: Params, x_BD: jax.Array) -> jax.Array:
    """All of one step's; what stands between them is the least that keeps each of them alive."""
    for layer in params["layers"]:
        query_BKGH = jnp.einsum("BD,DKGH->BKGH", x_BD, layer["query"])
        key_BKH = jnp.einsum("BD,DKH->BKH", x_BD, layer["key"])
        value_BKH = jnp.einsum("BD,DKH->BKH", x_BD, layer["value"])
        mixed_BKGH = query_BKGH + (key_BKH + value_BKH)[:, :, None]
        x_BD = jnp.einsum("BKGH,KGHD->BD", mixed_BKGH, layer["out"])
        hidden_BF = jnp.einsum("BD,DF->BF", x_BD, layer["gate"])
        hidden_BF *= jnp.einsum("BD,DF->BF", x_BD, layer["up"])
        x_BD = jnp.einsum("BF,FD->BD", hidden_BF, layer["down"])
        # Numbers that vanish or grow without end would be slow, or fast, for no reason.
        x_BD *= jax.lax.rsqrt(jnp.mean(x_BD * x_BD, axis=-1, keepdims=True) + 1e-6)
    logits_BV = jnp.einsum("BD,DV->BV", x_BD, params["head"])
    return x_BD + jnp.max(logits_BV, axis=-1, keepdims=True) * 1e-6


def _reads(caches: Any, query_BKGH: jax.Array) -> jax.Array:
    """Attention of one token a row over whole caches, layer by layer."""
    for key_BKSH, value_BKSH in caches:
        scores_BKGS = jnp.einsum("BKGH,BKSH->BKGS", query_BKGH, key_BKSH)
        weights_BKGS = jax.nn.softmax(scores_BKGS * query_BKGH.shape[-1] ** -0.5, axis=-1)
        query_BKGH = jnp.einsum("BKGS,BKSH->BKGH", weights_BKGS, value_BKSH)
    return query_BKGH


def _best(work: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of so many runs, behind one that compiles."""
    jax.block_until_ready(work())
    seconds = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        jax.block_until_ready(work())
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)
