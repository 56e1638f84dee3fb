# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""All pairs of a rollout's and a trainer's options: what can be, and what a step costs. Pure."""

import dataclasses
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

    def beside(self, rollout: Option) -> int:
        """The bytes beside this option."""
        return self.kept.num_bytes if self.kept and is_offload(rollout) else self.num_bytes


def residents_of(num_bytes: Sequence[int], kept: Sequence[Kept]) -> list[Resident]:
    """A record for each trainer."""
    if not kept:
        return [Resident(each) for each in num_bytes]
    return [Resident(*both) for both in zip(num_bytes, kept, strict=True)]


class StepTable(NamedTuple):
    """All pairs: whether they can be, a step's seconds, and what going there costs once."""

    possible_RT: np.ndarray
    step_s_RT: np.ndarray
    switch_s_T: np.ndarray


def tabulate(
    rollouts: Sequence[Option],
    trains: Sequence[Option],
    residents: Sequence[Resident],
    current: Pair | None,
    work: Work,
    settings: Settings,
) -> StepTable:
    """What each pair takes, and whether it can be."""
    possible_RT = possible_pairs(rollouts, trains, residents, settings)
    away_R = np.array([is_offload(option) for option in rollouts])
    other_s = work.load.other_s if work.load else 0.0
    rollout_s_R = np.array([stage_s(o, work.rollout_tokens) + o.move_s for o in rollouts])
    train_s_T = np.array([stage_s(option, work.train_tokens) for option in trains])
    moments_s_T = np.array([r.kept.moments_s if r.kept else 0.0 for r in residents])
    stays_T = np.array([current is None or o.mesh == current.train for o in trains])
    return StepTable(
        possible_RT=possible_RT,
        step_s_RT=rollout_s_R[:, None] + train_s_T + np.outer(away_R, moments_s_T) + other_s,
        switch_s_T=np.where(stays_T, 0.0, [option.move_s for option in trains]),
    )


def possible_pairs(
    rollouts: Sequence[Option],
    trains: Sequence[Option],
    residents: Sequence[Resident],
    settings: Settings,
) -> np.ndarray:
    """bool[R,T]: which options of the two stages can be together."""
    away_R = np.array([is_offload(option) for option in rollouts])
    least_R = np.array([o.bytes_per_device - o.slack_bytes for o in rollouts], np.float64)
    whole_T = np.array([resident.num_bytes for resident in residents], np.float64)
    kept_T = np.array([r.kept.num_bytes if r.kept else r.num_bytes for r in residents], np.float64)
    bytes_RT = least_R[:, None] + np.where(away_R[:, None], kept_T, whole_T)
    budget = math.inf if settings.budget_bytes is None else settings.budget_bytes
    can_R = np.array([not option.impossible for option in rollouts])
    can_T = np.array([not obstacle(option, settings) for option in trains])
    return (bytes_RT <= budget) & can_R[:, None] & can_T


def is_offload(rollout: Option) -> bool:
    """Whether the trainer's moments wait in host memory while episodes are played so."""
    return isinstance(rollout.rung, RolloutRung) and rollout.rung.offload


def are_measured(options: Sequence[Option], possible: np.ndarray) -> bool:
    """Whether all that can be chosen have a speed: those with True in their row. No others need."""
    return all(o.tokens_per_s for o, can in zip(options, possible, strict=True) if can.any())


def stage_s(option: Option, tokens: int) -> float:
    """Seconds for so many tokens; 0 where no speed is known."""
    return tokens / option.tokens_per_s if option.tokens_per_s else 0.0


def here_in(
    rollouts: Sequence[Option],
    trains: Sequence[Option],
    current: Pair | None,
    cost_RT: np.ndarray,
    possible_RT: np.ndarray,
    settings: Settings,
) -> tuple[int, int] | None:
    """The best pair of options on the meshes in use; None where none of them can be."""
    if current is None:
        return None
    on_R = np.array([option.mesh == current.rollout for option in rollouts])
    on_T = np.array([option.mesh == current.train for option in trains])
    can_RT = possible_RT & on_R[:, None] & on_T
    return first_two(cost_RT, can_RT, settings)[0] if can_RT.any() else None


def changes_of(
    rollouts: Sequence[Option], trains: Sequence[Option], current: Pair | None
) -> np.ndarray:
    """How many meshes of the current pair each pair changes; never 0, because it is a cost."""
    if current is None:
        return np.ones((len(rollouts), len(trains)))
    leaves_R = np.array([option.mesh != current.rollout for option in rollouts], np.float64)
    leaves_T = np.array([option.mesh != current.train for option in trains], np.float64)
    return 1.0 + leaves_R[:, None] + leaves_T


def first_two(
    cost_RT: np.ndarray, possible_RT: np.ndarray, settings: Settings
) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """The first pair that no other beats by more than noise, and the cheapest of the others."""
    cost_RT = np.where(possible_RT, cost_RT, math.inf)
    slack = 1.0 + min(NOISE, settings.hysteresis)
    near = (cost_RT <= cost_RT.min() * slack) & possible_RT
    first = _cell(near, int(near.argmax()))
    others_RT = cost_RT.copy()
    others_RT[first] = math.inf
    second = _cell(near, int(others_RT.argmin()))
    return first, second if math.isfinite(others_RT[second]) else None


def _cell(table: np.ndarray, number: int) -> tuple[int, int]:
    row, column = divmod(number, table.shape[1])
    return row, column
