# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Layouts of a run's meshes over its groups of devices."""

import functools

from earl_jax.launch.cluster import Cluster
from earl_jax.sharding.layout import TRAINING_ROWS, Layout, MeshShape, make_layout


class Layouts:
    """Makes the layout of a mesh shape for each use. The same shape gives the same object."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @functools.cache  # noqa: B019 - lives as long as the run
    def engine(self, shape: MeshShape) -> Layout:
        """Returns this process's part of the rollout's layout: where its engine is."""
        return make_layout(self._cluster.own_mesh(shape), self._cluster.own_devices)

    @functools.cache  # noqa: B019
    def rollout(self, shape: MeshShape) -> Layout:
        """Returns the rollout's layout over all devices that play, of all processes."""
        return make_layout(shape, self._cluster.rollout_devices)

    @functools.cache  # noqa: B019
    def train(self, shape: MeshShape) -> Layout:
        """Returns the trainer's layout over all devices that train."""
        return make_layout(shape, self._cluster.train_devices, row_axes=TRAINING_ROWS)
