# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes per device: of compiled programs, of placed arrays, and what a device may hold."""

import jax
import jax.numpy as jnp
import pytest

from earl_jax.selector.memory import (
    device_budget,
    is_out_of_memory,
    program_bytes,
    resident_bytes,
    unless_out_of_memory,
)
from earl_jax.sharding.layout import MeshShape, make_layout


def test_program_bytes_are_arguments_and_results_with_a_donated_argument_once():
    # Per device, f32: a [128/8, 32] = 2048, b [32, 32] whole = 4096, a row [32] = 128.
    layout = make_layout(MeshShape(data=8))
    rows, whole = layout.activations("B."), layout.activations("..")
    a = jax.ShapeDtypeStruct((128, 32), jnp.float32, sharding=rows)
    b = jax.ShapeDtypeStruct((32, 32), jnp.float32, sharding=whole)
    c = jax.ShapeDtypeStruct((1, 32), jnp.float32, sharding=whole)

    def needed(function, *arguments, **options):
        return program_bytes(
            jax.jit(function, out_shardings=rows, **options).lower(*arguments).compile()
        )

    assert needed(jnp.matmul, a, b) == 2048 + 4096 + 2048
    assert needed(jnp.add, a, c) == 2048 + 128 + 2048
    assert needed(jnp.add, a, c, donate_argnums=0) == 2048 + 128


def test_program_bytes_counts_temporaries():
    def through_a_big_square(x):
        square = jnp.sin(x[:, None] * x[None, :])
        return jnp.sort(square, axis=1) @ x

    x = jax.ShapeDtypeStruct((512,), jnp.float32)
    needed = program_bytes(jax.jit(through_a_big_square).lower(x).compile())
    # The sorted square has to be somewhere: 512 * 512 * 4 bytes.
    assert 2**20 + 2 * 512 * 4 <= needed <= 4 * 2**20


def test_resident_bytes_by_hand_and_as_the_devices_report():
    layout = make_layout(MeshShape(data=2, fsdp=2, tensor=2))
    tree = {
        "rows": jnp.zeros((8, 6), jnp.int32),  # over data and fsdp: 2 * 6 * 4 = 48
        "weight": jnp.zeros(
            (4, 2, 8), jnp.bfloat16
        ),  # D over fsdp, K over tensor: 2 * 1 * 8 * 2 = 32
        "count": jnp.zeros((), jnp.float32),  # everywhere: 4
        "bits": jnp.zeros((3,), bool),  # everywhere: 3
    }
    shardings = {
        "rows": layout.activations("BT"),
        "weight": layout.parameters("DKH"),
        "count": layout.parameters(""),
        "bits": layout.parameters("."),
    }
    assert resident_bytes(tree, shardings) == 48 + 32 + 4 + 3
    shapes = jax.eval_shape(lambda: tree)
    assert resident_bytes(shapes, shardings) == 48 + 32 + 4 + 3
    placed = jax.device_put(tree, shardings)
    on_first = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(placed)
        for shard in leaf.addressable_shards
        if shard.device == jax.devices()[0]
    )
    assert on_first == 87


def test_device_budget_is_the_setting_else_the_devices_limit_else_none():
    assert device_budget(12345) == 12345
    assert jax.local_devices()[0].memory_stats() is None, "the CPU reports no limit"
    assert device_budget(0) is None


def raises(message: str):
    def attempt():
        raise jax.errors.JaxRuntimeError(message)

    return attempt


def test_out_of_memory_is_told_by_the_status_code_and_nothing_else_is_caught():
    short = "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"
    assert is_out_of_memory(jax.errors.JaxRuntimeError(short))
    assert not is_out_of_memory(RuntimeError(short))
    assert unless_out_of_memory(raises(short)) is None
    assert unless_out_of_memory(lambda: jnp.arange(3)).tolist() == [0, 1, 2]
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        unless_out_of_memory(raises("INTERNAL: a cable"))
