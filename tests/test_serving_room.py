# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""JetStream's calls where the KV cache holds less than all slots could fill."""

import dataclasses

import jax
import numpy as np
import pytest
from test_jetstream import continuations, load_params, make_engine, padded, prompt

from earl_jax.rollout.engine import PolicyEngine
from earl_jax.rollout.serving_room import StepTokens, step_tokens
from earl_jax.sharding.layout import MeshShape, make_layout

NUM_SLOTS, PLACES, PAGE_SIZE = 8, 96, 8


def tight_engine(mesh: MeshShape, contexts: int) -> PolicyEngine:
    """Every row shard has pages for so many whole contexts."""
    config = make_engine().config
    layout = make_layout(mesh)
    tokens = contexts * PLACES * layout.num_row_shards
    serving = dataclasses.replace(config.serving, places=PLACES, cache_tokens=tokens)
    return PolicyEngine(dataclasses.replace(config, serving=serving, page_size=PAGE_SIZE), layout)


def tokens_at(result, slot: int) -> list[int]:
    return result.convert_to_numpy().get_result_at_slot(slot).tokens[0].tolist()


@pytest.mark.parametrize("mesh", [MeshShape(data=2), MeshShape(data=2, tensor=2)], ids=str)
def test_requests_wait_for_pages_and_say_what_they_say_with_room_for_all(mesh):
    """Eight requests of 65 to 86 tokens in two lanes of 96: most wait, some in host memory."""
    engine = tight_engine(mesh, 1)
    params = load_params(engine)
    prompts = [prompt(number, 5 + 7 * number) for number in range(NUM_SLOTS)]
    wanted = [60 - 4 * number for number in range(NUM_SLOTS)]
    state, seeds = engine.init_decode_state(), []
    for slot, ids in enumerate(prompts):
        prefix = engine.prefill(params=params, padded_tokens=padded(ids), true_length=len(ids))
        seeds.append(int(prefix.seed[0]))
        state = engine.insert(prefix, state, slot)
    said, open_slots, waited = [[] for _ in prompts], set(range(NUM_SLOTS)), set()
    room, steps = engine._served, 0
    while open_slots:
        state, result = engine.generate(params, state)
        steps += 1
        # The longest of a lane goes on, so one of each that has any.
        lanes = {slot // 4 for slot in open_slots}
        assert {slot // 4 for slot in open_slots - room.asleep} == lanes
        for slot in sorted(open_slots):
            new = tokens_at(result, slot)
            assert len(new) == (slot not in room.asleep)
            waited |= set() if new else {slot}
            said[slot] += new
            if len(said[slot]) == wanted[slot]:
                engine.free_resource(slot)
                open_slots.discard(slot)
    assert steps <= sum(wanted) and len(waited) > 2
    assert room.host.moved_bytes > 0
    expected = continuations(prompts, seeds, max(wanted))
    for tokens, row, number in zip(said, expected, wanted, strict=True):
        assert tokens == row[:number].tolist()
    # Nothing is left of them.
    assert (room.host.held_bytes, room.host.slots, room.asleep) == (0, [], frozenset())
    assert [room.pages.num_free(lane) for lane in (0, 1)] == [PLACES // PAGE_SIZE] * 2


def test_a_request_that_goes_while_it_waits_gives_back_what_it_had():
    engine = tight_engine(MeshShape(data=1), 1)
    params, state = load_params(engine), engine.init_decode_state()
    for slot, length in enumerate((40, 30, 60)):
        ids = prompt(slot, length)
        prefix = engine.prefill(params=params, padded_tokens=padded(ids), true_length=length)
        state = engine.insert(prefix, state, slot)
    room = engine._served
    state, _ = engine.generate(params, state)
    assert room.asleep == {0, 1}, "beside 60 there are pages for no other and 32 tokens more"
    engine.free_resource(0)
    state, result = engine.generate(params, state)
    assert room.asleep == {1} and tokens_at(result, 1) == []
    engine.free_resource(2)
    state, result = engine.generate(params, state)
    assert room.asleep == frozenset() and len(tokens_at(result, 1)) == 1
    # Another in its slot before it was told that the first is over.
    ids = prompt(9, 12)
    prefix = engine.prefill(params=params, padded_tokens=padded(ids), true_length=12)
    state = engine.insert(prefix, state, 1)
    state, result = engine.generate(params, state)
    [said] = continuations([ids], [int(prefix.seed[0])], 1).tolist()
    assert tokens_at(result, 1) == said
    engine.free_resource(1)
    engine.free_resource(5)
    assert room.pages.num_free(0) == PLACES // PAGE_SIZE


def test_a_step_without_a_token_ends_only_a_request_whose_client_has_gone():
    """As JetStream reads it: a request is over with more tokens than it may have."""
    result = step_tokens(jax.numpy.asarray([[7, 1, 3], [8, 1, 9]]), frozenset({1}))
    result.copy_to_host_async()
    result = result.convert_to_numpy()
    assert isinstance(result, StepTokens) and isinstance(result.data, np.ndarray)
    one, other = (result.get_result_at_slot(slot) for slot in (0, 1))
    assert (one.tokens.tolist(), one.valid.tolist(), one.lengths.tolist()) == ([[7]], [[1]], [3])
    assert other.tokens.shape == other.valid.shape == (1, 0)
    assert 0 < other.lengths[0] <= 1


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 4 * 12), (1, 12), (2 * 12 * 8, 12), (2 * 20 * 8, 20), (10**9, 4 * 12)]
)
def test_the_pool_holds_a_context_a_lane_and_no_more_than_all_slots(tokens, pages):
    engine = tight_engine(MeshShape(data=2), 1)
    config = engine.config
    serving = dataclasses.replace(config.serving, cache_tokens=tokens)
    engine = PolicyEngine(dataclasses.replace(config, serving=serving), engine.layout)
    assert engine.serving_pool == (2, pages)
