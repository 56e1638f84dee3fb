# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Exact results of a policy beside a recursion over states, which knows no conversations."""

import math
import re

import numpy as np
import pyspiel
import pytest

from benchmarks.exact import masked_probabilities, results
from earl_jax.envs.games.minimax import best_moves


class Text:
    """Conversations as their characters; a reply ends with a stop."""

    def first(self, text):
        return [*map(ord, text)]

    def answer(self, text):
        return [*map(ord, f"({text})")]

    def reply(self, text):
        return [*map(ord, f"[{text}]")]


def moves_said(prompt: str) -> set[int]:
    """The moves that the conversation tells of."""
    first = re.search(r"plays (\d)", prompt)
    said = [first.group(1)] if first else []
    return {int(move) for move in [*said, *re.findall(r"[(\[](\d)[)\]]", prompt)]}


def likelihoods(legal: list[int]) -> dict[int, float]:
    """A policy: the lowest legal move 0.5, the highest 0.3; other moves are illegal ones."""
    found = dict.fromkeys(legal, 0.0)
    found[legal[0]] += 0.5
    found[legal[-1]] += 0.3
    return found


def score(pairs):
    values = []
    for prompt, reply in pairs:
        legal = sorted(set(range(9)) - moves_said("".join(map(chr, prompt))))
        likely = likelihoods(legal)[int(chr(reply[1]))]
        values.append([0.0, math.log(likely) if likely else -math.inf, math.log(0.9)])
    return values


def by_states(state, side, opponent):
    """Probabilities of win, draw, loss, illegal from a state on."""
    if state.is_terminal():
        value = state.returns()[side]
        return np.array([value > 0, value == 0, value < 0, 0], float)
    legal = state.legal_actions()
    if state.current_player() != side:
        moves = best_moves("tic_tac_toe")[str(state)] if opponent == "minimax" else legal
        return sum(by_states(state.child(move), side, opponent) for move in moves) / len(moves)
    # A move is followed by the end of the turn with a probability of 0.9.
    likely = {move: 0.9 * value for move, value in likelihoods(legal).items() if value}
    found = np.array([0, 0, 0, 1 - sum(likely.values())])
    return found + sum(
        value * by_states(state.child(move), side, opponent) for move, value in likely.items()
    )


@pytest.mark.parametrize("opponent", ["random", "minimax"])
@pytest.mark.parametrize("side", [0, 1])
def test_results_are_those_of_a_recursion_over_states(side, opponent):
    found = results(score, Text(), side, opponent)
    game = pyspiel.load_game("tic_tac_toe")
    wanted = by_states(game.new_initial_state(), side, opponent)
    values = [found.get(name, 0.0) for name in ("win", "draw", "loss", "illegal")]
    lost = found.get("not followed", 0.0)
    assert sum(values) + lost == pytest.approx(1.0)
    assert values == pytest.approx(wanted.tolist(), abs=lost + 1e-9)
    assert lost < 0.01


def test_a_masked_policy_plays_no_illegal_move():
    found = results(score, Text(), 0, "minimax", masked=True)
    assert found["illegal"] == pytest.approx(0.0, abs=1e-9)
    assert found.get("win", 0.0) == 0.0, "nobody wins against exact play"


def test_replies_that_are_masked_have_the_probabilities_of_their_tokens_among_those_allowed():
    """The replies are 7 9, 7 8, 6 9: 7 to 6 is 0.2 to 0.6, and behind 7, 9 to 8 is 0.1 to 0.4."""
    logs = [[math.log(value) for value in pair] for pair in ((0.2, 0.1), (0.2, 0.4), (0.6, 0.001))]
    found = masked_probabilities([(7, 9), (7, 8), (6, 9)], logs)
    assert found == pytest.approx([0.25 * 0.2, 0.25 * 0.8, 0.75])
