# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Collectives in the text of compiled programs."""

import re

import numpy as np

COLLECTIVE = re.compile(
    r"= .*\b(?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|"
    r"collective-broadcast|send|recv)(?:-start)?\("
)


def replica_groups(line: str) -> set[tuple[int, ...]]:
    """Groups of device numbers, in any of the three ways in which XLA writes them.

    {{0,1},{2,3}}, or [2,2]<=[4] with an optional T(1,0), or mesh['a'=2,'b'=2] {'b'}.
    """
    if listed := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", line):
        groups = re.findall(r"\{([\d, ]+)\}", listed[1])
        return {tuple(int(number) for number in group.split(",")) for group in groups}
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = dict(axis.split("=") for axis in named[1].split(","))
        within = named[2].split(",")
        order = [i for i, axis in enumerate(sizes) if axis not in within]
        order += [list(sizes).index(axis) for axis in within]
        grid = np.arange(8).reshape([int(size) for size in sizes.values()]).transpose(order)
        groups = grid.reshape(-1, np.prod([int(sizes[axis]) for axis in within]))
        return {tuple(group) for group in groups.tolist()}
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    assert iota, line
    shape, source = ([int(n) for n in text.split(",")] for text in iota.groups()[:2])
    grid = np.arange(8).reshape(source)
    if iota[3]:
        grid = grid.transpose([int(n) for n in iota[3].split(",")])
    return {tuple(group) for group in grid.reshape(shape).tolist()}
