# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The reasons of a step's choice, in words."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from earl_jax.selector.choose import (
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
from earl_jax.selector.pairs import (
    Cell,
    Cost,
    Pair,
    Resident,
    Room,
    StepTable,
    Work,
    is_offload,
    stage_s,
)
from earl_jax.sharding.layout import MeshShape

# Of the candidates that cannot be, so many are named for each stage.
NAMED = 3


@dataclasses.dataclass(frozen=True)
class Words:
    """Why so, and why not otherwise. `gain` is None where the current pair cannot stay."""

    rollouts: Sequence[Option]
    trains: Sequence[Option]
    residents: Sequence[Resident]
    table: StepTable
    work: Work
    settings: Settings
    current: Pair | None
    gain: float | None
    measured: bool

    def decision(self, stage: str, chosen: Cell) -> Decision:
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
            predicted_s=stage_s(option, tokens) if self.measured else None,
            rung=option.rung,
        )

    def _beside(self, row: int, column: int) -> Option:
        """The rollout's option with what this trainer leaves on a device."""
        option = self.rollouts[row]
        total = option.bytes_per_device + self.residents[column].beside(option)
        return dataclasses.replace(option, bytes_per_device=total)

    def _reason(self, stage: str, option: Option, before: MeshShape | None, places: int) -> str:
        why = f"{context_words(places, self.work.load)}, {option_words(option, self.settings)}"
        if before is None:
            merit = "fastest" if self.measured else "first of the list"
            return f"starts on {option.words}: {merit} that fits; {why}"
        if before == option.mesh:
            return f"stays on {option.words}: {why}"
        if self.gain is not None:
            return f"leaves {before} for {option.words}, a step {self.gain:.0%} faster: {why}"
        return f"leaves {before}, which {self._problem(stage)}, for {option.words}: {why}"

    def _problem(self, stage: str) -> str:
        """Why the current mesh of this stage is left, where the current pair cannot stay."""
        assert self.current is not None
        mesh = getattr(self.current, stage)
        on_R, on_T = (
            self._on("rollout", self.current.rollout),
            self._on("train", self.current.train),
        )
        if not (on_R if stage == "rollout" else on_T):
            return "is no candidate any more"
        if found := self._obstacle(stage, mesh):
            return found
        both = [self._beside(r, t) for r in on_R for t in on_T if not self.rollouts[r].impossible]
        if stage == "train" or not both:
            return "goes with the other"
        found = obstacle(min(both, key=lambda option: option.bytes_per_device), self.settings)
        return (
            f"{found} beside training on {self.current.train}" if found else "goes with the other"
        )

    def _on(self, stage: str, mesh: MeshShape) -> list[int]:
        """The numbers of this mesh's options."""
        return self._by_mesh[stage].get(mesh, [])

    @functools.cached_property
    def _by_mesh(self) -> dict[str, dict[MeshShape, list[int]]]:
        found: dict[str, dict[MeshShape, list[int]]] = {"rollout": {}, "train": {}}
        for stage, options in (("rollout", self.rollouts), ("train", self.trains)):
            for index, option in enumerate(options):
                found[stage].setdefault(option.mesh, []).append(index)
        return found

    def _possible(self, stage: str) -> list[bool]:
        """Of each option of a stage whether it is in some possible pair."""
        room = self.table.room
        return (room.possible_R if stage == "rollout" else room.possible_T).tolist()

    def _obstacle(self, stage: str, mesh: MeshShape) -> str:
        """Why a mesh is in no possible pair, on no rung; "" where it is in one."""
        there = self._on(stage, mesh)
        if stage == "train":
            if self.table.room.possible_T[there].any():
                return ""
            least = min(there, key=lambda column: self.trains[column].bytes_per_device)
            fits = [column for column in there if not obstacle(self.trains[column], self.settings)]
            if not fits:
                return obstacle(self.trains[least], self.settings)
            kept = size_words(min(self.residents[column].num_bytes for column in fits))
            return f"keeps {kept} per device, which leaves no rollout enough room"
        if self.table.room.possible_R[there].any():
            return ""
        least = min(range(len(self.trains)), key=lambda column: self.residents[column].num_bytes)
        beside = [self._beside(row, least) for row in there]
        smallest = min(beside, key=lambda option: option.bytes_per_device)
        return obstacle(smallest, self.settings) or "has no trainer beside it"

    def step(self, chosen: Cell, here: Cell | None, lasts: int) -> str:
        """What the step is expected to take, and over what a switch is spread."""
        if not self.measured:
            return ""
        words = f"a step of {self.table.step_s.of(chosen, self.table.room):.2f} s expected"
        switch_s = self.table.switch_s_T[chosen.column]
        if here is None or here == chosen or not switch_s:
            return words
        return f"{words}, and a switch of {switch_s:.2f} s for {lasts} steps"

    def second(self, chosen: Cell, second: Cell | None, cost: Cost) -> str:
        """The next best, and by how much."""
        if second is None:
            return "no other meshes are possible"
        rollout, train = self.rollouts[second.row], self.trains[second.column]
        other = f"rollout on {rollout.words} with training on {train.words}"
        if not self.measured:
            return f"second: {other}"
        room = self.table.room
        behind = cost.of(second, room) / cost.of(chosen, room) - 1.0
        if behind >= 0:
            return f"second: {other}, {behind:.0%} slower"
        return f"second: {other}, {-behind:.0%} faster, which is not enough or too soon to leave"

    def impossible(self) -> str:
        """Which meshes cannot be, on whatever rung, and why."""
        parts = []
        for stage, by_mesh in self._by_mesh.items():
            can = self._possible(stage)
            out = [mesh for mesh, there in by_mesh.items() if not any(can[n] for n in there)]
            parts += [f"{stage} on {mesh} {self._obstacle(stage, mesh)}" for mesh in out[:NAMED]]
            if len(out) > NAMED:
                parts.append(f"{stage} on {len(out) - NAMED} others")
        return f"impossible: {', '.join(parts)}" if parts else ""


def too_small(
    rollouts: Sequence[Option],
    trains: Sequence[Option],
    residents: Sequence[Resident],
    work: Work,
    settings: Settings,
) -> str:
    """The message where no pair fits: the smallest budget that would do, if any would."""
    room = f"{work.rollout_places} tokens of room per episode"
    failed = [
        f"{stage} on {option.words} {option.impossible}"
        for stage, options in (("rollout", rollouts), ("train", trains))
        for option in options
        if option.impossible
    ]
    if not any(not o.impossible for o in rollouts) or not any(not o.impossible for o in trains):
        # Of what failed when it was compiled no bytes are known.
        known_R = np.array([option.bytes_per_device > 0 for option in rollouts])
        known_T = np.array([option.bytes_per_device > 0 for option in trains])
        need = _least_need(rollouts, trains, residents, known_R, known_T)
        enough = more_than([int(need)] if math.isfinite(need) else [])
        return (
            f"no meshes for rollout and training with {room} are left: {'; '.join(failed)}. Use "
            f"devices with {enough} memory each, or more of them, or lower "
            "config.rollout.num_slots or the model's size"
        )
    can_R = np.array([not option.impossible for option in rollouts])
    can_T = np.array([not option.impossible for option in trains])
    need = int(_least_need(rollouts, trains, residents, can_R, can_T))
    first = _first_within(rollouts, trains, residents, can_R, can_T, need)
    rollout, train = rollouts[first.row], trains[first.column]
    also = f" (and {'; '.join(failed)})" if failed else ""
    about = "about " if rollout.is_computed or train.is_computed else ""
    return (
        f"config.selector.budget_bytes_per_device is {settings.budget_bytes}, and no meshes for "
        f"rollout and training fit it with {room}{also}; the smallest budget that would do is "
        f"{about}{need} ({Pair(rollout.mesh, train.mesh)}), {more_words(need, settings)}. Raise "
        "the budget, use more devices, or lower config.rollout.num_slots or the model's size"
    )


def _least_need(
    rollouts: Sequence[Option],
    trains: Sequence[Option],
    residents: Sequence[Resident],
    can_R: np.ndarray,
    can_T: np.ndarray,
) -> float:
    """The least that a pair of these takes of a device; infinite where there is none."""
    room = _room_within(rollouts, trains, residents, can_R, can_T, math.inf)
    update_T = np.array([option.bytes_per_device for option in trains], np.float64)
    need = math.inf
    for away in (0, 1):
        least = room.bytes_R[can_R & (room.away_R == away)].min(initial=math.inf)
        both_T = np.maximum(least + room.resident_AT[away], update_T)
        need = min(need, float(both_T[can_T].min(initial=math.inf)))
    return need


def _first_within(
    rollouts: Sequence[Option],
    trains: Sequence[Option],
    residents: Sequence[Resident],
    can_R: np.ndarray,
    can_T: np.ndarray,
    need: int,
) -> Cell:
    """The first pair that takes no more."""
    update_T = np.array([option.bytes_per_device for option in trains], np.float64)
    room = _room_within(rollouts, trains, residents, can_R, can_T & (update_T <= need), need)
    row = int(room.possible_R.argmax())
    return Cell(row, int(room.of_row(row).argmax()))


def _room_within(
    rollouts: Sequence[Option],
    trains: Sequence[Option],
    residents: Sequence[Resident],
    can_R: np.ndarray,
    can_T: np.ndarray,
    budget: float,
) -> Room:
    """By all bytes, without what computed ones may be too much."""
    whole = [resident.num_bytes for resident in residents]
    kept = [resident.least for resident in residents]
    return Room(
        bytes_R=np.array([option.bytes_per_device for option in rollouts], np.float64),
        can_R=can_R,
        away_R=np.array([int(is_offload(option)) for option in rollouts]),
        resident_AT=np.array([whole, kept], np.float64),
        can_T=can_T,
        budget=budget,
    )
