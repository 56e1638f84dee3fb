# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An environment that is an agent: a program that asks an OpenAI-compatible address for replies."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import inspect
import json
import math
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from earl_jax.envs.agents.conversations import Conversations, Taken
from earl_jax.envs.agents.endpoint import endpoint_at
from earl_jax.envs.agents.session import Asked, Paid, Reply, Session, digest_of, message_key
from earl_jax.envs.environment import ASSISTANT, REPLIED, Message, Start, StepResult
from earl_jax.envs.single_turn import Reward, answered
from earl_jax.envs.text.conversation import Conversation
from earl_jax.envs.tools.calls import CALL_FORMATS, CLOSE, OPEN, hermes_calls, text_beside, typed
from earl_jax.settings.arguments import accepted, check_arguments
from earl_jax.settings.errors import InputError
from earl_jax.settings.named import find_named

_FUNCTION: Any = Callable
_SETTING = "config.env.args.agent"
_TASK = ("row", "seed", "index")


class Agent:
    """An episode of a function that asks the policy through HTTP, and returns its reward.

    `agent`, "module:function", is called once an episode with `base_url`, the address of an
    OpenAI-compatible endpoint, with `settings`, and with those of `row`, `seed` and `index` that it
    names. Each chat completion that it, or whatever it starts, asks for there is a turn of the
    episode. It may be a coroutine; a plain function gets a thread of its own. It returns the
    reward, or a dict with it under "reward" and metrics; where config.tasks.reward is given, its
    answer as a text, which is paid by that `reward(answer, **row)`. That is for its last reply; it
    pays others by `{"reward": 0.5}` to `base_url` + "/reward", which is for the newest reply when
    the next request is taken, or with an "id" for the reply of this id.

    A request that continues a conversation, the policy's reply included as it was sent, adds its
    new messages to the sample. Any other one, as of an agent that shortens its history, has other
    tools or speaks for a second agent, begins a new sample of the episode, whose prompt it is. So
    every token is trained on once, behind what the policy read when it wrote it. Conversations may
    take turns; requests that come at the same time are sampled together, as far as slots are free.

    Where a request describes tools, calls in the reply are taken out of its text by `call_format`,
    one of `CALL_FORMATS`. The endpoint listens at `host`, which is in `base_url`, and `port`, 0 for
    any that is free. Metrics are the number of `requests` and of `new_contexts` among them.

    Raises ValueError for an agent that is no function, or does not take these arguments.
    """

    def __init__(
        self,
        *,
        agent: str = "",
        settings: Mapping[str, Any] | None = None,
        call_format: str = "hermes",
        host: str = "127.0.0.1",
        port: int = 0,
        row: Mapping[str, Any] | None = None,
        reward: Reward | None = None,
        seed: int = 0,
        index: int = 0,
    ):
        self._agent = find_named(agent, {}, _FUNCTION, _SETTING)
        given = dict(settings or {})
        check_arguments(
            self._agent, given, "config.env.args.settings", reserved=("base_url", *_TASK)
        )
        task = {"row": row, "seed": seed, "index": index}
        self._arguments = given | accepted(
            self._agent, {k: v for k, v in task.items() if v is not None}
        )
        try:
            inspect.signature(self._agent).bind(base_url="", **self._arguments)
        except TypeError as error:
            raise InputError(
                f"{_SETTING} is {agent!r}, which cannot be called with base_url and "
                f"{', '.join(self._arguments) or 'nothing else'}: {error}"
            ) from error
        kind: Any = Callable
        self._read = find_named(call_format, CALL_FORMATS, kind, "config.env.args.call_format")
        self._at, self._name = (host, port), agent
        self._pay = None if reward is None else functools.partial(reward, **(row or {}))
        self._session, self._conversations = Session(), Conversations()
        # The request whose reply is sampled, and the one that `next` returns.
        self._taken: Taken | None = None
        self._claimed: Taken | None = None
        # By the key of an assistant's message: the reply that the policy wrote.
        self._replies: dict[str, str] = {}
        self._counts = 0, 0
        # In a replay, the names of the requests that are still to be taken.
        self._repeated: collections.deque[str] | None = None

    async def start(self) -> Start:
        """Starts the agent, and returns its first request."""
        endpoint = endpoint_at(*self._at)
        base_url = endpoint.open(self._session)
        # An episode that a limit ends, or that is given up, ends without a call: it is thrown away.
        weakref.finalize(self, endpoint.close, base_url, self._session).atexit = False
        _run(functools.partial(self._agent, base_url=base_url, **self._arguments), self._session)
        taken = await self._next()
        if not isinstance(taken, Taken):
            taken()  # raises what the agent raised
            raise InputError(
                f"{_SETTING} {self._name!r} ended without a request to its base_url; no reply of "
                "the policy is in what it returned"
            )
        self._taken = taken
        return Start(
            messages=self.new_messages(taken),
            tools=tuple(taken.asked.tools),
            stop=taken.asked.stop,
            call=taken.asked.call,
            metrics=self._metrics,
            conversation=taken.conversation,
            request=taken.name,
        )

    def count_tokens(self, context: int, reply: int) -> None:
        """Takes the tokens of the turn, which the answer to the agent has as its usage."""
        self._counts = context, reply

    async def step(self, reply: str) -> StepResult:
        """Gives the reply to the agent, and returns its next request, or the reward."""
        await self.give(reply)
        return await self.next()

    async def give(self, reply: str) -> None:
        """Gives the reply to the agent."""
        assert self._taken is not None, "the agent has asked"
        self.answer(self._taken, reply, self._counts)

    async def next(self) -> StepResult:
        """Returns the request that was claimed, the agent's next one, or the reward."""
        taken, self._claimed = self._claimed, None
        taken = taken or await self._next()
        if not isinstance(taken, Taken):
            return await self._paid(taken())
        self._taken, begins = taken, taken.num_before == 0
        reward, of_replies = _sums(taken.rewards)
        return StepResult(
            reward=reward,
            reply_rewards=of_replies,
            done=False,
            messages=self.new_messages(taken),
            stop=taken.asked.stop,
            call=taken.asked.call,
            new_context=begins,
            tools=tuple(taken.asked.tools) if begins else (),
            metrics=self._metrics,
            conversation=taken.conversation,
            request=taken.name,
        )

    async def _paid(self, result: Any) -> StepResult:
        """Returns the end of the episode, whose agent returned this."""
        payer = f"{_SETTING} {self._name!r}"
        if self._pay is not None:
            if not isinstance(result, str):
                raise InputError(
                    f"{payer} returned {result!r:.60}; beside config.tasks.reward it must return "
                    "its answer, a text, which that pays"
                )
            result, payer = self._pay(result), "the reward function (config.tasks.reward)"
        paid = answered(result, payer)
        end = paid if isinstance(paid, StepResult) else await paid
        reward, of_replies = _sums(self._session.take_rewards())
        return dataclasses.replace(
            end,
            reward=end.reward + reward,
            reply_rewards=of_replies,
            metrics={**self._metrics, **end.metrics},
        )

    def claim(self) -> bool:
        """Takes the request that `next` returns, if one waits, of an agent that has not ended."""
        self._claimed = self._take_waiting(is_heard=True)
        return self._claimed is not None

    def branch(self) -> "_Branch | None":
        """Returns the environment of a request that waits, if there is one."""
        taken = self._take_waiting(is_heard=False)
        return None if taken is None else _Branch(self, taken)

    def use_conversation(self, conversation: Conversation) -> None:
        """Counts tokens with this conversation. Calls may be demanded if its template begins any.

        And if they are read as such a template writes them.
        """
        # Nothing of the session may hold the agent, whose end closes it.
        self._session.count = functools.partial(_count, conversation, self._replies)
        self._session.may_demand = self._read is hermes_calls and conversation.writes_calls()

    def repeat_requests(self, names: collections.deque[str]) -> None:
        """Has it take the requests of these names, in their order, and no others.

        What was taken is removed from `names`.
        """
        self._repeated = names

    # Requests.

    async def _next(self) -> Taken | Callable[[], Any]:
        asked = await self._session.next(self._wanted)
        return self._take(asked, is_heard=True) if isinstance(asked, Asked) else asked

    def _take_waiting(self, *, is_heard: bool) -> Taken | None:
        asked = self._session.take(self._wanted)
        return None if asked is None else self._take(asked, is_heard=is_heard)

    @property
    def _wanted(self) -> str | None:
        return next(iter(self._repeated), "") if self._repeated is not None else None

    def _take(self, asked: Asked, *, is_heard: bool) -> Taken:
        """Takes a request; where `next` returns it (`is_heard`), with what was paid before it.

        Rewards are taken with a request, whose name has them, and not when they come: so a replay
        pays the same replies.
        """
        name = self._repeated.popleft() if self._repeated is not None else None
        rewards = self._session.take_rewards(name) if is_heard else ()
        taken = self._conversations.take(asked, name or "")
        return dataclasses.replace(taken, rewards=rewards)

    @property
    def _metrics(self) -> dict[str, float]:
        found = self._conversations
        return {"requests": float(found.num_taken), "new_contexts": found.num_begun - 1.0}

    def answer(self, taken: Taken, reply: str, counts: tuple[int, int]) -> None:
        """Sends the policy's reply to a request, whose conversation may go on with it."""
        message = self._message_of(reply, taken)
        self._replies[message_key(message)] = reply
        name = self._conversations.add(taken, message)
        context, tokens = counts
        answer = Reply(name=name, message=message, context_tokens=context, reply_tokens=tokens)
        self._session.answer(taken.asked, answer)

    def new_messages(self, taken: Taken) -> tuple[Message, ...]:
        """Returns the messages of a request that are new; replies as the policy wrote them."""
        return _messages(taken.asked.messages[taken.num_before :], self._replies)

    def _message_of(self, reply: str, taken: Taken) -> dict[str, Any]:
        """Returns a reply as an assistant's message, with calls of the tools that it was shown."""
        message: dict[str, Any] = {"role": ASSISTANT, "content": reply}
        tools = {tool["function"]["name"]: tool for tool in taken.asked.tools}
        calls = self._read(reply) if tools else []
        if not calls or any(call.error for call in calls):
            return message
        message["tool_calls"] = [
            {
                "id": _call_id(taken, number),
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(typed(call, tools.get(call.name)), ensure_ascii=False),
                },
            }
            for number, call in enumerate(calls)
        ]
        message["content"] = text_beside(reply) or None
        return message


class _Branch:
    """The environment of one request of an agent, which comes while other replies are under way."""

    def __init__(self, agent: Agent, taken: Taken) -> None:
        self._agent, self._taken, self._counts = agent, taken, (0, 0)
        self.request = taken.name

    async def start(self) -> Start:
        asked = self._taken.asked
        return Start(
            messages=self._agent.new_messages(self._taken),
            tools=tuple(asked.tools),
            stop=asked.stop,
            call=asked.call,
            conversation=self._taken.conversation,
        )

    def count_tokens(self, context: int, reply: int) -> None:
        self._counts = context, reply

    async def step(self, reply: str) -> StepResult:
        self._agent.answer(self._taken, reply, self._counts)
        return StepResult(reward=0.0, done=True, stop_reason=REPLIED)


def _sums(paid: Sequence[Paid]) -> tuple[float, dict[str, float]]:
    """Returns the rewards for the newest reply, added up, and those for others by their names."""
    found = collections.defaultdict[str, list[float]](list)
    for each in paid:
        found[each.reply].append(each.reward)
    sums = {name: math.fsum(rewards) for name, rewards in found.items()}
    return sums.pop("", 0.0), sums


def _call_id(taken: Taken, number: int) -> str:
    """Returns nine letters and digits, as Mistral's template wants them; the same in each run."""
    text = f"{taken.conversation} {number}".encode()
    return f"c{digest_of(text, taken.asked.digests[-1]).hex()[:8]}"


def _run(call: Callable[[], Any], session: Session) -> None:
    """Starts an agent: a coroutine in this event loop, a plain function in a thread."""
    if inspect.iscoroutinefunction(call):
        loop = asyncio.get_running_loop()
        task = loop.create_task(_awaited(call(), session))
        session.on_close(functools.partial(_cancel, loop, task))
        return
    threading.Thread(target=_called, args=(call, session), name="agent", daemon=True).start()


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    # The loop of an environment pool that is closed has cancelled its tasks.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(task.cancel)


async def _awaited(coroutine: Coroutine[Any, Any, Any], session: Session) -> None:
    try:
        result = await coroutine
    except BaseException as error:  # noqa: BLE001 - an agent is not our code
        session.end(functools.partial(_raise, error))
        if isinstance(error, asyncio.CancelledError):
            raise
        return
    session.end(lambda: result)


def _called(call: Callable[[], Any], session: Session) -> None:
    try:
        result = call()
        if inspect.isawaitable(result):
            result = asyncio.run(_all_of(result))
    except BaseException as error:  # noqa: BLE001 - an agent is not our code
        session.end(functools.partial(_raise, error))
        return
    session.end(lambda: result)


async def _all_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _raise(error: BaseException) -> Any:
    raise error


def _count(conversation: Conversation, replies: Mapping[str, str], asked: Asked) -> int:
    """Returns the number of tokens of a request, as the beginning of a conversation."""
    return conversation.count(_messages(asked.messages, replies), asked.tools, asked.call)


def _messages(
    messages: Sequence[Mapping[str, Any]], replies: Mapping[str, str]
) -> tuple[Message, ...]:
    """Returns messages in the form of environments, with `replies` as the policy wrote them."""
    return tuple(
        Message(
            role=each["role"],
            text=_text(each, replies),
            call_id=str(each.get("tool_call_id", "")),
            name=str(each.get("name", "")),
        )
        for each in messages
    )


def _text(message: Mapping[str, Any], replies: Mapping[str, str]) -> str:
    if message["role"] != ASSISTANT:
        return message["content"]
    written = replies.get(message_key(message))
    return _written(message) if written is None else written


def _written(message: Mapping[str, Any]) -> str:
    """Returns a reply that the policy did not write: calls as Qwen's and Hermes' templates do."""
    calls = [
        json.dumps(
            {"name": call["function"]["name"], "arguments": call["function"].get("arguments", {})},
            ensure_ascii=False,
        )
        for call in message.get("tool_calls", ())
    ]
    return "\n".join(filter(None, [message["content"], *(f"{OPEN}\n{c}\n{CLOSE}" for c in calls)]))
