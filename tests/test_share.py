# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The shares of processes: each episode once, groups whole, as slots are free."""

import dataclasses
import json
import random

import numpy as np
import pytest

from earl_jax.launch.cluster import Cluster
from earl_jax.launch.presence import Presence
from earl_jax.rollout.config import RolloutConfig
from earl_jax.rollout.event_files import events_file
from earl_jax.rollout.events import Events
from earl_jax.rollout.gather import row_order
from earl_jax.rollout.load import grow_in_slots
from earl_jax.rollout.results import RowOrder
from earl_jax.rollout.share import Share, share_of
from earl_jax.rollout.task import Task
from earl_jax.telemetry.metrics import mean_gap


@dataclasses.dataclass(frozen=True)
class Device:
    process_index: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Here(Cluster):
    """A process of several that are all here, with the counters of one presence."""

    counters: Presence
    number: int = 1

    def new_counter(self) -> int:
        return self.number

    def add_to(self, counter: int, number: int, what: str) -> int:
        return self.counters.count(counter, number)


def processes(players: int, others: int = 0, number: int = 1) -> list[Here]:
    """The processes of a run of which some play, and others train."""
    devices = tuple(Device(process) for process in range(players + others))
    counters = Presence("127.0.0.1")
    return [
        Here(
            index=index,
            count=len(devices),
            rollout_devices=devices[:players],
            train_devices=devices,
            timeout_s=1.0,
            counters=counters,
            number=number,
        )
        for index in range(len(devices))
    ]


def tasks(*groups: int) -> list[Task]:
    """Groups of so many tasks each."""
    of_each = [group for group, size in enumerate(groups) for _ in range(size)]
    return [Task(episode=40 + i, group=90 + group) for i, group in enumerate(of_each)]


def test_processes_begin_with_their_own_groups_and_take_those_that_are_left():
    """Groups 0 1 | 2 3 | 4 5 and 6 7 | 8 9 | 10 11, two slots and rows for twelve each."""
    one, other = (share_of(tasks(*[2] * 6), cluster, 2, 12) for cluster in processes(2))
    assert (one.numbers, other.numbers, one.is_fixed) == ([0, 1], [6, 7], False)
    assert other.take(0) == []
    # A slot needs a group, and so do two.
    assert other.take(1) == [2, 3]
    assert one.take(2) == [4, 5]
    assert other.take(3) == [8, 9, 10, 11]
    assert (one.take(2), other.take(2)) == ([], [])
    assert (one.numbers, other.numbers) == ([0, 1, 4, 5], [6, 7, 2, 3, 8, 9, 10, 11])


def test_a_replay_takes_the_groups_of_then_whoever_asks_first(tmp_path):
    """As above, where the other one asked first; here the first one does."""

    def shares(events):
        of_each = zip(processes(2), events, strict=True)
        return [share_of(tasks(*[2] * 6), cluster, 2, 12, noted) for cluster, noted in of_each]

    paths = [events_file(tmp_path, process) for process in (0, 1)]
    written = [Events(path) for path in paths]
    one, other = shares(written)
    assert (other.take(1), one.take(2), other.take(3)) == ([2, 3], [4, 5], [8, 9, 10, 11])
    for each in written:
        each.sync()
    noted = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    one, other = shares([Events(replayed=each) for each in noted])
    assert (one.take(2), other.take(1), other.take(3)) == ([4, 5], [2, 3], [8, 9, 10, 11])


def test_the_more_groups_are_left_the_more_a_process_takes():
    """Groups of one; 20 are in the queue. A process takes a quarter of what it knows to be left."""
    one, other = (share_of(tasks(*[1] * 22), cluster, 1, 22) for cluster in processes(2))
    taken = [len(share.take(1)) for share in (one, one, other, one, other)]
    # 20 // 4; 15 // 4; the other one knows of 20; then they know of 12 and 7.
    assert taken == [5, 3, 5, 3, 1]
    assert [len(share.take(1)) for share in (one, one, other, other)] == [1, 1, 1, 0]


def test_a_process_takes_no_more_than_it_has_rows_for():
    """Rows for six tasks, of which it has one: two groups of two fit, and half of a third."""
    small = Share([0], processes(1)[0], [[1, 2], [3, 4], [5, 6]], most=6)
    assert (small.take(9), small.take(9)) == ([1, 2, 3, 4], [])


@pytest.mark.parametrize(
    ("groups", "num_slots", "num_rows"),
    [
        ((1,) * 16, 8, 16),  # all have a slot
        ((8, 8), 4, 8),  # rows for one part alone
        ((8,), 2, 8),  # a group is more than a part
        ((), 2, 8),
    ],
)
def test_parts_are_fixed_where_there_is_nothing_to_share_out(groups, num_slots, num_rows):
    todo = tasks(*groups)
    shares = [share_of(todo, cluster, num_slots, num_rows) for cluster in processes(2, others=1)]
    assert all(share.is_fixed and share.take(9) == [] for share in shares)
    half = len(todo) // 2
    assert [share.numbers for share in shares] == [
        list(range(half)),
        list(range(half, 2 * half)),
        [],
    ]


def test_only_more_episodes_than_slots_of_several_processes_make_a_queue():
    config = RolloutConfig(num_slots=16, episodes_per_step=32, group_size=8, order="queue")
    assert config.has_queue(2) and config.has_queue(4)
    assert not config.has_queue(1) and not config.has_queue(8), "a part is no less than a group"
    assert not dataclasses.replace(config, order="fifo").has_queue(2)
    assert not dataclasses.replace(config, num_slots=32).has_queue(2)


@pytest.mark.parametrize("seed", range(40))
def test_every_task_is_played_once_whoever_is_slow(seed):
    rng = random.Random(seed)
    players, size = rng.choice((2, 3, 4, 7)), rng.choice((1, 2, 5))
    num_slots = rng.randint(1, 9)
    part = size * rng.randint(1, 12)
    # Rows for a step; a batch of an evaluation may have fewer, in groups of any size.
    groups = [rng.randint(1, size) for _ in range(rng.randint(1, players * part // size))]
    todo = tasks(*groups)
    every = processes(players, others=1, number=seed + 1)
    shares = [share_of(todo, cluster, num_slots, 2 * part) for cluster in every]
    assert len({share.is_fixed for share in shares}) == 1
    # Some never come to take more, until the others have no rows left.
    patient = [index for index in range(players) if rng.random() < 0.4]
    for order in ([i for i in range(players) if i not in patient], patient):
        going = list(order)
        while going:
            index = rng.choice(going)
            if not shares[index].take(rng.randint(1, num_slots)):
                going.remove(index)
    assert shares[-1].numbers == [], "it trains"
    played = [share.numbers for share in shares]
    assert sorted(number for numbers in played for number in numbers) == list(range(len(todo)))
    assert max(map(len, played)) <= 2 * part
    if not shares[0].is_fixed:
        owners = [{todo[number].group for number in numbers} for numbers in played]
        assert sum(map(len, owners)) == len(groups), "groups are whole"


def test_a_rollout_that_is_given_up_leaves_nothing_to_take():
    one, other = (share_of(tasks(*[1] * 12), cluster, 2, 12) for cluster in processes(2))
    one.close()
    assert other.take(2) == []
    one.close()
    assert (one.numbers, other.numbers) == ([0, 1], [6, 7])


# What is known of the rollout behind it.


def test_the_rows_of_all_processes_in_the_order_of_the_tasks():
    # Two processes have parts of two: a process that plays three has rows for two parts.
    assert row_order([[0, 2, 3], [1]]) == RowOrder(4, (0, 4, 1, 2))
    assert row_order([[1, 2], [0, 3]]) == RowOrder(2, (2, 0, 1, 3))
    assert row_order([[], [0, 1]]) == RowOrder(2, (2, 3))
    with pytest.raises(AssertionError, match="played twice"):
        row_order([[0, 1], [1]])


def test_episodes_that_grow_alike_in_slots():
    # At 2 the first ends and the third begins; at 4 the second has 4 tokens and the third 2.
    assert grow_in_slots([2, 4, 3], 2) == (6, 5)
    assert grow_in_slots([2, 4, 3], 1) == (4, 9)
    # All at once: when the shortest ends all have 2, then the others 3, then one 4.
    assert grow_in_slots([2, 4, 3], 3) == (6, 4)
    assert grow_in_slots([], 3) == (0, 0)


def test_the_mean_of_gaps_has_the_same_bits_in_any_order():
    rng = np.random.default_rng(0)
    gaps = [(float(gap), 3) for gap in rng.normal(size=200) * 10.0 ** rng.integers(-9, 9, 200)]
    assert len({mean_gap(rng.permutation(gaps).tolist()) for _ in range(20)}) == 1
    assert mean_gap([(3.0, 2), (0.0, 0), (1.0, 2)]) == 1.0
    assert mean_gap([(0.0, 0)]) is None
