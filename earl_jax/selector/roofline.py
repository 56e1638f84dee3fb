# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Predicted seconds of a stage on hardware that is not here, from bytes and operations. Pure.

A device computes while it reads, so that of the two the longer counts (a roofline; Williams et al.,
CACM 2009); collectives are added, because in decoding nothing runs beside them, and in training no
more than half of them does. Peaks are those of the data sheets; programs reach the fractions below.
Where a throughput table has measurements of the same hardware, `calibration` gives one factor for a
stage, and nothing else is fitted.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable

from earl_jax.selector.footprint import (
    ModelSizes,
    Workload,
    cache_token_bytes,
    device_bytes,
    engine_bytes,
)
from earl_jax.selector.hardware import Hardware
from earl_jax.sharding.layout import MeshShape

# What large products reach of the peak, and streaming of the memory's and the links' rates: the
# rule of thumb of "How to Scale Your Model" and of NCCL's published bus rates (370 of 450 GB/s).
MATMUL_REACHED = 0.6
MEMORY_REACHED = 0.8
LINKS_REACHED = 0.8
# A backward pass is two products for each of the forward pass; remat computes that once more.
BACKWARD_PASSES = 2
# How far a computed speed may be off.
MODEL_ERROR = 1.5


def all_reduce_s(hardware: Hardware, num_bytes: float, size: int, stride: int = 1) -> float:
    """Seconds of adding up `num_bytes` that each device of a group of `size` has, in a ring.

    `stride` is how far apart its members are in the order of devices: that of the mesh axes that
    are further in. An all-gather or a reduce-scatter is half of it.
    """
    if size == 1:
        return 0.0
    here = max(1, min(size, hardware.devices_a_host // stride))
    rate, hops = hardware.link_bytes_per_s, 2 * (size - 1)
    start_s = hardware.start_s + hops * hardware.hop_s
    if hardware.platform != "tpu" and here < size:
        # Rings through several hosts use the network of each member that a host has.
        rate = min(rate, here * hardware.network_bytes_per_s)
        between = 2 * (math.ceil(size / here) - 1)
        start_s += between * (hardware.network_hop_s - hardware.hop_s)
    return start_s + hops / size * num_bytes / (rate * LINKS_REACHED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of one device: operations, memory, collectives; `total` is what they come to together."""

    compute_s: float
    memory_s: float
    collectives_s: float

    @property
    def total(self) -> float:
        """The longer of the first two, and the third."""
        return max(self.compute_s, self.memory_s) + self.collectives_s


def decode_s(
    hardware: Hardware,
    sizes: ModelSizes,
    work: Workload,
    mesh: MeshShape,
    rows: int,
    context: int,
    tokens: int = 1,
) -> Seconds:
    """One forward pass of the engine over `tokens` tokens of each of `rows` rows of a row shard.

    Each row has `context` tokens behind it, which are all read; so are all weights, of a mixture's
    experts those that some token goes to. Two all-reduces a layer add up what heads and
    feed-forward networks are cut into. Over `context` the cache is cut, and the tokens of a chunk.
    """
    number = rows * tokens
    is_cut = tokens > 1 and tokens % mesh.context == 0
    own = number // mesh.context if is_cut else number
    flops = own * sum(_layer_flops(sizes, mesh, experts_cut=mesh.expert))
    flops += number * _attention_flops(sizes, context) / (mesh.tensor * mesh.context)
    # Sampled from behind the last token only.
    flops += rows * 2 * sizes.width * sizes.vocab_size / mesh.tensor
    read = weights_read(sizes, mesh, own)
    read += rows * cache_read(sizes, work, mesh, context)
    return Seconds(
        compute_s=flops / (hardware.flops_per_s * MATMUL_REACHED),
        memory_s=read / (hardware.memory_bytes_per_s * MEMORY_REACHED),
        collectives_s=_forward_collectives_s(hardware, sizes, mesh, own, rows)
        + keys_s(hardware, sizes, mesh, number, is_cut),
    )


def round_s(
    hardware: Hardware, sizes: ModelSizes, work: Workload, mesh: MeshShape, rows: int, context: int
) -> float:
    """A round of the engine, `rows` busy slots a row shard: a chunk appended, a burst sampled.

    Where there are more of these than rows of a decode step, they take turns.
    """
    together = min(rows, work.append_rows)
    passes = math.ceil(rows / together)
    append = decode_s(hardware, sizes, work, mesh, together, context, work.chunk_size)
    speaking = work.rows_a_step(mesh, rows)
    step = decode_s(hardware, sizes, work, mesh, speaking, context)
    return passes * append.total + work.burst * math.ceil(rows / speaking) * step.total


def rollout_tokens_per_s(
    hardware: Hardware,
    sizes: ModelSizes,
    work: Workload,
    mesh: MeshShape,
    context: int,
    rows_that_fit: int,
) -> float:
    """Tokens that all slots say in a second, at the end of their room.

    Where the cache holds fewer rows of a row shard than it has slots, the others wait: the slots
    take turns in waves, of which the last may be small.
    """
    rows = work.num_slots // mesh.data
    seconds = sum(
        round_s(hardware, sizes, work, mesh, wave, context) for wave in waves(rows, rows_that_fit)
    )
    return work.num_slots * work.burst / seconds


def alone_tokens_per_s(
    hardware: Hardware, sizes: ModelSizes, work: Workload, mesh: MeshShape, context: int
) -> float:
    """Tokens that one slot says in a second while the others are idle, as above."""
    return work.burst / round_s(hardware, sizes, work, mesh, 1, context)


def waves(rows: int, rows_that_fit: int) -> list[int]:
    """How many rows run at a time: 16 rows of which 7 fit run as 7, 7 and 2."""
    full, rest = divmod(rows, rows_that_fit)
    return [rows_that_fit] * full + [rest] * (rest > 0)


def train_s(
    hardware: Hardware, sizes: ModelSizes, work: Workload, mesh: MeshShape, length: int
) -> Seconds:
    """One update on rows of `length` tokens.

    What is gathered and scattered over `fsdp`, `context` and `data` runs beside the layers before
    and behind, so that it counts where it is longer than they are, and so do keys and values that
    go round beside attention; what `tensor` and `expert` add up does not.
    """
    shards = mesh.data * mesh.fsdp * mesh.expert * mesh.context
    tokens = work.num_rows * length // shards
    passes = 1 + BACKWARD_PASSES + work.remat
    attention = tokens * passes * _attention_flops(sizes, length / 2) / mesh.tensor
    flops = attention + tokens * (
        passes * sum(_layer_flops(sizes, mesh, experts_cut=1))
        # The logits of a chunk are recomputed in the backward pass, with remat or without.
        + (2 + BACKWARD_PASSES) * 2 * sizes.width * sizes.vocab_size / mesh.tensor
    )
    state = device_bytes(sizes.trained, mesh)
    parts = mesh.fsdp * mesh.context
    layers = device_bytes(sizes.trained + sizes.frozen, mesh) * parts
    # A pass reads the layers, gathered, in the compute type; the optimiser reads gradients,
    # parameters and two moments, and writes the last three.
    copies = layers * sizes.compute_bytes / 4
    read = work.micro_batches * passes * copies + 7 * state
    gathered = work.micro_batches * (
        (1 + work.remat) * 0.5 * all_reduce_s(hardware, copies, parts, _stride(mesh, "context"))
        + 0.5 * all_reduce_s(hardware, state * parts, parts, _stride(mesh, "context"))
        + all_reduce_s(hardware, state, mesh.data, _stride(mesh, "data"))
    )
    reached = hardware.flops_per_s * MATMUL_REACHED
    ring = work.micro_batches * ring_s(hardware, sizes, work, mesh, tokens // work.micro_batches)
    beside = max(0.0, gathered - flops / reached) + max(0.0, ring - attention / reached)
    crossing = (1 + BACKWARD_PASSES / 2 + work.remat) * work.micro_batches
    crossing *= _layers_collectives_s(hardware, sizes, mesh, tokens // work.micro_batches)
    return Seconds(
        compute_s=flops / reached,
        memory_s=read / (hardware.memory_bytes_per_s * MEMORY_REACHED),
        collectives_s=beside + crossing,
    )


def weights_read(sizes: ModelSizes, mesh: MeshShape, tokens: int) -> float:
    """Bytes of weights that a device reads for so many tokens of a row shard."""
    share = sizes.experts_per_token / sizes.num_experts if sizes.num_experts else 1.0
    touched = 1.0 - (1.0 - share) ** tokens if sizes.num_experts else 1.0
    read = 0.0
    for parameter in sizes.engine:
        if parameter.name == "embed" and not sizes.is_tied:
            continue
        read += engine_bytes([parameter], mesh) * (touched if "E" in parameter.axes else 1.0)
    return read


def cache_read(sizes: ModelSizes, work: Workload, mesh: MeshShape, context: int) -> float:
    """Bytes of the cache that a device reads for a token behind so many."""
    seen = sum(min(context, window or context) for window in sizes.windows) / sizes.num_layers
    return cache_token_bytes(sizes, work, mesh) * seen / mesh.context


def calibration(pairs: Iterable[tuple[float, float]]) -> float:
    """What predicted speeds are to be multiplied by: the median of measured / predicted.

    1 where nothing was measured. A pair is (measured, predicted).
    """
    return statistics.median([measured / predicted for measured, predicted in pairs] or [1.0])


def _layer_flops(sizes: ModelSizes, mesh: MeshShape, experts_cut: int) -> tuple[float, float]:
    """Of one token through all layers' projections and feed-forward networks, on one device."""
    heads = (2 * sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_size
    networks = 3 * sizes.width * sizes.ffn_size * (sizes.experts_per_token or 1)
    per_layer = 2.0 * sizes.num_layers / mesh.tensor
    return per_layer * sizes.width * heads, per_layer * networks / experts_cut


def _attention_flops(sizes: ModelSizes, context: float) -> float:
    """Of one token that looks at so many, over all layers."""
    seen = sum(min(context, window or context) for window in sizes.windows)
    return 4.0 * sizes.num_heads * sizes.head_size * seen


def _forward_collectives_s(
    hardware: Hardware, sizes: ModelSizes, mesh: MeshShape, tokens: int, rows: int
) -> float:
    seconds = _layers_collectives_s(hardware, sizes, mesh, tokens, sizes.engine_bytes)
    embedded = tokens * sizes.width * sizes.engine_bytes
    seconds += all_reduce_s(hardware, embedded, mesh.tensor)
    return seconds + 0.5 * all_reduce_s(hardware, rows * sizes.vocab_size * 4, mesh.tensor)


def _layers_collectives_s(
    hardware: Hardware,
    sizes: ModelSizes,
    mesh: MeshShape,
    tokens: int,
    itemsize: int | None = None,
) -> float:
    """Of one forward pass: behind attention over `tensor`, behind the network over its parts."""
    num_bytes = tokens * sizes.width * (itemsize or sizes.compute_bytes)
    network = mesh.tensor * mesh.expert
    return sizes.num_layers * (
        all_reduce_s(hardware, num_bytes, mesh.tensor) + all_reduce_s(hardware, num_bytes, network)
    )


def keys_s(
    hardware: Hardware, sizes: ModelSizes, mesh: MeshShape, tokens: int, is_cut: bool
) -> float:
    """Of a forward pass of the engine over `context`, where `tokens` look at all parts of pages.

    In each layer their largest scores, and then sums in fp32, are added up; where a chunk is cut,
    queries, keys and values are gathered before, and the sums scattered.
    """
    size, stride = mesh.context, _stride(mesh, "context")
    heads, kv_heads = sizes.num_heads // mesh.tensor, sizes.num_kv_heads // mesh.tensor

    def whole_s(numbers: int, itemsize: int) -> float:
        return all_reduce_s(hardware, tokens * numbers * itemsize, size, stride)

    sums = heads * (sizes.head_size + 1)
    layer_s = whole_s(heads, 4) + (0.5 if is_cut else 1.0) * whole_s(sums, 4)
    if is_cut:
        gathered = (heads + 2 * kv_heads) * sizes.head_size
        layer_s += 0.5 * whole_s(gathered, sizes.engine_bytes)
    return sizes.num_layers * layer_s


def ring_s(
    hardware: Hardware, sizes: ModelSizes, work: Workload, mesh: MeshShape, tokens: int
) -> float:
    """Of keys and values that go round the `context` axis, `tokens` of each device.

    Once in a forward pass, and in the backward pass again, with gradients in fp32.
    """
    numbers = 2 * tokens * mesh.context * sizes.num_kv_heads // mesh.tensor * sizes.head_size
    rounds = ((2 + work.remat), sizes.compute_bytes), (1, 4)
    return sizes.num_layers * sum(
        times
        * 0.5
        * all_reduce_s(hardware, numbers * itemsize, mesh.context, _stride(mesh, "context"))
        for times, itemsize in rounds
    )


def _stride(mesh: MeshShape, axis: str) -> int:
    """How far apart the members of a group along this axis, or along all inside it, are."""
    inner = mesh.expert * mesh.tensor
    return inner * mesh.fsdp * mesh.context if axis == "data" else inner
