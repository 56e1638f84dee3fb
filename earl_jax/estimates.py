# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a candidate would take of a device, before anything is compiled for it.

On most meshes of many devices a model takes far too much of each, and compiling for one of them can
take minutes. Which surely do is known by arithmetic; of the others the compiler is asked.
"""

import dataclasses
import functools
from typing import NamedTuple

from earl_jax.measuring import pool_bytes
from earl_jax.scene import make_scene, model_sizes, workload
from earl_jax.selector.enough import smallest_hardware
from earl_jax.selector.footprint import ModelSizes, rollout_footprint, train_footprint
from earl_jax.selector.hardware import hardware_of, parse_topology
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.topology import Topology, chip_of
from earl_jax.world import World

# Computed bytes have been up to a fifth above a compiler's (benchmarks/plan.md). What is so many
# times the budget is not compiled to find out.
FAR = 1.5


class Estimate(NamedTuple):
    """Bytes per device of a program: computed; and of the arrays that it is given, exactly."""

    total: int
    given: int

    def surely_exceeds(self, most: float) -> bool:
        """Whether no compiler could make it fit into so many bytes."""
        return self.given > most or self.total > FAR * most


@functools.cache
def train_estimate(world: World, mesh: MeshShape, places: int, rung: TrainRung) -> Estimate:
    """An update on rows of `places` tokens: it is given parameters and moments."""
    work = dataclasses.replace(workload(world.config), **rung._asdict())
    found = train_footprint(_sizes(world), work, mesh, places, _platform(world))
    return Estimate(found.total, found.weights + found.optimizer)


@functools.cache
def rollout_estimate(world: World, mesh: MeshShape, places: int, rung: RolloutRung) -> Estimate:
    """A round with `places` of room, beside nothing: it is given weights and pages.

    On a CPU no more than these are counted: what else there is, is computed as on chips, and has
    been 1.4 times too much there.
    """
    rollout, own = world.own_rollout, world.processes.own_mesh(mesh)
    work = dataclasses.replace(
        workload(world.config),
        num_slots=rung.num_slots,
        num_rows=rollout.episodes_per_step,
        step_rows=rollout.step_rows,
    )
    bare = rollout_footprint(_sizes(world), work, own, places, 0, 0, _platform(world))
    given = bare.weights + pool_bytes(world, mesh, places, rung)
    beside = 0 if _platform(world) == "cpu" else bare.activations
    return Estimate(given + beside, given)


def enough_words(world: World, places: int) -> str:
    """The smallest hardware that would do with this room, as the planner computes it.

    "" where there is no data sheet of the devices, or stages have devices of their own.
    """
    processes, device = world.processes, world.processes.devices[0]
    chip, number = chip_of(device.device_kind), len(processes.devices)
    if processes.disjoint or chip is None and device.platform != "cpu":
        return ""
    if chip is None:
        hardware = parse_topology(f"cpu:{number}")
    else:
        one = hardware_of(Topology(chip=chip, grid=(1,) * chip.axes))
        hardware = one.with_devices(number)
    vocab_size = None if world.checkpoint else world.vocab_size
    budget = world.budget_bytes or hardware.usable_bytes
    found = smallest_hardware(make_scene(world.config, hardware, vocab_size, budget), places)
    words = ", ".join(f"{number} {chip}" for chip, number in found)
    return (
        f"By computed bytes, with room for {places} tokens an episode, this would do, of numbers "
        f"that are powers of two: {words}"
    )


@functools.cache
def _sizes(world: World) -> ModelSizes:
    config = world.config
    return model_sizes(
        world.model,
        world.vocab_size,
        engine_dtype=config.rollout.computes_as(world.model.compute_dtype),
        weight_dtype=config.rollout.weight_dtype,
        train=config.train,
    )


def _platform(world: World) -> str:
    return world.processes.devices[0].platform
