# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of environments, and their messages as ids: what a thread of the pool does for an episode.

The chat template and the tokenizer run here too, under the environment's time limit, and not in the
thread that speaks to the devices. Of an environment that is a coroutine, the coroutine alone runs
on the pool's event loop. The conversation of an episode is used by one thread at a time: by a
worker while the episode waits, else by the collector.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from earl_jax.engine.choices import check_allowed, check_choices
from earl_jax.engine.config import EngineConfig
from earl_jax.envs.environment import (
    UNENCODABLE,
    Environment,
    Start,
    StepResult,
    check_start,
    check_step,
)
from earl_jax.envs.event_loop import after
from earl_jax.envs.pool import Failure
from earl_jax.envs.round_wait import RoundWait
from earl_jax.envs.text.chat_template import Content
from earl_jax.envs.text.conversation import Conversation, Observation
from earl_jax.rollout.config import RolloutConfig
from earl_jax.rollout.conversations import Side
from earl_jax.rollout.episode import LiveEpisode
from earl_jax.rollout.task import Task
from earl_jax.settings.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """An environment's start or step, and its message as ids with what the reply may be.

    `observation` is None where the episode is done, where the message is longer than an episode
    may be, and where it cannot be encoded, which `failure` says. `conversation` is the one that is
    on the move now, where another one was, of this side or another. `is_idle`: the reply was given
    to an agent that has others under way, and nobody waits for what it says next.
    """

    environment: Environment
    result: Start | StepResult
    observation: Observation | None = None
    choices: tuple[tuple[int, ...], ...] = ()
    allowed: tuple[int, ...] = ()
    failure: Failure | None = None
    conversation: Conversation | None = None
    is_idle: bool = False

    @property
    def content(self) -> Content:
        """The message, or messages."""
        return self.result.messages or self.result.text


class Answers(Protocol):
    """Calls of environments under way, by ticket: `envs.pool.Calls`."""

    def submit(self, calls: Mapping[int, Callable[[], Answer]]) -> None:
        """Lets workers make these calls; returns at once."""
        ...

    def take(
        self, wait: float | RoundWait = 0.0, *, at_least_one: bool = False
    ) -> dict[int, Answer | Failure]:
        """Returns the finished outcomes, see `envs.pool.Calls.take`."""
        ...

    def poll(self, polls: Mapping[int, Callable[[], str | None]]) -> dict[int, str]:
        """Returns what these return now, in their order, but for None."""
        ...


class NoCalls:
    """The calls of a service whose tasks are prompts alone: there are none."""

    def submit(self, calls: Mapping[int, Callable[[], Answer]]) -> None:
        """Takes no calls."""
        assert not calls, "a service without environments plays prompts alone"

    def take(
        self, wait: float | RoundWait = 0.0, *, at_least_one: bool = False
    ) -> dict[int, Answer | Failure]:
        """Returns no outcomes, at once."""
        return {}

    def poll(self, polls: Mapping[int, Callable[[], str | None]]) -> dict[int, str]:
        """Returns none."""
        return {}


# Branches of an episode that have keys of their own among the calls; a run's limit is far below.
_MOST_BRANCHES = 2**16


def branch_key(ticket: int, number: int) -> int:
    """Returns the key of the calls of an episode's branch: a negative one."""
    return -1 - (ticket * _MOST_BRANCHES + number)


def ticket_of(key: int) -> int:
    """Returns the ticket of the episode whose calls, or whose branch's, have this key."""
    return key if key >= 0 else (-1 - key) // _MOST_BRANCHES


def begin(
    make_environment: Callable[[Task], Environment],
    episode: LiveEpisode,
    config: EngineConfig,
    requests: collections.deque[str] | None = None,
) -> Answer:
    """Makes and starts the environment of an episode; `config` says what replies can be.

    In a replay it takes these `requests`, if it makes any (`Branches.repeat_requests`). Raises
    Awaits where `start` is a coroutine, as `go_on` where `step` is.
    """
    environment = make_environment(episode.task)
    if requests is not None and (repeat := getattr(environment, "repeat_requests", None)):
        repeat(requests)
    if (use := getattr(environment, "use_conversation", None)) is not None:
        use(episode.dialogue.of_another_side())
    return after(environment.start(), functools.partial(_opened, environment, episode, config))


def _opened(
    environment: Environment, episode: LiveEpisode, config: EngineConfig, result: object
) -> Answer:
    start = check_start(result)
    answer = Answer(environment=environment, result=start)
    if (old := episode.others.get(start.conversation)) is not None:
        answer = dataclasses.replace(answer, conversation=old.conversation)
        return _rendered(answer, old.conversation.answer, episode, config)
    render = functools.partial(episode.dialogue.open, tools=start.tools)
    return _rendered(answer, render, episode, config)


def go_on(episode: LiveEpisode, reply: str, config: EngineConfig) -> Answer:
    """Gives the policy's reply to the environment of an episode."""
    environment = _counted(episode)
    return after(
        environment.step(reply), functools.partial(_answered, environment, episode, config)
    )


def give(episode: LiveEpisode, reply: str) -> Answer:
    """Gives the policy's reply to an agent that has other replies under way, and does not wait."""
    agent: Any = _counted(episode)
    result = StepResult(reward=0.0, done=False)
    return after(
        agent.give(reply), lambda _: Answer(environment=agent, result=result, is_idle=True)
    )


def wait_for_agent(episode: LiveEpisode, config: EngineConfig) -> Answer:
    """Waits for the next message of an agent that has no reply under way."""
    environment = episode.environment
    assert environment is not None
    answered = functools.partial(_answered, environment, episode, config)
    return after(episode.agent.next(), answered)


def _counted(episode: LiveEpisode) -> Environment:
    assert episode.environment is not None
    environment = episode.environment
    # `CountsTokens`; asking for the protocol would take 7 us.
    if (count := getattr(environment, "count_tokens", None)) is not None:
        count(*episode.counts)
    return environment


def _answered(
    environment: Environment, episode: LiveEpisode, config: EngineConfig, given: object
) -> Answer:
    result = check_step(given)
    answer = Answer(environment=environment, result=result)
    if result.done:
        return answer
    if result.conversation != episode.number:
        return _in_another(answer, result, episode, config)
    if result.new_context:
        render = functools.partial(episode.dialogue.open_anew, tools=result.tools)
        return _rendered(answer, render, episode, config)
    if result.role in ("", episode.side):
        return _rendered(answer, episode.dialogue.answer, episode, config)
    side = episode.side_of(result.role)
    answer = dataclasses.replace(answer, conversation=side.conversation)
    return _rendered(answer, functools.partial(_prompt, side), episode, config)


def _in_another(
    answer: Answer, result: StepResult, episode: LiveEpisode, config: EngineConfig
) -> Answer:
    """Returns the answer whose message begins another conversation, or goes on with an old one."""
    if result.new_context:
        conversation = episode.dialogue.of_another_side()
        render = functools.partial(conversation.open_anew, tools=result.tools)
    elif (old := episode.others.get(result.conversation)) is not None:
        conversation, render = old.conversation, old.conversation.answer
    else:
        raise InputError(
            f"StepResult.conversation is {result.conversation}, which the episode does not have; "
            "begin it with new_context"
        )
    answer = dataclasses.replace(answer, conversation=conversation)
    return _rendered(answer, render, episode, config)


def _prompt(side: Side, content: Content) -> Observation:
    """Returns the prompt of a new sample: all that this side has seen, id for id, and a message."""
    if not side.ids:
        return dataclasses.replace(side.conversation.open(content), forks=True)
    message = side.conversation.answer(content)
    return Observation(message.ids if message.forks else side.ids + message.ids, forks=True)


def _rendered(
    answer: Answer,
    render: Callable[[Content], Observation],
    episode: LiveEpisode,
    config: EngineConfig,
) -> Answer:
    """Returns the answer with its message as ids, unless it cannot be encoded, or never fits."""
    conversation, result = episode.dialogue, answer.result
    try:
        if not conversation.may_fit(answer.content, episode.most_message_tokens):
            return answer
        choices = conversation.choices(result.choices)
        branches, width = config.rules.choice_branches, config.rules.choice_width
        check_choices(choices, branches, width)
        allowed = conversation.allowed(result.allowed_token_ids)
        check_allowed(allowed, width or branches, config.vocab_size)
        observation = render(answer.content)
        if result.call is not None:
            conversation = answer.conversation or conversation
            observation = conversation.begin_call(observation, result.call)
    except ValueError as error:
        failure = Failure(stop_reason=UNENCODABLE, detail=str(error))
        return dataclasses.replace(answer, failure=failure)
    return dataclasses.replace(answer, observation=observation, choices=choices, allowed=allowed)


def take_answer(
    episode: LiveEpisode, answer: Answer | Failure, config: RolloutConfig
) -> tuple[str, str] | None:
    """Takes an environment's start or step into its episode, whose message it appends.

    Returns the stop reason and detail if that ends the episode.
    """
    if isinstance(answer, Failure):
        return answer.stop_reason, answer.detail
    result = answer.result
    episode.environment = answer.environment
    episode.metrics |= result.metrics
    if isinstance(result, Start):
        episode.role = episode.side = result.role
        # `Branches`; asking for the protocol would take 7 us.
        episode.branches = episode.parent is None and hasattr(answer.environment, "branch")
    else:
        episode.add_rewards(result.reward, result.side_rewards, result.reply_rewards)
        if result.done:
            return result.stop_reason, result.detail
        if answer.is_idle:
            episode.is_idle = True
            return None
    if answer.failure is not None:
        return answer.failure.stop_reason, answer.failure.detail
    if isinstance(result, Start):
        episode.take_up(result.conversation, answer.conversation or episode.dialogue)
    elif answer.conversation is not None and result.role:
        episode.change_sides(result.role, answer.conversation)
    elif answer.conversation is not None:
        episode.change_conversation(result.conversation, answer.conversation)
    episode.choices, episode.allowed = answer.choices, answer.allowed
    stops = episode.task.stops or config.stops
    episode.stops = dataclasses.replace(stops, strings=(*stops.strings, *result.stop))
    return episode.take_message(answer.content, answer.observation, config.unfinished_reward)
