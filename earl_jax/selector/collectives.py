# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Predicts the seconds of collectives: rings of GPUs and TPUs, threads of a processor. Pure."""

import math

from earl_jax.selector.hardware import Hardware
from earl_jax.selector.sizes import ModelSizes, Workload
from earl_jax.sharding.layout import MeshShape

# Shares of the memory's and the links' rates: the rule of thumb of "How to Scale Your Model", and
# NCCL's published bus rates (370 of 450 GB/s).
MEMORY_REACHED = 0.8
LINKS_REACHED = 0.8
# Seconds of a collective besides its bytes, and of each step of a ring. GPUs: NCCL's own model of
# its LL protocol (src/graph/tuning.cc), over NVLink and over a network. TPUs: 1 us a step, as "How
# to Scale Your Model" counts. CPUs: each thread of the group, as measured in hardware.py.
START_S = {"gpu": 6.6e-6, "tpu": 1e-6}
STEP_S = {"gpu": 0.6e-6, "tpu": 1e-6, "cpu": 2e-5}
NETWORK_STEP_S = 2.7e-6


def all_reduce_s(hardware: Hardware, num_bytes: float, size: int, stride: int = 1) -> float:
    """Returns the seconds of a ring's all-reduce of `num_bytes` on each of `size` devices.

    `stride` is the distance of its members in the order of devices: the product of the mesh axes
    that are further in. An all-gather or a reduce-scatter takes half of the time.
    """
    if size == 1:
        return 0.0
    if hardware.shared_cores:
        # All groups use the same memory: each device writes its part and reads the sum.
        rate = hardware.shared_cores * hardware.memory_bytes_per_s * MEMORY_REACHED
        return size * STEP_S[hardware.platform] + 2 * num_bytes * hardware.num_devices / rate
    # A group that does not divide its hosts evenly has few members on some of them: six devices on
    # hosts of eight lie together, or as two and four.
    here = math.gcd(size, max(1, hardware.linked // stride))
    rate, hops = hardware.link_bytes_per_s, 2 * (size - 1)
    # Rings of TPUs run both ways at once, so that nothing is further than half a ring ("How to
    # Scale Your Model", Sharded Matrices: latency |X| / 2 hops for an all-gather).
    steps = size if hardware.platform == "tpu" else hops
    step_s = STEP_S[hardware.platform]
    start_s = START_S[hardware.platform] + steps * step_s
    if hardware.platform != "tpu" and here < size:
        # Rings through several hosts use the network of each member that a host has.
        rate = min(rate, here * hardware.network_bytes_per_s)
        between = 2 * (math.ceil(size / here) - 1)
        start_s += between * (NETWORK_STEP_S - step_s)
    return start_s + hops / size * num_bytes / (rate * LINKS_REACHED)


def forward_collectives_s(
    hardware: Hardware, sizes: ModelSizes, mesh: MeshShape, tokens: int, rows: int
) -> float:
    """Returns the seconds of an engine's forward pass: its layers, embedding and logits."""
    # Behind attention and behind each network of a layer.
    groups = mesh.tensor, mesh.tensor * mesh.expert
    num_bytes = tokens * sizes.model.width * sizes.engine_bytes
    layer_s = sum(all_reduce_s(hardware, num_bytes, size) for size in groups)
    seconds = sizes.model.num_layers * layer_s
    seconds += all_reduce_s(hardware, num_bytes, mesh.tensor)
    return seconds + 0.5 * all_reduce_s(hardware, rows * sizes.vocab_size * 4, mesh.tensor)


def rows_collectives_s(
    hardware: Hardware, sizes: ModelSizes, mesh: MeshShape, tokens: int, itemsize: int
) -> float:
    """Returns the seconds of the trainer's layers in a forward pass over a device's `tokens`.

    They are an engine's, except that rows are cut over `expert`: a mixture of experts gathers the
    tokens of all devices of that axis, and scatters its results (models/moe/experts.py).
    """
    num_bytes = tokens * sizes.model.width * itemsize
    layer_s = 2 * all_reduce_s(hardware, num_bytes, mesh.tensor)
    layer_s += all_reduce_s(hardware, mesh.expert * num_bytes, mesh.expert, mesh.tensor)
    return sizes.model.num_layers * layer_s


def keys_s(
    hardware: Hardware, sizes: ModelSizes, mesh: MeshShape, tokens: int, is_cut: bool
) -> float:
    """Returns the seconds of an engine's forward pass over `context`, whose devices share pages.

    Each layer reduces the largest scores, then sums in fp32; where a chunk is cut, it gathers
    queries, keys and values before.
    """
    size, apart = mesh.context, stride(mesh, "context")
    heads, result = sizes.model.num_heads // mesh.tensor, sizes.result_size

    def whole_s(numbers: int, itemsize: int) -> float:
        return all_reduce_s(hardware, tokens * numbers * itemsize, size, apart)

    sums = heads * (result + 1)
    layer_s = whole_s(heads, 4) + (0.5 if is_cut else 1.0) * whole_s(sums, 4)
    if is_cut:
        gathered = heads * (sizes.read_size - result) + sizes.cached_size(mesh.tensor)
        layer_s += 0.5 * whole_s(gathered, sizes.engine_bytes)
    return sizes.model.num_layers * layer_s


def ring_s(
    hardware: Hardware,
    sizes: ModelSizes,
    work: Workload,
    mesh: MeshShape,
    tokens: int,
    backward: bool,
) -> float:
    """Returns the seconds of ring attention: keys and values of `tokens` tokens of each device.

    They go round the `context` axis in a forward pass, and again backward with gradients in fp32.
    """
    model = sizes.model
    numbers = 2 * tokens * mesh.context * model.num_kv_heads // mesh.tensor * model.head_size
    apart = stride(mesh, "context")
    keys_s, sums_s = (
        0.5 * all_reduce_s(hardware, numbers * itemsize, mesh.context, apart)
        for itemsize in (sizes.compute_bytes, 4)
    )
    times = 1 + backward + work.repeats_products
    return model.num_layers * (times * keys_s + backward * sums_s)


def stride(mesh: MeshShape, axis: str) -> int:
    """Returns the distance of the members of a group along this axis, in the order of devices."""
    inner = mesh.expert * mesh.tensor
    return inner * mesh.fsdp * mesh.context if axis == "data" else inner
