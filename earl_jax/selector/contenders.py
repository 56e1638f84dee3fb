# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""All candidates of a plan at one room, computed or as they were measured. Pure.

What was measured on such devices stands in the place of what is computed and corrects the rest of
it, as in a run (guesses.py).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from earl_jax.selector.choose import Option
from earl_jax.selector.footprint import Footprint, Workload
from earl_jax.selector.guesses import Candidate, busy_slots, busy_tokens_per_s, fill_in
from earl_jax.selector.ladder import (
    RolloutRung,
    TrainRung,
    failure_of,
    rollout_rungs,
    rollout_size,
    train_size,
    train_ways,
)
from earl_jax.selector.prospects import (
    Prospect,
    Rung,
    Scene,
    full_tokens_per_s,
    on_rollout_rung,
    on_train_rung,
    page_bytes,
    rollout_prospect,
    round_footprint,
    train_prospect,
    update_footprint,
)
from earl_jax.selector.roofline import calibration
from earl_jax.selector.throughput import Measurement, ThroughputTable
from earl_jax.sharding.layout import MeshShape


class Contenders(NamedTuple):
    """All meshes of the first way, then of the next; `number` counts those left out too.

    Left out may be what could never be chosen: what does not fit where the mesh takes fewer bytes
    in another way.
    """

    kept: list[Prospect]
    number: int


class _Entrant(NamedTuple):
    """A candidate whose speed is not computed yet; `scene` is on its rung.

    `known` is what was measured of it, with `more` bytes less than it takes.
    """

    scene: Scene
    mesh: MeshShape
    places: int
    rung: Rung
    footprint: Footprint
    known: Measurement | None
    more: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of a device: a compiler's where they were measured."""
        if self.known is None:
            return self.footprint.total
        return max(0, self.known.program_bytes + self.more)

    @property
    def given(self) -> int:
        """Bytes of what the program is given."""
        return self.footprint.weights + self.footprint.optimizer + self.footprint.cache


def train_contenders(scene: Scene, ways: Sequence[TrainRung], places: int) -> Contenders:
    """Updates in these ways on all meshes; the times of what is left out are not computed."""
    found = []
    for way in ways:
        on_rung = on_train_rung(scene, way)
        for mesh in on_rung.train_meshes_for(places):
            footprint = update_footprint(on_rung, mesh, places)
            known = _known(scene, "train", mesh, places, way)
            found.append(_Entrant(on_rung, mesh, places, way, footprint, known))
    kept = _worth_a_look(scene, found)
    computed = [train_prospect(e.scene, e.mesh, places, e.footprint) for e in kept]
    return Contenders(_filled(scene, kept, computed), len(found))


def rollout_contenders(
    scene: Scene, ways: Sequence[RolloutRung], places: int, beside: tuple[int, int] = (0, 0)
) -> Contenders:
    """Rollouts in these ways on all meshes, each by itself.

    Left out is what does not fit beside a trainer that leaves so many bytes on a device: the first
    number with its moments, the second without.
    """
    found = []
    for way in ways:
        on_rung = on_rollout_rung(scene, way)
        dense = way.num_slots // scene.hardware.num_devices * -(-places // on_rung.work.page_size)
        for mesh in on_rung.rollout_meshes_for(places):
            footprint = round_footprint(on_rung, mesh, places, way)
            known = _known(scene, "rollout", mesh, places, way)
            more = (way.pages - dense) * page_bytes(on_rung, mesh)
            found.append(_Entrant(on_rung, mesh, places, way, footprint, known, more))
    kept, computed = [], []
    first = scene.ways_to_play(places)[0]
    wanted = _lane_tokens(on_rollout_rung(scene, first), first)
    for entrant in _worth_a_look(scene, found, *beside):
        on_rung, rung, known = entrant.scene, entrant.rung, entrant.known
        assert isinstance(rung, RolloutRung)
        tokens, slots = _lane_tokens(on_rung, rung), rung.num_slots
        busy = busy_slots(tokens, wanted, scene.work.num_slots, slots)
        if known and known.tokens_per_s:
            speed = busy_tokens_per_s(known.tokens_per_s, known.alone_tokens_per_s, slots, busy)
            known = dataclasses.replace(known, tokens_per_s=speed)
        kept.append(entrant._replace(known=known))
        computed.append(rollout_prospect(on_rung, entrant.mesh, places, rung, busy))
    return Contenders(_filled(scene, kept, computed), len(found))


def _lane_tokens(on_rung: Scene, rung: RolloutRung) -> int:
    return rung.pages * on_rung.work.page_size


def _known(
    scene: Scene, stage: str, mesh: MeshShape, places: int, rung: Rung
) -> Measurement | None:
    if not scene.known:
        return None
    words = _entry_words(scene.work, rung)
    return scene.known.get(ThroughputTable.entry(stage, mesh, places, words))


def _worth_a_look(
    scene: Scene, found: Sequence[_Entrant], beside: int = 0, beside_kept: int = 0
) -> list[_Entrant]:
    """Those that may fit beside so many bytes, and of each mesh what takes the fewest.

    Where something was measured, computed bytes may shrink: then those that are given count.
    """

    def need(entrant: _Entrant) -> int:
        shrinks = scene.known and entrant.known is None
        own = entrant.given if shrinks else entrant.num_bytes
        away = isinstance(entrant.rung, RolloutRung) and entrant.rung.offload
        return own + (beside_kept if away else beside)

    needs, least = [need(entrant) for entrant in found], dict[MeshShape, int]()
    for entrant, own in zip(found, needs, strict=True):
        least[entrant.mesh] = min(own, least.get(entrant.mesh, own))
    return [
        entrant
        for entrant, own in zip(found, needs, strict=True)
        if own <= max(scene.budget_bytes, least[entrant.mesh])
    ]


def _filled(
    scene: Scene, found: Sequence[_Entrant], computed: Sequence[Prospect]
) -> list[Prospect]:
    """With measured bytes and speeds where there are any, the others corrected by these."""
    candidates = [
        Candidate(
            option=_option(scene, entrant, prospect),
            computed_bytes=prospect.footprint.total,
            least_bytes=entrant.given,
            computed_tokens_per_s=prospect.tokens_per_s,
        )
        for entrant, prospect in zip(found, computed, strict=True)
    ]
    filled = []
    for prospect, option in zip(computed, fill_in(candidates), strict=True):
        speed = option.tokens_per_s
        assert speed is not None
        filled.append(
            dataclasses.replace(
                prospect,
                footprint=prospect.footprint.with_total(option.bytes_per_device),
                tokens_per_s=speed,
                seconds=prospect.seconds * (prospect.tokens_per_s / speed),
                move_s=option.move_s,
                exact=not option.is_computed,
                is_measured=not option.is_guess,
                impossible=option.impossible,
            )
        )
    return filled


def _option(scene: Scene, entrant: _Entrant, prospect: Prospect) -> Option:
    """What is known of a candidate."""
    rung, places, known = entrant.rung, entrant.places, entrant.known
    if isinstance(rung, RolloutRung):
        size = rollout_size(places, rung, entrant.scene.work.page_size)
    else:
        size = train_size(places, scene.work.num_rows, rung)
    return Option(
        mesh=entrant.mesh,
        bytes_per_device=entrant.num_bytes,
        tokens_per_s=known.tokens_per_s if known else None,
        move_s=known.switch_s if known else prospect.move_s,
        impossible=failure_of(scene.failures, prospect.stage, entrant.mesh, size),
        is_computed=known is None,
    )


# Tables.


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
        computed = _computed_speed(scene, rung, MeshShape.parse(mesh), int(places))
        if computed:
            pairs[stage].append((measurement.tokens_per_s, computed))
    factors = {stage: calibration(found) for stage, found in pairs.items() if found}
    return dataclasses.replace(scene, factors=factors)


def _computed_speed(scene: Scene, rung: Rung, mesh: MeshShape, places: int) -> float | None:
    """Tokens per second; None for a mesh that is no candidate."""
    if isinstance(rung, TrainRung):
        on_rung = on_train_rung(scene, rung)
        if mesh not in on_rung.train_meshes + on_rung.context_meshes:
            return None
        return train_prospect(on_rung, mesh, places).tokens_per_s
    on_rung = on_rollout_rung(scene, rung)
    if mesh not in on_rung.rollout_meshes + on_rung.rollout_context_meshes:
        return None
    return full_tokens_per_s(on_rung, mesh, places)


def _rung_named(scene: Scene, stage: str, words: str) -> Rung | None:
    """The way of a table's entry; None for what this scene cannot have.

    Of rollouts the slots and the tokens of a page: no entry says more.
    """
    work, ways = scene.work, list[Rung]()
    if stage == "train":
        ways += train_ways(work.num_rows, work.micro_batches, work.remat)
    else:
        rungs = rollout_rungs(work.num_slots, scene.hardware.num_devices, [0], 0)
        sizes = dict.fromkeys((work.page_size, *scene.page_sizes))
        ways += [rung._replace(page_size=size) for rung in rungs for size in sizes]
    return next((way for way in ways if _entry_words(work, way) == words), None)


def _entry_words(work: Workload, rung: Rung) -> str:
    """The way in a table's entry, "micro_batches=2,remat=True" or "slots=32,page=64"; or ""."""
    if isinstance(rung, TrainRung):
        first = rung == (work.micro_batches, work.remat)
        return "" if first else f"micro_batches={rung.micro_batches},remat={rung.remat}"
    slots = f"slots={rung.num_slots}" if rung.num_slots != work.num_slots else ""
    page = f"page={rung.page_size}" if rung.page_size != work.page_size else ""
    return ",".join(filter(None, (slots, page)))
