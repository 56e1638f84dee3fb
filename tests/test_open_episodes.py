# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Episodes that another service goes on with, behind the tokens that they had."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from earl_jax.engine.config import Sampling
from earl_jax.envs.conversation import Conversation
from earl_jax.envs.environment import Start, StepResult
from earl_jax.rollout.open_episodes import (
    FOLDER,
    OpenEpisode,
    as_row,
    drop_episodes,
    open_episode,
    read_episodes,
    write_episodes,
)
from earl_jax.sharding.layout import MeshShape
from earl_jax.trajectory import Turn
from tests.support.choices import BRANCHES, HOT, Words, engine_for
from tests.support.environments import Talker
from tests.support.episodes import (
    assert_same_episodes,
    check_nothing_is_held,
    check_row,
    engine,
    forgetful_renderer,
    open_service,
    tasks,
    tictactoe,
    weights,
)

RULES = ["in_order", 2]
ASKED = Turn(author="environment", text="?", token_ids=(9, 8))
SAID = Turn(
    author="policy",
    text="a",
    token_ids=(4, 2),
    logprobs=(-0.5, -0.1),
    versions=(3, 4),
    model_logprobs=(-0.25, -1.5),
)
AGAIN = Turn(author="environment", text="!", token_ids=(9,), forks=True)


def test_a_row_by_hand():
    row = as_row((ASKED, SAID, AGAIN, SAID), 9, scored=False)
    assert row.tokens.tolist() == [9, 8, 4, 2, 9, 4, 2, 0, 0]
    assert row.turn_ids.tolist() == [0, 0, 1, 1, 0, 2, 2, 0, 0]
    assert row.versions.tolist() == [0, 0, 3, 4, 0, 3, 4, 0, 0]
    expected = np.float32([0, 0, -0.5, -0.1, 0, -0.5, -0.1, 0, 0])
    np.testing.assert_array_equal(row.logprobs, expected)
    assert row.model_logprobs is None
    scored = as_row((ASKED, SAID), 4, scored=True).model_logprobs
    np.testing.assert_array_equal(scored, np.float32([0, 0, -0.25, -1.5]))


def test_a_record_ends_with_what_was_sampled():
    assert open_episode(()) is open_episode((ASKED,)) is None
    assert open_episode((ASKED, SAID, AGAIN)) == OpenEpisode(turns=(ASKED, SAID))
    under_way = open_episode((ASKED, SAID, AGAIN), SAID)
    assert under_way == OpenEpisode(turns=(ASKED, SAID, AGAIN, SAID), in_turn=True)
    assert (under_way.oldest_version, under_way.num_sampled) == (3, 4)


def test_files_of_all_processes_are_read_as_they_were_written(tmp_path):
    ours = {5: open_episode((ASKED, SAID)), 2: open_episode((ASKED, SAID, AGAIN), SAID)}
    theirs = {7: open_episode((ASKED,), SAID)}
    write_episodes(tmp_path, 4, 0, ours, RULES)
    write_episodes(tmp_path, 4, 1, theirs, RULES)
    write_episodes(tmp_path, 6, 0, {}, RULES)
    found = read_episodes(tmp_path, 4, RULES)
    assert found.keys() == {5, 2, 7}
    for number, each in (ours | theirs).items():
        assert found[number].in_turn == each.in_turn
        for one, other in zip(found[number].turns, each.turns, strict=True):
            # Numbers are those of the devices, in 32 bits.
            exact = {
                name: tuple(np.float32(getattr(other, name)).tolist())
                for name in ("logprobs", "model_logprobs")
            }
            assert one == dataclasses.replace(other, text="", **exact)
    assert read_episodes(tmp_path, 4, ["in_order", 1]) == read_episodes(tmp_path, 6, RULES) == {}
    path = tmp_path / FOLDER / "4.0.npz"
    path.write_bytes(path.read_bytes()[:200])
    assert read_episodes(tmp_path, 4, RULES).keys() == {7}
    drop_episodes(tmp_path, [6])
    assert [each.name for each in (tmp_path / FOLDER).iterdir()] == ["6.0.npz"]


# A service goes on where another one stopped.


def play(service, rounds=None) -> tuple[list, int]:
    """Plays so many rounds; all, if None. Returns the trajectories, without rows, and tokens."""
    found = []
    for _ in itertools.count() if rounds is None else range(rounds):
        if not service.is_busy:
            break
        for finished in service.step():
            check_row(service, finished)
            service.release(finished.row)
            found.append(dataclasses.replace(finished.trajectory, row=0))
    return found, service.stats.rollout_tokens


def interrupted(tmp_path, open_one, todo) -> tuple[list, int, int]:
    """Plays with a service that is given up after three rounds, and others that go on, for longer.

    They have to read what was played. Returns the trajectories by episode, the tokens that were
    sampled, and the times.
    """
    done, sampled, episodes, times = [], 0, {}, 0
    while len(done) < len(todo):
        over = {each.episode for each in done}
        service = open_one()
        service.submit(
            [
                dataclasses.replace(task, resumes=episodes.get(task.episode))
                for task in todo
                if task.episode not in over
            ]
        )
        if times:
            assert service.open_episodes() == episodes
        times += 1
        found, tokens = play(service, 3 * times)
        done, sampled = [*done, *found], sampled + tokens
        write_episodes(tmp_path, times, 0, service.open_episodes(), RULES)
        episodes = read_episodes(tmp_path, times, RULES)
    check_nothing_is_held(service, service.session.max_tokens)
    return sorted(done, key=lambda each: each.episode), sampled, times


KINDS: dict[str, dict[str, Any]] = {
    # Turns of several rounds, that a stop string may end.
    "talk": {
        "make": lambda task: Talker(task.args["seed"]),
        "params": weights(ends_turns=False),
        "max_turn_tokens": 16,
        "stop_strings": ("12", "34", "5", "0"),
        "max_tokens": 96,
    },
    "game": {"make": tictactoe, "max_tokens": 32},
    # Every answer begins a sample of its own.
    "fork": {
        "make": lambda task: Talker(task.args["seed"]),
        "new_conversation": lambda: Conversation(forgetful_renderer(), "fork"),
        "params": weights(ends_turns=False),
        "max_turn_tokens": 16,
        "stop_strings": ("12", "34", "5", "0"),
        "max_tokens": 256,
    },
    # Replies of some choices, of which one under way is sampled again.
    "choices": {
        "make": lambda task: Words([]),
        "sampling": Sampling(temperature=HOT),
        "max_tokens": 96,
    },
}
MESHES = [MeshShape(data=8), MeshShape(tensor=2)]


@pytest.mark.slow_except("data=8-talk", "data=1,tensor=2-fork", "data=8-choices")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_episodes_are_those_of_a_service_that_nothing_interrupts(pool, tmp_path, kind, mesh):
    """Its tokens are drawn once, but for replies of choices; rows are as if it had played alone."""
    player = engine_for(BRANCHES, 1, mesh) if kind == "choices" else engine(8, mesh, burst=2)
    given: dict[str, Any] = {"player": player, "num_devices": mesh.data, **KINDS[kind]}
    given |= {"num_slots": player.config.num_slots}
    make, todo = given.pop("make"), tasks(12)
    whole = open_service(pool, make, **given)
    whole.submit(todo)
    expected, tokens = play(whole)
    found, sampled, times = interrupted(tmp_path, lambda: open_service(pool, make, **given), todo)
    assert times > 2
    assert_same_episodes(found, sorted(expected, key=lambda each: each.episode))
    if kind == "choices":
        assert sampled >= tokens
    else:
        assert sampled == tokens


class Fickle(Talker):
    """Greets otherwise from the second time on that the task is played."""

    times: dict[int, int] = {}  # noqa: RUF012

    def start(self):
        number = self.times[self.seed] = self.times.get(self.seed, 0) + 1
        return Start(text=f"{self.seed}." if number == 1 else f"{number}.", role="x")


def test_an_episode_whose_environment_says_something_else_begins_anew(pool):
    todo = tasks(8)
    given: dict[str, Any] = {
        "params": weights(ends_turns=False),
        "num_slots": 8,
        "max_turn_tokens": 16,
    }
    first = open_service(pool, lambda task: Fickle(task.args["seed"]), **given)
    first.submit(todo)
    play(first, rounds=2)
    episodes = first.open_episodes()
    assert len(episodes) == 8
    second = open_service(pool, lambda task: Fickle(task.args["seed"]), version=1, **given)
    second.submit([dataclasses.replace(t, resumes=episodes[t.episode]) for t in todo])
    assert set(second.oldest_versions().values()) == {0}
    found, _ = play(second)
    assert len(found) == 8
    # The first time it found another message than then, so that it was begun a third time.
    assert {each.turns[0].text for each in found} == {"3."}
    assert {len(each.turns[1].token_ids) for each in found} == {16}
    assert all(set(turn.versions) <= {1} for each in found for turn in each.turns)


class Ends(Talker):
    """Ends with an error at its second reply, the first time."""

    times: dict[int, int] = {}  # noqa: RUF012

    def step(self, reply: str) -> StepResult:
        if self.replies == 1:
            number = self.times[self.seed] = self.times.get(self.seed, 0) + 1
            if number == 2:
                raise ConnectionError("the tool is gone")
        return super().step(reply)


def test_an_environment_that_fails_while_it_is_given_its_replies_ends_its_episode(pool):
    given: dict[str, Any] = {"num_slots": 8, "max_tokens": 64}
    first = open_service(pool, lambda task: Ends(task.args["seed"]), **given)
    first.submit(tasks(8))
    while sum(len(each.turns) >= 4 for each in first.open_episodes().values()) < 8:
        assert not first.step()
    episodes = first.open_episodes()
    second = open_service(pool, lambda task: Ends(task.args["seed"]), **given)
    second.submit([dataclasses.replace(t, resumes=episodes.get(t.episode)) for t in tasks(8)])
    found, tokens = play(second)
    assert tokens == 0
    for each in found:
        assert each.stop_reason == "environment_error" and "the tool is gone" in each.detail
        assert [turn.token_ids for turn in each.turns] == [
            turn.token_ids for turn in episodes[each.episode].turns
        ]
