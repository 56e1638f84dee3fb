# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The game environment against hand-played games, an own referee and OpenSpiel itself."""

import random
import re

import pyspiel
import pytest

from earl_jax.envs.environment import check_start, check_step
from earl_jax.envs.examples import Example, play_example
from earl_jax.envs.games.board_game import MOVE_AGAIN, BoardGame
from earl_jax.envs.games.minimax import best_moves
from earl_jax.envs.games.openspiel import load_game
from tests.support.episodes import game_corpus


def play(environment: BoardGame, replies: list[str]) -> tuple[list[str], float, str]:
    """Messages, last reward and stop reason ("" while the game is on)."""
    texts = [environment.start().text]
    result = None
    for reply in replies:
        result = environment.step(reply)
        texts.append(result.text)
    assert result is not None
    return texts, result.reward, result.stop_reason


# The boards at the end, by hand ("." is empty), in the order of the cases:
#   o x x   o x o   x o x   x o .   x x o   x x o
#   o o x   x x o   o o o   . o x   x o x   o o x
#   x o x   x o x   . x x   . o x   x o o   x x o
# Where the opponent moved last the policy is not told that move: it has nothing left to answer.
@pytest.mark.parametrize(
    ("player", "seed", "opening", "replies", "answers", "reward", "reason"),
    [
        (0, 0, "", "68512", "0437", 1.0, "win"),
        (0, 3, "", "36814", "0752", 0.0, "draw"),
        (0, 19, "", "0872", "531", -1.0, "loss"),
        (1, 0, " x plays 0.", "741", "85", 1.0, "win"),
        (1, 3, " x plays 0.", "4728", "651", -1.0, "loss"),
        (1, 8, " x plays 0.", "4382", "561", 0.0, "draw"),
    ],
)
def test_hand_played_tic_tac_toe(player, seed, opening, replies, answers, reward, reason):
    environment = BoardGame(seed=seed, index=player)
    texts, got_reward, got_reason = play(environment, list(replies))
    side = "xo"[player]
    assert texts[0] == f"tic_tac_toe. you play {side}. moves are 0 to 8.{opening}"
    assert texts[1:] == [*answers, ""]
    assert (got_reward, got_reason) == (reward, reason)


def test_the_choices_are_the_legal_moves_where_illegal_ones_are_masked():
    """Holds in every position of a hundred games; without masks or after the end there are none."""
    rng = random.Random(2)
    for seed in range(100):
        environment = BoardGame(mask_illegal=True, seed=seed, index=seed % 2)
        content = check_start(environment.start())
        result = None
        while result is None or not result.done:
            assert content.choices == tuple(environment.legal_replies()) != ()
            content = result = check_step(environment.step(rng.choice(content.choices)))
            assert result.stop_reason != "illegal"
        assert result.choices == ()
    free = BoardGame(seed=0, index=0)
    assert free.start().choices == free.step("4").choices == ()


@pytest.mark.parametrize(
    "reply", ["9", "³", "٤", " 4", "4 ", "4\n", "+4", "04", "-1", "", "four", "4<|end|>", "x" * 999]
)
def test_only_the_exact_text_of_a_legal_move_is_legal(reply):
    environment = BoardGame(illegal_reward=-0.5, seed=0, index=0)
    environment.start()
    result = check_step(environment.step(reply))
    assert (result.reward, result.done, result.stop_reason) == (-0.5, True, "illegal")
    assert result.text == ""
    assert repr(reply)[:20] in result.detail and len(result.detail) < 120


def test_a_taken_field_is_illegal():
    environment = BoardGame(seed=0, index=1)
    assert environment.start().text.endswith("x plays 0.")
    assert environment.legal_replies() == list("12345678")
    assert environment.step("0").stop_reason == "illegal"
    assert environment.legal_replies() == []


@pytest.mark.parametrize("opponent", ["random", "mcts"])
def test_same_seed_and_replies_give_the_same_episode(opponent):

    def episode(seed: int) -> Example:
        return play_example(
            BoardGame(game="connect_four", opponent=opponent, seed=seed, index=1), random.Random(7)
        )

    assert [episode(seed) for seed in range(8)] == [episode(seed) for seed in range(8)]
    assert len({episode(seed).turns for seed in range(8)}) > 4


def test_opponent_does_not_mirror_a_policy_with_the_same_seed():
    # Both drawing from Random(seed), the answer would be the move of the same rank in 8 of 9 games.
    # Independent, it is so in 1 of 9; the standard deviation over 2000 games is 0.7 %.
    same_rank = 0
    for seed in range(2000):
        environment = BoardGame(seed=seed, index=0)
        environment.start()
        legal = environment.legal_replies()
        reply = random.Random(seed).choice(legal)
        answer = environment.step(reply).text
        same_rank += legal.index(reply) == [m for m in legal if m != reply].index(answer)
    assert abs(same_rank / 2000 - 1 / 9) < 0.03


def test_random_play_wins_as_often_as_it_must():
    # Random against random: the first wins 58.5 %, the second 28.8 % (counting all 255,168 games by
    # their probability); the standard deviation of 2000 games is 1.1 %.
    rng = random.Random(0)
    for player, expected in ((0, 0.585), (1, 0.288)):
        wins = sum(
            play_example(BoardGame(seed=s, index=player), rng).reward > 0 for s in range(2000)
        )
        assert abs(wins / 2000 - expected) < 0.035


def test_mcts_is_a_stronger_opponent_than_random():
    def wins(opponent: str) -> int:
        return sum(
            play_example(BoardGame(opponent=opponent, seed=s, index=s % 2), random.Random(s)).reward
            > 0
            for s in range(60)
        )

    assert wins("mcts") < 6 < 15 < wins("random")


def test_best_moves_by_hand():
    """The value is a draw: every opening holds it, and against a corner only the centre does."""
    table = best_moves("tic_tac_toe")
    # Of 5,478 states 958 are the end of a game.
    assert len(table) == 5478 - 958
    assert table["...\n...\n..."] == tuple(range(9))
    assert table["x..\n...\n..."] == (4,)
    # A corner holds it against the centre, an edge loses.
    assert table["...\n.x.\n..."] == (0, 2, 6, 8)
    # x wins at 2; else o would at 5. Where o is on the move instead, it wins at 5.
    assert table["xx.\noo.\n..."] == (2,)
    assert table["xx.\noo.\nx.."] == (5,)
    # o has to stop x at 2.
    assert table["xx.\n.o.\n..."] == (2,)


@pytest.mark.parametrize("player", [0, 1])
def test_minimax_never_loses(player):
    """To any play: all replies of the policy to all best moves of the opponent are tried."""
    table, outcomes, seen = best_moves("tic_tac_toe"), set(), set()
    states = [load_game("tic_tac_toe").new_initial_state()]
    while states:
        state = states.pop()
        if str(state) in seen:
            continue
        seen.add(str(state))
        if state.is_terminal():
            outcomes.add(state.returns()[player])
        else:
            own = state.current_player() == player
            moves = state.legal_actions() if own else table[str(state)]
            states += [state.child(move) for move in moves]
    assert outcomes == {-1.0, 0.0}, "the policy loses or draws, and a draw is possible"


def test_the_minimax_opponent_plays_its_table():
    rng, reasons = random.Random(0), set()
    for seed in range(60):
        game = BoardGame(opponent="minimax", seed=seed, index=seed % 2)
        reasons.add(play_example(game, rng).stop_reason)
    assert reasons == {"draw", "loss"}
    corner = BoardGame(opponent="minimax", seed=1, index=0)
    corner.start()
    assert corner.step("0").text == "4"
    with pytest.raises(ValueError, match="too many states to solve; solved are tic_tac_toe"):
        BoardGame(game="connect_four", opponent="minimax")


@pytest.mark.parametrize("player", [0, 1])
@pytest.mark.parametrize(
    "name",
    [
        "breakthrough",
        "checkers",
        "chess",
        "clobber",
        "connect_four",
        "connect_four(columns=5,rows=5)",
        "dots_and_boxes",
        "go(board_size=5)",
        "hex(board_size=5)",
        "mancala",
        "misere(game=tic_tac_toe())",
        "nim",
        "othello",
        "tic_tac_toe",
        "ultimate_tic_tac_toe",
    ],
)
def test_transcript_replays_on_openspiel(name, player):
    """Every told move is legal for that side in a state of OpenSpiel; the return agrees."""
    episode = play_example(BoardGame(game=name, seed=5, index=player), random.Random(5))
    state = pyspiel.load_game(name).new_initial_state()
    assert episode.start.role == "xo"[player]
    assert episode.start.text.startswith(f"{name}. you play ")
    for number, (author, text) in enumerate(episode.turns):
        if number == 0:
            moves = re.findall(r"\d+", text.partition(" plays ")[2])
        else:
            moves = [] if text == MOVE_AGAIN else text.split(" ")
        for move in moves:
            assert (state.current_player() == player) == (author == "policy")
            assert int(move) in state.legal_actions()
            state.apply_action(int(move))
    if state.is_terminal():
        assert state.returns()[player] == episode.reward
    else:
        assert state.current_player() == 1 - player, "only the opponent's last moves are untold"


def test_a_second_move_in_a_row_is_asked_for():
    texts = {
        text
        for seed in range(5)
        for _, text in play_example(
            BoardGame(game="mancala", seed=seed, index=1), random.Random(seed)
        ).turns
    }
    assert MOVE_AGAIN in texts and any(re.fullmatch(r"\d+ \d+", text) for text in texts)


def test_board_is_shown_in_every_message():
    environment = BoardGame(show_board=True, seed=0, index=1)
    start = check_start(environment.start())
    assert start.text == ("tic_tac_toe. you play o. moves are 0 to 8. x plays 0.\nx..\n...\n...")
    assert environment.step("7").text == "8\nx..\n...\n.ox"


def test_calls_out_of_order_are_errors():
    environment = BoardGame(seed=0, index=0)
    with pytest.raises(RuntimeError, match="before start"):
        environment.step("4")
    environment.start()
    with pytest.raises(RuntimeError, match="twice"):
        environment.start()
    environment.step("bad")
    with pytest.raises(RuntimeError, match="after the end"):
        environment.step("4")


def test_corpus_is_the_same_for_the_same_seed_and_has_both_sides():
    corpus = game_corpus(20, seed=3)
    assert corpus == game_corpus(20, seed=3)
    assert corpus != game_corpus(20, seed=4)
    assert corpus[:9] == list("012345678")
    assert sum("you play x." in text for text in corpus) == 10
    assert sum("you play o." in text for text in corpus) == 10
