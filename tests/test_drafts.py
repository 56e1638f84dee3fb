# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Draft tokens of a row, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize(
    ("row", "ngram", "draft", "expected"),
    [
        # The example of the docstring.
        ((5, 6, 7, 8, 5, 6), 2, 3, [7, 8, 5]),
        ((5, 6, 7, 8, 5, 6), 2, 8, [7, 8, 5, 6]),
        # One id is enough for an n-gram of 1, and 8 5 6 stood nowhere before.
        ((5, 6, 7, 8, 5, 6), 1, 1, [7]),
        ((5, 6, 7, 8, 5, 6), 3, 3, []),
        # The latest of several matches...
        ((1, 2, 1, 3, 1, 4, 1), 1, 2, [4, 1]),
        ((1, 2, 1, 3, 1, 4, 1), 1, 1, [4]),
        # ... that has enough behind it, here 1 3 at the second 1.
        ((1, 2, 1, 3, 1, 4, 1), 1, 3, [3, 1, 4]),
        # None has six: the first has five, 9 and what is behind it.
        ((9, 1, 9, 1, 9, 1), 2, 6, [9, 1, 9, 1]),
        ((4, 4, 4, 4), 1, 2, [4, 4]),
        ((4, 4, 4, 4), 1, 8, [4, 4, 4]),
        # Old ids behind the row are no part of it: 5 stands there, and at the end.
        ((1, 2, 5), 1, 2, []),
        ((5, 2, 5), 1, 4, [2, 5]),
        # Too short to hold an n-gram and one before it.
        ((5,), 1, 2, []),
        ((5, 5), 2, 2, []),
        ((5, 5, 5), 2, 2, [5]),
        # The n-gram does not reach around the ends of the buffer.
        ((6, 1, 5, 6), 2, 2, []),
        # A full buffer.
        (tuple([3, 7, 8] * 4), 3, 4, [3, 7, 8, 3]),
    ],
)
def test_the_ids_that_followed_the_last_time(row, ngram, draft, expected):
    assert drafts(row, ngram=ngram, draft=draft) == [expected]


def test_rows_are_looked_up_apart():
    rows = ((1, 2, 3, 1), (2, 1), (1, 3, 3, 1, 3))
    assert drafts(*rows, ngram=1, draft=2) == [[2, 3], [], [1, 3]]


def test_it_is_what_a_search_from_the_end_finds():
    """Random rows of three ids, against plain Python."""

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
    rows = [rng.integers(0, 3, rng.integers(1, WIDTH + 1)).tolist() for _ in range(200)]
    for ngram, draft in ((1, 1), (1, 4), (2, 3), (3, 5)):
        expected = [search(row, ngram, draft) for row in rows]
        assert drafts(*map(tuple, rows), ngram=ngram, draft=draft) == expected
        assert {len(guess) for guess in expected} >= {0, 1, draft}
