# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The environment "tools": calls in each format, their answers, and what an episode is paid."""

import asyncio
import gc
import importlib
import json
import re
from pathlib import Path

import pytest

from benchmarks import tools as shop
from earl_jax import training
from earl_jax.config.file import load_config_file, make_config
from earl_jax.envs.environment import Message, check_start, check_step
from earl_jax.envs.event_loop import settle
from earl_jax.envs.registry import EnvConfig, open_environment
from earl_jax.envs.tasks import TasksConfig
from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.conversation import Conversation
from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.envs.tools.calls import CALL_FORMATS, typed
from earl_jax.envs.tools.functions import is_outage
from earl_jax.envs.tools.tool_use import ToolUse
from earl_jax.settings.errors import InputError
from earl_jax.telemetry.episodes import read_trajectories
from tests.support import ROOT, tools
from tests.support.runs import steps_of

ADD, FAIL, REACH = (f"tests.support.tools:{name}" for name in ("add", "fail", "reach"))
SUM = {"prompt": "1 + 2 =", "answer": "3"}
STOCK = {"prompt": "buy all", "stock": {"pear": 2, "plum": 1}}


# Calls as policies write them.
WRITTEN_TWICE = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
NO_OBJECT = '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'
MISTRAL = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "a1b2c3d4e"}]'


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tagged(name: str, **arguments: str) -> str:
    """A call as Qwen3-Coder and Qwen3.5 write it."""
    given = [f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(given)}</function>\n</tool_call>"


def play(env: ToolUse, *replies: str) -> list:
    """The checked start and the results of these replies."""
    return [check_start(env.start()), *(check_step(settle(env.step(reply))) for reply in replies)]


def texts(result) -> list[str]:
    return [message.text for message in result.messages]


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", "3", []),
        ("hermes", call("add", a=1), [("add", {"a": 1}, "")]),
        ("hermes", f"I add. {call('add', a=1)}\n{call('now')}", [("add", {"a": 1}, ""), "now"]),
        ("hermes", WRITTEN_TWICE, [("f", {"a": 1}, "")]),
        ("hermes", "<tool_call>{</tool_call>", ["!the call is no JSON"]),
        ("hermes", "<tool_call>[1]</tool_call>", ['!a call must be a JSON object with a "name"']),
        ("hermes", NO_OBJECT, ['!"arguments" must be a JSON object']),
        ("hermes", '<tool_call>{"name": "f"}', ["!the call has no </tool_call>"]),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", ["!the call is no JSON"]),
        ("hermes", tagged("add", a="1", b="x\ny"), [("add", {"a": "1", "b": "x\ny"}, "")]),
        ("hermes", f"I look. {tagged('now')}", ["now"]),
        (
            "hermes",
            "<tool_call><function=f>1</function></tool_call>",
            ["!between <parameter=NAME>"],
        ),
        ("hermes", "<tool_call><function=f></tool_call>", ["!the call is no JSON"]),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1}, "")]),
        ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}', ["now"]),
        ("llama3", '{"answer": 3}', []),
        ("llama3", '{"name": "add", "parameters": {"a": }}', ["!the call is no JSON"]),
        ("llama3", '{"name": "now", "parameters": {}}; {"name": "now"}', ["!the call is no JSON"]),
        ("llama3", '{"name": "Ada"}', ['!a call must be a JSON object with "name" and "param']),
        ("llama3", "3", []),
        ("mistral", MISTRAL, [("add", {"a": 1}, "a1b2c3d4e")]),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "id": "?"}]', [("now", {}, "000000000")]),
        ("mistral", "[TOOL_CALLS] {}", ["!what follows [TOOL_CALLS] must be"]),
        ("mistral", "3", []),
    ],
)
def test_calls_of_a_reply_in_each_format(name, text, calls):
    found = CALL_FORMATS[name](text)
    assert len(found) == len(calls)
    for got, want in zip(found, calls, strict=True):
        if isinstance(want, str) and want.startswith("!"):
            assert got.error.startswith(want[1:])
        elif isinstance(want, str):
            assert (got.name, dict(got.arguments), got.error) == (want, {}, "")
        else:
            assert (got.name, got.arguments, got.call_id, got.error) == (*want, "")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "42", 42),
        ({"type": "string"}, "42", "42"),
        ({"type": "string", "nullable": True}, "null", "null"),
        ({"type": ["integer", "string"]}, "42", "42"),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "true", True),
        ({"type": "array", "items": {"type": "number"}}, "[1, 2.5]", [1, 2.5]),
        ({"type": "object"}, '{"b": null}', {"b": None}),
        ({"type": "integer"}, "four", "four"),
        (None, "42", "42"),
    ],
)
def test_arguments_between_tags_are_read_as_the_tool_describes_them(schema, text, value):
    [found] = CALL_FORMATS["hermes"](tagged("f", a=text))
    description = served("f", **({} if schema is None else {"a": schema}))
    assert typed(found, description) == {"a": value}
    assert typed(found, None) == {"a": text}


def served(name: str, **parameters: dict) -> dict:
    schema = {"type": "object", "properties": parameters, "required": [*parameters]}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


class Served:
    """Tools with descriptions of their own; one of them waits."""

    DESCRIBED = (served("shout", text={"type": "string"}), served("wait"))

    def describe(self):
        return list(self.DESCRIBED)

    def call(self, name, arguments):
        if name == "wait":
            return self.later()
        return arguments["text"].upper()

    async def later(self):
        return {"waited": True}


def test_a_class_may_describe_its_tools_itself():
    env = ToolUse(tools=[f"{__name__}:Served", ADD], row=SUM, reward=tools.exact)
    replies = [call("shout", text="a") + call("wait") + call("shout", words="a"), "3"]
    start, answered, end = play(env, *replies)
    assert start.tools[:2] == Served.DESCRIBED and start.tools[2]["function"]["name"] == "add"
    assert texts(answered) == ["A", '{"waited": true}', "error: KeyError: 'text'"]
    assert answered.metrics == {"tool_calls": 3, "failed_tool_calls": 1} and end.reward == 1.0


@pytest.mark.parametrize("given", [None, {}, [3], [{"name": "a"}], [{"function": {"name": "a"}}]])
def test_invalid_tool_description_is_an_error(given, monkeypatch):
    monkeypatch.setattr(Served, "describe", lambda self: given)
    with pytest.raises(InputError, match="whose describe.. returned .*; it must return a list of"):
        ToolUse(tools=[f"{__name__}:Served"], row=SUM, reward=tools.exact)


@pytest.mark.parametrize(
    ("module", "name", "outage"),
    [
        ("httpx", "NetworkError", True),
        ("httpcore2", "TimeoutException", True),
        ("httpx", "RemoteProtocolError", True),
        # A call's mistake, such as an address without "http://", and another library's class.
        ("httpx", "UnsupportedProtocol", False),
        ("graphs", "NetworkError", False),
    ],
)
def test_an_error_of_httpx_is_an_outage_though_it_hides_its_reason(module, name, outage):
    base = type(name, (Exception,), {"__module__": module})
    error = type("ConnectError", (base,), {"__module__": module})()
    assert is_outage(error) == is_outage(ExceptionGroup("", [error])) == outage


def test_a_call_is_answered_and_the_reply_without_one_is_paid():
    env = ToolUse(tools=[ADD], row=SUM, reward=tools.exact)
    start, answered, end = play(env, call("add", a=1, b=2), "3")
    assert start.text == "1 + 2 =" and [t["function"]["name"] for t in start.tools] == ["add"]
    assert start.tools[0]["function"]["description"] == "Adds two numbers."
    assert answered.messages == (Message(role="tool", text="3", name="add"),)
    assert (answered.reward, answered.done) == (0.0, False)
    assert answered.metrics == {"tool_calls": 1, "failed_tool_calls": 0}
    assert (end.reward, end.done, end.metrics) == (1.0, True, {"length": 1.0})


def test_a_mistake_of_the_policy_is_answered_and_paid():
    env = ToolUse(tools=[ADD, FAIL], row=SUM, reward=tools.exact, failed_call_reward=-0.25)
    mistakes = [
        call("sub", a=1),
        call("add", c=1),
        call("fail", what="no such city"),
        "<tool_call>{</tool_call>",
        call("add", a="x"),
    ]
    _, answered = play(env, "".join([*mistakes, call("add", a=1)]))
    found = texts(answered)
    assert found[0] == "error: no tool is called 'sub'; there are add, fail"
    assert found[1].startswith("error: add: missing a required argument: 'a'")
    assert found[2] == "error: ValueError: no such city"
    assert found[3].startswith("error: the call is no JSON")
    assert found[4].startswith("error: TypeError: ") and found[5] == "2"
    assert answered.reward == -1.25
    assert answered.metrics == {"tool_calls": 6, "failed_tool_calls": 5}
    # A name of the policy's own is nothing that a chat template is to show.
    assert [message.name for message in answered.messages] == ["", "add", "fail", "", "add", "add"]


def test_a_tool_that_is_away_fails_the_episode():
    env = ToolUse(tools=[ADD, REACH], row=SUM, reward=tools.exact)
    with pytest.raises(ConnectionError, match="hub is away"):
        play(env, call("reach", host="hub"))


def test_each_episode_has_an_object_of_a_class_which_pays():
    made = {"tools": ["tests.support.tools:Stock"], "row": STOCK, "seed": 3}
    env, other = ToolUse(**made), ToolUse(**made)
    start, *answers, end = play(
        env,
        call("count", item="pear"),
        call("buy", item="pear", number=2) + call("buy", item="plum", number=1),
        "done",
    )
    assert [tool["function"]["name"] for tool in start.tools] == ["buy", "count"]
    assert [texts(answer) for answer in answers] == [["2"], ['{"left": 0}', '{"left": 0}']]
    assert end.reward == 1.0
    assert play(other, "done")[-1].reward == 0.0


def test_tools_that_wait_wait_together():
    env = ToolUse(tools=["tests.support.tools:Meeting", ADD], row=SUM)
    _, answered, end = play(env, call("wait") + call("add", a=1) + call("come"), "bye")
    assert texts(answered) == ["met", "2", "came"] and end.reward == 1.0


def test_after_an_outage_the_other_calls_do_not_go_on():
    env = ToolUse(tools=["tests.support.tools:Log"], row=SUM)

    async def step() -> None:
        with pytest.raises(TimeoutError, match="no answer"):
            await env.step(call("work") + call("leave"))
        await asyncio.sleep(0.1)

    asyncio.run(step())
    assert tools.Log.done == []


@pytest.mark.filterwarnings("error")
def test_a_plain_tool_that_is_away_leaves_no_coroutine_behind():
    env = ToolUse(tools=["tests.support.tools:Log", REACH], row=SUM)
    with pytest.raises(ConnectionError):
        env.step(call("work") + call("reach", host="hub"))
    gc.collect()


def test_a_result_that_cannot_be_written_is_an_error_of_the_call():
    """JSON of more than 4,300 digits is refused, and a lone surrogate is no text."""
    env = ToolUse(tools=["tests.support.tools:power", FAIL], row=SUM, reward=tools.exact)
    _, answered = play(env, call("power", a=10, b=5000) + call("fail", what="\ud800"))
    large, strange = texts(answered)
    assert large.startswith("error: ValueError: ") and strange == "error: ValueError: ?"


def test_a_tool_is_called_as_it_is_shown():
    """The name is that of the setting, whatever a decorator made of the function's own."""
    env = ToolUse(tools=["tests.support.tools:add_twice", ADD], row=SUM, reward=tools.exact)
    start, answered = play(env, call("add_twice", a=1))
    assert [tool["function"]["name"] for tool in start.tools] == ["add_twice", "add"]
    assert texts(answered) == ["4"]


def test_a_long_result_is_cut():
    env = ToolUse(tools=[FAIL], row=SUM, reward=tools.exact, longest_result=10)
    _, answered = play(env, call("fail", what="x" * 20))
    assert texts(answered) == ["error: Val... (29 more characters)"]


@pytest.mark.parametrize("name", ["wrapped_outage", "grouped_outage"])
def test_an_error_because_of_an_outage_is_one(name):
    env = ToolUse(tools=[f"tests.support.tools:{name}"], row=SUM, reward=tools.exact)
    with pytest.raises((RuntimeError, ExceptionGroup)):
        play(env, call(name))


def test_answers_are_json_and_an_error_has_a_text_of_some_kind():
    env = ToolUse(
        tools=[f"tests.support.tools:{name}" for name in ("numbers", "silent")],
        row=SUM,
        reward=tools.exact,
    )
    _, answered = play(env, call("numbers") + call("silent"))
    found = [
        '{"mean": 1.5, "count": 3, "all": [0, 1]}',
        "error: SilentError: its text cannot be made",
    ]
    assert texts(answered) == found


def test_tools_of_a_class_are_its_public_methods():
    env = ToolUse(tools=["tests.support.tools:Careful"], row=SUM)
    start, answered = play(env, call("one") + call("two"))
    assert [tool["function"]["name"] for tool in start.tools] == ["one", "two"]
    assert texts(answered) == ["1", "2"]


def test_a_format_that_returns_no_calls_of_ours_is_an_error():
    form = "tests.support.tools:dicts"
    env = ToolUse(tools=[ADD], call_format=form, row=SUM, reward=tools.exact)
    with pytest.raises(ValueError, match="call_format returned .* must return a list of"):
        env.step("1")


def test_the_tools_of_the_how_to_work_as_it_says(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "howto" / "tools.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        (tmp_path / code.split("\n")[0].removeprefix("# ")).write_text(code)
    days, stock = map(json.loads, re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    monkeypatch.syspath_prepend(tmp_path)
    clock = importlib.import_module("clock")
    env = ToolUse(tools=["clock:weekday"], row=days, reward=clock.reward)
    _, answered, end = play(env, call("weekday", date="1969-07-20"), "a Sunday")
    assert texts(answered) == ["Sunday"] and end.reward == 1.0
    (tmp_path / "days.jsonl").write_text(json.dumps(days))
    monkeypatch.chdir(tmp_path)
    config = make_config(load_config_file(tmp_path / "clock_config.py"))
    played = open_environment(config.env, config.tasks, seed=0, num_tasks=1)
    assert isinstance(played.make(**played.first_args), ToolUse)
    shop_env = ToolUse(tools=["shop:Shop"], row=stock)
    _, answered, end = play(shop_env, call("count", item="plums"), "42")
    assert texts(answered) == ["42"] and end.reward == 1.0


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3", "mistral"])
def test_an_episode_reads_as_its_template_writes_it(family):
    """The ids of an episode with a call are those that the template gives to all of it."""
    tokenizer = load_tokenizer(Path(__file__).parent / "tokenizers" / family)
    form = family if family in CALL_FORMATS else "hermes"
    env = ToolUse(tools=[ADD], call_format=form, row=SUM, reward=tools.exact)
    reply, calls = _written(form)
    start, answered = play(env, reply)
    conversation = Conversation(ChatRenderer(tokenizer))
    ids = list(conversation.open(start.text, start.tools).ids)
    ids += (own := conversation.choices([reply])[0])
    conversation.reply(own)
    ids += conversation.answer(answered.messages).ids
    messages = [
        {"role": "user", "content": "1 + 2 ="},
        calls,
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "a1b2c3d4e"},
    ]
    asked = {"add_generation_prompt": True, "tokenize": False, "tools": list(start.tools)}
    whole = tokenizer.apply_chat_template(messages, **asked)
    assert tokenizer.decode(ids).split() == whole.split()


def _written(form: str) -> tuple[str, dict]:
    """A call of add as the policy writes it, and as the template is given it."""
    arguments = {"a": 1, "b": 2}
    given = {"name": "add", "arguments": arguments}
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a1b2c3d4e", "type": "function", "function": given}],
    }
    text = {
        "hermes": call("add", **arguments),
        "llama3": json.dumps({"name": "add", "parameters": arguments}),
        "mistral": f"[TOOL_CALLS] [{json.dumps({**given, 'id': 'a1b2c3d4e'})}]",
    }
    return text[form], message


@pytest.mark.parametrize(
    ("args", "tasks", "words"),
    [
        ({}, {}, "config.env.args.tools is ()"),
        ({"tools": ADD}, {}, "must name functions or classes"),
        ({"tools": ["tests.support.tools:subtract"]}, {}, "has no 'subtract'"),
        ({"tools": [ADD, ADD]}, {}, "two tools of the name 'add'"),
        ({"tools": [1]}, {}, "must name functions or classes"),
        ({"tools": ["tests.support.tools:no_function"]}, {}, "of type partial; it must be a func"),
        ({"tools": ["tests.support.tools:positional"]}, {}, "which a call cannot give by name"),
        ({"tools": ["tests.support.tools:many"]}, {}, "'**kwargs: int', which a call cannot"),
        ({"tools": ["tests.support.tools:unresolved"]}, {}, "has 'unresolved', which cannot be"),
        ({"tools": ["tests.support.tools:Private"]}, {}, "a class without a public method"),
        ({"tools": ["tests.support.tools:Unpaid"]}, {}, "reward(reply), a method of"),
        ({"tools": ["tests.support.tools:undescribed"]}, {}, "no description for the argument 'a'"),
        ({"tools": [ADD], "call_format": "hermse"}, {}, "did you mean 'hermes'?"),
        ({"tools": [ADD], "longest_result": 0}, {}, "longest_result is 0"),
        ({"tools": [ADD]}, {"reward": ""}, "give config.tasks.reward"),
        ({"tools": [ADD]}, {"path": "", "reward": ""}, "needs config.tasks.path"),
        ({"tools": [ADD]}, {"reward": "tests.support.tools:add"}, "reward(reply, prompt="),
    ],
)
def test_a_tool_or_setting_that_cannot_be_is_an_error_at_the_start(tmp_path, args, tasks, words):
    path = tmp_path / "sums.jsonl"
    path.write_text(json.dumps(SUM))
    given = {"path": str(path), "reward": "tests.support.tools:exact", **tasks}
    with pytest.raises(ValueError) as error:
        open_environment(
            EnvConfig(name="tools", args=args), TasksConfig(**given), seed=0, num_tasks=1
        )
    assert words in str(error.value)


@pytest.mark.slow
def test_a_policy_from_scratch_calls_a_tool_and_reads_its_answer(tmp_path):
    """The benchmark's task: the answer of the tool is in the context, and is learnt."""
    shop.write_files(tmp_path, 0)
    given = shop.settings_of(tmp_path, 0)
    given |= {"num_steps": 2, "devices": {"platform": "cpu", "num_cpu_devices": 8}}
    given["rollout"] |= {"num_slots": 32, "episodes_per_step": 64}
    # What is played last has learnt from 60 batches of conversations.
    given["train"] |= {"sft_steps": 1, "sft_updates": 60}
    given["eval"] |= {"every_steps": 2, "games": 8, "final_games": 8}
    given["log"] = {"trajectories_every_steps": 2}
    given["selector"] = {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",)}
    training.train(make_config(given), tmp_path / "run")
    *_, last = steps_of(tmp_path / "run")
    assert last["env"]["tool_calls"] > 0.2 and last["logprob_mismatch_max"] < 1e-3
    episodes = read_trajectories(tmp_path / "run" / "trajectories" / "step_000002.jsonl")
    answered = [e for e in episodes if any(m["role"] == "tool" for m in e["messages"])]
    assert len(answered) > 0.1 * len(episodes)
    called = [e for e in answered if e["metrics"]["failed_tool_calls"] == 0]
    for episode in called:
        roles = [message["role"] for message in episode["messages"]]
        assert roles[:3] == ["user", "assistant", "tool"]
        assert episode["messages"][2]["content"] in map(str, range(10))
    # Of those that called without a mistake most repeat the answer of the tool.
    ends = [e for e in called if e["stop_reason"] == "answered"]
    repeated = [e["messages"][-1]["content"] == e["messages"][-2]["content"] for e in ends]
    assert sum(repeated) > 0.5 * len(ends) > 0
