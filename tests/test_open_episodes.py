# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Episodes that another service goes on with, behind the tokens that they had."""

import dataclasses
import functools
import os
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.engine.config import Sampling
from earl_jax.envs.environment import Start, StepResult
from earl_jax.envs.text.conversation import Conversation
from earl_jax.rollout.conversations import by_conversation
from earl_jax.rollout.event_files import EVENTS
from earl_jax.rollout.events import Events
from earl_jax.rollout.host_rows import as_row
from earl_jax.rollout.open_episodes import (
    FOLDER,
    OpenEpisode,
    drop_episodes,
    open_episode,
    read_episodes,
    write_episodes,
)
from earl_jax.rollout.staleness import AsynchronyConfig
from earl_jax.run import saver
from earl_jax.sharding.layout import MeshShape
from earl_jax.train.checkpoint import Checkpoints
from earl_jax.trajectory import Turn
from tests.support.choices import BRANCHES, HOT, Words, engine_for
from tests.support.environments import TakesTurns, Talker
from tests.support.episodes import (
    assert_same_episodes,
    engine,
    forgetful_renderer,
    open_service,
    tasks,
    tokenizer,
    weights,
)
from tests.support.interrupted import RULES, interrupted, play

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


def test_turns_of_conversations_by_hand():
    """Messages 1 to 4 of the conversations 0 6 0 8, with replies; the last one has no reward."""
    turns = [
        dataclasses.replace(turn, token_ids=(number,), conversation=conversation, forks=False)
        for number, conversation in enumerate((0, 6, 0, 8), start=1)
        for turn in (ASKED, SAID)
    ]
    found, rewards = by_conversation(turns, [0.1, 0.2, 0.3])
    assert [turn.token_ids[0] for turn in found] == [2, 2, 1, 1, 3, 3, 4, 4]
    assert [turn.forks for turn in found] == [False, False, True, False, False, False, True, False]
    assert rewards == [0.2, 0.1, 0.3]


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
    notes: list[str] = []
    read = functools.partial(read_episodes, tmp_path, say=notes.append)
    found = read(4, RULES)
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
    assert read(6, RULES) == {}
    assert not notes
    assert read(4, ["in_order", 1]) == {}
    assert len(notes) == 2
    assert "config.asynchrony.rule, max_staleness or kv is another one than in" in notes[0]
    path = tmp_path / FOLDER / "4.0.npz"
    path.write_bytes(path.read_bytes()[:200])
    assert read(4, RULES).keys() == {7}
    assert notes[2].startswith(f"{path} cannot be read (")
    assert notes[2].endswith("): its open episodes are played from their beginning")
    # What a process leaves that is killed while it writes.
    path.with_name("4.0.npz.tmp").write_bytes(path.read_bytes())
    assert read(4, RULES).keys() == {7}
    drop_episodes(tmp_path, [6])
    assert [each.name for each in (tmp_path / FOLDER).iterdir()] == ["6.0.npz"]


@dataclasses.dataclass
class State:
    """One of a checkpoint, as far as it counts here."""

    params: Any


def test_episodes_of_the_checkpoint_before_stay_while_the_next_one_is_written(
    tmp_path, monkeypatch
):
    """One is kept, and a run that is killed meanwhile goes on from the one before.

    The events, without which a checkpoint cannot go on, are on the disk before it.
    """
    on_disk, events = [], Events(tmp_path / EVENTS)
    monkeypatch.setattr(os, "fsync", lambda file: on_disk.append(os.fstat(file).st_size))

    def save(run, placement, checkpoints, position, choices, rating):
        assert on_disk[-1] == (tmp_path / EVENTS).stat().st_size
        checkpoints.save(position.step, State({"a": jnp.ones(8)}), {})

    monkeypatch.setattr(saver, "save", save)
    asynchrony = AsynchronyConfig(max_staleness=1)
    config = types.SimpleNamespace(
        asynchrony=asynchrony, checkpoint=types.SimpleNamespace(keep_best=0)
    )
    cluster = types.SimpleNamespace(plays=True, index=0, is_first=True)
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        saving = saver.Saver(
            run=types.SimpleNamespace(config=config, cluster=cluster),
            placement=types.SimpleNamespace(events=events),
            recorder=None,
            checkpoints=checkpoints,
            workdir=tmp_path,
        )
        for step in (1, 2, 3):
            events.note("trained", step=step)
            position = types.SimpleNamespace(step=step, open_episodes={})
            saving.save(position, {})
            found = sorted(each.name for each in (tmp_path / FOLDER).iterdir())
            assert found == [f"{number}.0.npz" for number in (step - 1, step) if number]


# A service goes on where another one stopped.


KINDS: dict[str, dict[str, Any]] = {
    # Turns of several rounds, that a stop string may end.
    "talk": {
        "make": lambda task: Talker(task.args["seed"]),
        "params": weights(ends_turns=False),
        "max_turn_tokens": 16,
        "stop_strings": ("12", "34", "5", "0"),
        "max_tokens": 96,
    },
    # Every answer begins a sample of its own.
    "fork": {
        "make": lambda task: Talker(task.args["seed"]),
        "new_conversation": lambda: Conversation(forgetful_renderer(), "fork"),
        "params": weights(ends_turns=False),
        "max_turn_tokens": 16,
        "stop_strings": ("12", "34", "5", "0"),
        "max_tokens": 256,
    },
    # Three conversations, two of which take turns.
    "conversations": {
        "make": lambda task: TakesTurns(task.args["seed"]),
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
D8 = MeshShape(data=8)
# As the kind "talk" plays on it.
SHORT_ROUNDS: dict[str, Any] = {"player": engine(8, D8, burst=2), "num_slots": 8, "max_tokens": 96}


@pytest.mark.slow_except("*fork", "*conversations", "*choices")
@pytest.mark.parametrize(
    ("mesh", "kind"),
    [(D8, "talk"), (MeshShape(tensor=2), "fork"), (D8, "conversations"), (D8, "choices")],
    ids=str,
)
def test_episodes_are_those_of_a_service_that_nothing_interrupts(pool, tmp_path, kind, mesh):
    """Its tokens are drawn once, but for replies of choices; rows are as if it had played alone."""
    chooses = kind == "choices"
    player = engine_for(BRANCHES, 1, mesh, 6) if chooses else engine(8, mesh, burst=2)
    given: dict[str, Any] = {"player": player, "num_devices": mesh.data, **KINDS[kind]}
    given |= {"num_slots": player.config.num_slots}
    make, todo = given.pop("make"), tasks(12)
    whole = open_service(pool, make, **given)
    whole.submit(todo)
    expected, tokens = play(whole)
    found, sampled, times = interrupted(tmp_path, lambda: open_service(pool, make, **given), todo)
    assert times > 2
    assert_same_episodes(found, sorted(expected, key=lambda each: each.episode))
    if chooses:
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
        **SHORT_ROUNDS,
        "params": weights(ends_turns=False),
        "max_turn_tokens": 16,
    }
    first = open_service(pool, lambda task: Fickle(task.args["seed"]), **given)
    first.submit(todo)
    play(first, rounds=3)
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


class Restricted:
    """Allows two tokens in task 0 and its like, and anything in others; takes one reply."""

    def __init__(self, task):
        self.only = tokenizer().convert_tokens_to_ids(["1", "2"]) if not task.episode else ()

    def start(self):
        return Start(text="go.", role="x", allowed_token_ids=tuple(self.only))

    def step(self, reply: str) -> StepResult:
        return StepResult(reward=1.0, done=True, stop_reason="win")


def open_with_choices(pool, make):
    """On the engine of the kind "choices"; replies are of 16 tokens."""
    player = engine_for(BRANCHES, 1, D8)
    given = {"params": weights(ends_turns=False), "max_turn_tokens": 16, "max_tokens": 96}
    return open_service(pool, make, player=player, num_slots=player.config.num_slots, **given)


def test_a_reply_under_way_goes_on_freely_in_a_slot_that_was_restricted(pool):
    """All slots play an episode of two tokens before."""
    todo = [dataclasses.replace(task, args={}) for task in tasks(17)]
    whole, first, second = (open_with_choices(pool, Restricted) for _ in range(3))
    for service in (whole, first):
        service.submit(todo[16:])
    ((expected,), _), _ = play(whole), play(first, rounds=5)
    episodes = first.open_episodes()
    assert episodes[16].in_turn
    second.submit([dataclasses.replace(todo[0], seed=seed) for seed in range(16)])
    others, _ = play(second)
    assert len(others) == 16
    assert all(len({*each.turns[1].token_ids}) <= 2 for each in others)
    second.submit([dataclasses.replace(todo[16], resumes=episodes[16])])
    found, _ = play(second)
    assert_same_episodes(found, [expected])


class Moody:
    """Says the same each time, and allows other replies from the second time on.

    At first anything, or where it is `strict` "1" or "2" and then anything.
    """

    def __init__(self, seed: int, strict: bool, said: dict[int, list[list[str]]]):
        self.strict, self.said = strict, said.setdefault(seed, [])

    def start(self):
        self.said.append([])
        at_first = ("1", "2") if self.strict else ()
        return Start(text="go.", choices=at_first if len(self.said) == 1 else ("3", "45"))

    def step(self, reply: str) -> StepResult:
        self.said[-1].append(reply)
        if self.strict and len(self.said[-1]) == 1:
            return StepResult(text="7.", reward=0.0, done=False)
        return StepResult(reward=1.0, done=True, stop_reason="win")


@pytest.mark.parametrize("strict", [False, True], ids=["under way", "ended"])
def test_a_reply_that_its_environment_allows_no_more_is_not_given_to_it(pool, strict):
    said: dict[int, list[list[str]]] = {}

    def make(task):
        return Moody(task.args["seed"], strict, said)

    first, second = (open_with_choices(pool, make) for _ in range(2))
    first.submit(tasks(4))
    play(first, rounds=8)
    episodes = first.open_episodes()
    assert {(len(e.turns), e.in_turn) for e in episodes.values()} == {(4 if strict else 2, True)}
    second.submit([dataclasses.replace(t, resumes=episodes[t.episode]) for t in tasks(4)])
    play(second)
    for each in said.values():
        # The second time it was found to be another one than then.
        assert not each[1] and each[2][0] in ("3", "45")


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
    given = SHORT_ROUNDS
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
