# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Games of TextArena (arXiv 2504.11442): played alone, or by the policy on all sides."""

import contextlib
import difflib
import functools
import json
import random
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from earl_jax.envs.environment import Start, StepResult
from earl_jax.settings.errors import InputError
from earl_jax.settings.extras import import_extra

# Its games draw from the one generator of `random` and of numpy, whatever thread they run in.
_LOCK = threading.Lock()
_REFUSED = {
    "MarketEntryGame-v0": "it loops for ever where it has too few players",
    "ThreeCardMonte-v0": "it fails at replies that it should refuse",
    **dict.fromkeys(
        ("CharacterConclave-v0", "CharacterConclave-v0-long", "CharacterConclave-v0-extreme"),
        "it fails at replies that it should refuse",
    ),
}
_MOST_PLAYERS = 100


class TextArena:
    """An episode of one of TextArena's games, such as "GuessTheNumber-v0".

    The policy's replies are the game's actions, as the first message describes them. With more than
    one of `num_players` the policy plays all of them: each side has a conversation of its own, with
    what the game shows it. The reward comes at the end, as the game gives it to each side. What the
    game refuses is shown with its reason; a second refusal in a row ends most games. The metric
    `invalid` is the share of episodes that ended so. `settings` are keyword arguments of the game.

    Raises ValueError where textarena is not installed, for a game that it does not have, or that
    does not begin with these players and settings.
    """

    plural = "games"

    def __init__(
        self,
        *,
        game: str = "",
        num_players: int = 1,
        settings: Mapping[str, Any] = {},  # noqa: B006 - it is not changed
        seed: int = 0,
    ):
        _check_game(game, num_players, json.dumps(dict(settings)))
        self._game, self._num_players, self._settings = game, num_players, dict(settings)
        # As much as numpy takes, and other ones for evaluation tasks, whose seeds are large.
        self._seed = random.Random(f"game {seed}").getrandbits(32)
        self._random = _seeded(self._seed)
        self._env: Any = None
        self._player = 0

    def start(self) -> Start:
        """Begins the game and returns what it shows the first player."""
        if self._env is not None:
            raise RuntimeError("start() was called twice; an environment plays one episode")
        with self._own_random():
            self._env = _begun(self._game, self._num_players, self._settings, self._seed)
            self._player, text = _shown(self._env)
        return Start(text=text, role=self._role(self._player), metrics={"invalid": 0.0})

    def step(self, reply: str) -> StepResult:
        """Plays the reply."""
        before = self._player
        with self._own_random():
            done, _ = self._env.step(reply)
            if done:
                return self._end(before)
            self._player, text = _shown(self._env)
        role = "" if self._player == before else self._role(self._player)
        return StepResult(text=text, role=role, reward=0.0, done=False)

    def _end(self, last: int) -> StepResult:
        rewards, about = self._env.close()
        is_invalid = [bool(about[player].get("invalid_move")) for player in range(len(about))]
        return StepResult(
            reward=float(rewards[last]),
            side_rewards={
                self._role(player): float(reward)
                for player, reward in rewards.items()
                if player != last
            },
            done=True,
            stop_reason="invalid" if any(is_invalid) else "finished",
            detail=str(about[last].get("reason", "")),
            metrics={"invalid": float(any(is_invalid))},
        )

    def _role(self, player: int) -> str:
        return f"player_{player}" if self._num_players > 1 else ""

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        with _random(self._random):
            yield
            self._random = _random_state()


def _random_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


@contextlib.contextmanager
def _random(state: tuple[Any, Any]) -> Iterator[None]:
    """Gives games the random numbers from this state on, and then all others theirs."""
    with _LOCK:
        others = _random_state()
        random.setstate(state[0])
        np.random.set_state(state[1])
        try:
            yield
        finally:
            random.setstate(others[0])
            np.random.set_state(others[1])


def _seeded(seed: int) -> tuple[Any, Any]:
    return random.Random(seed).getstate(), np.random.RandomState(seed).get_state()


def _begun(game: str, num_players: int, settings: Mapping[str, Any], seed: int) -> Any:
    """Returns a game that has begun; of its variants the one that shows only what is new."""
    env = _library().make(f"{game}-raw", **settings)
    env.reset(num_players=num_players, seed=seed)
    return env


def _shown(env: Any) -> tuple[int, str]:
    """Returns the player on the move, and what is new to it, without its own reply."""
    player, messages = env.get_observation()
    texts = [
        # Some games give a kind of message for the author, which is the game then.
        f"[Player {author}] {text}" if author in range(_MOST_PLAYERS) else str(text)
        for author, text, _ in messages
        if author != player
    ]
    return player, "\n".join(texts).strip() or "It is your turn."


@functools.cache
def _check_game(game: str, num_players: int, settings: str) -> None:
    """Raises InputError where there is no such game; `settings` are JSON."""
    known = [name[:-4] for name in _library().envs.registration.ENV_REGISTRY if name[-4:] == "-raw"]
    if game not in known:
        near = difflib.get_close_matches(str(game), known, n=3) or ["GuessTheNumber-v0", "Nim-v0"]
        raise InputError(
            f"config.env.args.game is {game!r}, which is no game of textarena; there is "
            f"{', '.join(map(repr, near))}"
        )
    if game in _REFUSED:
        raise InputError(f"config.env.args.game is {game!r}: {_REFUSED[game]}")
    try:
        with _random(_seeded(0)):
            _shown(_begun(game, num_players, json.loads(settings), 0))
    except Exception as error:
        raise InputError(
            f"config.env.args.game is {game!r}, which does not begin with num_players="
            f"{num_players} and settings={settings}: {type(error).__name__}: {error}"
        ) from error


def _library() -> ModuleType:
    return import_extra("textarena", "textarena")
