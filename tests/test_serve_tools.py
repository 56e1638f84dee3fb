# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of tools in a policy's reply, whole and streamed."""

import asyncio
import json

import pytest

from earl_jax.engine.config import Sampling
from earl_jax.envs.text.codec import TextCodec
from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.envs.tools.calls import call_opening
from earl_jax.serving.http_answers import ChatForm, Choice
from earl_jax.serving.http_api import _collect, _stream
from earl_jax.serving.reply import Piece, Reply, Token
from earl_jax.serving.requests import RequestOptions
from tests.support.served import MODEL

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "now"}</tool_call>'
TAGGED = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\né\n</parameter>\n"
    "</function>\n</tool_call>"
)
TYPES = {"a": {"type": "integer"}, "b": {"type": "string"}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": TYPES}}}]
ADDED = ("add", {"a": 1, "b": "é"})
NOW = ("now", {})


def reply_of(text: str, size: int = 1) -> tuple[Reply, TextCodec]:
    """A reply whose tokens are those of a text, none longer than its parts; `size` a round."""
    codec = TextCodec(load_tokenizer(MODEL))

    async def tokens():
        ids = codec.encode(text)
        for begin in range(0, len(ids), size):
            yield [Token(token) for token in ids[begin : begin + size]]

    options = RequestOptions(sampling=Sampling())
    return Reply(tokens(), 10_000, options, codec.decode, (), is_text=True), codec


def whole(text: str) -> dict:
    reply, codec = reply_of(text)
    choice = Choice(0)
    asyncio.run(_collect(reply, choice))
    return ChatForm(codec.decode, tools=TOOLS).whole(choice)


def streamed(text: str, size: int = 1) -> list[dict]:
    reply, codec = reply_of(text, size)
    parts = []

    async def send(part) -> None:
        parts.append(part)

    form = ChatForm(codec.decode, tools=TOOLS)
    asyncio.run(_stream(reply, Choice(0), form, send))
    return parts


def called(calls) -> list[tuple]:
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    functions = [call["function"] for call in calls]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("hello", "hello", []),
        (CALL, None, [ADDED]),
        (f"I add. {CALL}\n{OTHER}", "I add. \n", [ADDED, NOW]),
        (f"a < b <tool {OTHER} end", "a < b <tool  end", [NOW]),
        (f"I add. {TAGGED}", "I add. ", [ADDED]),
        # None of these is a call, and all of them stay as they are.
        ("<tool_call>{</tool_call>", "<tool_call>{</tool_call>", []),
        ("<tool_call>[1]</tool_call>!", "<tool_call>[1]</tool_call>!", []),
        ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
        ('x<tool_call>{"name": "cut', 'x<tool_call>{"name": "cut', []),
        ("ends with <tool_", "ends with <tool_", []),
    ],
)
def test_calls_are_taken_out_of_the_text(text, content, calls):
    answer = whole(text)
    message = answer["message"]
    assert message["content"] == content
    assert called(message.get("tool_calls", [])) == calls and ("tool_calls" in message) == bool(
        calls
    )
    assert answer["finish_reason"] == ("tool_calls" if calls else "stop")
    for size in (1, 8):
        check_streamed(streamed(text, size), content, calls, answer)


def check_streamed(parts, content, calls, answer):
    first, *parts = parts
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert (
        "".join(part["delta"].get("content", "") for part in parts).strip()
        == (content or "").strip()
    )
    found = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    assert called(found) == calls and [call["index"] for call in found] == [*range(len(calls))]
    assert [part["finish_reason"] for part in parts][-1] == answer["finish_reason"]
    assert all(part["finish_reason"] is None and part["delta"] for part in parts[:-1])


def test_text_before_a_call_is_streamed_at_once():
    parts = streamed(f"abcdefgh{CALL}")
    assert len([part for part in parts if part["delta"].get("content")]) > 1


def test_without_tools_a_call_is_text():
    reply, codec = reply_of(CALL)
    choice = Choice(0)
    asyncio.run(_collect(reply, choice))
    answer = ChatForm(codec.decode).whole(choice)
    assert answer["message"]["content"] == CALL and answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("template", "behind"),
    [
        ("a <tool_call> b", ' {"a": 1, "b": "é"}}</tool_call>'),
        ("<tool_call> <function=", TAGGED.partition("<function=add>\n")[2]),
    ],
)
def test_a_demanded_call_is_begun_as_the_template_writes_it(template, behind):
    opening = call_opening(template, "add")
    assert call_opening(template, "") == "<tool_call>\n" and opening.startswith("<tool_call>\n")
    reply, codec = reply_of(behind)
    choice = Choice(0)
    asyncio.run(_collect(reply, choice))
    message = ChatForm(codec.decode, tools=TOOLS, opening=opening).whole(choice)["message"]
    assert called(message["tool_calls"]) == [ADDED] and message["content"] is None
    assert call_opening("no tools", "add") == ""


def test_opening_of_a_demanded_call_is_text_where_the_reply_is_no_call():
    opening = call_opening("<tool_call>", "")
    form = ChatForm(reply_of("15")[1].decode, tools=TOOLS, opening=opening)
    piece = Piece("15", None)
    message = form.whole(Choice(0, [piece], "stop"))["message"]
    delta = form.part(Choice(0, [piece], "stop"))["delta"]
    assert message == {"role": "assistant", "content": "<tool_call>\n15"}
    assert delta == {"content": "<tool_call>\n15"}
