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
    """One device of a kind as JAX has it, by its data sheet. Rates are peaks, per second.

    `link_bytes_per_s` leave one device for others of its pod (TPU) or host (GPU), over all of its
    links and in one direction; `network_bytes_per_s` is its share of its host's network, which
    depends on who built the cluster; `host_bytes_per_s` goes to its host's memory, in one
    direction. A chip of the grid has `devices` of them. `linked_devices` GPUs are joined by links,
    over hosts too; 0: those of a host.
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
    devices: int = 1
    linked_devices: int = 0


def _tpu(
    example: str,
    hbm_gib: int,
    *,
    tflops: float,
    hbm_gb: float,
    link_gb: float,
    network_gb: float,
    host_gb: float,
    devices: int = 1,
) -> Chip:
    """Returns a TPU by its chip's numbers, of which each device has its part. GB/s."""
    name, _, grid = example.partition(":")
    return Chip(
        name=name,
        platform="tpu",
        axes=len(grid.split("x")),
        example=example,
        hbm_bytes=hbm_gib * 2**30 // devices,
        bf16_flops_per_s=tflops * 1e12 / devices,
        hbm_bytes_per_s=hbm_gb * 1e9 / devices,
        link_bytes_per_s=link_gb * 1e9 / devices,
        network_bytes_per_s=network_gb * 1e9 / devices,
        host_bytes_per_s=host_gb * 1e9 / devices,
        devices=devices,
    )


def _gpu(
    example: str,
    hbm_mib: int,
    *,
    tflops: float,
    hbm_gb: float,
    link_gb: float,
    network_gb: float = 50,
    host_gb: float = 64,
    linked_devices: int = 0,
) -> Chip:
    """Returns a GPU. GB/s."""
    return Chip(
        name=example.partition(":")[0],
        platform="gpu",
        axes=2,
        example=example,
        hbm_bytes=hbm_mib * 2**20,
        bf16_flops_per_s=tflops * 1e12,
        hbm_bytes_per_s=hbm_gb * 1e9,
        link_bytes_per_s=link_gb * 1e9,
        network_bytes_per_s=network_gb * 1e9,
        host_bytes_per_s=host_gb * 1e9,
        linked_devices=linked_devices,
    )


# TPUs: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; link rates there count both directions.
# PCIe of TPUs is not in their documents: 16 GB/s, and 32 for v6e, are what "How to Scale Your
# Model" (jax-ml.github.io/scaling-book) counts with; v4's network and TPU7x's PCIe are taken to be
# those of the chips beside them. A chip of TPU7x is two devices of JAX, and the link between them,
# which is faster than those to other chips, counts as one of these.
# GPUs: NVIDIA's data sheets of the SXM versions, dense rates, memory as the driver reports it, and
# a 400 Gb/s network card for each GPU (A100: 200, B300 and GB300: 800). GB200 and GB300 are racks
# of 18 hosts with four GPUs each, which NVLink joins; NVLink-C2C goes to their hosts' memory.
_RACK = {"host_gb": 225, "linked_devices": 72}
CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v4:4x4x4", 32, tflops=275, hbm_gb=1200, link_gb=300, network_gb=3.1, host_gb=16),
        _tpu("v5e:4x4", 16, tflops=197, hbm_gb=819, link_gb=200, network_gb=3.1, host_gb=16),
        _tpu("v5p:4x4x8", 95, tflops=459, hbm_gb=2765, link_gb=600, network_gb=6.25, host_gb=16),
        _tpu("v6e:4x4", 32, tflops=918, hbm_gb=1638, link_gb=400, network_gb=12.5, host_gb=32),
        _tpu(
            "tpu7x:2x4x4",
            192,
            tflops=2307,
            hbm_gb=7380,
            link_gb=600,
            network_gb=12.5,
            host_gb=32,
            devices=2,
        ),
        _gpu("a100:16x8", 81_920, tflops=312, hbm_gb=2039, link_gb=300, network_gb=25, host_gb=32),
        _gpu("h100:16x8", 81_559, tflops=989, hbm_gb=3350, link_gb=450),
        _gpu("h200:1x8", 143_771, tflops=989, hbm_gb=4800, link_gb=450),
        _gpu("h800:16x8", 81_559, tflops=989, hbm_gb=3350, link_gb=200),
        _gpu("h20:16x8", 97_871, tflops=148, hbm_gb=4000, link_gb=450),
        _gpu("b200:1x8", 183_359, tflops=2250, hbm_gb=8000, link_gb=900),
        _gpu("b300:1x8", 275_040, tflops=2250, hbm_gb=8000, link_gb=900, network_gb=100),
        _gpu("gb200:18x4", 189_471, tflops=2500, hbm_gb=8000, link_gb=900, **_RACK),
        _gpu(
            "gb300:18x4",
            284_208,
            tflops=2500,
            hbm_gb=8000,
            link_gb=900,
            network_gb=100,
            **_RACK,
        ),
    )
}


# How JAX names the kinds of these chips (`Device.device_kind`) begins so; longer ones first.
_KINDS = (
    ("TPU v4", "v4"),
    ("TPU v5 lite", "v5e"),
    ("TPU v5", "v5p"),
    ("TPU v6", "v6e"),
    ("TPU7x", "tpu7x"),
    *((f"NVIDIA {name.upper()}", name) for name, chip in CHIPS.items() if chip.platform == "gpu"),
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
        """The number of devices."""
        return math.prod(self.grid) * self.chip.devices

    def part(self, number: int) -> "Topology":
        """Returns a host's `number` devices as a slice of their own.

        The compiler for TPUs takes no program of a part of a slice.

        Example: 4 of a v5e:8x8 are a v5e:2x2, 4 of a v5p:4x4x8 a v5p:2x2x1.
        """
        number = -(-number // self.chip.devices)
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
    chip = CHIPS.get(name.partition(":")[0].lower())
    if chip is None:
        examples = ", ".join(repr(known.example) for known in CHIPS.values())
        raise InputError(f"topology {name!r} is not known; those known are like {examples}")
    sizes = name.partition(":")[2].split("x")
    right = all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes)
    if len(sizes) != chip.axes or not right:
        what = " (hosts x GPUs of a host)" if chip.platform == "gpu" else ""
        raise InputError(
            f"topology {name!r}: {chip.name} has {chip.axes} sizes behind the colon, of at least "
            f"1, as in {chip.example!r}{what}"
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
    # Two cores of a v4 are one device, as on the chip.
    options = {"chip_config_name": "megacore"} if topology.chip.name == "v4" else {}
    name = str(topology)
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices


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

    capability: tuple[int, int]
    cores: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int = 232_448


_AMPERE = _Silicon((8, 0), 108, 1.41, 41_943_040, 166_912)
_HOPPER = _Silicon((9, 0), 132, 1.98, 52_428_800)
_H20 = _HOPPER._replace(cores=78, l2_bytes=62_914_560)
_BLACKWELL = _Silicon((10, 0), 148, 1.965, 132_644_864)
_BLACKWELL_ULTRA = _BLACKWELL._replace(capability=(10, 3))
_SILICON = {
    "a100": _AMPERE,
    "h20": _H20,
    "b200": _BLACKWELL,
    "gb200": _BLACKWELL,
    "b300": _BLACKWELL_ULTRA,
    "gb300": _BLACKWELL_ULTRA,
}


def _target(chip: Chip) -> str:
    """Returns XLA's GpuTargetConfigProto of an SXM module, as text."""
    silicon = _SILICON.get(chip.name, _HOPPER)
    major, minor = silicon.capability
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {silicon.cores}
          fpus_per_core: 128
          clock_rate_ghz: {silicon.clock_ghz}
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: 2048
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: {silicon.shared_bytes}
          shared_memory_per_core: {silicon.shared_bytes + 1024}
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
