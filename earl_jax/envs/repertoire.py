# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What can be played: the environment that a config names, and episodes of random legal replies."""

import dataclasses
import random

from earl_jax.envs.board_game import BoardGame
from earl_jax.envs.environment import Author, EnvConfig, Start
from earl_jax.envs.games import load_game
from earl_jax.envs.trail import Trail, all_stones


def make_environment(config: EnvConfig, *, seed: int, player: int) -> BoardGame | Trail:
    """A fresh episode of what is configured; a trail has one player, whatever `player` is."""
    if config.name == "trail":
        return Trail(config, seed=seed)
    return BoardGame(load_game(config.game), config, player=player, seed=seed)


def all_replies(config: EnvConfig) -> list[str]:
    """Every reply that is legal in some position of what is configured."""
    if config.name == "trail":
        return all_stones(config)
    return [str(action) for action in range(load_game(config.game).num_distinct_actions())]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A whole legal episode: the messages in order, `start.text` first, the policy's reply last."""

    start: Start
    turns: tuple[tuple[Author, str], ...]
    reward: float
    stop_reason: str


def demonstrate(environment: BoardGame | Trail, rng: random.Random) -> Demonstration:
    """Plays a fresh environment to its end with random replies, as the environment draws them.

    These are the examples of supervised warm-up. Those of board games teach which replies are
    legal, not which are good; those of a trail are right half the time.
    """
    start = environment.start()
    turns: list[tuple[Author, str]] = [("environment", start.text)]
    while True:
        reply = environment.random_reply(rng)
        turns.append(("policy", reply))
        result = environment.step(reply)
        if result.done:
            return Demonstration(
                start=start,
                turns=tuple(turns),
                reward=result.reward,
                stop_reason=result.stop_reason,
            )
        turns.append(("environment", result.text))


def demonstrated(config: EnvConfig) -> str:
    """What is demonstrated, for people."""
    if config.name == "trail":
        return "walks that are right half the time"
    return "games of random legal moves"


def game_corpus(config: EnvConfig, num_games: int, seed: int) -> list[str]:
    """Text to train a tokenizer on: every message of random games, and every move's number once.

    The sides alternate from game to game. The same arguments give the same list.
    """
    rng = random.Random(seed)
    texts = all_replies(config)
    for number in range(num_games):
        environment = make_environment(config, player=number % 2, seed=rng.getrandbits(63))
        texts.extend(text for _, text in demonstrate(environment, rng).turns)
    return texts
