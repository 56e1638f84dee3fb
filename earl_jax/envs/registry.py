# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The environment and the tasks that a config names, known ones or a user's own."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from earl_jax.envs.agents.agent import Agent
from earl_jax.envs.environment import Environment
from earl_jax.envs.games.board_game import BoardGame
from earl_jax.envs.games.kuhn_poker import KuhnPoker
from earl_jax.envs.games.text_arena import TextArena
from earl_jax.envs.games.trail import Trail
from earl_jax.envs.reasoning_gym import ReasoningGym
from earl_jax.envs.single_turn import SingleTurn
from earl_jax.envs.tasks import Dataset, TaskArgs, TasksConfig, TaskSource, open_tasks
from earl_jax.envs.tools.tool_use import ToolUse
from earl_jax.settings.arguments import (
    argument_names,
    check_arguments,
    check_call,
    defaults_of,
    without_defaults,
)
from earl_jax.settings.errors import InputError, in_words
from earl_jax.settings.named import find_named

# config.env.name: the maker of an episode's environment from config.env.args and its task.
ENVIRONMENTS: dict[str, Callable[..., Environment]] = {
    "tic_tac_toe": functools.partial(BoardGame, game="tic_tac_toe"),
    "connect_four": functools.partial(BoardGame, game="connect_four"),
    "board_game": BoardGame,
    "kuhn_poker": KuhnPoker,
    "trail": Trail,
    "single_turn": SingleTurn,
    "tools": ToolUse,
    "reasoning_gym": ReasoningGym,
    "textarena": TextArena,
    "agent": Agent,
}


# Threads for calls of environments, unless the setting says more.
MOST_WORKERS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The environment, and how environments are run.

    `name` is that of a known one (docs/howto/environment.md), or a class of the user's own as
    "module:Class". `args` are keyword arguments of its constructor, beside those that its tasks
    give (config.tasks). `timeout_s` is the most seconds that one call of an environment may take.
    `num_workers` is the number of threads that make such calls; 0 takes one for each slot
    (`config.rollout.num_slots`), at most 32. An idle one costs nothing; with few, episodes wait for
    the slow tools of others, and with many, calls that compute in Python slow each other down
    towards the time limit. Coroutines (`async def`) share one more thread, in which any number may
    wait.

    An episode fails if its environment raises, hangs or says what cannot be encoded; nothing is
    learnt from it. Where all episodes of a run's first step fail, the run ends (of the first
    `max_staleness` + 1 steps, where `config.asynchrony.rule` is another than "in_order"); later it
    goes on however many fail, and waits behind each step in which all did (of those that are open
    at once, behind the last), for 1 s at first and at most 5 minutes.
    """

    name: str = "tic_tac_toe"
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    timeout_s: float = 10.0
    num_workers: int = 0

    def workers_for(self, num_slots: int) -> int:
        """Returns the number of threads beside so many slots."""
        return self.num_workers or min(num_slots, MOST_WORKERS)

    @property
    def title(self) -> str:
        """The name for people."""
        return str(self.args.get("game", self.name))

    @property
    def plural(self) -> str:
        """The word for several episodes: "games", or "episodes" where the class has no `plural`."""
        made_by = self._find()
        return getattr(getattr(made_by, "func", made_by), "plural", "episodes")

    @property
    def all_args(self) -> dict[str, Any]:
        """Returns `args` with the class's defaults for the others, for config.json."""
        made_by = self._find()
        own = defaults_of(made_by)
        return {k: v for k, v in own.items() if k not in self._reserved(made_by)} | dict(self.args)

    def maker(self) -> Callable[..., Environment]:
        """Returns the function that makes an environment from its task's arguments.

        Raises ValueError for an unknown name or argument, with the nearest that is known.
        """
        made_by = self._find()
        given = without_defaults(made_by, self.args)
        check_arguments(made_by, given, "config.env.args", reserved=self._reserved(made_by))
        return functools.partial(made_by, **given)

    def validate(self) -> None:
        """Raises ValueError that names the field, what it holds and what it may hold."""
        if not 0 < self.timeout_s < math.inf:
            raise InputError(
                f"config.env.timeout_s is {self.timeout_s}; it must be a positive number of seconds"
            )
        if self.num_workers < 0:
            raise InputError(
                f"config.env.num_workers is {self.num_workers}; it must be at least 0 (0: one for "
                f"each slot, at most {MOST_WORKERS})"
            )
        self.maker()

    def _find(self) -> Callable[..., Environment]:
        return find_named(self.name, ENVIRONMENTS, type, "config.env.name")

    def _reserved(self, made_by: Callable[..., Environment]) -> set[str]:
        """Returns the arguments that the name, or tasks, already give."""
        return {"seed", "index", "row", "reward", *getattr(made_by, "keywords", {})}


class Played(NamedTuple):
    """The environment of a run, made as `make(**task)`, and the source of its tasks."""

    make: Callable[..., Environment]
    tasks: TaskSource

    @property
    def first_args(self) -> TaskArgs:
        """Returns the arguments of the first task."""
        return self.tasks.batch(0)[0]


def open_environment(env: EnvConfig, tasks: TasksConfig, *, seed: int, num_tasks: int) -> Played:
    """Returns the environment that a config names, and its tasks: `num_tasks` a step.

    Makes an environment of the first task, so that arguments that cannot be are found out now.

    Raises:
        ValueError: a setting that is impossible; a class whose constructor raises, or whose methods
            are not those of an `Environment`; a reward function that does not take some row.
    """
    make = env.maker()
    source = open_tasks(tasks, make, seed=seed, num_tasks=num_tasks)
    played = Played(make, source)
    try:
        first = played.first_args
    except Exception as error:  # noqa: BLE001 - a user's own task source
        raise InputError(f"config.tasks.name is {tasks.name!r}, and {in_words(error)}") from error
    _check_task(env.name, make, first)
    try:
        made = make(**first)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own environment
        raise InputError(
            f"config.env.name is {env.name!r} with config.env.args {dict(env.args)}, and its "
            f"environment cannot be made: {in_words(error)}"
        ) from error
    for call, *given in (("start()",), ("step(reply)", "")):
        method = getattr(made, call.partition("(")[0], None)
        if not callable(method):
            raise InputError(f"config.env.name is {env.name!r}, which has no method {call}")
        check_call(method, f"{call} of config.env.name {env.name!r}", *given)
    if isinstance(made, SingleTurn | ToolUse | Agent) and "reward" in first:
        rows = source.kinds() if isinstance(source, Dataset) else [("", first["row"])]
        for where, row in rows:
            fields = "".join(f", {field}=..." for field in row)
            call = f"{where}reward(reply{fields}) of config.tasks.reward {tasks.reward!r}"
            check_call(first["reward"], call, "", **row)
    return played


def _check_task(name: str, make: Callable[..., Environment], task: TaskArgs) -> None:
    """Raises ValueError for an argument of the task that the environment does not take."""
    taken = argument_names(make)
    for argument in task:
        if taken is None or argument in taken:
            continue
        setting, what = {
            "row": ("config.tasks.path", "no rows of a dataset"),
            "reward": ("config.tasks.reward", "no reward function"),
        }.get(argument, ("config.tasks.name", f"no {argument!r} of a task"))
        raise InputError(
            f"{setting} is given, and config.env.name {name!r} takes {what}: its constructor has "
            f"no argument {argument!r}"
        )
