# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Pages from one row shard to others, number by number. What episodes make of it: test_groups."""

import dataclasses

import jax
import numpy as np
import pytest

from earl_jax.engine.page_copies import PageCopies
from earl_jax.engine.shard_copies import _waves
from earl_jax.models.config import ModelConfig
from earl_jax.models.kv_cache import PagedCache, empty_pages, place_pages
from earl_jax.models.layer_groups import PageRule
from earl_jax.sharding.layout import MeshShape, make_layout

PAGE_SIZE, PAGES = 4, 6


@dataclasses.dataclass(frozen=True)
class State:
    cache: PagedCache


def pools(model: ModelConfig, kv_dtype: str):
    """Two shards of six pages, of random numbers as far as the type goes."""
    rng = np.random.default_rng(0)

    def draw(side):
        if side.dtype == np.int8:
            return rng.integers(-127, 128, side.shape).astype(np.int8)
        return rng.normal(size=side.shape).astype(side.dtype)

    return jax.tree.map(draw, empty_pages(model, 2 * PAGES, PAGE_SIZE, kv_dtype))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "compute"), ("bfloat16", "compute"), ("float32", "int8")]
)
def test_pages_go_to_the_shards_that_want_them_and_no_bit_changes(dtype, kv_dtype):
    """Pages 3 and 0 of the second shard to 5 and 2 of the first, and one to 1 of the second."""
    model = ModelConfig(
        num_layers=2, width=8, num_heads=4, num_kv_heads=2, head_size=4, ffn_size=8,
        compute_dtype=dtype,
    )  # fmt: skip
    layout, before = make_layout(MeshShape(data=2, tensor=2)), pools(model, kv_dtype)
    shardings = [place_pages(layer, layout.activations) for layer in before]
    copies = PageCopies(layout, shardings, PageRule(PAGE_SIZE))
    state = State(PagedCache(pools=jax.device_put(before, shardings), table=np.zeros((2, 1))))
    after = copies.send(
        state,  # pyright: ignore
        1,
        np.array([3, 0]),
        np.array([[5, 2, 0], [1, 4, 0]])[:, np.arange(copies.pages_a_call) % 3],
        np.array([2, 1]),
    )
    assert jax.tree.map(lambda side: side.sharding, after.cache.pools) == shardings
    for old, new in zip(*map(jax.tree.leaves, (before, after.cache.pools)), strict=True):
        expected = old.copy()
        expected[[5, 2, PAGES + 1]] = old[[PAGES + 3, PAGES, PAGES + 3]]
        np.testing.assert_array_equal(np.asarray(new), expected)


def test_each_row_shard_takes_one_slots_pages_at_a_time():
    assert _waves([0, 1, 3, 4, 9], slots_a_shard=4) == [[0, 4, 9], [1], [3]]
