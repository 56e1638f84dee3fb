# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Episodes give up the pages behind windows of layers: by hand, at random, in rollouts.

Pages of 4 tokens unless it says otherwise.
"""

import dataclasses

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from earl_jax.engine.engine import Engine
from earl_jax.engine.pages import NO_SOURCE, PageCopy, PageTable, Pool
from earl_jax.engine.prefixes import PrefixIndex, Shared
from earl_jax.models.layer_groups import PageRule, group_layers, make_page_rule
from earl_jax.models.presets import PRESETS
from earl_jax.placement.problem import make_problem
from earl_jax.rollout.config import make_engine_config
from earl_jax.selector.hardware import parse_topology
from earl_jax.sharding.layout import make_abstract_layout
from tests.support.environments import Talker
from tests.support.episodes import (
    CONFIG,
    WINDOWED,
    GrowPool,
    assert_same_episodes,
    check_rows,
    collect,
    engine,
    tasks,
    weights,
)
from tests.support.problems import D4T2
from tests.support.settings import make_config

# A window of 6 tokens beside full attention, and up to 3 tokens a round: 9 tokens are kept.
RULE = PageRule(4, (0, 6), 3)


def test_a_group_has_as_many_layers_as_have_full_attention():
    assert group_layers((0, 0, 0)) == (((0, 1, 2),), (0,))
    assert group_layers((8, 8)) == (((0, 1),), (8,))
    # Three windows before each full layer: as OLMo 3. Of the last group of windows none is left.
    groups = group_layers((8, 8, 8, 0) * 2)
    assert groups.layers == ((3, 7), (0, 1), (2, 4), (5, 6)) and groups.windows == (0, 8, 8, 8)
    assert (groups.size, groups.place(7), groups.place(4)) == (2, (0, 1), (2, 1))
    # A group that is not full has an array of its pages empty.
    assert group_layers((8, 8, 8, 0, 0)).layers == ((3, 4), (0, 1), (2,))
    # With fewer windows than full layers none is: as many as divide both.
    assert group_layers((8, 0, 0, 8, 0, 0)).layers == ((1, 2), (4, 5), (0, 3))
    assert group_layers((8, 4, 0)).windows == (0, 4, 8)
    # 62 layers of which 10 have full attention: seven groups of ten, the last of two.
    gemma = group_layers(PRESETS["gemma3-27b"].layer_windows)
    assert [*map(len, gemma.layers)] == [10, 10, 10, 10, 10, 10, 2]
    assert gemma.windows == (0, *[1024] * 6)


def test_pages_of_an_episode_by_hand():
    # At 21 tokens all before 12 is needed no more: 21 - 3 - 6, of which three pages are whole.
    assert [RULE.num_gone(tokens)[1] for tokens in (0, 9, 12, 13, 17, 21)] == [0, 0, 0, 1, 2, 3]
    assert RULE.num_gone(1000)[0] == 0
    # 9 tokens are in up to four pages: the last of one, two whole ones and the first of another.
    assert [RULE.most_pages(tokens) for tokens in (0, 1, 8, 16, 17, 100)] == [0, 2, 4, 8, 9, 29]
    for tokens in range(200):
        held = sum(-(-tokens // 4) - gone for gone in RULE.num_gone(tokens))
        assert held <= RULE.most_pages(tokens)
    assert [RULE.most_tokens(pages) for pages in (1, 2, 8, 9, 29)] == [0, 4, 16, 20, 100]
    assert PageRule(4).most_tokens(7) == 28
    # Two episodes of 10 tokens: 3 pages each and group on the average; of 100 tokens 25.5 and 4.
    assert RULE.pages_of(20, 2) == 12 and RULE.pages_of(200, 2) == 2 * (25.5 + 4)
    for tokens in (1, 20, 200):
        number = RULE.pages_of(tokens, 2)
        assert tokens <= RULE.tokens_in(int(np.ceil(number)), 2)
        assert RULE.pages_of(RULE.tokens_in(int(number), 2), 2) <= number
    assert PageRule(4).tokens_in(10, 3) == 10 * 4 - 3 * 2
    assert make_page_rule((6, 0), 4, 1, 1) == RULE


def test_long_episodes_of_published_models_take_a_fraction_of_their_pages():
    """As chips have them, 131,072 tokens in pages of 128, beside those of every layer."""
    shares = {}
    for name in ("gemma3-27b", "olmo3-32b", "gemma2-27b", "qwen2.5-7b"):
        windows = PRESETS[name].layer_windows
        rule = make_page_rule(windows, 128, 512, 16)
        size = group_layers(windows).size
        shares[name] = rule.most_pages(131_072) * size / (1024 * len(windows))
    # A sixth of the layers, a quarter, a half, and all; and what the windows keep.
    expected = {"gemma3-27b": 0.174, "olmo3-32b": 0.278, "gemma2-27b": 0.518, "qwen2.5-7b": 1.0}
    assert shares == pytest.approx(expected, abs=1e-3)


@pytest.fixture
def table():
    return PageTable(Pool(shards=1, pages=20), num_slots=3, rule=RULE)


def held(table: PageTable, slot: int) -> list[list[int]]:
    """The slot's pages by group, without those that are gone."""
    wide, gone = table.as_array(20)[slot], table.num_gone(slot)
    total = table.num_held(slot) + sum(gone)
    length = total // len(gone)
    return [row[first:length].tolist() for row, first in zip(wide, gone, strict=True)]


def test_trimmed_slots_keep_what_their_windows_need(table):
    table.hold(0, 17)
    assert held(table, 0) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] and table.num_free(0) == 10
    assert table.least_shared[0] == 0
    table.trim(0)
    # 17 tokens: the first two pages of the window's group are needed no more.
    assert held(table, 0) == [[0, 1, 2, 3, 4], [7, 8, 9]] and table.num_free(0) == 12
    assert (table.num_held(0), table.num_gone(0)) == (8, [0, 2])
    # Whoever begins with 13 tokens reads those from 8 on; with 12, one before.
    assert table.least_shared[0] == 13
    assert table.pages_of(0, 13) == [0, 1, 2, 7, 3, 8]
    # A round that adds 3 tokens needs two new pages; at 24 it gives up one more.
    assert (table.missing(0, 20), table.missing(0, 21)) == (0, 2)
    assert table.needed(0, 21) == 2 and table.needed(0, 41) == 6 + 3, "five that it would give up"
    table.trim(0, 25)
    assert table.num_gone(0) == [0, 4] and table.num_free(0) == 14
    table.keep(0, 0)
    assert table.num_free(0) == 20 and table.least_shared[0] == 0


def test_a_new_episode_that_comes_to_many_tokens_never_needs_more_than_the_rule_says(table):
    for tokens in range(3, 33, 3):
        before = table.num_held(0)
        table.trim(0, tokens)
        assert table.missing(0, tokens) <= table.num_free(0)
        table.hold(0, tokens)
        assert table.num_held(0) <= RULE.most_pages(tokens), (tokens, before)
    assert table.needed(1, 1000) == 250 + 3, "all of the full group, and what the window keeps"


def test_another_slot_begins_with_what_is_left_of_a_trimmed_one(table):
    table.hold(0, 17)
    table.trim(0)
    assert table.begin(1, 0, 14) == [PageCopy(source=3, target=6), PageCopy(source=8, target=5)]
    assert held(table, 1) == [[0, 1, 2, 6], [7, 5]] and table.num_gone(1) == [0, 2]
    assert table.least_shared[1] == 13
    table.end_round()
    with pytest.raises(AssertionError, match="gone"):
        table.begin(2, 0, 12)
    # What comes back from elsewhere has pages but for those that it left. If it has given up one
    # since, that is written to its last page, before what belongs there.
    table.skip(2, [0, 2])
    assert table.missing(2, 14) == 4 + 2
    table.hold(2, 14)
    pages = table.pages_of(2, 14)
    assert len(pages) == len(table.pages_of(0, 14)) == 6
    assert table.pages_again(2, 14, [0, 2]) == pages
    table.trim(2, 21)
    assert table.pages_again(2, 14, [0, 2]) == [*pages[:3], pages[5], *pages[4:]]


def test_a_slot_that_gave_up_its_first_pages_still_shares_later_ones():
    """Slot 1 has the pages of slot 0 up to 40 tokens, without the first, which it has given up."""
    table = PageTable(Pool(shards=1, pages=40), num_slots=3, rule=PageRule(2, (4,), 21))
    table.hold(0, 44)
    table.begin(1, 0, 40)
    table.hold(1, 60)
    table.trim(1, 60)
    assert table.num_gone(1) == [17] and table.holders()[0][16:20] == [1, 2, 2, 2]
    assert not table.has_alone(0, 24) and table.has_alone(0, 40)


def test_prompts_are_not_found_in_slots_that_gave_up_their_pages(table):
    prompt = list(range(100, 130))
    index = PrefixIndex(num_slots=3, num_shards=1, least_tokens=2, least_shared=table.least_shared)
    index.begin(0, prompt[:18], Shared(source=0, length=0))
    index.append(0, 17)
    table.hold(0, 17)
    assert index.find(1, prompt) == Shared(source=0, length=17)
    table.trim(0)
    assert index.find(1, prompt) == Shared(source=0, length=17), "13 tokens at least"
    assert index.find(2, [*prompt[:12], 7, 7]) == Shared(source=2, length=0)
    assert index.num_kept(0) == 17 and index.common(1, prompt[:13]) == (0, 0)
    table.trim(0, 40)
    assert index.find(1, prompt) == Shared(source=1, length=0)
    assert index.num_kept(0) == 0 and not len(index.ids(0))


THREE_GROUPS = PageRule(4, (0, 5, 9), 3)
NUM_SLOTS = 12


class Slots:
    """Twelve slots of three groups of layers, and the contents of their pages.

    A page's contents are what was put there first, while it is held.
    """

    def __init__(self) -> None:
        self.table = PageTable(Pool(2, 60), num_slots=NUM_SLOTS, rule=THREE_GROUPS)
        self.contents = np.zeros(self.table.pool.total, np.int64)
        self.tokens, self.written = [0] * NUM_SLOTS, 0

    def pages(self, slot: int) -> list[list[int]]:
        """The slot's pages by group, without those that are gone."""
        gone = self.table.num_gone(slot)
        number = (self.table.num_held(slot) + sum(gone)) // len(gone)
        wide = self.table.as_array(60)[slot]
        return [row[first:number].tolist() for row, first in zip(wide, gone, strict=True)]

    def read(self) -> list[list[list[int]]]:
        return [[self.contents[o].tolist() for o in self.pages(s)] for s in range(NUM_SLOTS)]

    def grow(self, slot: int, other: int, number: int) -> None:
        """Plays rounds of up to three tokens, as far as there are pages for three."""
        for _ in range(number):
            more = self.tokens[slot] + 3
            self.table.trim(slot, more)
            if self.table.missing(slot, more) > self.table.num_free(self.table.shard(slot)):
                break
            self.table.hold(slot, more)
            self.tokens[slot] = more - other % 3

    def trim(self, slot: int, other: int, number: int) -> None:
        self.table.trim(slot)

    def keep(self, slot: int, other: int, number: int, how: str = "keep") -> None:
        number = number if number >= self.table.least_shared[slot] else 0
        self.tokens[slot] = min(self.tokens[slot], number)
        getattr(self.table, how)(slot, self.tokens[slot])

    def end(self, slot: int, other: int, number: int) -> None:
        self.keep(slot, other, number, "end")

    def begin(self, slot: int, other: int, number: int) -> None:
        """Takes over whole pages of another slot: none is copied."""
        number = min(self.tokens[other], number) // 4 * 4
        same = self.table.shard(other) == self.table.shard(slot)
        if same and number >= self.table.least_shared[other]:
            self.table.begin(slot, other, number)
            self.table.end_round()
            self.tokens[slot] = number

    def away(self, slot: int, other: int, number: int) -> None:
        """Gives up its pages, and gets as many others for the same tokens, if there are any."""
        table, before = self.table, len(self.table.pages_of(slot, self.tokens[slot]))
        table.skip(slot, table.num_gone(slot))
        assert table.num_held(slot) == 0
        self.contents[self.counted() == 0] = 0
        if table.missing(slot, self.tokens[slot]) > table.num_free(table.shard(slot)):
            table.keep(slot, 0)
            self.tokens[slot] = 0
        else:
            table.hold(slot, self.tokens[slot])
            assert len(table.pages_of(slot, self.tokens[slot])) == before

    def regroup(self, slot: int, other: int, number: int) -> None:
        shards = (1, 2, 3, 4, 6, 12)[other % 6]
        before, gone = self.read(), [self.table.num_gone(s) for s in range(NUM_SLOTS)]
        idle = self.table._idle
        least = self.table.least_pages(shards)
        if self.table.pool.shards % shards == 0:
            assert least <= self.table.pool.total // shards, "merging needs no more"
        pool = Pool(shards, max(least, 1) + number % 3)
        self.table, source = self.table.regroup(pool)
        self.contents = np.where(source == NO_SOURCE, 0, self.contents[source]).reshape(-1)
        for each, found in enumerate(self.read()):
            if not self.table.num_held(each) and any(before[each]):
                assert each in idle
                self.tokens[each] = 0
                continue
            # What is left is the end of what there was.
            gone_now = self.table.num_gone(each)
            for now, then, more, less in zip(
                found, before[each], gone_now, gone[each], strict=True
            ):
                assert now == then[more - less :]

    def counted(self) -> np.ndarray:
        """Returns the number of slots that list each page."""
        counted = np.zeros(self.table.pool.total, int)
        for slot in range(NUM_SLOTS):
            np.add.at(counted, [page for own in self.pages(slot) for page in own], 1)
        return counted

    def check(self, slot: int) -> None:
        """All that windows read is there, each page is held as often as it is listed, or free."""
        for each, tokens in enumerate(self.tokens):
            pages = {page for own in self.pages(each) for page in own}
            assert {page // self.table.pool.pages for page in pages} <= {self.table.shard(each)}
            needed = zip(self.table.num_gone(each), THREE_GROUPS.windows, strict=True)
            for gone, window in needed:
                assert gone * 4 <= (max(0, tokens - window + 1) if window else 0)
        counted, pool = self.counted(), self.table.pool
        assert counted.reshape(pool).tolist() == self.table.holders()
        free = [self.table.num_free(shard) for shard in range(pool.shards)]
        assert free == (counted.reshape(pool) == 0).sum(1).tolist()
        self.contents[counted == 0] = 0
        for page in [page for own in self.pages(slot) for page in own]:
            if counted[page] == 1 and not self.contents[page]:
                self.written += 1
                self.contents[page] = self.written


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "trim", "keep", "begin", "end", "away", "regroup"]),
        st.integers(0, NUM_SLOTS - 1),
        st.integers(0, NUM_SLOTS - 1),
        st.integers(0, 20),
    ),
    max_size=40,
)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(STEPS)
def test_whatever_happens_slots_keep_what_they_need(steps):
    """A step names a slot, another (or a number of shards), and tokens."""
    slots = Slots()
    for what, slot, other, number in steps:
        getattr(slots, what)(slot, other, number)
        slots.check(slot)


# In rollouts: a window of 4 tokens, and 8 + 4 are kept beside it.


class Long(Talker):
    """Three turns, behind words that are longer than a window and what is kept beside it."""

    def __init__(self, task):
        super().__init__(task.args["seed"])
        self.text = "012345678" * 2 + "8" * (1 + 7 * task.episode % 17)

    def start(self):
        return dataclasses.replace(super().start(), text=self.text)


def play(pool, number=44, **settings):
    given = {"max_tokens": 64, "context_buckets": (64,), "page_size": 2}
    player = small_pages()
    services = []
    rollout = collect(
        pool, tasks(number), Long, player=player, params=weights(model=WINDOWED),
        services=services, **given, **settings,
    )  # fmt: skip
    check_rows(rollout, number)
    return rollout, services[0]


def small_pages() -> Engine:
    made = engine(model=WINDOWED)
    return Engine(dataclasses.replace(made.config, page_size=2), made.layout)


@pytest.mark.slow_except("host")
@pytest.mark.parametrize("preemption", ["host", "recompute"])
def test_episodes_play_alike_in_a_pool_that_holds_one_of_them_by_its_windows(pool, preemption):
    """Two slots a row shard, whose pages for 64 tokens in all layers would be three times 32."""
    rule = small_pages().config.page_rule
    most = rule.most_pages(64)
    assert most == 32 + 2 * (9 + 1) < 3 * 32
    whole, _ = play(pool, share_prefixes=True)
    assert whole.stats.preempted_episodes == 0
    few, service = play(
        pool, pages=most, grow=GrowPool(most_pages=most), preemption=preemption,
        share_prefixes=True,
    )  # fmt: skip
    assert service.session.pool.pages == most
    assert few.stats.preempted_episodes > 0
    assert (few.stats.preempted_host_bytes > 0) == (preemption == "host")
    assert_same_episodes(whole.trajectories, few.trajectories)
    for slot in range(CONFIG.num_slots):
        assert service.session.pages.num_held(slot) <= most
    assert whole.stats.context_tokens_max > 30, "longer than what windows keep"


def test_planner_and_engine_count_the_same_pages():
    """Five pages for 2 + 2 x 4 + 1 tokens beside a window of 6, on meshes that cut them too."""
    given = {
        "model": {"num_layers": 4, "windows": (6, 0), "num_heads": 4, "num_kv_heads": 4},
        "rollout": {"chunk_size": 2, "burst": 2, "num_draft_tokens": 3, "page_size": 4},
    }
    config = make_config(given)
    problem = make_problem(config, config.model, 64, parse_topology("cpu:8"), budget_bytes=None)
    made = make_engine_config(
        config.rollout, config.model, 64, num_devices=8, seed=0, model_logprobs=False
    )
    assert made.page_rule == problem.page_rule == PageRule(4, (0, 6), 2 + 2 * 4 + 1)
    assert problem.least_pages(400) == 100 + (5 + 1)
    shapes = Engine(made, make_abstract_layout(D4T2)).state_shapes(8, Pool(4, 10)).cache.pools
    page = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)) // 40
    assert len(shapes) == 2 and problem.page_bytes(D4T2) == page // 2
