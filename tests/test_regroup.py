# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of slots whose row shards are merged or split: by hand, and of random tables.

Pages of 4 tokens; six slots, at first in two row shards of five pages.
"""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from earl_jax.engine.pages import NO_SOURCE, PageTable, Pool
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


@dataclasses.dataclass
class Model:
    """A table beside the contents of its pages: each is what was put there first."""

    table: PageTable
    contents: np.ndarray
    written: int = 0

    def write(self, slot: int) -> None:
        """Puts something new into each of the slot's pages that nobody else has."""
        for page in rows(self.table)[slot]:
            shard, own = divmod(page, self.table.pool.pages)
            if self.table.holders()[shard][own] == 1 and not self.contents[page]:
                self.written += 1
                self.contents[page] = self.written

    def clear_free(self) -> None:
        """Sets the contents of pages that no slot holds to zero."""
        held = np.array(self.table.holders()).reshape(-1)
        self.contents[held == 0] = 0

    def read(self) -> list[list[int]]:
        """Returns the contents of every slot's pages."""
        return [self.contents[row].tolist() for row in rows(self.table)]


SHARDS = (1, 2, 3, 4, 6, 12)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "keep", "begin", "end", "regroup"]),
        st.integers(0, 11),
        st.integers(0, 11),
        st.integers(0, 20),
    ),
    max_size=40,
)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(STEPS)
def test_whatever_happens_slots_keep_their_contents(steps):
    """Twelve slots; a step names a slot, another (or a number of shards), and tokens."""
    table = PageTable(Pool(shards=2, pages=30), num_slots=12, rule=PageRule(4))
    model = Model(table, np.zeros(60, np.int64))
    for what, slot, other, tokens in steps:
        table = model.table
        shard = table.shard(slot)
        if what == "hold" and table.missing(slot, tokens) <= table.num_free(shard):
            table.hold(slot, tokens)
        elif what in ("keep", "end"):
            getattr(table, what)(slot, min(tokens, 4 * table.num_held(slot)))
        elif what == "begin" and table.shard(other) == shard:
            # Whole pages: none is copied.
            table.begin(slot, other, min(tokens // 4, table.num_held(other)) * 4)
            table.end_round()
        elif what == "regroup":
            regrouped(model, SHARDS[other % 6], tokens % 3)
        model.clear_free()
        model.write(slot)


def regrouped(model: Model, shards: int, spare: int) -> None:
    """Moves the model to so many row shards; checks everything that must hold."""
    table, before = model.table, model.read()
    idle = table._idle
    least = table.least_pages(shards)
    pool = Pool(shards, max(least, 1) + spare)
    if table.pool.shards % shards == 0:
        assert least <= table.pool.total // shards, "merging needs no more"
    after, source = table.regroup(pool)
    old = model.contents
    model.table = after
    model.contents = np.where(source == NO_SOURCE, 0, old[source]).reshape(-1)
    for slot, found in enumerate(model.read()):
        assert found == before[slot] or (slot in idle and found == [])
    counted = np.zeros(pool.total, int)
    for slot, row in enumerate(rows(after)):
        assert {page // pool.pages for page in row} <= {slot // (12 // shards)}
        np.add.at(counted, row, 1)
    assert counted.reshape(pool).tolist() == after.holders()
    assert [after.num_free(s) for s in range(shards)] == (counted.reshape(pool) == 0).sum(
        1
    ).tolist()
