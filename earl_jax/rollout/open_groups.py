# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Open groups of an asynchronous run: played by a service, and not trained on yet. Host-side."""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from earl_jax.envs.tasks import KeepsState
from earl_jax.rollout.episode import Task
from earl_jax.rollout.row_pool import Finished
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.staleness import Group
from earl_jax.rollout.tasks import Tasks


@dataclasses.dataclass(kw_only=True)
class _Open:
    """A group's tickets, its finished episodes by ticket, and when the last of them ended."""

    tickets: list[int]
    episodes: dict[int, Finished] = dataclasses.field(default_factory=dict)
    rank: int | None = None


class OpenGroups:
    """Groups by number: group g is the g % `size`-th of step g // `size` (`Tasks.training`)."""

    def __init__(self, tasks: Tasks) -> None:
        """Begins with none; they are numbered as those of `tasks`."""
        self._tasks, self.group_size = tasks, tasks.rollout.group_size
        self.size = tasks.rollout.episodes_per_step // self.group_size
        self._groups: dict[int, _Open] = {}
        self._num_finished = 0
        # By step: its tasks, and the source's state before they were drawn, where it has one.
        self._drawn: dict[int, list[Task]] = {}
        self._states: dict[int, dict[str, Any]] = {}

    @property
    def numbers(self) -> list[int]:
        """The numbers of the open groups, in order."""
        return sorted(self._groups)

    def submit(self, service: RolloutService, numbers: Sequence[int]) -> None:
        """Lets the service play these groups, from their beginning."""
        for number in numbers:
            step, place = divmod(number, self.size)
            first = place * self.group_size
            tasks = self._of_step(step)[first : first + self.group_size]
            self._groups[number] = _Open(tickets=service.submit(tasks))

    def _of_step(self, step: int) -> list[Task]:
        """Returns the tasks of a step; they are drawn from their source once, in order."""
        source = self._tasks.played.tasks
        for each in range(max(self._drawn, default=step - 1) + 1, step + 1):
            if isinstance(source, KeepsState):
                self._states[each] = copy.deepcopy(source.state())
            self._drawn[each] = self._tasks.training(each)
        return self._drawn[step]

    def source_state(self, step: int) -> dict[str, Any] | None:
        """Returns the source's state before it gave the oldest open task; None: it has none.

        No group is older than those of `step`, where none is open.
        """
        oldest = min(self._groups, default=step * self.size) // self.size
        for kept in (self._drawn, self._states):
            for past in [past for past in kept if past < oldest]:
                del kept[past]
        return self._states.get(oldest)

    def add(self, finished: Sequence[Finished]) -> None:
        """Adds finished episodes to their groups."""
        owners = {ticket: group for group in self._groups.values() for ticket in group.tickets}
        for each in finished:
            group = owners[each.ticket]
            group.episodes[each.ticket] = each
            if len(group.episodes) == self.group_size:
                group.rank, self._num_finished = self._num_finished, self._num_finished + 1

    def described(self, service: RolloutService) -> list[Group]:
        """Returns the open groups as the rules see them."""
        live = service.oldest_versions()
        return [
            Group(number, min(_versions(group, live), default=None), group.rank)
            for number, group in self._groups.items()
        ]

    def take(self, chosen: Sequence[Group]) -> list[Finished]:
        """Returns the episodes of these groups, which are over and open no longer."""
        groups = [self._groups.pop(group.number) for group in chosen]
        return [group.episodes[ticket] for group in groups for ticket in group.tickets]


def _versions(group: _Open, live: dict[int, int]) -> Iterator[int]:
    for ticket in group.tickets:
        if ticket in live:
            yield live[ticket]
        elif ticket in group.episodes:
            oldest = group.episodes[ticket].trajectory.oldest_version
            if oldest is not None:
                yield oldest
