# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The OpenSpiel games that can be played here, and their loading."""

import difflib
import functools

import pyspiel

from earl_jax.settings.errors import InputError

_REQUIRED = (
    ("dynamics", pyspiel.GameType.Dynamics.SEQUENTIAL),
    ("information", pyspiel.GameType.Information.PERFECT_INFORMATION),
    ("chance_mode", pyspiel.GameType.ChanceMode.DETERMINISTIC),
    ("utility", pyspiel.GameType.Utility.ZERO_SUM),
    ("reward_model", pyspiel.GameType.RewardModel.TERMINAL),
)


def playable_games() -> tuple[str, ...]:
    """Returns the names of the OpenSpiel games that `load_game` accepts with default parameters."""
    return tuple(
        game_type.short_name
        for game_type in pyspiel.registered_games()
        if game_type.default_loadable and not _misfits(game_type)
    )


@functools.lru_cache(maxsize=32)
def load_game(name: str) -> pyspiel.Game:
    """Loads an OpenSpiel game once per process; the object is immutable and shared by threads.

    `name` may carry parameters, as in "connect_four(rows=5,columns=5)". Accepted are two-player,
    sequential, deterministic, zero-sum games of perfect information with the reward at the end.

    Raises ValueError for an unknown name, refused parameters, or another kind of game.
    """
    # OpenSpiel prints its 126 names to stderr for an unknown one, so ask before loading.
    short_name = name.split("(", 1)[0]
    if short_name not in pyspiel.registered_names():
        raise InputError(f"game is {name!r}: no such game in OpenSpiel; {_hint(short_name)}")
    try:
        game = pyspiel.load_game(name)
        first = game.new_initial_state()
        num_players = game.num_players()
        playable = first.current_player() in (0, 1) and bool(first.legal_actions())
    except (pyspiel.SpielError, ValueError, MemoryError) as error:
        raise InputError(
            f"game is {name!r}, which OpenSpiel refuses ({error}). Parameters are "
            "written as in 'connect_four(rows=5,columns=5)'"
        ) from error
    misfits = _misfits(game.get_type())
    if num_players != 2:
        misfits = (*misfits, f"{num_players} player(s)")
    if misfits:
        raise InputError(
            f"game is {name!r}, a game with {', '.join(misfits)}; it must be "
            "two-player, sequential, deterministic, zero-sum and of perfect information: "
            f"{', '.join(playable_games())}"
        )
    if not playable:
        # Seen with chess(chess960=true), where chance moves first, and connect_four(rows=0).
        raise InputError(
            f"game is {name!r}: no player can move in its first position; change its parameters"
        )
    return game


def _misfits(game_type: pyspiel.GameType) -> tuple[str, ...]:
    """Returns the unsupported properties of a game, in OpenSpiel's words."""
    found = [
        getattr(game_type, field).name
        for field, required in _REQUIRED
        if getattr(game_type, field) != required
    ]
    if not game_type.min_num_players <= 2 <= game_type.max_num_players:
        found.append(f"{game_type.min_num_players} to {game_type.max_num_players} players")
    return tuple(name.lower().replace("_", " ") for name in found)


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name, playable_games(), n=2)
    if near:
        return f"did you mean {' or '.join(repr(n) for n in near)}?"
    return f"playable are {', '.join(playable_games())}"
