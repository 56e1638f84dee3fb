# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Draft tokens of a row: what followed its last ids before."""

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.engine.drafts import look_up

WIDTH = 12


def drafts(*rows: tuple[int, ...], ngram: int, draft: int) -> list[list[int]]:
    """The guesses behind these rows, in a buffer with old ids behind them."""
    ids = np.full((len(rows), WIDTH), 5, np.int32)
    for buffer, row in zip(ids, rows, strict=True):
        buffer[: len(row)] = row
    lengths = np.array([len(row) for row in rows], np.int32)
    look = jax.jit(look_up, static_argnames=("ngram", "draft"))
    found, counts = look(jnp.asarray(ids), jnp.asarray(lengths), ngram=ngram, draft=draft)
    assert found.shape == (len(rows), draft)
    return [row[:count].tolist() for row, count in zip(np.asarray(found), counts, strict=True)]


def test_it_is_what_a_search_from_the_end_finds():
    """Random rows of three ids, of which one is what stands behind them, against plain Python."""

    def search(row, ngram, draft):
        ends = [
            m for m in range(ngram - 1, len(row) - 1) if row[m - ngram + 1 : m + 1] == row[-ngram:]
        ]
        enough = [m for m in ends if len(row) - 1 - m >= draft]
        if not ends:
            return []
        start = (enough[-1] if enough else ends[0]) + 1
        return row[start : start + draft]

    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 6, rng.integers(1, WIDTH + 1)).tolist() for _ in range(200)]
    for ngram, draft in ((1, 1), (1, 4), (2, 3), (3, 5)):
        expected = [search(row, ngram, draft) for row in rows]
        assert drafts(*map(tuple, rows), ngram=ngram, draft=draft) == expected
        assert {len(guess) for guess in expected} >= {0, 1, draft}
