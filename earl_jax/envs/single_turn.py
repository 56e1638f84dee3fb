# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An environment of one prompt of a dataset, one reply, and a reward function."""

from collections.abc import Callable, Mapping
from typing import Any

from earl_jax.envs.environment import Message, Start, StepResult
from earl_jax.settings.errors import InputError

# reward(reply, **row): the reward alone, or with it ("reward") metrics by name.
Reward = Callable[..., float | Mapping[str, float]]


class SingleTurn:
    """An episode of one reply to `row["prompt"]`, paid by `reward(reply, **row)`.

    The prompt is a text, or messages as `{"role": ..., "content": ...}`. A function that returns a
    dict gives the reward under "reward"; its other entries are metrics.

    Raises ValueError where the tasks give no row, or no reward function.
    """

    def __init__(self, *, row: Mapping[str, Any] | None = None, reward: Reward | None = None):
        if row is None or reward is None:
            raise InputError("it needs config.tasks.path and config.tasks.reward")
        self._row, self._reward = row, reward

    def start(self) -> Start:
        """Returns the prompt."""
        return prompt_of(self._row)

    def step(self, reply: str) -> StepResult:
        """Returns the reward of the reply."""
        paid = self._reward(reply, **self._row)
        metrics = dict(paid) if isinstance(paid, Mapping) else {"reward": paid}
        if "reward" not in metrics:
            raise InputError(f"the reward function returned {metrics}, without 'reward'")
        reward = metrics.pop("reward")
        # As numpy's numbers and bool: what equals a float is one.
        return StepResult(reward=float(reward), done=True, stop_reason="answered", metrics=metrics)


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
