# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Which meshes would be chosen as contexts grow, on hardware that is not here. Pure.

The rules are those of a run (`choose`); bytes and speeds are predicted instead of measured.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from earl_jax.selector.candidates import (
    Check,
    context_candidates,
    for_rows,
    rollout_candidates,
    rollout_context_candidates,
    train_candidates,
)
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
from earl_jax.selector.hardware import Hardware, hardware_of
from earl_jax.selector.ladder import TrainRung, train_rungs
from earl_jax.selector.roofline import calibration, decode_s, rollout_tokens_per_s, train_s
from earl_jax.selector.throughput import Measurement
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.topology import CHIPS, Topology

# Beyond that no number of chips is tried.
MOST_DEVICES = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """What is planned for: a model and its work on some hardware, and the meshes to choose from.

    `obstacle` says why a mesh cuts the model unevenly, `rollout_obstacle` why it does so in a
    rollout. `context_meshes` are candidates for the training of long rows only, beside
    `train_meshes` (see `for_rows`), `rollout_context_meshes` for rollouts of such. Without
    `by_speed` meshes are taken in the order that they are listed in (config.selector.order).
    `factors` are measured speeds by computed ones, of a stage; 1 where there is none.
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
    in training. `exact` bytes are a compiler's.
    """

    stage: str
    mesh: MeshShape
    places: int
    footprint: Footprint
    tokens_per_s: float
    seconds: float
    rows_at_once: int = 0
    rung: TrainRung | None = None
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
        resident = sum(trainer_bytes(scene.sizes, train_mesh))
        prospects = [
            _rollout_prospect(scene, mesh, places, resident)
            for mesh in scene.rollout_meshes_for(places)
        ]
        rollout = _choose(scene, prospects, rollout_mesh, exactly)
        rollout_mesh = rollout.chosen.mesh if rollout.chosen else rollout_mesh
        schedule.append(Stop(places=places, train=train, rollout=rollout))
    return schedule


def _choose_training(
    scene: Scene, places: int, current: MeshShape | None, exactly: Exactly | None
) -> Choice:
    """On the first rung where a mesh fits; where none does, the choice that is nearest to it."""
    choices = []
    for rung in _rungs(scene):
        lower = _on_rung(scene, rung)
        prospects = [
            _train_prospect(lower, mesh, places) for mesh in lower.train_meshes_for(places)
        ]
        if not prospects:
            continue
        choices.append(_choose(lower, prospects, current, exactly))
        if choices[-1].chosen:
            return choices[-1]
    return min(choices, key=lambda choice: choice.shortfall_bytes)


def _rungs(scene: Scene) -> list[TrainRung]:
    """How an update may go about a batch, from what the config says down."""
    return train_rungs(scene.work.num_rows, scene.work.micro_batches, scene.work.remat)


def _on_rung(scene: Scene, rung: TrainRung) -> Scene:
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
            found = _train_prospect(scene, shape, int(places))
        else:
            found = _rollout_prospect(scene, shape, int(places), 0)
        pairs[stage].append((speed, found.tokens_per_s))
    factors = {stage: calibration(found) for stage, found in pairs.items() if found}
    return dataclasses.replace(scene, factors=factors)


def _train_prospect(scene: Scene, mesh: MeshShape, places: int) -> Prospect:
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


def _rollout_prospect(scene: Scene, mesh: MeshShape, places: int, resident: int) -> Prospect:
    """With pages for as many rows at once as the budget holds, for one a device at least."""
    hardware, sizes, work = scene.hardware, scene.sizes, scene.work
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


def smallest_hardware(scene: Scene, places: int) -> list[tuple[str, int]]:
    """How many chips of each kind would hold both stages at this room; the scene's kind first.

    Powers of two up to MOST_DEVICES, with as many slots and episodes as the scene has, or one of
    each a device where that is more. Any mesh that cuts the model evenly counts.
    """
    chips = [name for name in CHIPS if name != scene.hardware.chip]
    first = [scene.hardware]
    if scene.hardware.chip not in CHIPS:
        first = []
    kinds = first + [hardware_of(Topology(chip=CHIPS[c], grid=(1,) * CHIPS[c].axes)) for c in chips]
    found = []
    for kind in kinds:
        number = 1
        while number <= MOST_DEVICES:
            if _holds(scene, kind.with_devices(number), places):
                found.append((kind.chip, number))
                break
            number *= 2
    return found


def _holds(scene: Scene, hardware: Hardware, places: int) -> bool:
    """Whether some mesh of this hardware holds each stage, on the lowest rung of training."""
    work, number = scene.work, hardware.num_devices
    rows = _up(work.num_rows, number)
    work = dataclasses.replace(work, num_slots=_up(work.num_slots, number), num_rows=rows)
    same = hardware.chip == scene.hardware.chip
    budget = scene.budget_bytes if same else hardware.usable_bytes
    scene = dataclasses.replace(
        scene,
        hardware=hardware,
        work=work,
        settings=dataclasses.replace(scene.settings, budget_bytes=budget),
    )
    experts = scene.sizes.num_experts
    try:
        trainers = train_candidates(number, (), scene.obstacle, experts)
        trainers += for_rows(context_candidates(number, scene.obstacle, experts), places)
        players = rollout_candidates(number, (), scene.rollout_obstacle, experts)
        cut = rollout_context_candidates(number, scene.rollout_obstacle, experts)
        players += for_rows(cut, places)
    except ValueError:
        # So many devices cut the model unevenly in every way.
        return False

    def update_bytes(mesh: MeshShape) -> int:
        a_row_each = TrainRung(rows // (mesh.data * mesh.fsdp * mesh.expert), True)
        return _train_prospect(_on_rung(scene, a_row_each), mesh, places).footprint.total

    resident = [
        sum(trainer_bytes(scene.sizes, mesh)) for mesh in trainers if update_bytes(mesh) <= budget
    ]
    return bool(resident) and any(
        _rollout_prospect(scene, mesh, places, min(resident)).footprint.total <= budget
        for mesh in players
    )


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
