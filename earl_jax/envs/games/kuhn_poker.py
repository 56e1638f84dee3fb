# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Kuhn poker of OpenSpiel, whose cards are hidden.

Each of two players has one of the cards 0, 1 and 2. Who passes behind a bet pays 1, else the higher
card wins: 2 where a bet was called, 1 otherwise. The first player passes, the second bets:

    environment: kuhn_poker. you play first. your card is 1. 0 passes, 1 bets.
    policy:      0
    environment: 1
    policy:      1
"""

import functools
import random

import pyspiel

from earl_jax.envs.environment import Author, Start, StepResult, illegal_reply
from earl_jax.envs.games.board_game import check_illegal_reward
from earl_jax.settings.errors import check_choice

ROLES = ("first", "second")
_NUM_CARDS = 2

# A side's turns so far: a message of the environment, then replies and messages in turns.
Turns = tuple[tuple[Author, str], ...]


class KuhnPoker:
    """One deal, in which the policy plays first where `index` is even, else second.

    `opponent` is "random" (passes and bets with equal probability), or "self": the policy plays
    both sides. Cards, and a random opponent's moves, depend on `seed` and the replies alone. A side
    is shown its own card and the moves. The reward is what it wins, or `illegal_reward` for a reply
    that is not exactly "0" or "1", which ends the episode; in self-play the other side then has 0.
    With `mask_illegal` the policy can sample these two only.

    It reports illegal, and what its side wins (won_as_first, won_as_second); in self-play what the
    first side wins.

    Raises ValueError for arguments that cannot be, RuntimeError for calls out of order.
    """

    plural = "games"

    def __init__(
        self,
        *,
        opponent: str = "random",
        illegal_reward: float = -1.0,
        mask_illegal: bool = False,
        seed: int = 0,
        index: int = 0,
    ):
        check_choice(opponent, ("random", "self"), "opponent")
        check_illegal_reward(illegal_reward, mask_illegal)
        self._illegal_reward, self._mask_illegal = illegal_reward, mask_illegal
        # None: both sides.
        self._player = None if opponent == "self" else index % 2
        # The word keeps the deal apart from a policy that draws its moves from Random(seed).
        self._rng = random.Random(f"deal {seed}")
        self._state = kuhn_poker().new_initial_state()
        self._done = False

    def start(self) -> Start:
        """Deals, and plays the opponent's first move if the opponent begins."""
        if not self._state.is_chance_node():
            raise RuntimeError("start() was called twice; an environment plays one episode")
        self._play_others()
        role = ROLES[self._state.current_player()]
        return Start(
            text=turns_of(self._state)[-1][1],
            role=role,
            choices=tuple(self.all_choices()),
            metrics={"illegal": 0.0, f"won_as_{role}": 0.0},
        )

    def step(self, reply: str) -> StepResult:
        """Plays the reply, and the opponent's answer."""
        if self._done or self._state.is_chance_node():
            raise RuntimeError("step() was called before start(), or after the end")
        if reply not in self.legal_replies():
            self._done = True
            return illegal_reply(reply, self._illegal_reward, "a legal move")
        player = self._state.current_player()
        self._state.apply_action(int(reply))
        self._play_others()
        if self._state.is_terminal():
            self._done = True
            return self._outcome(player)
        mover = self._state.current_player()
        return StepResult(
            text=turns_of(self._state)[-1][1],
            role="" if mover == player else ROLES[mover],
            reward=0.0,
            done=False,
            choices=tuple(self.all_choices()),
        )

    def legal_replies(self) -> list[str]:
        """Returns the replies that `step` would accept now."""
        return [] if self._done else self.all_replies()

    def all_replies(self) -> list[str]:
        """Returns every reply that is legal in some state."""
        return ["0", "1"]

    def all_choices(self) -> list[str]:
        """Returns every reply that the policy may be limited to; none unless `mask_illegal`."""
        return self.all_replies() if self._mask_illegal else []

    def example_reply(self, rng: random.Random) -> str:
        """Returns one of the replies, both equally likely."""
        return rng.choice(self.legal_replies())

    def _play_others(self) -> None:
        """Deals, and plays until the policy is to move or the game is over."""
        while not self._state.is_terminal():
            is_chance = self._state.is_chance_node()
            if not is_chance and self._player in (None, self._state.current_player()):
                return
            self._state.apply_action(self._rng.choice(self._state.legal_actions()))

    def _outcome(self, player: int) -> StepResult:
        """Returns the result of the deal, in which `player` made the policy's last move."""
        returns = [float(value) for value in self._state.returns()]
        if self._player is None:
            other = 1 - player
            return StepResult(
                reward=returns[player],
                side_rewards={ROLES[other]: returns[other]},
                done=True,
                stop_reason=f"{ROLES[returns.index(max(returns))]}_wins",
                metrics={"won_as_first": returns[0]},
            )
        return StepResult(
            reward=returns[player],
            done=True,
            stop_reason="win" if returns[player] > 0 else "loss",
            metrics={f"won_as_{ROLES[player]}": returns[player]},
        )


@functools.cache
def kuhn_poker() -> pyspiel.Game:
    """Returns OpenSpiel's game of two players."""
    return pyspiel.load_game("kuhn_poker")


def turns_of(state: pyspiel.State) -> Turns:
    """Returns the conversation of the side on the move, whose last turn is a message to it."""
    player, history = state.current_player(), state.history()
    cards, moves = history[:_NUM_CARDS], history[_NUM_CARDS:]
    text = f"kuhn_poker. you play {ROLES[player]}. your card is {cards[player]}. 0 passes, 1 bets."
    text += f" first plays {moves[0]}." if player else ""
    turns: list[tuple[Author, str]] = [("environment", text)]
    for place, move in enumerate(moves[player:]):
        turns.append(("environment" if place % 2 else "policy", str(move)))
    return tuple(turns)
