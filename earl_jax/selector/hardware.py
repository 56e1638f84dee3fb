# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Hardware for the byte and speed models: numbers of devices, memory, rates.

Data sheets are those of `sharding.topology.CHIPS`. Sources of the other numbers:

- `usable_bytes`: on GPUs JAX takes what XLA_CLIENT_MEM_FRACTION says (docs.jax.dev, "GPU memory
  allocation"), which `launch.start` sets. On TPUs the runtime keeps some hundred MiB
  (out-of-memory errors there speak of 15.75 of v5e's 16 GiB and of 31.25 of v6e's 32).
- A collective of TPUs over one mesh axis goes along one axis of the torus, with that axis's share
  of the links; NVSwitch gives a GPU all of its links for any of them.
- `host_memory_bytes`: 2 TB for the eight GPUs of NVIDIA's DGX A100 to B300, 480 GB for the two of a
  Grace processor; TPU virtual machines by cloud.google.com/tpu/docs, for the four chips of one in a
  larger slice (v4: 407 GB).
"""

import dataclasses
from typing import Literal

from earl_jax.settings.errors import InputError
from earl_jax.sharding.topology import GPU_MEMORY_FRACTION, Topology, make_topology

_GB = 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """The efficiency of programs: this engine's, or a published one's.

    `attention_forward` and `attention_backward` are the fractions of the peak that fused attention
    over rows reaches. The other fields are departures from the ideal:

    - `reads_in_place`: decode and prefill read the cache where it is. Without it, except on the
      meshes of `Workload.in_place_contexts`, pages are gathered, as many for each row as for the
      longest: read, written, and read again; scores go through memory.
    - `fixed_rows`: a decode step computes a row for each slot, and an append as many rows as it can
      take, however few are live.
    - `loop_sync_s`: time in which the host reads the condition of a loop.
    - `op_s`: the least time of an operation on the device.
    - `int8_bytes`: a number of int8, of weights or of the cache, is read in the time of so many
      bytes.
    """

    attention_forward: float
    attention_backward: float
    reads_in_place: bool = True
    fixed_rows: bool = False
    loop_sync_s: float = 0.0
    op_s: float = 0.0
    int8_bytes: float = 1.0


# Any fused kernel of a published engine: cuDNN's by the FlashAttention-3 paper (arXiv 2407.08608,
# figures 5 and 6), H100 SXM5, heads of 128, rows of 16K. Forward, causal: 539 of 989 TFLOP/s.
# Backward, published without a mask: 516; a mask costs what it does forward (539 of 595).
IDEAL = Kernels(attention_forward=0.54, attention_backward=0.47)

# This project's programs on chips. Fused kernels of whole rows are taken to be as good as cuDNN's;
# tokamax's reached 0.30 and 0.25 of an H100's peak with heads of 64 (benchmarks/chip.md). Where no
# kernel of ours reads pages in place, attention gathers a block of 1,024 tokens of all rows at a
# time: for Qwen2.5 7B on an H100, 128 rows of 4K, the compiled program moves 3.25 bytes for each
# byte of the cache, the model here 3.2; on a v5e it moves 4 without the scores (16 rows of 4K, jax
# 0.10.2), and a kernel 1.
_ON_CHIPS = dataclasses.replace(IDEAL, reads_in_place=False, fixed_rows=True)
# XLA's while thunk on GPUs copies a condition to the host and waits: 10 us by order of magnitude.
_LOOP_SYNC_S = 1e-5
# The least time of a kernel on a GPU: about 100 kernels for a token of Llama 3.2 1B take 1.5 times
# as long as a single one, 0.95 ms ("Look Ma, No Bubbles!", Hazy Research, 2025-05).
GPU_OP_S = 5e-6
# On an H100 a step with int8 weights and cache took 15.7 ms where bf16 took 18.0, with half of the
# bytes (benchmarks/chip.md): the factor is that measurement.
_ON_GPUS = dataclasses.replace(_ON_CHIPS, loop_sync_s=_LOOP_SYNC_S, op_s=GPU_OP_S, int8_bytes=1.75)
# Blocks stay in a core's cache, so that attention costs its operations, at the rate of products.
_ON_CPU = Kernels(attention_forward=0.6, attention_backward=0.6, fixed_rows=True, op_s=5e-6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """Equal devices on equal hosts. Rates are peaks of one device, per second.

    Programs get `usable_bytes` of a device's `memory_bytes`. Collectives within `linked` (GPUs), or
    anywhere in the slice (TPUs), go at `link_bytes_per_s`, others at `network_bytes_per_s`.
    `host_bytes_per_s` go to the host's memory, in one direction.

    Where `shared_cores` is not 0, all devices are threads on so many cores of one processor, and
    rates are those of a core.
    """

    name: str
    chip: str
    platform: Literal["tpu", "gpu", "cpu"]
    num_devices: int
    devices_a_host: int
    memory_bytes: int
    usable_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes_per_s: float
    host_memory_bytes: int
    kernels: Kernels
    shared_cores: int = 0
    linked_devices: int = 0

    @property
    def linked(self) -> int:
        """The number of GPUs that links join: those of a host, or of a rack."""
        return max(self.linked_devices, self.devices_a_host)

    def share(self, busy: int) -> float:
        """Returns the share of its rates that a device has while `busy` devices work."""
        return min(1.0, self.shared_cores / busy) if self.shared_cores else 1.0

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return -(-self.num_devices // self.devices_a_host)

    def with_devices(self, num_devices: int) -> "Hardware":
        """Returns the hardware with so many of the same devices."""
        name = f"{num_devices} x {self.chip}"
        return dataclasses.replace(self, name=name, num_devices=num_devices)


# Virtual devices on two cores, by the order of magnitude. Two cores of an x86-64 server (2026-11,
# jax 0.10.2): products 53 to 150 GFLOP/s on both, a psum of 4 KB over 2, 4 and 8 devices 40, 62 and
# 172 us, and one of 4 MB on each of 8 devices 18 GB/s.
_CPU = Hardware(
    name="cpu:8",
    chip="cpu",
    platform="cpu",
    num_devices=8,
    devices_a_host=8,
    memory_bytes=2 * 2**30,
    usable_bytes=2 * 2**30,
    flops_per_s=5e10,
    memory_bytes_per_s=1e10,
    link_bytes_per_s=2e9,
    network_bytes_per_s=1e8,
    host_bytes_per_s=2e9,
    host_memory_bytes=16 * _GB,
    kernels=_ON_CPU,
    shared_cores=2,
)

# Of a host, for each device that it has; 2 TB for eight GPUs that are not here.
_HOST_MEMORY_BYTES = {
    "v4": 407 * _GB // 4,
    "v5e": 192 * _GB // 4,
    "v5p": 448 * _GB // 4,
    "v6e": 720 * _GB // 4,
    "tpu7x": 960 * 2**30 // 8,
    "gb200": 240 * _GB,
    "gb300": 240 * _GB,
}
_GPU_HOST_MEMORY_BYTES = 2000 * _GB // 8
_TPU_CHIPS_A_HOST = 4


def parse_topology(name: str) -> Hardware:
    """Returns the hardware of a name: "v5e:16x16", "h100:16x8" (hosts x GPUs), "cpu:8".

    "cpu:2x4" are two hosts of four virtual devices.

    Raises:
        ValueError: an unknown chip (those known are listed), or a grid that cannot be read.
    """
    chip, _, size = name.partition(":")
    if chip == "cpu":
        sizes = size.split("x")
        if len(sizes) > 2 or not all(s.isascii() and s.isdigit() and int(s) > 0 for s in sizes):
            raise InputError(
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
        raise InputError(f"--topology: {error}, or 'cpu:8' (virtual devices)") from error
    return hardware_of(topology)


def hardware_of(topology: Topology) -> Hardware:
    """Returns the hardware of this topology."""
    chip = topology.chip
    gpu = chip.platform == "gpu"
    most = _TPU_CHIPS_A_HOST * chip.devices
    devices_a_host = topology.grid[-1] if gpu else min(most, topology.num_devices)
    return Hardware(
        name=str(topology),
        chip=chip.name,
        platform=chip.platform,
        num_devices=topology.num_devices,
        devices_a_host=devices_a_host,
        memory_bytes=chip.hbm_bytes,
        usable_bytes=int(chip.hbm_bytes * (GPU_MEMORY_FRACTION if gpu else 0.97)),
        flops_per_s=chip.bf16_flops_per_s,
        memory_bytes_per_s=chip.hbm_bytes_per_s,
        link_bytes_per_s=chip.link_bytes_per_s / (1 if gpu else chip.axes),
        network_bytes_per_s=chip.network_bytes_per_s,
        host_bytes_per_s=chip.host_bytes_per_s,
        host_memory_bytes=devices_a_host
        * _HOST_MEMORY_BYTES.get(chip.name, _GPU_HOST_MEMORY_BYTES),
        kernels=_ON_GPUS if gpu else _ON_CHIPS,
        linked_devices=chip.linked_devices,
    )
