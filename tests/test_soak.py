# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Soaks: episodes of random shape end once each, and a client does everything in any order."""

import collections
import dataclasses
import functools
import gc
import random
import threading
import time

import jax
import pytest

from benchmarks.soak import soak
from earl_jax.envs.environment import Start, StepResult
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.models.config import ModelConfig
from earl_jax.models.layer_groups import pages_for
from earl_jax.rollout.config import Limits
from earl_jax.sharding.layout import MeshShape
from tests.support import wait_until
from tests.support.episodes import (
    CONFIG,
    GrowPool,
    check_nothing_is_held,
    check_rows,
    collect,
    engine,
    renderer,
    tasks,
    weights,
)

NUM_ROLLOUTS, EPISODES = 4, 200
NUM_SLOTS = 32
MAX_TOKENS = 128
LONGEST = 120
# One small layer on two devices: what is tested is who sits where.
MODEL = ModelConfig(num_layers=1, width=16, num_heads=2, num_kv_heads=1, head_size=8, ffn_size=16)
# How many tokens a turn takes: a digit and its end.
TURN = 2
ENDS = {
    "done": 16,
    "raises": 2,
    "garbage": 2,
    "unencodable": 2,
    "at start": 2,
    "hangs": 0.3,
    "hangs at start": 0.3,
}
REASONS = {"done": "win", "unencodable": "unencodable", "hangs": "environment_timeout"}


class Shape:
    """An environment drawn at random: how long it talks, how it ends, how fast it is.

    Some never answer.
    """

    def __init__(self, episode: int, released: threading.Event, *, endless: bool):
        rng = random.Random(episode)
        self.released, self.episode = released, episode
        self.endless = endless
        (self.end,) = rng.choices(list(ENDS), list(ENDS.values()))
        self.lengths = [rng.choice([1, 2, 9, 20]) for _ in range(rng.randrange(1, 5))]
        self.limits = self._draw_limits(rng)
        self.stop_reason = self._foresee()
        self.delay_s = rng.choice([0, 0, 0, 0.001])
        self.started = 0

    def _draw_limits(self, rng: random.Random) -> Limits | None:
        """Limits of a turn or of the episode; None where the config's do not cut it."""
        if rng.random() < 0.8:
            return None
        turn = rng.choice([1, 2, 4, 9])
        return Limits(max_turn_tokens=turn, max_episode_tokens=rng.choice([0, 12, 25, 40]))

    def _foresee(self) -> str:
        """Why it ends, counted by hand: turns are of two tokens or endless, if not cut."""
        if self.end in ("at start", "hangs at start"):
            return "environment_error" if self.end == "at start" else "environment_timeout"
        limits = self.limits or CONFIG.limits
        most = limits.max_episode_tokens or 10**6
        length = 0
        for index, words in enumerate(reversed(self.lengths)):
            length += sampled_tokens(words, first=not index)
            if length >= most:
                return "episode_too_long" if index else "prompt_too_long"
            turn = min(limits.max_turn_tokens, most - length)
            if self.endless or turn < TURN:
                cut = turn == limits.max_turn_tokens
                return "turn_too_long" if cut else "episode_too_long"
            length += TURN
        return REASONS.get(self.end, "environment_error")

    def say(self) -> str:
        return "8" * self.lengths.pop()

    def start(self) -> Start:
        self.started += 1
        if self.end == "at start":
            raise OSError("no board")
        if self.end == "hangs at start":
            self.released.wait()
        return Start(text=self.say(), role="x")

    def step(self, reply: str) -> StepResult:
        time.sleep(self.delay_s)
        if self.lengths:
            return StepResult(text=self.say(), reward=0.5, done=False)
        if self.end == "raises":
            raise OSError("the board fell over")
        if self.end == "hangs":
            self.released.wait()
        if self.end == "garbage":
            return {"text": reply}  # pyright: ignore[reportReturnType]
        if self.end == "unencodable":
            return StepResult(text="\ud800", reward=0.5, done=False)
        return StepResult(reward=0.5, done=True, stop_reason="win")


@functools.cache
def sampled_tokens(words: int, *, first: bool) -> int:
    """Tokens of what the environment says with so many words."""
    render = renderer().first if first else renderer().answer
    return len(render("8" * words))


@functools.cache
def player():
    """It guesses tokens: the policy that never ends a turn says some digits again."""
    return engine(
        NUM_SLOTS, MeshShape(data=2), ngram=1, draft=2, model=MODEL,
        episodes=EPISODES,
    )  # fmt: skip


@functools.cache
def placed(seed: int, ends_turns: bool):
    return player().load_params(weights(seed, ends_turns=ends_turns, model=MODEL))


def play(number: int, pool: EnvironmentPool):
    """One rollout of random shape; its environments by episode, and the service that played it."""
    made, services, released = {}, [], threading.Event()
    rng, endless = random.Random(number), number == NUM_ROLLOUTS - 1
    todo = tasks(rng.randrange(EPISODES - 40, EPISODES + 1), first=1000 * number)
    shapes = {task.episode: Shape(task.episode, released, endless=endless) for task in todo}

    def make(task):
        assert task.episode not in made, "it began twice"
        made[task.episode] = shapes[task.episode]
        return made[task.episode]

    rollout = collect(
        pool,
        [dataclasses.replace(task, limits=shapes[task.episode].limits) for task in todo],
        make,
        params=placed(0, not endless),
        max_tokens=MAX_TOKENS,
        # All but one have pages for one whole episode a data shard, and preempt the others.
        pages=0 if number == 1 else pages_for(LONGEST, CONFIG.page_size),
        grow=GrowPool(most_pages=0),
        num_slots=NUM_SLOTS,
        player=player(),
        services=services,
        episodes_per_step=EPISODES,
        num_draft_tokens=2,
        share_prefixes=number % 2 == 0,
        copy_prefixes="on",
        preemption=("host", "auto", "recompute")[number % 3],
        # Of three in host memory, or of thousands.
        preemption_host_gib=rng.choice([3 * 2**16 / 2**30, 1.0]),
        patience_s=rng.choice([0.0, 0.001, 0.01]),
    )
    released.set()
    return rollout, made, services.pop()


@pytest.mark.slow
def test_every_episode_ends_once_and_nothing_leaks():
    # Long enough for a sound environment on a busy machine.
    pool = EnvironmentPool(16, timeout_s=2.0)
    threads = threading.active_count()
    # What is made once is no leak.
    _ = placed(0, True), placed(1, True), placed(0, False)
    reasons, counts, live = collections.Counter(), collections.Counter(), []
    for number in range(NUM_ROLLOUTS):
        rollout, made, service = play(number, pool)
        episodes = [trajectory.episode for trajectory in rollout.trajectories]
        assert episodes == list(range(1000 * number, 1000 * number + len(episodes)))
        assert sorted(made) == episodes
        for trajectory in rollout.trajectories:
            shape = made[trajectory.episode]
            assert shape.started == 1
            assert trajectory.stop_reason == shape.stop_reason, (shape.end, shape.limits)
            reasons[trajectory.stop_reason] += 1
        check_rows(rollout, len(episodes))
        check_nothing_is_held(service, LONGEST)
        counts.update(
            {
                name: getattr(rollout.stats, name)
                for name in ("preempted_episodes", "preempted_host_bytes", "other_shard_episodes")
                + ("drafted_tokens", "accepted_tokens", "recomputed_tokens", "shared_tokens")
                + ("copied_tokens",)
            }
        )
        del rollout, service
        gc.collect()
        live.append(len(jax.live_arrays()))
    assert all(counts.values()), counts
    assert live[-1] == live[NUM_ROLLOUTS // 2], "arrays are left on the devices"
    assert sum(reasons.values()) > 650
    assert set(reasons) == {
        "win", "unencodable", "environment_error", "environment_timeout",
        "turn_too_long", "episode_too_long", "prompt_too_long",
    }  # fmt: skip
    # Those that hung have been let go.
    assert wait_until(lambda: threading.active_count() <= threads)
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "windows"), [(2_000, ()), (4_000, (4, 0, 0))])
def test_every_token_of_a_client_that_does_everything_is_exact(num_tokens, windows):
    """It submits, aborts, swaps weights and pauses; environments are slow and fail; pages are few.

    With windows episodes give up the pages behind them. What else holds is checked by
    `benchmarks.soak.Findings.check`.
    """
    found = soak(num_tokens, seed=1, windows=windows)
    assert found.stats.rollout_tokens >= num_tokens
