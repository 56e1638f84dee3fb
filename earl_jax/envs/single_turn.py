# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An environment of one prompt of a dataset, one reply, and a reward function."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from earl_jax.envs.environment import Message, Start, StepResult
from earl_jax.settings.errors import InputError

# The reward alone, or with it ("reward") metrics by name.
Paid = float | Mapping[str, float]
# reward(reply, **row), which may be a coroutine.
Reward = Callable[..., Paid | Awaitable[Paid]]


class SingleTurn:
    """An episode of one reply to `row["prompt"]`, paid by `reward(reply, **row)`.

    The prompt is a text, or messages as `{"role": ..., "content": ...}`. A function that returns a
    dict gives the reward under "reward"; its other entries are metrics.

    Raises ValueError where the tasks give no row, or no reward function.
    """

    def __init__(self, *, row: Mapping[str, Any] | None = None, reward: Reward | None = None):
        if row is None or reward is None:
            needed = {"config.tasks.path": row, "config.tasks.reward": reward}
            missing = [name for name, value in needed.items() if value is None]
            raise InputError(f"it needs {' and '.join(missing)}")
        self._row, self._reward = row, reward

    def start(self) -> Start:
        """Returns the prompt."""
        return prompt_of(self._row)

    def step(self, reply: str) -> StepResult | Awaitable[StepResult]:
        """Returns the reward of the reply."""
        return answered(self._reward(reply, **self._row))


def answered(
    paid: Paid | Awaitable[Paid], payer: str = "the reward function (config.tasks.reward)"
) -> StepResult | Awaitable[StepResult]:
    """Returns the end of an episode whose last reply was paid so; `payer` is named in errors.

    Raises ValueError, or its result does, for what is no reward.
    """
    return _awaited(paid, payer) if inspect.isawaitable(paid) else result_of(paid, payer)


async def _awaited(paid: Awaitable[Paid], payer: str) -> StepResult:
    return result_of(await paid, payer)


def result_of(paid: Any, payer: str) -> StepResult:
    """Returns the result of a reply that was paid so. Raises ValueError for no reward."""
    metrics = dict(paid) if isinstance(paid, Mapping) else {"reward": paid}
    # `check_step` refuses metrics that are not numbers.
    metrics = {name: _as_float(value) for name, value in metrics.items()}
    reward = metrics.pop("reward", None)
    if not isinstance(reward, float):
        raise InputError(
            f"{payer} returned {paid!r:.60}; it must return a number, or a dict with one under "
            "'reward'"
        )
    return StepResult(reward=reward, done=True, stop_reason="answered", metrics=metrics)


def _as_float(value: Any) -> Any:
    """Returns a number, also numpy's and its bool, as a float; others and texts as they are."""
    try:
        return value if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def prompt_of(row: Mapping[str, Any]) -> Start:
    """Returns the prompt of a row as a Start. Raises ValueError for one that is none."""
    prompt = row.get("prompt")
    if isinstance(prompt, str) and prompt:
        return Start(text=prompt)
    if not isinstance(prompt, list) or not prompt:
        raise InputError(
            f"'prompt' is {prompt!r:.60}; it must be a text, or a list of messages such as "
            '{"role": "user", "content": "..."}'
        )
    messages = []
    for message in prompt:
        if not isinstance(message, Mapping) or {"role", "content"} != message.keys():
            raise InputError(
                f"a message of 'prompt' is {message!r:.60}; it must have the keys role and content"
            )
        if message["role"] not in ("system", "user") or not isinstance(message["content"], str):
            raise InputError(
                f"a message of 'prompt' is {message!r:.60}; its role must be 'system' or 'user' "
                "and its content a text"
            )
        messages.append(Message(role=message["role"], text=message["content"]))
    return Start(messages=tuple(messages))
