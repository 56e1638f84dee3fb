# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The costs of a step, gathered from all processes."""

import dataclasses

from earl_jax.launch.cluster import Cluster
from earl_jax.telemetry.metrics import Metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """A step's speeds in tokens/s, seconds of training and bytes through the host.

    Speeds are None where there is none, and bytes where they cannot be counted. `updates` are the
    metrics of its updates. A process that does not train has none, and 0 seconds.
    """

    updates: list[Metrics]
    rollout_speed: float | None
    train_speed: float | None
    train_s: float
    dispatch_host_bytes: int | None
    publish_host_bytes: int | None

    def gather(self, cluster: Cluster) -> "StepCosts":
        """Returns the step's costs of all processes: those of the slowest, by which all choose.

        Bytes are the sums over the processes; None where some process cannot count them.
        """
        each = cluster.gather(dataclasses.asdict(self), "the end of a step")
        by_name = {field.name: [own[field.name] for own in each] for field in _FIELDS}
        known = {name: list(filter(None, values)) for name, values in by_name.items()}
        return StepCosts(
            updates=known["updates"][0],
            rollout_speed=min(known["rollout_speed"], default=None),
            train_speed=min(known["train_speed"], default=None),
            train_s=max(by_name["train_s"]),
            dispatch_host_bytes=_sum(by_name["dispatch_host_bytes"]),
            publish_host_bytes=_sum(by_name["publish_host_bytes"]),
        )


_FIELDS = dataclasses.fields(StepCosts)


def _sum(each: list[int | None]) -> int | None:
    return None if None in each else sum(filter(None, each))
