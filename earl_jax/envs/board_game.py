# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Any two-player board game of OpenSpiel as an environment; its rules, our text.

A move is its OpenSpiel action number in decimal ("4"): one notation for every game, one token for
most. An episode of Tic-Tac-Toe, the policy second:

    environment: tic_tac_toe. you play o. moves are 0 to 8. x plays 4.
    policy:      0
    environment: 5
    policy:      3
"""

import random

import pyspiel

from earl_jax.envs.environment import (
    DRAW,
    ILLEGAL,
    LOSS,
    WIN,
    EnvConfig,
    Start,
    StepResult,
)

ROLES = ("x", "o")
# What the policy reads when the rules give it another turn before the opponent's (dots_and_boxes).
MOVE_AGAIN = "again"
# UCT's exploration constant, the default of OpenSpiel's own MCTS example.
_UCT_C = 2.0
_MCTS_MEMORY_MB = 64


class BoardGame:
    """One episode of `game` with the policy as `player` (0 is "x", 1 is "o"; not always the first).

    The opponent's moves depend on `seed` and the replies alone. The reward is OpenSpiel's return at
    the end of the game and 0 before, or `config.illegal_reward` for a reply that is not exactly the
    text of a legal move, which ends the episode.

    Raises ValueError for another player, RuntimeError for calls out of order.
    """

    def __init__(self, game: pyspiel.Game, config: EnvConfig, *, player: int, seed: int):
        if player not in (0, 1):
            raise ValueError(f"player is {player!r}; it must be 0 ('x') or 1 ('o')")
        self._game = game
        self._config = config
        self._player = player
        # The word keeps the opponent apart from a policy that draws its moves from Random(seed).
        self._rng = random.Random(f"opponent {seed}")
        self._state = game.new_initial_state()
        self._started = False
        self._done = False
        self._bot = None
        if config.opponent == "mcts":
            bot_seed = self._rng.getrandbits(31)
            evaluator = pyspiel.RandomRolloutEvaluator(n_rollouts=1, seed=bot_seed)
            self._bot = pyspiel.MCTSBot(
                game,
                evaluator,
                uct_c=_UCT_C,
                max_simulations=config.mcts_simulations,
                max_memory_mb=_MCTS_MEMORY_MB,
                solve=True,
                seed=bot_seed,
                verbose=False,
            )

    def start(self) -> Start:
        """Opens the game, and plays the opponent's first move if the opponent begins."""
        if self._started:
            raise RuntimeError("start() was called twice; an environment plays one episode")
        self._started = True
        role, other = ROLES[self._player], ROLES[1 - self._player]
        name = str(self._game).removesuffix("()")
        last_move = self._game.num_distinct_actions() - 1
        text = f"{name}. you play {role}. moves are 0 to {last_move}."
        moves = self._play_opponent()
        if self._state.is_terminal():
            raise RuntimeError(f"{name} ended before {role} could move; choose other parameters")
        if moves:
            text += f" {other} plays {' '.join(moves)}."
        return Start(text=self._with_board(text), role=role, choices=self._choices())

    def step(self, reply: str) -> StepResult:
        """Plays the reply and the opponent's answer; the text is the answer alone."""
        if not self._started:
            raise RuntimeError("step() was called before start()")
        if self._done:
            raise RuntimeError("step() was called after the end; an environment plays one episode")
        # The reply is compared as text, never converted: int() accepts " 4", "+4", "0_4" and "٤".
        moves = {str(action): action for action in self._state.legal_actions()}
        if reply not in moves:
            self._done = True
            return StepResult(
                text="",
                reward=self._config.illegal_reward,
                done=True,
                stop_reason=ILLEGAL,
                detail=f"{reply!r:.80} is not a legal move",
            )
        self._state.apply_action(moves[reply])
        answer = self._play_opponent()
        if self._state.is_terminal():
            self._done = True
            return self._outcome()
        text = self._with_board(" ".join(answer) or MOVE_AGAIN)
        return StepResult(text=text, reward=0.0, done=False, choices=self._choices())

    def legal_replies(self) -> list[str]:
        """The replies that `step` would accept now; empty before `start` and after the end."""
        if not self._started or self._done:
            return []
        return [str(action) for action in self._state.legal_actions()]

    def random_reply(self, rng: random.Random) -> str:
        """One of the legal replies, all of them alike."""
        return rng.choice(self.legal_replies())

    def _choices(self) -> tuple[str, ...]:
        return tuple(self.legal_replies()) if self._config.mask_illegal else ()

    def _play_opponent(self) -> list[str]:
        """Plays until the policy is to move or the game is over; returns the moves as text."""
        moves = []
        while not self._state.is_terminal() and self._state.current_player() != self._player:
            if self._bot is None:
                action = self._rng.choice(self._state.legal_actions())
            else:
                action = self._bot.step(self._state)
            self._state.apply_action(action)
            moves.append(str(action))
        return moves

    def _outcome(self) -> StepResult:
        reward = float(self._state.returns()[self._player])
        reason = WIN if reward > 0 else LOSS if reward < 0 else DRAW
        return StepResult(text="", reward=reward, done=True, stop_reason=reason)

    def _with_board(self, text: str) -> str:
        return f"{text}\n{self._state}" if self._config.show_board else text
