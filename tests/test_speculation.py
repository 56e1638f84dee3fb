# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Guessed tokens change nothing but the number of forward passes: the engine's side."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.engine.config import Sampling
from earl_jax.engine.round_inputs import RoundInputs, RoundOutputs
from earl_jax.engine.sampling import sampling_rows
from earl_jax.sharding.layout import MeshShape
from tests.support import engines
from tests.support.engines import CONFIG, NUM_SLOTS
from tests.support.hlo import COLLECTIVE as COLLECTIVE_LINE
from tests.support.hlo import replica_groups
from tests.support.slots import (
    CHUNK,
    END,
    MAX_TOKENS,
    MODEL,
    RULES,
    VOCAB,
    assert_same,
    check_logprobs,
    check_rows,
    converse,
    empty,
    make_scripts,
    params,
    play_on_one_device,
)

GUESSING = RULES._replace(ngram=1, draft=3)
# Long turns, because what was said is guessed again. Some guesses reach beyond the shorter ones.
LIMITS = {slot: (14, 14, 9, 4)[slot % 4] for slot in range(NUM_SLOTS)}
# Greedy, where a random model soon repeats itself, and drawn, where guesses mostly fail.
TEMPERATURE = {slot: (0.0, 0.0, 0.5, 1.0)[slot // 2 % 4] for slot in range(NUM_SLOTS)}


@dataclasses.dataclass
class Counter:
    """A `play` that adds up what its reports say."""

    play: object
    tokens: int = 0
    passes: int = 0
    drafted: int = 0

    def __call__(self, state, inputs) -> tuple[object, RoundOutputs]:
        state, report = self.play(state, inputs)
        assert (report.passes <= report.count).all()
        assert (report.count - report.passes <= report.drafted).all()
        self.tokens += int(report.count.sum())
        self.passes += int(report.passes.sum())
        self.drafted += int(report.drafted.sum())
        return state, report


def talk(play, state, number: int = 8, **changes):
    settings = {"turn_limits": LIMITS, "temperature": TEMPERATURE, "num_slots": number}
    return converse(play, state, make_scripts(number, turns=2), **{**settings, **changes})


@pytest.fixture(scope="module")
def plain():
    """Eight episodes of two turns, token by token."""
    return talk(play_on_one_device(), empty())[1]


@pytest.mark.slow_except("rules0")
@pytest.mark.parametrize(
    "rules", [GUESSING, RULES._replace(ngram=2, draft=5, burst=1, tile_width=3)]
)
def test_the_tokens_are_those_without_guesses_in_fewer_passes(plain, rules):
    play = Counter(play_on_one_device(rules))
    state, transcripts = talk(play, empty())
    assert_same(plain, transcripts)
    check_logprobs(transcripts, TEMPERATURE)
    check_rows(state.experience, transcripts, make_scripts(8, turns=2))
    assert play.tokens == sum(len(turn) for t in transcripts.values() for turn in t.turns())
    accepted = play.tokens - play.passes
    assert 0.1 * play.tokens < accepted < play.drafted


def test_the_conversation_is_worth_comparing(plain):
    """Turns that are ended and cut, short and long."""
    turns = [turn for t in plain.values() for turn in t.turns()]
    assert {turn[-1] == END for turn in turns} == {True, False}
    assert {len(turn) for turn in turns} >= {4, 9, 14}


def circling():
    """Weights that say 1 2 3 4 5 1 2 and so on: layers add nothing, the head tells the next id."""
    head = np.zeros((MODEL.width, VOCAB), np.float32)
    head[[1, 2, 3, 4, 5], [2, 3, 4, 5, 1]] = 10
    silent = [
        {**layer, "out": 0 * layer["out"], "down": 0 * layer["down"]}
        for layer in params()["layers"]
    ]
    return {**params(), "embed": jnp.eye(VOCAB, MODEL.width), "layers": silent, "head": head}


@pytest.mark.slow
def test_a_text_that_repeats_itself_costs_fewer_passes_than_tokens():
    """By hand, for a turn of 30 tokens behind the prompt 1 2 3 4 5, with n-grams of three.

    First round: 4 5 1 and 5 1 2 have not been there, so three passes say 1, 2 and 3; the fourth
    has 4 5 1 guessed, and says 2 too. Second: four passes of four tokens. Third: one of four, and
    one of the last three, for which two are guessed.
    """
    play = play_on_one_device(GUESSING._replace(ngram=3), circling())
    zeros, one = np.zeros(8, np.int32), np.eye(1, 8, dtype=np.int32)[0]
    columns = {
        "chunk": np.tile(np.int32([1, 2, 3, 4, 5]), (8, 1)),
        "sampling": sampling_rows(Sampling(temperature=0), 8),
        "seed": zeros,
        "row": zeros,
        "version": 0,
        "turn_limit": 30,
    }
    state, sampled, rounds = empty(), [], []
    for first in (True, False, False):
        begins = one * first
        inputs = RoundInputs(count=CHUNK * begins, restart=begins, begin_turn=begins, **columns)
        state, report = play(state, inputs)
        sampled += report.tokens[0, : report.count[0]].tolist()
        rounds.append((report.count[0], report.passes[0], report.drafted[0]))
        assert not report.count[1:].any() and not report.passes[1:].any()
    assert sampled == [1, 2, 3, 4, 5] * 6
    assert rounds == [(7, 4, 3), (16, 4, 12), (7, 2, 5)]
    assert not report.active.any() and state.cached[0] == 34


def test_nothing_is_guessed_beyond_the_limit_of_a_turn():
    """With a limit of one, a pass samples its own token and guesses none."""
    for limit, drafted in ((1, False), (2, True)):
        play = Counter(play_on_one_device(GUESSING))
        talk(play, empty(), turn_limits=dict.fromkeys(range(8), limit))
        assert (play.drafted > 0) == drafted


@pytest.mark.slow
def test_an_episode_is_the_same_whatever_shares_the_batch(plain):
    play = play_on_one_device(GUESSING)
    for slot in (0, 3):
        alone = {0: dataclasses.replace(make_scripts(8, turns=2)[slot], row=5)}
        _, transcripts = converse(
            play, empty(), alone, turn_limits={0: LIMITS[slot]}, temperature={0: TEMPERATURE[slot]}
        )
        assert_same({0: plain[slot]}, transcripts)


# Meshes.


engine_on = functools.partial(engines.engine_on, config=dataclasses.replace(CONFIG, rules=GUESSING))


@pytest.mark.slow
def test_a_pass_that_guesses_has_the_collectives_of_one_that_does_not():
    """As `test_engine` counts them: of the chunk and of the loop, and none in that over guesses."""
    shape = MeshShape(data=4, tensor=2)
    text = engine_on(shape).lower_play(MAX_TOKENS).compile().as_text()
    lines = [line.strip() for line in text.splitlines() if COLLECTIVE_LINE.search(line)]
    reduces = [line for line in lines if " all-reduce" in line]
    gathers = [line for line in lines if " all-gather" in line]
    # The pass that appends computes nothing behind the last layer's keys.
    assert (len(reduces), len(gathers)) == (4 * MODEL.num_layers, 1)
    assert len(lines) == len(reduces) + len(gathers)
    shards = {tuple(range(first, first + shape.tensor)) for first in range(0, 8, shape.tensor)}
    for line in lines:
        assert replica_groups(line) == shards, line
