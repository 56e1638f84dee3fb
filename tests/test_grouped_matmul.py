# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Each row times the matrix of its group, in both directions, and at the cost of its rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.models.moe.grouped_matmul import (
    BLOCK_SIZE,
    MAX_MASKED_ROWS,
    blocked_matmul,
    grouped_matmul,
    kernel_matmul,
)
from earl_jax.sharding.topology import make_topology
from tests.support.compilers import need_compiler, need_tokamax

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


@need_tokamax
@pytest.mark.parametrize("name", ["all", "one", "none"])
def test_the_kernel_for_gpus_has_the_same_contract(name):
    """tokamax's own arithmetic in place of its kernel, which runs on no CPU."""
    x, weights, sizes, _ = make(SIZES[name], 30)
    cotangent = np.random.default_rng(5).normal(size=(len(x), FFN)).astype(np.float32)

    def total(matmul, x, weights):
        out = matmul(x, weights, sizes)
        return jnp.sum(out * cotangent), out

    def by_kernel(*inputs):
        return kernel_matmul(*inputs, implementation="xla")

    with jax.numpy_rank_promotion("allow"):
        (gradients, out), (expected, reference) = (
            jax.jit(jax.grad(functools.partial(total, matmul), (0, 1), has_aux=True))(x, weights)
            for matmul in (by_kernel, blocked_matmul)
        )
    np.testing.assert_allclose(out, reference, atol=1e-5)
    assert not np.any(out[sum(sizes) :])
    for found, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.slow
@need_tokamax
@need_compiler("h100:1x8")
@pytest.mark.parametrize("shape", [(128, 2048, 768), (8, 4096, 14336 // 8), (64, 2048, 1408)])
def test_the_kernel_compiles_for_hopper_and_leaves_no_loop(shape):
    """Qwen3 30B-A3B whole, Mixtral 8x7B cut over 8 devices, DeepSeek-MoE 16B whole."""
    num_experts, width, ffn = shape
    device = make_topology("h100:1x8").devices()[0]
    placed = jax.sharding.SingleDeviceSharding(device)

    def shaped(*sizes: int, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=placed)

    arguments = shaped(32_768, width), shaped(num_experts, width, ffn)
    sizes = shaped(num_experts, dtype=jnp.int32)

    def program(matmul) -> str:
        def total(x, weights, sizes):
            return jnp.sum(matmul(x, weights, sizes).astype(jnp.float32) ** 2)

        with jax.default_device(device):
            grad = jax.jit(jax.grad(total, argnums=(0, 1)))
            return grad.lower(*arguments, sizes).compile().as_text()

    text = program(functools.partial(grouped_matmul, products="tokamax"))
    assert text.count("mosaic_gpu") >= 3 and " while(" not in text
    assert " while(" in program(grouped_matmul)


def test_widths_that_the_kernel_has_no_tiles_for_go_in_blocks():
    """352: DeepSeek-MoE 16B cut over 4 devices."""
    x, weights = jnp.ones((MAX_MASKED_ROWS + 1, 64)), jnp.ones((2, 64, 352))
    sizes = jnp.array([MAX_MASKED_ROWS, 1], jnp.int32)
    out = jax.jit(functools.partial(grouped_matmul, products="tokamax"))(x, weights, sizes)
    np.testing.assert_array_equal(out, np.full(out.shape, 64.0))
