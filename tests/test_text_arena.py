# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Games of TextArena: drawn by the seed alone, played alone or by one policy on all sides."""

import random
import re
import sys
import warnings

import numpy as np
import pytest

from earl_jax import training
from earl_jax.config.file import make_config
from earl_jax.envs.environment import check_start, check_step
from earl_jax.envs.games.text_arena import TextArena
from earl_jax.settings.errors import InputError
from tests.support.placements import TINY
from tests.support.runs import episodes_of, steps_of


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(InputError, match="textarena is not installed .* uv sync --extra"):
        TextArena(game="GuessTheNumber-v0")


@pytest.fixture
def library():
    """TextArena; `uv run --extra textarena pytest -m slow` has it."""
    # Of packages that it imports.
    with warnings.catch_warnings(action="ignore"):
        found = pytest.importorskip("textarena")
    return found


def guessed(seed: int, disturb=lambda: None) -> tuple[list[str], float]:
    """The messages of a game that is played by halves, and its reward."""
    env = TextArena(game="GuessTheNumber-v0", seed=seed)
    texts, low, high = [check_start(env.start()).text], 1, 20
    while True:
        disturb()
        guess = (low + high) // 2
        end = check_step(env.step(f"[{guess}]"))
        if end.done:
            assert end.stop_reason == "finished" and end.metrics == {"invalid": 0}
            return texts, end.reward
        texts.append(end.text)
        low, high = (guess + 1, high) if "higher" in end.text else (low, guess - 1)


@pytest.mark.slow
def test_a_game_is_that_of_its_seed_whatever_runs_beside_it(library):
    def disturb():
        random.seed(0)
        np.random.seed(0)

    games = [guessed(seed) for seed in range(6)]
    assert len({tuple(texts) for texts, _ in games}) > 3
    assert all(reward == 1 for _, reward in games)
    assert games == [guessed(seed, disturb) for seed in range(6)]
    # And what draws beside it is not disturbed.
    random.seed(7)
    np.random.seed(7)
    expected = random.random(), np.random.random()
    random.seed(7)
    np.random.seed(7)
    guessed(1)
    assert (random.random(), np.random.random()) == expected


@pytest.mark.slow
def test_second_invalid_move_ends_a_game(library):
    env = TextArena(game="GuessTheNumber-v0", seed=1)
    assert "[" in check_start(env.start()).text
    first = check_step(env.step("it is seven"))
    assert "invalid move" in first.text and "it is seven" not in first.text
    end = check_step(env.step("it is eight"))
    assert (end.stop_reason, end.metrics) == ("invalid", {"invalid": 1}) and end.detail


@pytest.mark.slow
@pytest.mark.parametrize("game", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0"])
def test_games_that_name_no_author_of_a_message_refuse_as_others_do(library, game):
    env = TextArena(game=game, seed=1)
    assert len(check_start(env.start()).text) > 100
    result = check_step(env.step("it is seven"))
    assert "invalid move" in (result.text or check_step(env.step("eight")).text)


@pytest.mark.slow
def test_each_side_of_a_game_is_shown_its_own_and_paid_its_own(library):
    """First wins at once: 0, 1 and 2 are a row."""
    env = TextArena(game="TicTacToe-v0", num_players=2, seed=3)
    start = check_start(env.start())
    sides = [start.role]
    for reply in ("[0]", "[3]", "[1]", "[4]"):
        result = check_step(env.step(reply))
        assert not result.done and result.reward == 0
        sides.append(result.role)
        # The other's move is shown, by its number.
        author = int(sides[-2][-1])
        assert f"[Player {author}] {reply}" in result.text
    assert sides == ["player_0", "player_1"] * 2 + ["player_0"]
    end = check_step(env.step("[2]"))
    assert (end.reward, dict(end.side_rewards)) == (1, {"player_1": -1})
    assert end.stop_reason == "finished"


@pytest.mark.slow
def test_games_that_cannot_begin_are_errors_in_words(library):
    for arguments, words in [
        ({"game": "GuessTheNumbr-v0"}, "no game of textarena; there is 'GuessTheNumber-v0'"),
        ({"game": "TicTacToe-v0"}, "does not begin with num_players=1 .* received 1"),
        ({"game": "GuessTheNumber-v0", "settings": {"no": 1}}, "does not begin .*'no'"),
        ({"game": "MarketEntryGame-v0", "num_players": 2}, "it loops for ever"),
    ]:
        with pytest.raises(InputError, match=words):
            TextArena(**arguments)


@pytest.mark.slow
def test_a_policy_plays_both_sides_in_a_run(library, tmp_path):
    settings = {
        "num_steps": 1,
        "model": TINY,
        "algorithm": "reinforce",
        "env": {"name": "textarena", "args": {"game": "TicTacToe-v0", "num_players": 2}},
        "rollout": {
            "num_slots": 4,
            "episodes_per_step": 4,
            "group_size": 1,
            "max_turn_tokens": 4,
            "context_buckets": (1024,),
        },
        "devices": {"platform": "cpu", "num_cpu_devices": 1},
        "train": {"sft_steps": 0},
        "eval": {"games": 2, "final_games": 2},
        "log": {"trajectories_every_steps": 1},
    }
    training.train(make_config(settings), tmp_path / "run")
    (line,) = steps_of(tmp_path / "run")
    # A policy that knows nothing does not end its turns.
    assert line["env"]["invalid"] == 0 and line["failed_share"] == 0
    assert len(episodes_of(tmp_path / "run")) == 4


def test_the_docs_name_games_that_there_are(library):
    from tests.support import ROOT

    page = (ROOT / "docs" / "howto" / "environment.md").read_text()
    names = set(re.findall(r"`(\w+-v\d)`", page))
    assert len(names) > 2 and names <= library.envs.registration.ENV_REGISTRY.keys()
