# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Functions that several processes run to exchange arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from earl_jax.sharding.placing import absent_array
from earl_jax.sharding.reshard import reshard
from tests.support.shardings import PAIRS, make_shardings

P = PartitionSpec
# Pairs of different shardings: over two processes these have four devices each, over four two.
BETWEEN_PROCESSES = [pair for pair in PAIRS if pair[0] != pair[1]]


def part_of(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """The global array, of which this process puts its own part."""
    if not sharding.addressable_devices:
        return absent_array(value.shape, value.dtype, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def odd_things() -> bool:
    """Scalars, arrays without elements, narrow floats, sizes that do not divide, keys."""
    source, target = make_shardings("8x1x1")["mask"], make_shardings("second half")["mask"]
    whole, there = (NamedSharding(side.mesh, P()) for side in (source, target))
    narrow = np.asarray(jnp.linspace(0, 1, 64, dtype=jnp.bfloat16).reshape(8, 8))
    tree = {
        "step": part_of(np.int32(7), whole),
        "empty": part_of(np.zeros((0, 8), np.float32), source),
        "narrow": part_of(narrow, source),
        "codes": part_of(np.arange(64, dtype=np.int8).reshape(8, 8), source),
    }
    dtypes = {leaf: array.dtype for leaf, array in tree.items()}
    moved = reshard(tree, {**dict.fromkeys(tree, target), "step": there})
    assert {leaf: array.dtype for leaf, array in moved.items()} == dtypes
    for shard in moved["step"].addressable_shards:
        assert int(shard.data) == 7
    for shard in moved["narrow"].addressable_shards:
        assert (np.asarray(shard.data) == narrow[shard.index]).all()
    for shard in moved["codes"].addressable_shards:
        assert (np.asarray(shard.data) == np.arange(64).reshape(8, 8)[shard.index]).all()
    for shard in moved["empty"].addressable_shards:
        assert shard.data.shape == target.shard_shape((0, 8))
    with pytest.raises(ValueError, match="axis 0 has 6 elements"):
        reshard(part_of(np.zeros((6, 8)), there), NamedSharding(source.mesh, P("x")))
    if there.addressable_devices:
        with pytest.raises(ValueError, match="has devices of this process"):
            absent_array((4,), np.float32, there)
    return keys_arrive()


def keys_arrive() -> bool:
    """Eight random keys go from the first four devices to the last."""
    source, target = (
        NamedSharding(make_shardings(name)["mask"].mesh, P("x"))
        for name in ("first half", "second half")
    )
    keys = jax.random.split(jax.random.key(3), 8)
    expected = np.asarray(jax.random.key_data(keys))
    if source.addressable_devices:
        tree = jax.random.wrap_key_data(part_of(expected, source))
    else:
        tree = absent_array(keys.shape, keys.dtype, source)
    moved = reshard(tree, target)
    assert (moved.shape, moved.dtype) == (keys.shape, keys.dtype)
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(jax.random.key_data(shard.data), expected[shard.index])
    return True
