# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes that a compiled program sends between devices, read from its text.

Counted is what devices receive, as a plan counts it. An all-reduce is taken for a reduce-scatter
and an all-gather, which is the least that one needs. What stands in a loop counts once.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\((.*)"
)
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{(\{.*?\})\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
# By the axes of a mesh: {'a'}, or a part of an axis, {'a':(2)4}, which are 4 of its places.
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\][^{]* \{(.*?)\}")
_AXIS = re.compile(r"'(\w+)'(?:=(\d+)|:\(\d+\)(\d+))?")


class Collective(NamedTuple):
    """One of a program's collectives, and the bytes that all devices together receive by it."""

    kind: str
    received_bytes: int


def collectives(text: str, num_devices: int) -> list[Collective]:
    """All of them in a compiled program's text, which is that of one of its devices."""
    return list(_collectives(text, num_devices))


def _collectives(text: str, num_devices: int) -> Iterator[Collective]:
    for result, kind, start, rest in _COLLECTIVE.findall(text):
        arrays = [_num_bytes(*array) for array in _ARRAY.findall(result) if array[2] or not start]
        if kind == "collective-permute":
            # One that is begun here and done elsewhere gives operands, results and counters.
            size = sum(arrays) // 2 if start else sum(arrays)
            listed = _PAIRS.search(rest)
            pairs = re.findall(r"(\d+),(\d+)", listed[1]) if listed else []
            yield Collective(kind, size * sum(source != target for source, target in pairs))
            continue
        members = _group_size(rest, num_devices)
        size = sum(arrays)
        if start and kind != "all-reduce":
            # Operands and results: of one size, or one side has a part of each member.
            size = size // 2 if kind == "all-to-all" else _of_result(size, kind, members)
        others = {
            "all-gather": size * (members - 1) // members,
            "all-to-all": size * (members - 1) // members,
            "reduce-scatter": size * (members - 1),
            "all-reduce": 2 * size * (members - 1) // members,
        }
        yield Collective(kind, num_devices * others[kind])


def _of_result(size: int, kind: str, members: int) -> int:
    """The part of the results, where those of all members are one operand, or one result."""
    return size * (members if kind == "all-gather" else 1) // (members + 1)


def _num_bytes(letters: str, bits: str, sizes: str) -> int:
    bits = bits or {"pred": "8"}[letters]
    return math.prod(int(size) for size in sizes.split(",") if size) * int(bits) // 8


def _group_size(rest: str, num_devices: int) -> int:
    """Returns the number of devices in each of the collective's groups, which are of one size."""
    if counted := _COUNTED.search(rest):
        return int(counted[1].split(",")[-1])
    if named := _MESH.search(rest):
        sizes = {name: int(size) for name, size, _ in _AXIS.findall(named[1])}
        axes = _AXIS.findall(named[2])
        return math.prod(int(part) if part else sizes[name] for name, _, part in axes)
    if listed := _LISTED.search(rest):
        return listed[1].partition("}")[0].count(",") + 1
    return num_devices
