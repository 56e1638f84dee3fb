# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What would be chosen as contexts grow, on hardware that is not here. Pure.

The rules are those of a run: pairs of a training way and a rollout way by `choose_step`, on bytes
and speeds that are predicted, or measured where a table has them. What a run knows of its load is
assumed: all episodes fill their room with tokens that the policy samples, pages for all slots are
wanted, nothing but the two stages takes time, and a run is at each room for longer than a window of
steps and than the horizon, so that no pair is too new to be left and a switch is spread over the
horizon.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from earl_jax.selector.choose import NOISE, BudgetTooSmall
from earl_jax.selector.contenders import Contenders, rollout_contenders, train_contenders
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.selector.pairs import Pair, Resident, Work, room_of
from earl_jax.selector.prospects import Prospect, Rung, Scene, beside, on_train_rung
from earl_jax.selector.step_choice import StepDecision, choose_step
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import WINDOW


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A stage at one room: what is chosen of all candidates, of which there are so many.

    `prospects` are one a mesh, in the order of the candidates: as that mesh would be used, or where
    it does not fit in any way, the way that takes the fewest bytes; rollouts are beside the trainer
    that is chosen. `second` is the next best way to use the mesh that is chosen. Where nothing
    fits, `chosen` is None and `shortfall_bytes` what the least of them is over the budget.
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
    """One room of the schedule. Without a training mesh nothing can be said of the rollout.

    Where no rollout fits beside any trainer, `train` has the one that comes nearest to it. A step
    takes `step_s`, None where meshes are listed, and `second` is the next best pair, in words.
    """

    places: int
    train: Choice
    rollout: Choice | None
    step_s: float | None = None
    second: str = ""

    @property
    def fits(self) -> bool:
        """Whether both stages have a mesh."""
        return self.rollout is not None and self.rollout.chosen is not None

    @property
    def pair(self) -> Pair | None:
        """Both meshes."""
        if self.rollout is None or self.rollout.chosen is None or self.train.chosen is None:
            return None
        return Pair(self.rollout.chosen.mesh, self.train.chosen.mesh)


# Bytes that a compiler says, in the place of those of a prospect.
Exactly = Callable[[Prospect], Prospect]


def make_schedule(scene: Scene, rooms: Iterable[int], exactly: Exactly | None = None) -> list[Stop]:
    """What both stages do at each room, rising: they stay on their meshes as `choose_step` says.

    By speed all ways to use all meshes are compared at once; a change of way on the same mesh costs
    nothing. Where meshes are listed, both do as the config says where that fits some pair, else
    with less, as a run does (selector/ladder.py).

    With `exactly`, what is chosen has a compiler's bytes: of each room the prospects are asked for
    theirs in the order in which they would be chosen, until both that were asked are.
    """
    schedule: list[Stop] = []
    pair = None
    for places in rooms:
        field, decision = _settled(scene, places, pair, exactly)
        schedule.append(_stop(field, decision, pair))
        pair = schedule[-1].pair or pair
    return schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Field:
    """What is chosen from at one room; rollouts are by themselves."""

    scene: Scene
    places: int
    trains: Contenders
    rollouts: Contenders

    @property
    def residents(self) -> list[Resident]:
        """Of each trainer what it leaves on a device."""
        known = {train.mesh: self.scene.resident_of(train.mesh) for train in self.trains.kept}
        return [known[train.mesh] for train in self.trains.kept]

    @property
    def trainable(self) -> list[Prospect]:
        """The updates that fit."""
        budget = self.scene.budget_bytes
        return [train for train in self.trains.kept if train.fits(budget)]

    def replaced(self, prospect: Prospect) -> "_Field":
        """With this in the place of what was computed for it."""

        def put(contenders: Contenders) -> Contenders:
            kept = [prospect if _key(old) == _key(prospect) else old for old in contenders.kept]
            return contenders._replace(kept=kept)

        return dataclasses.replace(self, trains=put(self.trains), rollouts=put(self.rollouts))


def _settled(
    scene: Scene, places: int, pair: Pair | None, exactly: Exactly | None
) -> tuple[_Field, StepDecision | None]:
    """All ways at once and what is chosen of them, None where no pair fits."""
    if scene.by_speed:
        field = _field(scene, places, scene.ways_to_train, scene.ways_to_play(places))
        return _decided(field, pair, exactly)
    return _first_that_fits(scene, places, pair, exactly)


def _first_that_fits(
    scene: Scene, places: int, pair: Pair | None, exactly: Exactly | None
) -> tuple[_Field, StepDecision | None]:
    """Down the ladder of a run that measures nothing: that of rollouts, unless no update fits."""
    down = scene.ways_to_play(places)
    train_down = [
        way for way in scene.ways_to_train if on_train_rung(scene, way).train_meshes_for(places)
    ]
    while True:
        field = _field(scene, places, train_down[:1], down[:1])
        field, decision = _decided(field, pair, exactly)
        shorter = down if field.trainable else train_down
        if decision or len(shorter) == 1:
            return field, decision
        del shorter[0]


def _field(
    scene: Scene, places: int, train_ways: list[TrainRung], ways: list[RolloutRung]
) -> _Field:
    trains = train_contenders(scene, train_ways, places)
    residents = [scene.resident_of(mesh) for mesh in {train.mesh for train in trains.kept}]
    left = min(r.num_bytes for r in residents), min(r.least for r in residents)
    rollouts = rollout_contenders(scene, ways, places, left)
    return _Field(scene=scene, places=places, trains=trains, rollouts=rollouts)


def _decided(
    field: _Field, pair: Pair | None, exactly: Exactly | None
) -> tuple[_Field, StepDecision | None]:
    """The choice, again whenever a compiler has said what one half of it takes of a device."""
    while True:
        decision = _lasting(field, pair)
        chosen = _chosen(field, decision) if decision else _nearest(field)
        asked = next((prospect for prospect in chosen if not prospect.exact), None)
        if exactly is None or asked is None:
            return field, decision
        field = field.replaced(exactly(asked))


def _lasting(field: _Field, pair: Pair | None) -> StepDecision | None:
    """What a run stays at in this room: when its trainer has moved, ways are weighed without that.

    None where no pair fits.
    """
    been = {pair}
    decision = _decision(field, pair)
    while decision and decision.pair not in been:
        been.add(decision.pair)
        decision = _decision(field, decision.pair)
    return decision


def _decision(field: _Field, pair: Pair | None) -> StepDecision | None:
    """As a run decides once; None where no pair fits."""
    scene, places, residents = field.scene, field.places, field.residents
    tokens = scene.work.num_rows * places
    try:
        return choose_step(
            [prospect.option(scene) for prospect in field.rollouts.kept],
            [prospect.option(scene) for prospect in field.trains.kept],
            resident_bytes=[resident.num_bytes for resident in residents],
            kept=[resident.kept for resident in residents],
            current=pair,
            calm_steps=WINDOW,
            work=Work(
                load=None,
                rollout_places=places,
                train_places=places,
                rollout_tokens=tokens,
                train_tokens=tokens * scene.work.epochs,
            ),
            settings=scene.settings,
        )
    except BudgetTooSmall:
        return None


def _chosen(field: _Field, decision: StepDecision) -> tuple[Prospect, Prospect]:
    """The update and the rollout of a decision."""

    def of(kept: Sequence[Prospect], mesh: MeshShape, rung: Rung | None) -> Prospect:
        return next(p for p in kept if (p.mesh, p.rung) == (mesh, rung))

    train, rollout = decision.train, decision.rollout
    return (
        of(field.trains.kept, train.mesh, train.rung),
        of(field.rollouts.kept, rollout.mesh, rollout.rung),
    )


def _nearest(field: _Field) -> tuple[Prospect, ...]:
    """What comes nearest to fitting: the least update, or an update that fits with a rollout."""
    if not field.trainable:
        return (_least(field.trains.kept),)
    meshes = dict.fromkeys(train.mesh for train in field.trainable)
    # Of rollouts the least beside the moments and the least without them.
    parts = [[p for p in field.rollouts.kept if p.offload is away] for away in (False, True)]
    players = [_least(part) for part in parts if part]
    mesh, player = min(
        ((mesh, player) for player in players for mesh in meshes),
        key=lambda pair: beside(field.scene, pair[1], pair[0]).footprint.total,
    )
    return _preferred(field.scene, [t for t in field.trainable if t.mesh == mesh]), player


def _stop(field: _Field, decision: StepDecision | None, before: Pair | None) -> Stop:
    scene, places = field.scene, field.places
    trains = _with_room(field)
    if decision is None:
        nearest = _nearest(field)
        train = _choice(scene, trains, field.trains.number, nearest[0] if nearest[1:] else None)
        if len(nearest) == 1:
            return Stop(places=places, train=train, rollout=None)
        rollouts = [beside(scene, rollout, nearest[0].mesh) for rollout in field.rollouts.kept]
        return Stop(
            places=places,
            train=train,
            rollout=_choice(scene, rollouts, field.rollouts.number, None),
        )
    chosen, player = _chosen(field, decision)
    rollouts = [beside(scene, rollout, chosen.mesh) for rollout in field.rollouts.kept]
    player = beside(scene, player, chosen.mesh)
    was = before or decision.pair
    return Stop(
        places=places,
        train=_choice(scene, trains, field.trains.number, chosen, chosen.mesh != was.train),
        rollout=_choice(scene, rollouts, field.rollouts.number, player, player.mesh != was.rollout),
        step_s=decision.predicted_s,
        second=decision.second,
    )


def _with_room(field: _Field) -> list[Prospect]:
    """The updates, with whether some rollout fits beside their trainers."""
    scene = field.scene
    room = room_of(
        [rollout.option(scene) for rollout in field.rollouts.kept],
        [train.option(scene) for train in field.trains.kept],
        field.residents,
        scene.settings,
    )
    return [
        dataclasses.replace(train, leaves_room=bool(can) or not train.fits(scene.budget_bytes))
        for train, can in zip(field.trains.kept, room.possible_T, strict=True)
    ]


def _choice(
    scene: Scene,
    prospects: Sequence[Prospect],
    number: int,
    chosen: Prospect | None,
    switched: bool = False,
) -> Choice:
    """Each mesh as it would be used; that of `chosen` so."""
    by_mesh: dict[MeshShape, list[Prospect]] = {}
    for prospect in prospects:
        by_mesh.setdefault(prospect.mesh, []).append(prospect)
    shown, second, budget = [], None, scene.budget_bytes
    for mesh, on_it in by_mesh.items():
        fitting = [p for p in on_it if p.fits(budget)]
        if chosen and mesh == chosen.mesh:
            others = [p for p in fitting if p.rung != chosen.rung]
            second = max(others, key=lambda p: p.tokens_per_s, default=None)
            chosen = next((p for p in on_it if p.rung == chosen.rung), chosen)
            shown.append(chosen)
        else:
            shown.append(_preferred(scene, fitting) if fitting else _least(on_it))
    shortfall = 0 if chosen else _least(shown).footprint.total - budget
    return Choice(
        prospects=tuple(shown),
        candidates=number,
        chosen=chosen,
        switched=switched,
        second=second,
        shortfall_bytes=shortfall,
    )


def _preferred(scene: Scene, fitting: Sequence[Prospect]) -> Prospect:
    """Of the ways to use a mesh the first that is as good as the fastest."""
    if not scene.by_speed:
        return fitting[0]
    slack = 1.0 + min(NOISE, scene.settings.hysteresis)
    top = max(prospect.tokens_per_s for prospect in fitting)
    return next(prospect for prospect in fitting if prospect.tokens_per_s * slack >= top)


def _least(prospects: Iterable[Prospect]) -> Prospect:
    return min(prospects, key=lambda prospect: prospect.footprint.total)


def _key(prospect: Prospect) -> tuple[str, MeshShape, Rung]:
    return prospect.stage, prospect.mesh, prospect.rung
