# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""python -m earl_jax.serve: its slots, its end, its failures; from real processes."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
from jetstream.core.proto import jetstream_pb2

from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.serve import main
from earl_jax.serving import served_engine
from earl_jax.serving import server as serving_server
from tests.support.allocator import memory_limit
from tests.support.http_client import ask, connect, events, send
from tests.support.served import (
    MODEL,
    PORTS,
    SAYING,
    Code,
    Server,
    finish_reason,
    ids_of,
    refusal,
    request,
    sampling_metadata,
    save_parrot,
    saying,
    serving,
)

NUM_SLOTS, MAX_WAITING = 4, 4
COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "parrot"
    save_parrot(folder)
    # Whose steps say several tokens, where it says what it has said before.
    flags = ("--max_prompt_tokens=16", "--num_draft_tokens=4")
    flags += (f"--max_waiting={MAX_WAITING}", "--max_choice_tokens=0")
    with serving(
        f"--model={folder}", f"--num_slots={NUM_SLOTS}", "--temperature=0", *flags
    ) as server:
        yield server


def test_characters_of_several_tokens_come_whole(parrot):
    replies = [r.stream_content.samples[0] for r in parrot.stub.Decode(request("<", 100))]
    assert [i for s in replies for i in s.token_ids] == saying()
    texts = [sample.text for sample in replies]
    assert "".join(texts) == SAYING[1:]
    # Rounds end within characters, whose text comes with the next.
    assert len(texts) > 1 and not any("\ufffd" in text for text in texts)
    # Cut in the middle of the first character.
    [cut] = [r.stream_content.samples[0] for r in parrot.stub.Decode(request("<", 1))][1:]
    assert cut.text == "\ufffd" and not cut.token_ids


def test_a_stop_string_ends_a_reply_and_its_ids_say_where(parrot):
    """Ids are those that were sampled, the last of which completes the string; text ends before it.

    The characters of SAYING are of one to four tokens.
    """
    tokenizer, sampled = load_tokenizer(MODEL), saying()

    def ask(what, count=100, **options):
        call = parrot.stub.Decode(request(what, count), metadata=sampling_metadata(**options))
        samples = [r.stream_content.samples[0] for r in call]
        ids = [i for sample in samples for i in sample.token_ids]
        return "".join(sample.text for sample in samples), ids, finish_reason(call)

    def ids_up_to(text: str) -> list[int]:
        return sampled[: len(tokenizer.encode(text))]

    assert ask("<") == (SAYING[1:], sampled, "end_of_turn")
    assert ask("<", stop_strings=["🙂"]) == ("日", ids_up_to("日🙂"), "stop_string")
    assert ask("<", stop_strings=["ok", "é"]) == ("日🙂", ids_up_to("日🙂é"), "stop_string")
    assert ask("<", stop_strings=["日"]) == ("", ids_up_to("日"), "stop_string")
    # It begins, is not finished, and is told at the end.
    assert ask("<", stop_strings=["ok!"]) == (SAYING[1:], sampled, "end_of_turn")
    assert ask("<", 2, stop_strings=["日🙂"])[1:] == (sampled[:2], "max_tokens")
    # For ids the same ids, and no text.
    [mark] = tokenizer.encode("<")
    assert ask([mark], stop_strings=["🙂"]) == ("", ids_up_to("日🙂"), "stop_string")


def generate(server, ids, count: int, **params):
    """Sampled ids, and the choice that they are of."""
    sampling = {"max_tokens": count, **params}
    [choice] = ask(server.http, GENERATE, token_ids=ids, sampling_params=sampling)["choices"]
    return choice["token_ids"], choice


def test_over_http_every_sampled_id_is_returned_and_the_last_ends_the_reply(parrot):
    """The end of turn, with its log-prob; and a stop token id."""
    [mark, eos] = [load_tokenizer(MODEL).encode("<")[0], load_tokenizer(MODEL).eos_token_id]
    sampled, choice = generate(parrot, [mark], 100, logprobs=1)
    assert sampled == [*saying(), eos] and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"][-1]["token"] == f"token_id:{eos}"
    assert generate(parrot, [mark], 100)[0] == sampled
    assert generate(parrot, [mark], 100, stop_token_ids=[sampled[4]])[0] == sampled[:5]
    exact, choice = generate(parrot, [mark], len(sampled))
    assert exact == sampled and choice["finish_reason"] == "stop"
    short, choice = generate(parrot, [mark], len(sampled) - 1)
    assert short == sampled[:-1] and choice["finish_reason"] == "length"


def test_over_http_a_stop_string_ends_the_text(parrot):
    for stop, text, found in (
        (["🙂"], "日", "🙂"),
        ("ok", "日🙂é ", "ok"),
        (["nothing", "é"], "日🙂", "é"),
    ):
        body = {"prompt": "<", "stop": stop, "max_tokens": 100}
        [choice] = ask(parrot.http, COMPLETIONS, **body)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        assert choice["stop_reason"] == found
        parts = [part["choices"][0] for part in events(parrot.http, COMPLETIONS, **body)]
        assert "".join(part["text"] for part in parts) == text
        assert parts[-1]["finish_reason"] == "stop"
    parts = list(events(parrot.http, COMPLETIONS, prompt="<", max_tokens=100))
    texts = [part["choices"][0]["text"] for part in parts]
    assert "".join(texts) == SAYING[1:] and len(texts) > 1
    assert not any("\ufffd" in text for text in texts)
    # Cut in the middle of the first character.
    [choice] = ask(parrot.http, COMPLETIONS, prompt="<", max_tokens=1)["choices"]
    assert choice == {
        "index": 0,
        "text": "\ufffd",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }


def test_replies_that_stop_give_their_slots_back(parrot):
    """Each would take thousands of tokens more."""
    tokenizer = load_tokenizer(MODEL)
    [x] = tokenizer.encode("x")
    for options in ({"stop_strings": ["xxxx"]}, {"stop_token_ids": [x]}):
        for _ in range(2 * NUM_SLOTS):
            call = parrot.stub.Decode(request("x", 8000), metadata=sampling_metadata(**options))
            assert ids_of(call) == ([x] * 4 if "stop_strings" in options else [])
    all_slots_answer(parrot)


def forever(server: Server, count: int = 8000):
    """A request that takes so many tokens of a parrot, of which some have come."""
    call = server.stub.Decode(request("x", count))
    next(call)
    return call


def all_slots_answer(server: Server) -> None:
    """As many requests as there are slots and places in the queue, none of which is refused."""
    deadline = time.monotonic() + 60
    while True:
        calls = [server.stub.Decode(request("<", 50)) for _ in range(NUM_SLOTS + MAX_WAITING)]
        try:
            sampled = [ids_of(call) for call in calls]
        except grpc.RpcError as error:
            # The server hears of a client's end a moment later.
            assert error.code() == Code.RESOURCE_EXHAUSTED and time.monotonic() < deadline
            continue
        assert sampled == [saying()] * len(calls)
        return


def test_more_requests_than_may_wait_are_refused(parrot):
    # In the order of sending: those before are in when the last one is refused.
    number = NUM_SLOTS + MAX_WAITING
    *calls, late = [parrot.stub.Decode(request("x", 8000)) for _ in range(number + 1)]
    code, words = refusal(late)
    assert code == Code.RESOURCE_EXHAUSTED
    assert re.search(r"^8 requests are open, .*--max_waiting.*try again later$", words)
    for call in calls:
        call.cancel()
    all_slots_answer(parrot)


def test_clients_that_cancel_give_their_slots_back(parrot):
    """Long before their 8000 tokens; a request beside them goes on from token to token."""
    beside = forever(parrot)
    for _ in range(5):
        gone = [forever(parrot) for _ in range(NUM_SLOTS - 1)]
        for call in gone:
            call.cancel()
    assert ids_of(parrot.stub.Decode(request("<", 50))) == saying()
    assert not beside.done()
    beside.cancel()
    all_slots_answer(parrot)


def forever_over_http(server, **options) -> socket.socket:
    """A client that has asked for a reply without end."""
    host, port = server.http.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x", "max_tokens": 8000, **options})
    client = socket.create_connection((host, int(port)), 60)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return client


def has_begun(client: socket.socket) -> bool:
    """True when the request of a streamed reply is in."""
    return client.recv(2**10).startswith(b"HTTP/1.1 200")


def test_clients_that_go_away_over_http_give_their_slots_back(parrot):
    """Long before their 8000 tokens, streamed or not; one too many is refused meanwhile."""
    for options in ({"stream": True}, {"stream": True, "n": 2}, {"n": 2}):
        number = (NUM_SLOTS + MAX_WAITING) // options.get("n", 1)
        clients = [forever_over_http(parrot, **options) for _ in range(number)]
        if "stream" in options:
            assert all([has_begun(client) for client in clients])
        # Those that stream are in already.
        while (found := send(parrot.http, COMPLETIONS, {"prompt": "<"}))[0] == 200:
            assert "stream" not in options
        assert found[0] == 429 and found[1]["error"]["type"] == "rate_limit_error"
        assert re.search("8 requests are open, .*--max_waiting", found[1]["error"]["message"])
        for client in clients:
            client.close()
        all_slots_answer(parrot)
    assert parrot.errors == ""


CLIENT = """
import sys, time, grpc
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
stub = jetstream_pb2_grpc.OrchestratorStub(grpc.insecure_channel(sys.argv[1]))
asked = jetstream_pb2.DecodeRequest(max_tokens=8000, text_content={"text": "x"})
calls = [stub.Decode(asked) for _ in range(4)]
for call in calls:
    next(call)
print("all slots are mine", flush=True)
time.sleep(60)
"""


def test_a_client_that_is_killed_leaves_nothing_behind(parrot):
    tasks = Path(f"/proc/{parrot.process.pid}/task")
    before = len(list(tasks.iterdir())) if tasks.exists() else 0
    line = [sys.executable, "-c", CLIENT, parrot.address]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout and client.stdout.readline() == "all slots are mine\n"
        client.kill()
    all_slots_answer(parrot)
    assert not before or len(list(tasks.iterdir())) < before + 8  # gRPC keeps a few of its own


# Its end.


@pytest.mark.slow
def test_a_signal_ends_it_and_its_requests_with_a_reason(tmp_path):
    """SIGINT, over both protocols. SIGTERM, with the same handler, ends all other servers here."""
    save_parrot(tmp_path / "parrot")
    flags = (f"--model={tmp_path / 'parrot'}", "--num_slots=3")
    line = "-m", "earl_jax.serve", *PORTS, "--temperature=0", *flags
    server, found = Server(*line), []
    with contextlib.closing(server.channel):
        body = {"prompt": "x", "max_tokens": 5000}
        thread = threading.Thread(target=lambda: found.append(send(server.http, COMPLETIONS, body)))
        thread.start()
        streamed = forever_over_http(server, stream=True, max_tokens=5000)
        assert has_begun(streamed)
        idle = connect(server.http)
        idle.connect()
        calls = [forever(server, 5000)]
        calls += [server.stub.Decode(request("x", 5000)) for _ in range(3)]
        server.process.send_signal(signal.SIGINT)
        answers = [refusal(call) for call in calls]
        thread.join(30)
        with streamed, streamed.makefile("rb") as file:
            rest = file.read()
        idle.close()
        assert server.end() == 0
    assert {code for code, _ in answers} == {Code.UNAVAILABLE}
    assert all("stopped; send the request again later" in words for _, words in answers)
    assert b'data: {"error": {"message": "the server is being stopped' in rest
    assert rest.endswith(b"0\r\n\r\n")
    [(status, answer)] = found
    assert status == 503 and "stopped; send the request again" in answer["error"]["message"]
    assert server.errors == ""


FATAL = 6


def serve_faulty(model: str) -> None:
    """The command with an engine that fails at certain prompts, as a device might."""

    class FaultyEngine(served_engine.Engine):
        def play(self, params, state, inputs, **given):
            if (inputs.chunk[:, 0] == FATAL).any():
                raise RuntimeError("the device is lost\nand more")
            return super().play(params, state, inputs, **given)

    served_engine.Engine = FaultyEngine
    sys.argv[1:] = [f"--model={model}", *PORTS, "--temperature=0", "--num_slots=2"]
    sys.argv += ["--max_choice_tokens=0", "--max_prompt_tokens=16"]
    main()


@pytest.mark.slow
def test_failures_are_answered(tmp_path):
    """A lost device ends all requests and the server, with a word."""
    save_parrot(tmp_path / "parrot")
    code = "import sys; sys.path.insert(0, 'tests'); from test_serve_slots import serve_faulty; "
    code += f"serve_faulty({str(tmp_path / 'parrot')!r})"
    server = Server("-c", code)
    with contextlib.closing(server.channel), contextlib.ExitStack() as stack:
        stack.callback(server.process.kill)
        beside = server.stub.Decode(request("x", 1000))
        begun = ids_of([next(beside)])
        assert ids_of(server.stub.Decode(request("<", 50))) == saying()
        assert server.stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
        assert len(begun + ids_of(beside)) == 1000
        open_calls = [forever(server, 1000), server.stub.Decode(request([FATAL], 4))]
        for call in open_calls:
            code, words = refusal(call)
            assert code == Code.INTERNAL
            assert "the server failed, and ends (RuntimeError: the device is lost)" in words
        assert server.process.wait(60) == 1
    server.end()
    assert "the server cannot go on:" in server.errors


def serve_limited(*flags: str) -> None:
    """The command on devices of 64 MiB."""
    serve = serving_server.run_server

    def limited(*given):
        with memory_limit(2**26):
            serve(*given)

    serving_server.run_server = limited
    sys.argv[1:] = flags
    main()


@pytest.mark.slow
def test_no_request_is_the_first_that_memory_is_too_short_for(tmp_path):
    """A model of 10 million tokens, of which two slots have rows of 400 MB.

    Its layers have windows, so that the KV cache is small. The server does not start; with less
    context it refuses what is longer, and requests beside that have their tokens.
    """
    save_parrot(tmp_path / "parrot", windows=(64,), max_positions=10**7)
    flags = [f"--model={tmp_path / 'parrot'}", *PORTS, "--num_slots=2", "--num_draft_tokens=4"]
    flags += ["--temperature=0", "--max_choice_tokens=0"]
    code = "import sys; sys.path.insert(0, 'tests'); from test_serve_slots import serve_limited; "
    line = "-c", code + "serve_limited(*sys.argv[1:])", *flags
    with pytest.raises(AssertionError, match=r"error: .* a context of 10000000 \(.* --max_context"):
        Server(*line)
    server = Server(*line, "--max_context=8000")
    with contextlib.closing(server.channel), contextlib.ExitStack() as stack:
        stack.callback(server.process.kill)
        [x] = load_tokenizer(MODEL).encode("x")
        beside = server.stub.Decode(request("x", 1000))
        begun = ids_of([next(beside)])
        code, words = refusal(server.stub.Decode(request([x] * 8000, 1)))
        assert code == Code.INVALID_ARGUMENT and "this server has 8000" in words
        # Tables begin with 4,096 tokens.
        assert ids_of(server.stub.Decode(request([x] * 4100, 20))) == [x] * 20
        assert begun + ids_of(beside) == [x] * 1000
        assert server.stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
        assert server.end() == 0
