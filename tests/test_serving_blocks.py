# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""JetStream's calls where the KV cache holds less than all slots could fill."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from earl_jax.engine.config import Sampling
from earl_jax.engine.engine import Engine
from earl_jax.serving._jetstream import token_utils
from earl_jax.serving.jetstream_engine import JetStreamEngine
from earl_jax.serving.step_tokens import Failure, ScoredToken, StepTokens, step_tokens
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.continuations import (
    continuations,
    load_params,
    make_engine,
    padded,
    prompt,
    scored_continuations,
)
from tests.support.episodes import MODEL
from tests.support.hlo import COLLECTIVE

NUM_SLOTS, MAX_TOKENS, PAGE_SIZE = 8, 96, 8


@functools.cache
def tight_engine(mesh: MeshShape, contexts: int, *, draft: int = 0, **serving) -> JetStreamEngine:
    """Every row shard has pages for so many whole contexts. With a `draft`, tokens are guessed."""
    made = make_engine()
    config, layout = made.engine.config, make_layout(mesh)
    serving = {"cache_tokens": contexts * MAX_TOKENS * layout.num_row_shards, **serving}
    config = dataclasses.replace(
        config,
        page_size=PAGE_SIZE,
        rules=config.rules._replace(ngram=1, draft=draft),
    )
    serving = dataclasses.replace(made.serving, context_tokens=MAX_TOKENS, **serving)
    return JetStreamEngine(Engine(config, layout), serving)


def tokens_at(result, slot: int) -> list[int]:
    return result.convert_to_numpy().get_result_at_slot(slot).tokens[0].tolist()


# Cold, where a random model repeats itself, so that guesses are right now and then.
COLD = Sampling(temperature=0.3, top_k=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "draft"), [(MeshShape(data=2), 0), (MeshShape(data=2, tensor=2), 3)], ids=str
)
def test_requests_that_wait_for_pages_get_the_same_tokens(mesh, draft):
    """Eight requests of 65 to 86 tokens in two data shards of 96: most wait, some in host memory.

    Every other one has log-probs.
    """
    engine = tight_engine(mesh, 1, draft=draft)
    params = load_params(engine)
    prompts = [prompt(number, 5 + 7 * number) for number in range(NUM_SLOTS)]
    wanted = [60 - 4 * number for number in range(NUM_SLOTS)]
    state, seeds = engine.init_decode_state(), []
    for slot, ids in enumerate(prompts):
        prefix = engine.prefill(
            params=params,
            padded_tokens=padded(ids),
            true_length=len(ids),
            sampling=COLD,
            logprobs=slot % 2 == 1,
            max_tokens=wanted[slot],
        )
        seeds.append(int(prefix.seed[0]))
        state = engine.insert(prefix, state, slot)
    sampled, open_slots, waited = [[] for _ in prompts], set(range(NUM_SLOTS)), set()
    served, steps, most = engine._served, 0, 0
    while open_slots:
        state, result = engine.generate(params, state)
        steps += 1
        # The longest of a data shard goes on, so one of each that has any.
        data_shards = {slot // 4 for slot in open_slots}
        assert {slot // 4 for slot in open_slots - served.asleep} == data_shards
        for slot in sorted(open_slots):
            new = tokens_at(result, slot)
            assert bool(new) == (slot not in served.asleep) and len(new) <= 1 + draft
            most = max(most, len(new))
            waited |= set() if new else {slot}
            sampled[slot] += new
            if len(sampled[slot]) == wanted[slot]:
                engine.free_resource(slot)
                open_slots.discard(slot)
    assert steps <= sum(wanted) and len(waited) > 2
    assert served.host.moved_bytes > 0 and (most > 1) == (draft > 0)
    expected, *scores = scored_continuations(prompts, seeds, max(wanted), COLD)
    for slot, number in enumerate(wanted):
        assert sampled[slot] == expected[slot, :number].tolist()
        asked = [token for token in sampled[slot] if isinstance(token, ScoredToken)]
        assert len(asked) == (number if slot % 2 else 0)
        for name, column in zip(("logprob", "model_logprob"), scores, strict=True):
            found = [getattr(token, name) for token in asked]
            np.testing.assert_allclose(found, column[slot, : len(asked)], atol=2e-4)
    # Nothing is left of them.
    assert (served.host.held_bytes, served.host.slots, served.asleep) == (0, [], frozenset())
    assert [served.pages.num_free(data_shard) for data_shard in (0, 1)] == [
        MAX_TOKENS // PAGE_SIZE
    ] * 2


@pytest.mark.parametrize("draft", [0, 3])
def test_a_step_has_the_collectives_of_one_pass(draft):
    """As `test_engine` counts them for rounds: none for sampling, log-probs or guesses."""
    engine = tight_engine(MeshShape(data=2, tensor=2), 1, draft=draft)
    moving = engine.engine.place_rows(np.ones(NUM_SLOTS, np.int32))
    given = (load_params(engine), engine.init_decode_state(), moving, engine.engine.key_data)
    text = engine._generate.lower(*given).compile().as_text()
    lines = [line for line in text.splitlines() if COLLECTIVE.search(line)]
    reduces = sum(" all-reduce" in line for line in lines)
    gathers = sum(" all-gather" in line for line in lines)
    assert (reduces, gathers) == (1 + 2 * MODEL.num_layers, 1)
    assert len(lines) == reduces + gathers


class _Scarce(Engine):
    """An engine on devices whose memory others have, now and then."""

    scarce = True

    def repack(self, *given):
        if self.scarce:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")
        return super().repack(*given)


@pytest.mark.slow
def test_max_tokens_grow_with_the_longest_request_or_only_that_one_fails():
    """From 48 tokens to 96, where one of two comes to more than 48."""
    roomy = tight_engine(MeshShape(data=1), 1, first_context_tokens=48, cache_tokens=1)
    layout = make_layout(MeshShape(data=1), jax.devices()[:1])
    engine = JetStreamEngine(_Scarce(roomy.engine.config, layout), roomy.serving)
    params, state = load_params(engine), engine.init_decode_state()
    served, seeds, short = engine._served, [], prompt(1, 5)
    assert (served.max_tokens, served.pages.pool.pages) == (48, 6)

    def insert(state, slot, ids):
        prefix = engine.prefill(params=params, padded_tokens=padded(ids), true_length=len(ids))
        seeds.append(int(prefix.seed[0]))
        return engine.insert(prefix, state, slot)

    state = insert(state, 0, prompt(0, 45))
    state = insert(state, 1, short)
    sampled: list[list[int]] = [[], []]
    for _ in range(3):
        state, result = engine.generate(params, state)
        sampled[0] += tokens_at(result, 0)
    state, result = engine.generate(params, state)
    failed = result.convert_to_numpy().get_result_at_slot(0)
    assert failed.valid.tolist() == [[1, 0]] and isinstance(failed.tokens[0, 0], Failure)
    assert re.search(
        r"come to 48 tokens, and .* holds 48 tokens, and did not grow \(RESOURCE_EXHAUSTED: out of "
        r"memory\)$",
        failed.tokens[0, 0].words,
    )
    engine.free_resource(0)
    # The other goes on, and in time there is memory.
    _Scarce.scarce = False
    state = insert(state, 0, prompt(2, 50))
    sampled.append([])
    for _ in range(8):
        state, result = engine.generate(params, state)
        sampled[1] += tokens_at(result, 1)
        sampled[2] += tokens_at(result, 0)
    assert (served.max_tokens, served.pages.pool.pages) == (96, 12)
    assert [len(tokens) for tokens in sampled] == [3, 7, 8]
    wanted = continuations([prompt(0, 45), short, prompt(2, 50)], seeds, 8).tolist()
    assert sampled == [row[: len(tokens)] for row, tokens in zip(wanted, sampled, strict=True)]


@pytest.mark.slow
def test_the_memory_of_a_long_request_returns_with_the_next_one():
    """From 48 tokens to 96 and back, where the first request comes to 53 and the next to 45."""
    engine = tight_engine(MeshShape(data=1), 1, first_context_tokens=48, cache_tokens=1)
    params, state, seeds = load_params(engine), engine.init_decode_state(), []
    served, sampled = engine._served, []
    for number, length, pages in ((0, 45, 12), (1, 37, 6)):
        ids = prompt(number, length)
        prefix = engine.prefill(params=params, padded_tokens=padded(ids), true_length=length)
        seeds.append(int(prefix.seed[0]))
        state = engine.insert(prefix, state, number)
        tokens: list[int] = []
        for _ in range(8):
            state, result = engine.generate(params, state)
            tokens += tokens_at(result, number)
        sampled.append(tokens)
        assert served.pages.pool.pages == pages
        layer = jax.tree.leaves(state.cache.layers)[0]
        assert layer.shape[0] == pages
        engine.free_resource(number)
    wanted = continuations([prompt(0, 45), prompt(1, 37)], seeds, 8).tolist()
    assert sampled == wanted


@pytest.mark.slow
def test_a_request_that_goes_while_it_waits_gives_back_what_it_had():
    engine = tight_engine(MeshShape(data=1), 1)
    params, state = load_params(engine), engine.init_decode_state()
    for slot, length in enumerate((40, 30, 60)):
        ids = prompt(slot, length)
        prefix = engine.prefill(params=params, padded_tokens=padded(ids), true_length=length)
        state = engine.insert(prefix, state, slot)
    served = engine._served
    state, _ = engine.generate(params, state)
    assert served.asleep == {0, 1}, "beside 60 there are pages for no other and 32 tokens more"
    engine.free_resource(0)
    state, result = engine.generate(params, state)
    assert served.asleep == {1} and tokens_at(result, 1) == []
    engine.free_resource(2)
    state, result = engine.generate(params, state)
    assert served.asleep == frozenset() and len(tokens_at(result, 1)) == 1
    # Another in its slot before it was told that the first is over.
    ids = prompt(9, 12)
    prefix = engine.prefill(params=params, padded_tokens=padded(ids), true_length=12)
    state = engine.insert(prefix, state, 1)
    state, result = engine.generate(params, state)
    [sampled] = continuations([ids], [int(prefix.seed[0])], 1).tolist()
    assert tokens_at(result, 1) == sampled
    engine.free_resource(1)
    engine.free_resource(5)
    assert served.pages.num_free(0) == MAX_TOKENS // PAGE_SIZE


def test_a_step_without_a_token_ends_only_a_request_whose_client_has_gone():
    """As JetStream reads it: a request is over with more tokens than it may have."""
    rows = [[7, 1, 3, 0, 0, 0], [8, 1, 9, 0, 0, 0]]
    result = step_tokens(jax.numpy.asarray(rows), frozenset({1}))
    result.copy_to_host_async()
    result = result.convert_to_numpy()
    assert isinstance(result, StepTokens) and isinstance(result.data, np.ndarray)
    one, other = (result.get_result_at_slot(slot) for slot in (0, 1))
    assert (one.tokens.tolist(), one.valid.tolist(), one.lengths.tolist()) == ([[7]], [[1]], [3])
    assert other.tokens.shape == other.valid.shape == (1, 0)
    assert 0 < other.lengths[0] <= 1


def test_jetstream_reads_as_many_tokens_as_a_step_has_of_a_slot():
    """At most three: two, the second of which ends a turn; one; and none at the end of the context.

    The first are scored: by -0.5 and -0.25, and by -2 and -1 under the model. The last has failed.
    """
    bits = np.array([-0.5, -0.25, 0, -2, -1, 0], np.float32).view(np.int32)
    data = np.zeros((4, 14), np.int32)
    data[0] = [7, 2, 9, 1, 1, 0, 4, 1, *bits]
    data[1, :8] = [8, 9, 9, 1, 0, 0, 4, 0]
    data[2, :8] = [5, 6, 6, 0, 0, 0, 4, 0]

    class Stops:
        stop_tokens = frozenset({2})

    result = step_tokens(data, frozenset({3}), {3: "no memory"}).convert_to_numpy()
    assert result.num_tokens()[:2].tolist() == [2, 1]
    found = []
    for slot in range(4):
        [sample], complete = token_utils.process_result_tokens(
            Stops(), slot, 9, result, np.zeros(1, bool), is_client_side_tokenization=True
        )
        found.append((sample.token_ids, bool(complete[0])))
    assert found == [([7], True), ([8], False), ([], True), ([-1], True)]
    [scored], [failure] = found[0][0], found[3][0]
    assert isinstance(failure, Failure) and failure.words == "no memory"
    assert (scored.logprob, scored.model_logprob) == (-0.5, -2.0)


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 4 * 12), (1, 12), (2 * 12 * 8, 12), (2 * 20 * 8, 20), (10**9, 4 * 12)]
)
def test_pool_holds_a_context_per_data_shard_and_at_most_those_of_all_slots(tokens, pages):
    engine = tight_engine(MeshShape(data=2), 1)
    serving = dataclasses.replace(engine.serving, cache_tokens=tokens)
    assert JetStreamEngine(engine.engine, serving).first_pool == (2, pages)
