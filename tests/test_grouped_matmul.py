# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Each row times the matrix of its group, in both directions, and at the cost of its rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.models.moe.grouped_matmul import (
    BLOCK_SIZE,
    MAX_MASKED_ROWS,
    blocked_matmul,
    grouped_matmul,
)

WIDTH, FFN = 12, 20
# Groups that end inside blocks and with them, span several, share one, are empty; rows left over.
SIZES = {
    "all": [BLOCK_SIZE, 300, 0, 0, 5, 7, 2, 0, 2 * BLOCK_SIZE, 90, 1],
    "one": [0, 0, 700, 0],
    "none": [0, 0, 0],
    "last": [0, 0, 130],
    "small": [1, 1, 1, 1],
}


def make(sizes: list[int], left_over: int):
    rng = np.random.default_rng(len(sizes))
    x = rng.normal(size=(sum(sizes) + left_over, WIDTH)).astype(np.float32)
    weights = rng.normal(size=(len(sizes), WIDTH, FFN)).astype(np.float32)
    group = np.repeat(np.arange(len(sizes)), sizes)
    return x, weights, np.array(sizes, np.int32), group


@pytest.mark.parametrize("left_over", [0, 37])
@pytest.mark.parametrize("name", SIZES)
def test_each_row_is_multiplied_with_the_matrix_of_its_group(name, left_over):
    if sum(SIZES[name]) + left_over == 0:
        left_over = 3
    x, weights, sizes, group = make(SIZES[name], left_over)
    out = np.asarray(jax.jit(blocked_matmul)(x, weights, sizes))
    expected = np.einsum("md,mdf->mf", x[: len(group)], weights[group])
    np.testing.assert_allclose(out[: len(group)], expected, atol=1e-5)
    assert not out[len(group) :].any()


@pytest.mark.parametrize("name", ["all", "one", "none"])
def test_gradients_are_those_of_the_products(name):
    x, weights, sizes, group = make(SIZES[name], 30)
    cotangent = np.random.default_rng(5).normal(size=(len(x), FFN)).astype(np.float32)

    def total(x, weights):
        return jnp.sum(blocked_matmul(x, weights, sizes) * cotangent)

    x_gradient, weights_gradient = jax.jit(jax.grad(total, argnums=(0, 1)))(x, weights)
    count = len(group)
    expected = np.einsum("mf,mdf->md", cotangent[:count], weights[group])
    np.testing.assert_allclose(x_gradient[:count], expected, atol=2e-5)
    assert not np.any(x_gradient[count:])
    hit = group[:, None] == np.arange(len(sizes))
    expected = np.einsum("me,md,mf->edf", hit, x[:count], cotangent[:count])
    np.testing.assert_allclose(weights_gradient, expected, atol=1e-4)


def test_few_rows_and_many_give_the_same():
    x, weights, sizes, group = make(SIZES["all"], 400)
    assert len(x) > MAX_MASKED_ROWS > len(group)
    many = jax.jit(grouped_matmul)(x, weights, sizes)
    few = jax.jit(grouped_matmul)(x[: len(group)], weights, sizes)
    np.testing.assert_allclose(many[: len(group)], few, atol=1e-5)


def test_bf16_is_summed_in_fp32():
    x, weights, sizes, group = make(SIZES["all"], 0)
    x, weights = jnp.asarray(x, jnp.bfloat16), jnp.asarray(weights, jnp.bfloat16)
    cotangent = np.random.default_rng(5).normal(size=(len(x), FFN)).astype(np.float32)

    def total(weights):
        return jnp.sum(blocked_matmul(x, weights, sizes).astype(jnp.float32) * cotangent)

    gradient = jax.jit(jax.grad(total))(weights)
    assert gradient.dtype == jnp.bfloat16
    hit = group[:, None] == np.arange(len(sizes))
    rounded = np.asarray(jnp.asarray(cotangent, jnp.bfloat16), np.float32)
    expected = np.einsum("me,md,mf->edf", hit, np.asarray(x, np.float32), rounded)
    # One rounding of 8 bits at the end, not one for each of up to four blocks.
    np.testing.assert_allclose(np.float32(gradient), expected, rtol=2**-8, atol=2e-2)


def test_memory_does_not_grow_with_groups_times_rows():
    """XLA's own figure, forward and backward: 64 groups of 64 rows each."""
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    weights = jax.ShapeDtypeStruct((64, 64, 32), jnp.float32)
    sizes = jax.ShapeDtypeStruct((64,), jnp.int32)

    def temporaries(matmul) -> int:
        def total(x, weights, sizes):
            return jnp.sum(matmul(x, weights, sizes) ** 2)

        compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(x, weights, sizes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    masked, blocked = temporaries(jax.lax.ragged_dot), temporaries(grouped_matmul)
    print(f"{masked / 2**20:.1f} MiB masked, {blocked / 2**20:.1f} MiB by blocks")
    assert blocked < masked / 10
