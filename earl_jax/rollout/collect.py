# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A closed rollout: a list of tasks that a service plays to their end."""

import dataclasses
from collections.abc import Sequence

from earl_jax.engine.round_inputs import NO_ROW
from earl_jax.engine.session import Session
from earl_jax.rollout.episode import Task
from earl_jax.rollout.row_pool import Finished
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.stats import RolloutStats
from earl_jax.trajectory import Experience, Outcome, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """Results of a rollout: host facts in the order of the tasks, and where it ended.

    Task i is row `rows[i]` of the session's experience, and row i of `experience`. Of an open
    rollout there are also episodes that were given up since the step before (`OpenGroups`), and the
    number of groups that earlier steps had taken.
    """

    trajectories: list[Trajectory]
    session: Session
    rows: list[int]
    stats: RolloutStats
    dropped: Sequence[Outcome] = ()
    refilled: Sequence[Outcome] = ()
    num_reused: int = 0

    @property
    def experience(self) -> Experience:
        """A copy of the device rows, in the order of the tasks."""
        return self.padded_experience(len(self.rows))

    def padded_experience(self, num_rows: int) -> Experience:
        """Returns a copy of the device rows, in the order of the tasks, with zeros behind them."""
        rows = [*self.rows, *[NO_ROW] * (num_rows - len(self.rows))]
        return self.session.engine.row_copies.gather(self.session.state.experience, rows)

    def sorted_by(self, numbers: Sequence[int]) -> "Rollout":
        """Returns the rollout with its tasks in the order of their numbers, which are given."""
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        done = [self.trajectories[index] for index in order]
        return dataclasses.replace(
            self,
            trajectories=[dataclasses.replace(each, row=row) for row, each in enumerate(done)],
            rows=[self.rows[index] for index in order],
        )


def collect(service: RolloutService, tasks: Sequence[Task]) -> Rollout:
    """Plays every task to its end on a fresh service.

    There are at most `service.rows.total` tasks, with those that the service takes from elsewhere;
    these come last.
    """
    service.submit(tasks)
    found: dict[int, Finished] = {}
    for finished in service.drain():
        # Between two rounds.
        found.update((each.ticket, each) for each in finished)
    assert len(found) >= len(tasks), f"{len(found)} of {len(tasks)} tasks were played"
    done = [found[ticket].trajectory for ticket in range(len(found))]
    return Rollout(
        trajectories=[dataclasses.replace(each, row=index) for index, each in enumerate(done)],
        session=service.close(),
        rows=[each.row for each in done],
        stats=service.stats,
    )
