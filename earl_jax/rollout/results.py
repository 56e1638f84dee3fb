# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Results of a rollout: those of one process, and those of all, which each of them knows."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from earl_jax.engine.engine import Session
from earl_jax.engine.rows import NO_ROW
from earl_jax.rollout.stats import RolloutStats
from earl_jax.telemetry.metrics import mean_gap
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


class RowOrder(NamedTuple):
    """The order of rows of episodes that processes took off a queue, each in an order of its own.

    Task i is row `rows[i]` of those of all processes that play, which have `of_each`. These are a
    multiple of the tasks of a part, so that few programs are compiled for them.

    Example: of tasks 0 to 3 the first process played 0, 2 and 3, and the second 1: it has row 0 of
    four, and so `rows` are 0 4 1 2.
    """

    of_each: int
    rows: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """A rollout of all processes; the same in each of them.

    `outcomes` are in the order of the tasks, which is that of the rows on the devices, unless there
    is an `order` of these. `stats` are those of all. `placement` is where the rollout ended
    (`Placement.as_dict`), in the process that needed the longest rows. `gaps` are those of the
    episodes' tokens (`sampling_gap`). Episodes that were `dropped` or `refilled`, and the number of
    groups that were reused, are as in `Rollout`.
    """

    outcomes: list[Outcome]
    stats: RolloutStats
    placement: dict[str, Any]
    gaps: list[tuple[float, int]]
    dropped: list[Outcome]
    refilled: list[Outcome]
    num_reused: int
    order: RowOrder | None = None

    @property
    def sampling_kl(self) -> float | None:
        """The metric of this name, of all episodes."""
        return mean_gap(self.gaps)
