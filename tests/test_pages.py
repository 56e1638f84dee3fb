# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Page tables by hand: pages of 4 tokens, two row shards of three slots and five pages."""

import random

import pytest

from earl_jax.engine.pages import PageCopy, PageTable, Pool, dense_pool
from earl_jax.models.layer_groups import PageRule, pages_for


@pytest.fixture
def table():
    return PageTable(Pool(shards=2, pages=5), num_slots=6, rule=PageRule(4))


def rows(table, width=3):
    return table.as_array(width)[:, 0].tolist()


def test_a_dense_pool_is_enough_for_every_slot():
    assert [pages_for(tokens, 4) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
    pool = dense_pool(shards=2, slots=6, max_tokens=10, rule=PageRule(4))
    assert pool == Pool(shards=2, pages=9) and pool.total == 18


def test_pages_behind_whole_ones_are_a_slots_alone_until_another_takes_them_over(table):
    table.hold(0, 7)
    assert table.has_alone(0, 0) and table.has_alone(0, 7)
    table.begin(1, 0, 4)
    assert not table.has_alone(0, 3) and table.has_alone(0, 4) and table.has_alone(0, 8)
    assert table.begin(0, 0, 6) == [None], "what a slot has alone is not copied"


def test_pinned_pages_are_not_given_away_until_the_round_is_over(table):
    table.hold(0, 7)
    assert table.pin(0, 5) == [0, 1]
    table.keep(0, 0)
    assert table.num_free(0) == 3
    table.hold(1, 12)
    assert rows(table)[1] == [2, 3, 4]
    table.end_round()
    assert table.num_free(0) == 2


def test_slots_get_pages_of_their_row_shard_in_order_as_they_need_them(table):
    assert (table.missing(1, 9), table.missing(1, 0)) == (3, 0)
    table.hold(1, 5)
    table.hold(3, 1)
    table.hold(1, 9)
    assert rows(table) == [[0, 0, 0], [0, 1, 2], [0, 0, 0], [5, 5, 5], [5, 5, 5], [5, 5, 5]]
    assert table.missing(1, 12) == 0 and table.missing(1, 13) == 1
    assert (table.num_held(1), table.num_free(0), table.num_free(1)) == (3, 2, 4)
    table.keep(1, 4)
    assert (table.num_held(1), table.num_free(0)) == (1, 4)
    table.keep(1, 8)
    assert table.num_held(1) == 1, "keeping more than there is gives nothing"


def test_whole_pages_are_shared_and_the_page_behind_them_is_copied(table):
    table.hold(0, 10)
    assert table.begin(1, 0, 8) == [None]
    assert rows(table)[1] == [0, 1, 0]
    assert table.begin(2, 0, 6) == [PageCopy(source=1, target=3)]
    assert rows(table)[2] == [0, 3, 0]
    assert table.holders()[0] == [3, 3, 1, 1, 0], "the copied page is held for the round"
    table.end_round()
    assert table.holders()[0] == [3, 2, 1, 1, 0]
    # The pages go when the last of those that share them goes.
    table.keep(0, 0)
    assert table.holders()[0] == [2, 1, 0, 1, 0]
    table.keep(1, 0)
    table.keep(2, 0)
    assert table.num_free(0) == 5


def test_a_page_that_is_filled_in_the_same_round_is_copied_from_its_origin(table):
    table.hold(0, 4)
    assert table.begin(1, 0, 3) == [PageCopy(source=0, target=1)]
    assert table.begin(2, 1, 2) == [PageCopy(source=0, target=2)]
    table.end_round()
    # Its own page is free by then.
    assert table.begin(0, 2, 1) == [PageCopy(source=2, target=0)]


def test_in_the_second_row_shard_numbers_are_those_of_the_whole_pool(table):
    table.hold(4, 4)
    assert table.begin(5, 4, 1) == [PageCopy(source=5, target=6)]
    assert rows(table, 1) == [[0], [0], [0], [5], [5], [6]]


def test_slot_reusing_its_own_prefix_copies_only_shared_pages(table):
    table.hold(0, 10)
    assert table.begin(0, 0, 6) == [None]
    assert (rows(table)[0], table.num_free(0)) == ([0, 1, 0], 3)
    assert table.begin(1, 0, 6) == [PageCopy(source=1, target=2)]
    assert table.begin(0, 0, 6) == [PageCopy(source=1, target=3)], "slot 1 copies it in this round"
    table.end_round()
    assert table.holders()[0] == [2, 0, 1, 1, 0]
    assert table.begin(0, 0, 0) == [None]
    assert table.num_held(0) == 0 and table.holders()[0] == [1, 0, 1, 0, 0]


def test_new_pages_come_behind_the_old_ones_of_each_shard(table):
    table.hold(0, 20)
    table.hold(3, 8)
    table, source = table.regroup(Pool(shards=2, pages=7))
    assert source.tolist() == [[0, 1, 2, 3, 4, -1, -1], [5, 6, 7, 8, 9, -1, -1]]
    assert rows(table, 5)[0] == [0, 1, 2, 3, 4] and rows(table, 5)[3][:2] == [7, 8]
    table.hold(1, 8)
    table.hold(4, 12)
    assert rows(table, 5)[1][:2] == [5, 6] and rows(table, 5)[4][:3] == [9, 10, 11]
    assert (table.num_free(0), table.num_free(1)) == (0, 2)


def test_whatever_happens_every_page_is_free_or_held_by_those_who_list_it():
    rng = random.Random(0)
    table = PageTable(Pool(shards=2, pages=40), num_slots=6, rule=PageRule(4))
    lengths = [0] * 6
    for _ in range(2000):
        slot = rng.randrange(6)
        shard = slot // 3
        what = rng.choice(["hold", "keep", "begin", "end_round"])
        if what == "hold":
            more = rng.randrange(9)
            if table.missing(slot, lengths[slot] + more) <= table.num_free(shard):
                lengths[slot] += more
                table.hold(slot, lengths[slot])
        elif what == "keep":
            lengths[slot] = rng.randint(0, lengths[slot])
            table.keep(slot, lengths[slot])
        elif what == "begin" and table.num_free(shard):
            source = shard * 3 + rng.randrange(3)
            lengths[slot] = rng.randint(0, lengths[source])
            table.begin(slot, source, lengths[slot])
        else:
            table.end_round()
        for number in range(6):
            assert table.num_held(number) >= pages_for(lengths[number], 4)
            assert table.capacity[number] == 4 * table.num_held(number)
    table.end_round()
    listed = [[0] * 40, [0] * 40]
    for slot, row in enumerate(rows(table, 40)):
        for page in row[: table.num_held(slot)]:
            assert page // 40 == slot // 3
            listed[slot // 3][page % 40] += 1
    assert listed == table.holders()
    assert [table.num_free(shard) for shard in (0, 1)] == [row.count(0) for row in listed]
