# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays on devices of several processes, of which each process has its own part; and shapes.

Of an array on the devices of other processes a process has a handle alone (`absent_array`).
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from earl_jax.sharding.moves import is_key

Tree = TypeVar("Tree")


def place(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Places an array that every process has whole on its host; each puts its devices' part.

    A process that has none of the devices gets the handle of an array that is elsewhere.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if not sharding.addressable_devices:
        return absent_array(value.shape, value.dtype, sharding)
    return jax.make_array_from_process_local_data(sharding, value, value.shape)


def absent_array(shape: Sequence[int], dtype: Any, sharding: NamedSharding) -> jax.Array:
    """Returns the handle of an array on devices of other processes, to call `reshard` with.

    Raises:
      ValueError: some of the devices are this process's, which has to bring its part.
    """
    if sharding.addressable_devices:
        raise ValueError(
            f"absent_array of shape {tuple(shape)}: {sharding} has devices of this process; make "
            "the array with jax.make_array_from_single_device_arrays from what they hold"
        )
    return jax.make_array_from_single_device_arrays(
        tuple(shape), sharding, [], dtype=dtype if is_key(dtype) else jnp.dtype(dtype)
    )


def absent_tree(shapes: Tree, shardings: Any) -> Tree:
    """Returns handles of arrays on devices of other processes, by shapes and placements."""
    return jax.tree.map(
        lambda shape, sharding: absent_array(shape.shape, shape.dtype, sharding), shapes, shardings
    )


def zeros_on(device: SingleDeviceSharding, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros that the device makes itself."""
    return _zeros(device, shape, dtype)()


@functools.lru_cache(maxsize=256)
def _zeros(device: SingleDeviceSharding, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=device)


def placed_shapes(shapes: Any, shardings: Any) -> Any:
    """Returns the shapes with these placements, to lower programs from."""
    return jax.tree.map(
        lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
        shapes,
        shardings,
    )


def same_shards(tree: Tree, shardings: Any, shapes: Any = None) -> Tree:
    """Returns this process's shards as arrays of other placements with the same shards; no copy.

    From the mesh of one process to that of several, and back: `shapes` are those of the arrays
    then, where rows are cut over processes; None where the shapes stay as they are.
    """

    def relabel(array: jax.Array, sharding: NamedSharding, shape: Any) -> jax.Array:
        if array.sharding == sharding:
            return array
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            shape.shape, sharding, shards, dtype=array.dtype
        )

    return jax.tree.map(relabel, tree, shardings, tree if shapes is None else shapes)
