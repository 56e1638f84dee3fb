# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Clusters of processes that are not there."""

import dataclasses
import json
import threading
from typing import Any

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


class Meeting:
    """Lets two threads gather as two processes do."""

    def __init__(self) -> None:
        self._values, self._barrier = [None, None], threading.Barrier(2, timeout=20)

    def gather(self, index: int, value: Any) -> list[Any]:
        self._values[index] = json.loads(json.dumps(value))
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


@dataclasses.dataclass
class OneOfTwo:
    """A process of two, which are threads here, as far as what they gather."""

    index: int
    meeting: Meeting
    count: int = 2
    hosts: tuple[str, ...] = ("a", "b")

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def gather(self, value: Any, what: str) -> list[Any]:
        return self.meeting.gather(self.index, value)
