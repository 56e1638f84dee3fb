# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Episodes of a data shard read a shared prompt once, and then one token for each."""

import dataclasses
import functools

import numpy as np
import pytest

from earl_jax.engine.pages import Pool
from earl_jax.engine.session import open_session, vacate
from earl_jax.envs.environment import Start, StepResult
from earl_jax.sharding.layout import MeshShape
from tests.support.episodes import (
    CONFIG,
    assert_same_episodes,
    check_rows,
    collect,
    engine,
    renderer,
    tasks,
    weights,
)

SYSTEM = "0123456780123456780123456"
NUM_SLOTS = 4


class Question:
    """Says the system's words and its own, and takes any reply."""

    def __init__(self, words: str):
        self.words = words

    def start(self):
        return Start(text=SYSTEM + self.words, role="x")

    def step(self, reply: str):
        return StepResult(reward=1.0, done=True, stop_reason="win")


@functools.cache
def prompt(words: str) -> tuple[int, ...]:
    return renderer().first(SYSTEM + words)


def play(pool, todo, make, *, num_slots=NUM_SLOTS, **changes):
    """On one device, which is one data shard."""
    player = engine(num_slots, MeshShape())
    rollout = collect(
        pool, todo, make, num_slots=num_slots, player=player, num_devices=1,
        **{"share_prefixes": True, "max_tokens": 48, **changes},
    )  # fmt: skip
    check_rows(rollout, len(todo))
    assert {t.stop_reason for t in rollout.trajectories} == {"win"}
    return rollout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "words"), [(4, ""), (4, "7777"), (9, "7")], ids="28 32 waves".split()
)
def test_a_groups_prompt_is_read_once_and_each_other_episode_appends_one_token(pool, size, words):
    """However the prompt ends in a chunk; of nine episodes on four slots, in three waves."""
    length = len(prompt(words))
    assert length == 28 + len(words)
    todo = [
        dataclasses.replace(task, group=0, args={"seed": 0, "index": task.args["index"]})
        for task in tasks(size)
    ]
    rollout = play(pool, todo, lambda task: Question(words))
    assert rollout.stats.prefill_tokens == length + size - 1
    assert rollout.stats.shared_tokens == (size - 1) * (length - 1)
    alone = play(pool, todo, lambda task: Question(words), share_prefixes=False)
    assert alone.stats.prefill_tokens == size * length
    for one, same in zip(alone.trajectories, rollout.trajectories, strict=True):
        assert one == same, "to the last bit of each log-prob"


@pytest.mark.slow
def test_what_different_prompts_have_in_common_is_read_once_a_policy_version(pool):
    """One slot, so that episodes follow each other.

    The first has four rounds for its prompt of 29, the others one each for the three tokens that
    are their own.
    """

    def ask(task):
        return Question(str(task.episode))

    todo, own = tasks(8), 3
    common = len(prompt("0")) - own
    assert len({prompt(str(i))[:common] for i in range(8)}) == 1 and common == 26
    assert len({prompt(str(i))[common] for i in range(8)}) == 8
    once = play(pool, todo, ask, num_slots=1)
    assert once.stats.prefill_tokens == common + 8 * own


def test_another_rollout_of_the_same_weights_reads_a_prompt_no_more(pool):
    """Not even by the first episode of it; what is new of other prompts is read once."""
    length, size = len(prompt("7")), 4
    todo = [
        dataclasses.replace(task, group=0, args={"seed": 0, "index": task.args["index"]})
        for task in tasks(size)
    ]

    def ask(words, vacant=None, **changes):
        return play(pool, todo, lambda task: Question(words), vacant=vacant, **changes)

    first = ask("7")
    assert first.stats.prefill_tokens == length + size - 1
    kept = first.experience
    second = ask("7", vacate(first.session))
    assert second.stats.prefill_tokens == size
    assert second.stats.shared_tokens == size * (length - 1)
    assert second.trajectories == first.trajectories, "to the last bit of each log-prob"
    np.testing.assert_array_equal(kept.tokens, second.experience.tokens)
    third = ask("8", vacate(second.session))
    own = 3
    assert third.stats.prefill_tokens == own + size - 1
    assert third.trajectories == ask("8").trajectories
    # Other weights have read nothing of it.
    newer = ask("8", vacate(third.session), version=1, params=weights(1))
    assert newer.stats.prefill_tokens == length + size - 1
    # Longer rows keep the prompts; shorter ones keep nothing.
    left, policy = vacate(newer.session), newer.session.policy
    larger = open_session(left.engine, policy, 64, Pool(1, 4 * 8), left)
    assert larger.kept is left.kept and larger.state.experience.tokens.shape[1] == 64
    assert larger.pool.total == larger.state.cache.num_pages == 4 * 8
    assert open_session(left.engine, policy, 32, Pool(1, 4 * 8), left).kept is None


@pytest.mark.slow_except("on")
@pytest.mark.parametrize("copies", ["on", "off"])
def test_on_several_devices_it_is_once_too_or_once_for_each(pool, copies):
    """Eight data shards of two slots; six episodes belong to the first, two to the second.

    So four play in slots of other data shards: two in the third and two in the fourth. The first
    episode of each of these three waits for the prefill of the first data shard, or prefills too.
    """
    length, todo = (
        len(prompt("7")),
        [
            dataclasses.replace(t, group=0, args={"seed": 0, "index": t.args["index"]})
            for t in tasks(8)
        ],
    )

    def play(**changes):
        rollout = collect(
            pool, todo, lambda task: Question("7"), max_tokens=48,
            **{"share_prefixes": True, "copy_prefixes": copies, **changes},
        )  # fmt: skip
        check_rows(rollout, 8)
        return rollout

    rollout = play()
    assert CONFIG.episodes_per_step // 8 == 6
    assert rollout.stats.borrowed_slots == 4
    times = 1 if copies == "on" else 4
    assert rollout.stats.prefill_tokens == times * length + 8 - times
    assert rollout.stats.shared_tokens == (8 - times) * (length - 1)
    assert rollout.stats.copied_tokens == (4 - times) * (length - 1)
    alone = play(share_prefixes=False)
    assert rollout.trajectories == alone.trajectories, "to the last bit of each log-prob"
    again = play(vacant=vacate(rollout.session))
    assert_same_episodes(rollout.trajectories, again.trajectories)
    assert (again.stats.borrowed_slots, again.stats.prefill_tokens) == (4, 8)
