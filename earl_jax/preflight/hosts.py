# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Facts of each process: devices, memory, versions, clock and speed; and those that do not fit."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.launch.agreement import versions_here
from earl_jax.launch.cluster import Cluster
from earl_jax.launch.start import host_memory_bytes
from earl_jax.preflight.rates import best_seconds

# A clock that is further from the first host's is a misfit; so is memory that is smaller than the
# largest by more than this share, and a device that is so many times slower than the fastest.
CLOCK_S, MEMORY_SHARE, SLOWER = 10.0, 0.05, 5.0
_SIZE = {"cpu": 512}
_SIZE_OF_CHIPS = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of one process; bytes are of its smallest device, 0 where none are reported."""

    devices: str
    device_bytes: int
    host_bytes: int
    versions: dict[str, str]

    def __str__(self) -> str:
        device = f" of {self.device_bytes / 2**30:.1f} GiB" if self.device_bytes else ""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.devices}{device}, host memory {self.host_bytes / 2**30:.1f} GiB, {versions}, "
            f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC"
        )


def facts_here() -> Facts:
    """Returns the facts of this process."""
    devices = jax.local_devices()
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in devices]
    return Facts(
        devices=f"{len(devices)} x {devices[0].device_kind}",
        device_bytes=int(min(limits)),
        host_bytes=host_memory_bytes(),
        versions=versions_here(),
    )


def matmul_flops_per_s() -> float:
    """Returns the rate of a matrix product on the first device of this process."""
    device = jax.local_devices()[0]
    size = _SIZE.get(device.platform, _SIZE_OF_CHIPS)
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    matrix = jnp.ones((size, size), dtype, device=device)
    return 2 * size**3 / best_seconds(jax.jit(jnp.matmul), matrix, matrix)


def misfits(cluster: Cluster, facts: Facts) -> tuple[list[str], list[str]]:
    """Returns what does not fit the other hosts, and lines for the user; every process calls it."""
    cluster.barrier("the clocks")
    here: dict[str, Any] = {"clock_s": time.time(), "flops_per_s": matmul_flops_per_s()}
    each = cluster.gather(here | {"device_bytes": facts.device_bytes}, "the facts of the hosts")
    names = [f"process {n} on {host}" for n, host in enumerate(cluster.hosts)]
    most = max(one["device_bytes"] for one in each)
    fastest = max(one["flops_per_s"] for one in each)
    found = []
    for name, one in zip(names, each, strict=True):
        ahead_s = one["clock_s"] - each[0]["clock_s"]
        if abs(ahead_s) > CLOCK_S:
            found.append(f"{name}: its clock is {ahead_s:+.0f} s from that of process 0; set it")
        if one["device_bytes"] < (1 - MEMORY_SHARE) * most:
            found.append(
                f"{name}: {one['device_bytes'] / 2**30:.1f} GiB a device, where others have "
                f"{most / 2**30:.1f}; another program may use it"
            )
        if one["flops_per_s"] * SLOWER < fastest:
            found.append(
                f"{name}: {one['flops_per_s'] / 1e12:.3g} TFLOP/s a device, where the fastest has "
                f"{fastest / 1e12:.3g}; all others would wait for it"
            )
    slowest = min(one["flops_per_s"] for one in each)
    rates = f"{slowest / 1e12:.3g} to {fastest / 1e12:.3g} TFLOP/s in a matrix product"
    return found, [f"speed of a device: {rates}"]
