# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A closed rollout: a list of tasks that a service plays to their end."""

import dataclasses
from collections.abc import Sequence

from earl_jax.engine.rows import Rows
from earl_jax.engine.session import Session
from earl_jax.rollout.episode import Task
from earl_jax.rollout.row_pool import Finished, move_rows, moves_home
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.stats import RolloutStats
from earl_jax.trajectory import Experience, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """Results of a rollout: host facts in the order of the tasks, the session with the rows."""

    trajectories: list[Trajectory]
    session: Session
    stats: RolloutStats
    rows: Rows

    @property
    def experience(self) -> Experience:
        """The device rows; row i is the episode of task i. A copy where there are spare rows."""
        session = self.session
        return session.engine.row_copies.in_order(session.state.experience, self.rows)


def collect(service: RolloutService, tasks: Sequence[Task]) -> Rollout:
    """Plays every task to its end on a fresh service; row i of the experience is task i's.

    There are at most `service.rows.num_places` tasks.
    """
    service.submit(tasks)
    found: dict[int, Finished] = {}
    for finished in service.drain():
        # Between two rounds.
        found.update((each.ticket, each) for each in finished)
    done = [found[ticket].trajectory for ticket in range(len(tasks))]
    moves = moves_home(service.rows, [(each.row, each.num_tokens) for each in done])
    return Rollout(
        trajectories=[dataclasses.replace(each, row=index) for index, each in enumerate(done)],
        session=move_rows(service.close(), moves),
        stats=service.stats,
        rows=service.rows,
    )
