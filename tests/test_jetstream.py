# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The engine is a JetStream engine: behind its gate, by its interface, under its own Driver."""

import importlib.metadata
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from earl_jax.engine.config import Sampling
from earl_jax.serving import _jetstream
from earl_jax.serving import jetstream_engine as engine_module
from earl_jax.serving.jetstream_engine import MAX_SEED
from tests.support.caches import rows_of
from tests.support.continuations import (
    CONTEXT_TOKENS,
    MAX_PREFILL,
    NUM_SLOTS,
    continuations,
    load_params,
    make_engine,
    padded,
    prompt,
)
from tests.support.episodes import tokenizer

TESTS = Path(__file__).parent


def run_python(code: str, timeout_s: float = 200) -> dict:
    """Returns the JSON that code prints last, run in a process that a Driver may kill."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def params(engine):
    return load_params(engine)


# The gate.


def test_the_gate_lets_in_no_tensorflow_and_leaves_logging_alone():
    """Its stand-ins are gone after the import, and what was really there is back."""
    found = run_python(
        """
import json, logging, sys, types
sys.modules["tiktoken"] = mine = types.ModuleType("tiktoken")
root = logging.getLogger()
root.setLevel(logging.ERROR)
before = list(root.handlers)
from earl_jax.serving import _jetstream
from earl_jax.engine import engine
print(json.dumps({
    "modules": [n for n in sys.modules if n.split(".")[0] in ("tensorflow", "seqio", "tiktoken")],
    "mine": sys.modules["tiktoken"] is mine,
    "level": root.level,
    "handlers": root.handlers == before,
    "gate": "jetstream.core.orchestrator" in sys.modules,
}))
"""
    )
    assert found == {
        "modules": ["tiktoken"],
        "mine": True,
        "level": 40,
        "handlers": True,
        "gate": True,
    }


def test_the_gate_refuses_another_version_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3.0")
    with pytest.raises(ImportError, match=r"google-jetstream 0\.3\.0 .* 0\.2\.2; run `uv sync`"):
        _jetstream._import_jetstream()

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ImportError, match=r"google-jetstream 0\.2\.2 is not installed"):
        _jetstream._import_jetstream()


# The interface.


def test_the_engine_implements_the_whole_interface(engine):
    api = sys.modules["jetstream.engine.engine_api"]
    assert isinstance(engine, api.Engine)
    assert not getattr(type(engine), "__abstractmethods__", ())
    abstract = api.Engine.__abstractmethods__
    assert {"prefill", "insert", "generate", "load_params", "init_decode_state"} <= abstract
    assert engine.max_concurrent_decodes == NUM_SLOTS
    assert engine.max_prefill_length == MAX_PREFILL
    assert engine.samples_per_slot == 1
    assert engine.mesh is engine.engine.layout.mesh
    assert engine.colocated_cpus is None
    served = engine.build_tokenizer(engine.get_tokenizer())
    assert served.stop_tokens == {tokenizer().eos_token_id, tokenizer().pad_token_id}


def test_prefill_insert_generate_give_the_tokens_of_the_policy(engine, params):
    """The first token is the one behind the prompt; slots, and their order, are free."""
    prompts = [prompt(i, length) for i, length in enumerate([1, 5, 16, 33, 40, 64])]
    slots = [3, 0, 7, 6, 1, 4]
    state, seeds = engine.init_decode_state(), []
    for ids, slot in zip(prompts, slots, strict=True):
        prefix = engine.prefill(params=params, padded_tokens=padded(ids), true_length=len(ids))
        seeds.append(int(prefix.seed[0]))
        state = engine.insert(prefix, state, slot)
    assert len(set(seeds)) == len(prompts)
    sampled = []
    for step in range(1, 9):
        state, result = engine.generate(params, state)
        result.copy_to_host_async()
        result = result.convert_to_numpy()
        data = [result.get_result_at_slot(slot) for slot in slots]
        assert all(slot.valid.tolist() == [[1]] for slot in data)
        # JetStream's length counts what was generated, not the prompt.
        assert all(slot.lengths.tolist() == [step] for slot in data)
        sampled.append([slot.tokens.item() for slot in data])
    np.testing.assert_array_equal(np.array(sampled).T, continuations(prompts, seeds, 8))


def test_prefill_behind_a_prefix_is_prefill_of_the_whole(engine, params):
    first, second = prompt(20, 11), prompt(21, 6)
    whole = np.concatenate([first, second])
    one = engine.prefill(params=params, padded_tokens=padded(whole), true_length=17)
    prefix = engine.prefill(params=params, padded_tokens=padded(first), true_length=11)
    two = engine.prefill(
        params=params, existing_prefix=prefix, padded_tokens=padded(second), true_length=6
    )
    assert two.cached.tolist() == one.cached.tolist() == [17]
    for ours, theirs in zip(rows_of(two.cache), rows_of(one.cache), strict=True):
        for side in ("key", "value"):
            np.testing.assert_allclose(ours[side], theirs[side], atol=1e-5)
            assert ours[side][:, :, :17].any() and not ours[side][:, :, 17:].any()
    expected = continuations([whole, whole], [int(one.seed[0]), int(prefix.seed[0])], 1)
    assert [one.pending.item(), two.pending.item()] == expected[:, 0].tolist()


def test_a_long_prompt_is_read_in_pieces(engine, params, monkeypatch):
    """Three of sixteen tokens, and nothing of the padding behind."""
    ids = prompt(22, 41)
    one = engine.prefill(params=params, padded_tokens=padded(ids), true_length=41, seed=1)
    monkeypatch.setattr(engine_module, "PROMPT_CHUNK", 16)
    two = engine.prefill(params=params, padded_tokens=padded(ids), true_length=41, seed=1)
    assert two.cached.tolist() == one.cached.tolist() == [41]
    assert two.pending.tolist() == one.pending.tolist()
    for ours, theirs in zip(rows_of(two.cache), rows_of(one.cache), strict=True):
        for side in ("key", "value"):
            np.testing.assert_allclose(ours[side], theirs[side], atol=1e-5)


def test_steps_are_made_while_a_long_prompt_is_compiled_for(engine, params, monkeypatch):
    """Nobody holds up the dispatch of others meanwhile; once, not for each piece."""
    prefill, compiled = engine._prefill, []

    class Compiling:
        def lower(self, *given):
            step = threading.Thread(target=engine.generate, args=(params, state))
            step.start()
            step.join(60)
            compiled.append(not step.is_alive())
            return prefill.lower(*given)

    state = engine.init_decode_state()
    monkeypatch.setattr(engine_module, "PROMPT_CHUNK", 16)
    monkeypatch.setattr(engine, "_readers", {})
    monkeypatch.setattr(engine, "_prefill", Compiling())
    ids = prompt(23, 41)
    prefix = engine.prefill(params=params, padded_tokens=padded(ids), true_length=41, seed=1)
    assert compiled == [True] and prefix.cached.tolist() == [41]


def test_one_prefix_may_fill_many_slots(engine, params):
    """A group wants the same prompt: `insert` takes nothing away from the prefix."""
    ids = prompt(30, 9)
    prefix = engine.prefill(params=params, padded_tokens=padded(ids), true_length=9)
    state = engine.init_decode_state()
    for slot in (2, 5):
        state = engine.insert(prefix, state, slot)
    for _ in range(3):
        state, result = engine.generate(params, state)
        tokens = [result.get_result_at_slot(slot).tokens.item() for slot in (2, 5)]
        assert tokens[0] == tokens[1]
    assert prefix.cached.tolist() == [9]


def test_a_prefix_of_another_device_is_put_where_the_engine_says(engine, params):
    ids = prompt(31, 9)
    prefix = engine.prefill(params=params, padded_tokens=padded(ids), true_length=9)
    elsewhere = jax.device_put(prefix, jax.devices()[-1])
    back = jax.device_put(elsewhere, engine.get_prefix_destination_sharding())
    state = engine.insert(back, engine.insert(prefix, engine.init_decode_state(), 1), 6)
    sampled = []
    for _ in range(3):
        state, result = engine.generate(params, state)
        sampled.append([result.get_result_at_slot(slot).tokens.item() for slot in (1, 6)])
    expected = continuations([ids], [int(prefix.seed[0])], 3)[0]
    assert sampled == [[token, token] for token in expected.tolist()]


@pytest.mark.slow
def test_a_prompt_is_drawn_by_its_own_sampling_and_seed_whoever_is_beside_it(engine, params):
    """Each twice, in another slot and order, and among others that say nothing of either."""
    ids, length, steps = prompt(60, 9), 9, 10
    asked = [
        (Sampling(temperature=0.7), 5),
        (Sampling(temperature=0.7), MAX_SEED),
        (Sampling(temperature=3.0, top_k=4), 5),
        (Sampling(temperature=2.0, top_p=0.8, min_p=0.02), 0),
        (Sampling(temperature=0.0), None),
        (None, 5),
    ]

    def play(order: list[int]) -> dict[int, tuple[int, list[int]]]:
        state, sampled = engine.init_decode_state(), {}
        engine.prefill(params=params, padded_tokens=padded(ids), true_length=length)
        for slot, number in enumerate(order):
            sampling, seed = asked[number]
            prefix = engine.prefill(
                params=params,
                padded_tokens=padded(ids),
                true_length=length,
                sampling=sampling,
                seed=seed,
            )
            state = engine.insert(prefix, state, slot)
            sampled[number] = (slot, int(prefix.seed[0]), [])
        for _ in range(steps):
            state, result = engine.generate(params, state)
            for slot, _, tokens in sampled.values():
                tokens.append(result.get_result_at_slot(slot).tokens.item())
        return {number: (seed, tokens) for number, (_, seed, tokens) in sampled.items()}

    first, second = play([0, 1, 2, 3, 4, 5]), play([5, 3, 4, 0, 2, 1])
    seeded = [number for number, (_, seed) in enumerate(asked) if seed is not None]
    assert len({first[number][0] for number in seeded}) == 3
    for number, (sampling, _) in enumerate(asked):
        seed, tokens = first[number]
        assert second[number][1] == tokens
        expected = continuations([ids], [seed], steps, sampling)
        assert tokens == expected[0].tolist(), number
    assert len({tuple(tokens) for _, tokens in first.values()}) == len(asked)


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1])
def test_seeds_out_of_range_are_refused(engine, params, seed):
    with pytest.raises(ValueError, match=f"seed is {seed}; it must lie between 0 and 1073741823"):
        engine.prefill(params=params, padded_tokens=padded(prompt(1, 3)), true_length=3, seed=seed)


def test_tokens_beyond_the_context_are_not_valid(engine, params):
    ids = prompt(40, 64)
    state = engine.init_decode_state()
    prefix = engine.prefill(params=params, padded_tokens=ids, true_length=64)
    state, valid = engine.insert(prefix, state, 0), []
    for _ in range(CONTEXT_TOKENS - 64 + 4):
        state, result = engine.generate(params, state)
        valid.append(result.get_result_at_slot(0).valid.item())
    # 64 tokens are left, and one more token is sampled from the full cache.
    assert valid == [1] * 65 + [0] * 3


@pytest.mark.parametrize(
    ("length", "context_tokens"), [(0, 16), (65, 128), (65, 64), (17, 16), (5, 128)]
)
def test_prompts_of_impossible_length_are_refused(engine, params, length, context_tokens):
    with pytest.raises(ValueError, match=f"prompt of {length} tokens padded to .* 1 to 64"):
        engine.prefill(
            params=params, padded_tokens=np.ones(context_tokens, np.int32), true_length=length
        )


def test_a_prefix_and_its_continuation_must_fit_together(engine, params):
    prefix = engine.prefill(params=params, padded_tokens=prompt(50, 64), true_length=60)
    with pytest.raises(ValueError, match="prompt of 5 tokens.* behind 60.* 1 to 64"):
        engine.prefill(
            params=params, existing_prefix=prefix, padded_tokens=prompt(51, 16), true_length=5
        )


def test_text_is_encoded_as_jetstream_asks(engine):
    """With the keywords of its Driver; no beginning-of-text token whatever it asks for."""
    served = engine.build_tokenizer(engine.get_tokenizer())
    text = "tic_tac_toe. you play x."
    ids = tokenizer().encode(text, add_special_tokens=False)
    for is_bos in (True, False):
        context_tokens, length = served.encode(
            text, is_bos=is_bos, max_prefill_length=MAX_PREFILL, jax_padding=False
        )
        assert length == len(ids) and len(context_tokens) == 16
        assert context_tokens[:length].tolist() == ids
        assert (context_tokens[length:] == tokenizer().pad_token_id).all()
    assert served.decode(ids) == text


# The Driver.


class Channel:
    """JetStream asks two things of a return channel."""

    def __init__(self):
        self._results = queue.SimpleQueue()

    def add_result(self, samples):
        self._results.put(samples)

    def close(self):
        self._results.put(None)

    def until_closed(self, timeout_s: float = 150) -> list:
        return [sample for [sample] in iter(lambda: self._results.get(timeout=timeout_s), None)]

    def so_far(self) -> list:
        return [self._results.get()[0] for _ in range(self._results.qsize())]


# Lengths of the prompts and limits of the requests, in the order of submission. The first is still
# in flight when the Driver is stopped: 0.2.2 asserts that some slot is busy at a moment when
# another thread may just have freed the last one.
REQUESTS = [(3, 9999), (1, 12), (16, 1), (40, 12), (64, 2), (33, 12)] + [(9, 24)] * 8
TEXT = "tic_tac_toe. you play x."


def drive() -> None:
    """Serves REQUESTS and a text, and prints what came of them. Run in a process of its own."""
    engine = make_engine()
    params = load_params(engine)
    orchestrator = _jetstream.orchestrator
    driver = orchestrator.Driver(
        prefill_engines=[engine],
        generate_engines=[engine],
        prefill_params=[params],
        generate_params=[params],
        interleaved_mode=True,
    )
    channels = []

    def submit(content, max_tokens: int, *, as_ids: bool) -> None:
        channels.append(Channel())
        driver.place_request_on_prefill_queue(
            orchestrator.ActiveRequest(
                max_tokens=max_tokens,
                return_channel=channels[-1],
                prefill_content=content,
                history_path="x" if as_ids else None,
                is_client_side_tokenization=as_ids,
            )
        )

    for number, (length, max_tokens) in enumerate(REQUESTS):
        submit(prompt(number, length), max_tokens, as_ids=True)
    submit(TEXT, 6, as_ids=False)
    results = [channel.until_closed() for channel in channels[1:]]
    driver.stop()
    first = channels[0].so_far()
    alive = [t.name for t in driver._all_threads if t.is_alive()]
    ids = [[i for s in samples for i in s.token_ids] for samples in [first, *results]]
    text = "".join(piece for s in results[-1] for piece in s.text)
    print("\n" + json.dumps({"ids": ids, "text": text, "alive": alive}))


@pytest.mark.slow
def test_jetstreams_own_driver_serves_many_requests_at_once():
    """Fifteen requests on eight slots, tokens as a full forward pass per token samples them."""
    found = run_python("import conftest, test_jetstream; test_jetstream.drive()")
    prompts = [prompt(number, length) for number, (length, _) in enumerate(REQUESTS)]
    prompts.append(np.array(tokenizer().encode(TEXT, add_special_tokens=False), np.int32))
    # The engine counts its prefills, and there is one prefill thread: request i has seed i + 1.
    sampled = continuations(prompts, list(range(1, len(prompts) + 1)), 40)
    stops = {tokenizer().eos_token_id, tokenizer().pad_token_id}
    limits = [limit for _, limit in REQUESTS] + [6]
    expected = []
    for row, limit in zip(sampled.tolist(), limits, strict=True):
        end = next((i for i, token in enumerate(row) if token in stops), len(row))
        expected.append(row[: min(end, limit)])
    assert found["ids"][1:] == expected[1:]
    unfinished = found["ids"][0][: sampled.shape[1]]
    assert len(unfinished) > 12 and unfinished == expected[0][: len(unfinished)]
    # Token by token: JetStream's own text. An id that is no token counts too.
    assert found["text"] == "".join(tokenizer().decode([i]) or "\ufffd" for i in expected[-1])
    assert found["alive"] == []
    # Some were stopped by the end of turn, some by their limit.
    lengths = [len(ids) for ids in expected]
    assert 2 <= sum(a < b for a, b in zip(lengths[1:], limits[1:], strict=True)) <= 12
