# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The contract between an environment and whoever plays it: text, one object per episode."""

import dataclasses
import difflib
import json
import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from earl_jax.envs.games import load_game

# Why an episode ended. The first four are the environment's to give, the others its caller's.
WIN = "win"
DRAW = "draw"
LOSS = "loss"
ILLEGAL = "illegal"
TURN_TOO_LONG = "turn_too_long"
EPISODE_TOO_LONG = "episode_too_long"
ABORTED = "aborted"
ENVIRONMENT_ERROR = "environment_error"
ENVIRONMENT_TIMEOUT = "environment_timeout"
UNENCODABLE = "unencodable"

Author = Literal["environment", "policy"]
ROLES = ("system", "user", "tool")
NAMES = ("board_game", "trail")
OPPONENTS = ("random", "mcts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """What an environment says as one of ROLES; "tool" is the response to a call of the policy's.

    `call_id` names that call, for chat templates that want it.
    """

    role: str
    text: str
    call_id: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The first words to the policy, and the side that it plays ("x", "o").

    Either `text`, said as a user, or `messages`. `choices` are the only replies that the policy may
    give, () where it may say anything: then only the tokens that the tokenizer writes them with,
    and the end of turn behind, can be sampled. Or `allowed_token_ids`, of the policy's tokenizer,
    are the only tokens that its reply is made of, beside the end of turn. `tools` describes the
    functions that the policy may call, each as JSON that the chat template shows:

        {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}
    """

    text: str = ""
    role: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    choices: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """What came of one reply.

    `text` is the next message to the policy, said as a user, or `messages` are the next ones; both
    are empty if `done`. `choices` are the only replies to these, as in `Start`, or
    `allowed_token_ids` their only tokens. `reward` is for this reply alone. `stop_reason` is a word
    such as "win", given exactly if `done`; `detail` is for people.
    """

    text: str = ""
    reward: float
    done: bool
    stop_reason: str = ""
    detail: str = ""
    messages: tuple[Message, ...] = ()
    choices: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()


class Environment(Protocol):
    """One episode. Call `start` once, then `step` until `done`; then throw the object away.

    Both may raise anything and take any time: `pool.EnvironmentPool` turns that into data. The same
    object is never called from two threads at once, but successive calls may come from different
    threads.
    """

    def start(self) -> Start:
        """Opens the episode."""
        ...

    def step(self, reply: str) -> StepResult:
        """Answers the policy's reply."""
        ...


def check_start(result: object) -> Start:
    """Returns `result` if it is a well-formed Start; else raises TypeError or ValueError."""
    if not isinstance(result, Start):
        raise TypeError(f"start() must return a Start; got {_brief(result)}")
    _check_text("Start.text", result.text)
    _check_text("Start.role", result.role)
    _check_messages("Start", result)
    _check_allowed("Start", result)
    if not result.text and not result.messages:
        raise ValueError("Start.text is empty; the policy needs a first message")
    if not isinstance(result.tools, tuple):
        raise TypeError(f"Start.tools must be a tuple; got {_brief(result.tools)}")
    for tool in result.tools:
        if not isinstance(tool, Mapping):
            raise TypeError(f"Start.tools must hold mappings; got {_brief(tool)}")
        try:
            json.dumps(tool)
        except (TypeError, ValueError) as error:
            raise TypeError(f"Start.tools must hold what JSON can say: {error}") from error
    return result


def check_step(result: object) -> StepResult:
    """Returns `result` if it is a well-formed StepResult; else raises TypeError or ValueError."""
    if not isinstance(result, StepResult):
        raise TypeError(f"step() must return a StepResult; got {_brief(result)}")
    _check_text("StepResult.text", result.text)
    _check_text("StepResult.stop_reason", result.stop_reason)
    _check_text("StepResult.detail", result.detail)
    if not isinstance(result.done, bool):
        raise TypeError(f"StepResult.done must be a bool; got {_brief(result.done)}")
    if isinstance(result.reward, bool) or not isinstance(result.reward, numbers.Real):
        raise TypeError(f"StepResult.reward must be a number; got {_brief(result.reward)}")
    if not math.isfinite(result.reward):
        raise ValueError(f"StepResult.reward must be finite; got {result.reward}")
    if result.done != bool(result.stop_reason):
        raise ValueError(
            f"StepResult.stop_reason must be given exactly if done; got done={result.done}, "
            f"stop_reason={_brief(result.stop_reason)}"
        )
    _check_messages("StepResult", result)
    _check_allowed("StepResult", result)
    content = (result.text, result.messages, result.choices, result.allowed_token_ids)
    if result.done and any(content):
        raise ValueError(
            "StepResult.text, messages, choices and allowed_token_ids must be empty when done, "
            f"nobody reads them; got {_brief(result.text)}, {len(result.messages)} messages, "
            f"{len(result.choices)} choices and {len(result.allowed_token_ids)} tokens"
        )
    return result


def _check_messages(name: str, result: Start | StepResult) -> None:
    if not isinstance(result.messages, tuple):
        raise TypeError(f"{name}.messages must be a tuple; got {_brief(result.messages)}")
    if result.messages and result.text:
        raise ValueError(
            f"{name} has both a text and messages; say it as one: {_brief(result.text)}"
        )
    for message in result.messages:
        if not isinstance(message, Message):
            raise TypeError(f"{name}.messages must hold Message; got {_brief(message)}")
        _check_text("Message.text", message.text)
        _check_text("Message.call_id", message.call_id)
        if message.role not in ROLES:
            raise ValueError(
                f"Message.role is {_brief(message.role)}; it must be one of {', '.join(ROLES)}"
            )


def _check_allowed(name: str, result: Start | StepResult) -> None:
    for field in ("choices", "allowed_token_ids"):
        if not isinstance(getattr(result, field), tuple):
            given = _brief(getattr(result, field))
            raise TypeError(f"{name}.{field} must be a tuple; got {given}")
    for choice in result.choices:
        _check_text(f"{name}.choices", choice)
    for token in result.allowed_token_ids:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise TypeError(f"{name}.allowed_token_ids must hold int; got {_brief(token)}")
    if result.choices and result.allowed_token_ids:
        raise ValueError(
            f"{name} has both choices and allowed_token_ids, which each say what the reply may be; "
            "give one of them"
        )


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{field} must be a str; got {_brief(value)}")


def _brief(value: object) -> str:
    # A garbage object's own repr may raise; the type alone is enough to find the mistake then.
    if isinstance(value, str | int | float | bool | None):
        return repr(value)[:80]
    return f"a {type(value).__name__}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrailConfig:
    """A trail (envs/trail.py) of `num_steps` steps, each to one of `num_stones` stones.

    With `longer_every` above 0 a run's first trails have `first_steps` steps, and one more for each
    `longer_every` episodes that were played: contexts lengthen then whatever the policy does.
    """

    num_stones: int = 8
    num_steps: int = 60
    first_steps: int = 1
    longer_every: int = 0

    def at(self, episode: int) -> "TrailConfig":
        """The trail of an episode: with 4 `first_steps`, and longer every 10, episode 19 has 5."""
        if not self.longer_every:
            return self
        grown = self.first_steps + episode // self.longer_every
        return dataclasses.replace(self, num_steps=min(grown, self.num_steps))

    def validate(self) -> None:
        """Raises ValueError that names the field, what it holds and what it may hold."""
        fields = (("num_stones", 2), ("num_steps", 1), ("first_steps", 1), ("longer_every", 0))
        for field, least in fields:
            if getattr(self, field) < least:
                raise ValueError(
                    f"config.env.trail.{field} is {getattr(self, field)}; it must be at least "
                    f"{least}"
                )
        if not self.longer_every and self.first_steps != 1:
            raise ValueError(
                f"config.env.trail.first_steps is {self.first_steps}, and without "
                "config.env.trail.longer_every it has no effect; set that above 0, or remove it"
            )
        if self.first_steps > self.num_steps:
            raise ValueError(
                f"config.env.trail.first_steps is {self.first_steps}; it must be at most "
                f"config.env.trail.num_steps ({self.num_steps})"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """What is played, against whom, and how environments are run.

    `name` is "board_game" or "trail". Of board games, `game` is any OpenSpiel name that
    `games.load_game` accepts, parameters allowed; `opponent` is "random" (uniform over legal moves)
    or "mcts" (`mcts_simulations` random rollouts per move); `show_board` adds OpenSpiel's drawing
    of the board to every message. With `mask_illegal` the policy can sample legal moves only, in
    training and in evaluation games. `timeout_s` bounds one call of an environment, `num_workers`
    is the number of threads that make such calls.
    """

    name: str = "board_game"
    game: str = "tic_tac_toe"
    opponent: str = "random"
    mcts_simulations: int = 50
    illegal_reward: float = -1.0
    show_board: bool = False
    mask_illegal: bool = False
    timeout_s: float = 10.0
    num_workers: int = 2
    trail: TrailConfig = TrailConfig()

    @property
    def title(self) -> str:
        """What is played, for people."""
        return self.game if self.name == "board_game" else self.name

    def validate(self) -> None:
        """Raises ValueError that names the field, what it holds and what it may hold."""
        _check_choice("name", self.name, NAMES)
        load_game(self.game)
        self.trail.validate()
        _check_choice("opponent", self.opponent, OPPONENTS)
        if self.mcts_simulations < 1:
            raise ValueError(
                f"config.env.mcts_simulations is {self.mcts_simulations}; it must be at least 1"
            )
        if self.opponent != "mcts" and self.mcts_simulations != EnvConfig.mcts_simulations:
            raise ValueError(
                f"config.env.mcts_simulations is {self.mcts_simulations} but has no effect with "
                f"config.env.opponent={self.opponent!r}; set the opponent to 'mcts' or leave it out"
            )
        if not math.isfinite(self.illegal_reward):
            raise ValueError(
                f"config.env.illegal_reward is {self.illegal_reward}; it must be finite"
            )
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(
                f"config.env.timeout_s is {self.timeout_s}; it must be a positive number of seconds"
            )
        if self.num_workers < 1:
            raise ValueError(f"config.env.num_workers is {self.num_workers}; it must be at least 1")


def _check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), allowed, n=1)
    raise ValueError(
        f"config.env.{field} is {value!r}; it must be {' or '.join(map(repr, allowed))}"
        + (f"; did you mean {near[0]!r}?" if near else "")
    )
