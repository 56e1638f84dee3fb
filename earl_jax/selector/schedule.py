# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What would be chosen as contexts grow, on hardware that is not here. Pure.

The rules are those of a run (`choose`); bytes and speeds are predicted instead of measured.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from earl_jax.selector.choose import NOISE, BudgetTooSmall, choose
from earl_jax.selector.footprint import device_bytes, trainer_bytes
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.selector.prospects import (
    Prospect,
    Prospects,
    Rung,
    Scene,
    rollout_prospects,
    train_prospects,
)
from earl_jax.sharding.layout import MeshShape

Way = TypeVar("Way", TrainRung, RolloutRung)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A stage at one room: what is chosen of all candidates, of which there are so many.

    `prospects` are one a mesh, in the order of the candidates: as that mesh would be used, or where
    it does not fit in any way, the way that takes the fewest bytes. `second` is the next best way
    to use the mesh that is chosen. Where nothing fits, `chosen` is None and `shortfall_bytes` what
    the least of them is over the budget.
    """

    prospects: tuple[Prospect, ...]
    candidates: int
    chosen: Prospect | None
    switched: bool = False
    second: Prospect | None = None
    shortfall_bytes: int = 0

    @property
    def least(self) -> Prospect:
        """The prospect that takes the fewest bytes."""
        return _least(self.prospects)


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
    """What both stages do at each room, rising: each stays on its mesh as `choose` says.

    By speed all ways to use all meshes are compared at once; a change of way on the same mesh costs
    nothing. Where meshes are listed, a stage does as the config says where that fits some mesh,
    else as the first rung of the ladder where one does (selector/ladder.py).

    With `exactly`, what is chosen has a compiler's bytes: of each room the prospects are asked for
    theirs in the order in which they would be chosen, until one that was asked is.
    """
    schedule: list[Stop] = []
    train_mesh = rollout_mesh = None
    for places in rooms:
        train = _choose_way(
            scene,
            scene.ways_to_train,
            lambda ways, places=places: train_prospects(scene, ways, places),
            train_mesh,
            exactly,
        )
        if train.chosen is None:
            schedule.append(Stop(places=places, train=train, rollout=None))
            continue
        train_mesh = train.chosen.mesh
        beside = trainer_bytes(scene.sizes, train_mesh)
        rollout = _choose_way(
            scene,
            scene.ways_to_play,
            lambda ways, places=places, beside=beside: rollout_prospects(
                scene, ways, places, beside
            ),
            rollout_mesh,
            exactly,
        )
        rollout_mesh = rollout.chosen.mesh if rollout.chosen else rollout_mesh
        schedule.append(Stop(places=places, train=train, rollout=rollout))
    return schedule


def _choose_way(
    scene: Scene,
    ways: list[Way],
    prospects_of: Callable[[list[Way]], Prospects],
    current: MeshShape | None,
    exactly: Exactly | None,
) -> Choice:
    """By speed of all ways at once, else of the first where a mesh fits; or what is nearest to it.

    `prospects_of` gives the candidates of some ways, in the order of preference.
    """
    tried, choices = 0, []
    for together in [ways] if scene.by_speed else [[way] for way in ways]:
        prospects = prospects_of(together)
        if not prospects.kept:
            continue
        tried += prospects.number
        choice = _choose(scene, prospects.kept, current, exactly)
        choices.append(dataclasses.replace(choice, candidates=tried))
        if choice.chosen:
            return choices[-1]
    return min(choices, key=lambda choice: choice.shortfall_bytes)


def _choose(
    scene: Scene,
    prospects: Sequence[Prospect],
    current: MeshShape | None,
    exactly: Exactly | None,
) -> Choice:
    """As `_choose_once`, again whenever a compiler has said what is chosen takes of a device."""
    found: dict[tuple[MeshShape, Rung], Prospect] = {(p.mesh, p.rung): p for p in prospects}
    while True:
        choice = _choose_once(scene, list(found.values()), current)
        asked = choice.chosen or choice.least
        if exactly is None or asked.exact:
            return choice
        found[asked.mesh, asked.rung] = exactly(asked)


def _choose_once(scene: Scene, prospects: Sequence[Prospect], current: MeshShape | None) -> Choice:
    """The mesh by `choose`, each at the speed of its fastest way; the way is the first as good.

    As good as the fastest of all, on a mesh where one is; else as the fastest of that mesh.
    """
    fitting = [p for p in prospects if p.footprint.total <= scene.budget_bytes]
    slack = 1.0 + min(NOISE, scene.settings.hysteresis)
    top = max((p.tokens_per_s for p in fitting if scene.by_speed), default=0.0)
    near = [p for p in fitting if p.tokens_per_s * slack >= top]
    # Meshes in the order of what is as good as the fastest: of these `choose` takes the first.
    ways = _by_mesh([*near, *fitting])
    fastest = {mesh: max(on_it, key=lambda p: p.tokens_per_s) for mesh, on_it in ways.items()}
    used = {
        mesh: next(p for p in on_it if p.tokens_per_s * slack >= fastest[mesh].tokens_per_s)
        for mesh, on_it in ways.items()
    }
    least = {mesh: _least(on_it) for mesh, on_it in _by_mesh(prospects).items()}
    lost = [prospect for mesh, prospect in least.items() if mesh not in ways]
    stage, places = prospects[0].stage, prospects[0].places
    choice = Choice(
        prospects=tuple(used.get(mesh, smallest) for mesh, smallest in least.items()),
        candidates=len(prospects),
        chosen=None,
    )
    try:
        decision = choose(
            stage,
            [prospect.option(scene.by_speed) for prospect in (*fastest.values(), *lost)],
            current=current,
            places=places,
            load=None,
            step_tokens=scene.work.num_rows * places,
            switch_s=_switch_s(scene, stage),
            settings=scene.settings,
        )
    except BudgetTooSmall:
        over = choice.least.footprint.total - scene.budget_bytes
        return dataclasses.replace(choice, shortfall_bytes=over)
    chosen = used[decision.mesh]
    others = [p for p in ways[decision.mesh] if p.rung != chosen.rung]
    second = max(others, key=lambda p: p.tokens_per_s, default=None)
    return dataclasses.replace(choice, chosen=chosen, switched=decision.switched, second=second)


def _by_mesh(prospects: Iterable[Prospect]) -> dict[MeshShape, list[Prospect]]:
    found: dict[MeshShape, list[Prospect]] = {}
    for prospect in prospects:
        found.setdefault(prospect.mesh, []).append(prospect)
    return found


def _least(prospects: Iterable[Prospect]) -> Prospect:
    return min(prospects, key=lambda prospect: prospect.footprint.total)


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
