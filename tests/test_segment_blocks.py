# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention that skips blocks of other segments equals attention over all keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.models.attention.rows import Positions, attention
from earl_jax.models.attention.segment_blocks import attend_packed_rows, blocks_looked_at
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout

LENGTH = 600
# Episodes of two rows; what is left is padding, in the second row two whole blocks.
EPISODES = ([100, 28, 5, 300, 1, 140], [17, 230])


def segments() -> np.ndarray:
    rows = np.zeros((len(EPISODES), LENGTH), np.int32)
    for row, lengths in zip(rows, EPISODES, strict=True):
        ends = np.cumsum(lengths)
        for number, (end, size) in enumerate(zip(ends, lengths, strict=True)):
            row[end - size : end] = 1 + number
    return rows


def inputs(seed: int = 0):
    rng = np.random.default_rng(seed)
    shapes = (2, LENGTH, 2, 2, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 8)
    return tuple(jnp.array(rng.normal(size=shape), jnp.float32) for shape in shapes)


def results(attend, window):
    """The attention of all tokens that are no padding, and the gradients of its squares."""
    inside = jnp.array(segments() > 0)[..., None, None, None]

    def loss(window, *arrays):
        out = jnp.where(inside, attend(*arrays, jnp.array(segments()), window=window), 0.0)
        return jnp.sum(out**2), out

    # A window may be a number on the device.
    window = window if window is None else jnp.int32(window)
    grads, out = jax.jit(jax.grad(loss, argnums=(1, 2, 3), has_aux=True))(window, *inputs())
    return jax.tree.map(np.asarray, (out, *grads))


def over_all_keys(query, key, value, segment_ids, **settings):
    order = jax.lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    positions = Positions(order, segment_ids)
    return attention(query, key, value, positions, positions, **settings)


@pytest.mark.parametrize(
    ("mesh", "window", "softcap"), [("data=2,tensor=2", None, 2.0), ("data=1", 50, 0.0)]
)
def test_it_is_attention_over_all_keys(mesh, window, softcap):
    layout = make_layout(MeshShape.parse(mesh), row_axes=TRAINING_ROWS)
    settings = {"scale": 0.3, "softcap": softcap}
    expected = results(functools.partial(over_all_keys, **settings), window)
    got = results(functools.partial(attend_packed_rows, layout, **settings), window)
    for found, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max())


def test_padding_is_finite():
    layout = make_layout(MeshShape(), row_axes=TRAINING_ROWS)
    out = attend_packed_rows(layout, *inputs(), jnp.array(segments()), scale=0.3)
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize(
    ("lengths", "blocks"),
    [
        # All keys before: 1 + 2 + 3 + 4.
        ([512], 10),
        # An episode a block.
        ([128] * 4, 4),
        # The second block sees the first, because an episode begins there; the third and fourth
        # are padding.
        ([100, 100], 3),
        # Block 1 holds the ends of both episodes, block 2 the second alone.
        ([130, 200], 1 + 2 + 2),
        ([], 0),
    ],
)
def test_blocks_of_other_segments_are_skipped(lengths, blocks):
    row = np.zeros(512, np.int32)
    ends = np.cumsum(lengths).astype(int)
    for number, (end, size) in enumerate(zip(ends, lengths, strict=True)):
        row[end - size : end] = 1 + number
    assert blocks_looked_at(jnp.array(row)) == blocks
