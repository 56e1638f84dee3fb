# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The rounds of a service: long prompts hold up those who sample by a bounded time."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from earl_jax.engine.engine import Engine
from earl_jax.envs.text.conversation import Conversation
from earl_jax.rollout.config import Limits
from earl_jax.rollout.rounds import choose_readers
from earl_jax.rollout.task import Prompt, Task
from earl_jax.sharding.layout import MeshShape
from tests.support.environments import Talker
from tests.support.episodes import (
    CONFIG,
    GrowPool,
    check_nothing_is_held,
    collect,
    engine,
    forgetful_renderer,
    open_service,
    tasks,
    weights,
)

READERS = 8
# Chunks of 8 tokens, each a tile of 16, so that two go on in a round of a row shard.
BUDGET, A_ROUND = 32, 2
# Five chunks each; and a reply that goes on all the while.
PROMPT_TOKENS, SPOKEN = 40, 100
CONTEXT = 128
MESH = MeshShape(data=2)


@pytest.mark.parametrize(
    ("tokens", "budget", "slots_a_shard", "chosen"),
    [
        ({}, 64, 8, []),
        # 48 + 32 are too many, 48 + 0 + 16 are not.
        ({3: 48, 0: 32, 2: 0, 1: 16}, 64, 8, [3, 2, 1]),
        ({3: 48, 0: 32, 2: 0, 1: 16}, 64, 2, [3, 0, 2, 1]),
        # The first one goes on alone if it is more than the budget, and so does what is free.
        ({0: 0, 1: 80, 2: 16, 3: 0}, 64, 8, [0, 1, 3]),
        ({4: 80, 1: 80, 5: 80, 0: 80}, 64, 4, [4, 1]),
        ({4: 32, 1: 32, 5: 32}, 64, 8, [4, 1]),
    ],
)
def test_readers_by_hand(tokens, budget, slots_a_shard, chosen):
    assert choose_readers(tokens, budget, slots_a_shard) == chosen


def test_a_budget_is_a_pass_for_each_decode_step():
    """CPUs append 64 tokens a pass."""
    assert engine(burst=4).append_budget == 4 * 64
    assert engine(burst=1).append_budget == 64


class Round(NamedTuple):
    """Tokens that slots were given and have sampled in a round."""

    given: np.ndarray
    sampled: np.ndarray


@pytest.fixture
def rounds(monkeypatch) -> list[Round]:
    """The rounds that engines play."""
    played, play = [], Engine.play

    def record(self, params, state, inputs, **settings):
        state, outputs = play(self, params, state, inputs, **settings)
        played.append(Round(inputs.count.copy(), outputs.count))
        return state, outputs

    monkeypatch.setattr(Engine, "play", record)
    return played


def prompt_task(number: int, length: int, sampled: int) -> Task:
    ids = np.random.default_rng(number).integers(0, 320, length)
    return Task(
        episode=number,
        group=number,
        prompt=Prompt(token_ids=tuple(ids.tolist())),
        limits=Limits(max_turn_tokens=sampled),
    )


def play_beside_readers(num_speakers: int, **changes) -> list:
    """Trajectories of some who speak for long, and of eight that come with long prompts."""
    changes |= {"params": weights(ends_turns=False), "max_tokens": CONTEXT}
    service = open_service(None, None, player=engine(mesh=MESH), **changes)
    service.submit([prompt_task(number, 7, SPOKEN) for number in range(num_speakers)])
    found = service.step() if num_speakers else []
    service.submit([prompt_task(10 + number, PROMPT_TOKENS, 4) for number in range(READERS)])
    for finished in service.drain():
        found += finished
    found.sort(key=lambda each: each.ticket)
    return [each.trajectory for each in found]


def test_long_prompts_hold_up_nobody_who_samples(rounds, monkeypatch):
    """Two sample their burst in each round, beside at most two chunks; no number is another."""
    free = play_beside_readers(2)
    assert [sum(each.given > 1) for each in rounds[1:6]] == [READERS] * 5
    rounds.clear()
    monkeypatch.setattr(Engine, "append_budget", BUDGET)
    capped = play_beside_readers(2)
    assert capped == free
    speakers = np.flatnonzero(rounds[0].sampled)
    assert len(speakers) == 2
    reading = [each for each in rounds[1:] if each.given.any()]
    assert all((each.sampled[speakers] == CONFIG.burst).all() for each in reading)
    by_shard = [each.given.reshape(MESH.data, -1) for each in reading]
    assert max((given > 0).sum(axis=1).max() for given in by_shard) == A_ROUND
    # Each has a chunk as often as the others of its row shard.
    for given in zip(*(each.given for each in reading), strict=True):
        chunks = np.flatnonzero(given)
        waits = np.diff(chunks, prepend=-1)
        assert len(chunks) in (0, PROMPT_TOKENS // CONFIG.chunk_size)
        assert (waits <= READERS // A_ROUND).all()
    assert len(reading) >= READERS * PROMPT_TOKENS // CONFIG.chunk_size // (A_ROUND * MESH.data)


def test_all_read_at_once_where_nobody_samples_or_reads_along(rounds, monkeypatch):
    monkeypatch.setattr(Engine, "append_budget", BUDGET)
    play_beside_readers(0)
    assert [sum(each.given > 0) for each in rounds] == [READERS] * 5
    rounds.clear()
    play_beside_readers(2, on_tokens=None)
    assert [sum(each.given > 1) for each in rounds[1:6]] == [READERS] * 5


class Lecture(Talker):
    """Says few or many words at once, the first of which some others say too."""

    def start(self):
        words = "012345678" * (self.seed // 2 % 4)
        return dataclasses.replace(super().start(), text=f"{self.seed % 2}{words}{self.seed}.")


CASES = {
    "shared": {"share_prefixes": True},
    "host": {"pages": 12, "grow": GrowPool(most_pages=12), "preemption": "host"},
    "forked": {"new_conversation": lambda: Conversation(forgetful_renderer(), "fork")},
}


@pytest.mark.slow_except("shared")
@pytest.mark.parametrize("case", CASES)
def test_episodes_are_the_same_however_little_is_read_in_a_round(case, pool, rounds, monkeypatch):
    """With shared prompts, too few pages, and samples that begin anew; a slot begins, and waits."""
    # Bursts of one token, so that a turn takes several rounds.
    settings = {"player": engine(mesh=MESH, burst=1), "burst": 1, "max_tokens": 64}
    settings |= CASES[case]

    def play():
        services = []
        rollout = collect(
            pool, tasks(40), lambda task: Lecture(task.episode), services=services, **settings
        )
        check_nothing_is_held(services[0], 64)
        return rollout

    free, num_rounds = play(), len(rounds)
    monkeypatch.setattr(Engine, "append_budget", 16)
    capped = play()
    assert len(rounds) > 2 * num_rounds, "or nobody has waited"
    assert free.trajectories == capped.trajectories
    stats = capped.stats
    if case == "shared":
        assert stats.shared_tokens > 0
    if "pages" in settings:
        assert stats.preempted_episodes > 0
    assert (stats.preempted_host_bytes > 0) == (case == "host")
    assert any(len(each.sample_starts) > 1 for each in free.trajectories) == (case == "forked")
