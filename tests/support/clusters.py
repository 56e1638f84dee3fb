# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Clusters of processes that are not there."""

import dataclasses

from earl_jax.launch.cluster import Cluster


@dataclasses.dataclass(frozen=True)
class Device:
    """As far as a Cluster looks at it."""

    id: int
    process_index: int


def cluster_of(index: int, num_rollout: int = 0, count: int = 3) -> Cluster:
    """Returns a process of `count` with two devices each, the first of which play; 0: all do."""
    devices = tuple(Device(id=n, process_index=n // 2) for n in range(2 * count))
    return Cluster(
        index=index,
        count=count,
        rollout_devices=devices[:num_rollout] if num_rollout else devices,
        train_devices=devices[num_rollout:],
        timeout_s=1.0,
    )
