# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The part of an array that each device holds, as index ranges, and its process."""

import itertools
import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh, NamedSharding, Sharding

Ranges = tuple[tuple[int, int], ...]
"""One (start, stop) per axis: a box of a global array. A scalar's only box is ()."""


def shard_ranges(sharding: Sharding, shape: Sequence[int]) -> dict[int, Ranges]:
    """Returns the ranges that each device holds, by device id in the order of the mesh.

    Under an abstract mesh the devices are numbered 0, 1, ... in the order of the mesh.
    """
    shape = tuple(shape)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return _abstract_shard_ranges(sharding, shape)
    return {
        device.id: tuple(
            (0 if part.start is None else part.start, size if part.stop is None else part.stop)
            for part, size in zip(index, shape, strict=True)
        )
        for device, index in sharding.devices_indices_map(shape).items()
    }


def check_divides(name: str, shape: Sequence[int], sharding: NamedSharding) -> None:
    """Raises ValueError unless the array called `name` splits evenly over `sharding`."""
    for axis, (mesh_axes, parts) in enumerate(_splits(sharding, shape)):
        if shape[axis] % parts:
            raise ValueError(
                f"{name} of shape {tuple(shape)} does not divide: axis {axis} has {shape[axis]} "
                f"elements, and {sharding.spec} splits it over {parts} devices (mesh axes "
                f"{mesh_axes} of mesh {dict(sharding.mesh.shape)}); pad axis {axis} to a multiple "
                f"of {parts} or write None for it in the spec"
            )


def process_of(*shardings: Sharding) -> dict[int, int]:
    """Returns the process of each device, by device id; all the same under an abstract mesh."""
    processes: dict[int, int] = {}
    for sharding in shardings:
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
            processes.update(dict.fromkeys(range(sharding.mesh.size), 0))
        else:
            processes.update({d.id: d.process_index for d in sharding.device_set})
    return processes


def _splits(sharding: NamedSharding, shape: Sequence[int]) -> list[tuple[tuple[str, ...], int]]:
    """Returns for each axis of the array the mesh axes that split it and the number of parts."""
    spec = tuple(sharding.spec)
    if len(spec) > len(shape):
        raise ValueError(
            f"{sharding.spec} has {len(spec)} entries for an array of shape {tuple(shape)}; "
            f"give at most {len(shape)}"
        )
    splits = []
    for entry in spec + (None,) * (len(shape) - len(spec)):
        if not (entry is None or isinstance(entry, (str, tuple))):
            raise ValueError(
                f"{sharding.spec} leaves an axis open ({entry}); name its mesh axes or write None"
            )
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        splits.append((names, math.prod(sharding.mesh.shape[name] for name in names)))
    return splits


def _abstract_shard_ranges(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[int, Ranges]:
    splits = _splits(sharding, shape)
    mesh_axes = dict(sharding.mesh.shape)
    ranges = {}
    for device, place in enumerate(itertools.product(*map(range, mesh_axes.values()))):
        coordinate = dict(zip(mesh_axes, place, strict=True))
        box = []
        for size, (names, parts) in zip(shape, splits, strict=True):
            part = 0
            for name in names:  # the first name is the slowest
                part = part * mesh_axes[name] + coordinate[name]
            box.append((part * size // parts, (part + 1) * size // parts))
        ranges[device] = tuple(box)
    return ranges
