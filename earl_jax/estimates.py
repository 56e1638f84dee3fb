# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a candidate would take of a device and how fast it would be, before it is compiled.

On most meshes of many devices a model takes far too much of each, and compiling for one of them can
take minutes. Which surely do is known by arithmetic; of the others the compiler is asked.
"""

import dataclasses
import functools
from typing import NamedTuple

from earl_jax.measuring import pool_bytes
from earl_jax.scene import make_scene, model_sizes, workload
from earl_jax.selector.enough import smallest_hardware
from earl_jax.selector.footprint import (
    ModelSizes,
    Workload,
    rollout_footprint,
    train_footprint,
)
from earl_jax.selector.hardware import Hardware, hardware_of, parse_topology
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.selector.roofline import alone_tokens_per_s, rollout_tokens_per_s, train_s
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.topology import CHIPS, Topology, chip_of
from earl_jax.world import World

# Computed bytes have been up to a fifth above a compiler's (benchmarks/plan.md). What is so many
# times the budget is not compiled to find out.
FAR = 1.5


class Estimate(NamedTuple):
    """Bytes per device of a program: computed; and of the arrays that it is given, exactly.

    `uncounted` are computed bytes that are left out of `total`, because they are often too many.
    """

    total: int
    given: int
    uncounted: int = 0

    @property
    def least(self) -> int:
        """What it takes at least, whatever the compiler makes of it."""
        return max(self.given, int(self.total / FAR))

    def surely_exceeds(self, most: float) -> bool:
        """Whether no compiler could make it fit into so many bytes."""
        return self.given > most or self.total > FAR * most

    def surely_fits(self, most: float) -> bool:
        """Whether it fits into so many bytes, whatever the compiler makes of it."""
        return FAR * (self.total + self.uncounted) <= most


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
    own, work = world.processes.own_mesh(mesh), _rollout_work(world, rung)
    bare = rollout_footprint(_sizes(world), work, own, places, 0, 0, _platform(world))
    given = bare.weights + pool_bytes(world, mesh, places, rung)
    if _platform(world) == "cpu":
        return Estimate(given, given, uncounted=bare.activations)
    return Estimate(given + bare.activations, given)


@functools.cache
def train_speed(world: World, mesh: MeshShape, places: int, rung: TrainRung) -> float:
    """Tokens per second of updates on rows of `places` tokens, by the devices' data sheet."""
    work = dataclasses.replace(workload(world.config), **rung._asdict())
    hardware = hardware_like(world).with_devices(mesh.num_devices)
    seconds = train_s(hardware, _sizes(world), work, mesh, places).total
    return work.num_rows * places / seconds


@functools.cache
def rollout_speed(world: World, mesh: MeshShape, places: int, rung: RolloutRung) -> float:
    """Tokens per second of all slots, with pages for all, at the end of their room; of all players.

    By the devices' data sheet.
    """
    own, work = world.processes.own_mesh(mesh), _rollout_work(world, rung)
    hardware, rows = hardware_like(world).with_devices(own.num_devices), work.num_slots // own.data
    speed = rollout_tokens_per_s(hardware, _sizes(world), work, own, places, rows)
    return len(world.processes.players) * speed


@functools.cache
def rollout_speed_alone(world: World, mesh: MeshShape, places: int, rung: RolloutRung) -> float:
    """As `rollout_speed`, with one slot at work."""
    own, work = world.processes.own_mesh(mesh), _rollout_work(world, rung)
    hardware = hardware_like(world).with_devices(own.num_devices)
    return alone_tokens_per_s(hardware, _sizes(world), work, own, places)


def _rollout_work(world: World, rung: RolloutRung) -> Workload:
    """A rollout of this process on this rung."""
    rollout = world.own_rollout
    return dataclasses.replace(
        workload(world.config),
        num_slots=rung.num_slots,
        num_rows=rollout.episodes_per_step,
        step_rows=rollout.step_rows,
        page_size=rung.page_size or rollout.tokens_a_page,
    )


def has_data_sheet(world: World) -> bool:
    """Whether the devices are chips whose rates are known."""
    return chip_of(world.processes.devices[0].device_kind) is not None


@functools.cache
def hardware_like(world: World) -> Hardware:
    """The devices' data sheet; of chips without one an H100's, of CPUs an order of magnitude.

    Where it is not theirs only ratios count (`selector.guesses`).
    """
    device = world.processes.devices[0]
    chip, number = chip_of(device.device_kind), len(world.processes.devices)
    if chip is None and device.platform == "cpu":
        return parse_topology(f"cpu:{number}")
    known = chip or CHIPS["h100"]
    return hardware_of(Topology(chip=known, grid=(1,) * known.axes)).with_devices(number)


def enough_words(world: World, places: int) -> str:
    """The smallest hardware that would do with this room, as the planner computes it.

    "" where there is no data sheet of the devices, or stages have devices of their own.
    """
    processes = world.processes
    if processes.disjoint or not has_data_sheet(world) and _platform(world) != "cpu":
        return ""
    hardware = hardware_like(world)
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
