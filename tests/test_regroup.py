# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of slots whose row shards are merged or split, by hand; random ones: test_layer_groups.py.

Pages of 4 tokens; six slots, at first in two row shards of five pages.
"""

import pytest

from earl_jax.engine.pages import PageTable, Pool
from earl_jax.models.layer_groups import PageRule


@pytest.fixture
def table():
    """Slots 0 and 1 share their first page, of three; slot 4 has two."""
    table = PageTable(Pool(shards=2, pages=5), num_slots=6, rule=PageRule(4))
    table.hold(0, 8)
    table.begin(1, 0, 4)
    table.hold(1, 8)
    table.hold(4, 5)
    return table


def rows(table: PageTable) -> list[list[int]]:
    """The pages of every slot, numbered in the whole pool."""
    wide = table.as_array(table.pool.pages)[:, 0]
    return [row[: table.num_held(slot)].tolist() for slot, row in enumerate(wide)]


def test_a_pool_shrinks_to_what_is_held_and_no_further(table):
    small, source = table.regroup(Pool(shards=2, pages=3))
    assert rows(small) == [[0, 1], [0, 2], [], [], [3, 4], []]
    assert source.tolist() == [[0, 1, 2], [5, 6, -1]]
    with pytest.raises(ValueError, match="2 pages in each of 2 row shards .* which need 3"):
        table.regroup(Pool(shards=2, pages=2))


def test_with_more_pages_of_as_many_shards_every_page_keeps_its_number(table):
    """Free pages keep theirs too: their contents may still be on the way to the host."""
    table.keep(0, 4)
    larger, source = table.regroup(Pool(shards=2, pages=6))
    assert source.tolist() == [[0, 1, 2, 3, 4, -1], [5, 6, 7, 8, 9, -1]]
    assert rows(larger) == [[0], [0, 2], [], [], [6, 7], []]
    larger.hold(2, 16)
    assert rows(larger)[2] == [1, 3, 4, 5]


def test_idle_slots_keep_their_prompts_where_pages_are_left(table):
    """Slot 0's episode is over: its second page is dropped where the others need all."""
    table.end(0, 8)
    assert [table.least_pages(shards) for shards in (1, 2)] == [4, 2]
    kept, _ = table.regroup(Pool(shards=1, pages=5))
    assert [len(row) for row in rows(kept)] == [2, 2, 0, 0, 2, 0]
    assert rows(kept)[0][0] == rows(kept)[1][0], "still shared"
    dropped, source = table.regroup(Pool(shards=1, pages=4))
    assert rows(dropped) == [[], [0, 1], [], [], [2, 3], []]
    assert source.tolist() == [[0, 2, 5, 6]]
    # Whoever plays there again is not idle any more.
    table.hold(0, 9)
    assert table.least_pages(2) == 4
