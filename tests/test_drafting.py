# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Which rounds guess tokens; and rollouts that guess, which are those that do not."""

import dataclasses
import re
import time

import pytest

from earl_jax.config_file import make_config
from earl_jax.engine.config import Sampling, SpeculationConfig, Stops
from earl_jax.engine.drafting import BLOCK_ROUNDS, KEPT_ROUNDS, SLOWEST_ROUNDS, TRIAL, Drafting
from earl_jax.engine.engine import PolicyEngine
from earl_jax.sharding.layout import MeshShape
from earl_jax.world import World, _drafting_notes
from tests.support.choices import BRANCHES, HOT, Words, engine_for
from tests.support.controls import Script, furthest, swap_to
from tests.support.environments import Talker
from tests.support.episodes import (
    ROOM,
    Rooms,
    assert_same_episodes,
    check_rows,
    collect,
    engine,
    tasks,
    tokenizer,
    weights,
)

GUESSES = {"ngram": 1, "draft": 3}
ON = SpeculationConfig(mode="on", **GUESSES)
TRIAL_ROUNDS = len(TRIAL) * BLOCK_ROUNDS


@pytest.fixture(scope="module")
def games(pool):
    return collect(pool, tasks(40))


# Rollouts.


@pytest.mark.slow_except("data=2,tensor=2-0")
@pytest.mark.parametrize(
    ("mesh", "pages"), [(MeshShape(data=8), 5), (MeshShape(data=2, tensor=2), 0)], ids=str
)
def test_games_are_those_without_guesses(pool, games, mesh, pages):
    """Also where pages are few: episodes wait, and are read again."""
    player = engine(mesh=mesh, **GUESSES)
    rooms = Rooms(most_pages=5) if pages else None
    guessed = collect(pool, tasks(40), pages=pages, make_room=rooms, player=player, speculation=ON)
    check_rows(guessed, 40)
    assert_same_episodes(games.trajectories, guessed.trajectories)
    stats = guessed.stats
    assert bool(stats.preempted_episodes) == bool(pages)
    assert (stats.rollout_tokens, stats.prefill_tokens) == (
        games.stats.rollout_tokens,
        games.stats.prefill_tokens,
    )
    assert stats.drafting_rounds == stats.rounds
    assert stats.drafted_tokens > 0
    assert games.stats.draft_acceptance is None and not games.stats.drafting_rounds


def talk(pool, burst: int, stops: Stops, speculation=None, **changes):
    """Talks of three turns of digits, which only a stop ends."""
    guesses = GUESSES if speculation else {}
    return collect(
        pool,
        tasks(24),
        lambda task: Talker(task.args["seed"]),
        params=weights(ends_turns=False),
        player=engine(burst=burst, **guesses),
        burst=burst,
        max_tokens=3 * ROOM,
        max_turn_tokens=16,
        stop_strings=stops.strings,
        stop_token_ids=stops.token_ids,
        speculation=speculation or SpeculationConfig(),
        **changes,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strings", "ids"), [(("12", "34", "5", "0"), ()), ((), ("1", "5", "8"))], ids=["text", "ids"]
)
def test_a_stop_cuts_what_was_guessed_behind_it(pool, strings, ids):
    """On the host behind a string, with all that the round said beyond; on the devices at an id."""
    stops = Stops(strings=strings, token_ids=tuple(tokenizer().convert_tokens_to_ids(list(ids))))
    plain = talk(pool, 1, stops)
    guessed = talk(pool, 5, stops, ON)
    check_rows(guessed, 24)
    assert_same_episodes(plain.trajectories, guessed.trajectories)
    stats = guessed.stats
    assert stats.rollout_tokens == plain.stats.rollout_tokens
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.draft_acceptance == stats.accepted_tokens / stats.drafted_tokens
    assert (stats.given_up_tokens > 0) == bool(strings)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_other_weights_take_over_in_the_middle_of_turns(pool, cache):
    """By the trainer's forward pass, tokens have the log-probs of the weights that they name.

    With a cache that is kept what is seen is of both weights; then only versions are compared.
    """
    swaps = {number: swap_to(number, cache) for number in (2, 4, 7)}
    guessed = collect(
        pool,
        tasks(24),
        lambda task: Talker(task.args["seed"]),
        control=Script(swaps),
        player=engine(burst=1, **GUESSES),
        burst=1,
        max_tokens=2 * ROOM,
        speculation=ON,
    )
    check_rows(guessed, 24)
    assert {t.stop_reason for t in guessed.trajectories} == {"win"}
    versions = [set(turn.versions) for t in guessed.trajectories for turn in t.turns[1::2]]
    assert set().union(*versions) >= {0, 7}
    assert any(len(set(turn)) > 1 for turn in versions)
    if cache == "recompute":
        assert furthest(guessed.trajectories) < 1e-4


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
            speculation=speculation,
        )
        for player, speculation in (
            (plain_engine, SpeculationConfig()),
            (PolicyEngine(config, plain_engine.layout), ON),
        )
    )
    check_rows(guessed, 24)
    assert_same_episodes(plain.trajectories, guessed.trajectories)
    assert guessed.stats.accepted_tokens > 0


@pytest.mark.slow
def test_rounds_of_both_kinds_are_mixed_without_a_trace(pool):
    """A stop's given-up tokens may come from a round that guessed, and go in one that does not."""
    stops = Stops(strings=("12", "34", "5", "0"))
    plain = talk(pool, 1, stops)
    turns = iter([True, False, False, True] * 1000)

    class ByTurns(Drafting):
        def choose(self, program):
            return next(turns)

    mixed = talk(pool, 5, stops, ON, drafting=ByTurns("on"))
    check_rows(mixed, 24)
    assert_same_episodes(plain.trajectories, mixed.trajectories)
    assert 0 < mixed.stats.drafting_rounds < mixed.stats.rounds
    assert mixed.stats.given_up_tokens > 0


# By the clock.


def play_rounds(drafting: Drafting, number: int, seconds: dict[bool, float], program="a"):
    """So many rounds of ten tokens, which take `seconds`; whether each guessed."""
    chosen = []
    for _ in range(number):
        chosen.append(drafting.choose(program))
        drafting.note(program, chosen[-1], tokens=10, seconds=seconds[chosen[-1]])
    return chosen


def test_off_and_on_do_not_look_at_the_clock():
    for mode, guesses in (("off", False), ("on", True)):
        chosen = play_rounds(Drafting(mode), 100, {guesses: 1.0})
        assert set(chosen) == {guesses}


@pytest.mark.parametrize(("guessing_s", "wins"), [(0.9, True), (1.1, False)])
def test_the_faster_goes_on_behind_a_trial_of_both(guessing_s, wins):
    """Off, on, on, off; the first round of either kind, which compiles, is one more."""
    drafting = Drafting("auto")
    seconds = {False: 1.0, True: guessing_s}
    blocks = [plain for plain in TRIAL for _ in range(BLOCK_ROUNDS)]
    trial = [False, *blocks[:BLOCK_ROUNDS], True, *blocks[BLOCK_ROUNDS:]]
    assert play_rounds(drafting, len(trial), seconds) == trial
    assert play_rounds(drafting, KEPT_ROUNDS, seconds) == [wins] * KEPT_ROUNDS
    # Then what is faster may have changed; nothing has to be compiled any more.
    seconds = {False: guessing_s, True: 1.0}
    assert play_rounds(drafting, TRIAL_ROUNDS, seconds) == blocks
    assert play_rounds(drafting, 1, seconds) == [not wins]


def test_only_rounds_of_a_trial_are_to_be_timed():
    drafting, seen = Drafting("auto"), []
    for _ in range(2 + TRIAL_ROUNDS + 5):
        guesses = drafting.choose("a")
        seen.append(drafting.is_trying("a"))
        drafting.note("a", guesses, tokens=10, seconds=1.0)
    assert seen == [True] * (2 + TRIAL_ROUNDS) + [False] * 5
    assert not any(Drafting(mode).is_trying("a") for mode in ("off", "on"))


def test_a_few_slow_rounds_decide_nothing():
    drafting = Drafting("auto")
    for index in range(2 + TRIAL_ROUNDS):
        guesses = drafting.choose("a")
        disturbed = guesses and index < 2 + BLOCK_ROUNDS + SLOWEST_ROUNDS
        seconds = 60.0 if disturbed else 0.9 if guesses else 1.0
        drafting.note("a", guesses, tokens=10, seconds=seconds)
    assert drafting.choose("a")


def test_rounds_that_say_nothing_are_no_part_of_a_trial():
    drafting = Drafting("auto")
    for _ in range(100):
        assert not drafting.choose("a")
        drafting.note("a", False, tokens=0, seconds=1.0)


def test_each_room_has_its_own_trial():
    drafting = Drafting("auto")
    for program, guessing_s in (("short", 2.0), ("long", 0.5)):
        play_rounds(drafting, 2 + TRIAL_ROUNDS, {False: 1.0, True: guessing_s}, program)
    assert not drafting.choose("short") and drafting.choose("long")


@pytest.mark.slow
@pytest.mark.parametrize("slow", [True, False], ids=["guessing", "plain"])
def test_rollouts_leave_the_kind_of_round_that_is_slower(pool, games, monkeypatch, slow):
    """Rounds that guess, or those that do not, are held up; the games are the same."""
    auto, drafting = dataclasses.replace(ON, mode="auto"), Drafting("auto")
    player, kinds, counted = engine(mesh=MeshShape(data=8), **GUESSES), [], []
    play = player.play

    def held_up(*given, drafts, **settings):
        kinds.append(drafts)
        if drafts == slow:
            time.sleep(0.05)
        return play(*given, drafts=drafts, **settings)

    monkeypatch.setattr(player, "play", held_up)
    for _ in range(6):
        rollout = collect(pool, tasks(40), player=player, speculation=auto, drafting=drafting)
        counted.append((rollout.stats.drafting_rounds, rollout.stats.rounds))
    assert_same_episodes(games.trajectories, rollout.trajectories)
    assert set(kinds[:TRIAL_ROUNDS]) == {True, False}
    assert set(kinds[-counted[-1][1] :]) == {not slow}
    assert counted[-1][0] == (0 if slow else counted[-1][1])


# Settings.


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "mode=fast",
            "config.rollout.speculation.mode is 'fast'; choose one of 'off', 'on', 'auto'",
        ),
        ("ngram=0", "config.rollout.speculation.ngram is 0; it must be at least 1 id"),
        ("draft=0", "config.rollout.speculation.draft is 0; .*speculation.mode to 'off'"),
        ("draft=8", "config.rollout.speculation.draft = 8 has no effect.*mode is 'off'"),
        ("ngram=2", "config.rollout.speculation.ngram = 2 has no effect.*mode is 'off'"),
        ("drafts=2", "config.rollout.speculation.drafts is not a field.*did you mean 'draft'"),
    ],
)
def test_settings_that_cannot_be_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        make_config({}, [f"rollout.speculation.{override}"])


def test_clocks_of_several_processes_are_not_asked():
    auto = make_config({}, ["rollout.speculation.mode=auto"])
    assert _drafting_notes(make_config({}, ["rollout.speculation.mode=on"]), 2) == []
    assert len(_drafting_notes(auto, 1)) == 1
    with pytest.raises(
        ValueError, match="speculation.mode is 'auto' in a run of 2 processes.*'on'"
    ):
        _drafting_notes(auto, 2)


def test_the_settings_reach_the_engine():
    settings = ["rollout.speculation.mode=auto", "rollout.speculation.draft=2"]
    world = World(make_config({}, settings))
    assert any(re.search("speculation.mode is 'auto'.*rounding", note) for note in world.notes)
    rules = world.engine(world.problem.rollout_meshes[0]).config.rules
    assert (rules.ngram, rules.draft) == (3, 2)
    assert rules.round_tokens == world.config.rollout.round_tokens == 3 * rules.burst
    plain = World(make_config({}))
    rules = plain.engine(plain.problem.rollout_meshes[0]).config.rules
    assert (rules.ngram, rules.draft, rules.round_tokens) == (0, 0, rules.burst)
