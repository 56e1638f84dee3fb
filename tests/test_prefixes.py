# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Prefixes shared from other slots' caches: by hand, and against comparing with every slot.

They have at least 4 tokens; by hand there are two shards of 3 slots.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_jax.engine.prefixes import PrefixIndex, Shared
from earl_jax.engine.prompt_tree import PromptTree

SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def index():
    """Slot 0 has read the system message and five tokens more; slots 3 to 5 are another shard."""
    index = PrefixIndex(num_slots=6, num_shards=2, least_tokens=4)
    prompt = [*SYSTEM, 20, 21, 22, 23, 24]
    assert index.find(0, prompt) == Shared(source=0, length=0)
    index.begin(0, prompt, Shared(source=0, length=0))
    index.append(0, len(prompt))
    return index


def test_slot_with_the_same_prompt_waits_for_the_one_that_prefills_it(index):
    prompt = [*SYSTEM, 30, 31, 32, 33, 34]
    index.begin(1, prompt, index.find(1, prompt))
    assert index.find(2, prompt) is None, "slot 1 is about to read four more"
    assert index.find(2, [*SYSTEM, 40]) == Shared(source=0, length=8), "not for nothing"
    index.append(1, 4)
    assert index.find(2, prompt) == Shared(source=1, length=12)


def test_a_wait_ends_though_the_prompt_that_ended_before_its_own_is_gone(index):
    prompt = [*SYSTEM, 30, 31, 32, 33, 34]
    index.begin(1, prompt, index.find(1, prompt))
    assert index.find(0, prompt[:-1]) is None
    assert index.find(2, prompt) is None
    assert index.find(0, [9, 9, 9, 9, 9]) == Shared(source=0, length=0)
    index.stop(1)
    assert index.find(2, prompt) == Shared(source=0, length=8)


def test_slots_of_a_row_shard_share_the_result_of_one_search(index):
    """Slots of a row shard share what one of them found, until something happens."""
    prompt = [*SYSTEM, 30, 31, 32, 33, 34]
    index.begin(1, prompt, index.find(1, prompt))
    assert index.find(2, prompt) is None and index.find(0, list(prompt)) is None
    assert index.find(3, list(prompt)) == Shared(source=3, length=0), "another shard"
    index.begin(3, prompt, Shared(source=3, length=0))
    assert index.find(4, list(prompt)) is None
    index.stop(1)
    assert index.find(0, list(prompt)) == Shared(source=0, length=8)
    assert index.find(5, list(prompt)) is None


class Slow:
    """The same by comparing a prompt with every slot's, token by token. At least 4."""

    def __init__(self):
        self.slots, self.beginning = [([], []) for _ in range(4)], set()

    def worth(self, theirs, prompt):
        same = 0
        while same < min(len(theirs), len(prompt) - 1) and theirs[same] == prompt[same]:
            same += 1
        return same if same >= 4 else 0

    def find(self, slot, prompt):
        self.slots[slot] = (self.slots[slot][0], [])
        have = [self.worth(cached, prompt) for cached, _ in self.slots]
        ahead = [
            self.worth(cached + coming, prompt) if coming else 0 for cached, coming in self.slots
        ]
        shard = [slot, *(other for other in (slot // 2 * 2, slot // 2 * 2 + 1) if other != slot)]
        source = max(shard, key=lambda other: have[other])
        if ahead[shard[1]] > have[source]:
            return None
        own = most = found = have[source]
        if len(prompt) - 1 - own < 2:
            return Shared(source=source, length=own)
        for other in sorted({0, 1, 2, 3} - set(shard)):
            most = max(most, have[other], ahead[other])
            if other not in self.beginning and have[other] > found and have[other] - own >= 2:
                source, found = other, have[other]
        if most > found and most - own >= 2:
            return None
        return Shared(source=source, length=found)


events = st.one_of(
    st.tuples(
        st.just("begin"), st.integers(0, 3), st.lists(st.integers(1, 2), min_size=1, max_size=14)
    ),
    st.tuples(st.just("again"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("append"), st.integers(0, 3), st.integers(0, 4)),
    st.tuples(st.sampled_from(["forget", "stop"]), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("end"), st.just(0), st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(events, max_size=25))
def test_a_random_history_finds_what_comparing_with_every_slot_finds(history):
    index = PrefixIndex(
        num_slots=4, num_shards=2, least_tokens=4, is_worth_sending=lambda tokens: tokens >= 2
    )
    slow, waiting = Slow(), {}
    for kind, slot, given_value in history:
        cached, coming = slow.slots[slot]
        if kind in ("begin", "again"):
            given_value = given_value or waiting.pop(slot, None)
            if given_value is None:
                continue
            found = index.find(slot, given_value)
            assert found == slow.find(slot, given_value)
            if found is None:
                waiting[slot] = given_value
            else:
                waiting.pop(slot, None)
                index.begin(slot, given_value, found)
                slow.slots[slot] = given_value[: found.length], given_value[found.length : -1]
                slow.beginning.add(slot)
        elif kind == "append":
            index.append(slot, given_value)
            slow.slots[slot] = cached + coming[:given_value], coming[given_value:]
        elif kind == "forget":
            index.forget(slot)
            slow.slots[slot] = [], []
        elif kind == "stop":
            index.stop(slot)
            slow.slots[slot] = cached, []
        else:
            index.end_inputs()
            slow.beginning.clear()
        assert [index.num_kept(slot) for slot in range(4)] == [len(c) for c, _ in slow.slots]


def test_a_slot_that_waits_compares_its_prompt_once(index, monkeypatch):
    prompt, added, add = [*SYSTEM, *range(30, 38)], [], PromptTree.add
    monkeypatch.setattr(PromptTree, "add", lambda tree, ids: added.append(ids) or add(tree, ids))
    index.begin(1, prompt, index.find(1, prompt))
    waiting = list(prompt)
    assert [index.find(2, waiting) for _ in range(3)] == [None] * 3
    index.append(1, 8)
    found = index.find(2, waiting)
    assert found == Shared(source=1, length=15)
    index.begin(2, waiting, found)
    assert [ids.tolist() for ids in added] == [prompt, prompt], "slot 1's, and slot 2's"
