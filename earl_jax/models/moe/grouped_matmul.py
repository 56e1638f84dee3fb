# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rows sorted by group, each multiplied with the matrix of its group.

`jax.lax.ragged_dot` is a kernel on TPU. Elsewhere XLA writes it as one product of every row with
every matrix, most of it masked: as many times the arithmetic as there are groups, and a mask of
groups x rows x D. For the few rows of a decode step that is as good as anything, since every matrix
is read anyway; for the rows of a training step or of a long prompt it is not. They go through
tokamax's kernel on Hopper GPUs, and in blocks elsewhere: one product for each block and each group
that it touches. That is made for CPUs: on a GPU each block is a few small kernels, and the host
reads how many there are.
"""

import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.models.config import ModelConfig
from earl_jax.models.tokamax_extra import quiet_tokamax, tokamax_obstacle
from earl_jax.sharding.layout import Layout

Products = Literal["xla", "tokamax"]

# Compute capabilities that tokamax's kernel has a backward pass for: the first, the first beyond.
CAPABILITIES = (9.0, 10.0)

# Both widths of a matrix are multiples of this for tokamax's kernel.
KERNEL_TILE = 64
# Rows of one product.
BLOCK_SIZE = 128
# Up to so many rows the masked product is taken.
MAX_MASKED_ROWS = 8 * BLOCK_SIZE


def choose_products(layout: Layout | None, model: ModelConfig) -> Products:
    """Returns what multiplies the rows of a mixture's experts on the layout's devices.

    An abstract mesh, and `None`, have no devices: XLA.
    """
    if layout is None or layout.platform is None:
        return "xla"
    return "xla" if _obstacle(layout.platform, model) else "tokamax"


def products_in_words(platform: str, model: ModelConfig) -> str:
    """Returns what multiplies the many rows of an update or of a long prompt, and why."""
    if platform == "tpu":
        return "jax.lax.ragged_dot, a kernel on TPUs"
    if obstacle := _obstacle(platform, model):
        slow = "; expect slow updates, which the speed model does not count"
        blocks = f"one by one for each block of {BLOCK_SIZE} rows, because {obstacle}"
        return blocks + slow * (platform == "gpu")
    return f"tokamax's kernel, where a device's widths of an expert are multiples of {KERNEL_TILE}"


def _obstacle(platform: str, model: ModelConfig) -> str | None:
    return tokamax_obstacle(platform, CAPABILITIES, model.compute_dtype)


def grouped_matmul(
    x_MD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array, products: Products = "xla"
) -> jax.Array:
    """Multiplies the first `sizes_E[0]` rows with the first matrix, the next with the second, ...

    Rows behind the last group may come out as anything. Sums are in fp32.

    Returns:
        out_MF in the type of `x_MD`.
    """
    if len(x_MD) <= MAX_MASKED_ROWS:
        return jax.lax.ragged_dot(x_MD, weights_EDF, sizes_E)
    if products == "tokamax" and not any(width % KERNEL_TILE for width in weights_EDF.shape[1:]):
        return kernel_matmul(x_MD, weights_EDF, sizes_E)
    return jax.lax.platform_dependent(
        x_MD, weights_EDF, sizes_E, tpu=jax.lax.ragged_dot, default=blocked_matmul
    )


def kernel_matmul(
    x_MD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array, implementation: str = "mosaic_gpu"
) -> jax.Array:
    """Computes `grouped_matmul` by tokamax; rows after the last group become 0.

    It leaves whatever memory held in those rows, and its gradient of the weights multiplies rows of
    other groups by 0, NaN among them.
    """
    quiet_tokamax()
    # By name, and here: whoever does not use it need not have it, nor wait for its import.
    multiply = importlib.import_module("tokamax._src.ops.ragged_dot.api").IMPLEMENTATIONS
    # Its gradient of the weights wants whole tiles of rows.
    out_MF = multiply[implementation](_padded(x_MD), weights_EDF, group_sizes=sizes_E)[: len(x_MD)]
    is_of_group = jnp.arange(len(x_MD)) < jnp.sum(sizes_E)
    return jnp.where(is_of_group[:, None], out_MF, 0)


@jax.custom_vjp
def blocked_matmul(x_MD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Computes `grouped_matmul` by blocks; rows after the last group become 0.

    At most M / BLOCK_SIZE + E products, which are only as many as the groups need: the loop ends
    with the last one. Its gradient is two such loops.
    """
    num_rows = len(x_MD)
    x_MD = _padded(x_MD)

    def visit(rows: "_Rows", out_MF: jax.Array) -> jax.Array:
        product = jnp.dot(
            rows.take(x_MD), weights_EDF[rows.group], preferred_element_type=jnp.float32
        )
        # Groups share a block where one ends in it: each writes its own rows.
        block = jnp.where(rows.inside[:, None], product.astype(out_MF.dtype), rows.take(out_MF))
        return jax.lax.dynamic_update_slice_in_dim(out_MF, block, rows.start, 0)

    out_MF = jnp.zeros((len(x_MD), weights_EDF.shape[-1]), x_MD.dtype)
    return _visit_blocks(visit, sizes_E, out_MF)[:num_rows]


def _forward(x_MD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array) -> tuple[jax.Array, Any]:
    return blocked_matmul(x_MD, weights_EDF, sizes_E), (x_MD, weights_EDF, sizes_E)


def _backward(residuals: Any, gradient_MF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_MD, weights_EDF, sizes_E = residuals
    x_gradient_MD = blocked_matmul(gradient_MF, weights_EDF.swapaxes(1, 2), sizes_E)
    x_MD, gradient_MF = _padded(x_MD), _padded(gradient_MF)

    def visit(rows: "_Rows", total_EDF: jax.Array) -> jax.Array:
        x_block = jnp.where(rows.inside[:, None], rows.take(x_MD), 0)
        product = jnp.dot(x_block.T, rows.take(gradient_MF), preferred_element_type=jnp.float32)
        return total_EDF.at[rows.group].add(product)

    total_EDF = _visit_blocks(visit, sizes_E, jnp.zeros(weights_EDF.shape, jnp.float32))
    return x_gradient_MD.astype(x_MD.dtype), total_EDF.astype(weights_EDF.dtype), None


blocked_matmul.defvjp(_forward, _backward)


class _Rows(NamedTuple):
    """A block, from row `start`, and the rows `inside` it that are those of `group`."""

    group: jax.Array
    start: jax.Array
    inside: jax.Array

    def take(self, x_MD: jax.Array) -> jax.Array:
        """Returns the block of these rows."""
        return jax.lax.dynamic_slice_in_dim(x_MD, self.start, BLOCK_SIZE, 0)


def _visit_blocks(
    visit: Callable[[_Rows, jax.Array], jax.Array], sizes_E: jax.Array, carry: jax.Array
) -> jax.Array:
    """Calls `visit` for each group and each block that it has rows in, in the order of rows."""
    ends_E = jnp.cumsum(sizes_E)
    starts_E = ends_E - sizes_E
    first_E = starts_E // BLOCK_SIZE
    counts_E = jnp.where(sizes_E > 0, (ends_E - 1) // BLOCK_SIZE - first_E + 1, 0)
    passed_E = jnp.cumsum(counts_E)

    def body(step: jax.Array, carry: jax.Array) -> jax.Array:
        group = jnp.searchsorted(passed_E, step, side="right")
        start = (first_E[group] + step - (passed_E - counts_E)[group]) * BLOCK_SIZE
        row = start + jnp.arange(BLOCK_SIZE)
        inside = (row >= starts_E[group]) & (row < ends_E[group])
        return visit(_Rows(group, start, inside), carry)

    return jax.lax.fori_loop(0, passed_E[-1], body, carry)


def _padded(x_MD: jax.Array) -> jax.Array:
    """Returns the rows padded with zeros to whole blocks."""
    return jnp.pad(x_MD, ((0, -len(x_MD) % BLOCK_SIZE), (0, 0)))
