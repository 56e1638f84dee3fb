# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Memory of attention over whole rows, by the compilers' own figures.

    uv run --python=3.12 --all-extras python benchmarks/attention.py

One row of packed segments, causal, 16 query heads on 8 key/value heads of 128, bf16, on one device:
MiB of temporaries, "forward / forward and backward", for each platform's kernels and for dense
attention (jax.nn) beside them. Prints a Markdown table; chips that are not here are compiled for
where their extra is installed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.models.attention.kernels import attend_rows
from earl_jax.sharding.layout import Layout, MeshShape, make_layout
from earl_jax.sharding.topology import make_topology, missing_compiler

LENGTHS = (4096, 8192, 16384, 32768)
KV_HEADS, GROUPS, HEAD_SIZE = 8, 2, 128
# A name for the table, a topology (none: this machine's CPU), and what is compiled there.
PLATFORMS = (
    ("CPU", None, ("dense", "blockwise")),
    ("TPU v5e", "v5e:2x2", ("dense", "blockwise", "splash")),
    ("TPU v5p", "v5p:2x2x1", ("blockwise", "splash")),
    ("H100", "h100:1x1", ("dense", "blockwise", "tokamax")),
)


def temporaries(kernel: str, layout: Layout, length: int, backward: bool) -> int:
    """Bytes of temporaries of the compiled program."""

    def shape(letters: str, *sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=layout.activations(letters))

    query = shape("BTKGH", 1, length, KV_HEADS, GROUPS, HEAD_SIZE)
    side = shape("BKSH", 1, KV_HEADS, length, HEAD_SIZE)
    segments = shape("BT", 1, length, dtype=jnp.int32)
    if kernel == "dense":
        attend = _dense
    else:
        attend = functools.partial(attend_rows, kernel, layout)  # pyright: ignore

    def forward(query, key, value, segments):
        return attend(query, key, value, segments, scale=HEAD_SIZE**-0.5)

    def both(query, key, value, segments, weights):
        def total(query, key, value):
            out = forward(query, key, value, segments)
            return jnp.sum((out * weights).astype(jnp.float32))

        return jax.grad(total, argnums=(0, 1, 2))(query, key, value)

    # Kernels ask it which chip they are for.
    with jax.default_device(layout.mesh.devices.flat[0]):
        if backward:
            lowered = jax.jit(both).lower(query, side, side, segments, query)
        else:
            lowered = jax.jit(forward).lower(query, side, side, segments)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def _dense(query_BTKGH, key_BKSH, value_BKSH, segment_ids_BT, *, scale):
    """jax.nn's attention under a mask, which makes all scores."""
    rows, length = segment_ids_BT.shape
    order_T = jnp.arange(length)
    same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    mask_BTS = same_BTS & (order_T[:, None] >= order_T[None, :])
    out = jax.nn.dot_product_attention(
        query_BTKGH.reshape(rows, length, KV_HEADS * GROUPS, HEAD_SIZE),
        key_BKSH.swapaxes(1, 2),
        value_BKSH.swapaxes(1, 2),
        mask=mask_BTS[:, None],
        scale=scale,
    )
    return out.reshape(query_BTKGH.shape)


def main() -> None:
    """Compiles and prints the table."""
    jax.config.update("jax_platforms", "cpu")
    print(f"| platform | attention | {' | '.join(f'{n:,}' for n in LENGTHS)} |")
    print("|---" * (2 + len(LENGTHS)) + "|")
    for name, topology, kernels in PLATFORMS:
        if topology and (missing := missing_compiler(make_topology(topology))):
            print(f"| {name} | {missing} |" + " |" * len(LENGTHS))
            continue
        devices = make_topology(topology).devices() if topology else jax.devices()
        layout = make_layout(MeshShape(), devices)
        for kernel in kernels:
            columns = [_column(kernel, layout, length) for length in LENGTHS]
            print(f"| {name} | {kernel} | {' | '.join(columns)} |", flush=True)


def _column(kernel: str, layout: Layout, length: int) -> str:
    words = []
    for backward in (False, True):
        try:
            words.append(f"{temporaries(kernel, layout, length, backward) / 2**20:,.0f}")
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            words.append("does not fit")
    return " / ".join(words)


if __name__ == "__main__":
    main()
