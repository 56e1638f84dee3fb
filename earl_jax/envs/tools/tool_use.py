# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An environment of one prompt of a dataset, functions that the policy may call, and a reward."""

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from earl_jax.envs.environment import Message, Start, StepResult
from earl_jax.envs.single_turn import Reward, answered, prompt_of
from earl_jax.envs.tools.calls import CALL_FORMATS, Call, typed
from earl_jax.envs.tools.functions import (
    Answer,
    call_tool,
    failure,
    open_tools,
    when_there,
)
from earl_jax.settings.errors import InputError
from earl_jax.settings.named import find_named


class ToolUse:
    """An episode of replies to `row["prompt"]` that call tools, up to one that calls none.

    `tools` names functions, "module:function", or classes, "module:Class": of these each episode
    has an object, made with those of `row`, `seed` and `index` that the constructor names, whose
    public methods are tools; or which has `describe()` and `call(name, arguments)`, for tools with
    descriptions of their own. The chat template shows the names, arguments and docstrings of
    functions and methods, as `transformers.utils.get_json_schema` reads them: arguments have type
    hints, and lines in the docstring's "Args:". Calls of plain functions are made in their order,
    one after the other; then coroutines wait together.

    A reply's calls are found by `call_format`, one of `CALL_FORMATS` or a "module:function" that
    returns the `Call`s in a text. Each is answered by a message of the role "tool" with what the
    function returned, a text or else its JSON, of which `longest_result` characters are kept. A
    call that cannot be read, of an unknown tool or with other arguments, and one that raises, is
    answered with the error, and paid `failed_call_reward`. A tool that is away (`is_outage`) fails
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
        if longest_result < 1:
            raise InputError(
                f"config.env.args.longest_result is {longest_result}; it must be at least 1"
            )
        self._row, self._longest = row, longest_result
        self._failed_call_reward = failed_call_reward
        kind: Any = Callable
        self._read = find_named(call_format, CALL_FORMATS, kind, "config.env.args.call_format")
        self._tools, rewards = open_tools(tools, {"row": row, "seed": seed, "index": index})
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
        tools = tuple(tool.description for tool in self._tools.values())
        return dataclasses.replace(prompt, tools=tools, metrics=dict(self._numbers))

    def step(self, reply: str) -> StepResult | Awaitable[StepResult]:
        """Returns the answers to a reply's calls; without calls the reward of the reply."""
        calls = self._calls_in(reply)
        if not calls:
            return answered(self._pay(reply))
        answers = list[Answer | Awaitable[Any]]()
        try:
            for call in calls:
                answers.append(self._answer(call))
        except BaseException:
            # Coroutines that were made and are not to run.
            for answer in answers:
                getattr(answer, "close", lambda: None)()
            raise
        if all(isinstance(answer, Answer) for answer in answers):
            return self._result(calls, answers)
        return self._when_there(calls, answers)

    def _calls_in(self, reply: str) -> list[Call]:
        calls = self._read(reply)
        if not isinstance(calls, list) or not all(isinstance(call, Call) for call in calls):
            raise InputError(
                f"the function of config.env.args.call_format returned {calls!r:.60}; it must "
                "return a list of earl_jax.envs.tools.calls.Call, [] for a reply without calls"
            )
        return calls

    def _answer(self, call: Call) -> Answer | Awaitable[Any]:
        tool = self._tools.get(call.name)
        if call.error or tool is None:
            known = ", ".join(self._tools)
            return failure(call.error or f"no tool is called {call.name!r:.80}; there are {known}")
        return call_tool(call.name, tool, typed(call, tool.description))

    async def _when_there(self, calls: Sequence[Call], answers: Sequence[Any]) -> StepResult:
        tasks = [asyncio.ensure_future(when_there(answer)) for answer in answers]
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


def _cut(text: str, longest: int) -> str:
    """Returns the beginning of a text that is too long, with the number of those left out.

    A lone surrogate, which no text can have and the JSON of a call can, becomes "?".
    """
    text, over = text.encode(errors="replace").decode(), len(text) - longest
    return text if over <= 0 else f"{text[:longest]}... ({over} more characters)"
