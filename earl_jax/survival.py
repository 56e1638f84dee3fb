# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a run needs to outlive a lack of memory: its ladder, and a spare of what a program takes.

selector/ladder.py says what the rungs are; here they are those of a world.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from earl_jax.calibrate import Calibration
from earl_jax.estimates import hardware_like, rollout_estimate, train_estimate
from earl_jax.rest import HOST_MEMORY, has_host_memory, to_memory
from earl_jax.rollout.pages import pages_for
from earl_jax.selector.choose import BudgetTooSmall, Option, size_words
from earl_jax.selector.ladder import (
    RolloutRung,
    TrainRung,
    rollout_rungs,
    train_rungs,
    train_ways,
    train_words,
    with_page_sizes,
)
from earl_jax.selector.memory import resident_bytes, unless_out_of_memory
from earl_jax.selector.pairs import Kept
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.reshard import reshard
from earl_jax.telemetry.load import Load
from earl_jax.train.step import TrainState
from earl_jax.world import World

Rung = TypeVar("Rung")
# An array that goes by itself, because memory is short, goes in so many pieces.
PIECES = 8


class StateLost(RuntimeError):
    """A program ran out of memory and took the trainer's state with it; no spare was there."""


class ShortAlone(RuntimeError):
    """One of several processes ran out of memory where the others cannot hear of it.

    It is remembered. Whoever catches it should end the process by `ending.end`, which tells them.
    """

    def __init__(self, who: str, failure: str) -> None:
        """`who` is the process, `failure` what ran out of memory there, in words."""
        super().__init__(
            f"{who}: {failure}. The others may not have, and none goes another way without them: "
            "the run ends. This is remembered: start it again, and it goes on from its newest "
            "checkpoint with less"
        )


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The rungs of a world's stages, from the top down."""

    world: World

    def train_rungs(self, length: int) -> list[TrainRung]:
        """Those on which some mesh can train on rows of so many tokens."""
        world = self.world
        return [
            rung
            for rung in train_rungs(world.config.rollout.episodes_per_step, *world.first_train_rung)
            if any(
                world.train_obstacle(mesh, rung.micro_batches) is None
                for mesh in world.train_candidates_for(length)
            )
        ]

    def train_ways(self, length: int) -> list[TrainRung]:
        """All ways to train on such rows, of which the fastest that fits is to be chosen."""
        world = self.world
        return train_ways(world.config.rollout.episodes_per_step, *world.first_train_rung)

    def rollout_ways(self, places: int, wanted: int) -> list[RolloutRung]:
        """All ways to play, the first with so many pages of the config's size, as for training."""
        rungs = self.rollout_rungs(places, [wanted])
        return with_page_sizes(rungs, self.world.page(), self.world.page_sizes[1:], places)

    def rollout_rungs(self, places: int, wanted: Sequence[int]) -> list[RolloutRung]:
        """With the pages wanted first, and always those of one whole episode a lane."""
        slots, lanes = self.world.own_rollout.num_slots, len(self.world.processes.own_devices)
        return rollout_rungs(slots, lanes, wanted, self.least_pages(places), self._can_offload)

    def rungs_as(self, now: RolloutRung, places: int, wanted: int) -> list[RolloutRung]:
        """Those with the moments where they are now, and pages as large; `wanted` of the config's.

        Another number of slots may follow, but no other pages: what they hold stays there.
        """
        slots, lanes = self.world.own_rollout.num_slots, len(self.world.processes.own_devices)
        size = self.world.page(now.page_size)
        pages = -(-wanted * self.world.page() // size)
        rungs = rollout_rungs(slots, lanes, [pages], self.least_pages(places, size))
        return [rung._replace(offload=now.offload, page_size=now.page_size) for rung in rungs]

    @functools.cached_property
    def _can_offload(self) -> bool:
        """Of several processes each does so with what its own devices hold."""
        processes, setting = self.world.processes, self.world.config.selector.offload
        if setting == "off" or processes.disjoint:
            return False
        device = next(d for d in processes.train_devices if d.process_index == processes.index)
        return has_host_memory(device) and (setting == "on" or device.platform != "cpu")

    def wanted_pages(self, places: int, before: int, load: Load | None = None) -> int:
        """As many pages a lane, of the config's size, as the next rollout is expected to need.

        No fewer than the one before had in the end, `before`, or than the first room takes; more
        where so many tokens are expected in flight.
        """
        world = self.world
        first = world.device_pages(world.config.rollout.context_buckets[0])
        most = world.device_pages(places)
        return min(max(before, first, self._pages_in_flight(load)), most)

    def _pages_in_flight(self, load: Load | None) -> int:
        """Pages of a lane that the expected tokens in flight take: half of a slot's last is empty.

        In lanes that have a tenth more than their share.
        """
        if load is None:
            return 0
        world, lanes = self.world, len(self.world.processes.rollout_devices)
        slots = world.config.rollout.num_slots / lanes
        return math.ceil(1.1 * load.tokens_in_flight_max / lanes / world.page() + slots / 2)

    def least_pages(self, places: int, page_size: int = 0) -> int:
        """A lane has pages for one whole episode."""
        return pages_for(places, self.world.page(page_size))

    def kept(self, mesh: MeshShape) -> Kept:
        """What such a trainer leaves on each device while its moments wait in host memory."""
        left = self.trainer_bytes(mesh, offload=True)
        moments = self.trainer_bytes(mesh) - left
        return Kept(left, 2 * moments / hardware_like(self.world).host_bytes_per_s)

    @functools.cache  # noqa: B019 - a World lives as long as the run
    def trainer_bytes(self, mesh: MeshShape, offload: bool = False) -> int:
        """What a trainer on this mesh leaves on each device while episodes are played."""
        world = self.world
        if world.processes.disjoint:
            return 0
        trees = world.train_state_shapes(), world.train_state_shardings(mesh)
        if offload:
            trees = [dataclasses.replace(tree, optimizer=None) for tree in trees]
        return resident_bytes(*trees)

    def words(self, rollout: RolloutRung, train: TrainRung) -> str:
        """What a run does otherwise than its config says; "" for nothing."""
        parts = ["the moments in host memory during rollouts"] if rollout.offload else []
        if rollout.num_slots != (most := self.world.own_rollout.num_slots):
            parts.append(f"rollout with {rollout.num_slots} of {most} slots")
        if (size := self.world.page(rollout.page_size)) != self.world.page():
            parts.append(f"rollout with pages of {size} tokens")
        if way := train_words(train, self.world.first_train_rung):
            parts.append(f"training {way}")
        return "; ".join(parts)


def check_budget(ladder: Ladder, calibration: Calibration, budget: int | None) -> None:
    """Sees that every configured room per episode has a mesh for both stages, on some rung.

    Where rooms are measured later, only the bytes of the smallest candidates are asked for, and
    those of a room that has a mesh by arithmetic are not.

    Raises:
        BudgetTooSmall: one has none; names the smallest budget that would do for all.
    """
    if budget is None:
        return
    world, later = ladder.world, calibration.measures_later
    asks = calibration.by_order or calibration.measures_all and not later
    least_state = {
        offload: min(ladder.trainer_bytes(mesh, offload) for mesh in world.train_candidates)
        for offload in (False, True)
    }
    # The longest first, which takes most: what does not fit there is not asked for elsewhere.
    for places in reversed(world.config.rollout.context_buckets):

        def on_train_rung(rung: TrainRung, meshes: Container[MeshShape], places: int = places):
            return calibration.train_options(places, rung, compiled=meshes, asks=asks)

        def on_rollout_rung(rung: RolloutRung, meshes: Container[MeshShape], places: int = places):
            resident, pages = least_state[rung.offload], rung.pages
            return calibration.rollout_options(
                places,
                resident,
                pages,
                rung.num_slots,
                offload=rung.offload,
                compiled=meshes,
                asks=asks,
            )

        down = ladder.rollout_rungs(places, [ladder.least_pages(places)])
        if later and _surely_fits(ladder, calibration, places, budget):
            continue
        needs = [
            (_least_need(ladder.train_rungs(places), on_train_rung, budget), "training"),
            (_least_need(down, on_rollout_rung, budget), "rollout"),
        ]
        need, stage = max(needs)
        if need > budget:
            raise BudgetTooSmall(
                f"config.selector.budget_bytes_per_device is {budget}, and no candidate mesh for "
                f"{stage} with {places} tokens of room per episode fits it; the smallest budget "
                f"that would do is {need}, {size_words(need - budget)} more. Raise the budget, use "
                "more devices, or lower config.rollout.num_slots or the model's size"
            )


def _surely_fits(ladder: Ladder, calibration: Calibration, places: int, budget: int) -> bool:
    """Whether by arithmetic some mesh trains, and plays, in this room on the last of its rungs."""
    if calibration.table.failures:
        return False
    world, train = ladder.world, ladder.train_rungs(places)[-1]
    rollout = ladder.rollout_rungs(places, [ladder.least_pages(places)])[-1]
    trainers, players = world.train_candidates_for(places), world.rollout_candidates_for(places)
    resident = min(ladder.trainer_bytes(mesh, rollout.offload) for mesh in trainers)
    return any(
        train_estimate(world, mesh, places, train).surely_fits(budget)
        for mesh in trainers
        if world.train_obstacle(mesh, train.micro_batches) is None
    ) and any(
        rollout_estimate(world, mesh, places, rollout).surely_fits(budget - resident)
        for mesh in players
    )


def _least_need(
    rungs: Sequence[Rung],
    options_on: Callable[[Rung, Container[MeshShape]], list[Option]],
    budget: int,
) -> int:
    """Bytes of the smallest candidate on the first rung if it fits, or else on that and the last.

    By a compiler: `options_on(rung, meshes)` are the options of a rung, those on `meshes` with a
    compiler's bytes whatever they take. Only the smallest are asked for.
    """
    first, last = rungs[0], rungs[-1]
    least = math.inf
    for rung in dict.fromkeys((first, last)):
        if rung != last and all(option.is_computed for option in options_on(rung, ())):
            # Far too large, and the last takes less.
            continue
        least = min(least, _smallest(functools.partial(options_on, rung), least))
        if least <= budget:
            break
    return int(least) if math.isfinite(least) else 0


def _smallest(options_on: Callable[[Container[MeshShape]], list[Option]], most: float) -> float:
    """Bytes of the smallest of some options, by a compiler; infinite where all take `most`."""
    compiled: set[MeshShape] = set()
    while True:
        options = [option for option in options_on(compiled) if not option.impossible]
        smallest = min(options, key=lambda option: option.bytes_per_device, default=None)
        if smallest is None or smallest.bytes_per_device >= most:
            return math.inf
        if not smallest.is_computed:
            return smallest.bytes_per_device
        compiled.add(smallest.mesh)


class Spares:
    """A copy of the trainer's state in host memory, while a program runs that never ran before.

    A program that fails has its donated arguments with it (XLA on CPUs; seen with jaxlib 0.10.2). A
    program that ran once takes no more the next time, so the copy is made once a program.
    """

    def __init__(self, kept: bool = True) -> None:
        """`kept` False: no copy is made, because nothing would be done again."""
        self._kept = kept
        self._proven: set[Hashable] = set()
        self._trying: Hashable = None

    def keep(self, program: Hashable, state: TrainState) -> TrainState | None:
        """A spare of the state for this program, None where it ran before."""
        self._trying = program
        if not self._kept or program in self._proven:
            return None
        return jax.block_until_ready(_to_host(state))

    def drop(self) -> None:
        """The program ran."""
        self._proven.add(self._trying)

    def give_back(self, state: TrainState, spare: TrainState | None) -> TrainState:
        """The state behind a failure: itself where it is still there, else from the spare.

        Raises StateLost where neither is.
        """
        if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            return state
        if spare is None:
            raise StateLost(
                "training ran out of memory in a program that had run before, and the weights were "
                "in it; the failure is remembered: a run goes on from the newest checkpoint with "
                "less"
            )
        return jax.tree.map(lambda leaf, old: jax.device_put(leaf, old.sharding), spare, state)


def carry(state: Any, shardings: Any, chunk_bytes: int | None) -> tuple[Any, bool]:
    """The arrays where they were told to go, and whether all of them are there. Gives `state` up.

    At once, or where memory is short for that, one after the other in pieces of at most
    `chunk_bytes`: each makes room for the next. Where it is short even so, what has arrived stays,
    and the rest is where it was: they can be carried on from there, to anywhere.
    """
    if chunk_bytes is None:
        moved = unless_out_of_memory(lambda: reshard(state, shardings))
        if moved is not None:
            _free(state, moved)
            return moved, True
    leaves, structure = jax.tree.flatten(state)
    targets = jax.tree.leaves(shardings)
    for k, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        chunk = chunk_bytes or max(1, leaf.nbytes // PIECES)
        moved = unless_out_of_memory(
            lambda leaf=leaf, target=target, chunk=chunk: reshard(leaf, target, chunk_bytes=chunk)
        )
        if moved is None:
            return jax.tree.unflatten(structure, leaves), False
        _free(leaf, moved)
        leaves[k] = moved
    return jax.tree.unflatten(structure, leaves), True


def is_placed(state: Any, shardings: Any) -> bool:
    """Whether every array is where it should be, and says so by the same mesh.

    The same bytes may lie under the labels of another mesh (fsdp=8, and fsdp=4 by context=2): a
    program would be traced and compiled for these, and once more for those of its own results.
    """
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
    return all(
        leaf.sharding.mesh == where.mesh and leaf.sharding.is_equivalent_to(where, leaf.ndim)
        for leaf, where in pairs
    )


def _free(state: Any, moved: Any) -> None:
    """Frees what the moved arrays do not share."""
    kept = {
        (shard.device, shard.data.unsafe_buffer_pointer())
        for leaf in jax.tree.leaves(moved)
        for shard in leaf.addressable_shards
    }
    for leaf in jax.tree.leaves(state):
        buffers = {(s.device, s.data.unsafe_buffer_pointer()) for s in leaf.addressable_shards}
        if not buffers & kept:
            leaf.delete()


def _to_host(state: TrainState) -> TrainState:
    """A copy in host memory, shard by shard; on a CPU all memory is the host's."""
    device = next(iter(jax.tree.leaves(state)[0].sharding.device_set))
    if device.platform == "cpu" or not has_host_memory(device):
        return _copy(state)
    return to_memory(state, HOST_MEMORY)


@jax.jit
def _copy(state: TrainState) -> TrainState:
    return jax.tree.map(jnp.copy, state)
