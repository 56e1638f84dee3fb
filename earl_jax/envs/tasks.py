# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Sources of tasks: environments by seed, or the rows of a dataset."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from earl_jax.envs.environment import check_start
from earl_jax.envs.single_turn import prompt_of
from earl_jax.settings.arguments import accepted, check_arguments
from earl_jax.settings.errors import InputError
from earl_jax.settings.folders import searched_from
from earl_jax.settings.named import find_named

Row = TypeVar("Row")
# Keyword arguments of the environment that plays a task.
TaskArgs = Mapping[str, Any]
# Evaluation tasks have numbers, and so seeds, that no training task reaches.
FIRST_EVALUATION = 2**30


class TaskSource(Protocol):
    """A source of the tasks of each step.

    A task is the keyword arguments of its environment that differ from task to task. All episodes
    of a group (config.rollout.group_size) play the same task. Both methods are functions of their
    argument alone, called as often as a run wants, so that a resumed run plays the same tasks.
    """

    def batch(self, step: int) -> list[TaskArgs]:
        """Returns the tasks of training step `step`, from 0 to config.num_steps - 1.

        There are config.rollout.episodes_per_step / group_size.
        """
        ...

    def evaluation(self, number: int) -> list[TaskArgs]:
        """Returns `number` tasks to evaluate with, the same every time."""
        ...


@runtime_checkable
class KeepsState(Protocol):
    """A task source with state in the checkpoints."""

    def state(self) -> dict[str, Any]:
        """Returns the state that `restore` takes, as JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Takes the state of the run that is resumed. Raises ValueError where it cannot."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """The tasks.

    `name` is "seeds", "dataset" or a class of the user's own as "module:Class" ("auto" takes
    "dataset" where config.tasks.path is given, else "seeds"). `args` are the arguments of a source
    of one's own, beside those of `seed`, `num_tasks` (a step) and `environment` that its
    constructor names.

    "seeds" gives each environment a `seed` and `index`, the number of the task, as far as its
    constructor has arguments of these names. "dataset" gives each environment a `row` of the
    JSONL file `path`, a JSON object with a `prompt` and fields of the user's own. Evaluations take
    the rows of `eval_path`, or else the same ones. The function `reward` ("module:function") is
    given to the environment, "single_turn", "tools" or "agent", which calls it as
    reward(reply, **row).
    """

    name: str = "auto"
    path: str = ""
    eval_path: str = ""
    reward: str = ""
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def source(self) -> str:
        """Returns the name of the source, "auto" resolved."""
        return ("dataset" if self.path else "seeds") if self.name == "auto" else self.name


class Seeds:
    """Environments that differ by their seed: task `index` of a run has the seed of its number."""

    def __init__(self, *, seed: int, num_tasks: int, environment: Callable[..., Any]):
        self._num_tasks = num_tasks
        self._seeded = Seeded(seed, environment)

    def batch(self, step: int) -> list[TaskArgs]:
        """Returns the tasks of a step."""
        return [self._seeded(step * self._num_tasks + i) for i in range(self._num_tasks)]

    def evaluation(self, number: int) -> list[TaskArgs]:
        """Returns tasks that are never trained on."""
        return [self._seeded(FIRST_EVALUATION + i) for i in range(number)]


class Dataset:
    """The rows of a JSONL file, each once an epoch, in an order of `seed` and the epoch.

    The order is a function of the step alone: a run that is resumed goes on where it was.

    Raises ValueError, with the line's number, for a file whose rows are not such as they must be.
    """

    def __init__(
        self,
        *,
        path: str,
        eval_path: str = "",
        reward: str = "",
        seed: int,
        num_tasks: int,
        environment: Callable[..., Any],
    ):
        rows, self._digest = read_rows(path, "config.tasks.path", _task_row)
        self._rows = self._eval_rows = list(rows.values())
        self._kinds = _kinds(rows, path)
        if eval_path:
            rows, _ = read_rows(eval_path, "config.tasks.eval_path", _task_row)
            self._eval_rows = list(rows.values())
            self._kinds += _kinds(rows, eval_path)
        self._path, self._num_tasks = path, num_tasks
        self._seeded = Seeded(seed, environment)
        kind: Any = Callable
        self._reward = find_named(reward, {}, kind, "config.tasks.reward") if reward else None
        self._shuffled = Shuffled(seed, len(self._rows))

    def batch(self, step: int) -> list[TaskArgs]:
        """Returns the next rows of the epoch, and of the next epoch where it ends."""
        first = step * self._num_tasks
        return [self._task(first + i) for i in range(self._num_tasks)]

    def evaluation(self, number: int) -> list[TaskArgs]:
        """Returns the file's first rows, from the start again where they are too few."""
        rows = self._eval_rows
        return [self._args(rows[i % len(rows)], FIRST_EVALUATION + i) for i in range(number)]

    def kinds(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns the first row of each file with its fields, and the file and line of it."""
        return self._kinds

    def state(self) -> dict[str, Any]:
        """Returns a digest of the rows."""
        return {"rows": len(self._rows), "digest": self._digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ValueError where these are other rows than when the run began."""
        if state != self.state():
            raise InputError(
                f"config.tasks.path is {self._path!r}, whose {len(self._rows)} rows are not the "
                f"{state['rows']} that this run began with; put these back, or name another "
                "--workdir"
            )

    def _task(self, index: int) -> TaskArgs:
        return self._args(self._rows[self._shuffled[index]], index)

    def _args(self, row: dict[str, Any], index: int) -> TaskArgs:
        given = {"row": row} | ({"reward": self._reward} if self._reward else {})
        return given | self._seeded(index)


# config.tasks.name
SOURCES: dict[str, type] = {"seeds": Seeds, "dataset": Dataset}


def open_tasks(
    config: TasksConfig, environment: Callable[..., Any], *, seed: int, num_tasks: int
) -> TaskSource:
    """Returns the source that a config names.

    Raises ValueError for an unknown name or argument, and for a dataset that cannot be.
    """
    source = find_named(config.source, SOURCES, type, "config.tasks.name")
    offered = {"seed": seed, "num_tasks": num_tasks, "environment": environment}
    own = {"path": config.path, "eval_path": config.eval_path, "reward": config.reward}
    if source is Dataset:
        offered |= own
    check_arguments(source, config.args, "config.tasks.args", reserved={*offered, *own})
    return source(**accepted(source, offered), **config.args)


class Seeded:
    """Returns a task's index and seed when called with its index, as the constructor takes them."""

    def __init__(self, seed: int, environment: Callable[..., Any]):
        self._seed = seed
        self._wanted = accepted(environment, {"seed": 0, "index": 0}).keys()

    def __call__(self, index: int) -> dict[str, int]:
        """Returns the arguments that the environment's constructor names."""
        own = int(np.random.SeedSequence([self._seed, index]).generate_state(1)[0])
        found = {"seed": own, "index": index}
        return {name: found[name] for name in self._wanted}


class Shuffled:
    """An endless sequence of the numbers below `number`, each once an epoch.

    The order of an epoch depends on `seed` and the number of the epoch alone.
    """

    def __init__(self, seed: int, number: int):
        self._seed, self._number = seed, number
        self._order = functools.lru_cache(maxsize=2)(self._order_of)

    def __getitem__(self, index: int) -> int:
        """Returns the number at this place, from 0 on."""
        epoch, position = divmod(index, self._number)
        return int(self._order(epoch)[position])

    def _order_of(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(self._number)


def read_rows(
    path: str, setting: str, take: Callable[[dict[str, Any]], Row]
) -> tuple[dict[int, Row], str]:
    """Returns the results of `take` on the objects of a JSONL file by line, and the file's digest.

    An empty line has none. Raises ValueError naming the file and the line that is no object, or
    of which `take` raises ValueError or TypeError.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        what = f"{error.strerror or error}{searched_from(path)}"
        raise InputError(f"{setting} is {path!r}, which cannot be read: {what}") from error
    rows = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = _json(line)
            if not isinstance(row, dict):
                raise InputError(f"it must be a JSON object; got {line[:60]!r}")
            rows[number] = take(row)
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}, line {number}: {error} ({setting})") from error
    if not rows:
        raise InputError(f"{setting} is {path!r}, which holds no rows")
    return rows, hashlib.sha256(data).hexdigest()


def _kinds(rows: Mapping[int, dict[str, Any]], path: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the first of the rows with each set of fields, and its file and line."""
    found: dict[frozenset[str], tuple[str, dict[str, Any]]] = {}
    for line, row in rows.items():
        found.setdefault(frozenset(row), (f"{path}, line {line}: ", row))
    return list(found.values())


def _json(line: bytes) -> Any:
    """Returns the value of a line. Raises ValueError for one that is no JSON."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        # Its own words say "line 1", which is the file's line here.
        raise InputError(
            f"no JSON at column {error.colno}: {error.msg}; each line must be a JSON object"
        ) from error
    except RecursionError:
        raise InputError("arrays or objects of too many levels") from None


def _task_row(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a task. Raises ValueError for one that is none."""
    if "reply" in row:
        raise InputError("a field is named 'reply', which the policy's reply is; rename it")
    check_start(prompt_of(row))
    return row
