# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The smallest hardware that would do for what fits no mesh of that which is planned for. Pure."""

import dataclasses

from earl_jax.selector.candidates import (
    context_candidates,
    for_rows,
    rollout_candidates,
    rollout_context_candidates,
    train_candidates,
)
from earl_jax.selector.hardware import Hardware, hardware_of
from earl_jax.selector.ladder import TrainRung
from earl_jax.selector.prospects import (
    Scene,
    on_rollout_rung,
    on_train_rung,
    round_footprint,
    update_footprint,
)
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.topology import CHIPS, Topology

# Beyond that no number of chips is tried.
MOST_DEVICES = 8192


def smallest_hardware(scene: Scene, places: int) -> list[tuple[str, int]]:
    """How many chips of each kind would hold both stages at this room; the scene's kind first.

    Powers of two up to MOST_DEVICES, with as many slots and episodes as the scene has, or one of
    each a device where that is more. Any mesh that cuts the model evenly counts, in whatever way it
    is used.
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
    """Whether some mesh of this hardware holds each stage, with the least that it can do with."""
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
        a_row_each = rows // (mesh.data * mesh.fsdp * mesh.expert)
        # A row at a time takes least, but for the sum of gradients that one micro-batch has not.
        numbers = {n for n in (a_row_each, work.micro_batches) if a_row_each % n == 0}
        scenes = [on_train_rung(scene, TrainRung(number, True)) for number in numbers]
        return min(update_footprint(scene, mesh, places).total for scene in scenes)

    resident = [scene.resident_of(mesh).least for mesh in trainers if update_bytes(mesh) <= budget]
    if not resident:
        return False
    ways = scene.ways_to_play(places)
    fewest = {way for way in ways if way.num_slots == ways[-1].num_slots}
    return any(
        round_footprint(on_rung, mesh, places, way).total + min(resident) <= budget
        for on_rung, way in [(on_rollout_rung(scene, way), way) for way in fewest]
        for mesh in players
        if on_rung.work.page_size % mesh.context == 0
    )


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
