# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A placement between two others, so that a compiled move sends hardly more than must be sent.

Left to itself XLA goes from one placement to another in ways that can gather a whole array on every
device ("involuntary full rematerialization"). It does well in two steps: first everything is cut as
the target cuts it, and what the target does not cut stays cut as it was, which is all-to-alls and
permutes of single shards; then the rest is gathered, once.

Both meshes are seen as one finer mesh over the same devices: 8 devices as fsdp=8 and as
data=4,tensor=2 are 4 x 2, in which fsdp is both axes.

Example, a matrix DF: from D over fsdp=8 to F over tensor=2 by D over the 4 and F over the 2. A
device then receives half of the F that it lacks of a quarter of D, and three more quarters of D.
"""

import functools
import math
from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding


def travel(array: jax.Array, source: Sharding, target: NamedSharding) -> jax.Array:
    """Inside a program: the array from `source` to `target`, by way of the place between them.

    What was done to it before is done on `source`, so that a narrower type is what is sent.
    """
    stops = stopover(source, target, array.shape)
    for stop in (*stops, target) if stops else ():
        array = lax.with_sharding_constraint(array, stop)
    return array


@functools.lru_cache(maxsize=4096)
def stopover(
    source: Sharding, target: Sharding, shape: tuple[int, ...]
) -> tuple[NamedSharding, ...]:
    """The source and the placement half-way, both on the finer mesh; () where there is none.

    There is none where the meshes have not the same devices in the same order, or no finer one in
    common, where the shape does not divide so, or an axis is Explicit.
    """
    if not (_is_plain(source) and _is_plain(target)):
        return ()
    assert isinstance(source, NamedSharding) and isinstance(target, NamedSharding)
    before, after = source.mesh, target.mesh
    assert isinstance(before, Mesh) and isinstance(after, Mesh)
    sizes = _finer(before.devices.shape, after.devices.shape)
    if not sizes or list(before.devices.flat) != list(after.devices.flat):
        return ()
    names = tuple(f"part{n}" for n in range(len(sizes)))
    came, goes = (_spelled(side, len(shape), sizes, names) for side in (source, target))
    wanted = {name for axes in goes for name in axes}
    between = [
        (*there, *(name for name in here if name not in wanted))
        for here, there in zip(came, goes, strict=True)
    ]
    parts = [math.prod(sizes[names.index(name)] for name in axes) for axes in between]
    if any(size % number for size, number in zip(shape, parts, strict=True)):
        return ()
    kinds = (AxisType.Auto,) * len(names)
    mesh = Mesh(before.devices.reshape(sizes), names, axis_types=kinds)
    return tuple(
        NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))
        for spec in (came, between)
    )


def _is_plain(sharding: Sharding) -> bool:
    if not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)):
        return False
    return all(kind == AxisType.Auto for kind in sharding.mesh.axis_types)


def _finer(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Sizes of the axes into which those of both meshes fall; () where they do not.

    Example: (8,) and (4, 2) are (4, 2); (2, 3) and (3, 2) have none.
    """
    if math.prod(before) != math.prod(after):
        return ()
    strides = set()
    for sizes in (before, after):
        strides |= {math.prod(sizes[n:]) for n in range(len(sizes) + 1)}
    falling = sorted(strides, reverse=True)
    if any(large % small for large, small in zip(falling, falling[1:], strict=False)):
        return ()
    return tuple(large // small for large, small in zip(falling, falling[1:], strict=False))


def _spelled(
    sharding: NamedSharding, num_axes: int, sizes: Sequence[int], names: Sequence[str]
) -> list[tuple[str, ...]]:
    """Per axis of the array, the axes of the finer mesh that cut it, the slowest first."""
    place, parts = 0, {}
    for name, size in sharding.mesh.shape.items():
        first, product = place, 1
        while product < size:
            product *= sizes[place]
            place += 1
        parts[name] = tuple(names[first:place])
    entries = [*sharding.spec, *[None] * (num_axes - len(sharding.spec))]
    spelled = []
    for entry in entries:
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        spelled.append(tuple(part for axis in axes for part in parts[axis]))
    return spelled
