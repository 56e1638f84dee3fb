# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The reasons of a step's choice, in words."""

import dataclasses
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
from earl_jax.selector.pairs import Pair, Resident, StepTable, Work, stage_s
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
        options = self.rollouts if stage == "rollout" else self.trains
        return [index for index, option in enumerate(options) if option.mesh == mesh]

    def _obstacle(self, stage: str, mesh: MeshShape) -> str:
        """Why a mesh is in no possible pair, on no rung; "" where it is in one."""
        there = self._on(stage, mesh)
        if stage == "train":
            if self.table.possible_RT[:, there].any():
                return ""
            least = min(there, key=lambda column: self.trains[column].bytes_per_device)
            fits = [column for column in there if not obstacle(self.trains[column], self.settings)]
            if not fits:
                return obstacle(self.trains[least], self.settings)
            kept = size_words(min(self.residents[column].num_bytes for column in fits))
            return f"keeps {kept} per device, which leaves no rollout enough room"
        if self.table.possible_RT[there].any():
            return ""
        least = min(range(len(self.trains)), key=lambda column: self.residents[column].num_bytes)
        beside = [self._beside(row, least) for row in there]
        smallest = min(beside, key=lambda option: option.bytes_per_device)
        return obstacle(smallest, self.settings) or "has no trainer beside it"

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
        rollout, train = self.rollouts[second[0]], self.trains[second[1]]
        other = f"rollout on {rollout.words} with training on {train.words}"
        if not self.measured:
            return f"second: {other}"
        behind = float(cost_RT[second] / cost_RT[chosen] - 1.0)
        if behind >= 0:
            return f"second: {other}, {behind:.0%} slower"
        return f"second: {other}, {-behind:.0%} faster, which is not enough or too soon to leave"

    def impossible(self) -> str:
        """Which meshes cannot be, on whatever rung, and why."""
        parts = []
        for stage, options in (("rollout", self.rollouts), ("train", self.trains)):
            reasons = [
                f"{stage} on {mesh} {problem}"
                for mesh in dict.fromkeys(option.mesh for option in options)
                if (problem := self._obstacle(stage, mesh))
            ]
            parts += reasons[:NAMED]
            if len(reasons) > NAMED:
                parts.append(f"{stage} on {len(reasons) - NAMED} others")
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
    pairs = [
        (
            max(rollout.bytes_per_device + resident.beside(rollout), train.bytes_per_device),
            rollout,
            train,
        )
        for rollout in rollouts
        for train, resident in zip(trains, residents, strict=True)
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
