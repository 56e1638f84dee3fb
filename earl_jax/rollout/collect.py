# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A closed rollout: a list of tasks that a service plays to their end."""

import dataclasses
from collections.abc import Sequence

from earl_jax.engine.session import Session
from earl_jax.rollout.episode import Task
from earl_jax.rollout.row_pool import Finished
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.stats import RolloutStats
from earl_jax.trajectory import Experience, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """Results of a rollout: host facts in the order of the tasks, and where it ended.

    Task i is row `rows[i]` of the session's experience, and row i of `experience`.
    """

    trajectories: list[Trajectory]
    session: Session
    rows: list[int]
    stats: RolloutStats

    @property
    def experience(self) -> Experience:
        """A copy of the device rows, in the order of the tasks."""
        session = self.session
        return session.engine.row_copies.gather(session.state.experience, self.rows)


def collect(service: RolloutService, tasks: Sequence[Task]) -> Rollout:
    """Plays every task to its end on a fresh service.

    There are at most `service.rows.total` tasks.
    """
    service.submit(tasks)
    found: dict[int, Finished] = {}
    for finished in service.drain():
        # Between two rounds.
        found.update((each.ticket, each) for each in finished)
    done = [found[ticket].trajectory for ticket in range(len(tasks))]
    return Rollout(
        trajectories=[dataclasses.replace(each, row=index) for index, each in enumerate(done)],
        session=service.close(),
        rows=[each.row for each in done],
        stats=service.stats,
    )
