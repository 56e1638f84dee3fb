# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""python -m earl_jax.serve over HTTP, from real processes: as gRPC, as OpenAI's clients expect."""

import concurrent.futures
import contextlib
import json
import re
import shutil
import socket
import urllib.parse

import pytest

from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.serving.http_answers import Choice, CompletionForm
from earl_jax.serving.reply import Piece, Token
from tests.support.http_client import JSON, ask, connect, events, send
from tests.support.references import reference
from tests.support.served import (
    CONTEXT,
    MODEL,
    end_ids,
    expected,
    ids_of,
    prompt,
    request,
    sampling_metadata,
    scores_of,
    serving,
)

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
NUM_SLOTS, MAX_WAITING = 4, 28
# A name of several parts, as on a hub.
NAME = "team/parrot"
# One that shows tools and their calls, reads an argument, and refuses a tool's text without a call.
TEMPLATE = """\
{%- if tools %}<|user|>{{ tools | tojson }}<|end|>{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' and loop.first %}{{ raise_exception('no call came before') }}{% endif -%}
<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>{{ m.role[0] }} {{ m.content }}
{%- for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% if brief %}!{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The reference model with another chat template."""
    folder = shutil.copytree(MODEL, tmp_path_factory.mktemp("models") / "qwen")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(model):
    """A temperature at which nearly all is noise, of which top_k leaves the likeliest token."""
    flags = (f"--num_slots={NUM_SLOTS}", f"--max_waiting={MAX_WAITING}", f"--name={NAME}")
    with serving(f"--model={model}", *flags, "--temperature=5", "--top_k=1") as server:
        assert server.ready_line.startswith(f"serving {model} as {NAME} at ")
        yield server


def generate(server, ids, count: int, **params):
    """Sampled ids, and the choice that they are of."""
    sampling = {"max_tokens": count, **params}
    [choice] = ask(server.http, GENERATE, token_ids=ids, sampling_params=sampling)["choices"]
    return choice["token_ids"], choice


def text_of(ids) -> str:
    return ChatRenderer(load_tokenizer(MODEL)).decode(ids)


# What is served.


def test_tokens_are_those_of_grpc_of_transformers_and_of_the_decoder(server):
    ids = reference("qwen2_tied")["prompt"].ravel().tolist()
    continuation = reference("qwen2_tied")["continuation"].ravel().tolist()
    count = len(continuation)
    assert generate(server, ids, count)[0] == continuation == expected(ids, count)
    assert ids_of(server.stub.Decode(request(ids, count))) == continuation
    # A prompt that fills the whole context, and one token.
    long = prompt(3, CONTEXT - 1)
    assert ids_of(server.stub.Decode(request(long, 1))) == expected(long, 1)
    answer = ask(server.http, COMPLETIONS, prompt=ids, max_tokens=count)
    assert answer["object"] == "text_completion" and answer["policy_version"] == 0
    assert answer["choices"][0]["text"] == text_of(continuation)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": count,
        "total_tokens": len(ids) + count,
    }


def test_several_prompts_have_several_replies_each(server):
    tokenizer = load_tokenizer(MODEL)
    texts = ["héllo 🙂", "x"]
    alone = [text_of(expected(tokenizer.encode(text), 9)) for text in texts]
    answer = ask(server.http, COMPLETIONS, prompt=texts, n=2, max_tokens=9)
    assert [choice["text"] for choice in answer["choices"]] == [
        alone[0],
        alone[0],
        alone[1],
        alone[1],
    ]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    ids = [tokenizer.encode(text) for text in texts]
    both = ask(server.http, COMPLETIONS, prompt=ids, max_tokens=9)["choices"]
    assert [choice["text"] for choice in both] == alone


def test_health_and_models(server):
    assert send(server.http, "/health") == (200, {"status": "ok"})
    status, models = send(server.http, "/v1/models")
    [found] = models["data"]
    assert status == 200 and (found["id"], found["max_model_len"]) == (NAME, CONTEXT)
    for name in (NAME, urllib.parse.quote(NAME, safe="")):
        assert send(server.http, f"/v1/models/{name}") == (200, found)
    status, answer = send(server.http, "/v1/models/gpt-4o")
    assert status == 404 and "'gpt-4o' is not served here" in answer["error"]["message"]
    assert send(server.http, f"/v1/models/{NAME}", {})[0] == 405
    named = ask(server.http, COMPLETIONS, model=NAME, prompt="x")
    # Who says no max_tokens has 16, as OpenAI's completions do.
    assert named["model"] == NAME and named["usage"]["completion_tokens"] == 16


def test_the_pieces_of_a_stream_join_to_the_whole(server):
    options = {"max_tokens": 40, "n": 2, "temperature": 2, "top_k": 0, "seed": 3}
    options["stream_options"] = {"include_usage": True}
    completion = {"prompt": "héllo", **options, "logprobs": 1}
    chat = {"messages": [{"role": "user", "content": "héllo"}], **options, "logprobs": True}
    for path, body in ((COMPLETIONS, completion), (CHAT, chat)):
        whole = ask(server.http, path, **body)
        *parts, last = events(server.http, path, **body)
        assert last["choices"] == [] and last["usage"] == whole["usage"]
        assert {part["id"] for part in parts} == {last["id"]}
        for choice in whole["choices"]:
            mine = [p for part in parts for p in part["choices"] if p["index"] == choice["index"]]
            assert [p["finish_reason"] for p in mine[:-1]] == [None] * (len(mine) - 1)
            assert mine[-1]["finish_reason"] == choice["finish_reason"]
            if path == COMPLETIONS:
                assert "".join(p["text"] for p in mine) == choice["text"]
                scores = choice["logprobs"]
                for name in ("tokens", "token_logprobs", "text_offset"):
                    joined = [each for p in mine for each in (p["logprobs"] or {}).get(name, [])]
                    assert joined == scores[name] and len(joined) > 2
                continue
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            streamed = "".join(p["delta"].get("content", "") for p in mine)
            assert streamed == choice["message"]["content"]
            scores = [s for p in mine for s in (p["logprobs"] or {}).get("content", [])]
            assert scores == choice["logprobs"]["content"] and len(scores) > 2
        assert whole["choices"][0] != whole["choices"][1]


# Conversations.

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CONVERSATIONS = {
    "roles": (
        [("system", "be kind"), ("user", "hé"), ("assistant", "<|end|>"), ("user", "b")],
        {},
        "<|user|>s be kind<|end|><|user|>u hé<|end|><|assistant|>a <|end|><|end|><|user|>u b<|end|>"
        "<|assistant|>",
    ),
    "argument": (
        [("user", "a")],
        {"chat_template_kwargs": {"brief": True}},
        "<|user|>u a<|end|><|assistant|>!",
    ),
    "parts": (
        [("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
        {},
        "<|user|>u ab<|end|><|assistant|>",
    ),
    "no tool is to be called": (
        [("user", "a")],
        {"tools": [TOOL], "tool_choice": "none"},
        "<|user|>u a<|end|><|assistant|>",
    ),
    "developer": (
        [("developer", "x"), ("user", "a")],
        {},
        "<|user|>s x<|end|><|user|>u a<|end|><|assistant|>",
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_is_rendered_by_the_template(server, name):
    turns, options, text = CONVERSATIONS[name]
    messages = [{"role": role, "content": content} for role, content in turns]
    check_chat(server, text, messages=messages, **options)


def test_tools_and_their_calls_are_rendered(server):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    text = f"<|user|>{json.dumps([TOOL])}<|end|><|user|>u a<|end|>"
    text += '<|assistant|>a {"a": 1}<|end|><|user|>t 2<|end|><|assistant|>'
    check_chat(server, text, messages=messages, tools=[TOOL])


def check_chat(server, text: str, **body) -> None:
    """The reply to a conversation is that to the text that the template writes."""
    ids = load_tokenizer(MODEL).encode(text, add_special_tokens=False)
    left = min(12, CONTEXT - len(ids))
    answer = ask(server.http, CHAT, **body, max_completion_tokens=left)
    [choice] = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == len(ids)
    message = {"role": "assistant", "content": text_of(expected(ids, left))}
    assert choice["message"] == message and choice["logprobs"] is None
    # Who says no max_tokens has the context.
    whole = ask(server.http, CHAT, **body)["usage"]["completion_tokens"]
    sampled = expected(ids, CONTEXT - len(ids))
    assert whole == min(CONTEXT - len(ids), len(sampled) + 1)


# What a request may ask for.


def test_replies_are_drawn_as_grpc_draws_them(server):
    """Each of n replies has the seed after the one before."""
    ids = prompt(50, 12)
    for options in (
        {"temperature": 1, "top_k": 0, "seed": 7 + 2**62},
        {"temperature": 3, "top_k": 20, "min_p": 0.01, "seed": 7},
        {"temperature": 0.5, "top_k": 0, "top_p": 0.9, "seed": 7},
        {"temperature": 3, "allowed_token_ids": [7, 40, 41], "top_k": 0, "seed": 7},
    ):
        body = {"token_ids": ids, "sampling_params": {**options, "max_tokens": 20, "n": 3}}
        choices = ask(server.http, GENERATE, **body)["choices"]
        for number, choice in enumerate(choices):
            metadata = sampling_metadata(**options | {"seed": 7 + number})
            ended = [token for token in choice["token_ids"] if token not in end_ids()]
            assert ids_of(server.stub.Decode(request(ids, 20), metadata=metadata)) == ended
        assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    # What is drawn at temperature 0 depends on nothing, and clients send what they always send.
    greedy = generate(server, ids, 20, temperature=0, top_p=0.9, top_k=-1, seed=3)[0]
    assert greedy == expected(ids, 20)


def test_a_reply_is_one_of_those_that_are_allowed_as_over_grpc(server):
    texts, ids, said = ["left", "left up", "日"], prompt(60, 12), {"temperature": 100, "top_k": 0}
    allowed = {"structured_outputs": {"choice": texts, "json": None}}
    params = {**said, **allowed, "max_tokens": 30, "n": 8, "seed": 7}
    choices = ask(server.http, GENERATE, token_ids=ids, sampling_params=params)["choices"]
    for number, choice in enumerate(choices):
        metadata = sampling_metadata(choices=texts, seed=7 + number, **said)
        ended = [token for token in choice["token_ids"] if token not in end_ids()]
        assert ids_of(server.stub.Decode(request(ids, 30), metadata=metadata)) == ended
        assert choice["finish_reason"] == "stop"
    assert {text_of(choice["token_ids"][:-1]) for choice in choices} == {*texts}
    for path, body in (
        (COMPLETIONS, {"prompt": ids, "temperature": 0}),
        (CHAT, {"messages": USER, "stop": " "}),
    ):
        [choice] = ask(server.http, path, **body, **allowed)["choices"]
        assert choice.get("text", choice.get("message", {}).get("content")) in texts


def test_log_probs_are_those_of_grpc(server):
    ids, drawn = prompt(62, 12), {"temperature": 0.7, "top_k": 5, "seed": 3}
    metadata = sampling_metadata(**drawn, logprobs=True, model_logprobs=True)
    scores = scores_of(server.stub.Decode(request(ids, 9), metadata=metadata))
    assert len(scores) == 9
    content = generate(server, ids, 9, **drawn, logprobs=1)[1]["logprobs"]["content"]
    for entry, score in zip(content, scores, strict=True):
        assert entry["token"] == f"token_id:{score['token']}"
        assert (entry["logprob"], entry["model_logprob"]) == (
            pytest.approx(score["logprob"]),
            pytest.approx(score["model_logprob"]),
        )
    body = {"prompt": ids, "max_tokens": 9, **drawn}
    [choice] = ask(server.http, COMPLETIONS, **body, logprobs=0)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [entry["logprob"] for entry in content]
    assert choice["logprobs"]["tokens"] == [text_of([score["token"]]) for score in scores]
    assert choice["logprobs"]["top_logprobs"] is None
    assert ask(server.http, COMPLETIONS, **body, logprobs=1)["choices"] == [choice]
    assert generate(server, ids, 9, **drawn)[1]["logprobs"] is None


def test_offsets_of_tokens_are_places_in_the_text_of_the_whole_reply():
    """The reply has a character in two tokens, text that a stop string holds back, and more."""
    form = CompletionForm(lambda ids: bytes(ids).decode(errors="replace"))
    texts = ["a", "", "é", "", "xy", ""]
    tokens = [Token(byte, -1.0, -2.0) for byte in "aéxy!".encode()]
    pieces = [Piece(text, token) for text, token in zip(texts, tokens, strict=True)]
    parts = [form.part(Choice(0, pieces[:3])), form.part(Choice(0, pieces[3:]))]
    assert [part["logprobs"]["text_offset"] for part in parts] == [[0, 1, 1], [2, 3, 4]]
    assert [part["logprobs"]["token_logprobs"] for part in parts] == [[-1.0] * 3] * 2
    assert form.part(Choice(1, pieces[3:]))["logprobs"]["text_offset"] == [0, 1, 2]


# What is refused.

USER = [{"role": "user", "content": "a"}]
IDS = {"token_ids": [5, 6]}
BAD = {
    "no JSON": (COMPLETIONS, b"{", 400, "the body is no JSON"),
    "no UTF-8": (COMPLETIONS, b'{"prompt": "\xff"}', 400, "the body is no JSON"),
    "deep": (COMPLETIONS, b"[" * 60_000, 400, "the body is no JSON"),
    "no object": (COMPLETIONS, b"[]", 400, "must be a JSON object; got a list"),
    "model": (CHAT, {"model": "gpt-4", "messages": USER}, 404, "'gpt-4' is not served here; "),
    "unknown": (COMPLETIONS, {"prompt": "x", "temprature": 1}, 400, "mean 'temperature'"),
    "unsupported": (CHAT, {"messages": USER, "presence_penalty": 1}, 400, "supports 0 alone"),
    "no prompt": (COMPLETIONS, {}, 400, "prompt must be a text, a list of texts, .* got null"),
    "empty prompt": (COMPLETIONS, {"prompt": ""}, 400, "the prompt has no tokens"),
    "mixed prompts": (COMPLETIONS, {"prompt": ["a", 5]}, 400, "prompt must be a text"),
    "long prompt": (COMPLETIONS, {"prompt": "\t" * 129}, 400, "has 129 tokens; .* at most 128"),
    "no room": (
        GENERATE,
        {"token_ids": [5] * 128, "sampling_params": {"max_tokens": 1}},
        400,
        "this server has 128: shorten the prompt$",
    ),
    "full": (COMPLETIONS, {"prompt": "\t" * 120}, 400, "max_tokens=16 .* at most 8"),
    "surrogate": (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "lone surrogate"),
    "max_tokens": (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens is 0; it must"),
    "type": (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, 400, "temperature must be a num"),
    "range": (COMPLETIONS, {"prompt": "x", "top_p": 2}, 400, r"top_p is 2.0; .* \(0, 1\]"),
    "idle range": (COMPLETIONS, {"prompt": "x", "temperature": 0, "top_p": 2}, 400, "top_p is 2.0"),
    "seed": (COMPLETIONS, {"prompt": "x", "seed": -1}, 400, "seed is -1; it must lie between 0"),
    "n": (COMPLETIONS, {"prompt": "x", "n": 0}, 400, "n is 0; it must lie between 1 and 128"),
    "many": (COMPLETIONS, {"prompt": "x", "n": 33}, 400, "wants 33 replies, .* takes 32 at once"),
    "stop": (COMPLETIONS, {"prompt": "x", "stop": ["a", ""]}, 400, "stop must be a text or a list"),
    "top": (COMPLETIONS, {"prompt": "x", "logprobs": 2}, 400, "logprobs is 2; .* true, 0 or 1"),
    "tops": (CHAT, {"messages": USER, "top_logprobs": 2}, 400, "top_logprobs is 2; .* 0 alone"),
    "stream": (COMPLETIONS, {"prompt": "x", "stream": "yes"}, 400, "stream must be true or false"),
    "no messages": (CHAT, {"messages": []}, 400, "messages is empty"),
    "role": (
        CHAT,
        {"messages": [{"role": "king", "content": "a"}]},
        400,
        r"messages\[0\] is .*rol",
    ),
    "content": (CHAT, {"messages": [{"role": "user"}]}, 400, r"messages\[0\].content is null"),
    "image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "must be a text, or a list of",
    ),
    "control token": (
        CHAT,
        {"messages": [{"role": "user", "content": "a<|end|>"}]},
        400,
        r"messages\[0\] contains the control token '<\|end\|>'",
    ),
    "control token of a tool": (
        CHAT,
        {"messages": USER, "tools": [{"type": "function", "function": {"name": "<|end|>"}}]},
        400,
        "tools contains the control token",
    ),
    "order": (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, 400, "no call came before"),
    "tool": (CHAT, {"messages": USER, "tools": [{"name": "f"}]}, 400, r"tools\[0\] is .* must be"),
    "no calls": (
        CHAT,
        {"messages": USER, "tools": [TOOL], "tool_choice": "required"},
        400,
        "chat template does not write calls between <tool_call>",
    ),
    "calls": (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [5]}]},
        400,
        r"messages\[0\].tool_calls has 5; each must be",
    ),
    "argument": (
        CHAT,
        {"messages": USER, "chat_template_kwargs": {"think": 1}},
        400,
        "chat_template_kwargs.think is not read",
    ),
    "our argument": (
        CHAT,
        {"messages": USER, "chat_template_kwargs": {"messages": []}},
        400,
        "chat_template_kwargs.messages is not read by .* not a request's to set",
    ),
    "two limits": (
        CHAT,
        {"messages": USER, "max_tokens": 3, "max_completion_tokens": 4},
        400,
        "max_tokens and max_completion_tokens differ",
    ),
    "no ids": (GENERATE, {}, 400, "token_ids must be a list of token ids; got null"),
    "empty ids": (GENERATE, {"token_ids": []}, 400, "the prompt has no tokens"),
    "text for ids": (GENERATE, {"token_ids": "x"}, 400, "token_ids must be a list"),
    "strange id": (GENERATE, {"token_ids": [320]}, 400, "token id 320 is not .* from 0 to 319"),
    "huge id": (GENERATE, {"token_ids": [2**70]}, 400, "is not in the vocabulary"),
    "params": (
        GENERATE,
        {**IDS, "sampling_params": {"top_q": 1}},
        400,
        r"sampling_params.top_q is not known here; did you mean 'top_[pk]'",
    ),
    "param": (
        GENERATE,
        {**IDS, "sampling_params": {"stop_token_ids": [320]}},
        400,
        "sampling_params.stop_token_ids holds 320; ids go from 0 to 319",
    ),
    "no choice": (
        CHAT,
        {"messages": USER, "structured_outputs": {"choice": []}},
        400,
        "^structured_outputs.choice is an empty list",
    ),
    "long choice": (
        COMPLETIONS,
        {"prompt": "x", "structured_outputs": {"choice": ["abcde"]}, "max_tokens": 4},
        400,
        "structured_outputs.choice holds a reply of 5 tokens, and max_tokens is 4",
    ),
    "choices of ids": (
        GENERATE,
        {**IDS, "sampling_params": {"structured_outputs": {"choice": [5]}}},
        400,
        r"sampling_params.structured_outputs.choice must be a list of str; got \[5\]",
    ),
    "choices by a schema": (
        CHAT,
        {"messages": USER, "structured_outputs": {"json": {}}},
        400,
        "structured_outputs.json is not known here; known are choice",
    ),
    "choices and a demanded call": (
        CHAT,
        {
            "messages": USER,
            "tools": [{"type": "function", "function": {"name": "add"}}],
            "tool_choice": "required",
            "structured_outputs": {"choice": ["a", "b"]},
        },
        400,
        "structured_outputs restricts the reply, and tool_choice demands a call",
    ),
    "no path": ("/v1/embeddings", {}, 404, "there is no /v1/embeddings here; there are /health"),
}


def test_bad_requests_are_errors_that_say_why_and_disturb_no_other(server):
    beside = server.stub.Decode(request(prompt(1, 12), 100))
    for name, (path, body, status, words) in BAD.items():
        code, answer = send(server.http, path, body)
        assert code == status, (name, code, answer)
        assert re.search(words, answer["error"]["message"]), (name, answer)
        assert answer["error"]["type"] == "invalid_request_error"
    assert ids_of(beside) == expected(prompt(1, 12), 100)
    assert generate(server, prompt(1, 12), 30)[0] == expected(prompt(1, 12), 30)
    assert server.errors == ""


def test_one_connection_goes_on_after_a_refusal(server):
    with contextlib.closing(connect(server.http)) as client:
        for method, path, body, status in (
            ("GET", COMPLETIONS, None, 405),
            ("POST", "/health", "{}", 405),
            ("POST", COMPLETIONS, "{", 400),
            ("POST", COMPLETIONS, '{"prompt": "x"}', 200),
            ("GET", "/health", None, 200),
        ):
            client.request(method, path, body, JSON)
            answer = client.getresponse()
            assert answer.status == status and json.loads(answer.read())
        client.request("POST", COMPLETIONS, '{"prompt": "x"}')
        answer = client.getresponse()
        assert answer.status == 415 and b"Content-Type: application/json" in answer.read()


def test_a_body_larger_than_any_prompt_is_not_read(server):
    body = json.dumps({"prompt": "x" * 2**21}).encode()
    status, answer = send(server.http, COMPLETIONS, body)
    assert status == 413 and "more than the 70016 bytes" in answer["error"]["message"]
    with contextlib.closing(connect(server.http)) as client:
        pieces = (body[i : i + 2**16] for i in range(0, len(body), 2**16))
        client.request("POST", COMPLETIONS, pieces, JSON, encode_chunked=True)
        assert client.getresponse().status == 413


def test_heads_that_cannot_be_read_are_refused(server):
    """Any other bytes that are no HTTP: test_serve_fuzz.py."""
    host, port = server.http.removeprefix("http://").split(":")
    for head, status in (
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: nine\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 2**17, b"431"),
    ):
        with socket.create_connection((host, int(port)), 10) as client:
            client.sendall(head)
            assert client.recv(2**16).startswith(b"HTTP/1.1 " + status + b" ")
    assert server.process.poll() is None and server.errors == ""


# Many at once.


def test_requests_of_both_protocols_share_the_slots(server):
    asked = [(prompt(i, 3 + 5 * i % 60), 20 + i) for i in range(16)]
    calls = [server.stub.Decode(request(*each)) for each in asked[::2]]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        sampled = list(threads.map(lambda each: generate(server, *each)[0], asked[1::2]))
    want = [expected(*each) for each in asked]
    assert [ids_of(call) for call in calls] == want[::2]
    assert [[i for i in ids if i not in end_ids()] for ids in sampled] == want[1::2]
