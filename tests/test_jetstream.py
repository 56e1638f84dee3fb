# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""JetStream's engine interface: under its own server, and by hand."""

import json
import tempfile

import grpc
import jax
import numpy as np
import pytest
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from earl_jax.engine.config import Sampling
from earl_jax.serving import _jetstream
from earl_jax.serving.jetstream_engine import NO_TOKEN, OVER, TOKEN, JetStreamEngine
from tests.support import run_python
from tests.support.continuations import (
    CONTEXT_TOKENS,
    continuations,
    pages_in_use,
    policy,
    prompt,
    served,
)
from tests.support.episodes import tokenizer
from tests.support.serving_here import until

NUM_SLOTS, GREEDY = 2, Sampling(temperature=0.0)
TEXT = "tic_tac_toe. you play x."
PADDED = 64


@pytest.fixture(scope="module")
def engine() -> JetStreamEngine:
    """Pages for one context alone, so that replies that nobody wants would be in the way."""
    given = served(num_slots=NUM_SLOTS, sampling=GREEDY, cache_tokens=CONTEXT_TOKENS)
    return JetStreamEngine(given, policy(given), tokenizer())


def expected(prompts: list[np.ndarray], counts: list[int]) -> list[list[int]]:
    """The policy's tokens behind each prompt up to a stop: a full forward pass for each."""
    rows = continuations(prompts, [0] * len(prompts), max(counts), GREEDY)
    ends = {tokenizer().eos_token_id, tokenizer().pad_token_id}
    found = []
    for row, count in zip(rows.tolist(), counts, strict=True):
        stop = next((i for i, token in enumerate(row) if token in ends), count)
        found.append(row[: min(stop, count)])
    return found


# Its own server.


def test_jetstreams_own_server_answers_with_the_tokens_of_the_policy(engine, monkeypatch, capfd):
    """Six prompts of ids, a text, and a prompt that cannot be played, on two slots."""
    jetstream = _jetstream.import_engine()
    config = jetstream.config_lib.ServerConfig(
        interleaved_slices=("cpu=1",), interleaved_engine_create_fns=(lambda devices: engine,)
    )
    asked = [(number, 5 + 4 * number, 20 - number) for number in (0, 3, 4, 6, 8, 9)]
    prompts = [prompt(number, length) for number, length, _ in asked]
    counts = [count for *_, count in asked]
    text_ids = np.array(tokenizer().encode(TEXT, add_special_tokens=False), np.int32)
    with tempfile.TemporaryDirectory() as folder:
        # Its server does not say which port it was given.
        monkeypatch.setattr(jetstream.server_lib, "_HOST", f"unix:{folder}/server")
        server = jetstream.server_lib.run(0, config, jax.devices()[:1], jax_padding=False)
        driver = server._driver
        try:
            with grpc.insecure_channel(
                f"unix:{folder}/server:0", [("grpc.default_authority", "localhost")]
            ) as channel:
                stub = jetstream_pb2_grpc.OrchestratorStub(channel)
                assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
                contents = [{"token_content": {"token_ids": ids.tolist()}} for ids in prompts]
                contents += [{"token_content": {"token_ids": [5, 320]}}]
                contents += [{"text_content": {"text": TEXT}}]
                calls = [
                    stub.Decode(jetstream_pb2.DecodeRequest(max_tokens=count, **content))
                    for content, count in zip(contents, [*counts, 4, 6], strict=True)
                ]
                samples = [[r.stream_content.samples[0] for r in call] for call in calls]
            # It holds one while it waits for a request.
            assert until(lambda: driver._generate_slots[0].qsize() >= NUM_SLOTS - 1)
        finally:
            server.stop()
            # JetStream leaves it open.
            server._loop.close()
    replies = [[token for each in found for token in each.token_ids] for found in samples]
    *want, of_text = expected([*prompts, text_ids], [*counts, 6])
    assert replies == [*want, [], of_text]
    # Some end by a stop, others by their limit.
    assert 1 <= sum(map(len, want)) < sum(counts) and len(want[0]) < counts[0]
    text = "".join(each.text for each in samples[-1])
    assert text == "".join(engine.build_tokenizer(None).decode([token]) for token in of_text)
    assert "a prompt of 2 ids is not played; it needs some, of 0 to 319" in capfd.readouterr().err
    assert not any(thread.is_alive() for thread in driver._all_threads)
    for slot in range(NUM_SLOTS):
        engine.free_resource(slot)
    assert engine._service.num_live == 0 and pages_in_use(engine) == 0


def test_a_slot_that_became_free_at_the_wrong_moment_does_not_end_the_process():
    """The orchestrator would kill this process."""
    begun = []

    def once():
        begun.append(1)
        if len(begun) == 1:
            raise AssertionError(
                "At this point we must have some requests inserted into the slots."
            )

    thread = _jetstream.import_engine().orchestrator.JetThread(target=once, name="generate-0")
    thread.start()
    thread.join()
    assert len(begun) == 2


# By hand.


def padded(ids: np.ndarray) -> np.ndarray:
    return np.pad(ids, (0, PADDED - len(ids)), constant_values=7)


class Hand:
    """Calls the engine as the orchestrator does, and reads these slots of each step."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self.engine, self.state = engine, engine.init_decode_state()
        self.params = engine.load_params()

    def insert(self, ids: np.ndarray, slot: int) -> None:
        prefix = self.engine.prefill(
            params=self.params, padded_tokens=padded(ids), true_length=len(ids)
        )
        self.state = self.engine.insert(prefix, self.state, slot=slot)

    def step(self, *slots: int) -> list:
        self.state, step = self.engine.generate(self.params, self.state)
        step.copy_to_host_async()
        step = step.convert_to_numpy()
        return [step.get_result_at_slot(slot) for slot in slots]


def test_slots_have_a_token_a_step_and_wait_while_their_prompt_is_read(engine):
    """A prompt of 41 tokens is read in three rounds of 16; the other slot goes on meanwhile."""
    prompts = [prompt(22, 41), prompt(12, 17)]
    hand = Hand(engine)
    hand.insert(prompts[1], 1)
    hand.insert(prompts[0], 0)
    found, waits = ([], []), 0
    while len(found[0]) < 8:
        for tokens, data in zip(found, hand.step(0, 1), strict=True):
            assert data.tokens.shape == data.valid.shape and data.tokens.shape[0] == 1
            tokens += data.tokens[0].tolist()
            assert data.lengths.tolist() == [len(tokens)] and (data.valid == TOKEN).all()
        waits += not found[0]
    assert waits > 2
    want = expected(prompts, [8, len(found[1])])
    assert [*found] == want


def test_a_slot_that_is_not_read_is_freed(engine):
    """As JetStream leaves replies at their limit, of which it does not tell the engine."""
    hand = Hand(engine)
    hand.insert(prompt(12, 17), 0)
    hand.insert(prompt(20, 21), 1)
    for _ in range(6):
        hand.step(0, 1)
    assert engine._service.num_live == 2
    for _ in range(3):
        hand.step(1)
    assert engine._service.num_live == 1 and engine._slots[0].ticket is None
    hand.insert(prompt(12, 17), 0)
    found = [hand.step(0, 1)[0].tokens[0].tolist() for _ in range(20)]
    [want] = expected([prompt(12, 17)], [20])
    tokens = [token for each in found for token in each]
    assert len(tokens) > 4 and tokens == want[: len(tokens)]


def test_a_reply_is_over_behind_the_context(engine):
    hand = Hand(engine)
    ids = prompt(9, PADDED)
    hand.insert(ids, 0)
    valid = []
    while OVER not in valid:
        valid += hand.step(0)[0].valid[0].tolist()
    [want] = expected([ids], [CONTEXT_TOKENS - PADDED])
    # An end of turn is a token too.
    assert len(valid) - 1 == min(len(want) + 1, CONTEXT_TOKENS - PADDED)
    assert engine._service.num_live == 0 and pages_in_use(engine) == 0


def test_prompts_are_the_ids_that_count(engine):
    """Without the beginning of text that JetStream puts before ids, and behind another prefix."""
    ids = np.array([NO_TOKEN, 5, 6, 0], np.int32)
    first = engine.prefill(params=None, padded_tokens=ids, true_length=3)
    assert first.tolist() == [5, 6]
    whole = engine.prefill(params=None, existing_prefix=first, padded_tokens=ids[1:], true_length=1)
    assert whole.tolist() == [5, 6, 5]
    encode = engine.build_tokenizer(engine.get_tokenizer()).encode
    tokens, length = encode(TEXT, is_bos=True, max_prefill_length=64, jax_padding=False)
    assert tokens[:length].tolist() == tokenizer().encode(TEXT, add_special_tokens=False)
    assert len(tokens) in (16, 32, 64) and (engine.max_prefill_length, PADDED) == (64, 64)


# Its imports.


def test_the_engine_interface_brings_no_tensorflow_and_leaves_logging_alone():
    """The stand-ins are gone behind the import, and what was there is back; serving needs none."""
    code = """
import json, logging, sys, types
sys.modules["tiktoken"] = mine = types.ModuleType("tiktoken")
root = logging.getLogger()
root.setLevel(logging.ERROR)
before = list(root.handlers)
from earl_jax.serving import _jetstream, grpc_service
messages_alone = "jetstream.engine" not in sys.modules
_jetstream.import_engine()
print(json.dumps([
    [n for n in sys.modules if n.split(".")[0] in ("tensorflow", "seqio", "tiktoken")],
    sys.modules["tiktoken"] is mine, root.level, root.handlers == before, messages_alone,
]))
"""
    done = run_python("-c", code)
    assert json.loads(done.stdout) == [["tiktoken"], True, 40, True, True]
