# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""All pairs of a rollout's and a trainer's options: what can be, and what a step costs. Pure.

Of 4,096 devices there are millions of pairs. None is looked at by itself: what a pair costs, and
what it takes of a device, is a number of its rollout and one of its trainer added up.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from earl_jax.selector.choose import NOISE, Option, Settings, obstacle
from earl_jax.selector.ladder import RolloutRung
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import Load


class Pair(NamedTuple):
    """The meshes of a step."""

    rollout: MeshShape
    train: MeshShape

    def __str__(self) -> str:
        return f"rollout on {self.rollout} with training on {self.train}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What the next step will be: tokens of each stage, and the room per episode of its options.

    `load` is what it is expected to be like, None at the start.
    """

    load: Load | None
    rollout_places: int
    train_places: int
    rollout_tokens: int
    train_tokens: int


class Kept(NamedTuple):
    """What a trainer leaves on each device while its moments wait in host memory.

    And the seconds of a step in which these go there and come back.
    """

    num_bytes: int
    moments_s: float


class Resident(NamedTuple):
    """What a trainer leaves on each device while episodes are played: all of it, or what is kept.

    `kept` is None where its moments have to stay.
    """

    num_bytes: int
    kept: Kept | None = None

    @property
    def least(self) -> int:
        """The bytes with the moments away, if they may be."""
        return self.kept.num_bytes if self.kept else self.num_bytes

    def beside(self, rollout: Option) -> int:
        """The bytes beside this option."""
        return self.least if is_offload(rollout) else self.num_bytes


def residents_of(num_bytes: Sequence[int], kept: Sequence[Kept | None]) -> list[Resident]:
    """A record for each trainer."""
    if not kept:
        return [Resident(each) for each in num_bytes]
    return [Resident(*both) for both in zip(num_bytes, kept, strict=True)]


class Cell(NamedTuple):
    """A pair by the numbers of its options."""

    row: int
    column: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """Which options can be beside each other: those whose bytes together fit the budget.

    `resident_AT` are a trainer's bytes beside a rollout, with its moments there (0) or away (1);
    `away_R` says which of the two a rollout is beside.
    """

    bytes_R: np.ndarray
    can_R: np.ndarray
    away_R: np.ndarray
    resident_AT: np.ndarray
    can_T: np.ndarray
    budget: float

    def of_row(self, row: int) -> np.ndarray:
        """bool[T]: the trainers that can be beside this rollout."""
        fits_T = self.bytes_R[row] + self.resident_AT[self.away_R[row]] <= self.budget
        return fits_T & self.can_T & self.can_R[row]

    @functools.cached_property
    def possible_R(self) -> np.ndarray:
        """bool[R]: whether any trainer can be beside it."""
        none = np.full(len(self.can_T), math.inf)
        least_A = np.where(self.can_T, self.resident_AT, none).min(axis=1)
        return (
            self.can_R
            & np.isfinite(least_A[self.away_R])
            & (self.bytes_R + least_A[self.away_R] <= self.budget)
        )

    @functools.cached_property
    def possible_T(self) -> np.ndarray:
        """bool[T]: whether it can be beside any rollout."""
        found = np.zeros(len(self.can_T), bool)
        for away in (0, 1):
            least = self.bytes_R[self.can_R & (self.away_R == away)].min(initial=math.inf)
            if math.isfinite(least):
                found |= self.can_T & (least + self.resident_AT[away] <= self.budget)
        return found

    def part(self, rows: np.ndarray, columns: np.ndarray) -> "Room":
        """Of these options alone."""
        return Room(
            bytes_R=self.bytes_R[rows],
            can_R=self.can_R[rows],
            away_R=self.away_R[rows],
            resident_AT=self.resident_AT[:, columns],
            can_T=self.can_T[columns],
            budget=self.budget,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What a pair costs: what its rollout does, its trainer beside such a rollout, and the rest.

    `rest` is the same for all. A trainer beside a rollout for which its moments go away (1) costs
    as much as it would anyway (0), and the way of the moments.
    """

    of_R: np.ndarray
    of_AT: np.ndarray
    rest: float = 0.0

    def of_row(self, row: int, room: Room) -> np.ndarray:
        """float[T]: this rollout's pairs, infinite where they cannot be."""
        cost_T = self.rest + self.of_R[row] + self.of_AT[room.away_R[row]]
        return np.where(room.of_row(row), cost_T, math.inf)

    def of(self, cell: Cell, room: Room) -> float:
        """One pair's."""
        away = room.away_R[cell.row]
        return float(self.rest + self.of_R[cell.row] + self.of_AT[away, cell.column])

    def least_R(self, room: Room) -> np.ndarray:
        """float[R]: the cheapest pair of each rollout, infinite where there is none.

        Trainers in the order of what they leave on a device: those that fit are the first so many.
        """
        found_R = np.full(len(self.of_R), math.inf)
        for away in (0, 1):
            can = np.flatnonzero(room.can_T)
            rows = np.flatnonzero(room.can_R & (room.away_R == away))
            left_R = room.budget - room.bytes_R[rows]
            least_R = _least_within(room.resident_AT[away, can], self.of_AT[away, can], left_R)
            found_R[rows] = self.rest + self.of_R[rows] + least_R
        return found_R

    def rollout_part_T(self, row: int, room: Room) -> np.ndarray:
        """float[T]: what this rollout costs beside each trainer, with the way of the moments."""
        return self.of_R[row] + (self.of_AT[room.away_R[row]] - self.of_AT[0])

    def least_rollout_T(self, room: Room) -> np.ndarray:
        """float[T]: the least that a rollout costs that can be beside each trainer."""
        found_T = np.full(self.of_AT.shape[1], math.inf)
        for away in (0, 1):
            rows = np.flatnonzero(room.can_R & (room.away_R == away))
            left_T = room.budget - room.resident_AT[away]
            least_T = _least_within(room.bytes_R[rows], self.of_R[rows], left_T)
            found_T = np.minimum(found_T, least_T + (self.of_AT[away] - self.of_AT[0]))
        return found_T


def _least_within(bytes_N: np.ndarray, cost_N: np.ndarray, left: np.ndarray) -> np.ndarray:
    """For each so many bytes the least cost of what takes no more of them, infinite for none."""
    order = np.argsort(bytes_N)
    least = np.minimum.accumulate(cost_N[order])
    number = np.searchsorted(bytes_N[order], left, side="right")
    return np.append(math.inf, least)[number]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTable:
    """All pairs: which can be, a step's seconds, and what going there costs once."""

    room: Room
    step_s: Cost
    switch_s_T: np.ndarray

    def step_and_switch_s(self, lasts: int) -> Cost:
        """A step's seconds where the switch is spread over so many."""
        return dataclasses.replace(self.step_s, of_AT=self.step_s.of_AT + self.switch_s_T / lasts)


def tabulate(
    rollouts: Sequence[Option],
    trains: Sequence[Option],
    residents: Sequence[Resident],
    current: Pair | None,
    work: Work,
    settings: Settings,
) -> StepTable:
    """Of all options of the two stages."""
    other_s = work.load.other_s if work.load else 0.0
    rollout_s_R = np.array([stage_s(o, work.rollout_tokens) + o.move_s for o in rollouts])
    train_s_T = np.array([stage_s(option, work.train_tokens) for option in trains])
    moments_s_T = np.array([r.kept.moments_s if r.kept else 0.0 for r in residents])
    stays_T = np.array([current is None or o.mesh == current.train for o in trains])
    return StepTable(
        room=room_of(rollouts, trains, residents, settings),
        step_s=Cost(
            of_R=rollout_s_R, of_AT=np.stack([train_s_T, train_s_T + moments_s_T]), rest=other_s
        ),
        switch_s_T=np.where(stays_T, 0.0, [option.move_s for option in trains]),
    )


def room_of(
    rollouts: Sequence[Option],
    trains: Sequence[Option],
    residents: Sequence[Resident],
    settings: Settings,
) -> Room:
    """Which options of the two stages can be together."""
    whole = [resident.num_bytes for resident in residents]
    kept = [resident.least for resident in residents]
    return Room(
        bytes_R=np.array([o.bytes_per_device - o.slack_bytes for o in rollouts], np.float64),
        can_R=np.array([not option.impossible for option in rollouts]),
        away_R=np.array([int(is_offload(option)) for option in rollouts]),
        resident_AT=np.array([whole, kept], np.float64),
        can_T=np.array([not obstacle(option, settings) for option in trains]),
        budget=math.inf if settings.budget_bytes is None else settings.budget_bytes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offers:
    """What a step's meshes are chosen from, and what each trainer leaves on a device meanwhile."""

    rollouts: list[Option]
    trains: list[Option]
    resident_bytes: list[int]
    kept: list[Kept]

    def room(self, settings: Settings) -> Room:
        """Which of them can be together."""
        residents = residents_of(self.resident_bytes, self.kept)
        return room_of(self.rollouts, self.trains, residents, settings)


def is_offload(rollout: Option) -> bool:
    """Whether the trainer's moments wait in host memory while episodes are played so."""
    return isinstance(rollout.rung, RolloutRung) and rollout.rung.offload


def are_measured(options: Sequence[Option], possible: np.ndarray) -> bool:
    """Whether all that can be chosen have a speed. No others need one."""
    return all(o.tokens_per_s for o, can in zip(options, possible, strict=True) if can)


def stage_s(option: Option, tokens: int) -> float:
    """Seconds of so many tokens, 0 where the speed is not known."""
    return tokens / option.tokens_per_s if option.tokens_per_s else 0.0


def here_in(
    rollouts: Sequence[Option],
    trains: Sequence[Option],
    current: Pair | None,
    cost: Cost,
    room: Room,
    settings: Settings,
) -> Cell | None:
    """The best pair of options on the meshes in use; None where none of them can be."""
    if current is None:
        return None
    rows = np.array([n for n, o in enumerate(rollouts) if o.mesh == current.rollout], int)
    columns = np.array([n for n, o in enumerate(trains) if o.mesh == current.train], int)
    if not (len(rows) and len(columns)):
        return None
    part = room.part(rows, columns)
    if not part.possible_R.any():
        return None
    of_here = dataclasses.replace(cost, of_R=cost.of_R[rows], of_AT=cost.of_AT[:, columns])
    found = first_two(of_here, part, settings)[0]
    return Cell(int(rows[found.row]), int(columns[found.column]))


def changes_of(rollouts: Sequence[Option], trains: Sequence[Option], current: Pair | None) -> Cost:
    """How many meshes of the current pair each pair changes; never 0, because it is a cost."""
    if current is None:
        return Cost(of_R=np.ones(len(rollouts)), of_AT=np.zeros((2, len(trains))))
    leaves_R = np.array([option.mesh != current.rollout for option in rollouts], np.float64)
    leaves_T = np.array([option.mesh != current.train for option in trains], np.float64)
    return Cost(of_R=1.0 + leaves_R, of_AT=np.stack([leaves_T, leaves_T]))


def first_two(cost: Cost, room: Room, settings: Settings) -> tuple[Cell, Cell | None]:
    """The first pair that no other beats by more than noise, and the cheapest of the others.

    Beaten it is where the whole costs more by so much, or one of its halves alone does than another
    that can be in its place: noise in the long stage of a step must not hide what the short one
    loses. By the order of the rollouts, then of the trainers. Some pair must be possible.
    """
    least_R = cost.least_R(room)
    first = _unbeaten(cost, room, least_R, 1.0 + min(NOISE, settings.hysteresis))
    cost_T = cost.of_row(first.row, room)
    cost_T[first.column] = math.inf
    least_R[first.row] = cost_T.min()
    other = int(least_R.argmin())
    if not math.isfinite(least_R[other]):
        return first, None
    others_T = cost_T if other == first.row else cost.of_row(other, room)
    return first, Cell(other, int(others_T.argmin()))


def _unbeaten(cost: Cost, room: Room, least_R: np.ndarray, noise: float) -> Cell:
    """The first of them; the cheapest pair is one but for rounding."""
    most, most_rollout_T = least_R.min() * noise, cost.least_rollout_T(room) * noise
    for row in map(int, np.flatnonzero(least_R <= most)):
        cost_T = cost.of_row(row, room)
        train_T = np.where(np.isfinite(cost_T), cost.of_AT[room.away_R[row]], math.inf)
        unbeaten_T = (cost_T <= most) & (train_T <= train_T.min() * noise)
        unbeaten_T &= cost.rollout_part_T(row, room) <= most_rollout_T
        if unbeaten_T.any():
            return Cell(row, int(unbeaten_T.argmax()))
    row = int(least_R.argmin())
    return Cell(row, int(cost.of_row(row, room).argmin()))
