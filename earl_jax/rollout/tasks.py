# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks of a run's steps, from the task source, numbered and in groups."""

import copy
import dataclasses
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from earl_jax.envs.examples import Example, Ids, example_ids, play_example
from earl_jax.envs.registry import Played
from earl_jax.envs.tasks import KeepsState, TaskArgs
from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.chat_dataset import ChatDataset
from earl_jax.rollout.config import RolloutConfig
from earl_jax.rollout.task import Task
from earl_jax.settings.errors import InputError, RunError, in_words

# Evaluation episodes have numbers, and so seeds, that no training episode reaches.
FIRST_EVAL_EPISODE = 2**30


def with_lengths(tasks: Iterable[Task], lengths: Mapping[int, int]) -> list[Task]:
    """Returns the tasks with their last `lengths` (`scheduler.next_lengths`), where known."""
    if not lengths:
        return list(tasks)
    return [dataclasses.replace(task, length_before=lengths.get(task.kind)) for task in tasks]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tasks:
    """Numbers the tasks of `played.tasks`; gives supervised updates their examples.

    These are `conversations`, or episodes with the environment's example replies without any.
    Evaluations score the conversations that are `held_out`.
    """

    played: Played
    rollout: RolloutConfig
    renderer: ChatRenderer
    seed: int
    num_steps: int
    conversations: ChatDataset | None = None
    held_out: ChatDataset | None = None

    def training(self, step: int) -> list[Task]:
        """Returns the episodes of RL step `step`; those of a group play the same task.

        Where more steps are asked for than the run has, tasks come again from the first on.

        Raises ValueError where the source gave another number of tasks than there are groups.
        """
        count, size = self.rollout.episodes_per_step, self.rollout.group_size
        tasks = self.played.tasks.batch(step % self.num_steps)
        if len(tasks) != count // size:
            raise InputError(
                f"the task source gave {len(tasks)} tasks for step {step}; there must be "
                f"{count // size} (config.rollout.episodes_per_step / group_size)"
            )
        first = step * count
        return [
            Task(episode=first + i, group=(first + i) // size, args=tasks[i // size])
            for i in range(count)
        ]

    def evaluation(self, number: int, samples: int = 1) -> list[Task]:
        """Returns `samples` episodes of each of so many evaluation tasks, the same every time."""
        tasks, first = self.played.tasks.evaluation(number), FIRST_EVAL_EPISODE
        return [
            Task(episode=first + i, group=first + i // samples, args=tasks[i // samples])
            for i in range(samples * len(tasks))
        ]

    def examples(self, step: int, updates: int) -> list[list[Ids]]:
        """Returns examples for the supervised updates of a step, the next ones each time."""
        numbers = range(step * updates, (step + 1) * updates)
        if self.conversations is not None:
            size = self.rollout.episodes_per_step
            return [self.conversations.batch(number, size) for number in numbers]
        batches = (self.played.tasks.batch(n % self.num_steps) for n in numbers)
        return [self._examples(tasks, n) for n, tasks in zip(numbers, batches, strict=True)]

    def state(self) -> dict[str, Any]:
        """Returns the state of the source as `tasks`, or nothing where it has none.

        That of the conversations of config.train.sft_path is beside it.
        """
        source, conversations = self.played.tasks, self.conversations
        state = {"tasks": copy.deepcopy(source.state())} if isinstance(source, KeepsState) else {}
        return state if conversations is None else {**state, "conversations": conversations.state()}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Has the source go on from what `state` returned. Raises ValueError where it cannot."""
        if isinstance(self.played.tasks, KeepsState):
            self.played.tasks.restore(copy.deepcopy(kept.get("tasks", {})))
        if self.conversations is not None:
            self.conversations.restore(kept.get("conversations", {}))

    def _examples(self, tasks: Sequence[TaskArgs], number: int) -> list[Ids]:
        rng = random.Random(f"examples {self.seed} {number}")
        rows = range(self.rollout.episodes_per_step)
        return [
            example_ids(self._example(tasks, row, rng), self.renderer, side=row) for row in rows
        ]

    def _example(self, tasks: Sequence[TaskArgs], row: int, rng: random.Random) -> Example:
        """Returns an example of a task, or of the next one whose environment does not fail.

        Raises RunError where all fail, and InputError for what an environment must not return.
        """
        failed: BaseException | None = None
        for offset in range(len(tasks)):
            try:
                environment = self.played.make(**tasks[(row + offset) % len(tasks)])
                return play_example(environment, rng)
            except InputError:
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own environment
                failed = error if failed is None else failed
        assert failed is not None, "a step without tasks"
        raise RunError(
            f"no task of the supervised examples could be played (config.train.sft_steps): "
            f"{in_words(failed)}"
        ) from failed


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of each step's groups that one of `count` processes has: `size` in a row.

    Within it groups have the numbers of a run whose steps are the part.
    """

    index: int
    count: int
    size: int

    def in_run(self, numbers: Sequence[int]) -> list[int]:
        """Returns the numbers of these groups in the run.

        Example: steps of 4 groups in two parts: the second part's 0 1 2 are 2 3 6 of the run.
        """
        pairs = (divmod(number, self.size) for number in numbers)
        return [(step * self.count + self.index) * self.size + group for step, group in pairs]

    def in_part(self, numbers: Collection[int]) -> list[int]:
        """Returns the numbers of those of these groups of the run that are of this part."""
        pairs = (divmod(number, self.size) for number in numbers)
        return [
            part // self.count * self.size + group
            for part, group in pairs
            if part % self.count == self.index
        ]


class DrawnTasks:
    """The tasks of steps, or a part of each, drawn from their source once and in order.

    A step's are kept until they are forgotten, and the state that the source had before them.
    """

    def __init__(self, tasks: Tasks, part: slice) -> None:
        """Begins with none; `next_step` is the step whose tasks the source gives next."""
        self._tasks, self._part = tasks, part
        self.next_step = 0
        self._drawn: dict[int, list[Task]] = {}
        self._states: dict[int, dict[str, Any]] = {}

    def of_step(self, step: int) -> list[Task]:
        """Returns the step's part."""
        source = self._tasks.played.tasks
        while self.next_step <= step:
            each, self.next_step = self.next_step, self.next_step + 1
            if isinstance(source, KeepsState):
                self._states[each] = copy.deepcopy(source.state())
            self._drawn[each] = self._tasks.training(each)[self._part]
        return self._drawn[step]

    def forget_before(self, step: int) -> dict[str, Any] | None:
        """Forgets older steps. Returns the source's state before this one's tasks.

        None where that is the state that it has now, or it has none.
        """
        if self.next_step < step:
            # Their groups were over when the run went on: the source gives this one's next.
            self.of_step(step - 1)
        for kept in (self._drawn, self._states):
            for past in [past for past in kept if past < step]:
                del kept[past]
        return self._states.get(step)
