# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: an extra column of the softmax, whatever computes it, and their gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from earl_jax.models.attention import paged_tpu, paged_triton
from earl_jax.models.attention.folding import fold, unfold
from earl_jax.models.attention.kernels import (
    Kernel,
    attend_rows,
    attention_over_pages,
    choose_kernel,
    choose_pages_kernel,
)
from earl_jax.models.attention.page_shares import own_share
from earl_jax.models.attention.rows import BLOCK_SIZE, Positions, attention
from earl_jax.models.config import ModelConfig
from earl_jax.models.kv_cache import PagedCache, place_pages, write
from earl_jax.sharding.layout import TRAINING_ROWS, Layout, MeshShape, make_layout
from tests.support.caches import empty_cache
from tests.support.rows import GROUPS, HEAD_SIZE, KV_HEADS, make_rows, out_and_gradients

# One far above all scores and one far below, whose exponentials are infinite and 0.
SINKS = jnp.array([[0.0, 2.0, -1.0], [300.0, 1.0, -300.0]])


def extra_column(query, key, value, segments, sinks_KG, *, scale, window=None):
    """Plain softmax over all scores with the sinks behind them, whose column is left out."""
    length = query.shape[1]
    scores = jnp.einsum("BTKGH,BKSH->BKGTS", query, key) * scale
    behind = jnp.arange(length)[:, None] - jnp.arange(length)[None]
    seen = (behind >= 0) & (behind < (window or length))
    seen = seen[None] & (segments[:, :, None] == segments[:, None])
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    column = jnp.broadcast_to(sinks_KG[None, :, :, None, None], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("BKGTS,BKSH->BTKGH", weights, value)


def test_a_sink_by_hand():
    """Scores ln 1 and ln 3 beside ln 4: the values have 1/8 and 3/8 of the weight, the sink 4/8."""
    query = jnp.full((1, 2, 1, 1, 2), 1.0)
    key = jnp.log(jnp.array([[[[1.0, 1.0], [3.0, 1.0]]]]))
    value = jnp.array([[[[8.0, 0.0], [16.0, 24.0]]]])
    order = jnp.arange(2)[None]
    positions = Positions(order, jnp.ones_like(order))

    @jax.jit
    def last(sink):
        sinks = jnp.full((1, 1), sink)
        out = attention(query, key, value, positions, positions, scale=1.0, sinks_KG=sinks)
        return out[0, 1, 0, 0]

    sink = jnp.log(4.0)
    np.testing.assert_allclose(last(sink), [1 + 6, 9], rtol=1e-6)
    # Of each value the sink's share of 1/2 is lost, of which its score takes more.
    np.testing.assert_allclose(jax.jit(jax.jacobian(last))(sink), [-7 / 2, -9 / 2], rtol=1e-6)


def along(change, array, axis):
    """Folds or unfolds what has more axes than rows and tokens."""
    array = jnp.moveaxis(array, axis, -1)
    changed = change(array.reshape(-1, array.shape[-1]))
    return jnp.moveaxis(changed.reshape(*array.shape[:-1], -1), -1, axis)


def by_rows(mesh: str, kernel: Kernel = "blockwise", **settings):
    """Attention of whole rows on a mesh, as the trainer computes it."""
    shape = MeshShape.parse(mesh)
    layout = make_layout(shape, jax.devices()[: shape.num_devices], row_axes=TRAINING_ROWS)

    def attend(query, key, value, segments, sinks_KG):
        folded = functools.partial(fold, layout)
        arrays = [along(folded, a, at) for a, at in ((query, 1), (key, 2), (value, 2))]
        out = attend_rows(kernel, layout, *arrays, segments, sinks_KG=sinks_KG, **settings)
        return along(lambda rows: unfold(layout, rows, query.shape[1]), out, 1)

    return attend


# Scores in one piece, in blocks of a row, and round a ring of shards.
@pytest.mark.parametrize(
    ("mesh", "length", "window", "kernel"),
    [
        ("data=1", 40, None, "blockwise"),
        ("data=1", 2 * BLOCK_SIZE + 9, None, "blockwise"),
        ("data=2,tensor=2", 2 * BLOCK_SIZE + 9, 30, "blockwise"),
        ("data=2,tensor=2", 40, 7, "blockwise"),
        ("data=2,context=2,tensor=2", 40, 7, "blockwise"),
        ("context=4", 40, None, "blockwise"),
        ("context=4", 40, 7, "triton"),
        ("data=2,tensor=2", 40, None, "splash"),
        ("data=2,tensor=2", 40, 7, "triton"),
        pytest.param("data=1", 4 * BLOCK_SIZE + 9, 30, "splash", marks=pytest.mark.slow),
    ],
)
def test_sinks_are_an_extra_column_of_the_softmax(mesh, length, window, kernel):
    """Forward, and backward to queries, keys, values and the sinks."""
    settings = {"scale": HEAD_SIZE**-0.5, "window": window}
    arrays, segments = make_rows(length)
    ours = out_and_gradients(by_rows(mesh, kernel, **settings), *arrays, SINKS, segments=segments)
    plain = functools.partial(extra_column, **settings)
    theirs = out_and_gradients(plain, *arrays, SINKS, segments=segments)
    for one, other in zip(ours, theirs, strict=True):
        assert np.all(np.isfinite(one))
        np.testing.assert_allclose(one, other, atol=2e-5 * max(1, float(np.abs(other).max())))
    out, *_, of_sinks = ours
    assert not np.any(out[:, :, 1, 0]) and not np.any(of_sinks[1, ::2])
    assert np.all(np.abs(of_sinks[0]) > 1e-2)


def test_no_score_is_left_without_a_sink():
    """The lowest of all changes no bit of a result."""
    arrays, segments = make_rows(BLOCK_SIZE + 9)
    attend = functools.partial(attend_rows, "blockwise", make_layout(MeshShape()), scale=0.25)
    none = jax.jit(attend)(*arrays, segments)
    lowest = jax.jit(attend)(*arrays, segments, sinks_KG=jnp.full((KV_HEADS, GROUPS), -1e4))
    real = segments > 0
    np.testing.assert_allclose(none[real], lowest[real], atol=1e-6)


# Over the pages of a cache.

ROWS, MAX_TOKENS, PAGE = 5, 40, 8
CACHED = np.array([0, 39, 7, 16, 25], np.int32)
MODEL = ModelConfig(
    num_layers=1, width=48, num_heads=6, num_kv_heads=2, head_size=HEAD_SIZE, attention_sinks=True
)


@functools.cache
def filled() -> tuple[PagedCache, jax.Array, jax.Array]:
    """A cache of full rows, and their keys and values."""
    rng = np.random.default_rng(0)
    cache = empty_cache(MODEL, ROWS, MAX_TOKENS, PAGE)
    key, value = (
        rng.normal(size=(ROWS, MAX_TOKENS, KV_HEADS, HEAD_SIZE)).astype(np.float32)
        for _ in range(2)
    )
    whole = jnp.full(ROWS, MAX_TOKENS, jnp.int32)
    layer = write(cache.pools[0], cache.table[:, 0], key, value, 0 * whole, whole)
    return dataclasses.replace(cache, pools=[layer]), key, value


def by_pages(kernel, window, scatter, cache, query, counts, sinks_KG):
    model = dataclasses.replace(MODEL, windows=(window or 0,))
    readings, attend = attention_over_pages(
        kernel, "cpu", model, cache, jnp.asarray(CACHED), counts, query.shape[1]
    )
    share = own_share(cache.parts)
    return attend(query, cache.pools[0], readings[0], window, share, scatter, sinks_KG)


@pytest.mark.parametrize("kernel", ["blockwise", "triton", "pallas_tpu"])
@pytest.mark.parametrize(("length", "parts"), [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_sinks_are_added_to_what_is_read_from_pages(kernel, length, parts, monkeypatch):
    """By each kernel, on one device and where two have halves of every page."""
    monkeypatch.setattr(paged_tpu, "TOKENS_A_STEP", 2 * PAGE)
    monkeypatch.setattr(paged_triton, "TOKENS_A_SPLIT", 2 * PAGE)
    window, scatter = (None if length == 1 else 12), parts > 1 and length > 1
    rng = np.random.default_rng(1)
    query = jnp.asarray(rng.normal(size=(ROWS, length, KV_HEADS, GROUPS, HEAD_SIZE)), jnp.float32)
    counts = jnp.minimum(length, MAX_TOKENS - CACHED).astype(jnp.int32).at[3].set(0)
    cache, key, value = filled()
    run = functools.partial(by_pages, kernel, window, scatter)
    if parts > 1:
        layout, whole = make_layout(MeshShape(context=2), jax.devices()[:2]), P()
        pages = place_pages(cache.pools[0], layout.activation_spec)
        cache = dataclasses.replace(cache, parts=parts)
        run = jax.shard_map(
            run,
            mesh=layout.mesh,
            in_specs=(PagedCache(pools=[pages], table=whole, parts=parts), *[whole] * 3),
            out_specs=P(None, "context") if scatter else whole,
            check_vma=False,
        )
    out = np.asarray(jax.jit(run)(cache, query, counts, SINKS))
    order = jnp.asarray(CACHED[:, None] + np.arange(length))
    places = jnp.tile(jnp.arange(MAX_TOKENS), (ROWS, 1))
    positions = [Positions(each, jnp.ones_like(each)) for each in (order, places)]
    attend = functools.partial(attention, scale=MODEL.attention_scale, window=window)
    keys, values = (np.swapaxes(array, 1, 2) for array in (key, value))
    expected = jax.jit(attend)(query, keys, values, *positions, sinks_KG=SINKS)
    real = np.arange(length)[None] < np.asarray(counts)[:, None]
    np.testing.assert_allclose(out[real], np.asarray(expected)[real], atol=2e-6)
    assert np.all(np.isfinite(out)) and not np.any(out[3])


# The choice of a kernel.


@pytest.mark.parametrize(("platform", "best"), [("tpu", "splash"), ("gpu", "triton")])
def test_a_kernel_without_sinks_is_not_chosen(platform, best, monkeypatch):
    monkeypatch.setattr(Layout, "platform", platform)
    layout, length = make_layout(MeshShape(data=8)), BLOCK_SIZE + 1
    model = dataclasses.replace(MODEL, compute_dtype="bfloat16")
    choice = choose_kernel("auto", layout, model, length)
    assert choice.kernel == best
    assert choose_kernel("blockwise", layout, model, length).kernel == "blockwise"
    if platform == "gpu":
        assert "tokamax's kernel has no attention sinks" in choice.reason
        with pytest.raises(ValueError, match="'tokamax', but tokamax's kernel has no .*'au"):
            choose_kernel("tokamax", layout, model, length)
    # Our own kernels over pages have them.
    model = dataclasses.replace(MODEL, head_size=128)
    own = {"tpu": "pallas_tpu", "gpu": "triton"}[platform]
    assert choose_pages_kernel("auto", layout, model, 128).kernel == own
