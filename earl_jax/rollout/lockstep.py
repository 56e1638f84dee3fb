# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Environments of an engine that spans processes, which all play the same episodes in lockstep.

Each process schedules, fills pages and counts by itself, and comes to the same, because all that it
acts on is the same: the tasks, what the engine samples, and here the answers of environments. Those
run in the first process alone. Before each round it says which answers have come, in their order;
the others render these messages for conversations of their own, as it has done, and check that they
came to the same ids. The clock (patience, time limits) and signals come in at this seam only.
"""

import dataclasses
import json
import numbers
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from earl_jax.envs.environment import Environment, Message, Start, StepResult
from earl_jax.envs.pool import EnvironmentPool, Failure
from earl_jax.envs.round_wait import RoundWait
from earl_jax.launch.cluster import Cluster
from earl_jax.rollout.answers import Answer, Answers
from earl_jax.rollout.end import Stopped
from earl_jax.rollout.task import Task
from earl_jax.settings.errors import RunError

_LOOK_S = 1.0
_WHAT = "the answers of environments before a round"


class Lockstep:
    """The environments of all processes, for one rollout. Host-side state only.

    It is the pool of the rollout's service in each process, and makes its environments.
    """

    def __init__(
        self,
        cluster: Cluster,
        pool: EnvironmentPool,
        make: Callable[[Task], Environment],
        stop: Callable[[], str],
    ) -> None:
        """`pool` and `make` are those of the first process; `stop()` names a signal to stop."""
        self._cluster, self._pool, self._make, self._stop = cluster, pool, make, stop
        # In the other processes: the result that the first one's environment has given.
        self._result: Start | StepResult | None = None
        self._calls: dict[int, Callable[[], Answer]] = {}
        self._own: Answers | None = None
        self._last_s = 0.0

    def calls(self, look: Callable[[], None] = lambda: None) -> Answers:
        """Returns this object, as the calls of one rollout."""
        if self._cluster.is_first:
            self._own = self._pool.calls(self._look)
        return self

    def _look(self) -> None:
        """Tells the others once a second that the first process waits, and learns of signals."""
        if time.monotonic() - self._last_s >= _LOOK_S:
            self._exchange(None)

    # An environment of the other processes.

    def make_environment(self, task: Task) -> Environment:
        """Returns the environment of a task; in the other processes one that repeats."""
        return self._make(task) if self._cluster.is_first else self  # pyright: ignore

    def start(self) -> Any:
        """Returns the start of the first process's environment."""
        return self._result

    def step(self, reply: str) -> Any:
        """Returns the result of the first process's environment."""
        return self._result

    # Answers.

    def submit(self, calls: Mapping[int, Callable[[], Answer]]) -> None:
        """Lets workers of the first process make these calls."""
        if self._own is not None:
            self._own.submit(calls)
        else:
            self._calls |= calls

    def take(
        self, wait: float | RoundWait = 0.0, *, at_least_one: bool = False
    ) -> dict[int, Answer | Failure]:
        """Returns the outcomes that the first process has taken, in its order, in every process.

        Raises Stopped where a process has a signal to stop.
        """
        if self._own is not None:
            taken = self._own.take(wait, at_least_one=at_least_one)
            outcomes = self._exchange([[key, _as_json(taken[key])] for key in taken])
            return {key: _with_result(taken[key], words) for key, words in outcomes}
        while (outcomes := self._exchange(None)) is None:
            pass
        return {key: self._repeated(self._calls.pop(key), words) for key, words in outcomes}

    def poll(self, polls: Mapping[int, Callable[[], str | None]]) -> dict[int, str]:
        """Returns none: only the first process knows, and replies come one after the other."""
        return {}

    def _exchange(self, outcomes: list[Any] | None) -> Any:
        """Returns the first process's outcomes in every process; None while it waits for some."""
        self._last_s = time.monotonic()
        each = self._cluster.gather({"stop": self._stop(), "outcomes": outcomes}, _WHAT)
        if signal_name := next(filter(None, (one["stop"] for one in each)), ""):
            raise Stopped(signal_name)
        return each[0]["outcomes"]

    def _repeated(self, call: Callable[[], Answer], words: dict[str, Any]) -> Answer | Failure:
        """Returns the outcome of a call whose environment is in the first process."""
        if "failure" in words:
            return Failure(**words["failure"])
        self._result = _result(words)
        answer = call()
        if _digest(answer) != words["digest"]:
            raise RunError(
                "a message of an environment has other ids in this process than in process 0, and "
                "the processes play in lockstep: config.chat's template, or the tokenizer, depends "
                "on the host or on the time"
            )
        return answer


def _as_json(outcome: Answer | Failure) -> dict[str, Any]:
    """Returns an outcome as JSON: the result of the environment, and a digest of its ids."""
    if isinstance(outcome, Failure):
        return {"failure": dataclasses.asdict(outcome)}
    result = outcome.result
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    kind = "start" if isinstance(result, Start) else "step"
    return {kind: json.loads(json.dumps(fields, default=_plain)), "digest": _digest(outcome)}


def _with_result(outcome: Answer | Failure, words: dict[str, Any]) -> Answer | Failure:
    """Returns the first process's outcome with the numbers that the others have of it."""
    if isinstance(outcome, Failure):
        return outcome
    return dataclasses.replace(outcome, result=_result(words))


def _plain(value: Any) -> Any:
    """Returns numbers of numpy, mappings and messages as JSON has them."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return dict(value) if isinstance(value, Mapping) else dataclasses.asdict(value)


def _result(words: dict[str, Any]) -> Start | StepResult:
    """Returns a start or a step from its fields as JSON, in which tuples are lists."""
    kind = Start if "start" in words else StepResult
    fields = dict(words["start" if "start" in words else "step"])
    fields["messages"] = tuple(Message(**message) for message in fields["messages"])
    for name in fields.keys() & {"choices", "allowed_token_ids", "stop", "tools"}:
        fields[name] = tuple(fields[name])
    return kind(**fields)


def _digest(answer: Answer) -> int:
    """Returns a digest of all that an answer adds to its episode's ids."""
    failure = answer.failure and answer.failure.stop_reason
    observation = answer.observation
    beside = (observation and observation.forks, answer.choices, answer.allowed, failure)
    # Their bytes: the text of 16,384 ids takes milliseconds.
    return zlib.crc32(
        repr(beside).encode(), zlib.crc32(observation.array.data) if observation else 0
    )
