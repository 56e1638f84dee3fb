# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Placements between two others, so that a compiled move sends hardly more than it must.

Left to itself XLA can gather a whole array on every device on its way from one placement to
another ("involuntary full rematerialization"). It does well in small steps. First what cuts an axis
of the array, and is to cut another one, goes there: an all-to-all of single shards each time. Then
everything is cut as the target cuts it, and what the target does not cut is still cut as it was,
which is gathered once.

Both meshes are seen as one finer mesh over the same devices: 8 devices as fsdp=8 and as
data=4,tensor=2 are 4 x 2, and fsdp is both axes.

Example, a matrix DF from D over fsdp=8 to F over tensor=2: by D over the 4 and F over the 2.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from earl_jax.sharding.moves import carrier, viewed

# Per axis of an array the mesh axes that cut it, the slowest first.
Cuts = list[tuple[str, ...]]


def travel(array: jax.Array, source: Sharding, target: NamedSharding) -> jax.Array:
    """Moves an array inside a program from `source` to `target` through the waypoints.

    What was done to it before is done on `source`, so that a narrower type is what is sent.
    """
    waypoints = waypoints_between(source, target, array.shape)
    if not waypoints:
        return array
    # XLA gathers bfloat16 on CPUs by way of float32: 23M weights to each of 8 devices took 0.8 s of
    # CPU, and take 0.40 as integers (jax 0.10.2, 2026-11).
    on_cpu = all(device.platform == "cpu" for device in target.device_set)
    sent = viewed(array, carrier(array.dtype)) if on_cpu else array
    for stop in (*waypoints, target):
        sent = lax.with_sharding_constraint(sent, stop)
    return viewed(sent, array.dtype)


@functools.lru_cache(maxsize=4096)
def waypoints_between(
    source: Sharding, target: NamedSharding, shape: tuple[int, ...]
) -> tuple[NamedSharding, ...]:
    """Returns the source and the placements behind it, all on the finer mesh.

    None where the meshes have not the same devices in the same order, or no finer one in common,
    where the shape does not divide so, or an axis is Explicit.
    """
    if not (_is_plain(source) and _is_plain(target)):
        return ()
    assert isinstance(source, NamedSharding)
    before, after = source.mesh, target.mesh
    assert isinstance(before, Mesh) and isinstance(after, Mesh)
    sizes = _finer(before.devices.shape, after.devices.shape)
    if not sizes or list(before.devices.flat) != list(after.devices.flat):
        return ()
    named = {f"part{n}": size for n, size in enumerate(sizes)}
    came, goes = (_cuts(side, len(shape), named) for side in (source, target))
    wanted = {name for names in goes for name in names}
    goal = [
        (*there, *(name for name in here if name not in wanted))
        for here, there in zip(came, goes, strict=True)
    ]
    steps = _steps(came, goal, named)
    for step in steps:
        if any(size % number for size, number in zip(shape, _parts(step, named), strict=True)):
            return ()
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = Mesh(before.devices.reshape(sizes), tuple(named), axis_types=kinds)
    return tuple(
        NamedSharding(mesh, PartitionSpec(*(names or None for names in step))) for step in steps
    )


def _is_plain(sharding: Sharding) -> bool:
    if not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)):
        return False
    return all(kind == AxisType.Auto for kind in sharding.mesh.axis_types)


def _finer(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Returns sizes of the axes into which those of both meshes fall; () where they do not.

    Example: (8,) and (4, 2) are (4, 2); (2, 3) and (3, 2) have none.
    """
    if math.prod(before) != math.prod(after):
        return ()
    strides = {math.prod(sizes[n:]) for sizes in (before, after) for n in range(len(sizes) + 1)}
    falling = sorted(strides, reverse=True)
    pairs = list(zip(falling[:-1], falling[1:], strict=True))
    if any(large % small for large, small in pairs):
        return ()
    return tuple(large // small for large, small in pairs)


def _cuts(sharding: NamedSharding, num_axes: int, named: Mapping[str, int]) -> Cuts:
    """Returns a placement in terms of the finer mesh, whose axes and their sizes are `named`."""
    finer = iter(named.items())
    parts: dict[str, tuple[str, ...]] = {}
    for name, size in sharding.mesh.shape.items():
        own, product = [], 1
        while product < size:
            part, part_size = next(finer)
            own.append(part)
            product *= part_size
        parts[str(name)] = tuple(own)
    entries = [*sharding.spec, *[None] * (num_axes - len(sharding.spec))]
    cuts = []
    for entry in entries:
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        cuts.append(tuple(part for name in names for part in parts[name]))
    return cuts


def _parts(cuts: Cuts, named: Mapping[str, int]) -> list[int]:
    """Returns the number of parts of each axis of the array."""
    return [math.prod(named[name] for name in names) for names in cuts]


def _steps(came: Cuts, goal: Cuts, named: Mapping[str, int]) -> list[Cuts]:
    """Returns the steps from one to the other; each moves a run of mesh axes to another axis.

    The innermost first, because they go in one all-to-all; and of these what lies in its place
    then. As soon as there are the right parts, only on other devices, they go there: a permute. So
    do those that are cut once more in the end, which costs nothing.
    """
    place = {name: axis for axis, names in enumerate(goal) for name in names}
    now, steps = list(came), [came]
    while _parts(now, named) != _parts(goal, named) and (runs := _runs(now, place)):

        def in_its_place(run: tuple[int, int, int], now: Cuts = now) -> bool:
            axis, first, stop = run
            to = place[now[axis][first]]
            after = now[to] + now[axis][first:stop]
            return goal[to][: len(after)] == after

        axis, first, stop = max(runs, key=in_its_place)
        to = place[now[axis][first]]
        moved, now = now[axis][first:stop], list(now)
        now[axis], now[to] = now[axis][:first] + now[axis][stop:], now[to] + moved
        steps.append(now)
    return steps if now == goal else [*steps, goal]


def _runs(now: Cuts, place: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """Returns the runs that can move: (axis, first, stop), cuts of `axis` that go to one other.

    Innermost ones, where there are such; else any one cut that goes.
    """
    inner, others = [], []
    for axis, names in enumerate(now):
        goes = [place[name] for name in names]
        others += [(axis, n, n + 1) for n, to in enumerate(goes) if to != axis]
        first = len(goes)
        while first and goes[first - 1] == goes[-1]:
            first -= 1
        if goes and goes[-1] != axis:
            inner.append((axis, first, len(goes)))
    return inner or others[-1:]
