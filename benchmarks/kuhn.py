# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The exploitability of a policy that learned Kuhn poker in self-play.

uv run python -m benchmarks.kuhn --workdir=DIR   # a run of configs/kuhn_self_play_cpu.py

Scores both replies in each of the game's 12 information states by a full forward pass of the newest
checkpoint, and prints the probability of a bet beside Kuhn's equilibria, and NashConv by
OpenSpiel's enumeration.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyspiel

from benchmarks.exact import open_policy, prompt_ids, start_jax_of
from benchmarks.pages import parser_of, table
from earl_jax.envs.games.kuhn_poker import Turns, kuhn_poker, turns_of
from earl_jax.envs.text.chat import ChatRenderer

REPLIES = ("0", "1")
# Kuhn's equilibria (1950), by the probability alpha <= 1/3 with which the first side bets a 0.
EQUILIBRIA = {"0": "a", "1": "0", "2": "3a", "0pb": "0", "1pb": "a + 1/3", "2pb": "1"}
EQUILIBRIA |= {"0b": "0", "1b": "1/3", "2b": "1", "0p": "1/3", "1p": "0", "2p": "1"}


def information_states() -> dict[str, Turns]:
    """Returns the 12 states that a side can tell apart: OpenSpiel's name, and its conversation.

    Example: "1pb" is the first side with card 1 that passed, and the other one bet.
    """
    found: dict[str, Turns] = {}

    def visit(state: pyspiel.State) -> Iterator[pyspiel.State]:
        yield state
        for action in state.legal_actions():
            yield from visit(state.child(action))

    for state in visit(kuhn_poker().new_initial_state()):
        if state.is_player_node():
            found[state.information_state_string()] = turns_of(state)
    return found


def nash_conv(bets: Mapping[str, float]) -> float:
    """Returns the sum of what each player can win more by a best response to the other.

    0 at an equilibrium; the exploitability is half of it. By OpenSpiel's enumeration of the game.

    Args:
        bets: the probability of a bet ("1") in each of `information_states`.
    """
    policy = {name: [(0, 1.0 - bet), (1, bet)] for name, bet in bets.items()}
    return float(pyspiel.nash_conv(kuhn_poker(), policy))


def main() -> None:
    """Prints the table and NashConv."""
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--workdir", type=Path, required=True, help="the folder of a run")
    workdir = parser.parse_args().workdir
    start_jax_of(workdir)
    run, score = open_policy(workdir)
    renderer, states = ChatRenderer(run.origin.tokenizer), information_states()
    pairs = [
        (prompt_ids(renderer, turns), list(renderer.reply(reply)))
        for turns in states.values()
        for reply in REPLIES
    ]
    legal = np.exp([sum(each) for each in score(pairs)]).reshape(-1, 2)
    bets = dict(zip(states, (legal[:, 1] / legal.sum(axis=1)).tolist(), strict=True))
    rows = [
        {"state": name, "bets": bet, "equilibria": EQUILIBRIA[name], "legal": float(both)}
        for (name, bet), both in zip(bets.items(), legal.sum(axis=1), strict=True)
    ]
    print(table(rows))
    uniform = nash_conv(dict.fromkeys(bets, 0.5))
    print(f"\nNashConv {nash_conv(bets):.3f} (uniform play {uniform:.3f}, an equilibrium 0)")


if __name__ == "__main__":
    main()
