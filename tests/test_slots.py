# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One round of the engine on one device: what is sampled, written down, appended and left alone.

`converse` is the smallest host that can drive it: scripted environments, no RolloutService.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.engine import decode_state, slots
from earl_jax.engine.appending import num_tiles, tiles_at
from earl_jax.engine.config import Sampling, append_tokens_for, tile_width_for
from earl_jax.engine.decoding import Decoder
from earl_jax.engine.pages import NO_PAGE
from earl_jax.engine.round_inputs import RoundInputs, pack_inputs, unpack_outputs
from earl_jax.engine.rows import NO_ROW
from earl_jax.engine.sampling import sample, sampling_rows, token_uniforms
from earl_jax.models.decoder import forward_chunk
from earl_jax.models.presets import PRESETS
from tests.support.caches import empty_cache, rows_of
from tests.support.slots import (
    CHUNK,
    END,
    MAX_TOKENS,
    MAX_TURN_TOKENS,
    MODEL,
    NUM_SLOTS,
    PAGE_SIZE,
    RULES,
    VOCAB,
    Script,
    _score,
    assert_same,
    check_logprobs,
    check_rows,
    converse,
    empty,
    full_forward,
    jitted_round,
    make_scripts,
    params,
    play_on_one_device,
)

# Bursts shorter than a turn, longer than any, and turns that another id ends.
SHORT = RULES._replace(burst=1, tile_width=2)
LONG = RULES._replace(burst=8, tile_width=3)
OTHER_END = 7
SCORED = RULES._replace(model_logprobs=True, end_of_turn_ids=(END, OTHER_END))


def empty_scored():
    return decode_state.empty_state(
        MODEL, NUM_SLOTS, NUM_SLOTS, MAX_TOKENS, page_size=PAGE_SIZE, model_logprobs=True
    )


@pytest.fixture(scope="module")
def played():
    """Eight episodes of three turns."""
    scripts = make_scripts(NUM_SLOTS)
    state, transcripts = converse(play_on_one_device(), empty(), scripts)
    return scripts, state, transcripts


def test_tokens_are_what_sampling_from_the_full_forward_gives(played):
    """Cached decode against no cache at all: place by place, from the trainer's logits."""
    scripts, _, transcripts = played
    logits_BTV = full_forward([t.ids for t in transcripts.values()])
    positions = np.arange(MAX_TOKENS - 1)

    @jax.jit
    def sample_everywhere(logits_TV, seed):
        seeds = jnp.full(len(positions), seed)
        uniforms = token_uniforms(jax.random.key(7), seeds, jnp.asarray(positions + 1))
        return sample(uniforms, logits_TV[:-1], sampling_rows(Sampling(), len(positions)))[0]

    for row, (slot, t) in enumerate(transcripts.items()):
        tokens = np.asarray(sample_everywhere(logits_BTV[row], scripts[slot].seed))
        policy = np.flatnonzero(t.turn_ids)
        assert tokens[policy - 1].tolist() == [t.ids[place] for place in policy]


def test_logprobs_under_the_model_are_those_of_the_untempered_full_forward():
    """Beside those at the sampling temperature, which stay what they were."""
    scripts = make_scripts(NUM_SLOTS)
    temperature = {slot: (0.0, 0.5, 1.0, 2.0)[slot % 4] for slot in scripts}
    play = play_on_one_device(SCORED)
    state, transcripts = converse(play, empty_scored(), scripts, temperature=temperature)
    check_logprobs(transcripts, temperature)
    check_rows(state.experience, transcripts, scripts)
    written = np.asarray(state.experience.model_logprobs)
    for slot, t in transcripts.items():
        length = len(t.ids)
        t.logprobs = written[scripts[slot].row, :length].tolist()
        assert not written[scripts[slot].row, length:].any()
    check_logprobs(transcripts)


def test_the_cache_after_many_turns_is_that_of_one_prefill(played):
    _, state, transcripts = played
    lengths = np.array([len(t.ids) - 1 for t in transcripts.values()], np.int32)
    np.testing.assert_array_equal(state.cached, lengths)
    tokens = np.zeros((NUM_SLOTS, MAX_TOKENS), np.int32)
    for row, t in enumerate(transcripts.values()):
        tokens[row, : len(t.ids)] = t.ids
    _, cache = jax.jit(functools.partial(forward_chunk, MODEL))(
        params(),
        empty_cache(MODEL, NUM_SLOTS, MAX_TOKENS, PAGE_SIZE),
        tokens,
        np.zeros_like(lengths),
        lengths,
    )
    for layer, reference in zip(rows_of(MODEL, state.cache), rows_of(MODEL, cache), strict=True):
        for side in ("key", "value"):
            for slot, length in enumerate(lengths):
                np.testing.assert_allclose(
                    layer[side][slot, :, :length], reference[side][slot, :, :length], atol=1e-5
                )
                # The pending token, and whatever would follow, is not in the cache.
                assert not layer[side][slot, :, length:].any()


def test_some_append_beside_others_in_the_middle_of_a_turn(played):
    """With bursts that are shorter than turns; what is said is the same, and what is written."""
    scripts, _, transcripts = played
    play, beside = play_on_one_device(SHORT), []

    def watched(state, inputs):
        speaking, before = np.asarray(state.active).astype(bool), np.asarray(state.cached)
        state, report = play(state, inputs)
        appending = (np.asarray(state.cached) > before) & ~speaking
        beside.append(bool(appending.any() and report.count[speaking].any()))
        return state, report

    state, others = converse(watched, empty(), scripts)
    assert sum(beside) > 3
    assert_same(transcripts, others)
    check_rows(state.experience, others, scripts)


@pytest.mark.slow_except("bursts")
@pytest.mark.parametrize(
    ("rules", "chunk_size"), [(LONG, CHUNK), (RULES, 9)], ids=["bursts", "chunks"]
)
def test_sizes_of_bursts_tiles_and_chunks_change_nothing(played, rules, chunk_size):
    scripts, _, transcripts = played
    play = play_on_one_device(rules)
    state, other = converse(play, empty(), scripts, chunk_size=chunk_size)
    assert_same(transcripts, other)
    check_rows(state.experience, other, scripts)


def test_a_chunk_is_appended_in_tiles_of_the_tokens_that_it_has():
    """Tiles of 2 tokens, of whichever slots have any, and one pass of all eight slots' tiles."""
    passes = []

    class Watched(Decoder):
        def fill(self, cache, tokens_BT, cached, count):
            def note(tokens, cached, count):
                tiles = zip(tokens, cached, count, strict=True)
                passes.append([(ids[:n].tolist(), int(start)) for ids, start, n in tiles])

            jax.debug.callback(note, tokens_BT, cached, count)
            return super().fill(cache, tokens_BT, cached, count)

    decoder = Watched(MODEL, RULES._replace(tile_width=2), params(), jax.random.key(7))
    play = jax.jit(lambda state, inputs: slots.play(decoder, state, inputs, 0)[0])
    ones = np.ones(NUM_SLOTS, np.int32)
    chunk = np.arange(NUM_SLOTS)[:, None] * 10 + np.arange(CHUNK)[None, :]

    def appended(state, counts, restart):
        inputs = RoundInputs(
            chunk=chunk.astype(np.int32),
            count=np.array(counts, np.int32),
            restart=restart * ones,
            begin_turn=0 * ones,
            seed=ones,
            row=np.arange(NUM_SLOTS, dtype=np.int32),
            sampling=sampling_rows(Sampling(), NUM_SLOTS),
            version=0,
        )
        passes.clear()
        state = play(state, pack_inputs(inputs))
        jax.effects_barrier()
        return state, [[tile for tile in tiles if tile[0]] for tiles in passes]

    # From position 0 on: 0 to 1, 2 to 3 and 4.
    state, found = appended(empty(), [0, 5, 0, 1, 0, 0, 0, 0], 1)
    assert found == [[([10, 11], 0), ([12, 13], 2), ([14], 4), ([30], 0)]]
    assert state.cached.tolist() == [0, 5, 0, 1, 0, 0, 0, 0]
    # Slot 1 fills up position 5, slot 3 position 1.
    state, found = appended(state, [0, 3, 0, 2, 0, 0, 0, 2], 0)
    assert found == [[([10], 5), ([11, 12], 6), ([30], 1), ([31], 2), ([70, 71], 0)]]
    assert state.cached.tolist() == [0, 8, 0, 3, 0, 0, 0, 2]
    _, found = appended(state, [0] * 8, 0)
    assert found == []


def test_tiles_by_hand():
    """Width 4: 3 tokens behind 3 are positions 3 | 4 5; 4 behind 8 one tile; none; 1 behind 7."""
    tiles_of = jax.jit(tiles_at, static_argnums=3)
    cached, count = np.array([3, 8, 5, 7]), np.array([3, 4, 0, 1])
    assert jax.jit(num_tiles, static_argnums=2)(cached, count, 4).tolist() == [2, 1, 0, 1]
    tiles = tiles_of(np.arange(6), cached, count, 4)
    assert tiles.slot.tolist()[:4] == [0, 0, 1, 3]
    assert tiles.start.tolist()[:4] == [3, 4, 8, 7]
    assert tiles.offset.tolist()[:4] == [0, 1, 0, 0]
    assert tiles.count.tolist() == [1, 2, 4, 1, 0, 0]
    # A later pass goes on with the third tile.
    later = tiles_of(np.arange(2, 8), cached, count, 4)
    assert (later.slot.tolist()[:2], later.start.tolist()[:2]) == ([1, 3], [8, 7])


@pytest.mark.parametrize(
    ("page_size", "parts", "whole_pages", "width"),
    [(64, 1, False, 16), (64, 3, False, 18), (8, 8, False, 16), (128, 1, True, 128)],
)
def test_tiles_divide_over_context_and_are_pages_where_pages_are_written_whole(
    page_size, parts, whole_pages, width
):
    assert tile_width_for(16, page_size, parts, whole_pages=whole_pages) == width


def test_turns_end_at_the_end_token_or_at_the_limit(played):
    _, _, transcripts = played
    turns = [turn for t in transcripts.values() for turn in t.turns()]
    whole = [turn for turn in turns if turn[-1] == END]
    cut = [turn for turn in turns if turn[-1] != END]
    assert whole and cut
    assert all(END not in turn[:-1] for turn in turns)
    assert all(len(turn) <= MAX_TURN_TOKENS for turn in whole)
    assert all(len(turn) == MAX_TURN_TOKENS for turn in cut)
    # Each slot has its own limit, which cuts and changes nothing before.
    limits = {slot: 1 + slot % 3 for slot in transcripts}
    for rules in (RULES, SHORT):
        play = play_on_one_device(rules)
        _, other = converse(play, empty(), make_scripts(8, turns=1), turn_limits=limits)
        for slot, t in transcripts.items():
            assert other[slot].turns()[0] == t.turns()[0][: limits[slot]]


def test_nothing_is_written_after_the_end_of_a_turn(played):
    """Slots that have ended are left alone, bit for bit, while others go on for many rounds."""
    scripts, before, transcripts = played
    busy = {7: dataclasses.replace(make_scripts(1, first=40)[0], row=7)}
    after, _ = converse(play_on_one_device(), before, busy)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if old is not before.version:
            np.testing.assert_array_equal(np.asarray(old)[:7], np.asarray(new)[:7])
    assert not np.asarray(after.active).any()


@functools.cache
def in_dtype(dtype: str):
    """A model that computes in this type: how a round of it is played, and its empty slots."""
    if dtype == MODEL.compute_dtype:
        return play_on_one_device(SHORT), empty()
    model = dataclasses.replace(MODEL, compute_dtype=dtype)
    weights = jax.tree.map(lambda leaf: leaf.astype(dtype), params())
    jitted = jitted_round(model, RULES)

    def play(state, inputs):
        state, packed = jitted(weights, state, pack_inputs(inputs), jax.random.key(7))
        return state, unpack_outputs(np.asarray(packed))

    return play, decode_state.empty_state(
        model, NUM_SLOTS, NUM_SLOTS, MAX_TOKENS, page_size=PAGE_SIZE
    )


@pytest.mark.slow_except("float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_episode_is_the_same_whatever_shares_the_batch(dtype):
    """To the last bit of its log-probs, though bf16 has eight of them."""
    scripts = make_scripts(NUM_SLOTS)
    play, nobody = in_dtype(dtype)
    _, transcripts = converse(play, nobody, scripts)
    rng = np.random.default_rng(5)
    # The episodes 0, 2, 4, 6 in other slots and rows, begun at other times, beside strangers.
    chosen, target_slots, rows = [0, 2, 4, 6], rng.permutation(8), rng.permutation(8)
    strangers = make_scripts(4, first=80)
    crowd = {int(target_slots[i]): scripts[slot] for i, slot in enumerate(chosen)}
    crowd |= {int(target_slots[4 + i]): strangers[i] for i in range(4)}
    crowd = {
        slot: dataclasses.replace(script, row=int(rows[slot])) for slot, script in crowd.items()
    }
    delays = {slot: int(rng.integers(0, 5)) for slot in crowd}
    state, other = converse(play, nobody, crowd, delays=delays)
    check_rows(state.experience, other, crowd)
    ours = {slot: transcripts[slot] for slot in chosen}
    assert_same(ours, {slot: other[int(target_slots[i])] for i, slot in enumerate(chosen)}, atol=0)
    # And alone.
    for slot in chosen:
        _, alone = converse(play, nobody, {0: scripts[slot]})
        assert_same({0: transcripts[slot]}, alone, atol=0)


def test_every_token_carries_the_version_of_its_round():
    scripts = make_scripts(NUM_SLOTS)
    state, transcripts = converse(
        play_on_one_device(), empty(), scripts, version=lambda round_index: 10 + round_index
    )
    check_rows(state.experience, transcripts, scripts)
    assert len({v for t in transcripts.values() for v in t.versions}) > 5


def test_a_slot_that_is_taken_over_in_mid_turn_forgets(played):
    scripts, _, transcripts = played
    play = play_on_one_device(SHORT)
    state = empty()
    # One round of another episode, whose turn goes on when slot 0 is given away.
    talker = Script(seed=2, row=1, messages=((5,),))
    inputs = RoundInputs(
        chunk=np.full((NUM_SLOTS, CHUNK), 5, np.int32),
        count=np.eye(1, NUM_SLOTS, dtype=np.int32)[0],
        restart=np.ones(NUM_SLOTS, np.int32),
        begin_turn=np.ones(NUM_SLOTS, np.int32),
        seed=np.full(NUM_SLOTS, talker.seed, np.int32),
        row=np.full(NUM_SLOTS, talker.row, np.int32),
        sampling=sampling_rows(Sampling(), NUM_SLOTS),
        version=0,
    )
    state, report = play(state, inputs)
    assert report.count.tolist() == [1] + [0] * 7 and report.active[0]
    abandoned = np.asarray(state.experience.tokens)[1]
    state, other = converse(play, state, {0: scripts[0]})
    assert_same({0: transcripts[0]}, other)
    np.testing.assert_array_equal(np.asarray(state.experience.tokens)[1], abandoned)


def inputs_of(chunk, count, **changes) -> RoundInputs:
    """A round in which all slots go on with a part, and then begin a turn."""
    columns = {
        "restart": np.zeros(NUM_SLOTS, np.int32),
        "fork": np.zeros(NUM_SLOTS, np.int32),
        "begin_turn": np.ones(NUM_SLOTS, np.int32),
        "seed": np.arange(NUM_SLOTS, dtype=np.int32),
        "row": np.arange(NUM_SLOTS, dtype=np.int32),
        "sampling": sampling_rows(Sampling(), NUM_SLOTS),
        "turn_limit": MAX_TURN_TOKENS,
        "version": 0,
    }
    return RoundInputs(**{**columns, "chunk": chunk, "count": count, **changes})


def test_shared_prefix_equals_a_prefilled_one():
    """From a neighbour, from one that takes over in the same round, and from the slot itself."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(1, VOCAB, 2 * CHUNK).astype(np.int32)
    zeros, ones = np.zeros(NUM_SLOTS, np.int32), np.ones(NUM_SLOTS, np.int32)

    def say(state, part, count, **changes):
        chunk = np.tile(part, (NUM_SLOTS, 1))
        return play(state, inputs_of(chunk, count, **{"restart": ones, **changes}))

    play = play_on_one_device(LONG)
    state, _ = say(empty(), prompt[:CHUNK], ones * CHUNK, begin_turn=zeros)
    read, expected = say(state, prompt[CHUNK:], ones * CHUNK, restart=zeros)

    reader = 2
    at_reader = np.eye(NUM_SLOTS, dtype=np.int32)[reader]
    # The reader's row will be an episode's that takes over nothing but its own beginning.
    before = at_reader * (NUM_SLOTS - 1)
    state, _ = say(empty(), prompt[:CHUNK], at_reader * CHUNK, begin_turn=zeros, row=before)
    sources = np.array([2, 1, 0, -1, -1, -3, -4, -2])
    # What is taken over is less than a page: the reader keeps its own, the others copy it.
    own = np.asarray(state.cache.table)[reader, 0, 0]
    copied = np.where(np.arange(NUM_SLOTS) == reader, NO_PAGE, own)[:, None]
    chunk = prompt[CHUNK:]
    state, report = say(
        state, chunk, ones * CHUNK, source=sources, shared=ones * CHUNK, copied=copied
    )
    np.testing.assert_array_equal(report.tokens, expected.tokens)
    np.testing.assert_array_equal(report.count, expected.count)
    np.testing.assert_allclose(report.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_array_equal(state.cached, read.cached)
    np.testing.assert_array_equal(state.experience.tokens, read.experience.tokens)
    for ours, theirs in zip(rows_of(MODEL, state.cache), rows_of(MODEL, read.cache), strict=True):
        length = int(read.cached.min())
        np.testing.assert_allclose(
            ours["key"][:, :, :length], theirs["key"][:, :, :length], atol=1e-5
        )


def test_prefix_of_a_slot_that_begins_in_the_same_round_is_its_new_one():
    """Slot 5 has read a prompt; slot 2, which had another, takes it over, and slot 3 from that."""
    prompt, other = (np.arange(first, first + CHUNK, dtype=np.int32) for first in (3, 12))
    zeros = np.zeros(NUM_SLOTS, np.int32)

    def say(state, chunks, rows, **changes):
        chunk, count, row = np.zeros((NUM_SLOTS, CHUNK), np.int32), zeros.copy(), zeros + NO_ROW
        for slot, ids in chunks.items():
            chunk[slot, : len(ids)], count[slot], row[slot] = ids, len(ids), rows[slot]
        inputs = {
            "restart": (count > 0).astype(np.int32),
            "begin_turn": zeros,
            "seed": zeros,
            "sampling": sampling_rows(Sampling(), NUM_SLOTS),
            "version": 0,
            **changes,
        }
        return play(state, RoundInputs(chunk=chunk, count=count, row=row, **inputs))[0]

    play = play_on_one_device()
    state = say(empty(), {5: prompt, 2: other}, {5: 6, 2: 7})
    source, shared, copied = zeros.copy(), zeros.copy(), zeros + NO_PAGE
    source[[2, 3]], shared[[2, 3]] = (3, -1), CHUNK
    copied[[2, 3]] = np.asarray(state.cache.table)[5, 0, 0]
    tails = {2: [20], 3: [21]}
    state = say(state, tails, {2: 1, 3: 4}, source=source, shared=shared, copied=copied[:, None])
    for row, tail in ((1, 20), (4, 21)):
        ids = np.asarray(state.experience.tokens)[row, : CHUNK + 1]
        assert ids.tolist() == [*prompt.tolist(), tail]
    sides = rows_of(MODEL, state.cache)[0]
    for slot in (2, 3):
        np.testing.assert_array_equal(sides["key"][slot, :, :CHUNK], sides["key"][5, :, :CHUNK])


def test_each_of_several_ends_ends_a_turn_and_nothing_else_does():
    """With one more id that ends turns, an episode is the same up to the first of them."""
    scripts = make_scripts(NUM_SLOTS, turns=1)
    _, one = converse(play_on_one_device(), empty(), scripts)
    _, two = converse(play_on_one_device(SCORED), empty_scored(), scripts)
    shorter = 0
    for first, second in zip(one.values(), two.values(), strict=True):
        (whole,), (cut,) = first.turns(), second.turns()
        length = whole.index(OTHER_END) + 1 if OTHER_END in whole else len(whole)
        assert cut == whole[:length]
        shorter += length < len(whole)
    assert shorter, "choose another id: none of these turns has it"


def test_a_sample_begun_anew_stands_behind_the_pending_token_and_sees_nothing_before_it():
    """The same ids as an episode of their own get the same log-probs at their place."""
    first, anew = (5, 9, 2), (11, 4, 8, 3)

    def say(state, ids, **changes):
        chunk = np.zeros((NUM_SLOTS, CHUNK), np.int32)
        chunk[:, : len(ids)] = ids
        return play(state, inputs_of(chunk, np.full(NUM_SLOTS, len(ids), np.int32), **changes))

    play = play_on_one_device(LONG)
    ones = np.ones(NUM_SLOTS, np.int32)
    state, begun = say(empty(), first, restart=ones)
    assert not begun.active.any()
    state, went_on = say(state, anew, fork=ones, origin=len(first) + begun.count)
    experience = jax.tree.map(np.asarray, state.experience)
    lengths = len(first) + begun.count
    np.testing.assert_array_equal(np.asarray(state.origin), lengths)
    for slot, length in enumerate(lengths):
        end = length + len(anew) + went_on.count[slot]
        sampled = went_on.tokens[slot, : went_on.count[slot]]
        np.testing.assert_array_equal(experience.tokens[slot, :length][:3], first)
        np.testing.assert_array_equal(experience.tokens[slot, length:end], [*anew, *sampled])
        turns = [0] * 3 + [1] * begun.count[slot] + [0] * 4 + [2] * went_on.count[slot]
        np.testing.assert_array_equal(experience.turn_ids[slot, :end], turns)
        assert not experience.tokens[slot, end:].any()
        logits = full_forward([[*anew, *sampled]])[0]
        targets = np.zeros(MAX_TOKENS, np.int32)
        targets[: len(anew) + len(sampled) - 1] = [*anew, *sampled][1:]
        scores = np.asarray(_score(logits, targets, np.float32(1)).logprobs)
        np.testing.assert_allclose(
            went_on.logprobs[slot, : len(sampled)], scores[3 : 3 + len(sampled)], atol=1e-5
        )
    # Draws depend on the place in the row: the same prompt again is another draw.
    lengths = lengths + len(anew) + went_on.count
    state, again = say(state, anew, fork=ones, origin=lengths)
    assert (again.tokens != went_on.tokens).any(axis=1).sum() > NUM_SLOTS // 2


def test_a_pass_of_a_mixture_of_experts_has_as_many_tokens_as_keep_its_experts_busy():
    """A token goes to 8 of 128 experts: 16 times 256 tokens. On CPUs 64."""
    mixture = PRESETS["qwen3-30b-a3b"]
    assert (mixture.num_experts, mixture.experts_per_token) == (128, 8)
    assert append_tokens_for("gpu", mixture) == 16 * 256
    assert append_tokens_for("tpu", PRESETS["qwen3-8b"]) == 256
    assert append_tokens_for("cpu", mixture) == append_tokens_for(None, mixture) == 64
