# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Thousands of episodes of random shape: each ends once, as it should, and nothing leaks."""

import collections
import gc
import random
import threading
import time

import jax
import numpy as np
import pytest
from test_collect import CONFIG, Rooms, check_rows, collect, engine, tasks, weights

from earl_jax.envs.environment import Start, StepResult
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.rollout.collect import Collector
from earl_jax.rollout.control import RolloutControl
from earl_jax.rollout.pages import pages_for
from earl_jax.rollout.seat import Policy

NUM_ROLLOUTS = 64
PLACES = 128
LONGEST = 120
ENDS = ("done", "raises", "garbage", "unencodable", "at start", "aborted")


class Shape:
    """An environment drawn at random: how long it talks, how it ends, how fast it is.

    Some change the policy's weights while they are at it.
    """

    def __init__(self, episode: int, control: RolloutControl):
        rng = random.Random(episode)
        self.control, self.episode = control, episode
        self.end = rng.choices(ENDS, (8, 1, 1, 1, 1, 1))[0]
        self.lengths = [rng.choice([1, 2, 9, 20]) for _ in range(rng.randrange(1, 5))]
        self.delay_s = rng.choice([0, 0, 0, 0.001])
        self.swaps = rng.choice([None] * 20 + ["keep", "recompute"])
        self.started = 0

    @property
    def stop_reason(self) -> str:
        faults = {"done": "win", "aborted": "aborted", "unencodable": "unencodable"}
        return faults.get(self.end, "environment_error")

    def say(self) -> str:
        return "8" * self.lengths.pop()

    def start(self) -> Start:
        self.started += 1
        if self.end == "at start":
            raise OSError("no board")
        return Start(text=self.say(), role="x")

    def step(self, reply: str) -> StepResult:
        time.sleep(self.delay_s)
        if self.swaps:
            version = self.episode % 1000
            self.control.swap(
                lambda player: Policy(
                    params=player.load_params(weights(version % 2)), version=version
                ),
                cache=self.swaps,
            )
        if self.lengths:
            return StepResult(text=self.say(), reward=0.5, done=False)
        if self.end == "raises":
            raise OSError("the board fell over")
        if self.end == "garbage":
            return {"text": reply}  # pyright: ignore[reportReturnType]
        if self.end == "unencodable":
            return StepResult(text="\ud800", reward=0.5, done=False)
        if self.end == "aborted":
            self.control.abort(self.episode)
            # It would go on for ever, were it not aborted.
            return StepResult(text="8", reward=0.5, done=False)
        return StepResult(reward=0.5, done=True, stop_reason="win")


def check_nothing_is_held(collector: Collector) -> None:
    """No slot has an episode, and nothing is left in host memory.

    Pages are free or held for what an idle slot has read: without it every page is free.
    """
    assert not any(collector._slots)
    room, pages = collector._room, collector._room._pages
    for slot in range(len(collector._slots)):
        assert pages.num_held(slot) <= pages_for(LONGEST, CONFIG.page_size)
        pages.keep(slot, 0)
    assert not np.array(pages.holders()).any()
    free = [pages.num_free(lane) for lane in range(pages.pool.lanes)]
    assert free == [pages.pool.pages] * pages.pool.lanes
    host = room._host
    assert (host.held_bytes, host.slots, host._leaving, room._leaving) == (0, [], [], {})


@pytest.mark.slow
def test_every_episode_ends_once_and_nothing_leaks():
    pool = EnvironmentPool(3, timeout_s=60.0)
    threads = threading.active_count()
    reasons, parked, moved, live = collections.Counter(), 0, 0, []
    for number in range(NUM_ROLLOUTS):
        control, made, collectors = RolloutControl(), {}, []

        def make(task, control=control, made=made):
            made[task.episode] = Shape(task.episode, control)
            return made[task.episode]

        rng = random.Random(number)
        todo = tasks(rng.randrange(20, CONFIG.episodes_per_step + 1), first=1000 * number)
        rollout = collect(
            pool,
            todo,
            make,
            places=PLACES,
            # Some have pages for one whole episode a lane, and park the others.
            pages=rng.choice([0, pages_for(LONGEST, CONFIG.page_size)]),
            make_room=Rooms(most_pages=0),
            num_slots=32,
            player=engine(32, append_rows=1),
            control=control,
            collectors=collectors,
            share_prefixes=number % 2 == 0,
            parking=("auto", "host", "recompute")[number % 3],
            # Of three in host memory, or of thousands.
            parking_host_gib=rng.choice([3 * 2**16 / 2**30, 1.0]),
            patience_s=rng.choice([0.0, 0.001, 60.0]),
        )
        assert [t.episode for t in rollout.trajectories] == [task.episode for task in todo]
        for trajectory in rollout.trajectories:
            shape = made[trajectory.episode]
            assert shape.started == 1
            assert trajectory.stop_reason == shape.stop_reason, shape.end
            reasons[trajectory.stop_reason] += 1
        check_rows(rollout, len(todo))
        check_nothing_is_held(collectors.pop())
        parked += rollout.stats.parked_episodes
        moved += rollout.stats.parked_host_bytes
        del rollout
        gc.collect()
        live.append(len(jax.live_arrays()))
    assert parked > 0 and moved > 0
    assert live[-1] == live[NUM_ROLLOUTS // 2], "arrays are left on the devices"
    assert sum(reasons.values()) > 2000
    assert set(reasons) == {"win", "aborted", "unencodable", "environment_error"}
    assert threading.active_count() == threads
    pool.close()
