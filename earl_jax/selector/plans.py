# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Plans: a mesh for a stage and how the stage uses it; failures."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from earl_jax.settings.errors import check_choice
from earl_jax.settings.remat import REMATS, Remat
from earl_jax.sharding.layout import MeshShape

Stage = Literal["rollout", "train"]
REMAT_WORDS: dict[Remat, str] = {
    "none": "",
    "dots": "remat but for projections",
    "full": "remat",
    "offload": "remat, its inputs in host memory",
}


class RolloutPlan(NamedTuple):
    """A rollout on `mesh`: `num_slots` episodes at once share `pages` pages of each row shard.

    With `offload` the optimizer's moments are in host memory meanwhile.
    """

    mesh: MeshShape
    num_slots: int
    pages: int
    offload: bool = False
    stage = "rollout"

    def as_list(self) -> list[Any]:
        """Returns plain values, for checkpoints and other processes."""
        return [str(self.mesh), *self[1:]]

    @staticmethod
    def from_list(values: Sequence[Any]) -> "RolloutPlan":
        """Undoes `as_list`. Raises ValueError or TypeError for anything else."""
        mesh, num_slots, pages, offload = values
        return RolloutPlan(MeshShape.parse(mesh), int(num_slots), int(pages), bool(offload))

    def words(self, first: "RolloutPlan | None" = None) -> str:
        """Returns the mesh, and how the plan differs from `first`."""
        slots = first is not None and self.num_slots != first.num_slots
        parts = [str(self.mesh)]
        parts += [f"{self.num_slots} slots"] if slots else []
        parts += ["moments in host memory"] if self.offload else []
        return ", ".join(parts)


class TrainPlan(NamedTuple):
    """An update on `mesh` in so many micro-batches; `remat` says what is computed again."""

    mesh: MeshShape
    micro_batches: int
    remat: Remat
    stage = "train"

    def as_list(self) -> list[Any]:
        """Returns plain values, for checkpoints and other processes."""
        return [str(self.mesh), *self[1:]]

    @staticmethod
    def from_list(values: Sequence[Any]) -> "TrainPlan":
        """Undoes `as_list`. Raises ValueError or TypeError for anything else."""
        mesh, micro_batches, remat = values
        check_choice(remat, REMATS, "remat")
        return TrainPlan(MeshShape.parse(mesh), int(micro_batches), remat)

    @property
    def use(self) -> str:
        """The use of the mesh in words, "2 micro-batches, remat"."""
        parts = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"
        return ", ".join(filter(None, [parts, REMAT_WORDS[self.remat]]))

    def words(self, first: "TrainPlan | None" = None) -> str:
        """Returns the mesh, and its use where that is another than of `first`."""
        same = first is None or self[1:] == first[1:]
        return str(self.mesh) if same else f"{self.mesh} in {self.use}"


Plan = RolloutPlan | TrainPlan


class Plans(NamedTuple):
    """Both stages' plans in use; None before the first choice."""

    rollout: RolloutPlan | None = None
    train: TrainPlan | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A plan that ran out of memory on the devices, and its size (`Problem.failure`).

    `size` of a rollout is (tokens an episode, tokens that a row shard's pages hold, slots, 1 with
    the optimizer's moments on the devices); of training (tokens a row, rows at a time, 2 less the
    remat policy's number). Last in both is minus the limit of bytes of a device, 0 where none was
    known: with more it may run. It is known to later runs too, or in this run or rollout only.
    """

    stage: str
    mesh: str
    size: tuple[int, ...]
    lasts: Literal["always", "run", "rollout"] = "always"

    def covers(self, other: "Failure") -> bool:
        """Returns True for that of a plan which is no smaller in any respect: it fails too."""
        same = (self.stage, self.mesh) == (other.stage, other.mesh)
        return same and all(is_ >= was for is_, was in zip(other.size, self.size, strict=True))

    def __str__(self) -> str:
        """Returns the end of a sentence."""
        tokens, number, *_, kept, _ = self.size
        if self.stage == "rollout":
            return (
                f"ran out of memory with {self.size[2]} slots, a KV cache of {number} tokens per "
                f"row shard and episodes of {tokens} tokens"
                f"{'' if kept else ', the moments in host memory'}"
            )
        words = REMAT_WORDS[REMATS[2 - kept]]
        return (
            f"ran out of memory with rows of {tokens} tokens, {number} at a time"
            f"{f', with {words}' if words else ''}"
        )

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Failure":
        """Undoes `dataclasses.asdict`. Raises TypeError for anything else than a failure."""
        failure = Failure(**{**values, "size": tuple(values["size"])})
        if len(failure.size) != {"rollout": 5, "train": 4}.get(failure.stage):
            raise TypeError(f"not a failure: {values}")
        return failure
