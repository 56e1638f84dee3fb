# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The description of a move, whichever route it takes."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, Sharding


class Move(NamedTuple):
    """One leaf: what it is, and from where to where."""

    shape: tuple[int, ...]
    dtype: Any
    source: Sharding
    target: NamedSharding

    @property
    def goes_as_bits(self) -> bool:
        """True if a compiled move must not see the type (see `carrier`)."""
        on_cpu = all(device.platform == "cpu" for device in self.target.device_set)
        return on_cpu and carrier(self.dtype) != self.dtype

    @property
    def bytes_per_device(self) -> int:
        """The bytes of the larger of the two shards."""
        sides = (side.shard_shape(self.shape) for side in (self.source, self.target))
        return max(map(math.prod, sides)) * self.dtype.itemsize


def is_key(dtype: Any) -> bool:
    """True for random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def carrier(dtype: Any) -> Any:
    """Returns the type in which bits of this type are cut, sent and joined.

    XLA's CPU compiler works on bfloat16 by way of float32, which keeps that a value is NaN but not
    the NaN's other bits (0x7fe9 became 0x7fc0, jax 0.10.2). So narrow floats go as integers.
    """
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        return jnp.dtype(f"uint{8 * dtype.itemsize}")
    return dtype


def viewed(array: jax.Array, dtype: Any) -> jax.Array:
    """Returns the same bits as another type of the same width, inside a program."""
    if array.dtype == dtype:
        return array
    if jnp.bool_ in (array.dtype, dtype):
        return array.astype(dtype)
    return lax.bitcast_convert_type(array, dtype)
