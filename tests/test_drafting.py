# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in rollouts: the same episodes as without, and its measured effect."""

import dataclasses

import pytest

from earl_jax.engine.config import Sampling
from earl_jax.engine.engine import Engine
from earl_jax.rollout.config import Stops
from earl_jax.run.build import build_run
from earl_jax.sharding.layout import MeshShape
from tests.support.choices import BRANCHES, HOT, Words, engine_for
from tests.support.environments import Talker
from tests.support.episodes import (
    MAX_TOKENS,
    GrowPool,
    assert_same_episodes,
    check_rows,
    collect,
    engine,
    tasks,
    tokenizer,
    weights,
)
from tests.support.settings import make_config

GUESSES = {"ngram": 1, "draft": 3}


@pytest.fixture(scope="module")
def games(pool):
    return collect(pool, tasks(40))


# Rollouts.


@pytest.mark.slow
def test_games_are_those_without_guesses(pool, games):
    """On a mesh, where pages are few: episodes wait, and are read again."""
    player = engine(mesh=MeshShape(data=2, tensor=2), **GUESSES)
    guessed = collect(
        pool, tasks(40), pages=5, grow=GrowPool(most_pages=5), player=player, num_draft_tokens=3
    )
    check_rows(guessed, 40)
    assert_same_episodes(games.trajectories, guessed.trajectories)
    stats = guessed.stats
    assert stats.preempted_episodes > 0
    assert (stats.rollout_tokens, stats.prefill_tokens) == (
        games.stats.rollout_tokens,
        games.stats.prefill_tokens,
    )
    assert stats.drafted_tokens > 0
    assert stats.tokens_per_pass == 1 + stats.accepted_tokens / stats.drafting_passes
    assert games.stats.draft_acceptance is None is games.stats.tokens_per_pass


def talk(pool, burst: int, stops: Stops, drafts: int = 0):
    """Talks of three turns of digits, which only a stop ends."""
    return collect(
        pool,
        tasks(24),
        lambda task: Talker(task.args["seed"]),
        params=weights(ends_turns=False),
        player=engine(burst=burst, ngram=1, draft=drafts),
        burst=burst,
        max_tokens=3 * MAX_TOKENS,
        max_turn_tokens=16,
        stop_strings=stops.strings,
        stop_token_ids=stops.token_ids,
        num_draft_tokens=drafts,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strings", "ids"), [(("12", "34", "5", "0"), ()), ((), ("1", "5", "8"))], ids=["text", "ids"]
)
def test_a_stop_cuts_what_was_guessed_behind_it(pool, strings, ids):
    """On the host behind a string, with all that the round said beyond; on the devices at an id."""
    stops = Stops(strings=strings, token_ids=tuple(tokenizer().convert_tokens_to_ids(list(ids))))
    plain = talk(pool, 1, stops)
    guessed = talk(pool, 5, stops, 3)
    check_rows(guessed, 24)
    assert_same_episodes(plain.trajectories, guessed.trajectories)
    stats = guessed.stats
    assert stats.rollout_tokens == plain.stats.rollout_tokens
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.draft_acceptance == stats.accepted_tokens / stats.drafted_tokens
    assert (stats.discarded_tokens > 0) == bool(strings)


class Again(Words):
    """Allows the same words every time, which so are often said again."""

    ROUNDS = (("123", "120", "21"),) * 3


@pytest.mark.slow
def test_turns_among_choices_stay_among_them(pool):
    """A guess that is not allowed is never what is sampled; one that is may be."""
    plain_engine = engine_for(BRANCHES)
    rules = plain_engine.config.rules._replace(**GUESSES)
    config = dataclasses.replace(plain_engine.config, rules=rules)
    plain, guessed = (
        collect(
            pool,
            tasks(24),
            lambda task: Again([]),
            player=player,
            sampling=Sampling(temperature=HOT),
            num_draft_tokens=player.config.rules.draft,
        )
        for player in (plain_engine, Engine(config, plain_engine.layout))
    )
    check_rows(guessed, 24)
    assert_same_episodes(plain.trajectories, guessed.trajectories)
    assert guessed.stats.accepted_tokens > 0


# Settings.


def test_the_settings_reach_the_engine():
    world = build_run(make_config({}, ["rollout.num_draft_tokens=2"]))
    rules = world.stages.engines.engine(world.problem.meshes("rollout")[0]).config.rules
    assert (rules.ngram, rules.draft) == (3, 2)
    assert rules.round_tokens == world.config.rollout.round_tokens == 3 * rules.burst
    plain = build_run(make_config({}))
    rules = plain.stages.engines.engine(plain.problem.meshes("rollout")[0]).config.rules
    assert (rules.draft, rules.round_tokens) == (0, rules.burst)
