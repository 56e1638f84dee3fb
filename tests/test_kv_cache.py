# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Pages: what is written where, what they weigh, and attention over them against dense keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.models.attention import paged_triton
from earl_jax.models.attention.paged_attention import Tile, attend_pages
from earl_jax.models.attention.rows import Positions, attention
from earl_jax.models.config import ModelConfig
from earl_jax.models.kv_cache import LayerCache, PagedCache, write
from tests.support.caches import empty_cache, reading_of

MODEL = ModelConfig(num_layers=2, width=32, num_heads=4, num_kv_heads=2, head_size=8, ffn_size=64)

jitted_write = jax.jit(write, static_argnames="whole_pages")

both_ways = pytest.mark.parametrize("whole_pages", [False, True])


@both_ways
def test_a_write_lands_where_it_should_and_nowhere_else(whole_pages):
    # Pages of two tokens; row 0 has the pages 4 and 1, row 1 has 0 and 2, row 2 has 5 and 3.
    table = jnp.array([[4, 1], [0, 2], [5, 3]])
    before = np.full((6, 1, 2, 1), -1, np.float32)
    layer = LayerCache(key=jnp.asarray(before.swapaxes(2, 3)), value=jnp.asarray(before))
    new = np.array([[11, 12, 13], [21, 22, 23], [31, 32, 33]], np.float32).reshape(3, 3, 1, 1)
    # Row 0: two entries at 1 and 2. Row 1: none. Row 2: three at 2, 3, 4, of which it has two.
    out = jitted_write(
        layer,
        table,
        new,
        new + 100,
        jnp.array([1, 4, 2]),
        jnp.array([2, 0, 3]),
        whole_pages=whole_pages,
    )
    pages = [[-1, -1], [12, -1], [-1, -1], [31, 32], [-1, 11], [-1, -1]]
    np.testing.assert_array_equal(np.asarray(out.key)[:, 0, 0], pages)
    np.testing.assert_array_equal(
        np.asarray(out.value)[:, 0, :, 0],
        np.where(np.array(pages) < 0, pages, np.array(pages) + 100),
    )


def test_pages_are_written_as_their_places_are():
    """Seven entries, in pages of three."""
    rng, length, page_size = np.random.default_rng(7), 7, 3
    for kv_dtype in ("compute", "int8"):
        cache = empty_cache(MODEL, 4, 24, page_size, kv_dtype)
        table = jnp.asarray(rng.permutation(cache.num_pages), jnp.int32).reshape(
            cache.table[:, 0].shape
        )
        layer = jax.tree.map(
            lambda pool: jnp.asarray(rng.integers(-9, 9, pool.shape), pool.dtype), cache.pools[0]
        )
        key, value = (
            jnp.asarray(rng.normal(size=(4, length, 2, 8)), jnp.float32) for _ in range(2)
        )
        # The third row begins in its last page, and the fourth writes nothing.
        starts = jnp.array([*rng.integers(0, 24, 2), 23, 5], jnp.int32)
        counts = jnp.array([length, rng.integers(1, length + 1), length, 0], jnp.int32)
        by_place, by_page = (
            jitted_write(layer, table, key, value, starts, counts, whole_pages=whole)
            for whole in (False, True)
        )
        jax.tree.map(np.testing.assert_array_equal, by_place, by_page)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_bytes_are_the_bytes_of_an_empty_cache(dtype):
    model = ModelConfig(
        num_layers=2,
        width=32,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        ffn_size=64,
        compute_dtype=dtype,
    )
    cache = empty_cache(model, 3, 10, page_size=4)
    # 2 layers x (key, value) x 3 rows x 3 pages x 4 tokens x 2 heads x 8 numbers.
    num_bytes = 2 * 2 * 3 * 3 * 4 * 2 * 8 * jnp.dtype(dtype).itemsize
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache.pools)) == num_bytes
    assert cache.pools[0].key.shape == (9, 2, 8, 4)
    assert cache.pools[0].value.shape == (9, 2, 4, 8)
    assert cache.table.tolist() == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]]]


ROWS, MAX_TOKENS, SIZE = 11, 40, 8


@pytest.fixture(scope="module")
def filled():
    """Rows of other lengths in pages that are all over the pool; behind the rows is garbage."""
    rng = np.random.default_rng(0)
    key, value = (rng.normal(size=(ROWS, 2, MAX_TOKENS, 8)).astype(np.float32) for _ in range(2))
    cached = np.array([0, 39, 7, 8, 9, 16, 3, 25, 1, 30, 12], np.int32)
    table = rng.permutation(ROWS * 5 + 3)[: ROWS * 5].reshape(ROWS, 5).astype(np.int32)
    pools = [np.full((ROWS * 5 + 3, 2, 8, SIZE), 1e4, np.float32) for _ in range(2)]
    for row in range(ROWS):
        for page in range(5):
            positions = slice(page * SIZE, (page + 1) * SIZE)
            pools[0][table[row, page]] = key[row, :, positions].swapaxes(-1, -2)
            pools[1][table[row, page]] = value[row, :, positions].swapaxes(-1, -2)
    layer = LayerCache(key=jnp.asarray(pools[0]), value=jnp.asarray(pools[1].swapaxes(-1, -2)))
    return PagedCache(pools=[layer], table=jnp.asarray(table)[:, None]), key, value, cached


def attend(cache, query, cached, counts, *, tile=Tile(4, 1), **settings):  # noqa: B008
    window = settings.get("window")
    reading = reading_of(cache, cached, counts, query.shape[1], window, tile)
    return attend_pages(query, cache.pools[0], reading, scale=0.4, **settings)


@pytest.mark.parametrize(
    ("settings", "tile", "length"),
    [
        ({}, Tile(4, 1), 1),
        ({"window": 3}, Tile(ROWS, 2), 1),
        ({"window": 12, "softcap": 2.0}, Tile(3, 9), 5),
    ],
    ids=str,
)
def test_attention_over_pages_is_attention_over_dense_keys(filled, length, settings, tile):
    cache, key, value, cached = filled
    rng = np.random.default_rng(1)
    query = jnp.asarray(rng.normal(size=(ROWS, length, 2, 3, 8)), jnp.float32)
    counts = np.minimum(rng.integers(0, length + 1, ROWS), MAX_TOKENS - cached).astype(np.int32)
    assert (counts == 0).any() and (counts == length).any()
    out = jax.jit(functools.partial(attend, tile=tile, **settings))(cache, query, cached, counts)
    order = cached[:, None] + np.arange(length)[None, :]
    positions = np.tile(np.arange(MAX_TOKENS), (ROWS, 1))
    expected = jax.jit(functools.partial(attention, scale=0.4, **settings))(
        query,
        jnp.asarray(key),
        jnp.asarray(value),
        Positions(jnp.asarray(order), jnp.ones_like(order)),
        Positions(jnp.asarray(positions), jnp.ones_like(positions)),
    )
    out, expected = np.asarray(out), np.asarray(expected)
    real = np.arange(length)[None, :] < counts[:, None]
    np.testing.assert_allclose(out[real], expected[real], atol=2e-6)
    assert not np.asarray(out)[counts == 0].any()


@pytest.mark.parametrize(
    ("window", "tile"), [(None, Tile(4, 1)), (3, Tile(2, 1)), (20, Tile(ROWS, 2))], ids=str
)
def test_a_query_gets_the_same_bits_wherever_its_chunk_begins(filled, window, tile):
    """Five queries at once are the same as one by one, in chunks of as many tokens."""
    cache, _, _, cached = filled
    run = jax.jit(functools.partial(attend, tile=tile, window=window))
    query = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, 5, 2, 3, 8)), jnp.float32)
    counts = np.minimum(5, MAX_TOKENS - cached).astype(np.int32)
    whole = np.asarray(run(cache, query, cached, counts))
    for begin in range(1, 5):
        # Garbage behind what counts, as at the end of a prompt.
        rest = jnp.roll(query, -begin, axis=1)
        left = np.maximum(0, counts - begin)
        part = np.asarray(run(cache, rest, cached + np.minimum(begin, counts), left))
        for row in np.flatnonzero(left):
            np.testing.assert_array_equal(part[row, : left[row]], whole[row, begin : counts[row]])


def test_reading_plan_lists_the_pages_that_a_row_and_its_window_need(filled):
    """Whole pages up to a row's end; with a window from the block on in which it begins."""
    cache, _, _, cached = filled
    ones = np.ones(ROWS, np.int32)
    ends = cached + 1
    reading = reading_of(cache, cached, ones, 1, None, Tile(4, 1))
    order = np.asarray(reading.order)
    assert reading.blocks.tolist() == [*-(-ends[order] // SIZE), 0]
    assert sorted(order) == list(range(ROWS)) and not np.asarray(reading.first).any()
    reading = reading_of(cache, cached, ones, 1, 3, Tile(4, 1))
    order = np.asarray(reading.order)
    first = np.maximum(0, ends[order] - 3) // SIZE
    assert reading.first.tolist() == [*first, 0]
    assert reading.blocks.tolist() == [*-(-ends[order] // SIZE) - first, 0]
    assert reading.blocks.max() == 2
    reading = reading_of(cache, cached, ones, 1, None, Tile(4, 2))
    order = np.asarray(reading.order)
    assert reading.blocks.tolist() == [*-(-ends[order] // (2 * SIZE)), 0]
    # Blocks of two pages, and of one where the window is no longer.
    for window, pages in ((20, 2), (12, 1)):
        reading = reading_of(cache, cached, ones, 1, window, Tile(4, 4 if pages == 1 else 2))
        order = np.asarray(reading.order)
        first = np.maximum(0, ends[order] - window) // (pages * SIZE) * pages
        assert reading.tile.pages == pages and reading.first.tolist() == [*first, 0]
    idle = reading_of(cache, cached, 0 * ones, 1, None, Tile(4, 1))
    assert not np.asarray(idle.blocks).any()


@both_ways
def test_in_int8_each_head_of_a_token_has_its_own_scale(whole_pages):
    """Hand: of (1.27, -0.5, 0.004) the scale is 0.01, of (0, 0, 0) it is 0."""
    model = ModelConfig(num_layers=1, width=6, num_heads=2, num_kv_heads=2, head_size=3, ffn_size=4)
    cache = empty_cache(model, 1, 2, page_size=2, kv_dtype="int8")
    new = jnp.array([[[[1.27, -0.5, 0.004], [0.0, 0.0, 0.0]]]])
    out = jitted_write(
        cache.pools[0],
        cache.table[:, 0],
        new,
        2 * new,
        jnp.array([1]),
        jnp.array([1]),
        whole_pages=whole_pages,
    )
    assert out.key.dtype == out.value.dtype == jnp.int8
    np.testing.assert_array_equal(out.key[0, 0], [[0, 127], [0, -50], [0, 0]])
    np.testing.assert_array_equal(out.value[0, 0], [[0, 0, 0], [127, -50, 0]])
    assert not np.asarray(out.key)[0, 1].any() and not np.asarray(out.value)[0, 1].any()
    np.testing.assert_allclose(out.key_scale[0], [[0, 0.01], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(out.value_scale[0], [[0, 0.02], [0, 0]], rtol=1e-6)


def test_attention_over_int8_pages_is_that_over_what_they_stand_for(filled):
    cache, key, value, cached = filled
    rng, length = np.random.default_rng(2), 5
    query = jnp.asarray(rng.normal(size=(ROWS, length, 2, 3, 8)), jnp.float32)
    counts = np.minimum(length, MAX_TOKENS - cached).astype(np.int32)
    model = ModelConfig(
        num_layers=1, width=32, num_heads=6, num_kv_heads=2, head_size=8, ffn_size=64
    )
    rounded = empty_cache(model, ROWS, MAX_TOKENS, SIZE, "int8")
    layer = jitted_write(
        rounded.pools[0],
        rounded.table[:, 0],
        jnp.asarray(key.swapaxes(1, 2)),
        jnp.asarray(value.swapaxes(1, 2)),
        jnp.zeros(ROWS, jnp.int32),
        jnp.full(ROWS, MAX_TOKENS, jnp.int32),
    )
    rounded = PagedCache(pools=[layer], table=rounded.table)
    out = np.asarray(jax.jit(attend)(rounded, query, cached, counts))
    # What the whole numbers stand for, in a cache that does not round.
    assert layer.key_scale is not None and layer.value_scale is not None
    same = LayerCache(
        key=layer.key * layer.key_scale[:, :, None],
        value=layer.value * layer.value_scale[..., None],
    )
    exact = PagedCache(pools=[same], table=rounded.table)
    np.testing.assert_allclose(
        out, jax.jit(attend)(exact, query, cached, counts), atol=2e-6, rtol=0
    )
    by_kernel = np.asarray(jax.jit(by_triton)(rounded, query, cached, counts))
    np.testing.assert_allclose(by_kernel, out, atol=2e-6, rtol=0)
    # Half of a 127th of the largest of eight numbers each, averaged over keys: about 1 %.
    real = np.arange(length)[None, :] < counts[:, None]
    far = np.abs(out - np.asarray(jax.jit(attend)(cache, query, cached, counts)))[real]
    assert 1e-4 < far.mean() < 1e-2 and far.max() < 0.1


def by_triton(cache, query, cached, counts, **settings):
    return paged_triton.attend(
        query,
        cache.pools[0],
        cache.table[:, 0],
        cached,
        counts,
        scale=0.4,
        interpret=True,
        **settings,
    )


# Pages of 8 tokens: all of a row's five in one program, or two and two and one.
@pytest.mark.parametrize(
    ("settings", "length", "tokens_a_split"),
    [({}, 1, 1024), ({"window": 3}, 5, 16), ({"window": 12, "softcap": 2.0}, 1, 16)],
    ids=str,
)
def test_the_kernel_for_gpus_is_our_attention_over_pages(
    filled, length, settings, tokens_a_split, monkeypatch
):
    monkeypatch.setattr(paged_triton, "TOKENS_A_SPLIT", tokens_a_split)
    cache, _, _, cached = filled
    rng = np.random.default_rng(1)
    query = jnp.asarray(rng.normal(size=(ROWS, length, 2, 3, 8)), jnp.float32)
    counts = np.minimum(rng.integers(0, length + 1, ROWS), MAX_TOKENS - cached).astype(np.int32)
    assert (counts == 0).any() and (counts == length).any()
    out = np.asarray(
        jax.jit(functools.partial(by_triton, **settings))(cache, query, cached, counts)
    )
    expected = np.asarray(
        jax.jit(functools.partial(attend, **settings))(cache, query, cached, counts)
    )
    real = np.arange(length)[None, :] < counts[:, None]
    np.testing.assert_allclose(out[real], expected[real], atol=2e-6)
    assert not out[counts == 0].any() and np.isfinite(out).all()


def test_the_kernel_for_gpus_reads_the_pages_that_rows_need_and_no_more():
    """Decode steps of 32 rows of Qwen2.5-7B: seven heads share keys; tables of 64 pages of 128.

    31 rows of 512 tokens have 4 pages each and one of 8,192 has 64: 188. Equal rows with as many
    tokens, 752 each, have 6 pages each: 192.
    """

    def pages(lengths, counts, window=None):
        sizes = {"group": 7, "page_size": 128, "pages_a_split": 8, "pages": 64}
        reach = paged_triton._Reach(**sizes, window=window)
        begin, end = reach.pages_of(0, 16, np.array(lengths) - 1, np.array(counts))
        return np.asarray(end - begin)

    ragged, ones = [512] * 31 + [8192], [1] * 32
    np.testing.assert_array_equal(pages(ragged, ones), [4] * 31 + [64])
    np.testing.assert_array_equal(pages([752] * 32, ones), [6] * 32)
    assert pages(ragged, ones).sum() <= 1.3 * pages([752] * 32, ones).sum()
    np.testing.assert_array_equal(pages([752] * 32, [0, 1] * 16), [0, 6] * 16)
    # Positions 7,168 to 8,191; 512 tokens lie in a window of 1,024.
    np.testing.assert_array_equal(pages(ragged, ones, window=1024), [4] * 31 + [8])


def test_a_long_chunk_is_several_blocks_of_the_kernel_for_gpus(filled):
    """30 queries of three heads are two blocks of 64; the second begins within a query."""
    cache, _, _, cached = filled
    rng = np.random.default_rng(1)
    query = jnp.asarray(rng.normal(size=(ROWS, 30, 2, 3, 8)), jnp.float32)
    counts = np.minimum(30, MAX_TOKENS - cached).astype(np.int32)
    real = np.arange(30)[None, :] < counts[:, None]
    out, expected = (
        np.asarray(jax.jit(functools.partial(run, window=20))(cache, query, cached, counts))
        for run in (by_triton, attend)
    )
    np.testing.assert_allclose(out[real], expected[real], atol=2e-6)


@pytest.mark.parametrize("read", [functools.partial(attend, tile=Tile(4, 1)), by_triton])
def test_a_row_gets_the_same_bits_whoever_its_neighbours_are(filled, monkeypatch, read):
    """By our attention over pages, and by the kernel for GPUs."""
    monkeypatch.setattr(paged_triton, "TOKENS_A_SPLIT", 16)
    cache, _, _, cached = filled
    query = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, 1, 2, 3, 8)), jnp.float32)
    run = jax.jit(read)
    ones = np.ones(ROWS, np.int32)
    whole = np.asarray(run(cache, query, cached, ones))
    order = np.random.default_rng(2).permutation(ROWS)
    shuffled = PagedCache(pools=cache.pools, table=cache.table[order])
    np.testing.assert_array_equal(run(shuffled, query[order], cached[order], ones), whole[order])
    some = np.array([1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 0], np.int32)
    np.testing.assert_array_equal(run(cache, query, cached, some)[some == 1], whole[some == 1])
    # Nor does it matter how long a context the table has pages for.
    table = np.pad(cache.table, ((0, 0), (0, 0), (0, 20)))
    wide = PagedCache(pools=cache.pools, table=jnp.asarray(table))
    np.testing.assert_array_equal(run(wide, query, cached, ones), whole)
