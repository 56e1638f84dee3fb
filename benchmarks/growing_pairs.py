# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a pair of meshes takes that stays, without a selector: for benchmarks/growing.py."""

import dataclasses
from collections.abc import Sequence

from benchmarks.growing_runs import Arm, fixed_arm
from earl_jax.calibrate import Calibration
from earl_jax.config import Config
from earl_jax.measurements import open_table
from earl_jax.selector.ladder import TrainRung
from earl_jax.sharding.layout import MeshShape
from earl_jax.survival import Ladder
from earl_jax.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticPair:
    """A pair of meshes and a way to use them that stay: what they take per device, by room.

    Bytes are those of the selector: XLA's memory analysis of a stage's program with its KV cache,
    full in every slot, and what the trainer leaves beside a rollout.
    """

    rollout: str
    train: str
    slots: int
    rung: TrainRung
    need: dict[int, int]

    @property
    def name(self) -> str:
        """Both meshes."""
        return f"{self.rollout} + {self.train}"

    @property
    def way(self) -> str:
        """How they are used."""
        again = ", remat" if self.rung.remat else ""
        return f"{self.slots} slots, {self.rung.micro_batches} micro-batches{again}"

    def breaks(self, rooms: Sequence[int], budget: int) -> int | None:
        """The first step, of steps that need these rooms, that takes more; None where none does."""
        over = (step for step, room in enumerate(rooms, 1) if self.need[room] > budget)
        return next(over, None)


def static_pairs(config: Config) -> list[StaticPair]:
    """Every pair that the config may choose from, in three ways.

    As the config says; and with half of the slots in as many micro-batches as the training mesh
    can do, with and without activations computed again.
    """
    # Without a budget: by a compiler also where it is far above it. "listed" times nothing.
    free = dataclasses.replace(config.selector, budget_bytes_per_device=0, order="listed")
    world = World(dataclasses.replace(config, selector=free))
    table, _ = open_table(world)
    calibration, ladder = Calibration(world, table, print), Ladder(world)
    slots, first = config.rollout.num_slots, world.first_train_rung
    need: dict[tuple[str, str, int, TrainRung], dict[int, int]] = {}
    for room in config.rollout.context_buckets:
        rollouts = {
            n: calibration.rollout_options(room, 0, num_slots=n) for n in (slots, slots // 2)
        }
        for mesh in world.train_candidates:
            smaller = most_micro_batches(world, mesh)
            smallest = smaller._replace(remat=True)
            for number, rung in ((slots, first), (slots // 2, smaller), (slots // 2, smallest)):
                options = calibration.train_options(room, rung)
                trainer = next(option for option in options if option.mesh == mesh)
                for rollout in rollouts[number]:
                    beside = rollout.bytes_per_device + ladder.trainer_bytes(mesh)
                    key = (str(rollout.mesh), str(mesh), number, rung)
                    need.setdefault(key, {})[room] = max(beside, trainer.bytes_per_device)
    return [
        StaticPair(rollout=rollout, train=train, slots=number, rung=rung, need=rooms)
        for (rollout, train, number, rung), rooms in need.items()
    ]


def most_micro_batches(world: World, mesh: MeshShape) -> TrainRung:
    """The fewest rows at a time that the training mesh can do, by doubling what the config says."""
    number = world.config.train.micro_batches
    while world.train_obstacle(mesh, 2 * number) is None:
        number *= 2
    return TrainRung(number, False)


def fitting(pairs: Sequence[StaticPair], budget: int) -> list[Arm]:
    """Of each pair of meshes the first way that never takes more than the budget, as an arm."""
    fit: dict[str, StaticPair] = {}
    for pair in pairs:
        if max(pair.need.values()) <= budget:
            fit.setdefault(pair.name, pair)
    return [fixed_arm(p.rollout, p.train, p.slots, *p.rung) for p in fit.values()]
