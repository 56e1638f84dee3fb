# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""publish(): the trainer's weights become the engine's policy, on the devices."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.models.lora import is_adapted, merged
from earl_jax.sharding.reshard import reshard
from earl_jax.sharding.transfer_plan import plan_transfers, shard_ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """The engine's weights (layers as a list, compute type), and the bytes that changed device."""

    params: Any
    moved_bytes: int


def publish(params: Any, shapes: Any, shardings: Any) -> Published:
    """Layers unstacked, adapters merged, cast to the compute type, placed on the rollout layout.

    Over the same devices all of it is one compiled program. Over other devices the layers are
    unstacked where they are and then sent, piece by piece.

    Args:
        params: the trainer's tree, layers stacked on the leading axis; some may be `Adapted`.
        shapes: shapes and types of the engine's tree, layers as a list.
        shardings: where the engine wants each of them.
    """
    targets = tuple(jax.tree.leaves(shardings))
    dtype = jax.tree.leaves(shapes)[0].dtype
    num_layers = len(shapes["layers"])
    source = jax.tree.leaves(params)[0].sharding
    if list(source.mesh.devices.flat) == list(targets[0].mesh.devices.flat):
        moved = _unstack_to(num_layers, dtype, jax.tree.structure(shardings), targets)(params)
        unstacked = _unstacked_shapes(num_layers, params)
    else:
        unstacked = _unstack_in_place(num_layers, dtype)(params)
        moved = reshard(unstacked, shardings)
    described = tuple(
        (leaf.shape, dtype.itemsize, leaf.sharding) for leaf in jax.tree.leaves(unstacked)
    )
    return Published(params=moved, moved_bytes=_moved_bytes(described, targets))


def _unstack(num_layers: int, dtype: jnp.dtype, params: Any) -> Any:
    params = jax.tree.map(
        lambda leaf: leaf if is_adapted(leaf) else leaf.astype(dtype), params, is_leaf=is_adapted
    )
    layers = [
        jax.tree.map(lambda leaf, index=index: leaf[index], params["layers"])
        for index in range(num_layers)
    ]
    # Merged layer by layer, because a merged weight is fp32 before it is cast.
    return jax.tree.map(
        lambda leaf: merged(leaf).astype(dtype), {**params, "layers": layers}, is_leaf=is_adapted
    )


@functools.lru_cache(maxsize=64)
def _unstack_to(num_layers: int, dtype: Any, tree: Any, targets: tuple[Any, ...]) -> Any:
    return jax.jit(
        functools.partial(_unstack, num_layers, dtype),
        out_shardings=jax.tree.unflatten(tree, targets),
    )


@functools.lru_cache(maxsize=64)
def _unstack_in_place(num_layers: int, dtype: Any) -> Any:
    return jax.jit(functools.partial(_unstack, num_layers, dtype))


def _unstacked_shapes(num_layers: int, params: Any) -> Any:
    """The engine's tree as it lies on the trainer's layout: L is cut, and was not sharded."""

    def shape(leaf: Any, skip: int) -> Any:
        # Merged where the weight lies: the adapter's parts are cut as it is.
        leaf = leaf.weight if is_adapted(leaf) else leaf
        spec = jax.sharding.PartitionSpec(*tuple(leaf.sharding.spec)[skip:])
        return jax.ShapeDtypeStruct(
            leaf.shape[skip:],
            leaf.dtype,
            sharding=jax.sharding.NamedSharding(leaf.sharding.mesh, spec),
        )

    layer = jax.tree.map(lambda leaf: shape(leaf, 1), params["layers"], is_leaf=is_adapted)
    rest = {
        name: jax.tree.map(lambda leaf: shape(leaf, 0), part)
        for name, part in params.items()
        if name != "layers"
    }
    return {**rest, "layers": [layer] * num_layers}


@functools.lru_cache(maxsize=64)
def _moved_bytes(described: tuple[Any, ...], targets: tuple[Any, ...]) -> int:
    plans = plan_transfers(
        [
            (shape, itemsize, shard_ranges(source, shape), shard_ranges(target, shape))
            for (shape, itemsize, source), target in zip(described, targets, strict=True)
        ]
    )
    return sum(plan.moved_bytes for plan in plans)
