# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Which meshes would be chosen as contexts grow, on hardware that is not here. Pure.

The rules are those of a run (`choose`); bytes and speeds are predicted instead of measured.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from earl_jax.selector.candidates import Check, for_rows
from earl_jax.selector.choose import BudgetTooSmall, Option, Settings, choose
from earl_jax.selector.footprint import (
    Footprint,
    ModelSizes,
    Workload,
    device_bytes,
    rollout_footprint,
    row_bytes,
    train_footprint,
    trainer_bytes,
)
from earl_jax.selector.hardware import Hardware
from earl_jax.selector.ladder import TrainRung, train_rungs
from earl_jax.selector.roofline import calibration, decode_s, rollout_tokens_per_s, train_s
from earl_jax.selector.throughput import Measurement
from earl_jax.sharding.layout import MeshShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """What is planned for: a model and its work on some hardware, and the meshes to choose from.

    `obstacle` says why a mesh cuts the model unevenly, `rollout_obstacle` why it does so in a
    rollout. `context_meshes` are candidates for the training of long rows only, beside
    `train_meshes` (see `for_rows`), `rollout_context_meshes` for rollouts of such. Without
    `by_speed` meshes are taken in the order that they are listed in (config.selector.order).
    `factors` are measured speeds by computed ones, of a stage; 1 where there is none. `offload` is
    that of the config.
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
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    offload: Literal["auto", "on", "off"] = "off"

    @property
    def can_offload(self) -> bool:
        """Whether the optimizer's moments may wait in host memory while episodes are played."""
        chips = self.hardware.platform != "cpu"
        return self.offload == "on" or self.offload == "auto" and chips

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
    """A mesh at one room per episode: what a device would hold, and how fast the stage would be.

    `rung` is how an update would go about its batch, None of a rollout. `seconds` are those of an
    update, or of a decode step of all slots that run at once: `rows_at_once` of each row shard, 0
    in training. `moments` are the trainer's bytes that a rollout has no need of; with `offload`
    they are in host memory meanwhile. `exact` bytes are a compiler's.
    """

    stage: str
    mesh: MeshShape
    places: int
    footprint: Footprint
    tokens_per_s: float
    seconds: float
    rows_at_once: int = 0
    rung: TrainRung | None = None
    moments: int = 0
    offload: bool = False
    exact: bool = False

    def option(self, by_speed: bool) -> Option:
        """As `choose` takes it."""
        return Option(
            mesh=self.mesh,
            bytes_per_device=self.footprint.total,
            tokens_per_s=self.tokens_per_s if by_speed else None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A stage at one room: what is chosen of all `prospects`, in the order of the candidates.

    Where nothing fits, `chosen` is None and `shortfall_bytes` what the least of them is over the
    budget.
    """

    prospects: tuple[Prospect, ...]
    chosen: Prospect | None
    switched: bool
    shortfall_bytes: int = 0

    @property
    def least(self) -> Prospect:
        """The prospect that takes the fewest bytes."""
        return min(self.prospects, key=lambda prospect: prospect.footprint.total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """One room of the schedule. Without a training mesh nothing can be said of the rollout."""

    places: int
    train: Choice
    rollout: Choice | None

    @property
    def fits(self) -> bool:
        """Whether both stages have a mesh."""
        return self.rollout is not None and self.rollout.chosen is not None


# Bytes that a compiler says, in the place of those of a prospect.
Exactly = Callable[[Prospect], Prospect]


def make_schedule(scene: Scene, rooms: Iterable[int], exactly: Exactly | None = None) -> list[Stop]:
    """The meshes of both stages at each room, rising: the stage stays where it is while it can.

    With `exactly`, what is chosen has a compiler's bytes: of each room the prospects are asked for
    theirs in the order in which they would be chosen, until one that was asked is.

    An update is as the config says where that fits some mesh, else on the first rung of the ladder
    where one does, as in a run (selector/ladder.py).
    """
    schedule: list[Stop] = []
    train_mesh = rollout_mesh = None
    for places in rooms:
        train = _choose_training(scene, places, train_mesh, exactly)
        if train.chosen is None:
            schedule.append(Stop(places=places, train=train, rollout=None))
            continue
        train_mesh = train.chosen.mesh
        rollout = _choose_rollout(scene, places, train_mesh, rollout_mesh, exactly)
        rollout_mesh = rollout.chosen.mesh if rollout.chosen else rollout_mesh
        schedule.append(Stop(places=places, train=train, rollout=rollout))
    return schedule


def _choose_rollout(
    scene: Scene,
    places: int,
    trainer: MeshShape,
    current: MeshShape | None,
    exactly: Exactly | None,
) -> Choice:
    """Beside the whole trainer; where no mesh fits so, with its moments out of the way."""
    choice = None
    for offload in (False, True) if scene.can_offload else (False,):
        prospects = [
            rollout_prospect(scene, mesh, places, trainer_bytes(scene.sizes, trainer), offload)
            for mesh in scene.rollout_meshes_for(places)
        ]
        choice = _choose(scene, prospects, current, exactly)
        if choice.chosen:
            break
    assert choice is not None
    return choice


def _choose_training(
    scene: Scene, places: int, current: MeshShape | None, exactly: Exactly | None
) -> Choice:
    """On the first rung where a mesh fits; where none does, the choice that is nearest to it."""
    choices = []
    for rung in _rungs(scene):
        lower = on_rung(scene, rung)
        prospects = [train_prospect(lower, mesh, places) for mesh in lower.train_meshes_for(places)]
        if not prospects:
            continue
        choices.append(_choose(lower, prospects, current, exactly))
        if choices[-1].chosen:
            return choices[-1]
    return min(choices, key=lambda choice: choice.shortfall_bytes)


def _rungs(scene: Scene) -> list[TrainRung]:
    """How an update may go about a batch, from what the config says down."""
    return train_rungs(scene.work.num_rows, scene.work.micro_batches, scene.work.remat)


def on_rung(scene: Scene, rung: TrainRung) -> Scene:
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


def calibrated(scene: Scene, measured: Mapping[str, Measurement]) -> Scene:
    """The scene with one factor a stage, by what a throughput table has of its meshes.

    Entries without a speed, of other meshes, and of a rung below the first count for nothing.
    """
    pairs: dict[str, list[tuple[float, float]]] = {"train": [], "rollout": []}
    for entry, measurement in measured.items():
        stage, mesh, places, *rung = entry.split(" ")
        shape, speed = MeshShape.parse(mesh), measurement.tokens_per_s
        trainers = (*scene.train_meshes, *scene.context_meshes)
        players = (*scene.rollout_meshes, *scene.rollout_context_meshes)
        meshes = trainers if stage == "train" else players
        if speed is None or rung or shape not in meshes:
            continue
        if stage == "train":
            found = train_prospect(scene, shape, int(places))
        else:
            found = rollout_prospect(scene, shape, int(places), (0, 0))
        pairs[stage].append((speed, found.tokens_per_s))
    factors = {stage: calibration(found) for stage, found in pairs.items() if found}
    return dataclasses.replace(scene, factors=factors)


def train_prospect(scene: Scene, mesh: MeshShape, places: int) -> Prospect:
    """An update on rows of so many tokens, as the scene's work says."""
    seconds = train_s(scene.hardware, scene.sizes, scene.work, mesh, places).total
    seconds /= scene.factors.get("train", 1.0)
    return Prospect(
        stage="train",
        mesh=mesh,
        places=places,
        footprint=train_footprint(scene.sizes, scene.work, mesh, places, scene.hardware.platform),
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
    a_row_shard = hardware.num_devices // mesh.data
    rows = work.num_slots // mesh.data
    least = min(rows, a_row_shard)
    bare = rollout_footprint(sizes, work, mesh, places, 0, resident, hardware.platform)
    room = scene.budget_bytes - bare.total
    at_once = min(rows, max(least, room // row_bytes(sizes, work, mesh, places)))
    step = decode_s(hardware, sizes, work, mesh, work.rows_a_step(mesh, at_once), places)
    factor = scene.factors.get("rollout", 1.0)
    return Prospect(
        stage="rollout",
        mesh=mesh,
        places=places,
        footprint=rollout_footprint(
            sizes, work, mesh, places, at_once, resident, hardware.platform
        ),
        tokens_per_s=factor * rollout_tokens_per_s(hardware, sizes, work, mesh, places, at_once),
        seconds=step.total / factor,
        rows_at_once=at_once,
        moments=moments,
        offload=offload,
    )


def _choose(
    scene: Scene,
    prospects: Sequence[Prospect],
    current: MeshShape | None,
    exactly: Exactly | None,
) -> Choice:
    by_mesh = {prospect.mesh: prospect for prospect in prospects}
    stage, places = prospects[0].stage, prospects[0].places
    while True:
        options = [prospect.option(scene.by_speed) for prospect in by_mesh.values()]
        try:
            decision = choose(
                stage,
                options,
                current=current,
                places=places,
                load=None,
                step_tokens=scene.work.num_rows * places,
                switch_s=_switch_s(scene, stage),
                settings=scene.settings,
            )
        except BudgetTooSmall:
            all_of_them = tuple(by_mesh.values())
            choice = Choice(prospects=all_of_them, chosen=None, switched=False)
            least = choice.least
            if exactly and not least.exact:
                by_mesh[least.mesh] = exactly(least)
                continue
            over = least.footprint.total - scene.budget_bytes
            return dataclasses.replace(choice, shortfall_bytes=over)
        chosen = by_mesh[decision.mesh]
        if exactly and not chosen.exact:
            by_mesh[chosen.mesh] = exactly(chosen)
            continue
        return Choice(prospects=tuple(by_mesh.values()), chosen=chosen, switched=decision.switched)


def _switch_s(scene: Scene, stage: str) -> float:
    """What a change of mesh costs: everything that a device holds goes over its slowest link once.

    By the smallest share that a device can hold; caches are left out.
    """
    hardware = scene.hardware
    arrays = scene.sizes.engine if stage == "rollout" else scene.sizes.trained
    whole = device_bytes(arrays, MeshShape())
    rate = hardware.link_bytes_per_s if hardware.num_hosts == 1 else hardware.network_bytes_per_s
    moments = 3 if stage == "train" else 1
    return moments * whole / hardware.num_devices / rate
