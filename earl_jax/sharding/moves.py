# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What is asked of a move, whichever way it goes."""

import math
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import NamedSharding, Sharding


class Move(NamedTuple):
    """One leaf: what it is, from where to where, and the type that it arrives in."""

    shape: tuple[int, ...]
    dtype: Any
    source: Sharding
    target: NamedSharding
    arrives_as: Any

    @property
    def carried_as(self) -> Any:
        """The narrower of the two types: a cast happens where it saves bytes."""
        # Keys have no plain type, and are never cast.
        if not self.is_cast:
            return self.dtype
        narrows = np.dtype(self.dtype).itemsize < np.dtype(self.arrives_as).itemsize
        return self.dtype if narrows else self.arrives_as

    @property
    def is_cast(self) -> bool:
        """Whether it arrives in another type."""
        return self.dtype != self.arrives_as

    @property
    def bytes_per_device(self) -> int:
        """Of the larger of the two shards, as it travels."""
        sides = (side.shard_shape(self.shape) for side in (self.source, self.target))
        return max(map(math.prod, sides)) * self.carried_as.itemsize
