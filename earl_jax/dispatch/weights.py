# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Publishing of the trainer's weights to the engine, from devices to devices."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from earl_jax.models.parameters import unstack_layers
from earl_jax.models.projection import is_adapted, merged
from earl_jax.models.quantization import is_quantized, quantize
from earl_jax.sharding.layout import Layout
from earl_jax.sharding.placing import absent_tree, same_shards
from earl_jax.sharding.ranges import shard_ranges
from earl_jax.sharding.reshard import reshard
from earl_jax.sharding.transfer_plan import plan_transfers
from earl_jax.sharding.waypoint import travel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """The engine's weights (layers as a list, in its types), and the bytes that changed device."""

    params: Any
    moved_bytes: int


def publish(params: Any, shapes: Any, shardings: Any) -> Published:
    """Unstacks layers, merges adapters, casts or quantises, and moves to the rollout layout.

    Over the same devices a cast is one compiled program with the move. int8 is made from fp32,
    whatever the compute type, where the numbers lie, and sent then, as all is to other devices:
    piece by piece, a byte a number, so that no device holds more of the full precision than before.

    Where devices of several processes take part, each calls this, those too that do not train.

    Args:
        params: the trainer's tree, layers stacked on the leading axis; some may be `Adapted`.
        shapes: shapes and types of the engine's tree, layers as a list; some may be `Quantized`.
        shardings: where the engine wants each of them.
    """
    made = _where_made(params, shapes)
    sources = jax.tree.map(lambda leaf: leaf.sharding, made)
    here, there = (jax.tree.leaves(side)[0].mesh for side in (sources, shardings))
    quantized = any(map(is_quantized, jax.tree.leaves(shapes, is_leaf=is_quantized)))
    if quantized or list(here.devices.flat) != list(there.devices.flat):
        if jax.tree.leaves(params)[0].addressable_shards:
            made_here = program_of(params, shapes, sources)(params)
        else:
            made_here = absent_tree(made, sources)
        # Where nothing is to be done to a weight, its program returns the trainer's own buffer.
        donate = not _shares_buffers(params, made_here)
        moved = reshard(made_here, shardings, donate=donate)
    else:
        moved = program_of(params, shapes, shardings)(params)
    described = tuple(
        (leaf.shape, leaf.dtype.itemsize, leaf.sharding) for leaf in jax.tree.leaves(made)
    )
    return Published(
        params=moved, moved_bytes=_moved_bytes(described, tuple(jax.tree.leaves(shardings)))
    )


def publish_to_engines(
    params: Any,
    shapes: Any,
    shardings: Any,
    global_layout: Layout,
) -> Published:
    """Publishes to the engines of all processes, each of which has a copy; every process calls it.

    On the global layout, over the devices of all processes that play, a weight is one array, of
    which the devices of each engine hold a copy. `params` of the result are those of this process's
    engine; in a process that does not play, only handles.

    Args:
        params: as in `publish`.
        shapes: as in `publish`.
        shardings: where this process's engine wants each weight.
        global_layout: the rollout's layout over the devices of all processes that play.
    """
    everywhere = jax.tree.map(lambda own: NamedSharding(global_layout.mesh, own.spec), shardings)
    published = publish(params, shapes, everywhere)
    if not jax.tree.leaves(everywhere)[0].addressable_devices:
        return published
    return dataclasses.replace(published, params=same_shards(published.params, shardings))


def _shares_buffers(params: Any, made: Any) -> bool:
    def buffers(tree: Any) -> set[tuple[Any, int]]:
        return {
            (shard.device, shard.data.unsafe_buffer_pointer())
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
        }

    return bool(buffers(params) & buffers(made))


def program_of(params: Any, shapes: Any, shardings: Any) -> Any:
    """Returns the jitted `make(params)` of the engine's tree, over the devices of `params`.

    These may be shapes, if they say where they lie.
    """
    made = _where_made(params, shapes)
    return _unstack_to(
        jax.tree.structure(shapes),
        tuple(leaf.dtype for leaf in jax.tree.leaves(shapes)),
        tuple(leaf.sharding for leaf in jax.tree.leaves(made)),
        tuple(jax.tree.leaves(shardings)),
    )


@functools.lru_cache(maxsize=64)
def _unstack_to(
    tree: Any, dtypes: tuple[Any, ...], sources: tuple[Any, ...], targets: tuple[Any, ...]
) -> Any:
    wanted = jax.tree.unflatten(tree, dtypes)

    def make(want: Any, leaf: Any) -> Any:
        # Merged layer by layer, because a merged weight is fp32 before it is rounded.
        weight = merged(leaf)
        if is_quantized(want):
            return quantize(weight, want.axes, want.inputs)
        return weight.astype(want)

    def unstack(params: Any) -> Any:
        layers = unstack_layers(params, len(wanted["layers"]))
        made = jax.tree.map(make, wanted, layers, is_leaf=is_quantized)
        sent = map(travel, jax.tree.leaves(made), sources, targets)
        return jax.tree.unflatten(tree, list(sent))

    return jax.jit(unstack, out_shardings=jax.tree.unflatten(tree, targets))


def _where_made(params: Any, shapes: Any) -> Any:
    """Returns the engine's tree as shapes on the trainer's layout: L was not sharded there."""

    def describe(shape: Any, leaf: Any, skip: int) -> Any:
        # Merged where the weight lies: the adapter's parts are cut as it is.
        where = (leaf.weight if is_adapted(leaf) else leaf).sharding
        entries = tuple(where.spec)[skip:]

        def at(part: jax.ShapeDtypeStruct, entries: Sequence[Any]) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(where.mesh, PartitionSpec(*entries))
            return jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=sharding)

        if not is_quantized(shape):
            return at(shape, entries)
        kept = [
            entry
            for letter, entry in zip(shape.axes, entries, strict=False)
            if letter not in shape.inputs
        ]
        return dataclasses.replace(
            shape, values=at(shape.values, entries), scale=at(shape.scale, kept)
        )

    def describe_all(shapes: Any, leaves: Any, skip: int) -> Any:
        return jax.tree.map(
            lambda shape, leaf: describe(shape, leaf, skip), shapes, leaves, is_leaf=is_quantized
        )

    others = {
        name: describe_all(shapes[name], params[name], 0) for name in shapes if name != "layers"
    }
    layers = [
        {name: describe_all(shape, params["layers"][name], 1) for name, shape in layer.items()}
        for layer in shapes["layers"]
    ]
    return {**others, "layers": layers}


@functools.lru_cache(maxsize=64)
def _moved_bytes(described: tuple[Any, ...], targets: tuple[Any, ...]) -> int:
    plans = plan_transfers(
        [
            (shape, itemsize, shard_ranges(source, shape), shard_ranges(target, shape))
            for (shape, itemsize, source), target in zip(described, targets, strict=True)
        ]
    )
    return sum(plan.moved_bytes for plan in plans)
