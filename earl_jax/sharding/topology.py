# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Topologies of absent chips: devices to compile for, and their data sheets.

`make_topology("v5e:4x4")` needs nothing. Its `devices()` loads that platform's compiler, which is
an optional extra; `make_layout` takes them, and what is then lowered from placed shapes compiles:

    jax.config.update("jax_platforms", "cpu")  # first of all: else plugins look for their chips
    layout = make_layout(MeshShape(data=4, tensor=4), make_topology("v5e:4x4").devices())
    Engine(config, layout).lower_play(max_tokens).compile().memory_analysis()

Seen to leave the CPU backend of the same process as it was, on jax 0.10.2 and 0.12.0.
"""

import dataclasses
import importlib.util
import math
import os
from typing import Any, Literal, NamedTuple

import jax
from jax.experimental import topologies

from earl_jax.settings.errors import InputError

# What programs get of a GPU's memory. The rest is CUDA's and NCCL's; JAX's own default is three
# quarters.
GPU_MEMORY_FRACTION = 0.92


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One device of a kind, by its data sheet. Rates are peaks, per second.

    `link_bytes_per_s` leave one device for others of its pod (TPU) or host (GPU), over all of its
    links and in one direction; `network_bytes_per_s` is its share of its host's network, which
    depends on who built the cluster; `host_bytes_per_s` goes over PCIe to its host's memory, in one
    direction.
    """

    name: str
    platform: Literal["tpu", "gpu"]
    axes: int
    example: str
    hbm_bytes: int
    bf16_flops_per_s: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes_per_s: float


_GIB = 2**30

# TPUs: cloud.google.com/tpu/docs/{v5e,v5p,v6e}; link rates there count both directions. GPUs:
# NVIDIA's data sheets of the SXM versions, dense rates, memory as the driver reports it, and a
# 400 Gb/s network card for each GPU. PCIe of TPUs is not in their documents: 16 GB/s, and 32 for
# v6e, are what "How to Scale Your Model" (jax-ml.github.io/scaling-book) counts with.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            platform="tpu",
            axes=2,
            example="v5e:4x4",
            hbm_bytes=16 * _GIB,
            bf16_flops_per_s=197e12,
            hbm_bytes_per_s=819e9,
            link_bytes_per_s=200e9,
            network_bytes_per_s=3.1e9,
            host_bytes_per_s=16e9,
        ),
        Chip(
            name="v5p",
            platform="tpu",
            axes=3,
            example="v5p:4x4x8",
            hbm_bytes=95 * _GIB,
            bf16_flops_per_s=459e12,
            hbm_bytes_per_s=2765e9,
            link_bytes_per_s=600e9,
            network_bytes_per_s=6.25e9,
            host_bytes_per_s=16e9,
        ),
        Chip(
            name="v6e",
            platform="tpu",
            axes=2,
            example="v6e:4x4",
            hbm_bytes=32 * _GIB,
            bf16_flops_per_s=918e12,
            hbm_bytes_per_s=1638e9,
            link_bytes_per_s=400e9,
            network_bytes_per_s=12.5e9,
            host_bytes_per_s=32e9,
        ),
        Chip(
            name="h100",
            platform="gpu",
            axes=2,
            example="h100:16x8",
            hbm_bytes=81_559 * 2**20,
            bf16_flops_per_s=989e12,
            hbm_bytes_per_s=3350e9,
            link_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
            host_bytes_per_s=64e9,
        ),
        Chip(
            name="h200",
            platform="gpu",
            axes=2,
            example="h200:1x8",
            hbm_bytes=143_771 * 2**20,
            bf16_flops_per_s=989e12,
            hbm_bytes_per_s=4800e9,
            link_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
            host_bytes_per_s=64e9,
        ),
        Chip(
            name="h800",
            platform="gpu",
            axes=2,
            example="h800:16x8",
            hbm_bytes=81_559 * 2**20,
            bf16_flops_per_s=989e12,
            hbm_bytes_per_s=3350e9,
            link_bytes_per_s=200e9,
            network_bytes_per_s=50e9,
            host_bytes_per_s=64e9,
        ),
        Chip(
            name="h20",
            platform="gpu",
            axes=2,
            example="h20:16x8",
            hbm_bytes=97_871 * 2**20,
            bf16_flops_per_s=148e12,
            hbm_bytes_per_s=4000e9,
            link_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
            host_bytes_per_s=64e9,
        ),
        Chip(
            name="b200",
            platform="gpu",
            axes=2,
            example="b200:1x8",
            hbm_bytes=183_359 * 2**20,
            bf16_flops_per_s=2250e12,
            hbm_bytes_per_s=8000e9,
            link_bytes_per_s=900e9,
            network_bytes_per_s=50e9,
            host_bytes_per_s=64e9,
        ),
    )
}


# How JAX names the kinds of these chips (`Device.device_kind`) begins so; longer ones first.
_KINDS = (
    ("TPU v5 lite", "v5e"),
    ("TPU v5", "v5p"),
    ("TPU v6", "v6e"),
    ("NVIDIA H100", "h100"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA H20", "h20"),
    ("NVIDIA H800", "h800"),
    ("NVIDIA B200", "b200"),
)


def chip_of(device_kind: str) -> Chip | None:
    """Returns the data sheet of a device that JAX found; None where there is none here."""
    found = (name for start, name in _KINDS if device_kind.startswith(start))
    name = next(found, None)
    return CHIPS[name] if name else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Chips in a grid: a TPU slice along its torus axes, or hosts times GPUs a host."""

    chip: Chip
    grid: tuple[int, ...]

    def __str__(self) -> str:
        """Returns the name that `make_topology` reads."""
        return f"{self.chip.name}:{'x'.join(map(str, self.grid))}"

    @property
    def num_devices(self) -> int:
        """The number of chips."""
        return math.prod(self.grid)

    def part(self, number: int) -> "Topology":
        """Returns a host's `number` chips as a slice of their own.

        The compiler for TPUs takes no program of a part of a slice.

        Example: 4 of a v5e:8x8 are a v5e:2x2, 4 of a v5p:4x4x8 a v5p:2x2x1.
        """
        square = math.isqrt(number)
        width = next(width for width in range(square, 0, -1) if not number % width)
        grid = (width, number // width, 1)[: len(self.grid)]
        return dataclasses.replace(self, grid=grid)

    def devices(self) -> list[Any]:
        """Returns the devices, host by host, for `make_layout`; for compilation only, not arrays.

        Raises:
            ValueError: the compiler is not installed, is of another version than JAX, does not know
                this grid, or was kept out because JAX went for real devices first.
        """
        load = {"tpu": _tpu_devices, "gpu": _gpu_devices}[self.chip.platform]
        try:
            return list(load(self))
        except NotImplementedError as error:
            raise InputError(
                f"topology {self}: JAX looked for a real GPU before and, finding none, gave its "
                "plugin up; call jax.config.update('jax_platforms', 'cpu') first"
            ) from error
        except jax.errors.JaxRuntimeError as error:
            raise InputError(f"topology {self}: its compiler says: {error}") from error


def make_topology(name: str) -> Topology:
    """Returns the topology of a name: "v5e:4x4", "v5p:4x4x8", "h100:16x8" (hosts x GPUs a host).

    Raises:
        ValueError: an unknown chip, or a grid that cannot be read.
    """
    chip = CHIPS.get(name.partition(":")[0])
    if chip is None:
        examples = ", ".join(repr(known.example) for known in CHIPS.values())
        raise InputError(f"topology {name!r} is not known; those known are like {examples}")
    sizes = name.partition(":")[2].split("x")
    right = all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes)
    if len(sizes) != chip.axes or not right:
        raise InputError(
            f"topology {name!r}: a {chip.name} has {chip.axes} sizes behind the colon, of at least "
            f"1, as in {chip.example!r}"
            + (" (hosts x GPUs of a host)" if chip.platform == "gpu" else "")
        )
    return Topology(chip=chip, grid=tuple(int(size) for size in sizes))


def missing_compiler(topology: Topology) -> str | None:
    """Returns which extra `devices()` needs, in words; None where it is installed."""
    module, extra = {
        "tpu": ("libtpu", "tpu-topology"),
        "gpu": ("jax_cuda13_plugin", "gpu-topology"),
    }[topology.chip.platform]
    if importlib.util.find_spec(module):
        return None
    return (
        f"topology {topology} needs a compiler that is not installed; "
        f"`uv sync --extra {extra}` installs it"
    )


def _tpu_devices(topology: Topology) -> Any:
    if missing := missing_compiler(topology):
        raise InputError(missing)
    # Otherwise libtpu queries the cloud's metadata server for the machine type, for minutes.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Else one process of a machine at a time, which protects chips and not compilers.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc(platform="tpu", topology_name=str(topology)).devices


def _gpu_devices(topology: Topology) -> Any:
    if missing := missing_compiler(topology):
        raise InputError(missing)
    hosts, gpus = topology.grid
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology=f"1x{hosts}x{gpus}",  # slices x hosts x GPUs
        target_config=_target(topology.chip),
    ).devices


class _Silicon(NamedTuple):
    """The properties of a GPU that XLA needs beside its memory."""

    capability: int
    cores: int
    clock_ghz: float
    l2_bytes: int


_HOPPER = _Silicon(capability=9, cores=132, clock_ghz=1.98, l2_bytes=52_428_800)
_H20 = _HOPPER._replace(cores=78, l2_bytes=62_914_560)
_BLACKWELL = _Silicon(capability=10, cores=148, clock_ghz=1.965, l2_bytes=132_644_864)


def _target(chip: Chip) -> str:
    """Returns XLA's GpuTargetConfigProto of an SXM module, as text."""
    silicon = {"b200": _BLACKWELL, "h20": _H20}.get(chip.name, _HOPPER)
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {silicon.capability} minor: 0 }}
          core_count: {silicon.cores}
          fpus_per_core: 128
          clock_rate_ghz: {silicon.clock_ghz}
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: 2048
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: 232448
          shared_memory_per_core: 233472
          registers_per_block_limit: 65536
          registers_per_core_limit: 65536
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          l2_cache_size: {silicon.l2_bytes}
          memory_bandwidth: {chip.hbm_bytes_per_s:.0f}
          device_memory_size: {chip.hbm_bytes}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
        device_description_str: "NVIDIA {chip.name.upper()}"
    """
