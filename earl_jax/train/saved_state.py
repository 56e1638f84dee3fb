# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A TrainState as checkpoints hold it: a copy without its base, cut over the devices, and back."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from earl_jax.selector.memory import unless_out_of_memory
from earl_jax.sharding.layout import Layout, MeshShape, make_layout
from earl_jax.sharding.reshard import reshard
from earl_jax.train.offload import load_moments
from earl_jax.train.state import TrainState


def copy_to_save(state: TrainState, where: TrainState | None) -> tuple[TrainState, bool]:
    """Returns the state to save, and True if it is a copy, so that `state` may be donated.

    Without its base. Where the devices have no memory for a copy it is the state's own arrays,
    offloaded moments in host memory included: `state` must be left alone until they are on disk.
    `where` as in `to_checkpoint`.
    """
    if where is not None:
        return to_checkpoint(state, where), True
    copied = unless_out_of_memory(lambda: to_checkpoint(state, None))
    if copied is not None:
        return copied, True
    return jax.tree.map(_first_replica, dataclasses.replace(state, base=None)), False


def to_checkpoint(state: TrainState, where: TrainState | None) -> TrainState:
    """Returns a copy of the state without its base, for orbax to write.

    A copy, because the next step donates the state while the checkpoint is being written. `where`
    are shardings over the devices of all processes, each of which writes a part (`spread_over`);
    None: every process has a part of the state as it is.
    """
    state = dataclasses.replace(load_moments(state), base=None)
    if where is None:
        return jax.tree.map(lambda array: jnp.copy(_first_replica(array)), state)
    return reshard(state, dataclasses.replace(where, base=None).like(state))


def from_checkpoint(
    read: Callable[[TrainState], TrainState], shardings: TrainState, where: TrainState | None
) -> TrainState:
    """Returns a saved state on a training mesh, without its base: the inverse of `to_checkpoint`.

    `read(shardings)` reads it to the devices of these shardings.
    """
    if where is None:
        return read(shardings)
    return reshard(read(where), dataclasses.replace(shardings, base=None))


def spread_over(
    devices: Sequence[Any],
    shardings: Callable[[Layout], TrainState],
    is_possible: Callable[[MeshShape], bool],
) -> TrainState:
    """Returns the `shardings` of a TrainState that is cut over all these devices.

    Over as many of them as a mesh that `is_possible` for the model cuts its widths.
    """
    num = len(devices)
    shapes = (MeshShape(data=num // n, fsdp=n) for n in range(num, 0, -1) if num % n == 0)
    return shardings(make_layout(next(filter(is_possible, shapes)), devices))


def _first_replica(array: jax.Array) -> jax.Array:
    """Returns the same array without the replicas of its shards, and without a copy.

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
