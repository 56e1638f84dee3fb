# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What the processes of a run do as one: weights to all engines, and episodes from all of them.

Each process plays its part of the episodes on an engine of its own, over its own devices, and
schedules by itself. Before, one reshard brings the trainer's weights to all engines: over all
devices that play they are one array, of which an engine's devices hold copies. Behind, the rows of
all engines are one array by their names only, each where it was written; and each process tells the
others what its episodes came to, so that all go on from the same facts.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from earl_jax.dispatch.pack import fit
from earl_jax.dispatch.weights import Published, publish
from earl_jax.models.parameters import Params
from earl_jax.rollout.collect import Rollout
from earl_jax.rollout.stats import RolloutStats
from earl_jax.selector.candidates import divisors
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.selector.memory import is_out_of_memory, unless_out_of_memory
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.sharding.placing import absent_tree, same_shards
from earl_jax.sharding.reshard import reshard
from earl_jax.telemetry.metrics import sampling_kl
from earl_jax.train.offload import load_moments
from earl_jax.train.step import TrainState, state_shardings
from earl_jax.trajectory import Experience, Outcome
from earl_jax.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """What a rollout of all processes came to, the same in each of them.

    `outcomes` are in the order of the tasks, which is that of the rows on the devices; `stats` are
    those of all. `placement` is where the rollout ended (`Placement.as_dict`), in the process that
    needed the most room. `sampling_kl` is that of metrics.jsonl.
    """

    outcomes: list[Outcome]
    stats: RolloutStats
    placement: dict[str, Any]
    sampling_kl: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortage:
    """What ended a rollout in one process: a lack of memory, or of meshes for longer episodes.

    Where it `failed`, the devices ran out of memory at `placement` (`Placement.as_dict`).
    `outgrown` is the room that it had come to, 0 where it had not grown.
    """

    words: str
    failed: bool
    placement: dict[str, Any]
    outgrown: int


class RolloutShort(RuntimeError):
    """A rollout ended so in one of several processes. All raise it, with the same shortage."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(shortage.words)
        self.shortage = shortage


def shortage_of(
    world: World, error: Exception, placement: dict[str, Any], outgrown: int
) -> Shortage | None:
    """What to tell the other processes of a rollout that ended with this error.

    None for what is no shortage, and in a process that is alone.
    """
    failed, processes = is_out_of_memory(error), world.processes
    if processes.count == 1 or not (failed or isinstance(error, BudgetTooSmall)):
        return None
    return Shortage(
        words=f"process {processes.index}: {str(error).splitlines()[0]}",
        failed=failed,
        placement=placement,
        outgrown=outgrown,
    )


def send_weights(
    world: World,
    params: Params,
    mesh: MeshShape,
    num_slots: int | None = None,
    *,
    chunk_bytes: int | None = None,
) -> Published:
    """Publishes to the engine of every process on this rollout mesh; every process calls it.

    `params` of the result are this process's engine's; what a process that does not play gets is of
    no use to it.
    """
    engine, joint = world.engine(mesh, num_slots), world.joint_layout(mesh)
    shardings = jax.tree.map(
        lambda own: NamedSharding(joint.mesh, own.spec), engine.parameter_shardings
    )
    published = publish(params, engine.parameter_shapes, shardings, chunk_bytes=chunk_bytes)
    world.processes.wait(published.params, "new weights")
    if not world.processes.plays:
        return published
    own = same_shards(published.params, engine.parameter_shardings)
    return dataclasses.replace(published, params=own)


def hear_all(
    world: World,
    rollout: Rollout | None,
    placement: dict[str, Any],
    shortage: Shortage | None = None,
) -> Played:
    """What all processes played, told by each of itself; None in one that plays nothing.

    Raises:
        RolloutShort: some process tells of a `shortage`; of several, the first does.
    """
    own: Any = shortage
    if rollout is not None:
        tokens = sum(trajectory.num_policy_tokens for trajectory in rollout.trajectories)
        own = (
            Played(
                outcomes=[trajectory.outcome for trajectory in rollout.trajectories],
                stats=rollout.stats,
                placement=placement,
                sampling_kl=sampling_kl(rollout.trajectories),
            ),
            tokens,
        )
    told = [one for one in world.processes.gather(own, "the end of a rollout") if one is not None]
    for one in told:
        if isinstance(one, Shortage):
            raise RolloutShort(one)
    if len(told) == 1:
        return told[0][0]
    parts = [part for part, _ in told]
    gaps = [(part.sampling_kl, n) for part, n in told if part.sampling_kl is not None]
    values, weights = zip(*gaps, strict=True) if gaps else ((), ())
    return Played(
        outcomes=[outcome for part in parts for outcome in part.outcomes],
        stats=total_stats([part.stats for part in parts]),
        placement=max(
            (part.placement for part in parts), key=lambda p: (p["max_tokens"], p["cache_tokens"])
        ),
        sampling_kl=float(np.average(values, weights=weights)) if gaps else None,
    )


def total_stats(parts: Sequence[RolloutStats]) -> RolloutStats:
    """Counts add up, and so do tokens in flight, whose greatest number is not at one moment.

    Of words, such as how episodes were preempted, those of the first process that has some count.
    """
    greatest = ("rounds", "context_tokens_max", "env_wait_s", "full_s")

    def total(name: str) -> Any:
        each = [getattr(part, name) for part in parts]
        if isinstance(each[0], str):
            return next(filter(None, each), "")
        return max(each) if name in greatest else sum(each)

    return RolloutStats(**{f.name: total(f.name) for f in dataclasses.fields(RolloutStats)})


def join_rows(world: World, rows: Experience | None, mesh: MeshShape, length: int) -> Experience:
    """The rows of all processes as one array each, cut or padded to `length` places.

    Where a rollout ended on another mesh than `mesh`, its rows move there, within the process.

    Args:
        world: says who plays.
        rows: this process's; None where it plays nothing.
        mesh: the rollout mesh that all processes take the rows to be on.
        length: places of a row.
    """
    joint = world.joint_layout(mesh).activations("NS")
    shape = (world.config.rollout.episodes_per_step, length)
    shapes_of: Any = jax.ShapeDtypeStruct
    number, real = shapes_of(shape, np.int32), shapes_of(shape, np.float32)
    shapes = Experience(tokens=number, turn_ids=number, logprobs=real, versions=number)
    shardings = jax.tree.map(lambda _: joint, shapes)
    if rows is None:
        return absent_tree(shapes, shardings)
    own = world.rollout_layout(mesh).activations("NS")
    rows = reshard(fit(rows, length), jax.tree.map(lambda _: own, shapes))
    return same_shards(rows, shardings, shapes)


def shardings_on_first(world: World) -> TrainState:
    """Where a TrainState is on the devices of the first process alone, cut over them."""
    processes = world.processes
    return _cut_over(world, [device for device in processes.devices if device.process_index == 0])


def to_first(world: World, part: Any, where: Any) -> Any:
    """Arrays on devices of the first process (of `shardings_on_first`), which can read them then.

    Every process calls it, and the others have no part of the result. In a run of one process they
    stay where they are.
    """
    if world.processes.count == 1:
        return part
    part = reshard(part, where)
    world.processes.wait(part, "the weights to export")
    return part


def to_checkpoint(world: World, state: TrainState) -> TrainState:
    """A copy without its base, placed so that every process has a part to write.

    A copy, because the next step donates the state while the checkpoint is being written.
    """
    state = dataclasses.replace(load_moments(state), base=None)
    if world.processes.all_train:
        return jax.tree.map(lambda array: jnp.copy(_first_replica(array)), state)
    where = dataclasses.replace(_cut_over(world, world.processes.devices), base=None)
    state = reshard(state, where)
    world.processes.wait(state, "the checkpoint")
    return state


def copy_to_save(world: World, state: TrainState) -> tuple[TrainState, bool]:
    """The state to save, and True if it is a copy, so that `state` may be donated meanwhile.

    Where the devices have no memory for a copy it is the state's own arrays, offloaded moments in
    host memory included: `state` must be left alone until they are on disk.
    """
    if not world.processes.all_train:
        return to_checkpoint(world, state), True
    copied = unless_out_of_memory(lambda: to_checkpoint(world, state))
    if copied is not None:
        return copied, True
    return jax.tree.map(_first_replica, dataclasses.replace(state, base=None)), False


def _first_replica(array: jax.Array) -> jax.Array:
    """The same array without the replicas of its shards, and without a copy.

    Orbax cuts a part of every replica on its device, which takes memory there. Across processes it
    decides who writes what: the array stays as it is.
    """
    own = array.sharding
    if not isinstance(own, NamedSharding) or not own.is_fully_addressable:
        return array
    cut_by = {
        axis for part in own.spec for axis in ((part,) if isinstance(part, str) else part or ())
    }
    first = tuple(slice(None if axis in cut_by else 1) for axis in own.mesh.axis_names)
    devices: Any = own.mesh.devices
    mesh = Mesh(devices[first], own.mesh.axis_names, axis_types=own.mesh.axis_types)
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    return jax.make_array_from_single_device_arrays(
        array.shape,
        NamedSharding(mesh, own.spec, memory_kind=own.memory_kind),
        [shards[device] for device in devices[first].flat],
        dtype=array.dtype,
    )


def from_checkpoint(
    world: World, mesh: MeshShape, read: Callable[[TrainState, TrainState], TrainState]
) -> TrainState:
    """The inverse: the state on a training mesh, without its base.

    `read(shapes, shardings)` is `Checkpoints.state` of a step.
    """
    shapes, goal = world.train_state_shapes(), world.train_state_shardings(mesh)
    if world.processes.all_train:
        return read(shapes, goal)
    state = read(shapes, _cut_over(world, world.processes.devices))
    state = reshard(state, dataclasses.replace(goal, base=None))
    world.processes.wait(state, "the checkpoint")
    return state


def _cut_over(world: World, devices: Sequence[Any]) -> TrainState:
    """Where a TrainState is cut over these devices, as far as its widths divide."""
    num = len(devices)
    shapes = [MeshShape(data=num // fsdp, fsdp=fsdp) for fsdp in reversed(divisors(num))]
    shape = next(shape for shape in shapes if world.weights_obstacle(shape) is None)
    layout = make_layout(shape, devices)
    return state_shardings(world.model, world.config.train, world.vocab_size, layout)
