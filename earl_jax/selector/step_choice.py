# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The choice for a whole step: a rollout mesh and a training mesh together, with its reasons.

They are one choice because a device holds both: what the trainer keeps there while episodes are
played leaves the less room for the KV cache, the less it is cut.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from earl_jax.selector.choose import (
    NOISE,
    BudgetTooSmall,
    Decision,
    Option,
    Settings,
    context_words,
    more_than,
    more_words,
    obstacle,
    option_words,
    size_words,
)
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import WINDOW, Load

# Of the candidates that cannot be, so many are named for each stage.
NAMED = 3


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDecision:
    """What was chosen for both stages; `reason` compares it with the others, in words.

    `predicted_s` is the step's time, None where speeds were not measured.
    """

    rollout: Decision
    train: Decision
    reason: str
    predicted_s: float | None

    @property
    def pair(self) -> Pair:
        """The meshes."""
        return Pair(self.rollout.mesh, self.train.mesh)


class _Table(NamedTuple):
    """All pairs: whether they can be, a step's seconds, and what going there costs once."""

    possible_RT: np.ndarray
    step_s_RT: np.ndarray
    switch_s_T: np.ndarray


def choose_step(
    rollouts: Sequence[Option],
    trains: Sequence[Option],
    *,
    resident_bytes: Sequence[int],
    current: Pair | None,
    calm_steps: int,
    work: Work,
    settings: Settings,
) -> StepDecision:
    """The meshes of the next step. Pure: the same arguments give the same decision.

    A step takes what its tokens take on each mesh, the way of the new weights to the rollout's, and
    what no mesh changes. Of the pairs that fit, the one of the shortest step; but the current pair
    stays unless it does not fit, or the step is shorter by more than the hysteresis when the
    trainer's move is spread over the steps that the choice will last: until contexts that grow have
    outgrown the room, and at most the horizon. A rollout's move between steps costs nothing more:
    its weights are new anyway. And a pair that fits is left only when it has been there for a
    window of steps: until then the load is in part another pair's. So whoever comes back to a pair
    has been away for a window.

    Ties go to the pair that comes first. Where speeds were not measured, the first pair that fits,
    of those that change the fewest meshes.

    Args:
        rollouts: the rollout's options, without what the trainer leaves on a device meanwhile.
        trains: the trainer's options.
        resident_bytes: what the trainer leaves on a device, in the order of `trains`.
        current: the meshes in use, None at the start.
        calm_steps: for how many steps they have been.
        work: the step to come.
        settings: budget, hysteresis, horizon.

    Raises:
        BudgetTooSmall: no pair fits.
    """
    table = _tabulate(rollouts, trains, resident_bytes, current, work, settings)
    if not table.possible_RT.any():
        raise BudgetTooSmall(_too_small(rollouts, trains, resident_bytes, work, settings))
    measured = _are_measured(rollouts, table.possible_RT) and _are_measured(
        trains, table.possible_RT.T
    )
    here = _index(rollouts, trains, current)
    if measured:
        lasts = steps_until_outgrown(work, settings.horizon_steps)
        cost_RT = table.step_s_RT + table.switch_s_T / lasts
    else:
        lasts = settings.horizon_steps
        cost_RT = _changes(rollouts, trains, current)
    chosen, second = _first_two(cost_RT, table.possible_RT, settings)
    gain = None
    if here is not None and table.possible_RT[here]:
        gain = float(cost_RT[here] / cost_RT[chosen] - 1.0) if measured else 0.0
        if chosen != here and (gain <= settings.hysteresis or calm_steps < WINDOW):
            chosen, second = here, chosen
    words = _Words(rollouts, trains, resident_bytes, table, work, settings, current, gain, measured)
    parts = (
        words.step(chosen, here, lasts),
        words.second(chosen, second, cost_RT),
        words.impossible(),
    )
    return StepDecision(
        rollout=words.decision("rollout", chosen),
        train=words.decision("train", chosen),
        reason="; ".join(filter(None, parts)),
        predicted_s=float(table.step_s_RT[chosen]) if measured else None,
    )


def steps_until_outgrown(work: Work, horizon_steps: int) -> int:
    """For how many steps a choice will last, at least 1: then all is chosen anew."""
    load = work.load
    if load is None or load.growth_tokens <= 0:
        return horizon_steps
    room = min(work.rollout_places, work.train_places) - load.context_tokens_max
    return max(1, min(horizon_steps, math.ceil(room / load.growth_tokens)))


def _tabulate(
    rollouts: Sequence[Option],
    trains: Sequence[Option],
    resident_bytes: Sequence[int],
    current: Pair | None,
    work: Work,
    settings: Settings,
) -> _Table:
    resident_T = np.array(resident_bytes, np.float64)
    bytes_RT = np.array([o.bytes_per_device for o in rollouts], np.float64)[:, None] + resident_T
    budget = math.inf if settings.budget_bytes is None else settings.budget_bytes
    can_R = np.array([not option.impossible for option in rollouts])
    can_T = np.array([not obstacle(option, settings) for option in trains])
    other_s = work.load.other_s if work.load else 0.0
    rollout_s_R = np.array([_stage_s(o, work.rollout_tokens) + o.move_s for o in rollouts])
    train_s_T = np.array([_stage_s(option, work.train_tokens) for option in trains])
    stays_T = np.array([current is None or o.mesh == current.train for o in trains])
    return _Table(
        possible_RT=(bytes_RT <= budget) & can_R[:, None] & can_T,
        step_s_RT=rollout_s_R[:, None] + train_s_T + other_s,
        switch_s_T=np.where(stays_T, 0.0, [option.move_s for option in trains]),
    )


def _are_measured(options: Sequence[Option], possible: np.ndarray) -> bool:
    """Whether all that can be chosen have a speed: those with True in their row. No others need."""
    return all(o.tokens_per_s for o, can in zip(options, possible, strict=True) if can.any())


def _stage_s(option: Option, tokens: int) -> float:
    return tokens / option.tokens_per_s if option.tokens_per_s else 0.0


def _index(
    rollouts: Sequence[Option], trains: Sequence[Option], pair: Pair | None
) -> tuple[int, int] | None:
    """Where the pair is in the table; None where it is no candidate."""
    if pair is None:
        return None
    row = next((i for i, option in enumerate(rollouts) if option.mesh == pair.rollout), None)
    column = next((i for i, option in enumerate(trains) if option.mesh == pair.train), None)
    return None if row is None or column is None else (row, column)


def _changes(
    rollouts: Sequence[Option], trains: Sequence[Option], current: Pair | None
) -> np.ndarray:
    """How many meshes of the current pair each pair changes; never 0, because it is a cost."""
    if current is None:
        return np.ones((len(rollouts), len(trains)))
    leaves_R = np.array([option.mesh != current.rollout for option in rollouts], np.float64)
    leaves_T = np.array([option.mesh != current.train for option in trains], np.float64)
    return 1.0 + leaves_R[:, None] + leaves_T


def _first_two(
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


@dataclasses.dataclass(frozen=True)
class _Words:
    """Why so, and why not otherwise. `gain` is None where the current pair cannot stay."""

    rollouts: Sequence[Option]
    trains: Sequence[Option]
    resident_bytes: Sequence[int]
    table: _Table
    work: Work
    settings: Settings
    current: Pair | None
    gain: float | None
    measured: bool

    def decision(self, stage: str, chosen: tuple[int, int]) -> Decision:
        """One stage's part of the choice."""
        work, is_rollout = self.work, stage == "rollout"
        option = self._beside(*chosen) if is_rollout else self.trains[chosen[1]]
        places = work.rollout_places if is_rollout else work.train_places
        tokens = work.rollout_tokens if is_rollout else work.train_tokens
        before = getattr(self.current, stage) if self.current else None
        return Decision(
            stage=stage,
            mesh=option.mesh,
            places=places,
            switched=before is not None and option.mesh != before,
            reason=self._reason(stage, option, before, places),
            bytes_per_device=option.bytes_per_device,
            predicted_s=_stage_s(option, tokens) if self.measured else None,
        )

    def _beside(self, row: int, column: int) -> Option:
        """The rollout's option with what this trainer leaves on a device."""
        option = self.rollouts[row]
        total = option.bytes_per_device + self.resident_bytes[column]
        return dataclasses.replace(option, bytes_per_device=total)

    def _reason(self, stage: str, option: Option, before: MeshShape | None, places: int) -> str:
        why = f"{context_words(places, self.work.load)}, {option_words(option, self.settings)}"
        if before is None:
            merit = "fastest" if self.measured else "first of the list"
            return f"starts on {option.mesh}: {merit} that fits; {why}"
        if before == option.mesh:
            return f"stays on {option.mesh}: {why}"
        if self.gain is not None:
            return f"leaves {before} for {option.mesh}, a step {self.gain:.0%} faster: {why}"
        return f"leaves {before}, which {self._problem(stage)}, for {option.mesh}: {why}"

    def _problem(self, stage: str) -> str:
        """Why the current mesh of this stage is left, where the current pair cannot stay."""
        assert self.current is not None
        options = self.rollouts if stage == "rollout" else self.trains
        meshes = [option.mesh for option in options]
        mesh = getattr(self.current, stage)
        if mesh not in meshes:
            return "is no candidate any more"
        if found := self._obstacle(stage, meshes.index(mesh)):
            return found
        here = _index(self.rollouts, self.trains, self.current)
        both = here and obstacle(self._beside(*here), self.settings)
        return f"{both} beside training on {self.current.train}" if both else "goes with the other"

    def _obstacle(self, stage: str, index: int) -> str:
        """Why a mesh is in no possible pair; "" where it is in one."""
        if stage == "train":
            found = obstacle(self.trains[index], self.settings)
            if found or self.table.possible_RT[:, index].any():
                return found
            kept = size_words(self.resident_bytes[index])
            return f"keeps {kept} per device, which leaves no rollout enough room"
        if self.table.possible_RT[index].any():
            return ""
        least = min(range(len(self.trains)), key=lambda column: self.resident_bytes[column])
        return obstacle(self._beside(index, least), self.settings) or "has no trainer beside it"

    def step(self, chosen: tuple[int, int], here: tuple[int, int] | None, lasts: int) -> str:
        """What the step is expected to take, and over what a switch is spread."""
        if not self.measured:
            return ""
        words = f"a step of {self.table.step_s_RT[chosen]:.2f} s expected"
        switch_s = self.table.switch_s_T[chosen[1]]
        if here is None or here == chosen or not switch_s:
            return words
        return f"{words}, and a switch of {switch_s:.2f} s for {lasts} steps"

    def second(
        self, chosen: tuple[int, int], second: tuple[int, int] | None, cost_RT: np.ndarray
    ) -> str:
        """The next best, and by how much."""
        if second is None:
            return "no other meshes are possible"
        other = Pair(self.rollouts[second[0]].mesh, self.trains[second[1]].mesh)
        if not self.measured:
            return f"second: {other}"
        behind = float(cost_RT[second] / cost_RT[chosen] - 1.0)
        if behind >= 0:
            return f"second: {other}, {behind:.0%} slower"
        return f"second: {other}, {-behind:.0%} faster, which is not enough or too soon to leave"

    def impossible(self) -> str:
        """Which meshes cannot be, and why."""
        parts = []
        for stage, options in (("rollout", self.rollouts), ("train", self.trains)):
            reasons = [
                f"{stage} on {option.mesh} {problem}"
                for index, option in enumerate(options)
                if (problem := self._obstacle(stage, index))
            ]
            parts += reasons[:NAMED]
            if len(reasons) > NAMED:
                parts.append(f"{stage} on {len(reasons) - NAMED} others")
        return f"impossible: {', '.join(parts)}" if parts else ""


def _too_small(
    rollouts: Sequence[Option],
    trains: Sequence[Option],
    resident_bytes: Sequence[int],
    work: Work,
    settings: Settings,
) -> str:
    """The message where no pair fits: the smallest budget that would do, if any would."""
    room = f"{work.rollout_places} tokens of room per episode"
    failed = [
        f"{stage} on {option.mesh} {option.impossible}"
        for stage, options in (("rollout", rollouts), ("train", trains))
        for option in options
        if option.impossible
    ]
    pairs = [
        (max(rollout.bytes_per_device + resident, train.bytes_per_device), rollout, train)
        for rollout in rollouts
        for train, resident in zip(trains, resident_bytes, strict=True)
    ]
    needs = [entry for entry in pairs if not (entry[1].impossible or entry[2].impossible)]
    if not needs:
        # Of what failed when it was compiled no bytes are known.
        enough = more_than(
            [n for n, *both in pairs if all(option.bytes_per_device for option in both)]
        )
        return (
            f"no meshes for rollout and training with {room} are left: {'; '.join(failed)}. Use "
            f"devices with {enough} memory each, or more of them, or lower "
            "config.rollout.num_slots or the model's size"
        )
    need, rollout, train = min(needs, key=lambda entry: entry[0])
    also = f" (and {'; '.join(failed)})" if failed else ""
    about = "about " if rollout.is_computed or train.is_computed else ""
    return (
        f"config.selector.budget_bytes_per_device is {settings.budget_bytes}, and no meshes for "
        f"rollout and training fit it with {room}{also}; the smallest budget that would do is "
        f"{about}{need} ({Pair(rollout.mesh, train.mesh)}), {more_words(need, settings)}. Raise "
        "the budget, use more devices, or lower config.rollout.num_slots or the model's size"
    )
