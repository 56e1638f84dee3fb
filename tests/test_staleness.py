# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Groups that a step takes: by hand, and in a simulation of runs of any shape."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_jax.rollout.staleness import AsynchronyConfig, Group, choose_groups, overdue
from earl_jax.settings.errors import InputError


def numbers(chosen):
    return chosen and [group.number for group in chosen]


def test_in_order_takes_the_oldest_tasks_when_all_of_them_are_over():
    groups = [Group(4, 0, 1), Group(5, 1, 0), Group(6, 1, None)]
    assert numbers(choose_groups("in_order", groups, 2, 1, 2)) == [4, 5]
    assert choose_groups("in_order", groups, 2, 1, 3) is None
    assert choose_groups("in_order", groups[1:], 2, 1, 2) is None
    assert choose_groups("in_order", groups[:1], 2, 1, 2) is None


@pytest.mark.parametrize("rule", ["admission", "mask", "drop"])
def test_the_first_that_finished_are_taken(rule):
    groups = [Group(4, 0, 7), Group(5, 1, 2), Group(6, 0, None), Group(7, 2, 5)]
    assert numbers(choose_groups(rule, groups, 2, 1, 2)) == [5, 7]
    assert choose_groups(rule, groups, 2, 1, 4) is None


def test_groups_that_would_be_too_old_later_are_waited_for():
    """Version 3, bound 1: what version 2 began must be in this batch, what 3 began in the next."""
    due = Group(0, 2, None)
    assert choose_groups("wait", [due, Group(1, 3, 0)], 3, 1, 1) is None
    assert numbers(choose_groups("wait", [due._replace(finished=9), Group(1, 3, 0)], 3, 1, 1)) == [
        0
    ]
    # Nothing is due now, but two are due by the next step, which can take one.
    later = [Group(0, 3, None), Group(1, 3, 4), Group(2, None, None)]
    assert numbers(choose_groups("wait", later, 3, 1, 1)) == [1]
    assert choose_groups("wait", [Group(0, 3, None), Group(1, 3, None)], 3, 1, 1) is None
    # Three are due by the next step, which can take two: the first that finished go now.
    three = [Group(0, 3, None), Group(1, 3, 4), Group(2, 3, 5)]
    assert numbers(choose_groups("wait", three, 3, 1, 2)) == [1, 2]


def test_groups_beyond_the_bound():
    groups = [Group(0, 2, 0), Group(1, 3, None), Group(2, None, None)]
    assert numbers(overdue(groups, 5, 2)) == [0]
    assert numbers(overdue(groups, 6, 2)) == [0, 1]
    assert overdue(groups, 4, 2) == []


class Simulation:
    """Groups of any length in so many slots, in rounds."""

    def __init__(self, rule, bound, size, slots, lengths):
        self.rule, self.bound, self.size, self.slots, self.lengths = (
            rule, bound, size, slots, lengths
        )  # fmt: skip
        self.waiting, self.live, self.over, self.lost = [], {}, {}, []
        self.oldest, self.submitted, self.num_over = {}, 0, 0

    def play(self, version):
        while self.waiting and len(self.live) < self.slots:
            number = self.waiting.pop(0)
            self.live[number] = self.lengths[number % len(self.lengths)]
        for number in sorted(self.live):
            self.oldest.setdefault(number, version)
            self.live[number] -= 1
            if not self.live[number]:
                del self.live[number]
                self.over[number], self.num_over = self.num_over, self.num_over + 1

    def groups(self):
        now = [*self.waiting, *self.live, *self.over]
        return [Group(n, self.oldest.get(n), self.over.get(n)) for n in now]

    def admit(self, version):
        if self.rule == "drop":
            finished = [group for group in self.groups() if group.finished is not None]
            for group in overdue(finished, version, self.bound):
                del self.over[group.number]
                self.lost.append(group.number)
        last = self.submitted + (self.bound + 1) * self.size - len(self.groups())
        last = last if self.rule == "drop" else min(last, NUM_STEPS * self.size)
        self.waiting += range(self.submitted, last)
        self.submitted = max(self.submitted, last)

    def batch(self, version):
        while True:
            self.admit(version)
            assert len(self.groups()) <= (self.bound + 1) * self.size
            chosen = choose_groups(self.rule, self.groups(), version, self.bound, self.size)
            if chosen is not None:
                for group in chosen:
                    del self.over[group.number]
                return numbers(chosen)
            assert self.waiting or self.live, "nothing plays, and no batch is there"
            self.play(version)


NUM_STEPS = 12


@given(
    rule=st.sampled_from(["in_order", "wait", "drop", "mask", "admission"]),
    bound=st.integers(0, 4),
    size=st.integers(1, 4),
    slots=st.integers(1, 12),
    rounds=st.integers(0, 9),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
@settings(max_examples=400, deadline=None)
def test_every_group_is_taken_once_within_the_bound(rule, bound, size, slots, rounds, lengths):
    """Ends with episodes of any lengths, and any number of rounds beside an update."""
    world, taken = Simulation(rule, bound, size, slots, lengths), []
    for version in range(NUM_STEPS):
        batch = world.batch(version)
        assert len(batch) == size
        if rule in ("in_order", "wait", "drop"):
            assert all(world.oldest[number] >= version - bound for number in batch)
        taken += batch
        for _ in range(rounds):
            world.play(version)
    everything = list(range(NUM_STEPS * size))
    if rule == "in_order":
        assert taken == everything
    assert len({*taken, *world.lost}) == len(taken) + len(world.lost)
    assert rule == "drop" or (sorted(taken) == everything and not world.lost)


def test_what_is_wrong_is_refused():
    with pytest.raises(InputError, match="max_staleness is -1; it must be at least 0"):
        AsynchronyConfig(max_staleness=-1).validate()
    with pytest.raises(InputError, match="config.asynchrony.rule is 'first'"):
        AsynchronyConfig(rule="first").validate()  # pyright: ignore[reportArgumentType]
