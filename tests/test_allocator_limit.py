# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The allocator limit of the tests: known bytes just below and just above it."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from earl_jax.selector.memory import is_out_of_memory
from tests.support.allocator import live_bytes, memory_limit

P = PartitionSpec
# A float32 matrix of 256 x 256.
MATRIX = 256 * 256 * 4


@pytest.fixture(autouse=True)
def no_garbage(few_objects):
    """Frees the arrays of other tests before a limit is derived from those that are held."""
    gc.collect()


def held(device=0):
    return live_bytes()[jax.devices()[device]]


def matrix(sharding=None):
    return jax.device_put(np.ones((256, 256), np.float32), sharding or jax.devices()[0])


def over_all():
    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))


def refused(call):
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as error:
        call()
    return is_out_of_memory(error.value)


def test_a_matmul_runs_with_just_enough_and_not_with_a_byte_less():
    a, b = matrix(), matrix()
    multiply = jax.jit(jnp.matmul)
    analysis = multiply.lower(a, b).compile().memory_analysis()
    needed = held() + MATRIX + analysis.temp_size_in_bytes
    with memory_limit(needed) as allocator:
        product = multiply(a, b)
    assert allocator.peak_bytes == needed and allocator.refused == []
    del product
    with memory_limit(needed - 1) as allocator:
        assert refused(lambda: multiply(a, b))
    assert allocator.refused == ["program jit(matmul)"]
    assert multiply(a, b)[0, 0] == 256


def test_the_limit_is_one_of_each_device():
    """An eighth of the rows on each of eight devices, and all of them on one."""
    rows = matrix(over_all())
    double = jax.jit(lambda x: x * 2)
    most = max(live_bytes().values())
    with memory_limit(most + MATRIX // 8) as allocator:
        doubled = double(rows)
        assert refused(lambda: double(rows))
    assert allocator.peak_bytes <= most + 2 * (MATRIX // 8)
    del doubled
    gather = jax.jit(lambda x: x * 2, out_shardings=over_all().update(spec=P()))
    with memory_limit(most + MATRIX // 8):
        assert refused(lambda: gather(rows))


@pytest.mark.parametrize("takes_donated", [False, True])
def test_a_donated_argument_counts_once_and_stays_unless_set_otherwise(takes_donated):
    a, b = matrix(), matrix()
    grow = jax.jit(lambda x, y: (x + 1, y[:128] + 1), donate_argnums=0)
    # A program with several results has a table of them, 8 bytes each.
    with memory_limit(held() + MATRIX // 2 + 16, takes_donated=takes_donated):
        a, half = grow(a, b)
        assert refused(lambda: grow(a, b))
    assert a.is_deleted() == takes_donated
    assert not b.is_deleted() and half[0, 0] == 2
