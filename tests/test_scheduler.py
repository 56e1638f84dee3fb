# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rows and slots by hand: two data shards of three rows and two slots, unless noted."""

import dataclasses
import zlib

import jax
import numpy as np
import pytest

from earl_jax.engine.row_copies import RowCopies, RowMove
from earl_jax.engine.rows import NO_ROW, Rows, make_rows
from earl_jax.envs.environment import Start, StepResult
from earl_jax.rollout.row_pool import Finished, RowPool
from earl_jax.rollout.scheduler import Lengths, SlotScheduler, next_lengths
from earl_jax.rollout.task import Task
from earl_jax.rollout.tasks import with_lengths
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.trajectory import Experience, Outcome, Trajectory, Turn
from tests.support.episodes import assert_same_episodes, collect
from tests.support.trajectories import make_outcome

ROWS = Rows(data_shards=2, own=3, spare=2)


def test_rows_are_divided_by_data_shard_with_spare_rows_last():
    assert make_rows(num_rows=6, num_slots=4, num_devices=2) == ROWS
    assert (ROWS.total, ROWS.batch_size) == (10, 6)
    assert [ROWS.own_row(task) for task in range(8)] == [0, 1, 2, 5, 6, 7, 0, 1]
    assert [ROWS.own_shard(task) for task in range(8)] == [0, 0, 0, 1, 1, 1, 0, 0]
    assert [*ROWS.of_shard(1)] == [5, 6, 7, 8, 9]
    assert make_rows(num_rows=6, num_slots=4, num_devices=1) == Rows(1, 6, 0)


def test_each_batch_has_rows_of_its_own_in_the_data_shards_of_its_tasks():
    rows = make_rows(num_rows=6, num_slots=4, num_devices=2, batches=2)
    assert rows == Rows(2, 3, 2, batches=2) and (rows.total, rows.batch_size) == (16, 6)
    assert [rows.own_row(task) for task in range(6)] == [0, 1, 2, 8, 9, 10]
    assert [rows.own_row(task) for task in range(6, 14)] == [3, 4, 5, 11, 12, 13, 0, 1]
    assert [rows.own_shard(task) for task in range(6, 14)] == [0, 0, 0, 1, 1, 1, 0, 0]
    assert [*rows.of_shard(1)] == [8, 9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("slots", "rows", "expected"),
    [(12, 48, Rows(4, 12, 3)), (16, 20, Rows(4, 5, 4)), (1, 48, Rows(1, 48, 0))],
)
def test_number_of_data_shards_divides_devices_slots_and_rows(slots, rows, expected):
    assert make_rows(num_rows=rows, num_slots=slots, num_devices=8) == expected


def scheduler(groups, rows=ROWS, num_slots=4) -> SlotScheduler:
    made = SlotScheduler(rows, num_slots)
    for task, group in enumerate(groups):
        made.submit(task, group)
    return made


def test_data_shard_serves_its_own_rows_first_and_in_order():
    data_shards = scheduler(range(6))
    assert data_shards.assign([0, 1, 2, 3]) == {0: 0, 1: 1, 2: 3, 3: 4}
    assert data_shards.assign([1, 2]) == {1: 2, 2: 5}
    assert data_shards.num_waiting == 0 and data_shards.assign([0, 1, 2, 3]) == {}


def test_no_slot_stays_empty_while_a_row_waits():
    """Four rows, three of the first data shard: one takes the other's second slot."""
    assert scheduler(range(4)).assign([0, 1, 2, 3]) == {0: 0, 1: 1, 2: 3, 3: 2}
    # Of a longer queue the last, which would have waited longest.
    data_shards = scheduler(range(5))
    assert data_shards.assign([2]) == {2: 3} and data_shards.assign([2]) == {2: 4}
    assert data_shards.assign([2, 3]) == {2: 2, 3: 1}
    assert data_shards.num_waiting == 1


def test_tasks_wait_for_their_own_data_shard_where_others_are_crowded():
    data_shards = scheduler(range(3))
    assert data_shards.assign([0, 1, 2, 3], crowded={2, 3}) == {0: 0, 1: 1}
    assert data_shards.assign([2, 3], crowded={0, 1}) == {2: 2}


def test_tasks_go_to_a_data_shard_that_has_begun_their_group():
    """Shards of four rows; rows 2 to 5 are one group, of the first two."""
    rows = Rows(data_shards=3, own=4, spare=2)
    data_shards = scheduler([0, 1, 2, 2, 2, 2, 3, 3], rows, num_slots=6)
    # Row 2 and not row 7, the last: the second data shard has begun its group.
    assert data_shards.assign([2]) == {2: 4} and data_shards.assign([2]) == {2: 5}
    assert data_shards.assign([2]) == {2: 6} and data_shards.assign([2]) == {2: 7}
    assert data_shards.assign([2]) == {2: 2}
    # The third data shard has no group: it takes the last of the queue, which is of that group; the
    # other slot takes a task of no begun group, because none is left.
    assert data_shards.assign([4, 5]) == {4: 3, 5: 1}


def test_tasks_of_no_begun_group_go_to_the_emptiest_data_shard():
    rows = Rows(data_shards=3, own=4, spare=2)
    data_shards = scheduler(range(4), rows, num_slots=6)
    assert data_shards.assign([0, 3, 4, 5]) == {0: 0, 4: 3, 3: 2, 5: 1}


def test_a_task_begins_before_those_that_come_so_many_later():
    """Six tasks in a batch: the first shard's slots are busy, and tasks 0 and 1 wait for them."""
    tasks = scheduler(range(2))
    begun = []
    for task in range(2, 20):
        tasks.submit(task, task)
        # One slot of the second data shard is free each time; its own tasks go first.
        begun += tasks.assign([2]).values()
    assert sorted(begun) == list(range(18)), "two of them wait"
    late = [sum(other > task for other in begun[: begun.index(task)]) for task in range(18)]
    assert max(late) < ROWS.batch_size
    assert all(
        begun.index(task) < begun.index(later)
        for task in range(18)
        for later in range(task + ROWS.batch_size, 18)
    )


class Chapters:
    """Takes one reply, and five in the last of twelve groups."""

    def __init__(self, task):
        self.left = 5 if task.group == 11 else 1

    def start(self):
        return Start(text=f"{self.left}.")

    def step(self, reply: str):
        self.left -= 1
        if not self.left:
            return StepResult(text="", reward=1.0, done=True, stop_reason="end")
        return StepResult(text=".", reward=0.0, done=False)


@pytest.mark.slow
def test_the_order_changes_no_token_and_the_longest_do_not_begin_last(pool):
    """Eight shards of six tasks and two slots; the last task of every second takes five turns."""
    todo = [Task(episode=i, group=i % 12, args={"group": i % 12}) for i in range(48)]
    services = []
    fifo, longest = (
        collect(pool, todo, Chapters, services=services, order=order)
        for order in ("fifo", "longest")
    )
    assert_same_episodes(fifo.trajectories, longest.trajectories)
    rounds = [service.stats.rounds for service in services]
    assert rounds[1] < rounds[0], rounds


ONE_SHARD = Rows(data_shards=1, own=6, spare=0)


def longest(groups, rows=ONE_SHARD, num_slots=2) -> SlotScheduler:
    """Group-mates are next to each other; the kind of a task is its group."""
    made = SlotScheduler(rows, num_slots, "longest")
    for task, group in enumerate(groups):
        made.submit(task, group)
    return made


def test_one_of_each_group_begins_and_then_the_longest():
    tasks = longest([0, 0, 1, 1, 2, 2])
    assert tasks.assign([0, 1]) == {0: 0, 1: 2}
    # Group 1 has come to 9 tokens and plays on; of group 2 nothing is known.
    tasks.play({2: 9})
    tasks.end(0, 5)
    assert tasks.assign([0]) == {0: 4}
    tasks.play({2: 12, 4: 3})
    tasks.end(4, 3)
    assert tasks.assign([0]) == {0: 3}, "12 tokens or more, against 5 and 3"
    tasks.end(2, 20)
    tasks.end(3, 2)
    assert tasks.assign([0, 1]) == {0: 1, 1: 5}
    assert tasks.num_waiting == 0


def test_a_task_that_was_played_before_is_as_long_as_it_was_then():
    tasks = longest([0, 1, 2, 3, 4, 5], num_slots=1)
    for kind, task in enumerate(range(6, 9)):
        tasks.submit(task, task, kind)
    begun = []
    lengths = {0: 5, 1: 40, 2: 10}
    for _ in range(9):
        (task,) = tasks.assign([0]).values()
        begun.append(task)
        tasks.end(task, lengths.get(task, 1))
    # The first step is unknown; of the second the task that took 40 tokens goes first.
    assert begun == [0, 1, 2, 3, 4, 5, 7, 8, 6]


def test_kinds_of_which_no_task_ended_for_long_are_forgotten(monkeypatch):
    monkeypatch.setattr("earl_jax.rollout.scheduler._KINDS", 2)
    lengths = Lengths()
    for task, (kind, length) in enumerate([(1, 10), (2, 20), (1, 30), (3, 40)]):
        lengths.add(task, kind)
        lengths.end(task, length)
    # Kind 2 ended first of the three.
    assert [lengths.expected(kind) for kind in (1, 2, 3)] == [20.0, None, 40.0]


def ended(kind: int, num_tokens: int) -> Outcome:
    return make_outcome(num_tokens=num_tokens, kind=kind)


def test_a_run_keeps_the_last_lengths_of_the_tasks_that_were_played_last(monkeypatch):
    first = next_lengths("longest", {}, [ended(1, 10), ended(2, 20), ended(1, 14)])
    assert next_lengths("fifo", first, [ended(3, 7)]) == first
    assert first == {1: 12, 2: 20}
    monkeypatch.setattr("earl_jax.rollout.scheduler._KEPT", 3)
    second = next_lengths("longest", first, [ended(3, 7), ended(1, 40), ended(4, 5)])
    # Task 2 was played the longest ago.
    assert list(second.items()) == [(3, 7), (1, 40), (4, 5)]


def test_tasks_have_the_length_of_a_step_before_until_one_of_their_kind_has_ended():
    args = [{"number": i, "reward": ended} for i in range(3)]
    tasks = [Task(episode=i, group=i, args=given) for i, given in enumerate(args)]
    assert len({task.kind for task in tasks}) == 3
    # In another process the function has another address.
    assert tasks[0].kind == zlib.crc32(b"{'number': 0, 'reward': <function ended>}")
    tasks = with_lengths(tasks, {tasks[1].kind: 30, tasks[2].kind: 50})
    assert [task.length_before for task in tasks] == [None, 30, 50]
    slots = SlotScheduler(ONE_SHARD, 2, "longest")
    for ticket, task in enumerate(tasks):
        slots.submit(ticket, task.group, task.kind, task.length_before)
    assert slots.assign([0]) == {0: 0}, "nothing is known of the first"
    assert slots.assign([0, 1]) == {0: 2, 1: 1}
    lengths = Lengths()
    lengths.add(0, 7, 30)
    assert lengths.expected(7) == 30
    lengths.end(0, 10)
    # What has ended here says as much, and is not replaced.
    lengths.add(1, 7, 90)
    assert lengths.expected(7) == 20


def test_no_task_of_a_later_step_overtakes_however_long_it_is():
    """Six places: tasks 6 to 11 are of the next step, and known to be long."""
    tasks = longest([0] * 6, num_slots=1)
    for task in range(6, 12):
        tasks.submit(task, 1)
    tasks.play({})
    begun = []
    for _ in range(12):
        (task,) = tasks.assign([0]).values()
        begun.append(task)
        tasks.end(task, 100 if task > 5 else 1)
    assert begun == list(range(12))


def test_an_aborted_task_says_nothing_and_a_slot_is_lent_to_the_longest():
    """Two shards; the first has four tasks and the second none of its own."""
    tasks = longest([0, 0, 1, 2], ROWS, num_slots=4)
    tasks.remove(3)
    assert tasks.assign([0, 1]) == {0: 0, 1: 2}
    tasks.end(0)
    tasks.submit(4, 2)
    assert tasks.assign([2, 3]) == {2: 4, 3: 1}


def finished(ticket: int, row: int, tokens: int = 4) -> Finished:
    turn = Turn(author="environment", text="", token_ids=(7,) * tokens)
    trajectory = Trajectory(
        episode=ticket, group=0, role="", turns=(turn,), turn_rewards=(), stop_reason="win", row=row
    )
    return Finished(ticket=ticket, trajectory=trajectory)


def test_tasks_write_their_own_rows_and_those_of_other_data_shards_spare_ones():
    pool = RowPool(ROWS, 4, (lost := []).append)
    assert pool.offer([0, 1, 2, 3]) == [0, 1, 2, 3]
    assert [pool.take(0, 0), pool.take(1, 2), pool.take(2, 1)] == [0, 2, 9]
    assert pool.num_of_other_shards == 1 and not pool._moves
    # Task 6 has the place of task 0, whose row is written again: it is cleared.
    pool.hold(finished(0, 0))
    assert pool.is_held(0) and not pool.is_held(2) and not pool.is_held(-1)
    pool.release(0)
    assert pool.take(0, 6) == 0 and pool._moves == [RowMove(0, NO_ROW, 0)]
    assert lost == [0, 2, 9, 0]


def test_a_held_row_makes_way_where_a_shard_has_no_other():
    pool = RowPool(ROWS, 4, (lost := []).append)
    held = [finished(ticket, pool.take(0, ticket)) for ticket in range(5)]
    assert [each.row for each in held] == [0, 1, 2, 4, 3]
    assert pool.offer([0, 1, 2]) == [2], "nothing is held yet"
    for each in held:
        pool.hold(each)
    assert pool.offer([0, 1, 2]) == [0, 1, 2]
    assert pool.take(0, 5) == 0 and held[0].row == 9
    assert pool._moves == [RowMove(0, 9, 4), RowMove(0, NO_ROW, 0)]
    assert lost == [0, 1, 2, 4, 3, 9, 0]
    # With all others taken there is no row for one more.
    assert [pool.take(2, 3), pool.take(2, 4), pool.take(2, 5), pool.take(2, 0)] == [5, 6, 7, 8]
    assert pool.offer([0, 1, 2, 3]) == []


def experience(layout) -> Experience:
    """Ten rows of four tokens: row r holds 10 r + 1 to 10 r + 4, logprobs a tenth of it."""
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
def test_moved_rows_arrive_and_no_other_rows_change(mesh):
    """Row 3 has task 4, of the second data shard; row 9 has task 2, of the first."""
    layout = make_layout(mesh)
    before = experience(layout)
    kept = jax.tree.map(np.array, before)
    copies = RowCopies(layout, jax.tree.map(lambda field: field.sharding, before), num_slots=4)
    moves = [RowMove(3, ROWS.own_row(4), 3), RowMove(9, ROWS.own_row(2), 4)]
    after = copies.move_rows(State(before), moves).experience  # pyright: ignore
    gathered = copies.gather(after, [0, 9, 6, 2, 5])
    for name in ("tokens", "turn_ids", "logprobs", "versions"):
        old, new = getattr(kept, name), np.array(getattr(after, name))
        expected = old.copy()
        expected[6], expected[2] = [*old[3, :3], 0], old[9]
        expected[[3, 9]] = 0
        np.testing.assert_array_equal(new, expected)
        # Zeros in place of the row that the shards lack.
        expected[9] = 0
        padded = expected[[0, 9, 6, 2, 5, 9][: 5 + layout.num_row_shards - 1]]
        np.testing.assert_array_equal(getattr(gathered, name), padded)


def test_rows_go_from_device_to_device_in_one_collective_a_field_at_most():
    layout = make_layout(MeshShape(data=2))
    state = experience(layout)
    copies = RowCopies(layout, jax.tree.map(lambda field: field.sharding, state), num_slots=4)
    moves = np.zeros((4, 3), np.int32)
    text = copies._move_rows.lower(state, moves).compile().as_text()
    assert text.count(" all-reduce(") == 1
    assert not any(name in text for name in ("all-gather(", "permute(", "all-to-all("))
    text = copies._gather.lower(state, np.zeros(6, np.int32)).compile().as_text()
    assert text.count(" reduce-scatter(") + text.count(" all-reduce(") <= 4
    assert not any(name in text for name in ("all-gather(", "permute(", "all-to-all("))
