# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays from devices to devices of several processes, on the paths of XLA's collectives.

No process can put an array on another's device: `jax.device_put` refuses, or reads the array to the
host. What sends there is a program that all processes run. Here it is one over all devices that
hold or want something, in a row; each contributes its shard as it lies (zeros where it has none),
and the rounds of the plan are `ppermute`s, which carry the bytes of the plan and no others: over
ICI, NVLink and RDMA as the backend has them, over TCP between CPUs.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from earl_jax.sharding.moves import carrier, viewed
from earl_jax.sharding.placing import zeros_on
from earl_jax.sharding.ranges import shard_ranges
from earl_jax.sharding.rounds import Round, rounds_of
from earl_jax.sharding.schedule import Shipment

_ROW = "device"
# XLA compiles a round in about 10 ms on a CPU; 64 devices that all send to all need 63.
MAX_ROUNDS = 512


def exchange(
    arrays: Sequence[jax.Array], shipments: Sequence[Shipment], max_bytes: int | None = None
) -> list[jax.Array]:
    """Carries out plans of the route "rounds"; every process of theirs must call it alike.

    Beside the arrays and what becomes of them a device holds a few messages, of at most `max_bytes`
    each where that is given; and a device that only holds, or only wants, has a shard of the other
    kind too while the program runs.

    Raises:
        ValueError: a plan needs more than `MAX_ROUNDS` rounds.
    """
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for n, shipment in enumerate(shipments):
        devices = shipment.move.source.device_set | shipment.move.target.device_set
        groups[tuple(sorted(devices, key=lambda device: device.id))].append(n)
    arrived: dict[int, jax.Array] = {}
    for devices, group in groups.items():
        of_group = tuple(shipments[n] for n in group)
        mesh = Mesh(np.array(devices, dtype=object), (_ROW,))
        if any(device.process_index == jax.process_index() for device in devices):
            program = _program(of_group, mesh, max_bytes)
            rows = [_as_row(arrays[n], shipments[n], mesh) for n in group]
            results = program(rows)
        else:
            results = [None] * len(group)
        for n, row in zip(group, results, strict=True):
            arrived[n] = _as_array(row, shipments[n])
    return [arrived[n] for n in range(len(shipments))]


def _as_row(array: jax.Array, shipment: Shipment, mesh: Mesh) -> jax.Array:
    """Returns the shards of all devices behind each other, along the first axis; no copy."""
    block = _block(shipment.move.source, shipment.move.shape)
    here = {shard.device: shard.data for shard in array.addressable_shards}
    shards = []
    for device in mesh.local_devices:
        shard = here.get(device)
        if shard is None:
            shard = zeros_on(SingleDeviceSharding(device), block, shipment.move.dtype)
        shards.append(shard if shard.ndim else shard.reshape(1))
    shape = (len(mesh.devices) * block[0], *block[1:])
    sharding = NamedSharding(mesh, PartitionSpec(_ROW))
    return jax.make_array_from_single_device_arrays(
        shape, sharding, shards, dtype=shipment.move.dtype
    )


def _as_array(row: jax.Array | None, shipment: Shipment) -> jax.Array:
    """Returns the inverse, on the target's devices."""
    shards = [] if row is None else row.addressable_shards
    wanted = [shard.data for shard in shards if shard.device in shipment.move.target.device_set]
    if not shipment.move.shape:
        wanted = [shard.reshape(()) for shard in wanted]
    return jax.make_array_from_single_device_arrays(
        shipment.move.shape, shipment.move.target, wanted, dtype=shipment.move.dtype
    )


def _block(sharding: Sharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    return sharding.shard_shape(shape) or (1,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Leg:
    """A round as the devices of a mesh see it, in the order of the mesh.

    `cut` and `paste` are i32[devices, axes]: where in its own shards a device reads what it sends,
    and writes what it receives. `receives` is False where nothing comes.
    """

    shape: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...] | None
    cut: np.ndarray
    paste: np.ndarray
    receives: np.ndarray


def _leg(round_: Round, shipment: Shipment, place: dict[int, int]) -> _Leg:
    source, target = (
        shard_ranges(sharding, shipment.move.shape)
        for sharding in (shipment.move.source, shipment.move.target)
    )
    axes = max(1, len(shipment.move.shape))
    cut, paste = np.zeros((2, len(place), axes), np.int32)
    receives = np.zeros(len(place), bool)
    for piece in round_.pieces:
        sender, receiver = place[piece.source_device], place[piece.target_device]
        for table, row, origin in (
            (cut, sender, source[piece.source_device]),
            (paste, receiver, target[piece.target_device]),
        ):
            for axis, ((start, _), (first, _)) in enumerate(zip(piece.index, origin, strict=True)):
                table[row, axis] = start - first
        receives[receiver] = True
    return _Leg(
        shape=round_.shape or (1,),
        pairs=None
        if round_.stays
        else tuple((place[p.source_device], place[p.target_device]) for p in round_.pieces),
        cut=cut,
        paste=paste,
        receives=receives,
    )


@functools.lru_cache(maxsize=128)
def _program(
    shipments: tuple[Shipment, ...], mesh: Mesh, max_bytes: int | None
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Returns the program for these leaves. Leaves whose plans are alike share their messages."""
    place = {device.id: n for n, device in enumerate(mesh.devices.flat)}
    bundles: dict[Any, list[int]] = defaultdict(list)
    for n, shipment in enumerate(shipments):
        plan, wire, move = shipment.plan, shipment.wire_type, shipment.move
        alike = (plan.shape, wire, plan.senders.tobytes(), plan.receivers.tobytes())
        # Equal pieces may be cut out of other shards: of an array with replicas.
        sides = (move.source, move.target)
        cuts = tuple(tuple(shard_ranges(side, move.shape).items()) for side in sides)
        bundles[alike, plan.boxes.tobytes(), cuts].append(n)
    legs = []
    for bundle in bundles.values():
        first = shipments[bundle[0]]
        share = None if max_bytes is None else max(1, max_bytes // len(bundle))
        rounds = rounds_of(first.plan, share)
        sending = sum(not round_.stays for round_ in rounds)
        if sending > MAX_ROUNDS:
            raise ValueError(
                f"an array of shape {first.move.shape} takes {sending} rounds to move from "
                f"{first.move.source} to {first.move.target}, and no program has more than "
                f"{MAX_ROUNDS}; go by a layout between the two, or give larger chunks"
            )
        legs += [(tuple(bundle), _leg(round_, first, place)) for round_ in rounds]

    def run(shards: list[jax.Array]) -> list[jax.Array]:
        row = lax.axis_index(_ROW)
        outs = [
            jnp.zeros(_block(shipment.move.target, shipment.move.shape), shipment.move.dtype)
            for shipment in shipments
        ]
        for bundle, leg in legs:
            message = jnp.stack([_cut(shards[n], leg, row, shipments[n]) for n in bundle])
            if leg.pairs is not None:
                message = lax.ppermute(message, _ROW, leg.pairs)
            for k, n in enumerate(bundle):
                outs[n] = _paste(outs[n], message[k], leg, row)
            # One round after the other: each may use all links, and needs memory for its message.
            shards, outs = lax.optimization_barrier((shards, outs))
        return outs

    spec = PartitionSpec(_ROW)
    return jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False),
    )


def _cut(shard: jax.Array, leg: _Leg, row: jax.Array, shipment: Shipment) -> jax.Array:
    start = jnp.asarray(leg.cut)[row]
    at = [start[axis] for axis in range(shard.ndim)]
    bits = lax.dynamic_slice(viewed(shard, carrier(shard.dtype)), at, leg.shape)
    return viewed(bits, shipment.wire_type)


def _paste(out: jax.Array, bits: jax.Array, leg: _Leg, row: jax.Array) -> jax.Array:
    start = jnp.asarray(leg.paste)[row]
    at = [start[axis] for axis in range(out.ndim)]
    piece, whole = (viewed(part, carrier(out.dtype)) for part in (bits, out))
    if not leg.receives.all():
        kept = lax.dynamic_slice(whole, at, leg.shape)
        piece = jnp.where(jnp.asarray(leg.receives)[row], piece, kept)
    return viewed(lax.dynamic_update_slice(whole, piece, at), out.dtype)
