# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Agents whose requests of chat completions are turns of an episode: the environment alone."""

import asyncio
import collections
import dataclasses
import functools
import gc
import http.client
import json
import random
import re
import threading
import time
import urllib.parse
from pathlib import Path

import pytest

from earl_jax.config import file as config_file
from earl_jax.envs.agents.agent import Agent
from earl_jax.envs.agents.endpoint import endpoint_at
from earl_jax.envs.agents.session import Session
from earl_jax.envs.environment import Message, StepResult, check_start, check_step
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.envs.text.conversation import Conversation
from earl_jax.envs.tools.calls import Call
from earl_jax.envs.tools.functions import describe
from earl_jax.envs.tools.tool_use import ToolUse
from earl_jax.rollout.event_files import EVENTS, events_file
from earl_jax.rollout.events import Events
from earl_jax.settings.errors import InputError
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.training import train
from tests.support import ROOT, episodes, http_client, python_path
from tests.support.forks import run_python
from tests.support.placements import TINY
from tests.support.processes import Processes
from tests.support.runs import (
    assert_equal,
    check_replay,
    cut_off,
    final_parameters,
    steps_of,
)

# Three asynchronous steps of a tiny model, whose random weights often end a turn.
SMALL = {
    "num_steps": 3,
    **{f"model.{name}": value for name, value in TINY.items()},
    "devices.num_cpu_devices": 2,
    "rollout.num_slots": 8,
    "rollout.group_size": 2,
    "rollout.chunk_size": 8,
    "rollout.burst": 4,
    "rollout.episodes_per_step": 8,
    "rollout.context_buckets": "(256,)",
    "rollout.max_turn_tokens": 64,
    "rollout.stop_token_ids": tuple(range(40, 48)),
    "asynchrony.max_staleness": 1,
    "selector.table": "model",
    "checkpoint.every_steps": 1,
    "eval.final_games": 4,
}
SYSTEM = {"role": "system", "content": "be brief"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def user(text):
    return {"role": "user", "content": text}


def chat(base_url, messages, **fields):
    """The assistant's message that answers a request."""
    return whole(base_url, messages, **fields)["choices"][0]["message"]


def whole(base_url, messages, **fields):
    return ask(base_url, "chat/completions", messages=messages, **fields)


def parts_of(base_url):
    """The address of an endpoint, and the path of an agent there."""
    address, _, path = base_url.removeprefix("http://").partition("/")
    return f"http://{address}", f"/{path}"


def ask(base_url, endpoint, **fields):
    address, path = parts_of(base_url)
    return http_client.ask(address, f"{path}/{endpoint}", **fields)


def send(base_url, endpoint, **body):
    """The status and the body of the answer."""
    address, path = parts_of(base_url)
    return http_client.send(address, f"{path}/{endpoint}", body)


def pay(base_url, reward, **fields):
    """The status of the answer to a reward that is posted."""
    return send(base_url, "reward", reward=reward, **fields)[0]


def at_once(function, calls):
    """Calls the function with each of these, in threads at the same time."""
    threads = [threading.Thread(target=function, args=(each,)) for each in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def play(agent, replies, monkeypatch, **arguments):
    """The start and the steps of an episode of this function, whose policy gives these replies."""
    monkeypatch.setattr("tests.support.agents.agent", agent)

    async def run():
        environment = Agent(agent="tests.support.agents:agent", **arguments)
        results = [check_start(await environment.start())]
        for number, reply in enumerate(replies):
            environment.count_tokens(10 + number, 3)
            results.append(check_step(await environment.step(reply)))
        return results

    return asyncio.run(run())


def test_requests_become_messages_and_what_it_returns_is_the_reward(monkeypatch):
    seen = []

    def agent(base_url, row, seed, index, bonus):
        talk = [SYSTEM, user(row["question"])]
        beside = {"model": "gpt-4o", "temperature": 0.2, "parallel_tool_calls": False}
        talk.append(chat(base_url, talk, **beside))
        talk.append(user("why?"))
        talk.append(chat(base_url, talk))
        seen.append((seed, index, talk))
        return {"reward": 0.5 + bonus, "length": len(talk)}

    row = {"question": "6 * 7?"}
    start, asks, end = play(
        agent, ["42", "because"], monkeypatch, row=row, seed=3, index=4, settings={"bonus": 1.0}
    )
    assert start.messages == (
        Message(role="system", text="be brief"),
        Message(role="user", text="6 * 7?"),
    )
    assert asks.messages == (Message(role="user", text="why?"),)
    assert not asks.new_context and not asks.done and asks.reward == 0.0
    assert asks.metrics == {"requests": 2.0, "new_contexts": 0.0}
    assert (end.done, end.reward) == (True, 1.5)
    assert end.metrics == {"requests": 2.0, "new_contexts": 0.0, "length": 5.0}
    said = [{"role": "assistant", "content": "42"}, {"role": "assistant", "content": "because"}]
    ((seed, index, talk),) = seen
    assert (seed, index, [talk[2], talk[4]]) == (3, 4, said)


def test_a_coroutine_whose_answer_the_tasks_reward_pays(monkeypatch):
    async def agent(base_url, row):
        reply = await asyncio.to_thread(chat, base_url, [user(row["prompt"])])
        return reply["content"]

    def reward(reply, prompt):
        return float(len(reply) + len(prompt))

    *_, end = play(agent, ["four"], monkeypatch, row={"prompt": "x"}, reward=reward)
    assert end.reward == 5.0 and end.stop_reason == "answered"


def test_calls_of_tools_are_messages_of_their_own_and_come_back_as_the_policy_wrote_them(
    monkeypatch,
):
    reply = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    def agent(base_url):
        talk = [user("1 + 1?")]
        message = chat(base_url, talk, tools=[TOOL])
        (call,) = message["tool_calls"]
        assert message["content"] == "I add.\n" and json.loads(call["function"]["arguments"]) == {
            "a": 1
        }
        # As clients send it back: with fields that are null, and arguments written otherwise.
        call["function"]["arguments"] = '{ "a":1 }'
        talk += [
            message | {"refusal": None},
            {"role": "tool", "tool_call_id": call["id"], "content": "2"},
        ]
        talk.append(chat(base_url, talk, tools=[TOOL]))
        # A history that was shortened, with the call in it, and a call of somebody else.
        other = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        talk = [
            user("again"),
            *talk[1:3],
            {"role": "assistant", "content": None, "tool_calls": [other]},
            user("?"),
        ]
        chat(base_url, talk, tools=[TOOL])
        return 1

    start, answered, shortened, _ = play(agent, [reply, "2", "3"], monkeypatch)
    assert start.tools == (TOOL,)
    (result,) = answered.messages
    assert (result.role, result.text) == ("tool", "2")
    assert re.fullmatch("c[0-9a-f]{8}", result.call_id)
    assert shortened.new_context and shortened.tools == (TOOL,)
    assert [(m.role, m.text) for m in shortened.messages] == [
        ("user", "again"),
        ("assistant", reply),
        ("tool", "2"),
        ("assistant", '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'),
        ("user", "?"),
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda talk: ([user("1"), *talk[1:]], []),
        lambda talk: ([talk[0], {"role": "assistant", "content": " b"}, talk[2]], []),
        lambda talk: (talk, [TOOL]),
        lambda talk: (talk[:1], []),
        lambda talk: ([*talk[:2], user("c"), {"role": "assistant", "content": "d"}, user("e")], []),
    ],
    ids=["earlier message", "reply", "tools", "the same again", "a reply of others"],
)
def test_whatever_does_not_go_on_begins_a_new_context(monkeypatch, change):
    def agent(base_url):
        talk = [user("a")]
        talk += [chat(base_url, talk), user("c")]
        messages, tools = change(talk)
        chat(base_url, messages, tools=tools)
        return 0

    _, second, _ = play(agent, ["b", "z"], monkeypatch)
    assert second.new_context and second.metrics == {"requests": 2.0, "new_contexts": 1.0}


def test_whoever_steps_an_agent_answers_its_requests_one_after_the_other(monkeypatch):
    def agent(base_url):
        said = {}
        ask = lambda name: said.update({name: chat(base_url, [user(name)])["content"]})  # noqa: E731
        at_once(ask, "ab")
        return {"reward": 1.0, **{name: float(text) for name, text in said.items()}}

    start, second, end = play(agent, ["1", "2"], monkeypatch)
    order = start.messages[0].text + second.messages[0].text
    assert sorted(order) == ["a", "b"] and second.new_context
    assert end.metrics.items() >= {order[0]: 1.0, order[1]: 2.0, "new_contexts": 1.0}.items()


def test_a_reply_is_paid_before_the_next_request(monkeypatch):
    def agent(base_url):
        statuses = [pay(base_url, 1)]
        chat(base_url, [user("a")])
        statuses += [pay(base_url, reward) for reward in (0.5, 0.25, "much")]
        chat(base_url, [user("b")])
        statuses.append(pay(base_url, -0.5))
        assert statuses == [409, 200, 200, 400, 200]
        return 2

    _, step, end = play(agent, ["x", "y"], monkeypatch)
    assert (step.reward, end.reward) == (0.75, 1.5)


def test_a_reply_is_paid_by_the_id_of_its_answer(monkeypatch):
    def agent(base_url):
        ids = [whole(base_url, [user(text)])["id"] for text in "ab"]
        statuses = [pay(base_url, 0.5, id=each) for each in (*ids, ids[0], "chatcmpl-7.0", 5)]
        assert statuses == [200, 200, 200, 400, 400] and len({*ids}) == 2
        response = ask(base_url, "responses", input="c")
        assert [pay(base_url, 0.25), pay(base_url, 2, id=response["id"])] == [200, 200]
        return 1

    _, second, third, end = play(agent, ["x", "y", "z"], monkeypatch)
    first, later = f"{second.conversation}.0", f"{third.conversation}.0"
    assert (third.reward, third.reply_rewards) == (0.0, {"0.0": 1.0, first: 0.5})
    assert (end.reward, end.reply_rewards) == (1.25, {later: 2.0})


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_a_replay_takes_a_reward_with_the_same_request_as_the_run(monkeypatch, beside, named):
    """It was posted before that, or beside its reply; in the replay it is the other way round."""

    def played(beside, names=None):
        def agent(base_url):
            answer = whole(base_url, [user("a")])
            other = threading.Thread(target=chat, args=(base_url, [user("b")]))
            if beside:
                other.start()
                # In the replay it is taken with the reward.
                while not (session._waiting if names else session._taken):
                    time.sleep(0.001)
            assert pay(base_url, 0.5, **({"id": answer["id"]} if named else {})) == 200
            paid.set()
            if not beside:
                other.start()
            other.join()
            return 2

        async def run():
            start = await environment.start()
            step = await environment.step("x")
            if beside:
                await asyncio.to_thread(paid.wait, 10)
            end = await environment.step("y")
            rewards = (each.reward + sum(each.reply_rewards.values()) for each in (step, end))
            return [start.request, step.request], *rewards

        monkeypatch.setattr("tests.support.agents.agent", agent)
        environment = Agent(agent="tests.support.agents:agent")
        session, paid = environment._session, threading.Event()
        if names is not None:
            environment.repeat_requests(collections.deque(names))
        return asyncio.run(run())

    first = played(beside)
    assert first[1:] == ((0.0, 2.5) if beside else (0.5, 2.0))
    assert played(not beside, first[0]) == first


def test_a_stream_and_the_numbers_of_tokens(monkeypatch):
    parts = []

    def agent(base_url):
        answer = whole(base_url, [user("a")])
        assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
        assert answer["choices"][0]["finish_reason"] == "stop"
        address, path = parts_of(base_url)
        given = {"messages": [user("b")], "stream_options": {"include_usage": True}}
        parts.extend(http_client.events(address, f"{path}/chat/completions", **given))
        return 0

    play(agent, ["x", "y"], monkeypatch)
    deltas = [part["choices"][0] for part in parts if part["choices"]]
    assert deltas[0]["delta"] == {"role": "assistant", "content": "y"}
    assert deltas[-1]["finish_reason"] == "stop" and parts[-1]["usage"]["total_tokens"] == 14


def test_a_client_that_went_away_gets_the_reply_of_the_same_request(monkeypatch):
    def agent(base_url):
        address, path = parts_of(base_url)
        body = json.dumps({"messages": [user("a")]})
        client = http.client.HTTPConnection(address.removeprefix("http://"))
        client.request("POST", f"{path}/chat/completions", body, http_client.JSON)
        taken.wait(10)
        client.close()
        while not lost._lost:
            time.sleep(0.001)
        answer.set()
        return {"reward": 0.0, "said": float(chat(base_url, [user("a")])["content"])}

    taken, answer = threading.Event(), threading.Event()
    monkeypatch.setattr("tests.support.agents.agent", agent)

    async def run():
        nonlocal lost
        environment = Agent(agent="tests.support.agents:agent")
        lost = environment._session
        await environment.start()
        taken.set()
        await asyncio.to_thread(answer.wait, 10)
        return await environment.step("7")

    lost = None
    end = asyncio.run(run())
    assert end.done and end.metrics["said"] == 7.0


def test_a_request_that_was_claimed_is_heard_before_the_end_of_its_agent(monkeypatch):
    def agent(base_url):
        chat(base_url, [user("a")])
        other = threading.Thread(target=chat, args=(base_url, [user("b")]), daemon=True)
        other.start()
        claimed.wait(10)
        return 3

    claimed = threading.Event()
    monkeypatch.setattr("tests.support.agents.agent", agent)

    async def run():
        environment = Agent(agent="tests.support.agents:agent")
        await environment.start()
        await environment.give("x")
        while not environment.claim():
            await asyncio.sleep(0.001)
        claimed.set()
        while environment._session._result is None:
            await asyncio.sleep(0.001)
        asked = await environment.next()
        assert asked.messages == (Message(role="user", text="b"),)
        assert not environment.claim() and environment.branch() is None
        return await environment.step("y")

    assert asyncio.run(run()).reward == 3


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_the_agent_of_a_discarded_episode_is_informed_and_ends(monkeypatch, kind):
    outcomes, ended = [], threading.Event()

    def agent(base_url):
        try:
            outcomes.append(send(base_url, "chat/completions", messages=[user("a")]))
        finally:
            ended.set()

    async def waits(base_url):
        try:
            await asyncio.to_thread(agent, base_url)
        except asyncio.CancelledError:
            outcomes.append("cancelled")
            raise

    monkeypatch.setattr("tests.support.agents.agent", waits if kind == "coroutine" else agent)

    async def run():
        environment = Agent(agent="tests.support.agents:agent")
        await environment.start()
        del environment
        gc.collect()
        await asyncio.to_thread(ended.wait, 10)

    asyncio.run(run())
    (status, body), *_ = [each for each in outcomes if each != "cancelled"]
    assert status == 410 and "is over" in body["error"]["message"]
    assert ("cancelled" in outcomes) == (kind == "coroutine")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "n is 2; an episode has one reply at a time"),
        ({"stop": [""]}, "none of them empty"),
        ({"logprobs": True}, "logprobs is not read of an agent's requests"),
        (
            {"structured_outputs": {"choice": ["a"]}},
            "structured_outputs is not read of an agent's requests",
        ),
        ({"response_format": {"type": "json_object"}}, "this server supports"),
        ({"messages": []}, "messages is empty"),
        (
            {"messages": [user("a"), {"role": "assistant", "content": "b"}]},
            "messages\\[1\\] is the",
        ),
        ({"tool_choice": "required"}, "the last two with such a tool in tools: there are none"),
        ({"massages": 1}, "massages is not known here; did you mean 'messages'"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused_and_the_agent_may_go_on(
    monkeypatch, fields, words
):
    refused = []

    def agent(base_url):
        body = {"messages": [user("a")], **fields}
        refused.append(send(base_url, "chat/completions", **body))
        chat(base_url, [user("b")])
        return 0

    start, end = play(agent, ["x"], monkeypatch)
    ((status, body),) = refused
    assert status == 400 and start.messages[0].text == "b" and end.done
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(body["error"]["message"])


def test_endpoint_serves_its_paths_until_the_episode_ends(monkeypatch):
    urls = []

    def agent(base_url):
        address, path = parts_of(base_url)
        urls.append((address, path))
        send = functools.partial(http_client.send, address)
        assert send(f"{path}/models")[1]["data"][0]["id"] == "policy"
        assert send(f"{path}/completions", {})[0] == 404
        assert send(f"{path}/chat/completions")[0] == 405
        assert send("/nobody/v1/chat/completions", {"messages": [user("a")]})[0] == 410
        chat(base_url, [user("a")])
        return 0

    play(agent, ["x"], monkeypatch)
    gc.collect()
    ((address, path),) = urls
    status, body = http_client.send(address, f"{path}/models")
    assert (status, body["error"]["code"]) == (410, 410)


def test_an_address_of_ipv6_is_in_brackets():
    address = endpoint_at("::1", 0).open(Session()).removesuffix("/v1").rpartition("/")[0]
    assert urllib.parse.urlsplit(address).hostname == "::1" and address.startswith("http://[::1]:")


def fails(base_url):
    raise LookupError("no such page")


def returns(base_url):
    return 1.0


@pytest.mark.parametrize(
    ("agent", "error", "words"),
    [
        (fails, LookupError, "no such page"),
        (returns, InputError, "ended without a request"),
    ],
)
def test_an_agent_that_raises_or_never_asks_fails_its_episode(monkeypatch, agent, error, words):
    with pytest.raises(error, match=words):
        play(agent, [], monkeypatch)


def test_agent_must_return_a_reward_or_an_answer(monkeypatch):
    def agent(base_url):
        chat(base_url, [user("a")])

    with pytest.raises(InputError, match="agents:agent' returned None; it must return a number"):
        play(agent, ["x"], monkeypatch)
    with pytest.raises(InputError, match="must return its answer, a text"):
        play(agent, ["x"], monkeypatch, row={}, reward=lambda reply: 1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "config.env.args.agent is ''; give your own as 'module:name'"),
        ({"agent": "tests.support.agents:nothing"}, "has no 'nothing'"),
        ({"agent": "tests.support.agents:agent", "settings": {"depth": 1}}, "settings.depth"),
        ({"agent": "tests.support.agents:needs_a_row"}, "missing a required argument: 'row'"),
        ({"agent": "tests.support.agents:agent", "call_format": "xml"}, "call_format is 'xml'"),
    ],
)
def test_arguments_are_checked_before_anything_starts(arguments, words):
    with pytest.raises(InputError, match=words):
        Agent(**arguments)


def test_a_step_without_a_new_context_takes_no_earlier_replies():
    messages = (Message(role="user", text="a"), Message(role="assistant", text="b"))
    step = functools.partial(StepResult, reward=0.0, done=False)
    with pytest.raises(InputError, match="it must be one of system, user, tool"):
        check_step(step(messages=messages))
    with pytest.raises(InputError, match="last of StepResult.messages has the role 'assistant'"):
        check_step(step(messages=messages, new_context=True))
    with pytest.raises(InputError, match="tools are those of a new_context"):
        check_step(step(text="a", tools=(TOOL,)))
    with pytest.raises(InputError, match="needs messages"):
        check_step(step(text="a", new_context=True))


# With an engine: requests are turns of rows that are trained on.


def talks(base_url, seed):
    """Goes on once, then shortens its history; the reward is the number of its messages."""
    talk = [SYSTEM, user(f"{seed}?")]
    talk.append(chat(base_url, talk))
    talk.append(user("né"))
    talk.append(chat(base_url, talk))
    short = [user("so far:"), talk[2], user("so?"), talk[4], user("and?")]
    short.append(chat(base_url, short))
    TALKS[seed] = talk, short
    return float(seed)


def takes_turns(base_url, seed):
    """Speaks for two agents in turns, who each go on; the reward is the number of its messages."""
    talks = [[SYSTEM, user(f"{seed}?")], [user("né?")]]
    for number in range(6):
        talk = talks[number % 2]
        talk += [chat(base_url, talk), user(str(number))]
    TALKS[seed] = talks
    return float(seed)


def asks_at_once(base_url, seed):
    """Three agents ask at the same time, each goes on, and a fourth one has what they said."""
    talks = [[SYSTEM, user(f"{seed}?")], [user("né?")], [user("né?")]]

    def speak(talk):
        talk += [chat(base_url, talk), user("and?")]
        talk.append(chat(base_url, talk))

    at_once(speak, talks)
    talks.append([user("".join(talk[-1]["content"] for talk in talks))])
    talks[-1].append(chat(base_url, talks[-1]))
    TALKS[seed] = talks
    return float(seed)


def asks_on(base_url, seed):
    """Never ends by itself."""
    talk = []
    try:
        while True:
            talk.append(user("and?"))
            talk.append(chat(base_url, talk))
    except AssertionError as error:
        TALKS[seed] = str(error)


TALKS = {}


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


def collect(number, make, **settings):
    pool = EnvironmentPool(4, timeout_s=30.0)
    rollout = episodes.collect(pool, episodes.tasks(number), make=make, **settings)
    pool.close()
    return rollout


def collect_agents(agent, number, **changes):
    TALKS.clear()
    made = functools.partial(Agent, agent=f"{__name__}:{agent.__name__}")
    settings = {"context_buckets": (64, 256), "max_tokens": 256, **changes}
    return collect(number, lambda task: made(**task.args), **settings)


def test_every_reply_is_a_turn_behind_what_the_agent_asked_token_for_token():
    render = episodes.renderer()
    rollout = collect_agents(talks, 12)
    for trajectory in rollout.trajectories:
        assert trajectory.stop_reason == "answered", trajectory.detail
        talk, short = TALKS[int(trajectory.reward)]
        assert trajectory.reward == 100 + trajectory.episode
        first, one, again, two, anew, three = trajectory.turns
        opening = [Message(role=each["role"], text=each["content"]) for each in talk[:2]]
        assert first.token_ids == render.first(opening)
        assert again.token_ids == render.answer("né") and not again.forks
        said = [turn.text for turn in (one, two, three)]
        assert said == [talk[2]["content"], talk[4]["content"], short[-1]["content"]]
        template = episodes.tokenizer().apply_chat_template
        prompt = template(short[:-1], tokenize=False, add_generation_prompt=True)
        assert anew.forks and render.decode(anew.token_ids) == prompt
        assert trajectory.metrics == {"requests": 3.0, "new_contexts": 1.0}
        assert len(trajectory.sample_starts) == 2
    episodes.check_rows(rollout, 12)


def test_conversations_that_take_turns_are_a_sample_each():
    """The one whose reply was the last comes last, with the reward at its end."""
    render = episodes.renderer()
    rollout = collect_agents(takes_turns, 12)
    for trajectory in rollout.trajectories:
        assert trajectory.metrics == {"requests": 6.0, "new_contexts": 1.0}
        assert trajectory.turn_rewards == (0.0,) * 5 + (100.0 + trajectory.episode,)
        talks = TALKS[int(trajectory.reward)]
        assert [turn.forks for turn in trajectory.turns] == [False] * 6 + [True] + [False] * 5
        assert len(trajectory.sample_starts) == 2
        for talk, turns in zip(talks, (trajectory.turns[:6], trajectory.turns[6:]), strict=True):
            said = [each for each in talk if each["role"] != "assistant"]
            opening = [Message(role=m["role"], text=m["content"]) for m in said[:-3]]
            assert turns[0].token_ids == render.first(opening)
            answers = [render.answer(message["content"]) for message in said[-3:-1]]
            assert [turn.token_ids for turn in turns[2::2]] == answers
            replies = [each["content"] for each in talk if each["role"] == "assistant"]
            assert [turn.text for turn in turns[1::2]] == replies
    episodes.check_rows(rollout, 12)


SHARED = {"num_slots": 8, "share_prefixes": True}


@pytest.mark.parametrize(
    ("number", "settings"),
    [(6, {}), (24, {}), (24, SHARED)],
    ids=["free slots", "too few", "caches"],
)
def test_requests_at_the_same_time_are_conversations_of_one_episode(number, settings):
    """Whatever order they come in, and whether there are slots for all of them at once."""
    rollout = collect_agents(asks_at_once, number, **settings)
    for trajectory in rollout.trajectories:
        assert trajectory.stop_reason == "answered", trajectory.detail
        assert trajectory.metrics == {"requests": 7.0, "new_contexts": 3.0}
        assert trajectory.turn_rewards == (0.0,) * 6 + (100.0 + trajectory.episode,)
        assert len(trajectory.sample_starts) == 4
        found = collections.defaultdict(list)
        for turn in trajectory.turns:
            found[turn.conversation].append(turn)
        said = {
            tuple(turn.text for turn in turns if turn.author == "policy")
            for turns in found.values()
        }
        assert said == {
            tuple(each["content"] for each in talk if each["role"] == "assistant")
            for talk in TALKS[int(trajectory.reward)]
        }
        ids = episodes.renderer().answer("and?")
        assert sorted(len(turns) for turns in found.values()) == [2, 4, 4, 4]
        assert all(turns[2].token_ids == ids for turns in found.values() if len(turns) == 4)
    episodes.check_rows(rollout, number)


def pays_each(base_url, seed):
    """Three agents ask at once and go on; each pays its replies as they come, the first last."""

    def speak(number):
        talk, ids = [user(f"{seed}{number}?")], []
        for _ in range(2):
            answer = whole(base_url, talk)
            ids.append(answer["id"])
            talk += [answer["choices"][0]["message"], user("and?")]
        for turn in (1, 0):
            assert pay(base_url, 10 * number + turn, id=ids[turn]) == 200

    at_once(speak, range(3))
    return 0.0


def test_each_of_the_replies_at_the_same_time_has_its_own_reward():
    rollout = collect_agents(pays_each, 12)
    for trajectory in rollout.trajectories:
        assert trajectory.stop_reason == "answered", trajectory.detail
        rewards = trajectory.turn_rewards
        assert sorted(rewards) == [0, 1, 10, 11, 20, 21]
        assert [reward % 10 for reward in rewards] == [0, 1] * 3
        for turn, reward in zip(trajectory.turns[::4], rewards[::2], strict=True):
            assert turn.text == f"{100 + trajectory.episode}{int(reward) // 10}?"
    episodes.check_rows(rollout, 12)


async def gathers(base_url, seed):
    """Three agents ask at once, two of them the same, each goes on, and a fourth one hears them.

    They pay each reply. What they ask and pay is a matter of the replies, and their order behind
    the first requests one of `WAITS`.
    """
    talks = [[SYSTEM, user(f"{seed}?")], [user("né?")], [user("né?")]]

    async def speak(talk):
        for turn in range(2):
            await asyncio.sleep(turn * WAITS.random() / 50)
            talk += [await asyncio.to_thread(chat, base_url, talk), user("and?")]
            reward = 0.1 * (1 + len(talk[-2]["content"]))
            assert await asyncio.to_thread(pay, base_url, reward) == 200
        return talk[-2]["content"]

    said = await asyncio.gather(*map(speak, talks))
    await asyncio.to_thread(chat, base_url, [user("".join(sorted(said)))])
    return {"reward": float(seed), "said": float(len("".join(said)))}


WAITS = random.Random(0)


def test_a_replay_of_agents_that_ask_at_once_plays_the_same(tmp_path):
    """Whichever request comes first here, and whoever goes on first; and not by chance."""

    def played(number, **given):
        WAITS.seed(number)
        events = Events(tmp_path / str(number), **given)
        rollout = collect_agents(gathers, 6, num_slots=8, patience_s=0.002, events=events)
        events.sync()
        lines = (tmp_path / str(number)).read_text().splitlines()
        return rollout.trajectories, [json.loads(line) for line in lines]

    first, noted = played(1)
    assert {each.stop_reason for each in first} == {"answered"}
    assert all(each.metrics["requests"] == 7.0 for each in first)
    assert any("requests" in each for each in noted if each["event"] == "asked")
    names = [name for each in noted for name in each.get("requests", {}).values()]
    assert any(" " in name for name in names), "rewards are taken with requests"
    for each in first:
        *said, _ = (turn.text for turn in each.turns if turn.author == "policy")
        paid = sum(0.1 * (1 + len(text)) for text in said)
        assert each.reward == pytest.approx(100 + each.episode + paid)
    assert played(2)[1] != noted
    for number in (3, 4):
        again, same = played(number, replayed=noted)
        assert same == noted and again == first


def test_a_replay_of_agents_that_went_on_from_a_checkpoint_plays_the_same():
    """They are given their replies again, in whatever order they ask for them."""

    def opened(todo, **given):
        pool = EnvironmentPool(4, timeout_s=30.0)
        made = functools.partial(Agent, agent=f"{__name__}:{gathers.__name__}")
        settings = {"max_tokens": 256, "context_buckets": (256,), "patience_s": 0.002}
        make = lambda task: made(**task.args)  # noqa: E731
        service = episodes.open_service(pool, make, num_slots=16, **settings, **given)
        service.submit(todo)
        return service

    def finished(number, **given):
        WAITS.seed(number)
        events, found = Events(**given), []
        note, noted = events.note, []

        def keep(event, **facts):
            note(event, **facts)
            noted.append({"event": event, "version": 0, **json.loads(json.dumps(facts))})

        events.note = keep
        service = opened(resumed, events=events)
        for done in service.drain():
            found += [each.trajectory for each in done]
            for each in done:
                episodes.check_row(service, each)
                service.release(each.row)
        return sorted(found, key=lambda each: each.episode), noted

    todo = episodes.tasks(5)
    before = opened(todo)
    while before.stats.rollout_tokens < 25:
        for done in before.step():
            before.release(done.row)
    begun = before.open_episodes()
    assert any(len({turn.conversation for turn in each.turns}) > 1 for each in begun.values())
    resumed = [dataclasses.replace(task, resumes=begun.get(task.episode)) for task in todo]
    first, noted = finished(5)
    again, same = finished(6, replayed=noted)
    assert same == noted and again == first


def test_an_episode_that_a_limit_ends_is_over_for_its_agent(no_collector):
    """At once: nothing but the episode holds its environment."""
    rollout = collect_agents(asks_on, 8, max_turns=3)
    assert {each.stop_reason for each in rollout.trajectories} == {"too_many_turns"}
    assert {each.num_turns for each in rollout.trajectories} == {3}
    until = time.monotonic() + 20
    while len(TALKS.keys() & range(100, 108)) < 8 and time.monotonic() < until:
        time.sleep(0.01)
    assert all("a limit of the run ended it" in TALKS[seed] for seed in range(100, 108))


def ends_at(base_url, seed):
    """Ends every second reply at a digit of its own."""
    talk = []
    for number in range(8):
        talk.append(user("and?"))
        stop = list("012345678") if number % 2 else []
        talk.append(chat(base_url, talk, stop=stop))
    TALKS[seed] = [message["content"] for message in talk[1::2]]
    return 0


def test_a_stop_of_a_request_ends_its_reply_and_no_other_one():
    """The digit is a token of the turn; the agent gets the text before it, which is none."""
    rollout = collect_agents(ends_at, 4)
    for trajectory in rollout.trajectories:
        replies = trajectory.turns[1::2]
        end = episodes.renderer().end_of_turn_id
        assert [turn.token_ids[-1] == end for turn in replies] == [True, False] * 4
        assert [len(turn.token_ids) for turn in replies[1::2]] == [1] * 4
        said = TALKS[100 + trajectory.episode]
        assert [len(text) for text in said] == [1, 0] * 4
        assert trajectory.metrics["new_contexts"] == 0
    episodes.check_rows(rollout, 4)


def fails_behind_a_reply(base_url):
    """Fails, while a thread of its own still asks."""
    chat(base_url, [user("a")])
    ask = functools.partial(asks_on, base_url, base_url)
    threading.Thread(target=ask, daemon=True).start()
    raise LookupError("no such page")


@pytest.mark.parametrize("agent", [fails, fails_behind_a_reply])
def test_an_agent_that_fails_leaves_nothing_behind(no_collector, agent):
    """Its address is gone with the episode: no circle of the error and its frames holds it."""
    sessions = endpoint_at("127.0.0.1", 0)._sessions
    others = set(sessions)
    rollout = collect_agents(agent, 4)
    assert {each.stop_reason for each in rollout.trajectories} == {"environment_error"}
    assert all("no such page" in each.detail for each in rollout.trajectories)
    until = time.monotonic() + 20
    while (left := set(sessions) - others) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left


def digit_calls(text):
    """Reads digits above 2 as a call."""
    return [Call("add", {"a": int(text)})] if text in "345678" and text else []


def add(a: int) -> str:
    """Adds one.

    Args:
        a: a number
    """
    return str(a + 1)


def calls_add(base_url, row, by_id=False):
    """Does what the environment `tools` does: calls, up to a reply without one."""
    talk, tools = list(row["prompt"]), [describe("add", add)]
    while True:
        message = chat(base_url, talk, tools=tools)
        if "tool_calls" not in message:
            return message["content"]
        (call,) = message["tool_calls"]
        text = add(**json.loads(call["function"]["arguments"]))
        named = {"tool_call_id": call["id"]} if by_id else {"name": "add"}
        talk += [message, {"role": "tool", **named, "content": text}]


def calls_add_by_responses(base_url, row):
    """Does the same over /v1/responses."""
    system, *talk = row["prompt"]
    tool = {"type": "function", **describe("add", add)["function"]}
    while True:
        given = {"instructions": system["content"], "input": talk, "tools": [tool]}
        output = ask(base_url, "responses", **given)["output"]
        if output[-1]["type"] == "message":
            return output[-1]["content"][0]["text"]
        text = add(**json.loads(output[-1]["arguments"]))
        result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": text}
        talk += [*output, result]


def calls_add_by_messages(base_url, row):
    """Does the same over /v1/messages."""
    system, *talk = row["prompt"]
    tool = dict(describe("add", add)["function"])
    tool |= {"input_schema": tool.pop("parameters"), "cache_control": {"type": "ephemeral"}}
    while True:
        given = {"system": system["content"], "messages": talk, "tools": [tool], "max_tokens": 9}
        content = ask(base_url, "messages", **given)["content"]
        if not content or content[-1]["type"] == "text":
            return "".join(block["text"] for block in content)
        text, call = add(**content[-1]["input"]), content[-1]["id"]
        result = {"type": "tool_result", "tool_use_id": call, "content": text}
        talk.append({"role": "assistant", "content": content})
        talk.append({"role": "user", "content": [result]})


def must_call(base_url, seed):
    """Demands a call of any tool, and one of this; the prompts are counted before."""
    talk, tools = [SYSTEM, user(f"{seed}?")], [TOOL]
    named = {"type": "function", "function": {"name": "add"}}
    COUNTED[seed] = []
    for choice in ("required", named):
        given = {"messages": talk, "tools": tools, "tool_choice": choice}
        answer = whole(base_url, **given)
        COUNTED[seed].append((answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]))
        talk = [*talk, answer["choices"][0]["message"], user("and?")]
    count = functools.partial(ask, base_url, "messages/count_tokens")
    tool = {"name": "add", "input_schema": {"type": "object"}}
    system, question = SYSTEM["content"], [user(f"{seed}?")]
    alone = count(system=system, messages=question)["input_tokens"]
    shown = {"system": system, "messages": question, "tools": [tool]}
    free = count(**shown)["input_tokens"]
    begun = count(**shown, tool_choice={"type": "any"})["input_tokens"]
    COUNTED[seed] += [alone, free, begun]
    return 1


COUNTED = {}


def test_a_call_that_is_demanded_is_begun_in_the_prompt():
    """Its beginning is no token of the policy; in the reply's text, and in the history, it is."""
    render = episodes.calling_renderer()
    conversation = functools.partial(Conversation, render)
    settings = {"context_buckets": (512,), "max_tokens": 512, "max_turn_tokens": 100}
    rollout = collect_agents(must_call, 4, new_conversation=conversation, **settings)
    for trajectory in rollout.trajectories:
        assert trajectory.stop_reason == "answered", trajectory.detail
        assert trajectory.metrics["new_contexts"] == 0
        seed = 100 + trajectory.episode
        (first, said), (_, again), alone, free, begun = COUNTED[seed]
        opening, named = "<tool_call>\n", '<tool_call>\n{"name": "add", "arguments":'
        asked, reply, more, last = trajectory.turns
        assert render.decode(asked.token_ids).endswith(f"<|assistant|>{opening}")
        assert render.decode(more.token_ids).endswith(f"<|assistant|>{named}")
        assert said["content"] == opening + render.decode_reply(reply.token_ids) == reply.text
        assert again["content"] == named + render.decode_reply(last.token_ids) == last.text
        assert first == len(asked.token_ids)
        assert alone < free and begun - free == len(render.beginning(opening))
    episodes.check_rows(rollout, 4)


def demands_in_vain(base_url):
    body = {"messages": [user("a")], "tools": [TOOL], "tool_choice": "required"}
    status, _ = send(base_url, "chat/completions", **body)
    chat(base_url, [user("b")])
    return {"reward": 0.0, "status": float(status)}


def test_a_call_is_refused_that_the_template_does_not_begin():
    (trajectory,) = collect_agents(demands_in_vain, 1).trajectories
    assert trajectory.metrics["status"] == 400 and trajectory.stop_reason == "answered"


@pytest.mark.parametrize("history", ["append", "fork"])
def test_the_beginning_of_a_call_is_part_of_the_conversation(history):
    render = episodes.calling_renderer()
    conversation = Conversation(render, history)
    asked = conversation.begin_call(conversation.open("1?"), "")
    assert render.decode(asked.ids).endswith("<|assistant|><tool_call>\n")
    assert conversation.reply(render.reply("2")) == ("<tool_call>\n2", True)
    answer = conversation.answer("so?")
    assert answer.ids == render.answer("so?") and not answer.forks
    with pytest.raises(InputError, match="does not write calls"):
        Conversation(episodes.renderer()).begin_call(asked, "")


def length(reply, prompt):
    return float(len(reply) + len(prompt))


def test_an_agent_with_tools_plays_what_the_environment_of_tools_plays():
    row = {"prompt": [user("tic_tac_toe")]}
    beside = {"call_format": f"{__name__}:digit_calls", "reward": length, "row": row}
    made = (
        functools.partial(ToolUse, tools=(f"{__name__}:add",), **beside),
        functools.partial(Agent, agent=f"{__name__}:calls_add", **beside),
    )
    settings = {"context_buckets": (512,), "max_tokens": 512, "max_turns": 3}
    tools, agents = (collect(16, lambda _, make=make: make(), **settings) for make in made)
    for one, other in zip(tools.trajectories, agents.trajectories, strict=True):
        assert one.turns == other.turns and one.turn_rewards == other.turn_rewards
    assert {"answered", "too_many_turns"} == {t.stop_reason for t in agents.trajectories}


def test_an_agent_plays_the_same_over_each_api():
    beside = {"call_format": f"{__name__}:digit_calls", "reward": length}
    beside["row"] = {"prompt": [SYSTEM, user("tic_tac_toe")]}
    settings = {"context_buckets": (512,), "max_tokens": 512, "max_turns": 3}
    agents = (
        functools.partial(Agent, agent=f"{__name__}:calls_add", settings={"by_id": True}, **beside),
        functools.partial(Agent, agent=f"{__name__}:calls_add_by_responses", **beside),
        functools.partial(Agent, agent=f"{__name__}:calls_add_by_messages", **beside),
    )
    chat, *others = (collect(16, lambda _, make=make: make(), **settings) for make in agents)
    assert {"answered", "too_many_turns"} == {t.stop_reason for t in chat.trajectories}
    for other in others:
        assert other.trajectories == chat.trajectories


@pytest.mark.parametrize("history", ["append", "fork"])
def test_a_conversation_that_begins_anew_is_the_templates_and_goes_on(history):
    """With replies in it, of the policy or not; what was said before is forgotten."""
    render = episodes.renderer()
    conversation = Conversation(render, history)
    conversation.open("forgotten")
    conversation.reply(render.reply("4"))
    talk = [("system", "count"), ("user", "1?"), ("assistant", "2"), ("user", "né")]
    messages = tuple(Message(role=role, text=text) for role, text in talk)
    anew = conversation.open_anew(messages, ())
    template = episodes.tokenizer().apply_chat_template
    given = [{"role": role, "content": text} for role, text in talk]
    assert anew.forks
    assert render.decode(anew.ids) == template(given, tokenize=False, add_generation_prompt=True)
    fresh = Conversation(render, history)
    assert fresh.open(messages).ids == anew.ids
    conversation.reply(render.reply("5"))
    answer = conversation.answer("so?")
    assert answer.ids == render.answer("so?") and not answer.forks


def config_of_agents(agent, staleness, **more):
    """The config of a run of this agent, with settings by their full names."""
    stops = {"rollout.stop_token_ids": (), "rollout.stop_strings": tuple("abcdefghijklmnopqrst")}
    stops["rollout.context_buckets"] = (256,)
    stops |= {"asynchrony.max_staleness": staleness, "rollout.num_slots": 16, "eval.games": 4}
    env = {"env.name": "agent", "env.args.agent": f"{__name__}:{agent.__name__}"}
    env["env.timeout_s"] = 60.0
    given = {}
    for name, value in {**SMALL, **stops, **env, "rollout.patience_s": 0.001, **more}.items():
        *sections, last = name.split(".")
        section = functools.reduce(lambda into, key: into.setdefault(key, {}), sections, given)
        section[last] = value
    return config_file.make_config(given)


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "requests"), [(takes_turns, 6.0), (gathers, 7.0)])
def test_a_run_of_agents_is_replayed(tmp_path, agent, requests):
    """Two take turns in one episode, whose row comes from the host; and some play at once."""
    first = tmp_path / "run"
    train(config_of_agents(agent, staleness=1), first)
    assert max(step["env"]["requests"] for step in steps_of(first)) == requests
    assert ('"asked"' in (first / EVENTS).read_text()) == (agent is gathers)
    check_replay(first, 3)


def train_on_agents(workdir, replay, staleness, settings):
    """In each process: trains on agents that ask at once, by a run's events if there is one."""
    WAITS.seed(len(replay))
    longer = {"rollout.stop_strings": tuple("abcdefghi")}
    # More than episodes play at once: requests at the same time are taken where a slot is free.
    longer["rollout.num_slots"] = 64
    config = config_of_agents(gathers, staleness, num_steps=2, **longer, **settings)
    train(config, Path(workdir), replay=Path(replay) if replay else None)
    return True


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("staleness", "players", "settings"),
    [
        (1, (0,), {"devices.num_rollout": 1}),
        (1, (0, 1), {}),
        (0, (0, 1), {"selector.rollout_meshes": ("data=2",)}),
        (0, (0, 1), {"selector.rollout_meshes": ("data=1,tensor=2",)}),
    ],
    ids=["apart", "in-turn", "synchronous", "one-engine"],
)
def test_a_run_of_agents_in_two_processes_is_replayed(tmp_path, staleness, players, settings):
    """Both play and train in turn, or one of them plays; or one engine spans both."""
    first, again = tmp_path / "run", tmp_path / "again"
    for workdir, replay in ((first, ""), (again, str(first))):
        given = (str(workdir), replay, staleness, settings)
        assert Processes(2, 1, "test_agents:train_on_agents", *given).results(500) == [True] * 2
    assert max(step["env"]["requests"] for step in steps_of(first)) > 3.0
    asked_at_once = 0
    for process in (0, 1):
        files = [events_file(workdir, process) for workdir in (first, again)]
        assert [file.exists() for file in files] == [process in players] * 2
        if process in players:
            one, other = (file.read_text() for file in files)
            assert one == other
            asked_at_once += one.count('"asked"')
    assert (asked_at_once > 0) == ("tensor" not in str(settings))
    assert_equal(final_parameters(first), final_parameters(again))


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["solver:solve", "started:solve"])
def test_the_agents_of_the_how_to_train_asynchronously_and_go_on(tmp_path, agent):
    """As functions in the run's process, and as processes of their own."""
    page = (ROOT / "docs" / "howto" / "agent.md").read_text()
    for language, code in re.findall(r"```(python|json)\n(.*?)```", page, re.DOTALL):
        name = "sums.jsonl" if language == "json" else code.split("\n")[0].removeprefix("# ")
        (tmp_path / name).write_text(code)

    def train(workdir):
        settings = {**SMALL, "env.args.agent": agent}
        flags = [f"--config.{key}={value}" for key, value in settings.items()]
        command = ("-m", "earl_jax.main", "--config=solver_config.py", f"--workdir={workdir}")
        done = run_python(*command, *flags, cwd=tmp_path, PYTHONPATH=python_path(ROOT))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    train("run")
    cut_off(tmp_path / "run", tmp_path / "cut", 2)
    assert "after step 2 of 3" in train("cut")
    for workdir in ("run", "cut"):
        rows = read_metrics(tmp_path / workdir / "metrics.jsonl")
        steps = [row for row in rows if "eval" not in row]
        assert [row["step"] for row in steps] == [1, 2, 3]
        for row in steps:
            assert row["env"].keys() <= {"requests", "new_contexts", "changed"}
            assert row["env"]["new_contexts"] == 0 and row["env"]["requests"] > 1
            assert row["failed_share"] == 0
