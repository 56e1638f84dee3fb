# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An environment of one prompt of a dataset, functions that the policy may call, and a reward."""

import asyncio
import dataclasses
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from earl_jax.envs.environment import Message, Start, StepResult
from earl_jax.envs.single_turn import Reward, answered, prompt_of
from earl_jax.envs.tool_calls import CALL_FORMATS, Call
from earl_jax.settings.arguments import accepted
from earl_jax.settings.errors import InputError
from earl_jax.settings.named import find_named

# A tool that raises one of these is away; the call was none of the policy's mistakes.
OUTAGES = (ConnectionError, TimeoutError)


class Answer(NamedTuple):
    """The text that a call is answered with, and True if the call failed."""

    text: str
    failed: bool = False


class ToolUse:
    """An episode of replies to `row["prompt"]` that call tools, up to one that calls none.

    `tools` names functions, "module:function", or classes, "module:Class": of these each episode
    has an object, made with those of `row`, `seed` and `index` that the constructor names, whose
    public methods are tools. The chat template shows their names, arguments and docstrings, as
    `transformers.utils.get_json_schema` reads them: arguments have type hints, and lines in the
    docstring's "Args:". Tools that are coroutines wait together; the calls of others are made one
    after the other.

    A reply's calls are found by `call_format`, one of `CALL_FORMATS` or a "module:function" that
    returns the `Call`s in a text. Each is answered by a message of the role "tool" with what the
    function returned, a text or else its JSON, of which `longest_result` characters are kept. A
    call that cannot be read, of an unknown tool or with other arguments, and one that raises, is
    answered with the error, and paid `failed_call_reward`. A tool that raises one of OUTAGES fails
    the episode.

    The reply without calls ends the episode, paid by `reward(reply, **row)`, the function of
    config.tasks.reward; without one, by the method `reward(reply)` of the class that has it. Both
    may be coroutines. Metrics are the numbers of `tool_calls` and `failed_tool_calls`, and the
    reward's.

    Raises ValueError where the tasks give no row, nothing pays, or a tool is none.
    """

    def __init__(
        self,
        *,
        tools: Sequence[str] = (),
        call_format: str = "hermes",
        failed_call_reward: float = 0.0,
        longest_result: int = 10_000,
        row: Mapping[str, Any] | None = None,
        reward: Reward | None = None,
        seed: int = 0,
        index: int = 0,
    ):
        if row is None:
            raise InputError("it needs config.tasks.path")
        if isinstance(tools, str) or not tools:
            raise InputError(
                f"config.env.args.tools is {tools!r}; it must name functions or classes, such as "
                '("module:function", "module:Class")'
            )
        if longest_result < 1:
            raise InputError(
                f"config.env.args.longest_result is {longest_result}; it must be at least 1"
            )
        self._row, self._longest = row, longest_result
        self._failed_call_reward = failed_call_reward
        path = "config.env.args.call_format"
        self._calls_in = find_named(call_format, CALL_FORMATS, _FUNCTION, path)
        self._tools, rewards = _open(tools, {"row": row, "seed": seed, "index": index})
        if reward is None and len(rewards) != 1:
            raise InputError(
                f"{len(rewards) or 'none'} of the tools' classes has a method reward(reply); give "
                "config.tasks.reward"
            )
        self._pay = functools.partial(reward, **row) if reward is not None else rewards[0]
        self._numbers = {"tool_calls": 0.0, "failed_tool_calls": 0.0}

    def start(self) -> Start:
        """Returns the prompt and the descriptions of the tools."""
        prompt = prompt_of(self._row)
        tools = tuple(_described(name, tool) for name, tool in self._tools.items())
        return dataclasses.replace(prompt, tools=tools, metrics=dict(self._numbers))

    def step(self, reply: str) -> StepResult | Awaitable[StepResult]:
        """Returns the answers to a reply's calls; without calls the reward of the reply."""
        calls = self._calls_in(reply)
        if not calls:
            return answered(self._pay(reply))
        answers = list[Answer | Awaitable[Any]]()
        try:
            for call in calls:
                answers.append(self._call(call))
        except BaseException:
            # Coroutines that were made and are not to run.
            for answer in answers:
                getattr(answer, "close", lambda: None)()
            raise
        if any(inspect.isawaitable(answer) for answer in answers):
            return self._when_there(calls, answers)
        return self._result(calls, answers)

    def _call(self, call: Call) -> Answer | Awaitable[Any]:
        tool = self._tools.get(call.name)
        if call.error or tool is None:
            known = ", ".join(self._tools)
            return _failure(call.error or f"no tool is called {call.name!r:.80}; there are {known}")
        try:
            inspect.signature(tool).bind(**call.arguments)
        except TypeError as error:
            return _failure(f"{call.name}: {error}")
        try:
            result = tool(**call.arguments)
            return result if inspect.isawaitable(result) else Answer(_text_of(result))
        except OUTAGES:
            raise
        except Exception as error:  # noqa: BLE001 - a user's own function
            return _failure(_raised(error))

    async def _when_there(self, calls: Sequence[Call], answers: Sequence[Any]) -> StepResult:
        tasks = [
            asyncio.ensure_future(_later(answer) if inspect.isawaitable(answer) else _now(answer))
            for answer in answers
        ]
        try:
            return self._result(calls, await asyncio.gather(*tasks))
        finally:
            # Where one is away, or the time is over, the others are not to go on.
            for task in tasks:
                task.cancel()

    def _result(self, calls: Sequence[Call], answers: Sequence[Any]) -> StepResult:
        failed = sum(answer.failed for answer in answers)
        self._numbers["tool_calls"] += len(calls)
        self._numbers["failed_tool_calls"] += failed
        return StepResult(
            reward=self._failed_call_reward * failed,
            done=False,
            messages=tuple(
                Message(
                    role="tool",
                    text=_cut(answer.text, self._longest),
                    call_id=call.call_id,
                    name=call.name if call.name in self._tools else "",
                )
                for call, answer in zip(calls, answers, strict=True)
            ),
            metrics=dict(self._numbers),
        )


_FUNCTION: Any = Callable
# The descriptions of tools by their functions.
_DESCRIBED = dict[tuple[str, Callable[..., Any]], dict[str, Any]]()


def _open(
    names: Sequence[str], task: Mapping[str, Any]
) -> tuple[dict[str, Callable[..., Any]], list[Reward]]:
    """Returns the tools by name, and the `reward` methods of classes among them."""
    tools, rewards = dict[str, Callable[..., Any]](), list[Reward]()
    for name in names:
        found = find_named(name, {}, _FUNCTION, "config.env.args.tools")
        own: dict[str, Any] = {name.rpartition(":")[2]: found}
        if isinstance(found, type):
            made = found(**accepted(found, task))
            methods = inspect.getmembers(made, callable)
            own = {key: value for key, value in methods if not key.startswith("_")}
            if "reward" in own:
                rewards.append(own.pop("reward"))
        if both := tools.keys() & own.keys():
            raise InputError(f"config.env.args.tools has two tools of the name {min(both)!r}")
        tools |= own
    for name, tool in tools.items():
        _described(name, tool)
    return tools, rewards


def _described(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """Returns the description of the tool that is called `name`, for `Start.tools`.

    Raises ValueError where it has none.
    """
    # Methods are new objects in each episode; the function that they are of is not.
    key = name, getattr(tool, "__func__", tool)
    if key not in _DESCRIBED:
        schema = _schema_of(name, tool)
        # A decorated function, or an alias, may have another name of its own.
        _DESCRIBED[key] = {**schema, "function": {**schema["function"], "name": name}}
    return _DESCRIBED[key]


def _schema_of(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        return get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise InputError(
            f"config.env.args.tools has {name!r}, which cannot be described to the "
            f"policy: {error}; it needs type hints, and a docstring with a line for each argument "
            'under "Args:"'
        ) from error


async def _now(answer: Answer) -> Answer:
    return answer


async def _later(result: Awaitable[Any]) -> Answer:
    try:
        return Answer(_text_of(await result))
    except OUTAGES:
        raise
    except Exception as error:  # noqa: BLE001 - a user's own function
        return _failure(_raised(error))


def _failure(why: str) -> Answer:
    return Answer(f"error: {why}", failed=True)


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _text_of(result: Any) -> str:
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=str)


def _cut(text: str, longest: int) -> str:
    """Returns the beginning of a text that is too long, with the number of those left out.

    A lone surrogate, which no text can have and the JSON of a call can, becomes "?".
    """
    text, over = text.encode(errors="replace").decode(), len(text) - longest
    return text if over <= 0 else f"{text[:longest]}... ({over} more characters)"
