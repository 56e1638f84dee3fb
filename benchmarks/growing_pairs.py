# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a pair of meshes takes that stays, without a selector: for benchmarks/growing.py."""

import dataclasses
import itertools
from collections.abc import Sequence

from benchmarks.growing_runs import SMALL, Arm
from earl_jax.calibrate import Calibration
from earl_jax.config import Config
from earl_jax.measurements import open_table
from earl_jax.survival import Ladder
from earl_jax.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticPair:
    """A pair of meshes and a way to train that stay: what they take per device, by room.

    Bytes are those of the selector: XLA's memory analysis of a stage's program with its KV cache,
    and what the trainer leaves beside a rollout.
    """

    rollout: str
    train: str
    way: str
    need: dict[int, int]

    @property
    def name(self) -> str:
        """Both meshes."""
        return f"{self.rollout} + {self.train}"

    def breaks(self, rooms: Sequence[int], budget: int) -> int | None:
        """The first step, of steps that need these rooms, that takes more; None where none does."""
        over = (step for step, room in enumerate(rooms, 1) if self.need[room] > budget)
        return next(over, None)


def static_pairs(config: Config) -> list[StaticPair]:
    """Every pair that the config may choose from, with a KV cache for every slot to fill."""
    # Without a budget: by a compiler also where it is far above it.
    free = dataclasses.replace(config.selector, budget_bytes_per_device=0)
    world = World(dataclasses.replace(config, selector=free))
    table, _ = open_table(world)
    calibration, ladder = Calibration(world, table, print), Ladder(world)
    train = config.train
    way = f"{train.micro_batches} micro-batches{', remat' if train.remat else ''}"
    need: dict[tuple[str, str], dict[int, int]] = {}
    for room in config.rollout.context_buckets:
        options = calibration.rollout_options(room, 0), calibration.train_options(room)
        for rollout, trainer in itertools.product(*options):
            beside = rollout.bytes_per_device + ladder.trainer_bytes(trainer.mesh)
            pair = (str(rollout.mesh), str(trainer.mesh))
            need.setdefault(pair, {})[room] = max(beside, trainer.bytes_per_device)
    return [
        StaticPair(rollout=rollout, train=trainer, way=way, need=rooms)
        for (rollout, trainer), rooms in need.items()
    ]


def all_pairs(config: Config) -> list[StaticPair]:
    """With the config's way to train, then with the smaller one."""
    return [*static_pairs(config), *static_pairs(Arm(name="small", overrides=SMALL).config(0))]


def fitting(pairs: Sequence[StaticPair], budget: int) -> list[tuple[str, str]]:
    """The meshes of those that never take more than the budget, each pair once."""
    fit = (pair for pair in pairs if max(pair.need.values()) <= budget)
    return list(dict.fromkeys((pair.rollout, pair.train) for pair in fit))
