# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Replies of one episode that are asked for at the same time, each sampled in its own slot."""

import collections

import pytest

from earl_jax.engine.config import Sampling
from earl_jax.envs.environment import Message, Start, StepResult
from earl_jax.rollout.events import Events
from earl_jax.settings.errors import RunError
from tests.support import episodes
from tests.support.episodes import check_nothing_is_held, check_row, open_service, renderer, tasks
from tests.support.interrupted import interrupted

GREEDY = Sampling(temperature=1e-5)
NUMBERS = (0, 5, 7)
# The replies that an environment was given, by its seed.
HAD = collections.defaultdict(list)


class InTurns:
    """Has three conversations of two replies each, and asks for one reply after the other."""

    def __init__(self, task):
        self.seed = task.args["seed"]
        self.asks = collections.deque((number, 0) for number in NUMBERS)
        self.asked = (0, 0)
        self.num_replies = 0

    def take(self) -> dict:
        number, again = self.asked = self.asks.popleft()
        text = f"{self.seed + number + again}."
        return {"messages": (Message(role="user", text=text),), "conversation": number}

    def give_reply(self, asked, reply) -> None:
        number, again = asked
        self.num_replies += 1
        HAD[self.seed].append(reply)
        if not again:
            self.asks.append((number, 1))

    def start(self):
        return Start(**self.take())

    async def step(self, reply):
        self.give_reply(self.asked, reply)
        return await self.next()

    async def next(self):
        if not self.asks:
            assert self.num_replies == 6
            return StepResult(reward=1.0, done=True, stop_reason="win")
        request = self.take()
        return StepResult(reward=0.0, done=False, new_context=not self.asked[1], **request)


class AtOnce(InTurns):
    """Asks for all of them as soon as it can."""

    def claim(self):
        return bool(self.asks)

    def branch(self):
        return One(self) if self.asks else None

    async def give(self, reply):
        self.give_reply(self.asked, reply)


class One:
    """One reply for a conversation of `AtOnce`."""

    def __init__(self, whole):
        own, self.request = whole.asked, f"{whole.asks[0]}"
        self.whole, self.given, self.asked = whole, whole.take(), whole.asked
        whole.asked = own

    async def start(self):
        return Start(**self.given)

    async def step(self, reply):
        self.whole.give_reply(self.asked, reply)
        return StepResult(reward=0.0, done=True, stop_reason="replied")


def play(make, number, **settings):
    """The trajectories of so many tasks in their order, and the rounds; rows are checked."""
    service = open_service(POOL, make, **{"max_tokens": 256, **settings})
    service.submit(tasks(number))
    found = []
    for finished in service.drain():
        for each in finished:
            check_row(service, each)
            service.release(each.row)
            found.append(each.trajectory)
    check_nothing_is_held(service, service.session.max_tokens)
    return sorted(found, key=lambda each: each.episode), service.stats.rounds


POOL = None


@pytest.fixture(autouse=True)
def _pool(pool):
    global POOL
    POOL = pool


def by_number(trajectory):
    return {
        number: [turn for turn in trajectory.turns if turn.conversation == number]
        for number in NUMBERS
    }


def test_replies_at_once_are_those_of_replies_in_turns_in_fewer_rounds():
    """Token for token, without chance; each conversation is one sample, and is gone on with."""
    together, rounds = play(AtOnce, 4, sampling=GREEDY)
    alone, rounds_alone = play(InTurns, 4, sampling=GREEDY)
    assert rounds < rounds_alone
    for one, other in zip(together, alone, strict=True):
        assert one.stop_reason == other.stop_reason == "win"
        assert len(one.sample_starts) == 3 and one.reward == one.turn_rewards[-1] == 1.0
        assert len(one.turn_rewards) == 6
        same = by_number(other)
        for number, turns in by_number(one).items():
            seed = 100 + one.episode + number
            assert turns[0].token_ids == renderer().first(f"{seed}.")
            assert turns[2].token_ids == renderer().answer(f"{seed + 1}.")
            for turn, expected in zip(turns, same[number], strict=True):
                assert (turn.text, turn.token_ids) == (expected.text, expected.token_ids)
                assert turn.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_without_free_slots_requests_wait_for_the_slot_of_their_episode():
    found, _ = play(AtOnce, 40)
    assert {each.stop_reason for each in found} == {"win"}
    assert {each.num_turns for each in found} == {6}


TALKS = {
    "params": episodes.weights(ends_turns=False),
    "max_turn_tokens": 16,
    "stop_strings": ("12", "34", "5", "0"),
}


@pytest.mark.parametrize(
    ("limits", "reasons"),
    [
        ({"max_turns": 4}, {"too_many_turns"}),
        *(({"max_episode_tokens": most}, {"episode_too_long"}) for most in (45, 52, 60)),
        ({"max_turn_tokens": 3}, {"turn_too_long"}),
    ],
)
def test_limits_are_those_of_the_whole_episode_which_has_all_that_its_agent_has_had(
    limits, reasons
):
    HAD.clear()
    found, _ = play(AtOnce, 8, **{**TALKS, **limits})
    assert {each.stop_reason for each in found} & reasons
    for each in found:
        assert each.num_turns <= limits.get("max_turns", 6)
        assert each.num_tokens <= limits.get("max_episode_tokens", 256)
        assert each.stop_reason == "win" or each.reward == -0.5
        texts = [turn.text for turn in each.turns if turn.author == "policy"]
        assert not collections.Counter(HAD[100 + each.episode]) - collections.Counter(texts)


def test_an_episode_that_is_interrupted_goes_on_with_its_conversations(tmp_path):
    given = {**TALKS, "num_slots": 16, "max_tokens": 256}
    found, _, times = interrupted(tmp_path, lambda: open_service(POOL, AtOnce, **given), tasks(6))
    assert times > 2 and len(found) == 6
    for each in found:
        assert each.stop_reason in ("win", "turn_too_long")
        if each.stop_reason == "win":
            assert [len(turns) for turns in by_number(each).values()] == [4, 4, 4]


def test_a_replay_takes_requests_when_the_run_did():
    """In the second look, of the one that was there, even if it comes later now."""

    def calls(**given):
        events = Events(**given)
        return events.record_calls(POOL.calls()), events

    ours, events = calls()
    noted = []
    events.note = lambda event, **facts: noted.append({"event": event, "version": 0, **facts})
    assert ours.poll({-1: lambda: None}) == {}
    assert ours.poll({-1: lambda: None, -2: lambda: "b", 3: lambda: ""}) == {-2: "b", 3: ""}
    asked = {"poll": 2, "keys": [-2, 3], "requests": {"-2": "b"}}
    assert noted == [{"event": "asked", "version": 0, **asked}]
    again, events = calls(replayed=noted)
    assert list(events.requests_of(0)) == ["b"] and events.requests_of(3) is not None
    assert again.poll({-1: lambda: "a"}) == {}
    late = iter((None, None, "b"))
    assert again.poll({-1: lambda: "a", -2: lambda: next(late), 3: lambda: ""}) == {-2: "b", 3: ""}
    assert events.is_over
    other, _ = calls(replayed=noted)
    other.poll({})
    with pytest.raises(RunError, match="look 2 for requests"):
        other.poll({-1: lambda: "a"})
