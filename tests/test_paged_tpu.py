# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The kernel for TPUs, interpreted, against our attention over pages; and its list of work.

Over pages that are cut, the kernel for GPUs too.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from earl_jax.models.attention import paged_tpu, paged_triton
from earl_jax.models.attention.kernels import attention_over_pages
from earl_jax.models.attention.page_shares import own_share
from earl_jax.models.attention.paged_attention import Tile, attend_pages
from earl_jax.models.attention.paged_tpu import Shape, plan_work, plan_works, shape_of
from earl_jax.models.config import ModelConfig
from earl_jax.models.kv_cache import PagedCache, place_pages, write
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.caches import empty_cache, reading_of

ROWS, MAX_TOKENS, SIZE = 7, 40, 8
CACHED = np.array([0, 39, 7, 8, 16, 25, 12], np.int32)
# A token of seven heads a key, over pages of 128 tokens, as on a chip.
ON_CHIP = shape_of(1, 7, 128)
MODEL = ModelConfig(num_layers=1, width=48, num_heads=6, num_kv_heads=2, head_size=8, ffn_size=8)


@functools.cache
def filled(kv_dtype: str = "compute") -> PagedCache:
    """Full rows in pages that are all over the pool, beside pages of garbage."""
    rng = np.random.default_rng(0)
    cache = empty_cache(MODEL, ROWS + 1, MAX_TOKENS, SIZE, kv_dtype)
    pages = jnp.asarray(rng.permutation(cache.num_pages)[: ROWS * 5], jnp.int32).reshape(ROWS, 1, 5)
    layer = jax.tree.map(lambda pool: (pool + 100).astype(pool.dtype), cache.pools[0])
    key, value = (rng.normal(size=(ROWS, MAX_TOKENS, 2, 8)).astype(np.float32) for _ in range(2))
    whole = jnp.full(ROWS, MAX_TOKENS, jnp.int32)
    return PagedCache(pools=[write(layer, pages[:, 0], key, value, 0 * whole, whole)], table=pages)


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch):
    """Two pages a step, and blocks of 32 queries."""
    monkeypatch.setattr(paged_tpu, "TOKENS_A_STEP", 2 * SIZE)
    monkeypatch.setattr(paged_tpu, "MOST", 32)


def by_kernel(
    cache, query, cached, counts, *, kernel="pallas_tpu", window=None, softcap=0.0, scatter=False
):
    """As a round of the engine plans and makes it on a CPU: interpreted."""
    model = dataclasses.replace(MODEL, windows=(window or 0,), attention_softcap=softcap)
    settings = (model, cache, cached, counts, query.shape[1])
    readings, attend = attention_over_pages(kernel, "cpu", *settings)
    share = own_share(cache.parts)
    return attend(query, cache.pools[0], readings[0], window, share, scatter)


def by_reference(cache, query, cached, counts, *, window=None, **settings):
    reading = reading_of(cache, cached, counts, query.shape[1], window, Tile(4, 1))
    settings |= {"window": window, "share": own_share(cache.parts)}
    return attend_pages(query, cache.pools[0], reading, scale=MODEL.attention_scale, **settings)


jitted_plan = jax.jit(plan_work, static_argnums=(0, 4, 5))


def queries(length: int):
    rng = np.random.default_rng(1)
    query = jnp.asarray(rng.normal(size=(ROWS, length, 2, 3, 8)), jnp.float32)
    counts = np.minimum(rng.integers(1, length + 1, ROWS), MAX_TOKENS - CACHED).astype(np.int32)
    counts[[3, 5]] = 0
    return query, counts


# A token, drafts, and a chunk of three blocks of queries, of which two begin within a query.
@pytest.mark.parametrize(
    ("length", "kv_dtype", "settings"),
    [
        (1, "compute", {"window": 3}),
        (5, "int8", {}),
        (25, "compute", {"window": 12, "softcap": 2.0}),
    ],
    ids=str,
)
def test_it_is_our_attention_over_pages(length, kv_dtype, settings):
    query, counts = queries(length)
    out, expected = (
        np.asarray(
            jax.jit(functools.partial(run, **settings))(filled(kv_dtype), query, CACHED, counts)
        )
        for run in (by_kernel, by_reference)
    )
    real = np.arange(length)[None, :] < counts[:, None]
    np.testing.assert_allclose(out[real], expected[real], atol=2e-6)
    assert not out[~real].any()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["triton", "pallas_tpu"])
@pytest.mark.parametrize("length", [1, 4])
def test_int8_pages_of_which_two_devices_have_halves_are_read_as_whole_ones(
    length, kernel, monkeypatch
):
    """With a window and a cap. Of four queries each device gets the result of two."""
    monkeypatch.setattr(paged_triton, "TOKENS_A_SPLIT", 2 * SIZE)
    settings, scatter = {"window": 12, "softcap": 2.0}, length > 1
    query, counts = queries(length)
    cache = dataclasses.replace(filled("int8"), parts=2)
    layout, whole = make_layout(MeshShape(context=2), jax.devices()[:2]), P()
    pages = place_pages(cache.pools[0], layout.activation_spec)
    cut = jax.shard_map(
        functools.partial(by_kernel, kernel=kernel, scatter=scatter, **settings),
        mesh=layout.mesh,
        in_specs=(PagedCache(pools=[pages], table=whole, parts=2), *[whole] * 3),
        out_specs=P(None, "context") if scatter else whole,
        check_vma=False,
    )
    out = np.asarray(jax.jit(cut)(cache, query, CACHED, counts))
    read = jax.jit(functools.partial(by_reference, **settings))
    expected = np.asarray(read(filled("int8"), query, CACHED, counts))
    real = np.arange(length)[None, :] < counts[:, None]
    np.testing.assert_allclose(out[real], expected[real], atol=2e-6)
    assert not out[counts == 0].any() and np.isfinite(out).all()


@pytest.mark.slow
def test_a_row_gets_the_same_bits_whoever_its_neighbours_are_and_in_whichever_list(monkeypatch):
    """All rows in one list; in another order, some idle, in lists of four rows."""
    query, ones = queries(1)[0], np.ones(ROWS, np.int32)
    cache = filled()
    whole = np.asarray(jax.jit(by_kernel)(cache, query, CACHED, ones))
    # A row has at most three steps, each of a block of queries and two pages.
    monkeypatch.setattr(paged_tpu, "MOST_SCALARS", 4 * 3 * 3)
    assert len(plan_works(shape_of(1, 3, SIZE), cache.table[:, 0], CACHED, ones, SIZE, None)) == 2
    order, some = np.random.default_rng(2).permutation(ROWS), np.array([1, 0, 1, 1, 0, 1, 1])
    shuffled = dataclasses.replace(cache, table=cache.table[order])
    run = jax.jit(functools.partial(by_kernel))  # Traced anew.
    out = np.asarray(run(shuffled, query[order], CACHED[order], some.astype(np.int32)))
    np.testing.assert_array_equal(out[some == 1], whole[order][some == 1])


def test_the_list_of_work_is_what_is_there():
    """Pages of four tokens, two a step. Row 0 has 9 + 1 tokens: pages 1, 2, 3; row 1 none to add.

    Row 2 has 17 + 1, of which a window of six reaches back to position 12, in page 3 of its row: a
    step begins at an even page, so that it has one, of pages 2 and 3, and one of page 4.
    """
    table = jnp.array([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0], [6, 7, 8, 9, 10]])
    cached, counts = jnp.array([9, 4, 17]), jnp.array([1, 0, 1])
    shape = Shape(queries=16, blocks_a_row=1, together=2, group=1)
    work = jitted_plan(shape, table, cached, counts, 4, None)
    total = int(work.total)
    assert total == 5
    assert work.block[:total].tolist() == [0, 0, 2, 2, 2]
    # Behind a last page the one that this place had before: 2, and 9.
    assert work.pages[: 2 * total].reshape(-1, 2).tolist() == [
        [1, 2], [3, 2], [6, 7], [8, 9], [10, 9],
    ]  # fmt: skip
    assert work.begin.tolist() == [0, 2, 2] and work.blocks.tolist() == [2, 0, 3]
    near = jitted_plan(shape, table, cached, counts, 4, 6)
    assert int(near.total) == 4 and near.first.tolist() == [0, 0, 2]
    assert near.pages[:8].reshape(-1, 2).tolist() == [[1, 2], [3, 2], [8, 9], [10, 9]]
    idle = jitted_plan(shape, table, cached, 0 * counts, 4, None)
    assert int(idle.total) == 1 and not idle.blocks.any()


def test_each_block_of_queries_reads_up_to_its_own_last_query():
    """20 queries of two heads are in blocks of 16, eight at a time: up to 8, 16, and 18 that count.

    With three tokens before them and pages of four these are 3, 5 and 6 pages.
    """
    shape = Shape(queries=16, blocks_a_row=3, together=1, group=2)
    table = jnp.arange(8)[None]
    work = jitted_plan(shape, table, jnp.array([3]), jnp.array([18]), 4, None)
    assert work.blocks.tolist() == [3, 5, 6] and int(work.total) == 14
    assert work.pages[:14].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]


def test_a_long_row_among_short_ones_lists_what_it_has_and_idle_rows_nothing():
    """31 rows of 512 tokens and one of 8,192 beside as many tokens in rows of 752."""
    table = jnp.arange(32 * 64).reshape(32, 64)
    ragged, equal, ones = np.array([512] * 31 + [8192]), np.full(32, 752), np.ones(32, np.int32)
    assert ragged.sum() == equal.sum()

    def listed(lengths, counts) -> np.ndarray:
        """The rows of all pages that the steps name."""
        work = jitted_plan(ON_CHIP, table, lengths - 1, counts, 128, None)
        return np.asarray(work.pages)[: int(work.total) * ON_CHIP.together] // table.shape[1]

    assert len(listed(ragged, ones)) <= 1.3 * len(ones) * -(-752 // 128)
    assert {*listed(ragged, ones).tolist()} == {*range(32)}
    some = ones * (np.arange(32) % 2)
    assert {*listed(equal, some).tolist()} == {*range(1, 32, 2)}
    assert 2 * len(listed(equal, some)) == len(listed(equal, ones))
