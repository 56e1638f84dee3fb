# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An environment that is an agent: a program that asks an OpenAI-compatible address for replies."""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import json
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from earl_jax.envs.agents.endpoint import endpoint_at
from earl_jax.envs.agents.session import Asked, Reply, Session
from earl_jax.envs.environment import ASSISTANT, Message, Start, StepResult
from earl_jax.envs.single_turn import Reward, answered
from earl_jax.envs.tools.calls import CALL_FORMATS, CLOSE, OPEN, Call, text_beside, typed
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
    pays others before the next request, by `{"reward": 0.5}` to `base_url` + "/reward".

    A request that continues the conversation, the policy's reply included as it was sent, adds its
    new messages to the sample. Any other one, as of an agent that shortens its history, has other
    tools or speaks for a second agent, begins a new sample of the episode, whose prompt it is. So
    every token is trained on once, behind what the policy read when it wrote it. Requests that
    come at the same time are answered one after the other.

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
        self._session = Session()
        # The conversation of the present sample, as keys; and the tools that it was shown.
        self._keys: list[str] = []
        self._tools: list[dict[str, Any]] = []
        # By the key of an assistant's message: the reply that the policy wrote.
        self._replies: dict[str, str] = {}
        self._counts, self._num_calls = (0, 0), 0
        self._metrics = {"requests": 0.0, "new_contexts": 0.0}

    async def start(self) -> Start:
        """Starts the agent, and returns its first request."""
        endpoint = endpoint_at(*self._at)
        base_url = endpoint.open(self._session)
        # An episode that a limit ends, or that is given up, is told to nobody: it is thrown away.
        weakref.finalize(self, endpoint.close, base_url, self._session).atexit = False
        _run(functools.partial(self._agent, base_url=base_url, **self._arguments), self._session)
        asked = await self._session.next()
        if not isinstance(asked, Asked):
            asked()  # raises what the agent raised
            raise InputError(
                f"{_SETTING} {self._name!r} ended without a request to its base_url; no reply of "
                "the policy is in what it returned"
            )
        messages = self._messages(asked.messages)
        self._note(asked)
        return Start(
            messages=messages,
            tools=tuple(asked.tools),
            stop=asked.stop,
            metrics=dict(self._metrics),
        )

    def count_tokens(self, context: int, reply: int) -> None:
        """Takes the tokens of the turn, which the agent is told as its usage."""
        self._counts = context, reply

    async def step(self, reply: str) -> StepResult:
        """Gives the reply to the agent, and returns its next request, or the reward."""
        message = self._message_of(reply)
        key = _key(message)
        self._keys.append(key)
        self._replies[key] = reply
        context, tokens = self._counts
        self._session.answer(Reply(message=message, context_tokens=context, reply_tokens=tokens))
        asked = await self._session.next()
        if not isinstance(asked, Asked):
            return await self._paid(asked())
        new = asked.messages[len(self._keys) :]
        goes_on = (
            asked.tools == self._tools
            and [_key(each) for each in asked.messages[: len(self._keys)]] == self._keys
            and len(new) > 0
            and all(each["role"] != ASSISTANT for each in new)
        )
        self._metrics["new_contexts"] += not goes_on
        messages = self._messages(new if goes_on else asked.messages)
        self._note(asked)
        return StepResult(
            reward=self._session.take_reward(),
            done=False,
            messages=messages,
            stop=asked.stop,
            new_context=not goes_on,
            tools=() if goes_on else tuple(asked.tools),
            metrics=dict(self._metrics),
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
        return dataclasses.replace(end, reward=end.reward + self._session.take_reward())

    def _note(self, asked: Asked) -> None:
        self._metrics["requests"] += 1
        self._keys, self._tools = [_key(each) for each in asked.messages], asked.tools

    def _messages(self, given: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
        """Returns messages of a request as the environment's; replies as the policy wrote them."""
        return tuple(
            Message(
                role=each["role"],
                text=self._text(each),
                call_id=str(each.get("tool_call_id", "")),
                name=str(each.get("name", "")),
            )
            for each in given
        )

    def _text(self, message: Mapping[str, Any]) -> str:
        if message["role"] != ASSISTANT:
            return message["content"]
        written = self._replies.get(_key(message))
        return _written(message) if written is None else written

    def _message_of(self, reply: str) -> dict[str, Any]:
        """Returns a reply as an assistant's message, with calls of the tools that it was shown."""
        message: dict[str, Any] = {"role": ASSISTANT, "content": reply}
        calls = self._read(reply) if self._tools else []
        if not calls or any(call.error for call in calls):
            return message
        described = {tool["function"]["name"]: tool for tool in self._tools}
        message["tool_calls"] = [self._call(call, described) for call in calls]
        message["content"] = text_beside(reply) or None
        return message

    def _call(self, call: Call, described: Mapping[str, Any]) -> dict[str, Any]:
        # Nine letters and digits, as Mistral's template wants them; the same in each run.
        self._num_calls += 1
        arguments = json.dumps(typed(call, described.get(call.name)), ensure_ascii=False)
        return {
            "id": f"c{self._num_calls:08d}",
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }


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


def _key(message: Mapping[str, Any]) -> str:
    """Returns what makes two messages equal: who said it, the text, and calls by their values."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"].get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                pass  # as it is
        calls.append([call.get("id"), call["function"]["name"], arguments])
    said = [message["role"], message.get("content") or "", calls]
    beside = [message.get("tool_call_id"), message.get("name")]
    return json.dumps([*said, *beside], sort_keys=True)


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
