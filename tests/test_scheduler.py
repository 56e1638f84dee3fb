# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rows and slots by hand: two data shards of three rows and two slots, unless noted."""

import dataclasses

import jax
import numpy as np
import pytest

from earl_jax.engine.row_copies import RowCopies, RowMove
from earl_jax.engine.rows import Rows, make_rows
from earl_jax.rollout.scheduler import SlotScheduler
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.trajectory import Experience

ROWS = Rows(data_shards=2, own=3, spare=2)


def test_rows_are_at_home_lane_by_lane_with_those_for_guests_behind():
    assert make_rows(num_rows=6, num_slots=4, num_devices=2) == ROWS
    assert ROWS.total == 10
    assert [ROWS.own_row(row) for row in range(6)] == [0, 1, 2, 5, 6, 7]
    assert [ROWS.spare_row(slot) for slot in range(4)] == [3, 4, 8, 9]
    assert make_rows(num_rows=6, num_slots=4, num_devices=1) == Rows(1, 6, 0)
    assert make_rows(num_rows=6, num_slots=4, num_devices=2, spare=False) == Rows(2, 3, 0)


@pytest.mark.parametrize(
    ("slots", "rows", "expected"),
    [(12, 48, Rows(4, 12, 3)), (16, 20, Rows(4, 5, 4)), (1, 48, Rows(1, 48, 0))],
)
def test_there_are_as_many_lanes_as_divide_devices_slots_and_rows(slots, rows, expected):
    assert make_rows(num_rows=rows, num_slots=slots, num_devices=8) == expected


def scheduler(groups, rows=ROWS, num_slots=4) -> SlotScheduler:
    return SlotScheduler(groups, rows=rows, num_slots=num_slots)


def test_a_lane_serves_its_own_rows_first_and_in_order():
    data_shards = scheduler(range(6))
    assert data_shards.assign([0, 1, 2, 3]) == {0: 0, 1: 1, 2: 3, 3: 4}
    assert data_shards.assign([1, 2]) == {1: 2, 2: 5}
    assert data_shards.num_waiting == 0 and data_shards.assign([0, 1, 2, 3]) == {}


def test_no_slot_stays_empty_while_a_row_waits():
    """Four rows, three at home in the first data shard: one takes the other's second slot."""
    assert scheduler(range(4)).assign([0, 1, 2, 3]) == {0: 0, 1: 1, 2: 3, 3: 2}
    # Of a longer queue the last, which would have waited longest.
    data_shards = scheduler(range(5))
    assert data_shards.assign([2]) == {2: 3} and data_shards.assign([2]) == {2: 4}
    assert data_shards.assign([2, 3]) == {2: 2, 3: 1}
    assert data_shards.num_waiting == 1


def test_without_rows_for_guests_and_where_a_lane_is_crowded_rows_wait_at_home():
    assert scheduler(range(3), Rows(2, 3, 0)).assign([0, 1, 2, 3]) == {0: 0, 1: 1}
    data_shards = scheduler(range(3))
    assert data_shards.assign([0, 1, 2, 3], crowded={2, 3}) == {0: 0, 1: 1}
    assert data_shards.assign([2, 3], crowded={0, 1}) == {2: 2}


def test_guests_go_where_their_group_has_begun():
    """Shards of four rows; rows 2 to 5 are one group, at home in the first two."""
    rows = Rows(data_shards=3, own=4, spare=2)
    data_shards = scheduler([0, 1, 2, 2, 2, 2, 3, 3], rows, num_slots=6)
    # Row 2 and not row 7, the last: the second data shard has begun its group.
    assert data_shards.assign([2]) == {2: 4} and data_shards.assign([2]) == {2: 5}
    assert data_shards.assign([2]) == {2: 6} and data_shards.assign([2]) == {2: 7}
    assert data_shards.assign([2]) == {2: 2}
    # The third data shard knows nobody: the last of the queue, which is of that group; the other
    # slot goes to nobody of the group, because none is left.
    assert data_shards.assign([4, 5]) == {4: 3, 5: 1}


def test_guests_that_know_no_lane_go_to_the_emptiest():
    rows = Rows(data_shards=3, own=4, spare=2)
    data_shards = scheduler(range(4), rows, num_slots=6)
    assert data_shards.assign([0, 3, 4, 5]) == {0: 0, 4: 3, 3: 2, 5: 1}


def experience(layout) -> Experience:
    """Ten rows of four places: row r holds 10 r + 1 to 10 r + 4, logprobs a tenth of it."""
    numbers = (10 * np.arange(10)[:, None] + np.arange(1, 5)[None, :]).astype(np.int32)
    where = layout.activations("NS")
    fields = dict.fromkeys(("tokens", "turn_ids", "versions"), numbers)
    logprobs = (-numbers / 10).astype(np.float32)
    return jax.device_put(
        Experience(logprobs=logprobs, **fields),
        Experience(tokens=where, turn_ids=where, logprobs=where, versions=where),
    )


@dataclasses.dataclass(frozen=True)
class State:
    experience: Experience


@pytest.mark.parametrize("mesh", [MeshShape(data=2), MeshShape(), MeshShape(data=2, tensor=2)])
def test_what_a_guest_wrote_comes_home_and_nothing_else_changes(mesh):
    """Slot 0's guest is at home in the second data shard, row 4; slot 3's in the first, row 2."""
    layout = make_layout(mesh)
    before = experience(layout)
    kept = jax.tree.map(np.array, before)
    copies = RowCopies(layout, jax.tree.map(lambda field: field.sharding, before), num_slots=4)
    moves = [
        RowMove(ROWS.spare_row(0), ROWS.own_row(4), 3),
        RowMove(ROWS.spare_row(3), ROWS.own_row(2), 4),
    ]
    after = copies.move_rows(State(before), moves).experience  # pyright: ignore
    home = copies.in_order(after, ROWS)
    for name in ("tokens", "turn_ids", "logprobs", "versions"):
        old, new = getattr(kept, name), np.array(getattr(after, name))
        expected = old.copy()
        expected[6], expected[2] = [*old[3, :3], 0], old[9]
        # The ids stay for whoever takes a prompt over; the rest must not be found by the next.
        if name != "tokens":
            expected[[3, 9]] = 0
        np.testing.assert_array_equal(new, expected)
        np.testing.assert_array_equal(getattr(home, name), expected[[0, 1, 2, 5, 6, 7]])


def test_rows_go_from_device_to_device_in_one_collective_and_none_is_needed_to_cut():
    layout = make_layout(MeshShape(data=2))
    state = experience(layout)
    copies = RowCopies(layout, jax.tree.map(lambda field: field.sharding, state), num_slots=4)
    moves = np.zeros((4, 3), np.int32)
    text = copies._move_rows.lower(state, moves).compile().as_text()
    assert text.count(" all-reduce(") == 1
    assert not any(name in text for name in ("all-gather(", "permute(", "all-to-all("))
    text = copies._in_order.lower(state, ROWS).compile().as_text()
    assert not any(name in text for name in ("all-reduce(", "all-gather(", "permute("))
