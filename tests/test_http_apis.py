# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""OpenAI's /v1/responses and Anthropic's /v1/messages: the same conversations as chat's."""

import contextlib
import json
import re

import pytest

from earl_jax.http.chat import demanded_call, read_chat
from earl_jax.http.messages import Messages
from earl_jax.http.responses import Responses
from earl_jax.http.server import HttpError
from tests.support.caller import SUM, save_caller
from tests.support.http_client import JSON, ask, connect, send
from tests.support.served import SAYING, serving

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
TYPES = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": TYPES}
# The tool, and a tool_choice, by the API.
TOOLS = {
    CHAT: [{"type": "function", "function": FUNCTION}],
    RESPONSES: [{"parameters": TYPES, "strict": None, "type": "function", **FUNCTION}],
    MESSAGES: [{"input_schema": TYPES, "name": "add", "description": "Adds."}],
}
ANY = {CHAT: "required", RESPONSES: "required", MESSAGES: {"type": "any"}}
NAMED = {
    CHAT: {"type": "function", "function": {"name": "add"}},
    RESPONSES: {"type": "function", "name": "add"},
    MESSAGES: {"type": "tool", "name": "add"},
}
# One conversation by the API: two calls beside a text, their results, and a question.
CALL = {"name": "add", "arguments": '{"a": 1}'}
CONVERSATION = {
    CHAT: {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hé"},
            {
                "role": "assistant",
                "content": "I add.",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": CALL},
                    {"id": "c2", "type": "function", "function": CALL},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
            {"role": "tool", "tool_call_id": "c2", "content": "3"},
            {"role": "user", "content": "so?"},
        ],
        "max_tokens": 9,
        "stop": ["!"],
    },
    RESPONSES: {
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hé"}]},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "c1", **CALL},
            {"type": "function_call", "id": "fc_2", "call_id": "c2", **CALL},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "function_call_output", "call_id": "c2", "output": "3"},
            {"role": "user", "content": "so?"},
        ],
        "max_output_tokens": 9,
        "stop": ["!"],
    },
    MESSAGES: {
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hé"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                    {"type": "tool_use", "id": "c2", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "c2",
                        "content": [{"type": "text", "text": "3"}],
                    },
                    {"type": "text", "text": "so?"},
                ],
            },
        ],
        "max_tokens": 9,
        "stop_sequences": ["!"],
    },
}


def first(path, **fields):
    """A request with one message of a user."""
    name = "input" if path == RESPONSES else "messages"
    return {name: [{"role": "user", "content": "hé"}], **fields}


@pytest.mark.parametrize(("path", "api"), [(RESPONSES, Responses), (MESSAGES, Messages)])
def test_a_conversation_is_that_of_chat(path, api):
    fields, messages, tools = read_chat({**CONVERSATION[CHAT], "tools": TOOLS[CHAT]})
    given = {**CONVERSATION[path], "tools": TOOLS[path]}
    of_api, same, shown = read_chat(api().to_chat(given))
    assert (same, shown) == (messages, tools)
    assert of_api["max_tokens"] == fields["max_tokens"] and of_api["stop"] == fields["stop"]
    for choices, call in ((ANY, ""), (NAMED, "add")):
        chat = api().to_chat({**given, "tool_choice": choices[path]})
        assert demanded_call(chat, tools) == call
    text_behind_a_call = {"role": "assistant", "content": "I add."}
    if path == RESPONSES:
        given["input"][1:4] = [*given["input"][2:4], text_behind_a_call]
        assert read_chat(api().to_chat(given))[1] == messages


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id is .* leave it out"),
        (RESPONSES, {"store": True}, "store is true; this server supports false alone"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning is .*low"),
        (RESPONSES, {"max_tokens": 5}, "max_tokens is not known here; .* 'max_output_tokens'"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, r"tools\[0\] is .* function alone"),
        (RESPONSES, {"input": []}, r"input is \[\]"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "m"}]}, r"input\[0\] is .*types"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            r"input\[0\].content is .*input_text",
        ),
        (RESPONSES, {"input": [{"type": "function_call"}]}, r"input\[0\].name is missing"),
        (MESSAGES, {"thinking": {"type": "enabled"}}, "thinking is .* this server supports"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\] is"),
        (MESSAGES, {"tool_choice": "any"}, 'tool_choice is "any"; its type must be one of tool'),
        (
            MESSAGES,
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use is true",
        ),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"messages\[0\].content\[0\] is .* text and tool_result",
        ),
        (MESSAGES, {"messages": [{"role": "assistant", "content": "a"}]}, "begun by the request"),
    ],
)
def test_unsupported_fields_are_named(path, fields, words):
    api = Responses() if path == RESPONSES else Messages()
    with pytest.raises(HttpError, match=words) as caught:
        api.to_chat({**first(path), **fields})
    assert caught.value.status == 400 and caught.value.param


# Over a server.


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "caller"
    save_caller(folder)
    with serving(
        f"--model={folder}", "--num_slots=2", "--max_context=512", "--temperature=0"
    ) as server:
        yield server


def streamed(server, path, **body):
    """The events of an answer, each with its name."""
    with contextlib.closing(connect(server.http)) as client:
        client.request("POST", path, json.dumps({"stream": True, **body}), JSON)
        text = client.getresponse().read().decode()
    found = re.findall(r"event: (.*)\ndata: (.*)\n\n", text)
    assert "".join(f"event: {name}\ndata: {data}\n\n" for name, data in found) == text
    events = [json.loads(data) for _, data in found]
    assert [event["type"] for event in events] == [name for name, _ in found]
    return events


def read(path, answer):
    """A reply in one form: its text, its calls, its reason, its tokens."""
    if path == CHAT:
        [choice] = answer["choices"]
        message, usage = choice["message"], answer["usage"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        calls = [(call["name"], json.loads(call["arguments"])) for call in calls]
        tokens = usage["prompt_tokens"], usage["completion_tokens"]
        return message["content"] or "", calls, choice["finish_reason"], tokens
    usage = answer["usage"]
    tokens = usage["input_tokens"], usage["output_tokens"]
    if path == MESSAGES:
        blocks, reason = answer["content"], answer["stop_reason"]
        calls = [(each["name"], each["input"]) for each in blocks if each["type"] == "tool_use"]
        text = "".join(each["text"] for each in blocks if each["type"] == "text")
        reasons = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
        return text, calls, reasons[reason], tokens
    calls = [each for each in answer["output"] if each["type"] == "function_call"]
    calls = [(call["name"], json.loads(call["arguments"])) for call in calls]
    texts = [each["content"][0]["text"] for each in answer["output"] if each["type"] == "message"]
    reason = {"completed": "tool_calls" if calls else "stop", "incomplete": "length"}
    return "".join(texts), calls, reason[answer["status"]], tokens


def joined(path, events):
    """The whole answer that a stream makes."""
    return (joined_response if path == RESPONSES else joined_message)(events)


def joined_response(events):
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    whole, items = events[-1]["response"], {}
    for event in events:
        item = items.get(event.get("output_index"), {})
        if event["type"] == "response.output_item.added":
            items[event["output_index"]] = event["item"]
        elif event["type"] == "response.content_part.added":
            item["content"].append(event["part"])
        elif event["type"] == "response.output_text.delta":
            item["content"][0]["text"] += event["delta"]
        elif event["type"] == "response.function_call_arguments.delta":
            item["arguments"] += event["delta"]
    ended = [{**item, "status": whole["output"][i]["status"]} for i, item in items.items()]
    assert ended == whole["output"]
    return whole


def joined_message(events):
    begun, *events, delta, stop = events
    assert (begun["type"], stop) == ("message_start", {"type": "message_stop"})
    message = {**begun["message"], **delta["delta"], "usage": delta["usage"]}
    for event in events:
        block = message["content"][-1] if message["content"] else {}
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta" and block["type"] == "text":
            block["text"] += event["delta"]["text"]
        elif event["type"] == "content_block_delta":
            block["input"] = json.loads(event["delta"]["partial_json"])
    return message


ADDED = ("add", {"a": 1, "b": 2})
CASES = {
    "text": ({}, SAYING[1:], [], "stop"),
    "cut": ({"max": 2}, None, [], "length"),
    "call": ({"tools": TOOLS}, "I", [ADDED], "tool_calls"),
    "any": ({"tools": TOOLS, "tool_choice": ANY}, "", [("add", {"a": 5, "b": 6})], "tool_calls"),
    "named": (
        {"tools": TOOLS, "tool_choice": NAMED},
        "",
        [("add", {"a": 7, "b": 8})],
        "tool_calls",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_replies_are_those_of_chat_whole_and_streamed(server, case):
    fields, text, calls, reason = CASES[case]
    replies = []
    for path in (CHAT, RESPONSES, MESSAGES):
        body = first(path, **{name: fields[name][path] for name in fields if name != "max"})
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        body[limit] = fields.get("max", 40)
        replies.append(read(path, ask(server.http, path, **body)))
        if path != CHAT:
            replies.append(read(path, joined(path, streamed(server, path, **body))))
    assert replies == [replies[0]] * 5
    assert replies[0][1:3] == (calls, reason) and text in (None, replies[0][0])


def test_tokens_of_a_prompt_are_counted_without_a_reply(server):
    for fields in ({}, {"tools": TOOLS[MESSAGES], "tool_choice": NAMED[MESSAGES]}):
        body = first(MESSAGES, system="be brief", **fields)
        usage = ask(server.http, MESSAGES, max_tokens=1, **body)["usage"]
        assert ask(server.http, COUNT, **body) == {"input_tokens": usage["input_tokens"]}
    status, answer = send(server.http, COUNT, {"messages": []})
    assert (status, answer["type"]) == (400, "error")


def test_a_call_and_its_result_lead_to_the_answer(server):
    """Each reply is sent back as it came."""
    body = first(RESPONSES, tools=TOOLS[RESPONSES])
    output = ask(server.http, RESPONSES, **body)["output"]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "3"}
    body["input"] += [*output, result]
    assert read(RESPONSES, ask(server.http, RESPONSES, **body))[0] == SUM
    body = first(MESSAGES, tools=TOOLS[MESSAGES], max_tokens=40)
    content = ask(server.http, MESSAGES, **body)["content"]
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "3"}
    body["messages"] += [
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result]},
    ]
    assert read(MESSAGES, ask(server.http, MESSAGES, **body))[0] == SUM


def test_a_stop_sequence_is_reported(server):
    answer = ask(server.http, MESSAGES, **first(MESSAGES, stop_sequences=[" ok", "x"]))
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " ok")
    assert answer["content"] == [{"type": "text", "text": SAYING[1:].removesuffix(" ok")}]


def test_errors_have_the_form_of_the_api(server):
    def error(path, **fields):
        status, answer = send(server.http, path, first(path, **fields))
        return status, answer

    status, answer = error(RESPONSES, max_output_tokens=0)
    assert status == 400 and answer["error"]["param"] == "max_output_tokens"
    assert answer["error"]["message"].startswith("max_output_tokens is 0")
    status, answer = error(MESSAGES, stop_sequences=[""])
    assert (status, answer["type"]) == (400, "error")
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith("stop_sequences must be")
    status, answer = error(MESSAGES, thread={"type": "create"})
    assert answer["error"]["details"] == {"error_code": "thread_unsupported_request"}
    status, answer = error(MESSAGES, model="claude")
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    # Such as the server has before it reads the body, or for a path that it does not have.
    status, answer = send(server.http, MESSAGES, {"messages": "x" * 2**20})
    assert (status, answer["error"]["type"]) == (413, "request_too_large")
    status, answer = send(server.http, f"{MESSAGES}/batches", {})
    assert (status, answer["type"], answer["error"]["type"]) == (404, "error", "not_found_error")
    for choice in ("required", NAMED[CHAT]):
        status, answer = error(CHAT, tool_choice=choice)
        assert status == 400 and answer["error"]["message"].endswith("there are none")
