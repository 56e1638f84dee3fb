# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""python -m earl_jax.serve: real server processes, and clients that speak gRPC to them.

Clients use JetStream's own messages and nothing of ours.
"""

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
from test_families import REFERENCE, reference

from earl_jax.checkpoint import Checkpoints, open_workdir
from earl_jax.config import CheckpointConfig, make_config
from earl_jax.envs.chat import ChatRenderer
from earl_jax.envs.tokenizer import load_tokenizer
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows, head_weights
from earl_jax.models.hf_read import load_parameters, open_checkpoint
from earl_jax.models.hf_write import save_checkpoint
from earl_jax.models.parameters import is_spec, parameter_specs
from earl_jax.rollout import engine as engine_module
from earl_jax.serve import main, serve_command
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.world import World

ROOT = Path(__file__).parent.parent
MODEL = REFERENCE / "qwen2_tied"
CONTEXT, VOCAB, MAX_PROMPT = 128, 320, 64
NUM_SLOTS, MAX_WAITING = 4, 4
# What the parrot says behind "<", in a vocabulary in which most of these are several tokens.
SAYING = "<日🙂é ok"
PARROT_CONTEXT = 8192

Code = grpc.StatusCode


# A server process, and a client.


class Server:
    """A running server process: its address once it is ready, and its end."""

    def __init__(self, line: list[str], cache: Path):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        self.process = subprocess.Popen(
            line,
            cwd=ROOT,
            env=kept | {"XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        self._reading = threading.Thread(target=lambda: self.errors.extend(self.process.stderr))
        self._reading.start()
        self.ready_line = self.process.stdout.readline()
        found = re.search(r" at (127\.0\.0\.1:\d+):", self.ready_line)
        if not found:
            self.end()
            raise AssertionError(f"{self.ready_line}{''.join(self.errors)}")
        self.address = found[1]
        self.channel = grpc.insecure_channel(self.address)
        self.stub = jetstream_pb2_grpc.OrchestratorStub(self.channel)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its status after this signal, or after it has ended on its own."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self._reading.join()
            self.process.stdout.close()
            self.process.stderr.close()


@contextlib.contextmanager
def serving(cache: Path, *flags: str):
    line = [sys.executable, "-m", "earl_jax.serve", "--port=0", *flags]
    server = Server(line, cache)
    try:
        yield server
    finally:
        with contextlib.closing(server.channel):
            status = server.end()
    assert status == 0, "".join(server.errors)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(cache):
    """A temperature at which nearly all is noise, of which top_k leaves the likeliest token."""
    flags = (f"--model={MODEL}", f"--num_slots={NUM_SLOTS}", "--temperature=5", "--top_k=1")
    with serving(cache, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def parrot(cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "parrot"
    save_parrot(folder)
    flags = ("--max_prompt_tokens=16", "--max_tokens=8000", f"--max_waiting={MAX_WAITING}")
    with serving(
        cache, f"--model={folder}", f"--num_slots={NUM_SLOTS}", "--temperature=0", *flags
    ) as server:
        yield server


def request(prompt, max_tokens: int, **fields):
    """A DecodeRequest for a text or for ids."""
    if isinstance(prompt, str):
        fields["text_content"] = {"text": prompt}
    else:
        fields["token_content"] = {"token_ids": [int(token) for token in prompt]}
    return jetstream_pb2.DecodeRequest(max_tokens=max_tokens, **fields)


def ids_of(call) -> list[int]:
    return [i for r in call for s in r.stream_content.samples for i in s.token_ids]


def refusal(call) -> tuple[grpc.StatusCode, str]:
    """How a call that must fail does."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()


# What is expected.


@functools.cache
def make_step(model: ModelConfig, places: int):
    layout = make_layout(MeshShape(), jax.devices()[:1])

    @jax.jit
    def step(params, tokens_T, length):
        segments_BT = (jnp.arange(places) < length).astype(jnp.int32)[None]
        hidden_BTD = forward_rows(model, layout, params, tokens_T[None], segments_BT)
        return jnp.argmax(hidden_BTD[0, length - 1] @ head_weights(params))

    return step


def greedy(model: ModelConfig, params, prompt, count: int, stops) -> list[int]:
    """The likeliest tokens, up to a stop: a full forward pass for each, no cache."""
    step = make_step(model, CONTEXT)
    row, length = np.zeros(CONTEXT, np.int32), len(prompt)
    row[:length] = prompt
    said = []
    for place in range(length, length + count):
        token = int(step(params, row, place))
        if token in stops:
            break
        said.append(token)
        if place < CONTEXT:
            row[place] = token
    return said


@functools.cache
def loaded():
    checkpoint = open_checkpoint(MODEL)
    return checkpoint.model, load_parameters(checkpoint, make_layout(MeshShape()))


def expected(prompt, count: int) -> list[int]:
    """What the server of the fixture must say."""
    tokenizer = load_tokenizer(MODEL)
    stops = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    return greedy(*loaded(), prompt, count, stops)


def prompt(number: int, length: int) -> list[int]:
    return np.random.default_rng(number).integers(4, VOCAB, length).tolist()


def save_parrot(folder: Path) -> None:
    """A checkpoint whose next token depends on the last alone.

    Its layers add nothing. SAYING is said to its end; "x" is followed by "x" without end.
    """
    tokenizer = load_tokenizer(MODEL)
    model = ModelConfig(
        num_layers=1, width=64, num_heads=2, num_kv_heads=1, head_size=8, ffn_size=8
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda spec: np.full(spec.shape, 0 if spec.deviation else spec.constant, np.float32),
        parameter_specs(model, VOCAB),
        is_leaf=is_spec,
    )
    embed_VD = rng.normal(size=(VOCAB, model.width)).astype(np.float32)
    embed_VD /= np.linalg.norm(embed_VD, axis=1, keepdims=True)
    head_DV = np.zeros((model.width, VOCAB), np.float32)
    said = [*tokenizer.encode(SAYING), tokenizer.eos_token_id]
    assert len(set(said)) == len(said)
    [forever] = tokenizer.encode("x")
    for token, after in [*zip(said, said[1:], strict=False), (forever, forever)]:
        head_DV[:, after] += embed_VD[token]
    params |= {"embed": embed_VD, "head": head_DV}
    save_checkpoint(
        folder,
        params,
        model=model,
        vocab_size=VOCAB,
        tokenizer=tokenizer,
        dtype="float32",
        max_positions=PARROT_CONTEXT,
    )


def saying() -> list[int]:
    """What the parrot answers to "<"."""
    return load_tokenizer(MODEL).encode(SAYING)[1:]


# What is served.


def test_tokens_are_those_of_transformers_and_of_the_decoder(server):
    ids = reference("qwen2_tied")["prompt"].ravel().tolist()
    continuation = reference("qwen2_tied")["continuation"].ravel().tolist()
    assert ids_of(server.stub.Decode(request(ids, len(continuation)))) == continuation
    assert expected(ids, len(continuation)) == continuation
    assert "prompts of up to 64 tokens, 128 with their replies" in server.ready_line


def test_many_requests_at_once_on_few_slots(server):
    """Thirty on four slots: of all lengths up to the longest prompt and the last place."""
    asked = [
        (prompt(i, length), count)
        for i, (length, count) in enumerate(
            [(1, 127), (64, 64), (16, 1), (17, 30), (63, 65)] + [(3 + i, 20) for i in range(25)]
        )
    ]
    calls = [server.stub.Decode(request(ids, count)) for ids, count in asked]
    assert [ids_of(call) for call in calls] == [expected(ids, count) for ids, count in asked]


def test_a_text_is_its_ids_and_comes_back_as_text(server):
    """Control tokens in a text are what they say: so a client renders its own chat."""
    tokenizer = load_tokenizer(MODEL)
    message = {"role": "user", "content": "héllo 🙂"}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids("<|user|>") in ids
    samples = [r.stream_content.samples[0] for r in server.stub.Decode(request(text, 40))]
    said = [i for sample in samples for i in sample.token_ids]
    assert said == expected(ids, 40)
    # Random weights also say bytes that are no characters, and ids that are no tokens.
    assert "".join(sample.text for sample in samples) == ChatRenderer(tokenizer).decode(said)
    assert not any(s.stream_content.samples[0].text for s in server.stub.Decode(request(ids, 3)))


def test_characters_of_several_tokens_come_whole(parrot):
    replies = [r.stream_content.samples[0] for r in parrot.stub.Decode(request("<", 100))]
    assert [i for s in replies for i in s.token_ids] == saying()
    texts = [sample.text for sample in replies]
    assert "".join(texts) == SAYING[1:]
    assert {"日", "🙂", "é", ""} <= set(texts) and "\ufffd" not in "".join(texts)
    # Cut in the middle of the first character.
    [cut] = [r.stream_content.samples[0] for r in parrot.stub.Decode(request("<", 1))][1:]
    assert cut.text == "\ufffd" and not cut.token_ids


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run as training leaves it: config, tokenizer, a checkpoint of random weights."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = make_config(
        {
            "model": {"width": 32, "ffn_size": 64},
            "devices": {"num_cpu_devices": 4},
            "rollout": {"num_slots": 8, "episodes_per_step": 16},
            "train": {"learning_rate": 0.001},
        }
    )
    open_workdir(folder, config.as_dict())
    world = World(config, folder / "tokenizer")
    state = world.init_train_state(MeshShape())
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    placement = {"rollout_mesh": "data=4", "train_mesh": "data=4", "places": 32}
    position = {"placement": placement, "history": [], "throughput": {}}
    checkpoints.save(7, state, position)
    checkpoints.close()
    return folder, world, state


@pytest.mark.slow
def test_the_newest_checkpoint_of_a_run_is_served_on_a_mesh(workdir, cache):
    """Cut over both axes it says what one device says, to messages as the run renders them."""
    folder, world, state = workdir
    before = sorted(path for path in folder.rglob("*"))
    rendered = world.renderer.render_opening(world.renderer.opening("tic_tac_toe. you play x."))
    stops = {*world.renderer.end_of_turn_ids, world.renderer.pad_id}
    asked = [list(rendered.ids), *(prompt(i, 5 + 7 * i) for i in range(7))]
    want = [greedy(world.model, state.params, ids, 24, stops) for ids in asked]
    flags = ("--mesh=data=2,tensor=2", "--num_slots=4", "--temperature=0")
    with serving(cache, f"--workdir={folder}", *flags) as server:
        calls = [server.stub.Decode(request(ids, 24)) for ids in asked]
        assert [ids_of(call) for call in calls] == want
        assert ids_of(server.stub.Decode(request(rendered.text, 24))) == want[0]
        assert "after step 7" in server.ready_line and "data=2,tensor=2" in server.ready_line
    assert sorted(path for path in folder.rglob("*")) == before


# What is refused.


def raw(*parts: bytes) -> bytes:
    return b"".join(parts)


ASKED_FOR_FOUR = request("abc", 4).SerializeToString()
BAD = {
    "no content": (jetstream_pb2.DecodeRequest(max_tokens=4), "has no prompt; set text_content"),
    "nothing at all": (jetstream_pb2.DecodeRequest(), "has no prompt"),
    "empty text": (request("", 4), "text_content.text is empty"),
    "no ids": (request([], 4), "the prompt has no tokens"),
    "long ids": (request([5] * 65, 4), "prompt has 65 tokens; .* at most 64 .*max_prompt_tokens"),
    "long text": (request("\t" * 65, 4), "prompt has 65 tokens; .* at most 64"),
    "huge text": (request("x" * 500_000, 4), "prompt has 500000 tokens; .* at most 64"),
    "no room": (request([5] * 64, 65), "64 tokens and max_tokens=65 .*129 places; .* at most 64"),
    "no room for text": (request("\t", 2**31 - 1), "there are 128: lower max_tokens .* 127"),
    "no max_tokens": (request("abc", 0), "max_tokens is 0; it must be at least 1"),
    "negative max_tokens": (request([5], -3), "max_tokens is -3; it must be at least 1"),
    "id too high": (request([5, 320], 4), "token id 320 is not .* from 0 to 319"),
    "id far too high": (request([5, 2**31 - 1], 4), "token id 2147483647 is not"),
    "negative id": (request([5, -1, 7], 4), "token id -1 is not in the vocabulary"),
    "session": (request("abc", 4, session_cache="mine"), "session_cache and priority have no"),
    "priority": (request("abc", 4, priority=1), "session_cache and priority have no effect"),
    "unknown field": (raw(ASKED_FOR_FOUR, b"\x38\x02"), "field 7 of the request is not known"),
    "no message": (b"\xff\xff\xff", "no jetstream_proto.DecodeRequest .*corrupt"),
    "cut short": (ASKED_FOR_FOUR[:-1], "no jetstream_proto.DecodeRequest"),
    "lone surrogate": (b"\x20\x04\x2a\x05\x0a\x03\xed\xa0\x80", "UTF-8, which has no lone surr"),
    "no UTF-8": (b"\x20\x04\x2a\x03\x0a\x01\xff", "text must be UTF-8"),
}


def send(server: Server, message):
    """A call for a message, or for bytes as they are."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    read = jetstream_pb2.DecodeResponse.FromString
    path = "/jetstream_proto.Orchestrator/Decode"
    return server.channel.unary_stream(path, response_deserializer=read)(data)


def test_bad_requests_are_told_what_is_wrong_and_disturb_no_other(server):
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


def test_a_message_larger_than_any_prompt_is_not_even_read(server):
    code, details = refusal(server.stub.Decode(request("x" * 2**21, 4)))
    assert code == Code.RESOURCE_EXHAUSTED and "larger than max" in details


@pytest.mark.slow
def test_ten_thousand_malformed_requests_disturb_nobody(server):
    start = time.perf_counter()
    kinds = [message for name, (message, _) in BAD.items() if name != "huge text"]
    refused = 0
    for first in range(0, 10_000, 100):
        calls = [send(server, kinds[i % len(kinds)]) for i in range(first, first + 100)]
        good = server.stub.Decode(request(prompt(first, 12), 30))
        refused += sum(refusal(call)[0] == Code.INVALID_ARGUMENT for call in calls)
        assert ids_of(good) == expected(prompt(first, 12), 30)
    print(f"10,000 malformed requests: {time.perf_counter() - start:.1f} s")
    assert refused == 10_000
    assert server.process.poll() is None and server.errors == []


def forever(server: Server, count: int = 8000):
    """A request that takes so many tokens of a parrot, of which one has come."""
    call = server.stub.Decode(request("x", count))
    next(call)
    return call


def all_slots_answer(server: Server) -> None:
    """As many requests as there are slots and waiting places, none of which is refused."""
    deadline = time.monotonic() + 60
    while True:
        calls = [server.stub.Decode(request("<", 50)) for _ in range(NUM_SLOTS + MAX_WAITING)]
        try:
            said = [ids_of(call) for call in calls]
        except grpc.RpcError as error:
            # The server hears of a client's end a moment later.
            assert error.code() == Code.RESOURCE_EXHAUSTED and time.monotonic() < deadline
            continue
        assert said == [saying()] * len(calls)
        return


def test_more_requests_than_may_wait_are_refused(parrot):
    calls = [forever(parrot) for _ in range(NUM_SLOTS)]
    waiting = [parrot.stub.Decode(request("x", 8000)) for _ in range(MAX_WAITING)]
    # In the order of sending: those before are in when this one is refused.
    code, words = refusal(parrot.stub.Decode(request("x", 1)))
    assert code == Code.RESOURCE_EXHAUSTED
    assert re.search(r"^8 requests are open, .*--max_waiting.*try again later$", words)
    for call in calls + waiting:
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


@pytest.mark.slow
def test_short_requests_one_after_the_other_are_all_answered(cache):
    """On one slot, JetStream's own assertion fails now and then: see PolicyDriver."""
    with serving(cache, f"--model={MODEL}", "--num_slots=1", "--temperature=0") as server:
        ids = prompt(7, 3)
        for _ in range(1000):
            assert ids_of(server.stub.Decode(request(ids, 2))) == expected(ids, 2)


# Its end.


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_its_requests(cache, tmp_path, number):
    save_parrot(tmp_path / "parrot")
    flags = (f"--model={tmp_path / 'parrot'}", "--max_tokens=7000", "--num_slots=2")
    line = [sys.executable, "-m", "earl_jax.serve", "--port=0", "--temperature=0", *flags]
    server = Server(line, cache)
    with contextlib.closing(server.channel):
        calls = [forever(server, 5000) for _ in range(2)]
        calls += [server.stub.Decode(request("x", 5000)) for _ in range(3)]
        server.process.send_signal(number)
        answers = [refusal(call) for call in calls]
        assert server.end() == 0
    assert {code for code, _ in answers} == {Code.UNAVAILABLE}
    assert all("stopped; send the request again later" in words for _, words in answers)
    assert server.errors == []


POISON, FATAL = 5, 6


def serve_faulty(model: str) -> None:
    """The command with an engine that fails at certain prompts, as a device might."""

    class FaultyEngine(engine_module.PolicyEngine):
        doomed = False

        def prefill(self, *, padded_tokens, **given):
            if padded_tokens[0] == POISON:
                raise RuntimeError("RESOURCE_EXHAUSTED: no memory for this prompt")
            self.doomed |= bool(padded_tokens[0] == FATAL)
            return super().prefill(padded_tokens=padded_tokens, **given)

        def generate(self, params, decode_state):
            if self.doomed:
                raise RuntimeError("the device is lost\nand more")
            return super().generate(params, decode_state)

    engine_module.PolicyEngine = FaultyEngine
    sys.argv[1:] = [f"--model={model}", "--port=0", "--temperature=0", "--num_slots=2"]
    main()


@pytest.mark.slow
def test_failures_are_answered(cache, tmp_path):
    """One prompt's is its own; a lost device ends all requests and the server, with a word."""
    save_parrot(tmp_path / "parrot")
    code = "import sys; sys.path.insert(0, 'tests'); import test_serve; test_serve.serve_faulty("
    server = Server([sys.executable, "-c", f"{code}{str(tmp_path / 'parrot')!r})"], cache)
    with contextlib.closing(server.channel):
        beside = forever(server, 1000)
        for _ in range(3):
            code, words = refusal(server.stub.Decode(request([POISON], 4)))
            assert code == Code.INTERNAL
            assert "could not read this prompt (RuntimeError: RESOURCE_EXHAUSTED" in words
        assert ids_of(server.stub.Decode(request("<", 50))) == saying()
        assert server.stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
        assert len(ids_of(beside)) == 999
        open_calls = [forever(server, 1000), server.stub.Decode(request([FATAL], 4))]
        for call in open_calls:
            code, words = refusal(call)
            assert code == Code.INTERNAL
            assert "the server failed, and ends (RuntimeError: the device is lost)" in words
        assert server.process.wait(60) == 1
    server.end()
    assert "the server cannot go on:" in "".join(server.errors)


# Mistakes in what is given.


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--model=nowhere"], r"--model is 'nowhere', and there is no such folder"),
        (["--workdir=nowhere"], r"--workdir=nowhere holds no run"),
        (["--port=70000"], r"--port=70000; it must lie between 0 and 65535"),
        (["--num_slots=0"], r"--num_slots=0; it must lie between 1"),
        (["--max_waiting=-1"], r"--max_waiting=-1; it must lie between 0"),
        (["--max_tokens=0"], r"--max_tokens=0; it must lie between 1"),
        (["--max_prompt_tokens=100"], r"powers of two: choose one of 16, 32, .*32768"),
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
        serve_command([*policy, *flags])


@pytest.mark.slow
def test_mistakes_that_need_the_model_end_with_status_2(cache):
    def refused(*flags: str) -> str:
        line = [sys.executable, "-m", "earl_jax.serve", f"--model={MODEL}", *flags]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr
        return done.stderr

    assert "need a context of 192 tokens" in refused("--max_prompt_tokens=64", "--max_tokens=128")
    assert "--max_prompt_tokens=128" in refused("--max_prompt_tokens=128")
    assert "--num_slots=3 does not divide" in refused("--mesh=data=2", "--num_slots=3")
    assert "--mesh=tensor=3 cannot hold" in refused("--mesh=tensor=3").replace("data=1,", "")
    assert (
        "one of the arguments"
        in subprocess.run(
            [sys.executable, "-m", "earl_jax.serve"], cwd=ROOT, capture_output=True, text=True
        ).stderr
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--port={port} cannot be used" in refused(f"--port={port}")
    assert "--host=nowhere.invalid" in refused("--host=nowhere.invalid")
