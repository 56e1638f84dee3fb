# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""python -m earl_jax.serve: what it serves, what it refuses; over gRPC, from real processes."""

import json
import re
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jetstream.core.proto import jetstream_pb2

from earl_jax.engine.config import Sampling
from earl_jax.engine.sampling import sample, sampling_rows, token_uniforms
from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.serve import serve_command
from earl_jax.serving.config import MAX_SEED
from earl_jax.serving.serve_flags import parse_flags
from earl_jax.serving.sizes import cache_tokens_of, context_tokens_of, prompt_limit_of
from earl_jax.settings.errors import InputError
from tests.support.continuations import served
from tests.support.references import reference
from tests.support.served import (
    CONTEXT,
    MODEL,
    PORTS,
    VOCAB,
    Code,
    Server,
    end_ids,
    expected,
    finish_reason,
    ids_of,
    loaded,
    logits_step,
    prompt,
    refusal,
    request,
    sampling_metadata,
    scores_of,
    serving,
)

NUM_SLOTS = 4


@pytest.fixture(scope="module")
def server():
    """A temperature at which nearly all is noise, of which top_k leaves the likeliest token.

    Pages for one whole context, on four slots: two pages of 64 tokens.
    """
    flags = (f"--model={MODEL}", f"--num_slots={NUM_SLOTS}", "--temperature=5", "--top_k=1")
    with serving(*flags, "--max_prompt_tokens=64", "--cache_tokens=1") as server:
        yield server


# What is served.


def test_tokens_are_those_of_transformers_and_of_the_decoder(server):
    ids = reference("qwen2_tied")["prompt"].ravel().tolist()
    continuation = reference("qwen2_tied")["continuation"].ravel().tolist()
    assert ids_of(server.stub.Decode(request(ids, len(continuation)))) == continuation
    assert expected(ids, len(continuation)) == continuation
    assert "prompts of up to 64 tokens, 128 with their replies" in server.ready_line
    assert "128 tokens of KV cache" in server.ready_line


def test_server_listens_at_its_own_address_only(server):
    _, port = server.address.split(":")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", int(port)), timeout=5)


def test_where_the_cache_is_full_requests_wait_and_none_is_cut(server):
    """Thirty on four slots: of all lengths up to the longest prompt and the last place.

    Many want both pages in the end, and prompts wait for a first one. Who goes away while it waits
    leaves nothing behind.
    """
    asked = [
        (prompt(i, length), count)
        for i, (length, count) in enumerate(
            [(1, 127), (64, 64), (16, 1), (17, 30), (63, 65)] + [(3 + i, 20) for i in range(25)]
        )
    ]
    calls = [server.stub.Decode(request(ids, count)) for ids, count in asked]
    gone = [server.stub.Decode(request(prompt(i, 30), 90)) for i in range(4)]
    for call in gone:
        call.cancel()
    assert [ids_of(call) for call in calls] == [expected(ids, count) for ids, count in asked]
    assert server.stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live


def test_a_text_is_its_ids_and_comes_back_as_text(server):
    """Control tokens in a text are what they say: so a client renders its own chat."""
    tokenizer = load_tokenizer(MODEL)
    message = {"role": "user", "content": "héllo 🙂"}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids("<|user|>") in ids
    samples = [r.stream_content.samples[0] for r in server.stub.Decode(request(text, 40))]
    sampled = [i for sample in samples for i in sample.token_ids]
    assert sampled == expected(ids, 40)
    # Random weights also say bytes that are no characters, and ids that are no tokens.
    assert "".join(sample.text for sample in samples) == ChatRenderer(tokenizer).decode(sampled)
    assert not any(s.stream_content.samples[0].text for s in server.stub.Decode(request(ids, 3)))


# What a request may ask for.


def test_sampling_settings_of_a_request_hold_whatever_shares_the_batch(server):
    """Seeds, temperatures and cuts: alone, and again shuffled among others, bit for bit."""
    plain = {"temperature": 1, "top_k": 0}
    asked = [
        *({**plain, "seed": seed} for seed in (0, 1, MAX_SEED)),
        {"temperature": 0.5, "top_k": 0, "top_p": 0.9, "seed": 0},
        {"temperature": 3, "top_k": 20, "min_p": 0.01, "seed": 0},
    ]
    ids = prompt(50, 12)

    def ask(options):
        return server.stub.Decode(request(ids, 40), metadata=sampling_metadata(**options))

    alone = [ids_of(ask(options)) for options in asked]
    assert len({tuple(sampled) for sampled in alone}) == len(asked)
    assert all(
        sampled == narrowed(ids, 40, lambda _: range(VOCAB), options)
        for sampled, options in zip(alone, asked, strict=True)
    )
    rng = np.random.default_rng(0)
    order = rng.permutation([*range(len(asked))] * 2 + [-1] * 6)
    calls = [ask(asked[i] if i >= 0 else plain) for i in order]
    sampled = [ids_of(call) for call in calls]
    assert all(sampled[k] == alone[i] for k, i in enumerate(order) if i >= 0)
    # Who names no seed has one of his own; who wants the likeliest gets it.
    own = [tuple(sampled[k]) for k, i in enumerate(order) if i < 0]
    assert len(set(own)) == len(own)
    assert ids_of(ask({"temperature": 0})) == expected(ids, 40)


@jax.jit
def draw(logits_V, seed, place, rows):
    """As the server draws with --seed=0, and as a rollout does for a task of this seed."""
    uniform = token_uniforms(jax.random.key(0), jnp.array([seed]), place[None])
    return sample(uniform, logits_V[None], rows)[0][0]


def test_a_token_id_of_the_request_ends_its_reply(server):
    """It is not sent, as the end of a turn is not; requests beside it know nothing of it."""
    ids = prompt(51, 12)
    whole = expected(ids, 60)
    assert len(whole) == 60
    stop = whole[20]
    first = whole.index(stop)
    call = server.stub.Decode(
        request(ids, 60), metadata=sampling_metadata(stop_token_ids=[3, stop])
    )
    beside = server.stub.Decode(request(ids, 60))
    assert ids_of(call) == whole[:first] and finish_reason(call) == "stop_token_id"
    assert ids_of(beside) == whole and finish_reason(beside) == "max_tokens"


def narrowed(ids, count: int, may_follow, options) -> list[int]:
    """Returns the answer to a request whose next ids are restricted to `may_follow(sampled)`."""
    model, params = loaded()
    forward = logits_step(model, CONTEXT)
    draws = {name: value for name, value in options.items() if name != "seed"}
    rows = sampling_rows(Sampling(**draws), 1)
    row, sampled = np.zeros(CONTEXT, np.int32), []
    row[: len(ids)] = ids
    for place in range(len(ids), len(ids) + count):
        allowed = np.full(VOCAB, -np.inf, np.float32)
        allowed[sorted(may_follow(sampled))] = 0
        logits = forward(params, row, place) + allowed
        token = int(draw(logits, options.get("seed", 0), place, rows))
        if token in end_ids():
            break
        row[place] = token
        sampled.append(token)
    return sampled


CHOICES = ("left", "left up", "right", "日")


def test_a_reply_is_one_of_the_choices_of_its_request(server):
    """At a heat at which all is noise: each is sampled, and no other, as the decoder says them."""
    tokenizer, ids = load_tokenizer(MODEL), prompt(60, 12)
    [end] = [tokenizer.eos_token_id]
    replies = [[*tokenizer.encode(text, add_special_tokens=False), end] for text in CHOICES]
    assert len({reply[0] for reply in replies}) < len(replies) and max(map(len, replies)) > 2

    def may_follow(sampled):
        return {
            r[len(sampled)]
            for r in replies
            if len(r) > len(sampled) and r[: len(sampled)] == sampled
        }

    asked = [{"temperature": 100, "top_k": 0, "seed": seed} for seed in range(16)]
    calls = [
        server.stub.Decode(request(ids, 30), metadata=sampling_metadata(choices=CHOICES, **options))
        for options in asked
    ]
    beside = server.stub.Decode(request(ids, 30))
    sampled = [ids_of(call) for call in calls]
    assert {tuple(reply) for reply in sampled} == {tuple(reply[:-1]) for reply in replies}
    assert sampled == [narrowed(ids, 30, may_follow, options) for options in asked]
    assert {finish_reason(call) for call in calls} == {"end_of_turn"}
    assert ids_of(beside) == expected(ids, 30)
    greedy = server.stub.Decode(
        request(ids, 30), metadata=sampling_metadata(choices=CHOICES, temperature=0)
    )
    assert ids_of(greedy) == narrowed(ids, 30, may_follow, {"temperature": 0})
    text = tokenizer.decode(ids)
    replied = server.stub.Decode(request(text, 30), metadata=sampling_metadata(choices=["日 ok"]))
    assert "".join(r.stream_content.samples[0].text for r in replied) == "日 ok"


def test_a_reply_is_made_of_the_allowed_tokens_of_its_request(server):
    ids, allowed = prompt(61, 12), [7, 40, 41, 300]
    for count, may, options in (
        (30, allowed, {"temperature": 50, "top_k": 0, "seed": 1}),
        (30, allowed, {"temperature": 0}),
        (60, [*allowed, *end_ids()], {"temperature": 50, "top_k": 0, "seed": 2}),
    ):
        call = server.stub.Decode(
            request(ids, count), metadata=sampling_metadata(allowed_token_ids=may, **options)
        )
        sampled = ids_of(call)
        assert sampled == narrowed(ids, count, lambda _, may=may: may, options)
        ends = "max_tokens" if may == allowed else "end_of_turn"
        assert set(sampled) <= set(allowed) and finish_reason(call) == ends


# What it tells of them.


def test_requested_log_probs_are_of_the_sampling_and_of_the_model(server):
    """By hand from the decoder's logits: tempered and cut, narrowed, greedy; and nobody else is."""
    ids, both = prompt(62, 12), {"logprobs": True, "model_logprobs": True}
    asked = [
        {"temperature": 0.7, "top_k": 5, "seed": 3, **both},
        {"temperature": 2, "top_k": 0, "seed": 4, "allowed_token_ids": [7, 40, 41], **both},
        {"temperature": 0, **both},
        {"temperature": 2, "top_k": 0, "seed": 4, "model_logprobs": True},
        {"temperature": 2, "top_k": 0, "seed": 4, "logprobs": True},
        {"temperature": 2, "top_k": 0, "seed": 4},
    ]
    calls = [
        server.stub.Decode(request(ids, 9), metadata=sampling_metadata(**options))
        for options in asked
    ]
    model, params = loaded()
    forward = logits_step(model, CONTEXT)
    for options, call in zip(asked, calls, strict=True):
        row = np.zeros(CONTEXT, np.int32)
        row[: len(ids)] = ids
        scores = scores_of(call)
        assert len(scores) > 2
        for position, entry in enumerate(scores, start=len(ids)):
            token = entry.pop("token")
            logits = np.asarray(forward(params, row, position), np.float64)
            row[position] = token
            heated = logits / (options["temperature"] or 1)
            if "allowed_token_ids" in options:
                heated = heated[options["allowed_token_ids"]]
            elif options.get("top_k"):
                heated = np.sort(heated)[-options["top_k"] :]
            drawn_from = logits[token] / (options["temperature"] or 1) - np.logaddexp.reduce(heated)
            expected = {
                "logprob": drawn_from,
                "model_logprob": logits[token] - np.logaddexp.reduce(logits),
            }
            assert entry == pytest.approx(
                {name: expected[name] for name in expected if options.get(f"{name}s")}, abs=1e-4
            )


# What is refused.


ASKED_FOR_FOUR = request("abc", 4).SerializeToString()
BAD = {
    "no content": (jetstream_pb2.DecodeRequest(max_tokens=4), "has no prompt; set text_content"),
    "nothing at all": (jetstream_pb2.DecodeRequest(), "has no prompt"),
    "empty text": (request("", 4), "text_content.text is empty"),
    "no ids": (request([], 4), "the prompt has no tokens"),
    "long ids": (
        request([5] * 65, 4),
        "prompt has 65 tokens; .* at most 64 .by --max_prompt_tokens=64",
    ),
    "long text": (request("\t" * 65, 4), "prompt has 65 tokens; .* at most 64"),
    "huge text": (request("x" * 60_000, 4), "prompt has 60000 tokens; .* at most 64"),
    "too long": (request([5] * 64, 65), "64 tokens and max_tokens=65 .* context of 129; .* 64"),
    "too long for text": (request("\t", 2**31 - 1), "at least 1, and with the prompt at most 128"),
    "no max_tokens": (request("abc", 0), "max_tokens is 0; it must be at least 1"),
    "negative max_tokens": (request([5], -3), "max_tokens is -3; it must be at least 1"),
    "id too high": (request([5, 320], 4), "token id 320 is not .* from 0 to 319"),
    "id far too high": (request([5, 2**31 - 1], 4), "token id 2147483647 is not"),
    "negative id": (request([5, -1, 7], 4), "token id -1 is not in the vocabulary"),
    "session": (request("abc", 4, session_cache="mine"), "session_cache and priority have no"),
    "priority": (request("abc", 4, priority=1), "session_cache and priority have no effect"),
    "unknown field": (ASKED_FOR_FOUR + b"\x38\x02", "field 7 of the request is not known"),
    "no message": (b"\xff\xff\xff", "no jetstream_proto.DecodeRequest .*corrupt"),
    "cut short": (ASKED_FOR_FOUR[:-1], "no jetstream_proto.DecodeRequest"),
    "lone surrogate": (b"\x20\x04\x2a\x05\x0a\x03\xed\xa0\x80", "UTF-8, which has no lone surr"),
    "no UTF-8": (b"\x20\x04\x2a\x03\x0a\x01\xff", "text must be UTF-8"),
}


def send(server: Server, message, metadata=None):
    """A call for a message, or for bytes as they are."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    read = jetstream_pb2.DecodeResponse.FromString
    path = "/jetstream_proto.Orchestrator/Decode"
    method = server.channel.unary_stream(path, response_deserializer=read)
    return method(data, metadata=metadata)


def test_bad_requests_are_errors_that_say_why_and_disturb_no_other(server):
    """Good ones before, between and behind them say what they say alone."""
    good = [(prompt(100 + i, 10 + i), 40) for i in range(8)]
    before = [server.stub.Decode(request(*asked)) for asked in good[:4]]
    for name, (message, words) in BAD.items():
        code, details = refusal(send(server, message))
        assert code == Code.INVALID_ARGUMENT, (name, code, details)
        assert re.search(words, details), (name, details)
    after = [server.stub.Decode(request(*asked)) for asked in good[4:]]
    assert [ids_of(call) for call in before + after] == [expected(*asked) for asked in good]
    assert server.stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live


BAD_WISHES = {
    "no JSON": ("temperature=1", r"'sampling' is no JSON \(.*\); send such as \{\"temperature"),
    "deep": ("[" * 7000, "'sampling' is no JSON"),
    "no object": ("[1]", "'sampling' must be an object such as"),
    "unknown": ('{"temprature": 1}', "sampling.temprature is not .*did you mean 'temperature'"),
    "unknown far": ('{"x": 1}', "sampling.x is not known; known are temperature, top_k,"),
    "type": ('{"temperature": "hot"}', "sampling.temperature must be a number; got 'hot'"),
    "not told": ('{"logprobs": 5}', "sampling.logprobs must be true or false; got 5"),
    "truth": ('{"top_k": true}', "sampling.top_k must be a whole number; got True"),
    "range": ('{"top_p": 0}', r"sampling.top_p is 0.0; it must lie in \(0, 1\]"),
    "not finite": ('{"temperature": 1e999}', "sampling.temperature is inf; it must be finite"),
    "no number": ('{"temperature": NaN}', "sampling.temperature is nan; it must be finite"),
    "huge": ('{"top_k": 99999999999999999999}', "sampling.top_k is 99999999999999999999"),
    "contradiction": ('{"temperature": 0, "top_k": 3}', "have no effect beside it; remove them"),
    "idle seed": ('{"temperature": 0, "seed": 3}', "sampling.seed has no effect at temperature 0"),
    "seed": ('{"seed": -1}', "sampling.seed is -1; it must lie between 0 and 1073741823"),
    "no list": ('{"stop_strings": "x"}', "sampling.stop_strings must be a list of str; got 'x'"),
    "empty stop": ('{"stop_strings": [""]}', "sampling.stop_strings holds an empty string"),
    "strange stop": ('{"stop_token_ids": [1, 320]}', "stop_token_ids holds 320; .* from 0 to 319"),
    "no choice": ('{"choices": []}', "sampling.choices is an empty list, which allows no reply"),
    "empty choice": ('{"choices": ["a", ""]}', "sampling.choices holds an empty string"),
    "choices of ids": ('{"choices": [5]}', r"sampling.choices must be a list of str; got \[5\]"),
    "half a choice": ('{"choices": ["\\ud800"]}', "sampling.choices holds a lone surrogate"),
    "long choice": ('{"choices": ["abcde"]}', "a reply of 5 tokens, and max_tokens is 4; raise it"),
    "many choices": (
        json.dumps({"choices": [f"{i:03}" for i in range(300)]}),
        r"choices takes at least 300 different .* takes 256 \(--max_choice_tokens",
    ),
    "many branches": (
        json.dumps({"choices": [f"{i:03}" for i in range(200)]}),
        r"choices takes 422 different .* takes 256 \(--max_choice_tokens",
    ),
    "many tokens": (
        json.dumps({"allowed_token_ids": [*range(257)] * 2}),
        "allowed_token_ids takes 257 different .* takes 256",
    ),
    "strange token": ('{"allowed_token_ids": [-1]}', "allowed_token_ids holds -1; ids go from 0"),
    "both": ('{"choices": ["a"], "allowed_token_ids": [5]}', "send one of them"),
    "stop that no choice has": (
        '{"choices": ["a"], "stop_token_ids": [319]}',
        "stop_token_ids holds 319, which sampling.choices never lets come; add it there, or",
    ),
    "stop that is not allowed": (
        '{"allowed_token_ids": [5, 7], "stop_token_ids": [7, 6]}',
        "stop_token_ids holds 6, which sampling.allowed_token_ids never lets come",
    ),
}


def test_impossible_sampling_settings_are_errors_that_say_why(server):
    for name, (text, words) in BAD_WISHES.items():
        call = server.stub.Decode(request("abc", 4), metadata=[("sampling", text)])
        code, details = refusal(call)
        assert code == Code.INVALID_ARGUMENT, (name, code, details)
        assert re.search(words, details), (name, details)
    twice = [*sampling_metadata(seed=1), *sampling_metadata(seed=2)]
    _, details = refusal(server.stub.Decode(request("abc", 4), metadata=twice))
    assert "have 2 values of 'sampling'; send one" in details
    # Other metadata are nobody's business.
    call = server.stub.Decode(request(prompt(1, 5), 4), metadata=[("traceparent", "x")])
    assert ids_of(call) == expected(prompt(1, 5), 4)


def test_a_message_larger_than_any_prompt_is_not_even_read(server):
    code, details = refusal(server.stub.Decode(request("x" * 2**21, 4)))
    assert code == Code.RESOURCE_EXHAUSTED and "larger than max" in details


# Mistakes in what is given.


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--model=nowhere"], r"--model is 'nowhere', and there is no such folder"),
        (["--workdir=nowhere"], r"--workdir=nowhere holds no run"),
        (["--port=70000"], r"--port=70000; it must lie between 0 and 65535"),
        (["--grpc_port=-1"], r"--grpc_port=-1; it must lie between 0 and 65535"),
        (["--port=9000", "--grpc_port=9000"], r"--port=9000 is HTTP's and --grpc_port=9000 gRPC's"),
        (["--num_slots=0"], r"--num_slots=0; it must lie between 1"),
        (["--max_waiting=-1"], r"--max_waiting=-1; it must lie between 0"),
        (["--max_context=1"], r"--max_context=1; it must lie between 2"),
        (["--cache_tokens=0"], r"--cache_tokens=0; it must lie between 1"),
        (["--max_prompt_tokens=0"], r"--max_prompt_tokens=0; it must lie between 1 and 1073741824"),
        (["--num_draft_tokens=-1"], r"--num_draft_tokens=-1; it must lie between 0"),
        (["--max_context=192"], r"--max_context=192; that of .* is 128 tokens: lower it"),
        (["--max_prompt_tokens=128", "--max_context=64"], r"of 64 tokens; choose at most 64"),
        (["--mesh=data=2", "--num_slots=3"], r"--num_slots=3 does not divide over the mesh data=2"),
        (["--mesh=tensor=3"], r"--mesh=data=1,tensor=3 cannot hold this model: .*by 3"),
        (["--temperature=-1"], r"--temperature is -1.0; it must be finite and at least 0"),
        (["--top_p=0"], r"--top_p is 0.0; it must lie in \(0, 1\]"),
        (["--temperature=0", "--top_k=3"], r"--top_k, --top_p and --min_p have no effect"),
        (["--temperature=0", "--seed=3"], r"--seed=3 has no effect with --temperature=0"),
        (["--mesh=rows=2"], r"mesh shape 'rows=2': cannot read"),
        (["--workdir=x", "--platform=cpu"], r"--platform has no effect beside --workdir"),
    ],
)
def test_mistakes_are_refused_in_words(flags, words):
    policy = [] if flags[0].startswith(("--model", "--workdir")) else [f"--model={MODEL}"]
    with pytest.raises(ValueError, match=words):
        serve_command([*policy, *PORTS, *flags])


def test_an_address_that_cannot_be_had_is_refused_before_a_model_is_read():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flag, other in (("--port", "--grpc_port"), ("--grpc_port", "--port")):
            words = f"--host=127.0.0.1 {flag}={port} cannot be used .*in use.*another one, or 0 for"
            with pytest.raises(ValueError, match=words):
                serve_command(["--model=nowhere", f"{flag}={port}", f"{other}=0"])
    with pytest.raises(ValueError, match="--host=192.0.2.1 .* must be an address of this machine"):
        serve_command(["--model=nowhere", "--host=192.0.2.1"])


def test_a_policy_must_be_named(capsys):
    for flags in ([], [f"--model={MODEL}", "--workdir=runs/x"]):
        with pytest.raises(SystemExit) as ended:
            serve_command(flags)
        assert ended.value.code == 2
    assert "--workdir --model is required" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"--models=x; did you mean --model\?"):
        serve_command(["--models=x"])


def test_context_that_memory_limits_is_reported():
    flags = parse_flags([f"--model={MODEL}"])
    assert (context_tokens_of(flags, 128, 1000), context_tokens_of(flags, None, 1000)) == (
        128,
        1000,
    )
    assert context_tokens_of(flags, 128, 100) == 100
    assert prompt_limit_of(flags, 128, 128) == "the model's context"
    assert prompt_limit_of(flags, 128, 100) == "the memory of its devices"
    asked = parse_flags([f"--model={MODEL}", "--max_context=101"])
    assert prompt_limit_of(asked, 128, 101) == "--max_context=101"
    words = "--max_context=101; beside the weights .* a context of 100 tokens: lower it, .*kv_dtype"
    with pytest.raises(ValueError, match=words):
        context_tokens_of(asked, 128, 100)


@pytest.mark.parametrize(
    ("flags", "tokens", "holds"),
    [
        ((), 8 * 2048, 8 * 2048),
        (("--cache_tokens=100",), 100, 8 * 2048),
        (("--cache_tokens=40000",), 40_000, 40_000),
        (("--max_context=50000",), 8 * 2048, 50_000),
        (("--max_prompt_tokens=30000",), 8 * 2048, 30_000),
    ],
)
def test_a_cache_on_a_cpu_is_modest_unless_flags_ask_for_more(flags, tokens, holds):
    """The tokens of the cache, which has at least one context, and the longest context."""
    assert cache_tokens_of(parse_flags([f"--model={MODEL}", *flags]), served().engine) == (
        tokens,
        holds,
    )
