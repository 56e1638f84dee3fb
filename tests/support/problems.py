# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Problems whose bytes and speeds are given by hand, so that a choice can be computed by hand."""

import dataclasses
from collections.abc import Mapping

from earl_jax.models.config import ModelConfig
from earl_jax.selector.footprint import Footprint
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.plans import RolloutPlan, Stage, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.sizes import ModelSizes, Workload
from earl_jax.selector.table import key_of
from earl_jax.settings.errors import InputError
from earl_jax.settings.remat import Remat
from earl_jax.sharding.layout import MeshShape

D8, D4T2, D2T4, T8 = (MeshShape(data=8 // n, tensor=n) for n in (1, 2, 4, 8))
F8, D4F2 = MeshShape(fsdp=8), MeshShape(data=4, fsdp=2)
# A page has 10 tokens, of a byte each where heads are not cut.
PAGE = 10

_SIZES = ModelSizes(
    model=ModelConfig(
        num_layers=1,
        width=8,
        num_heads=8,
        num_kv_heads=8,
        head_size=1,
        ffn_size=8,
        experts_per_token=1,
    ),
    vocab_size=8,
    compute_bytes=4,
    engine_bytes=4,
    engine=(),
    trained=(),
    moments=(),
)
_WORK = Workload(
    num_slots=8,
    num_rows=8,
    micro_batches=1,
    remat="full",
    logprob_chunk=8,
    chunk_size=8,
    append_tokens=64,
    appended=0.0,
    page_size=PAGE,
    kv_itemsize=4,
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HandProblem(Problem):
    """Eight devices, eight slots and rows.

    `train_speeds` and `rollout_speeds` are tokens/s by mesh; `train_bytes` of an update by mesh
    (halved with each doubling of the micro-batches), `state_bytes` what the trainer leaves during a
    rollout, `rollout_bytes` those of a rollout without its pages, 1000 where none are given. Moving
    the trainer takes `trainer_move_s`, moving a byte of KV cache `cache_byte_s`, and publishing the
    weights `weights_s`.
    """

    train_speeds: Mapping[MeshShape, float]
    rollout_speeds: Mapping[MeshShape, float]
    train_bytes: Mapping[MeshShape, int] = dataclasses.field(default_factory=dict)
    state_bytes: Mapping[MeshShape, int] = dataclasses.field(default_factory=dict)
    rollout_bytes: Mapping[MeshShape, int] = dataclasses.field(default_factory=dict)
    trainer_move_s: float = 0.0
    cache_byte_s: float = 0.0
    weights_s: float = 0.0

    def meshes(self, stage: Stage, tokens: int = 0) -> list[MeshShape]:
        speeds = self.rollout_speeds if stage == "rollout" else self.train_speeds
        found = [mesh for mesh in speeds if mesh.num_devices == self.num_devices(stage)]
        if not found:
            raise InputError(f"no mesh of {self.num_devices(stage)} devices")
        return found

    def update_footprint(self, plan: TrainPlan, length: int) -> Footprint:
        return Footprint(weights=self.train_bytes.get(plan.mesh, 1000) // plan.micro_batches)

    def bare_footprint(self, mesh: MeshShape, num_slots: int, max_tokens: int) -> Footprint:
        return Footprint(weights=self.rollout_bytes.get(mesh, 1000))

    def page_bytes(self, mesh: MeshShape) -> int:
        return 8 * PAGE // mesh.tensor // mesh.context

    def trainer_bytes(self, mesh: MeshShape, offload: bool = False) -> int:
        return 0 if offload else self.state_bytes.get(mesh, 0)

    def moments_bytes(self, mesh: MeshShape) -> int:
        return self.state_bytes.get(mesh, 0)

    def update_speed(self, plan: TrainPlan, length: int, rows: int | None = None) -> float:
        return self.train_speeds[plan.mesh] / plan.micro_batches

    def round_speed(
        self, mesh: MeshShape, num_slots: int, max_tokens: int, rows: int, appended: float
    ) -> float:
        # Rows that wait take their turn.
        return self.rollout_speeds[mesh] * rows * mesh.data / self.work.num_slots

    def live_token_s(
        self, mesh: MeshShape, num_slots: int, live: int, max_tokens: int, appended: float
    ) -> float:
        # The busiest row shard says when a round is over.
        rows = -(-live // mesh.data)
        return rows * mesh.data / self.rollout_speeds[mesh]

    def publish_s(self, mesh: MeshShape) -> float:
        return self.weights_s

    def relocate_s(self, mesh: MeshShape, cache_bytes: int) -> float:
        return self.weights_s + cache_bytes * self.cache_byte_s

    def move_s(self, mesh: MeshShape) -> float:
        return self.trainer_move_s

    def offload_s(self, mesh: MeshShape) -> float:
        return 1.0


def hand_problem(
    train: Mapping[MeshShape, float], rollout: Mapping[MeshShape, float], **settings: object
) -> HandProblem:
    """Returns a problem of these speeds; `settings` are further fields."""
    fields: dict[str, object] = {
        "hardware": parse_topology("cpu:8"),
        "sizes": _SIZES,
        "work": _WORK,
        "budget_bytes": None,
        "train_speeds": train,
        "rollout_speeds": rollout,
    }
    return HandProblem(**{**fields, **settings})  # type: ignore[arg-type]


def rollout_on(mesh: MeshShape, num_slots: int = 8, pages: int = 1) -> RolloutPlan:
    """Returns a rollout's plan in use."""
    return RolloutPlan(mesh, num_slots, pages)


def train_on(mesh: MeshShape, micro_batches: int = 1) -> TrainPlan:
    """Returns a trainer's plan in use."""
    return TrainPlan(mesh, micro_batches, "full")


def rollout_key(mesh: MeshShape, max_tokens: int, num_slots: int) -> str:
    """Returns the key of a rollout in a throughput table."""
    return key_of(RolloutPlan(mesh, num_slots, 0), max_tokens)


def train_key(mesh: MeshShape, length: int, micro_batches: int, remat: Remat) -> str:
    """Returns the key of an update in a throughput table."""
    return key_of(TrainPlan(mesh, micro_batches, remat), length)
