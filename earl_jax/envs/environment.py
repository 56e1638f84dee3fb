# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The contract between an environment and whoever plays it: text, one object per episode."""

import collections
import dataclasses
import json
import math
import numbers
import random
import re
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from earl_jax.settings.errors import InputError

if TYPE_CHECKING:
    from earl_jax.envs.text.conversation import Conversation

# Why an episode ended that its environment did not end; an environment has words of its own.
PROMPT_TOO_LONG = "prompt_too_long"
TURN_TOO_LONG = "turn_too_long"
EPISODE_TOO_LONG = "episode_too_long"
TOO_MANY_TURNS = "too_many_turns"
ABORTED = "aborted"
# A task of a prompt alone is over with its turn.
REPLIED = "replied"
ENVIRONMENT_ERROR = "environment_error"
ENVIRONMENT_TIMEOUT = "environment_timeout"
UNENCODABLE = "unencodable"
# The model gave no numbers to sample the next token from.
NONFINITE_LOGITS = "nonfinite_logits"
STOPPED = (
    PROMPT_TOO_LONG,
    TURN_TOO_LONG,
    EPISODE_TOO_LONG,
    TOO_MANY_TURNS,
    ABORTED,
    ENVIRONMENT_ERROR,
    ENVIRONMENT_TIMEOUT,
    UNENCODABLE,
    NONFINITE_LOGITS,
)

# The largest number of float32, in which advantages are.
LARGEST_REWARD = 3.4028234e38

Author = Literal["environment", "policy"]
ROLES = ("system", "user", "tool")
# The role of a reply of the policy, in a whole conversation.
ASSISTANT = "assistant"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """A message of an environment in one of ROLES; "tool" is the response to a call of a tool.

    `call_id` names that call and `name` the tool, for chat templates that show them. Where the
    messages are a whole conversation, those of the role "assistant" are earlier replies, which the
    policy reads as any message.
    """

    role: str
    text: str
    call_id: str = ""
    name: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The first message to the policy.

    Either `text`, a user's message, or `messages`, a whole conversation. `choices` are the only
    replies that the policy may give, () where it may say anything: then only the tokens that the
    tokenizer writes them with, and the end of turn behind, can be sampled (see `Chooses`). Or
    `allowed_token_ids`, of the policy's tokenizer, are the only tokens that its reply is made of,
    beside the end of turn. `stop` are texts that end the reply, as config.rollout.stop_strings do.
    With `call` the reply has to begin with a call of this tool, of any tool if "": the beginning,
    as the chat template writes it, is read as the end of the message, and is in the reply's text.
    `role` is the side that the policy plays, where there are several; in self-play, the side that
    the message is for. `metrics` are the episode's until a step changes them, and `conversation`
    numbers this conversation (see `StepResult`). `request` names what this answers to, of an
    environment whose requests come in an order that depends on time (`Branches.repeat_requests`).
    `tools` describes the functions that the policy may call, each as JSON that the chat template
    shows:

        {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}
    """

    text: str = ""
    role: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    choices: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    call: str | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    conversation: int = 0
    request: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one reply.

    `text` is the next message to the policy, as a user, or `messages` are the next ones; both are
    empty if `done`. An empty `text` before that is an empty message, such as the output of a
    command that printed nothing. `choices` are the only replies to these, as in `Start`, or
    `allowed_token_ids` their only tokens, `stop` what ends them, and `call` what they begin with.
    `reward` is for this reply alone. `stop_reason` is a word such as "solved", given exactly if
    `done`; `detail` is for people.

    In self-play the policy plays several sides in turns. `role` is the side that the next message
    is for, "" for the one that replied. A side's context holds the messages for it and its own
    replies, of the other sides nothing. `side_rewards` are rewards by role of sides that did not
    reply now, each for the newest reply of its side; that of a side without a reply is no one's.
    `reply_rewards` are rewards of any replies by their names: "7.1" is the second reply of
    conversation 7. That of a reply that the episode does not have is no one's.

    `metrics` are numbers by name that are logged as means over episodes. Those of a step replace
    those of the same names before it, `Start.metrics` first; a mean is over the episodes that have
    the metric. So a game that reports `{"win": 0.0}` at its start and `{"win": 1.0}` where it is
    won has the fraction of all games as its mean, those that a limit cuts included.

    With `new_context` the policy forgets its context: `messages` are a whole conversation, which
    begins a new sample of the episode (see `ChatConfig`), with these `tools`. Where that is to be
    remembered, the one that begins has a `conversation` number of its own; messages without
    `new_context` go on with the conversation of this number. Each one is a sample, however often
    they take turns. `request` is as in `Start`.
    """

    text: str = ""
    reward: float
    done: bool
    stop_reason: str = ""
    detail: str = ""
    messages: tuple[Message, ...] = ()
    choices: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    call: str | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    role: str = ""
    side_rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reply_rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
    new_context: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    conversation: int = 0
    request: str = ""


def illegal_reply(reply: str, reward: float, wanted: str) -> StepResult:
    """Returns the end of a game by a reply that is not `wanted`, such as "a legal move"."""
    return StepResult(
        reward=reward,
        done=True,
        stop_reason="illegal",
        detail=f"{reply!r:.80} is not {wanted}",
        metrics={"illegal": 1.0},
    )


class Environment(Protocol):
    """One episode. Call `start` once, then `step` until `done`; then throw the object away.

    Both may raise anything and take any time: `pool.EnvironmentPool` turns that into data. The same
    object is never called from two threads at once, but successive calls may come from different
    threads.

    Either or both may be coroutines (`async def`). All coroutines run on one event loop, in one
    thread, so that any number of environments may wait at once, as for a network or a tool. One
    that computes or blocks holds up all others: make that a plain function, which gets a thread.
    """

    def start(self) -> Start | Awaitable[Start]:
        """Opens the episode."""
        ...

    def step(self, reply: str) -> StepResult | Awaitable[StepResult]:
        """Answers the policy's reply."""
        ...


@runtime_checkable
class OffersExamples(Protocol):
    """An environment that can say how a policy might reply: supervised steps learn from it.

    Its replies need not be good, only well-formed: config.train.sft_steps teach a policy with
    random weights what a reply looks like.
    """

    def example_reply(self, rng: random.Random) -> str:
        """Returns a reply to the newest message."""
        ...


class CountsTokens(Protocol):
    """An environment that gets the number of tokens of each turn, before `step`."""

    def count_tokens(self, context: int, reply: int) -> None:
        """Takes the number of tokens that the policy read, and that of its reply."""
        ...


class Branch(Environment, Protocol):
    """An environment of one reply, to the request of this name (see `Branches`)."""

    request: str


class Branches(Protocol):
    """An environment that may ask for several replies at once, each of a conversation of its own.

    While replies are under way, `branch` returns an environment for another one: of one reply,
    which `step` takes and is done with "replied". A reply of its own is given by `give` meanwhile,
    in place of `step`. Where none is under way any more, `next` returns what comes next. `give` and
    `next` are coroutines; any thread may use the others.

    In which order requests come may depend on time. A run notes the names of those that `start`,
    `step`, `next` and `branch` have answered to, and its replay has them taken in that order.
    """

    def repeat_requests(self, names: collections.deque[str]) -> None:
        """Is called before `start` in a replay: has it take these requests, and no others.

        It removes each name that it has taken.
        """
        ...

    def claim(self) -> bool:
        """Has `next` return a message that is there; False: there is none, or the end.

        The end is heard once all replies were given.
        """
        ...

    def branch(self) -> Branch | None:
        """Returns an environment for a reply that is asked for now; None: there is none."""
        ...

    def give(self, reply: str) -> Awaitable[None]:
        """Takes the policy's reply."""
        ...

    def next(self) -> Awaitable[StepResult]:
        """Returns the next message, or the end, with the reward since the last call."""
        ...


@runtime_checkable
class UsesConversation(Protocol):
    """An environment that counts tokens, or asks what the chat template can write."""

    def use_conversation(self, conversation: "Conversation") -> None:
        """Is called before `start` with a conversation of the policy's, which is nobody's."""
        ...


@runtime_checkable
class Chooses(Protocol):
    """An environment that knows all of its `choices` from the start."""

    def all_choices(self) -> Sequence[str]:
        """Returns every text that `choices` may hold in any episode; none: nothing is chosen."""
        ...


def check_start(result: object) -> Start:
    """Returns `result` if it is a well-formed Start; else raises ValueError."""
    if not isinstance(result, Start):
        raise InputError(f"start() must return a Start; got {_brief(result)}")
    _check_text("Start.text", result.text)
    _check_text("Start.role", result.role)
    _check_text("Start.request", result.request)
    _check_messages("Start", result)
    _check_allowed("Start", result)
    _check_text("Start.call", result.call or "")
    _check_metrics("Start", result)
    if not result.text and not result.messages:
        raise InputError("Start.text is empty; the policy needs a first message")
    _check_tools("Start", result)
    _check_conversation("Start", result)
    return result


def check_step(result: object) -> StepResult:
    """Returns `result` if it is a well-formed StepResult; else raises ValueError."""
    if not isinstance(result, StepResult):
        raise InputError(f"step() must return a StepResult; got {_brief(result)}")
    _check_text("StepResult.text", result.text)
    _check_text("StepResult.stop_reason", result.stop_reason)
    _check_text("StepResult.detail", result.detail)
    if not isinstance(result.done, bool):
        raise InputError(f"StepResult.done must be a bool; got {_brief(result.done)}")
    _check_text("StepResult.role", result.role)
    _check_text("StepResult.request", result.request)
    _check_reward("StepResult.reward", result.reward)
    _check_rewards("StepResult.side_rewards", "role", result.side_rewards)
    _check_rewards("StepResult.reply_rewards", "name", result.reply_rewards)
    strange = [name for name in result.reply_rewards if not re.fullmatch(r"[0-9]+\.[0-9]+", name)]
    if strange:
        raise InputError(
            f"StepResult.reply_rewards has the name {_brief(strange[0])}; it must be such as "
            "'7.1', the second reply of conversation 7"
        )
    if result.done != bool(result.stop_reason):
        raise InputError(
            f"StepResult.stop_reason must be given exactly if done; got done={result.done}, "
            f"stop_reason={_brief(result.stop_reason)}"
        )
    if result.stop_reason in STOPPED:
        raise InputError(
            f"StepResult.stop_reason is {result.stop_reason!r}; {', '.join(STOPPED)} are the run's "
            "own: choose another word, or raise an exception where the episode failed"
        )
    _check_messages("StepResult", result)
    _check_allowed("StepResult", result)
    _check_text("StepResult.call", result.call or "")
    _check_metrics("StepResult", result)
    _check_tools("StepResult", result)
    _check_new_context(result)
    _check_conversation("StepResult", result)
    if result.done and result.role:
        raise InputError(f"StepResult.role must be empty when done; got {_brief(result.role)}")
    fields = ("text", "messages", "choices", "allowed_token_ids", "stop")
    given = [name for name in fields if getattr(result, name)]
    if result.done and given:
        raise InputError(
            f"StepResult.{', '.join(given)} must be empty when done: nobody reads them any more"
        )
    return result


def _check_new_context(result: StepResult) -> None:
    if not isinstance(result.new_context, bool):
        raise InputError(f"StepResult.new_context must be a bool; got {_brief(result.new_context)}")
    if result.new_context and (not result.messages or result.role):
        raise InputError(
            "StepResult.new_context needs messages, the whole conversation, and no role: it is for "
            f"the side that replied; got {len(result.messages)} messages and the role "
            f"{_brief(result.role)}"
        )
    if result.tools and not result.new_context:
        raise InputError(
            "StepResult.tools are those of a new_context; an episode keeps the tools of its start"
        )


def _check_conversation(name: str, result: Start | StepResult) -> None:
    number = result.conversation
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**31:
        raise InputError(
            f"{name}.conversation is {_brief(number)}; it must be a number from 0 to {2**31 - 1}"
        )


def _check_reward(name: str, reward: float) -> None:
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real):
        raise InputError(f"{name} must be a number; got {_brief(reward)}")
    if not abs(reward) <= LARGEST_REWARD:
        raise InputError(
            f"{name} must be a number from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}; got {reward}"
        )


def _check_rewards(name: str, key: str, rewards: Mapping[str, float]) -> None:
    if not isinstance(rewards, Mapping):
        raise InputError(f"{name} must be a mapping; got {_brief(rewards)}")
    for each, reward in rewards.items():
        _check_text(f"a {key} in {name}", each)
        _check_reward(f"{name}[{each!r}]", reward)


def _check_tools(name: str, result: Start | StepResult) -> None:
    if not isinstance(result.tools, tuple):
        raise InputError(f"{name}.tools must be a tuple; got {_brief(result.tools)}")
    for tool in result.tools:
        if not isinstance(tool, Mapping):
            raise InputError(f"{name}.tools must hold mappings; got {_brief(tool)}")
        try:
            json.dumps(tool)
        except (TypeError, ValueError) as error:
            raise InputError(f"{name}.tools must hold what JSON can say: {error}") from error


def _check_messages(name: str, result: Start | StepResult) -> None:
    if not isinstance(result.messages, tuple):
        raise InputError(f"{name}.messages must be a tuple; got {_brief(result.messages)}")
    if result.messages and result.text:
        raise InputError(
            f"{name} has both a text and messages; say it as one: {_brief(result.text)}"
        )
    is_whole = isinstance(result, Start) or result.new_context is True
    roles = (*ROLES, ASSISTANT) if is_whole else ROLES
    for message in result.messages:
        if not isinstance(message, Message):
            raise InputError(f"{name}.messages must hold Message; got {_brief(message)}")
        _check_text("Message.text", message.text)
        _check_text("Message.call_id", message.call_id)
        _check_text("Message.name", message.name)
        if message.role not in roles:
            raise InputError(
                f"Message.role is {_brief(message.role)}; it must be one of {', '.join(roles)}"
            )
    if is_whole and any(
        each.role == ASSISTANT for each in (*result.messages[:1], *result.messages[-1:])
    ):
        raise InputError(
            f"the first or the last of {name}.messages has the role {ASSISTANT!r}; a conversation "
            "begins with another, and the policy answers the last"
        )


def _check_allowed(name: str, result: Start | StepResult) -> None:
    for field in ("choices", "allowed_token_ids", "stop"):
        if not isinstance(getattr(result, field), tuple):
            given = _brief(getattr(result, field))
            raise InputError(f"{name}.{field} must be a tuple; got {given}")
    for choice in result.choices:
        _check_text(f"{name}.choices", choice)
    for token in result.allowed_token_ids:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise InputError(f"{name}.allowed_token_ids must hold int; got {_brief(token)}")
    for text in result.stop:
        _check_text(f"{name}.stop", text)
        if not text:
            raise InputError(f"{name}.stop holds an empty text; remove it")
    if result.choices and result.allowed_token_ids:
        raise InputError(
            f"{name} has both choices and allowed_token_ids, which each say what the reply may be; "
            "give one of them"
        )


def _check_metrics(name: str, result: Start | StepResult) -> None:
    if not isinstance(result.metrics, Mapping):
        raise InputError(f"{name}.metrics must be a mapping; got {_brief(result.metrics)}")
    for key, value in result.metrics.items():
        _check_text(f"a name in {name}.metrics", key)
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise InputError(f"{name}.metrics[{key!r}] must be a number; got {_brief(value)}")


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise InputError(f"{field} must be a str; got {_brief(value)}")


def _brief(value: object) -> str:
    # A garbage object's own repr may raise; the type alone is enough to find the mistake then.
    if isinstance(value, str | int | float | bool | None):
        return repr(value)[:80]
    kind = type(value)
    # numpy's bool is called "bool" too.
    return f"a {'numpy.' if kind.__module__ == 'numpy' else ''}{kind.__name__}"
