# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Layouts of a run's meshes over its groups of devices."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from earl_jax.launch.cluster import Cluster
from earl_jax.sharding.axes import MESH_AXES
from earl_jax.sharding.layout import TRAINING_ROWS, Layout, MeshShape, make_layout


class Layouts:
    """Makes the layout of a mesh shape for each use. The same shape gives the same object."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @functools.cache  # noqa: B019 - lives as long as the run
    def engine(self, shape: MeshShape) -> Layout:
        """Returns this process's part of the rollout's layout: where its engine is."""
        return make_layout(self._cluster.own_mesh(shape), self._cluster.devices_of(shape))

    @functools.cache  # noqa: B019
    def rollout(self, shape: MeshShape) -> Layout:
        """Returns the rollout's layout over all devices that play, of all processes."""
        return make_layout(shape, self._cluster.playing(shape.num_devices))

    @functools.cache  # noqa: B019
    def train(self, shape: MeshShape) -> Layout:
        """Returns the trainer's layout over all devices that train."""
        devices = self._cluster.training(shape.num_devices)
        return make_layout(shape, devices, row_axes=TRAINING_ROWS)


def axes_across_hosts(grid: Any, hosts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the axes of a mesh whose neighbours are on different hosts, and those inside a host.

    Args:
        grid: the devices of the mesh, [data, fsdp, context, expert, tensor].
        hosts: the name of each process's host, by the number of the process.

    Example: 2 hosts of 8 devices as data=2,fsdp=2,tensor=4: ["data"], ["fsdp", "tensor"].
    """
    numbers = np.vectorize(lambda device: hosts.index(hosts[device.process_index]))(grid)
    named = [(axis, n) for n, axis in enumerate(MESH_AXES) if numbers.shape[n] > 1]
    across = [axis for axis, n in named if np.any(np.diff(numbers, axis=n))]
    return across, [axis for axis, _ in named if axis not in across]


def across_in_words(layout: Layout, hosts: Sequence[str]) -> str:
    """Returns which axes of a mesh cross hosts, such as "data=2,tensor=4: data crosses hosts"."""
    across, _ = axes_across_hosts(layout.mesh.devices, hosts)
    if not across:
        return f"{layout}: inside a host"
    return f"{layout}: {', '.join(across)} {'cross' if len(across) > 1 else 'crosses'} hosts"
