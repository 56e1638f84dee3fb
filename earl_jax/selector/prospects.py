# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What each candidate of a plan would take of a device, and how fast it would be. Pure.

A candidate is a mesh and a way to use it: of an update the micro-batches and remat, of a rollout
the slots, the pages of a lane, their tokens, and where the optimizer's moments are meanwhile.
contenders.py has all of them at one room.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from earl_jax.selector.candidates import Check, for_rows
from earl_jax.selector.choose import Option, Settings
from earl_jax.selector.footprint import (
    Footprint,
    ModelSizes,
    Workload,
    cache_token_bytes,
    engine_bytes,
    rollout_footprint,
    train_footprint,
    trainer_bytes,
)
from earl_jax.selector.guesses import busy_slots, busy_tokens_per_s
from earl_jax.selector.hardware import Hardware
from earl_jax.selector.host_memory import host_obstacle
from earl_jax.selector.ladder import (
    Failure,
    RolloutRung,
    TrainRung,
    rollout_rungs,
    train_rungs,
    train_ways,
    train_words,
    with_page_sizes,
)
from earl_jax.selector.pairs import Kept, Resident
from earl_jax.selector.roofline import (
    alone_tokens_per_s,
    decode_s,
    rollout_tokens_per_s,
    train_s,
)
from earl_jax.selector.throughput import Measurement
from earl_jax.sharding.layout import MeshShape

Rung = TrainRung | RolloutRung


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """What is planned for: a model and its work on some hardware, and the meshes to choose from.

    `obstacle` says why a mesh cuts the model unevenly, `rollout_obstacle` why it does so in a
    rollout. `context_meshes` are candidates for the training of long rows only, beside
    `train_meshes` (see `for_rows`), `rollout_context_meshes` for rollouts of such. `page_sizes` are
    candidates beside that of `work`. Without `by_speed` meshes are taken in the order that they are
    listed in (config.selector.order), and what a stage does with less in that of its ladder.
    `factors` are measured speeds by computed ones, of a stage; 1 where there is none. `offload` is
    that of the config. `parked_bytes` of pages may lie in a host's memory beside the moments.

    `known` is what was measured of just this work on such devices, and `failures` what ran out of
    memory there: the entries of a table (throughput.py).
    """

    hardware: Hardware
    sizes: ModelSizes
    work: Workload
    settings: Settings
    obstacle: Check
    rollout_obstacle: Check
    by_speed: bool
    rollout_meshes: tuple[MeshShape, ...]
    train_meshes: tuple[MeshShape, ...]
    context_meshes: tuple[MeshShape, ...] = ()
    rollout_context_meshes: tuple[MeshShape, ...] = ()
    page_sizes: tuple[int, ...] = ()
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    offload: Literal["auto", "on", "off"] = "off"
    parked_bytes: int = 0
    known: Mapping[str, Measurement] = dataclasses.field(default_factory=dict)
    failures: tuple[Failure, ...] = ()

    @property
    def can_offload(self) -> bool:
        """Whether the optimizer's moments may wait in host memory while episodes are played."""
        chips = self.hardware.platform != "cpu"
        return self.offload == "on" or self.offload == "auto" and chips

    def host_obstacle(self, moments: int) -> str:
        """Why hosts have no room for so many bytes of each device, in words; "" where they have."""
        return host_obstacle(self.hardware, moments, self.parked_bytes)

    @property
    def ways_to_train(self) -> list[TrainRung]:
        """How an update may go about a batch, in the order of preference."""
        work, ways = self.work, train_ways if self.by_speed else train_rungs
        return ways(work.num_rows, work.micro_batches, work.remat)

    def ways_to_play(self, places: int) -> list[RolloutRung]:
        """How a rollout may go about its episodes, in the order of preference.

        First with pages for all slots: that episodes fill their room is what a plan is for.
        """
        work, lanes = self.work, self.hardware.num_devices
        least = -(-places // work.page_size)
        dense = work.num_slots // lanes * least
        rungs = rollout_rungs(work.num_slots, lanes, [dense], least, self.can_offload)
        others = dict.fromkeys(size for size in self.page_sizes if size != work.page_size)
        if self.by_speed:
            rungs = with_page_sizes(rungs, work.page_size, [*others], places)
        return [rung._replace(page_size=rung.page_size or work.page_size) for rung in rungs]

    def resident_of(self, trainer: MeshShape) -> Resident:
        """What a trainer leaves on each device while episodes are played."""
        rest, moments = trainer_bytes(self.sizes, trainer)
        leaves = self.can_offload and not self.host_obstacle(moments)
        kept = Kept(rest, to_and_fro_s(self.hardware, moments)) if leaves else None
        return Resident(rest + moments, kept)

    def train_meshes_for(self, places: int) -> list[MeshShape]:
        """The candidates for the training of rows of so many tokens."""
        return [*self.train_meshes, *for_rows(self.context_meshes, places)]

    def rollout_meshes_for(self, places: int) -> list[MeshShape]:
        """The candidates for rollouts with so many tokens of room."""
        return [*self.rollout_meshes, *for_rows(self.rollout_context_meshes, places)]

    @property
    def budget_bytes(self) -> int:
        """What a stage may take of a device."""
        assert self.settings.budget_bytes is not None
        return self.settings.budget_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prospect:
    """A candidate at one room per episode: what a device would hold, and how fast it would be.

    `rung` is the way. `seconds` are those of an update, or of a decode step of all slots that run
    at once: `rows_at_once` of each row shard, 0 in training. A rollout is by itself, or `beside` a
    trainer: then `moments` are the trainer's bytes that it has no need of, and where they are in
    host memory meanwhile `tokens_per_s` counts their way there and back, once a step. `move_s` is
    what going to the mesh takes. `exact` bytes are a compiler's, a speed `is_measured` or computed.
    `impossible` says what ran out of memory before; an update that leaves no rollout enough room
    does not `leave_room`.
    """

    stage: str
    mesh: MeshShape
    places: int
    footprint: Footprint
    tokens_per_s: float
    seconds: float
    rung: Rung
    rows_at_once: int = 0
    moments: int = 0
    move_s: float = 0.0
    exact: bool = False
    is_measured: bool = False
    impossible: str = ""
    leaves_room: bool = True

    @property
    def offload(self) -> bool:
        """Whether the optimizer's moments are in host memory."""
        return isinstance(self.rung, RolloutRung) and self.rung.offload

    def fits(self, budget_bytes: int) -> bool:
        """Whether a device has room for it."""
        return not self.impossible and self.footprint.total <= budget_bytes

    def option(self, scene: Scene) -> Option:
        """As `choose_step` takes it."""
        return Option(
            mesh=self.mesh,
            bytes_per_device=self.footprint.total,
            tokens_per_s=self.tokens_per_s if scene.by_speed else None,
            move_s=self.move_s,
            impossible=self.impossible,
            is_computed=not self.exact,
            is_guess=not self.is_measured,
            rung=self.rung,
            way=way_of(scene.work, self.rung),
        )


def way_of(work: Workload, rung: Rung) -> str:
    """In which way a mesh is used, in words, as far as the config does not say so."""
    if isinstance(rung, TrainRung):
        return train_words(rung, TrainRung(work.micro_batches, work.remat))
    away = "the moments in host memory" if rung.offload else ""
    return ", ".join(filter(None, (slots_words(work, rung), away)))


def slots_words(work: Workload, rung: RolloutRung) -> str:
    """Of a rollout without its moments."""
    slots = f"with {rung.num_slots} slots" if rung.num_slots != work.num_slots else ""
    pages = f"pages of {rung.page_size} tokens" if rung.page_size != work.page_size else ""
    return ", ".join(filter(None, (slots, pages)))


def on_train_rung(scene: Scene, rung: TrainRung) -> Scene:
    """The scene with updates on this rung, and the meshes over which their rows divide."""
    rows = scene.work.num_rows // rung.micro_batches

    def divide(meshes: Iterable[MeshShape]) -> tuple[MeshShape, ...]:
        return tuple(m for m in meshes if rows % (m.data * m.fsdp * m.expert) == 0)

    return dataclasses.replace(
        scene,
        work=dataclasses.replace(scene.work, **rung._asdict()),
        train_meshes=divide(scene.train_meshes),
        context_meshes=divide(scene.context_meshes),
    )


def on_rollout_rung(scene: Scene, rung: RolloutRung) -> Scene:
    """The scene with these slots and pages, and the meshes over which a page divides."""
    size = rung.page_size or scene.work.page_size

    def divide(meshes: Iterable[MeshShape]) -> tuple[MeshShape, ...]:
        return tuple(m for m in meshes if size % m.context == 0)

    return dataclasses.replace(
        scene,
        work=dataclasses.replace(scene.work, num_slots=rung.num_slots, page_size=size),
        rollout_meshes=divide(scene.rollout_meshes),
        rollout_context_meshes=divide(scene.rollout_context_meshes),
    )


def train_prospect(
    scene: Scene, mesh: MeshShape, places: int, footprint: Footprint | None = None
) -> Prospect:
    """An update on rows of so many tokens, as the scene's work says."""
    seconds = train_s(scene.hardware, scene.sizes, scene.work, mesh, places).total
    seconds /= scene.factors.get("train", 1.0)
    return Prospect(
        stage="train",
        mesh=mesh,
        places=places,
        footprint=footprint or update_footprint(scene, mesh, places),
        tokens_per_s=scene.work.num_rows * places / seconds,
        seconds=seconds,
        rung=TrainRung(scene.work.micro_batches, scene.work.remat),
        move_s=_arrival_s(scene.hardware, sum(trainer_bytes(scene.sizes, mesh))),
    )


def update_footprint(scene: Scene, mesh: MeshShape, places: int) -> Footprint:
    """The bytes of an update, as the scene's work says."""
    return train_footprint(scene.sizes, scene.work, mesh, places, scene.hardware.platform)


def rollout_prospect(
    scene: Scene, mesh: MeshShape, places: int, rung: RolloutRung, busy: float | None = None
) -> Prospect:
    """A rollout by itself on this rung, as the scene's work says (`on_rollout_rung`).

    With `busy` slots at work, None: as many as have pages.
    """
    hardware, sizes, work = scene.hardware, scene.sizes, scene.work
    slots, lanes = work.num_slots, hardware.num_devices // mesh.data
    rows, a_row = slots // mesh.data, -(-places // work.page_size)
    if busy is None:
        dense = slots // hardware.num_devices * a_row
        busy = busy_slots(rung.pages, dense, slots, slots)
    at_once = min(rows, rung.pages * lanes // a_row)
    factor = scene.factors.get("rollout", 1.0)
    speed = full_tokens_per_s(scene, mesh, places)
    if busy < slots:
        alone = factor * alone_tokens_per_s(hardware, sizes, work, mesh, places)
        speed = busy_tokens_per_s(speed, alone, slots, busy)
    step = decode_s(hardware, sizes, work, mesh, work.rows_a_step(mesh, at_once), places)
    return Prospect(
        stage="rollout",
        mesh=mesh,
        places=places,
        footprint=round_footprint(scene, mesh, places, rung),
        tokens_per_s=speed,
        seconds=step.total / factor,
        rung=rung._replace(page_size=work.page_size),
        rows_at_once=at_once,
        move_s=_arrival_s(hardware, engine_bytes(sizes.engine, mesh)),
    )


def full_tokens_per_s(scene: Scene, mesh: MeshShape, places: int) -> float:
    """Tokens per second of a rollout with pages for all slots, at the end of their room."""
    rows = scene.work.num_slots // mesh.data
    speed = rollout_tokens_per_s(scene.hardware, scene.sizes, scene.work, mesh, places, rows)
    return scene.factors.get("rollout", 1.0) * speed


def round_footprint(scene: Scene, mesh: MeshShape, places: int, rung: RolloutRung) -> Footprint:
    """The bytes of a rollout by itself, as the scene's work says, with the pages of this rung."""
    sizes, work, platform = scene.sizes, scene.work, scene.hardware.platform
    bare = rollout_footprint(sizes, work, mesh, places, 0, 0, platform)
    return dataclasses.replace(bare, cache=rung.pages * page_bytes(scene, mesh))


def page_bytes(scene: Scene, mesh: MeshShape) -> int:
    """Bytes of a device where each lane has one page; there is a lane a device."""
    lanes = scene.hardware.num_devices // mesh.data
    tokens = scene.work.page_size // mesh.context
    return lanes * tokens * cache_token_bytes(scene.sizes, scene.work, mesh)


def beside(scene: Scene, rollout: Prospect, trainer: MeshShape) -> Prospect:
    """The rollout beside what this trainer leaves on a device.

    Its moments stay where hosts have no room for them.
    """
    resident, rung = scene.resident_of(trainer), rollout.rung
    assert isinstance(rung, RolloutRung)
    kept = resident.kept if rung.offload else None
    tokens = scene.work.num_rows * rollout.places
    away_s = kept.moments_s / tokens if kept else 0.0
    left = kept.num_bytes if kept else resident.num_bytes
    return dataclasses.replace(
        rollout,
        footprint=dataclasses.replace(rollout.footprint, trainer=left),
        tokens_per_s=1.0 / (1.0 / rollout.tokens_per_s + away_s),
        rung=rung._replace(offload=kept is not None),
        moments=trainer_bytes(scene.sizes, trainer)[1],
    )


def _arrival_s(hardware: Hardware, num_bytes: int) -> float:
    """Seconds in which so many bytes come to each device over its slowest link."""
    several = hardware.num_hosts > 1
    return num_bytes / (hardware.network_bytes_per_s if several else hardware.link_bytes_per_s)


def to_and_fro_s(hardware: Hardware, moments: int) -> float:
    """Seconds a step in which so many bytes a device go to the host's memory and come back."""
    return 2 * moments / hardware.host_bytes_per_s
