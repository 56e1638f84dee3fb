# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An all-reduce and a dispatch between each two hosts, with their rates."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from earl_jax.launch.cluster import Cluster
from earl_jax.preflight.rates import best_seconds
from earl_jax.sharding.reshard import reshard

# A device sends so many bytes of fp32; a link slower than the median by this factor is a misfit.
_BYTES, _BYTES_ON_CPU, _SLOWER = 64 * 2**20, 2**20, 4.0
_SHOWN = 16


class Group(NamedTuple):
    """One end of a link: the devices of a host, or of a process where there is one host."""

    name: str
    devices: tuple[Any, ...]


class Link(NamedTuple):
    """The rates between two groups in GB/s over all of their devices; `wrong`: other bytes came."""

    ends: str
    all_reduce: float
    dispatch: float
    wrong: bool


def groups_of(cluster: Cluster) -> list[Group]:
    """Returns the hosts, or where all processes are on one the processes, or a process's halves."""
    several = cluster.num_hosts > 1
    found: dict[str, list[Any]] = {}
    for device in cluster.devices:
        number = device.process_index
        name = cluster.hosts[number] if several else f"process {number} on {cluster.hosts[number]}"
        found.setdefault(name, []).append(device)
    if cluster.count > 1 or len(cluster.devices) == 1:
        return [Group(name, tuple(devices)) for name, devices in found.items()]
    half = len(cluster.devices) // 2
    return [
        Group("the first half of the devices", cluster.devices[:half]),
        Group("the second half", cluster.devices[half:]),
    ]


def rounds_of_pairs(num: int) -> Iterator[list[tuple[int, int]]]:
    """Yields rounds of disjoint pairs, in which each two of `num` meet once (the circle method).

    Example: 4 -> [(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)].
    """
    circle = list(range(num + num % 2))
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [pair for pair in pairs if max(pair) < num]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def links(cluster: Cluster) -> list[Link]:
    """Returns all links between two groups; pairs of a round are timed at once."""
    groups, found = groups_of(cluster), []
    for pairs in rounds_of_pairs(len(groups)):
        own = None
        for pair in pairs:
            ends = [groups[n] for n in pair]
            if any(d.process_index == cluster.index for end in ends for d in end.devices):
                own = _link(cluster, *ends)
        each = cluster.gather(own, "the links of the other hosts")
        found += dict.fromkeys(Link(*one) for one in each if one is not None)
    # Processes of a host report the same link, each with its own times.
    first: dict[str, Link] = {}
    for link in found:
        # What came wrong is seen by those to whom it came.
        before = first.setdefault(link.ends, link)
        first[link.ends] = before._replace(wrong=before.wrong or link.wrong)
    return list(first.values())


def _link(cluster: Cluster, one: Group, other: Group) -> Link:
    """Times one link; the processes of both groups call it."""
    num = min(len(one.devices), len(other.devices))
    ends = f"{one.name} - {other.name}"
    devices = np.array([one.devices[:num], other.devices[:num]], dtype=object)
    mesh = Mesh(devices, ("host", "device"))
    length = (_BYTES_ON_CPU if devices[0, 0].platform == "cpu" else _BYTES) // 4
    everywhere = NamedSharding(mesh, P("host", "device"))
    numbers = jax.jit(lambda: jnp.ones((2, num * length), jnp.float32), out_shardings=everywhere)()
    whole = NamedSharding(mesh, P(None, "device"))
    total = jax.jit(lambda numbers: numbers.sum(axis=0, keepdims=True), out_shardings=whole)
    cluster.wait(total(numbers), f"an all-reduce of {ends}")
    reduce_s = best_seconds(total, numbers)
    first, second = (
        NamedSharding(Mesh(row, ("device",)), P("device")) for row in (devices[0], devices[1])
    )
    shards = [
        jnp.arange(length, dtype=jnp.float32, device=device)
        for device in devices[0]
        if device.process_index == cluster.index
    ]
    rows = jax.make_array_from_single_device_arrays(
        (num * length,), first, shards, dtype=jnp.float32
    )
    cluster.wait(reshard(rows, second), f"a dispatch of {ends}")
    dispatch_s = best_seconds(reshard, rows, second)
    wrong = _is_wrong(total(numbers), 2.0) or _is_wrong(reshard(rows, second), None)
    gigabytes = num * length * 4 / 1e9
    return Link(ends, gigabytes / reduce_s, gigabytes / dispatch_s, wrong)


def _is_wrong(array: jax.Array, expected: float | None) -> bool:
    """Returns True unless the shards here hold the number; None: 0, 1, 2, ..."""
    shards = [np.asarray(shard.data).ravel() for shard in array.addressable_shards]
    wanted = [np.arange(len(s)) if expected is None else np.full(len(s), expected) for s in shards]
    return not all(map(np.array_equal, shards, wanted))


def misfits(found: Sequence[Link]) -> tuple[list[str], list[str]]:
    """Returns the links that do not fit, and lines for the user."""
    if not found:
        return [], []
    problems = [f"{link.ends}: other numbers came than were sent" for link in found if link.wrong]
    lines = []
    for what in ("all_reduce", "dispatch"):
        rates = [getattr(link, what) for link in found]
        median, words = statistics.median(rates), what.replace("_", "-")
        lines.append(
            f"{words} between {len(found)} pairs: {min(rates):.3g} to {max(rates):.3g} GB/s, "
            f"median {median:.3g}"
        )
        problems += [
            f"{link.ends}: {words} at {rate:.3g} GB/s, where the median is {median:.3g}"
            for link, rate in zip(found, rates, strict=True)
            if rate * _SLOWER < median
        ]
    slowest = sorted(found, key=lambda link: link.dispatch)[:_SHOWN]
    lines += [
        f"{link.ends}: all-reduce {link.all_reduce:.3g} GB/s, dispatch {link.dispatch:.3g} GB/s"
        for link in slowest
    ]
    return problems, lines
