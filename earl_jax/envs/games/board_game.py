# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Two-player board games of OpenSpiel as environments; their rules, our text.

A move is its OpenSpiel action number in decimal ("4"): one notation for every game, one token for
most. An episode of Tic-Tac-Toe, the policy second:

    environment: tic_tac_toe. you play o. moves are 0 to 8. x plays 4.
    policy:      0
    environment: 5
    policy:      3

In self-play the policy is both sides, each in a conversation of its own, such as that of o here.
"""

import math
import random

import pyspiel

from earl_jax.envs.environment import Start, StepResult, illegal_reply
from earl_jax.envs.games.minimax import best_moves
from earl_jax.envs.games.openspiel import load_game
from earl_jax.settings.errors import InputError, check_choice

ROLES = ("x", "o")
# What the policy reads when the rules give it another turn before the opponent's (dots_and_boxes).
MOVE_AGAIN = "again"
_MCTS_SIMULATIONS = 50
# UCT's exploration constant, the default of OpenSpiel's own MCTS example.
_UCT_C = 2.0
_MCTS_MEMORY_MB = 64


class BoardGame:
    """One episode of a game, in which the policy plays x where `index` is even, else o.

    `game` is any OpenSpiel name that `games.load_game` accepts, parameters allowed. `opponent` is
    "random" (uniform over legal moves), "mcts" (`mcts_simulations` random rollouts a move),
    "minimax" (uniform over the moves that are best against exact play, tic_tac_toe only) or "self":
    the policy plays both sides. An opponent's moves depend on `seed` and the replies alone. The
    reward is OpenSpiel's return at the end of the
    game and 0 before, or `illegal_reward` for a reply that is not exactly the text of a legal move,
    which ends the episode. `show_board` adds OpenSpiel's drawing of the board to every message.
    With `mask_illegal` the policy can sample legal moves only.

    It reports win, draw, loss and illegal, and the wins of its side (win_as_x, win_as_o). In
    self-play each side has its own reward, 0 where the other one's reply is illegal, and draw,
    illegal, win_as_x and win_as_o are reported.

    Raises ValueError for arguments that cannot be, RuntimeError for calls out of order.
    """

    plural = "games"

    def __init__(
        self,
        *,
        game: str = "tic_tac_toe",
        opponent: str = "random",
        mcts_simulations: int = _MCTS_SIMULATIONS,
        illegal_reward: float = -1.0,
        show_board: bool = False,
        mask_illegal: bool = False,
        seed: int = 0,
        index: int = 0,
    ):
        self._game = load_game(game)
        check_choice(opponent, ("random", "mcts", "minimax", "self"), "opponent")
        if mcts_simulations < 1:
            raise InputError(f"mcts_simulations is {mcts_simulations}; it must be at least 1")
        if opponent != "mcts" and mcts_simulations != _MCTS_SIMULATIONS:
            raise InputError(
                f"mcts_simulations is {mcts_simulations} but has no effect with opponent "
                f"{opponent!r}; set opponent to 'mcts' or leave it out"
            )
        check_illegal_reward(illegal_reward, mask_illegal)
        self._illegal_reward = illegal_reward
        self._show_board, self._mask_illegal = show_board, mask_illegal
        # None: both sides.
        self._player = None if opponent == "self" else index % 2
        # The word keeps the opponent apart from a policy that draws its moves from Random(seed).
        self._rng = random.Random(f"opponent {seed}")
        self._state = self._game.new_initial_state()
        self._started = False
        self._done = False
        self._bot = self._mcts(mcts_simulations) if opponent == "mcts" else None
        self._best_moves = best_moves(game) if opponent == "minimax" else None
        # Players that have had a message, and moves that the other side has yet to be shown.
        self._met: set[int] = set()
        self._untold: list[str] = []

    def start(self) -> Start:
        """Opens the game, and plays the opponent's first move if the opponent begins."""
        if self._started:
            raise RuntimeError("start() was called twice; an environment plays one episode")
        self._started = True
        self._untold = self._play_opponent()
        if self._state.is_terminal():
            raise RuntimeError(
                f"{self._game} ended before the policy could move; choose other parameters"
            )
        role = ROLES[self._state.current_player()]
        names = ("win", "draw", "loss", "illegal", f"win_as_{role}")
        if self._player is None:
            names = ("draw", "illegal", *(f"win_as_{role}" for role in ROLES))
        outcomes: dict[str, float] = {name: 0.0 for name in names}
        return Start(text=self._news(), role=role, choices=self._choices(), metrics=outcomes)

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
            return illegal_reply(reply, self._illegal_reward, "a legal move")
        player = self._state.current_player()
        self._state.apply_action(moves[reply])
        self._untold += [reply] if self._player is None else self._play_opponent()
        if self._state.is_terminal():
            self._done = True
            return self._outcome(player)
        mover = self._state.current_player()
        moves_again = self._player is None and mover == player
        return StepResult(
            text=self._with_board(MOVE_AGAIN) if moves_again else self._news(),
            reward=0.0,
            done=False,
            choices=self._choices(),
            role="" if mover == player else ROLES[mover],
        )

    def legal_replies(self) -> list[str]:
        """Returns the replies that `step` would accept now; () before `start` and after the end."""
        if not self._started or self._done:
            return []
        return [str(action) for action in self._state.legal_actions()]

    def all_replies(self) -> list[str]:
        """Returns every reply that is legal in some position of this game."""
        return [str(action) for action in range(self._game.num_distinct_actions())]

    def all_choices(self) -> list[str]:
        """Returns every reply that the policy may be limited to; none unless `mask_illegal`."""
        return self.all_replies() if self._mask_illegal else []

    def example_reply(self, rng: random.Random) -> str:
        """Returns one of the legal replies, all equally likely."""
        return rng.choice(self.legal_replies())

    def _mcts(self, simulations: int) -> pyspiel.MCTSBot:
        seed = self._rng.getrandbits(31)
        return pyspiel.MCTSBot(
            self._game,
            pyspiel.RandomRolloutEvaluator(n_rollouts=1, seed=seed),
            uct_c=_UCT_C,
            max_simulations=simulations,
            max_memory_mb=_MCTS_MEMORY_MB,
            solve=True,
            seed=seed,
            verbose=False,
        )

    def _choices(self) -> tuple[str, ...]:
        return tuple(self.legal_replies()) if self._mask_illegal else ()

    def _news(self) -> str:
        """Returns the message to the side on the move: the other's moves that it does not know."""
        moves, self._untold = " ".join(self._untold), []
        player = self._state.current_player()
        if player in self._met:
            return self._with_board(moves or MOVE_AGAIN)
        self._met.add(player)
        name, last_move = str(self._game).removesuffix("()"), self._game.num_distinct_actions() - 1
        text = f"{name}. you play {ROLES[player]}. moves are 0 to {last_move}."
        return self._with_board(text + (f" {ROLES[1 - player]} plays {moves}." if moves else ""))

    def _play_opponent(self) -> list[str]:
        """Plays until the policy is to move or the game is over; returns the moves as text."""
        moves: list[str] = []
        if self._player is None:
            return moves
        while not self._state.is_terminal() and self._state.current_player() != self._player:
            if self._bot is not None:
                action = self._bot.step(self._state)
            elif self._best_moves is not None:
                action = self._rng.choice(self._best_moves[str(self._state)])
            else:
                action = self._rng.choice(self._state.legal_actions())
            self._state.apply_action(action)
            moves.append(str(action))
        return moves

    def _outcome(self, player: int) -> StepResult:
        """Returns the result of the game, in which `player` made the policy's last move."""
        returns = self._state.returns()
        reward, other = float(returns[player]), ROLES[1 - player]
        winner = ROLES[player] if reward > 0 else other if reward < 0 else ""
        if self._player is None:
            reason = f"win_as_{winner}" if winner else "draw"
            return StepResult(
                reward=reward,
                side_rewards={other: float(returns[1 - player])},
                done=True,
                stop_reason=reason,
                metrics={reason: 1.0},
            )
        reason = "win" if reward > 0 else "loss" if reward < 0 else "draw"
        metrics = {reason: 1.0} | ({f"win_as_{winner}": 1.0} if reward > 0 else {})
        return StepResult(reward=reward, done=True, stop_reason=reason, metrics=metrics)

    def _with_board(self, text: str) -> str:
        return f"{text}\n{self._state}" if self._show_board else text


def check_illegal_reward(illegal_reward: float, mask_illegal: bool) -> None:
    """Raises ValueError for a reward that is not finite, or that nothing can earn."""
    if not math.isfinite(illegal_reward):
        raise InputError(f"illegal_reward is {illegal_reward}; it must be finite")
    if mask_illegal and illegal_reward != -1.0:
        raise InputError(
            f"illegal_reward is {illegal_reward} but has no effect with mask_illegal; leave it out"
        )
