# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What each candidate of a plan would take of a device, and how fast it would be. Pure.

A candidate is a mesh and a way to use it: of an update the micro-batches and remat, of a rollout
the slots, the tokens of a page, and where the optimizer's moments are meanwhile.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from earl_jax.selector.candidates import Check, for_rows
from earl_jax.selector.choose import Option, Settings
from earl_jax.selector.footprint import (
    Footprint,
    ModelSizes,
    Workload,
    rollout_footprint,
    row_bytes,
    train_footprint,
)
from earl_jax.selector.hardware import Hardware
from earl_jax.selector.host_memory import host_obstacle
from earl_jax.selector.ladder import (
    RolloutRung,
    TrainRung,
    rollout_rungs,
    train_rungs,
    train_ways,
)
from earl_jax.selector.roofline import calibration, decode_s, rollout_tokens_per_s, train_s
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

    @property
    def ways_to_play(self) -> list[RolloutRung]:
        """How a rollout may go about its episodes, in the order of preference.

        By speed the moments leave after all else, in a run's ladder before there are fewer slots.
        Pages are as many as there is room for: 0 here.
        """
        slots, lanes = self.work.num_slots, self.hardware.num_devices
        rungs = rollout_rungs(slots, lanes, [0], 0, self.can_offload and not self.by_speed)
        if self.can_offload and self.by_speed:
            rungs += [rung._replace(offload=True) for rung in rungs]
        sizes = dict.fromkeys((self.work.page_size, *self.page_sizes))
        return [rung._replace(page_size=size) for rung in rungs for size in sizes]

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
    at once: `rows_at_once` of each row shard, 0 in training. `moments` are the trainer's bytes that
    a rollout has no need of; where they are in host memory meanwhile, `tokens_per_s` counts their
    way there and back, once a step. `exact` bytes are a compiler's.
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
    exact: bool = False

    @property
    def offload(self) -> bool:
        """Whether the optimizer's moments are in host memory."""
        return isinstance(self.rung, RolloutRung) and self.rung.offload

    def option(self, by_speed: bool) -> Option:
        """As `choose` takes it."""
        return Option(
            mesh=self.mesh,
            bytes_per_device=self.footprint.total,
            tokens_per_s=self.tokens_per_s if by_speed else None,
        )


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


class Prospects(NamedTuple):
    """All meshes of the first way, then of the next; `number` counts those left out too.

    Left out may be what could never be chosen: what does not fit where the mesh takes fewer bytes
    in another way.
    """

    kept: list[Prospect]
    number: int


def train_prospects(scene: Scene, ways: Sequence[TrainRung], places: int) -> Prospects:
    """Updates in these ways on all meshes; the times of what is left out are not computed."""
    found = [
        (on_rung, mesh, _train_footprint(on_rung, mesh, places))
        for on_rung in [on_train_rung(scene, way) for way in ways]
        for mesh in on_rung.train_meshes_for(places)
    ]
    least: dict[MeshShape, int] = {}
    for _, mesh, footprint in found:
        least[mesh] = min(footprint.total, least.get(mesh, footprint.total))
    kept = [
        _train_prospect(on_rung, mesh, places, footprint)
        for on_rung, mesh, footprint in found
        if footprint.total <= max(scene.budget_bytes, least[mesh])
    ]
    return Prospects(kept, len(found))


def rollout_prospects(
    scene: Scene, ways: Sequence[RolloutRung], places: int, trainer: tuple[int, int]
) -> Prospects:
    """Rollouts in these ways on all meshes; `trainer` as in `rollout_prospect`.

    Those with the moments in host memory only where there is room for them.
    """
    no_room = scene.host_obstacle(trainer[1])
    scenes = [(on_rollout_rung(scene, way), way) for way in ways if not (way.offload and no_room)]
    found = [
        rollout_prospect(on_rung, mesh, places, trainer, way.offload)
        for on_rung, way in scenes
        for mesh in on_rung.rollout_meshes_for(places)
    ]
    return Prospects(found, len(found))


def train_prospect(scene: Scene, mesh: MeshShape, places: int) -> Prospect:
    """An update on rows of so many tokens, as the scene's work says."""
    return _train_prospect(scene, mesh, places, _train_footprint(scene, mesh, places))


def _train_footprint(scene: Scene, mesh: MeshShape, places: int) -> Footprint:
    return train_footprint(scene.sizes, scene.work, mesh, places, scene.hardware.platform)


def _train_prospect(scene: Scene, mesh: MeshShape, places: int, footprint: Footprint) -> Prospect:
    seconds = train_s(scene.hardware, scene.sizes, scene.work, mesh, places).total
    seconds /= scene.factors.get("train", 1.0)
    return Prospect(
        stage="train",
        mesh=mesh,
        places=places,
        footprint=footprint,
        tokens_per_s=scene.work.num_rows * places / seconds,
        seconds=seconds,
        rung=TrainRung(scene.work.micro_batches, scene.work.remat),
    )


def rollout_prospect(
    scene: Scene, mesh: MeshShape, places: int, trainer: tuple[int, int], offload: bool = False
) -> Prospect:
    """With pages for as many rows at once as the budget holds, for one a device at least.

    `trainer` are the bytes per device of its parameters and of its moments.
    """
    hardware, sizes, work = scene.hardware, scene.sizes, scene.work
    kept, moments = trainer
    resident = kept if offload else kept + moments
    rows, a_row_shard = work.num_slots // mesh.data, hardware.num_devices // mesh.data
    least = min(rows, a_row_shard)
    bare = rollout_footprint(sizes, work, mesh, places, 0, resident, hardware.platform)
    room, a_row = scene.budget_bytes - bare.total, row_bytes(sizes, work, mesh, places)
    at_once = min(rows, max(least, room // a_row))
    step = decode_s(hardware, sizes, work, mesh, work.rows_a_step(mesh, at_once), places)
    factor = scene.factors.get("rollout", 1.0)
    speed = factor * rollout_tokens_per_s(hardware, sizes, work, mesh, places, at_once)
    away_s = to_and_fro_s(hardware, moments) / (work.num_rows * places) if offload else 0.0
    pages = at_once * -(-places // work.page_size)
    return Prospect(
        stage="rollout",
        mesh=mesh,
        places=places,
        footprint=dataclasses.replace(bare, cache=at_once * a_row),
        tokens_per_s=1.0 / (1.0 / speed + away_s),
        seconds=step.total / factor,
        rung=RolloutRung(work.num_slots, -(-pages // a_row_shard), offload, work.page_size),
        rows_at_once=at_once,
        moments=moments,
    )


def to_and_fro_s(hardware: Hardware, moments: int) -> float:
    """Seconds a step in which so many bytes a device go to the host's memory and come back."""
    return 2 * moments / hardware.host_bytes_per_s


def calibrated(scene: Scene, measured: Mapping[str, Measurement]) -> Scene:
    """The scene with one factor a stage, by what a throughput table has of its meshes.

    Each entry is compared with what is computed for the way that it names. Entries without a speed,
    of other meshes, and of ways that this scene cannot have count for nothing.
    """
    pairs: dict[str, list[tuple[float, float]]] = {"train": [], "rollout": []}
    for entry, measurement in measured.items():
        stage, mesh, places, *words = entry.split(" ")
        rung = _rung_named(scene, stage, " ".join(words))
        if measurement.tokens_per_s is None or rung is None:
            continue
        shape, room = MeshShape.parse(mesh), int(places)
        if isinstance(rung, TrainRung):
            on_rung = on_train_rung(scene, rung)
            meshes = on_rung.train_meshes + on_rung.context_meshes
            found = train_prospect(on_rung, shape, room) if shape in meshes else None
        else:
            on_rung = on_rollout_rung(scene, rung)
            meshes = on_rung.rollout_meshes + on_rung.rollout_context_meshes
            found = rollout_prospect(on_rung, shape, room, (0, 0)) if shape in meshes else None
        if found:
            pairs[stage].append((measurement.tokens_per_s, found.tokens_per_s))
    factors = {stage: calibration(found) for stage, found in pairs.items() if found}
    return dataclasses.replace(scene, factors=factors)


def _rung_named(scene: Scene, stage: str, words: str) -> Rung | None:
    """The way of a table's entry, "micro_batches=2,remat=True" or "slots=32,page=64".

    "" is the config's; None for what this scene cannot have.
    """
    work = scene.work
    ways: list[Rung] = [*scene.ways_to_play]
    if stage == "train":
        ways = [*train_ways(work.num_rows, work.micro_batches, work.remat)]
    return next((way for way in ways if _entry_words(work, way) == words), None)


def _entry_words(work: Workload, rung: Rung) -> str:
    if isinstance(rung, TrainRung):
        first = rung == (work.micro_batches, work.remat)
        return "" if first else f"micro_batches={rung.micro_batches},remat={rung.remat}"
    slots = f"slots={rung.num_slots}" if rung.num_slots != work.num_slots else ""
    page = f"page={rung.page_size}" if rung.page_size != work.page_size else ""
    return ",".join(filter(None, (slots, page)))
