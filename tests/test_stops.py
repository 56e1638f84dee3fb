# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Turns that end at stop strings and stop ids: what is kept, discarded and seen by environments."""

import dataclasses

import pytest

from earl_jax.envs.text.conversation import Completion, Conversation
from earl_jax.rollout.config import Stops
from earl_jax.rollout.task import Prompt, Task
from earl_jax.run.build import build_run
from tests.support.environments import Talker
from tests.support.episodes import (
    MAX_TOKENS,
    assert_same_episodes,
    check_row,
    check_rows,
    collect,
    engine,
    forgetful_renderer,
    open_service,
    renderer,
    tasks,
    tokenizer,
    weights,
)
from tests.support.scores import furthest
from tests.support.settings import make_config

# The policy says digits and never ends a turn: a stop must.
PLAIN, OWN = ("12", "34", "5", "0"), Stops(strings=("7", "80"), token_ids=())
NUM_TASKS = 24


def tell(pool, burst: int, stops: Stops):
    """Talks of three turns, every third with stops of its own."""
    todo = [
        dataclasses.replace(task, stops=OWN if task.episode % 3 == 0 else None)
        for task in tasks(NUM_TASKS)
    ]
    return collect(
        pool,
        todo,
        lambda task: Talker(task.args["seed"]),
        params=weights(ends_turns=False),
        player=engine(burst=burst),
        burst=burst,
        max_tokens=3 * MAX_TOKENS,
        max_turn_tokens=16,
        stop_strings=stops.strings,
        stop_token_ids=stops.token_ids,
    )


@pytest.fixture(scope="module")
def one_by_one(pool):
    """No token is ever sampled behind a stop."""
    rollout = tell(pool, 1, Stops(strings=PLAIN))
    assert rollout.stats.discarded_tokens == 0
    return rollout


def test_a_turn_ends_with_the_token_that_completes_a_stop_string(one_by_one):
    """The ids keep it, the environment hears what is before it, an end of turn comes behind it."""
    check_rows(one_by_one, NUM_TASKS)
    ended = {"win": 0, "turn_too_long": 0}
    for trajectory in one_by_one.trajectories:
        strings = OWN.strings if trajectory.episode % 3 == 0 else PLAIN
        ended[trajectory.stop_reason] += 1
        for index, turn in enumerate(trajectory.turns):
            if turn.author == "environment":
                end = (renderer().end_of_turn_id,) if index else ()
                render = renderer().answer if index else renderer().first
                assert turn.token_ids == end + render(turn.text)
                continue
            sampled = renderer().decode(turn.token_ids)
            found = [string for string in strings if string in sampled]
            if trajectory.stop_reason == "turn_too_long" and turn is trajectory.turns[-1]:
                assert found == [] and turn.text == sampled and len(turn.token_ids) == 16
                continue
            (string,) = found
            assert sampled == turn.text + string
            assert not any(string in renderer().decode(turn.token_ids[:-1]) for string in strings)
        if trajectory.stop_reason == "win":
            assert trajectory.detail == trajectory.turns[-1].text
    assert ended["win"] >= 10 and ended["turn_too_long"]


def test_tokens_sampled_behind_a_stop_leave_no_trace(pool, one_by_one):
    """Host record and device rows are those of one token a round."""
    rollout = tell(pool, 4, Stops(strings=PLAIN))
    assert rollout.stats.discarded_tokens > NUM_TASKS
    assert rollout.stats.rollout_tokens == one_by_one.stats.rollout_tokens
    assert_same_episodes(one_by_one.trajectories, rollout.trajectories)
    check_rows(rollout, NUM_TASKS)


def test_an_episode_is_handed_out_though_the_next_one_of_its_slot_ends_alike():
    """Its row is ready a round after its stop string, in which the next episode has ended, too."""
    task = Task(
        episode=0,
        group=0,
        prompt=Prompt(token_ids=(5, 6, 7)),
        stops=Stops(strings=tuple("012345678")),
    )
    service = open_service(
        None,
        None,
        params=weights(ends_turns=False),
        new_conversation=lambda: Completion(renderer().decode, renderer().end_of_turn_ids),
    )
    service.submit([dataclasses.replace(task, episode=n, group=n) for n in range(48)])
    handed_out = []
    while service.is_busy:
        handed_out.append(len(finished := service.step()))
        for each in finished:
            check_row(service, each)
            assert len(each.trajectory.turns[-1].token_ids) == 1
    assert handed_out == [0, 16, 16, 16]
    assert service.stats.discarded_tokens == 48 * 3


def test_stop_ids_end_turns_on_the_devices(pool):
    """As the same digits do as strings; nothing is given up."""
    digits = ("1", "5", "8")
    ids = tuple(tokenizer().convert_tokens_to_ids(list(digits)))
    own = dataclasses.replace(OWN, strings=("7", "8"))
    by_id = dataclasses.replace(
        OWN, strings=(), token_ids=tuple(tokenizer().convert_tokens_to_ids(["7", "8"]))
    )
    rollouts = []
    for plain, asked in ((Stops(strings=digits), own), (Stops(token_ids=ids), by_id)):
        todo = [dataclasses.replace(t, stops=asked if t.episode % 3 else None) for t in tasks(16)]
        rollouts.append(
            collect(
                pool,
                todo,
                lambda task: Talker(task.args["seed"]),
                params=weights(ends_turns=False),
                max_tokens=3 * MAX_TOKENS,
                max_turn_tokens=16,
                stop_strings=plain.strings,
                stop_token_ids=plain.token_ids,
            )
        )
        check_rows(rollouts[-1], 16)
    strings, on_device = rollouts
    assert_same_episodes(strings.trajectories, on_device.trajectories)
    assert strings.stats.discarded_tokens > on_device.stats.discarded_tokens == 0
    assert {t.stop_reason for t in on_device.trajectories} >= {"win"}


def test_tokens_behind_a_stop_attend_to_the_recorded_tokens_alone(pool):
    """By the trainer's forward pass over the record."""
    rollout = collect(
        pool,
        tasks(16),
        lambda task: Talker(task.args["seed"]),
        stop_strings=("1", "2", "3", "4", "5"),
        max_tokens=3 * MAX_TOKENS,
    )
    check_rows(rollout, 16)
    # "4" and its end of turn come in one burst: the end is discarded where "4" is a stop.
    assert rollout.stats.discarded_tokens > 10
    assert {t.stop_reason for t in rollout.trajectories} == {"win"}
    assert furthest(rollout.trajectories) < 1e-4


@pytest.mark.parametrize("history", ["append", "fork"])
def test_a_conversation_goes_on_behind_a_stop_as_the_template_writes_it(history):
    """Nothing forks for a stop alone: the stream is the template's text of what was sampled."""
    chat = forgetful_renderer()
    conversation = Conversation(chat, history)
    stream = list(conversation.open("go").ids)
    sampled = list(chat.reply("246 stop")[:-1])
    assert conversation.reply(sampled, "246 ") == ("246 ", True)
    answer = conversation.answer("on")
    assert not answer.forks
    assert answer.ids[0] == chat.end_of_turn_id
    whole = stream + sampled + list(answer.ids)
    assert whole == [*stream, *chat.reply("246 stop"), *chat.answer("on")]
    # Behind a turn that has its own end, there is no second one.
    assert conversation.reply(chat.reply("8")) == ("8", True)
    assert conversation.answer("so").ids == chat.answer("so")


def test_stops_that_cannot_be_are_refused():
    for override, message in (
        ("stop_strings=('a','')", "config.rollout.stop_strings holds an empty string"),
        ("stop_token_ids=(1,2,3,4,5,6,7,8,9)", "config.rollout.stop_token_ids.*at most 8 ids"),
        ("stop_token_ids=(-1,)", "config.rollout.stop_token_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            make_config({}, [f"rollout.{override}"])
    with pytest.raises(ValueError, match="config.rollout.stop_token_ids holds 9999; ids go from 0"):
        build_run(make_config({}, ["rollout.stop_token_ids=(9999,)"]))
    task = dataclasses.replace(tasks(1)[0], stops=Stops(strings=("",)))
    with pytest.raises(ValueError, match="episode 0: Task.stops.strings holds an empty string"):
        task.validate()
