# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a plan needs to know of devices that are not here: how many, how much memory, how fast.

Data sheets are those of `sharding.topology.CHIPS`. What is added here, and from where:

- `usable_fraction`: on GPUs JAX takes three quarters of the memory unless XLA_CLIENT_MEM_FRACTION
  says otherwise (docs.jax.dev, "GPU memory allocation"). On TPUs the runtime keeps some hundred MiB
  (out-of-memory errors there speak of 15.75 of v5e's 16 GiB and of 31.25 of v6e's 32).
- `start_s` and `hop_s` of a collective. GPUs: NCCL's own model of a ring in the LL protocol
  (src/graph/tuning.cc): 6.6 us, 0.6 us a step over NVLink, 2.7 over a network. TPUs: 1 us a step,
  as "How to Scale Your Model" (jax-ml.github.io/scaling-book) counts.
- A collective of TPUs over one mesh axis goes along one axis of the torus, with that axis's share
  of the links; NVSwitch gives a GPU all of its links for any of them.
- `host_memory_bytes`: 2 TB for the eight GPUs of NVIDIA's DGX H100, H200 and B200; TPU virtual
  machines by cloud.google.com/tpu/docs/{v5e,v5p,v6e}, for the four chips that one of a larger slice
  has. Hosts with fewer devices have as much less.
"""

import dataclasses
from typing import Literal

from earl_jax.sharding.topology import Topology, make_topology

_GB = 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """Equal devices on equal hosts. Rates are peaks of one device, per second.

    `memory_bytes` is a device's memory, of which programs get `usable_fraction`. Collectives within
    `devices_a_host` (GPUs), or anywhere in the slice (TPUs), go at `link_bytes_per_s`, others at
    `network_bytes_per_s`; each takes `start_s`, and `hop_s` or `network_hop_s` for every step of
    the ring. `host_bytes_per_s` of a device go to its host's memory, in one direction.
    """

    name: str
    chip: str
    platform: Literal["tpu", "gpu", "cpu"]
    num_devices: int
    devices_a_host: int
    memory_bytes: int
    usable_fraction: float
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    start_s: float
    hop_s: float
    network_hop_s: float
    host_bytes_per_s: float
    host_memory_bytes: int

    @property
    def usable_bytes(self) -> int:
        """What programs get of a device's memory."""
        return int(self.memory_bytes * self.usable_fraction)

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return -(-self.num_devices // self.devices_a_host)

    def with_devices(self, num_devices: int) -> "Hardware":
        """So many of the same devices."""
        name = f"{num_devices} x {self.chip}"
        return dataclasses.replace(self, name=name, num_devices=num_devices)


# One of eight virtual devices on two cores, by the order of magnitude: what counts on a laptop is
# which program runs, not how fast. A virtual device has as much memory as the budget gives it.
_CPU = Hardware(
    name="cpu:8",
    chip="cpu",
    platform="cpu",
    num_devices=8,
    devices_a_host=8,
    memory_bytes=2 * 2**30,
    usable_fraction=1.0,
    flops_per_s=1e10,
    memory_bytes_per_s=5e9,
    link_bytes_per_s=2e9,
    network_bytes_per_s=1e8,
    start_s=5e-5,
    hop_s=1e-5,
    network_hop_s=1e-4,
    host_bytes_per_s=2e9,
    host_memory_bytes=16 * _GB,
)

# For each device that it has.
_HOST_MEMORY_BYTES = {
    "v5e": 192 * _GB // 4,
    "v5p": 448 * _GB // 4,
    "v6e": 720 * _GB // 4,
    "h100": 2000 * _GB // 8,
    "h200": 2000 * _GB // 8,
    "b200": 2000 * _GB // 8,
}
_TPU_CHIPS_A_HOST = 4


def parse_topology(name: str) -> Hardware:
    """The hardware of this name: "v5e:16x16", "h100:16x8" (hosts x GPUs of a host), "cpu:8".

    "cpu:2x4" are two hosts of four virtual devices.

    Raises:
        ValueError: an unknown chip (those known are listed), or a grid that cannot be read.
    """
    chip, _, size = name.partition(":")
    if chip == "cpu":
        sizes = size.split("x")
        if len(sizes) > 2 or not all(s.isascii() and s.isdigit() and int(s) > 0 for s in sizes):
            raise ValueError(
                f"topology {name!r}: virtual CPU devices are given by their number, as in 'cpu:8', "
                "or as hosts x devices, as in 'cpu:2x4'"
            )
        hosts, a_host = map(int, ["1", *sizes][-2:])
        return dataclasses.replace(
            _CPU, name=name, num_devices=hosts * a_host, devices_a_host=a_host
        )
    try:
        topology = make_topology(name)
    except ValueError as error:
        raise ValueError(f"--topology: {error}, or 'cpu:8' (virtual devices)") from error
    return hardware_of(topology)


def hardware_of(topology: Topology) -> Hardware:
    """What a plan needs to know of this topology."""
    chip = topology.chip
    gpu = chip.platform == "gpu"
    devices_a_host = topology.grid[-1] if gpu else min(_TPU_CHIPS_A_HOST, topology.num_devices)
    return Hardware(
        name=str(topology),
        chip=chip.name,
        platform=chip.platform,
        num_devices=topology.num_devices,
        devices_a_host=devices_a_host,
        memory_bytes=chip.hbm_bytes,
        usable_fraction=0.75 if gpu else 0.97,
        flops_per_s=chip.bf16_flops_per_s,
        memory_bytes_per_s=chip.hbm_bytes_per_s,
        link_bytes_per_s=chip.link_bytes_per_s / (1 if gpu else chip.axes),
        network_bytes_per_s=chip.network_bytes_per_s,
        start_s=6.6e-6 if gpu else 1e-6,
        hop_s=0.6e-6 if gpu else 1e-6,
        network_hop_s=2.7e-6 if gpu else 1e-6,
        host_bytes_per_s=chip.host_bytes_per_s,
        host_memory_bytes=devices_a_host * _HOST_MEMORY_BYTES[chip.name],
    )
