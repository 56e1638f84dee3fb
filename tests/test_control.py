# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts that are paused, whose episodes are aborted, whose weights change under them."""

import re
import threading
import time
from pathlib import Path

import pytest

from earl_jax.rollout.control import RolloutControl
from tests.support.controls import PLACES, Script, furthest, swap_to
from tests.support.environments import Lecture, Watched, lecture
from tests.support.episodes import (
    CONFIG,
    RATIO_RUN,
    assert_same_episodes,
    check_rows,
    collect,
    engine,
    tasks,
    weights,
)
from tests.support.placements import seated

NUM_TASKS = 40


@pytest.fixture(scope="module")
def games(pool):
    return collect(pool, tasks(NUM_TASKS))


@pytest.mark.slow_except("(5, 6)-True")
@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("rounds", [(1,), (2,), (4,), (5, 6), (3, 7, 8, 12)], ids=str)
def test_after_a_recompute_tokens_are_those_of_a_run_from_scratch(pool, rounds, share_prefixes):
    """In the middle of prompts, of turns, of answers that are awaited, of reading again."""
    script = {number: swap_to(1 + i, "recompute") for i, number in enumerate(rounds)}
    changes = {"share_prefixes": share_prefixes, "patience_s": 0.0, "burst": 1}
    rollout = collect(
        pool,
        tasks(NUM_TASKS),
        lecture,
        max_tokens=PLACES,
        player=engine(burst=1),
        control=Script(script),
        **changes,
    )
    check_rows(rollout, NUM_TASKS)
    versions = {v for t in rollout.trajectories for turn in t.turns for v in turn.versions}
    assert len(rounds) in versions
    assert rollout.stats.recomputed_tokens > 0
    assert all(t.stop_reason == "win" for t in rollout.trajectories)
    assert furthest(rollout.trajectories) < 1e-5
    heard = sum(
        len(turn.token_ids)
        for t in rollout.trajectories
        for turn in t.turns
        if turn.author == "environment"
    )
    assert rollout.stats.prefill_tokens + rollout.stats.shared_tokens == heard


def test_a_cache_that_is_kept_shows_in_the_logprobs_and_the_versions_say_so(pool):
    rollout = collect(
        pool, tasks(NUM_TASKS), lecture, max_tokens=PLACES, control=Script({5: swap_to(1, "keep")})
    )
    check_rows(rollout, NUM_TASKS)
    assert rollout.stats.recomputed_tokens == 0
    pure, mixed = [], []
    for trajectory in rollout.trajectories:
        versions = [v for turn in trajectory.turns for v in turn.versions]
        assert versions == sorted(versions), "weights only ever become newer"
        # Under way at the change: those that old weights have read something of.
        (mixed if versions[0] == 0 and versions[-1] == 1 else pure).append(trajectory)
    assert len(mixed) >= 8 and any(t.turns[1].versions[0] == 1 for t in pure)
    assert furthest(mixed) > 1e-3
    began_later = [t for t in pure if t.row % 6 > 3]
    assert began_later and furthest(began_later) < 1e-5


def test_what_was_sampled_before_a_change_stays(pool, games):
    rollout = collect(pool, tasks(NUM_TASKS), control=Script({2: swap_to(1, "recompute")}))
    for before, after in zip(games.trajectories, rollout.trajectories, strict=True):
        for one, other in zip(before.turns, after.turns, strict=False):
            if 1 in other.versions:
                break
            assert one.token_ids == other.token_ids


def test_a_change_to_the_same_weights_changes_nothing(pool, games):
    for cache in ("keep", "recompute"):
        script = {number: swap_to(0, cache) for number in (1, 2, 4)}
        rollout = collect(pool, tasks(NUM_TASKS), control=Script(script))
        check_rows(rollout, NUM_TASKS)
        assert_same_episodes(games.trajectories, rollout.trajectories)


def test_an_aborted_episode_ends_with_what_it_has_and_the_others_do_not_notice(pool, games):
    """One that waits for its environment, one that has not begun, one that is in no rollout."""
    control = RolloutControl()
    asked = threading.Event()

    def abort_itself():
        control.abort(4, "enough")
        asked.wait(60)

    def make(task):
        if task.episode == 39:
            # The last of its data shard: it begins when episode 4 was aborted, and lets it answer.
            return Watched(task, asked.set)
        return Watched(task, abort_itself if task.episode == 4 else lambda: None)

    control.abort(9, "not wanted")
    control.abort(1000)
    rollout = collect(pool, tasks(NUM_TASKS), make, control=control, patience_s=0.0)
    four, nine = rollout.trajectories[4], rollout.trajectories[9]
    assert (four.stop_reason, four.detail) == ("aborted", "enough")
    assert four.turns == games.trajectories[4].turns[:2] and four.turn_rewards == (0.0,)
    assert (nine.stop_reason, nine.detail) == ("aborted", "not wanted")
    assert nine.turns == nine.turn_rewards == ()
    check_rows(rollout, NUM_TASKS)
    others = [i for i in range(NUM_TASKS) if i not in (4, 9)]
    assert_same_episodes(
        [games.trajectories[i] for i in others], [rollout.trajectories[i] for i in others]
    )


@pytest.mark.slow
def test_an_episode_is_aborted_in_the_middle_of_its_turn(pool):
    """The tokens so far are its last turn; nothing is written behind them."""
    script = {3: lambda control: [control.abort(episode) for episode in (0, 1, 7)]}
    rollout = collect(
        pool,
        tasks(NUM_TASKS),
        params=weights(ends_turns=False),
        player=engine(burst=1),
        control=Script(script),
        burst=1,
    )
    check_rows(rollout, NUM_TASKS)
    for trajectory in rollout.trajectories:
        spoken = len(trajectory.turns[1].token_ids)
        if trajectory.episode in (0, 1, 7):
            assert trajectory.stop_reason == "aborted" and 0 < spoken < CONFIG.max_turn_tokens
            assert trajectory.turn_rewards == (0.0,)
        else:
            assert trajectory.stop_reason == "turn_too_long"
            assert spoken == CONFIG.max_turn_tokens


def test_who_waits_for_a_prompt_whose_reader_is_aborted_reads_it_itself(pool):
    """Two slots of one data shard; the first is aborted when it has read one chunk of four."""
    script = {1: lambda control: control.abort(0)}
    rollout = collect(
        pool,
        tasks(2),
        lambda task: Lecture(0, 0.0),
        max_tokens=PLACES,
        control=Script(script),
        share_prefixes=True,
    )
    aborted, other = rollout.trajectories
    assert (aborted.stop_reason, aborted.turns) == ("aborted", ())
    assert other.stop_reason == "win" and furthest([other]) < 1e-5
    assert rollout.stats.shared_tokens == CONFIG.chunk_size


def test_a_paused_rollout_stands_still_and_goes_on_as_if_nothing_had_been(pool, games):
    control, started, done = RolloutControl(), [], []

    def make(task):
        started.append(task)
        return Watched(task, lambda: None)

    control.pause()
    thread = threading.Thread(
        target=lambda: done.append(collect(pool, tasks(NUM_TASKS), make, control=control))
    )
    thread.start()
    time.sleep(0.2)
    assert not started
    control.resume()
    thread.join(timeout=120)
    assert_same_episodes(games.trajectories, done[0].trajectories)


def test_a_rollout_is_paused_in_its_middle(pool, games):
    """Before its fourth round, for half a second in which no other begins."""
    began = []

    class Watch(Script):
        def take(self):
            requests = super().take()
            began.append(time.monotonic())
            return requests

    def pause(control):
        control.pause()
        threading.Timer(0.5, control.resume).start()

    rollout = collect(pool, tasks(NUM_TASKS), control=Watch({3: pause}))
    assert len(began) > 4 and began[3] - began[2] >= 0.45
    check_rows(rollout, NUM_TASKS)
    assert_same_episodes(games.trajectories, rollout.trajectories)


@pytest.mark.slow
def test_what_the_readme_says_of_control_is_so():
    """Its example, word for word, beside a rollout of the loop's own."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    [example] = [
        code
        for code in re.findall(r"```python\n(.*?)```", readme, re.S)
        if "RolloutControl" in code
    ]
    world, session, placement = seated(RATIO_RUN)
    params = world.policy(world.first_train_state(placement.train.mesh))
    names = {"world": world, "placement": placement, "session": session, "new_params": params}
    names["tasks"] = world.training_tasks(0)
    exec(example, names)
    trajectories = names["rollout"].trajectories
    assert [t.episode for t in trajectories] == list(range(16))
    assert (trajectories[3].stop_reason, trajectories[3].detail) == ("aborted", "not wanted")
    versions = {v for t in trajectories for turn in t.turns for v in turn.versions}
    assert 7 in versions and versions <= {0, 7}
    assert sum(t.stop_reason == "aborted" for t in trajectories) == 1


def test_an_unknown_way_with_caches_is_refused():
    with pytest.raises(ValueError, match=r"cache is 'drop'; it must be 'keep' or 'recompute'"):
        RolloutControl().swap(lambda player: None, cache="drop")
