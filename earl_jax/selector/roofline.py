# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Predicts the seconds of a stage from bytes and operations, without the hardware. Pure.

A device computes while it reads its weights, so that of the two the longer counts (a roofline;
Williams et al., CACM 2009). Element-wise loops, the optimizer, the least time of an operation and
collectives that nothing hides are added. No constant is fitted to a speed that benchmarks/speeds.md
compares with.
"""

import dataclasses
import math

from earl_jax.selector.collectives import (
    MEMORY_REACHED,
    all_reduce_s,
    forward_collectives_s,
    keys_s,
    ring_s,
    rows_collectives_s,
    stride,
)
from earl_jax.selector.footprint import (
    TOKENS_AT_A_TIME,
    cache_token_bytes,
    device_bytes,
    engine_bytes,
    state_bytes,
)
from earl_jax.selector.hardware import Hardware
from earl_jax.selector.sizes import ModelSizes, Workload
from earl_jax.sharding.layout import MeshShape

MODEL_ERROR = 1.5
"""The factor by which a predicted speed of chips may be wrong, either way (benchmarks/speeds.md).

Nearly all are predicted too fast, so that of two meshes on the same hardware less is to be
expected. Virtual CPU devices are not covered: there the order of meshes is right, and speeds are up
to three times too high.
"""

# The share of the peak that large products reach: "How to Scale Your Model".
MATMUL_REACHED = 0.6
# A backward pass is two products for each of the forward pass; full remat computes that once more.
BACKWARD_PASSES = 2
# Fused attention keeps no scores: backward it computes them again, five products for two forward
# (FlashAttention-2, arXiv 2307.08691, section 4: 2.5 times).
ATTENTION_BACKWARD = 2.5
# A score that goes through memory is written and read in fp32, then in the compute type (bf16).
SCORE_BYTES = 12
# Pages that are gathered are read, written, and read again.
GATHER_PASSES = 3
# Logits in fp32: written and read, both once more backward, their gradient written, and read for
# the gradients of the head and of the hidden states.
LOGIT_PASSES = 7
# Of these in a pass that is not differentiated: written and read.
SCORED_LOGIT_PASSES = 2
# Kernels of a layer's forward pass, by the page that `hardware.GPU_OP_S` is from: 100 in 16 layers.
OPS_A_LAYER = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of an engine's pass or of an update on one device, by kind.

    `memory_s` are reads of weights and of the cache, beside products and attention; `elementwise_s`
    norms, gates, rotary embeddings and logits; `beside_s` collectives that outlast the layers they
    run beside, `collectives_s` those that nothing runs beside.
    """

    products_s: float
    attention_s: float
    memory_s: float
    collectives_s: float
    latency_s: float
    beside_s: float = 0.0
    elementwise_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of all parts; reads run beside products and attention."""
        layers_s = max(self.products_s + self.attention_s, self.memory_s)
        others_s = self.beside_s + self.collectives_s + self.latency_s
        return layers_s + self.elementwise_s + self.optimizer_s + others_s


def decode_s(
    hardware: Hardware,
    sizes: ModelSizes,
    work: Workload,
    mesh: MeshShape,
    rows: int,
    context: int,
    tokens: int = 1,
    attended: int | None = None,
) -> Seconds:
    """Returns the seconds of an engine's forward pass over `tokens` tokens of each of `rows` rows.

    `attended` of the rows (by default all) have `context` tokens behind them, which are all read;
    so are all weights, of a mixture's experts those that some token goes to. Over `context` the
    cache is cut, and the tokens of a chunk.
    """
    kernels, attended = hardware.kernels, rows if attended is None else attended
    in_place = reads_in_place(hardware, work, mesh)
    number = rows * tokens
    is_cut = tokens > 1 and tokens % mesh.context == 0
    own = number // mesh.context if is_cut else number
    flops = own * _layer_flops(sizes, mesh, experts_cut=mesh.expert)
    # A pass of several tokens a row only appends them.
    flops += (tokens == 1) * rows * 2 * sizes.model.width * sizes.vocab_size / mesh.tensor
    attention = _attention_flops(sizes, context, sizes.read_size)
    attention *= attended * tokens / (mesh.tensor * mesh.context)
    read = attended * cache_read(sizes, work, mesh, context)
    read *= kernels.int8_bytes if work.kv_itemsize == 1 else 1.0
    if not in_place:
        read = GATHER_PASSES * read + SCORE_BYTES * attention / (2 * sizes.read_size)
    read += weights_read(sizes, mesh, own, kernels.int8_bytes)
    share = hardware.share(mesh.num_devices)
    peak, rate = hardware.flops_per_s * share, hardware.memory_bytes_per_s * share
    blocks = 0 if in_place else math.ceil(context / (TOKENS_AT_A_TIME * mesh.context))
    return Seconds(
        products_s=flops / (peak * MATMUL_REACHED),
        attention_s=attention / (peak * kernels.attention_forward),
        memory_s=read / (rate * MEMORY_REACHED),
        collectives_s=forward_collectives_s(hardware, sizes, mesh, own, rows)
        + keys_s(hardware, sizes, mesh, number, is_cut),
        latency_s=sizes.model.num_layers * OPS_A_LAYER * kernels.op_s / share
        + loop_syncs(sizes, blocks) * kernels.loop_sync_s,
    )


def loop_syncs(sizes: ModelSizes, blocks: int) -> int:
    """Counts the loop conditions that the host reads in a pass over so many blocks of pages.

    Counted in the program for Qwen2.5 7B on an H100: 449 with 4 blocks, 2,801 with 32. A kernel
    that reads pages in place has no blocks.
    """
    return (sizes.model.num_layers * (3 * blocks + 4) if blocks else 0) + 1


def reads_in_place(hardware: Hardware, work: Workload, mesh: MeshShape) -> bool:
    """Returns True if an engine reads pages where they are; else it gathers those of all slots."""
    return hardware.kernels.reads_in_place or mesh.context in work.in_place_contexts


def token_s(
    hardware: Hardware, sizes: ModelSizes, work: Workload, mesh: MeshShape, rows: int, context: int
) -> float:
    """Returns the seconds in which each of `rows` live slots of a row shard samples a token.

    What is appended for it (`Workload.appended`) takes a share of the passes for a chunk of each.
    """
    in_place, slots = reads_in_place(hardware, work, mesh), rows
    if hardware.kernels.fixed_rows:
        slots = max(rows, work.num_slots // mesh.data)
    together, tokens = work.rows_appended(slots)
    used, live = (min(rows, together), rows) if in_place else (together, slots)
    append = decode_s(hardware, sizes, work, mesh, together, context, tokens, used)
    passes = math.ceil(rows / together) * work.appended / tokens
    step = decode_s(hardware, sizes, work, mesh, slots, context, attended=live)
    return passes * append.total + step.total


def train_parts(
    hardware: Hardware,
    sizes: ModelSizes,
    work: Workload,
    mesh: MeshShape,
    length: int,
    recomputed: float | None = None,
    *,
    backward: bool = True,
) -> Seconds:
    """Returns the seconds of one update on rows of `length` tokens, by parts.

    `recomputed` is the share of a layer's products and element-wise loops that is computed again
    backward, by default what the remat policy says. What is gathered and scattered over `fsdp`,
    `context` and `data` runs beside layers, and counts where it is longer than they are; what
    `tensor` and `expert` add up always counts. Not `backward`: a forward pass with log-probs alone.
    """
    repeated = work.remat != "none" if recomputed is None else recomputed
    recomputed = work.repeats_products if recomputed is None else recomputed
    tokens = work.num_rows * length // (mesh.data * mesh.fsdp * mesh.expert * mesh.context)
    each = tokens // work.micro_batches
    back = BACKWARD_PASSES if backward else 0
    # A frozen matrix has no gradient of its own.
    passes = 1 + back - (backward and len(sizes.frozen) > 0) + recomputed
    # A critic's layers are those of a second policy.
    networks = 2 if sizes.critic else 1
    flops = networks * tokens * passes * _layer_flops(sizes, mesh, experts_cut=1)
    # The logits of a chunk are recomputed in the backward pass, with remat or without.
    heads = passes - recomputed + backward
    flops += tokens * heads * 2 * sizes.model.width * sizes.vocab_size / mesh.tensor
    kernels, share = hardware.kernels, hardware.share(mesh.num_devices)
    peak = hardware.flops_per_s * share
    rate = hardware.memory_bytes_per_s * MEMORY_REACHED * share
    products_s = flops / (peak * MATMUL_REACHED)
    attended = networks * tokens * _attention_flops(sizes, length / 2, 2 * sizes.model.head_size)
    attended /= mesh.tensor
    forward = 1 + work.repeats_attention(mesh, length)
    attention_s = forward * attended / (peak * kernels.attention_forward)
    attention_s += backward * ATTENTION_BACKWARD * attended / (peak * kernels.attention_backward)
    loops = networks * tokens * (1 + back + repeated) * _elementwise_bytes(sizes, mesh)
    logits = LOGIT_PASSES if backward else SCORED_LOGIT_PASSES
    loops += tokens * logits * 4 * sizes.vocab_size / mesh.tensor
    # A pass reads the layers, gathered, in the compute type; the optimiser reads gradients,
    # parameters and moments, and writes the last two; an average is read and written.
    copies = _gathered_bytes(sizes, mesh)
    parts, state = networks * work.micro_batches, device_bytes(sizes.trained + sizes.critic, mesh)
    weights = parts * passes * copies
    gathered = parts * _gathers_s(hardware, sizes, work, mesh, backward)
    ring = parts * ring_s(hardware, sizes, work, mesh, each, backward)
    crossing = (1 + back / 2 + work.repeats_products) * parts
    crossing *= rows_collectives_s(hardware, sizes, mesh, each, sizes.compute_bytes)
    beside = max(0.0, gathered - products_s - attention_s) + max(0.0, ring - attention_s)
    if hardware.shared_cores:
        # Nothing runs beside them: the same cores move the bytes.
        beside = gathered + ring
    if work.remat == "offload":
        # Beside the layer on the way to the host; on the way back the layer waits for its input.
        inputs = networks * tokens * sizes.model.num_layers * sizes.model.width
        copy_s = inputs * sizes.compute_bytes / hardware.host_bytes_per_s
        beside += max(0.0, copy_s - (products_s + attention_s) / passes)
        crossing += copy_s
    ops = parts * (1 + back + repeated) * OPS_A_LAYER * sizes.model.num_layers
    updated = 3 * state + 2 * device_bytes(sizes.moments + sizes.average, mesh)
    return Seconds(
        products_s=products_s,
        attention_s=attention_s,
        elementwise_s=loops / rate,
        optimizer_s=backward * updated / rate,
        memory_s=weights / rate,
        beside_s=beside,
        collectives_s=crossing,
        latency_s=ops * kernels.op_s / share,
    )


def scoring_s(
    hardware: Hardware, sizes: ModelSizes, work: Workload, mesh: MeshShape, length: int
) -> float:
    """Returns the seconds of the passes before a step's first update."""
    if not work.scored:
        return 0.0
    networks = {
        "proximal": sizes,
        "reference": sizes.teacher or sizes,
        # A critic has a single number for logits.
        "values": dataclasses.replace(sizes, vocab_size=1),
    }
    scored = [networks[field] for field in work.scored if field in networks]
    work = dataclasses.replace(work, remat="none")
    return sum(
        train_parts(
            hardware, dataclasses.replace(each, critic=()), work, mesh, length, backward=False
        ).total
        for each in scored
    )


def _elementwise_bytes(sizes: ModelSizes, mesh: MeshShape) -> float:
    """Returns the bytes of a token that fused element-wise loops move in a pass over all layers.

    Two norms with the residual sums before them (each reads two streams and writes two), rotary
    embeddings (queries and keys, there and back), and the gate (reads two arrays, writes one).
    """
    heads = 2 * (sizes.model.num_heads + sizes.model.num_kv_heads) * sizes.model.head_size
    dense = sizes.model.num_dense_layers / sizes.model.num_layers
    networks = sizes.ffn_size * sizes.model.experts_per_token + sizes.model.shared_ffn_size
    gate = 3 * ((1 - dense) * networks + dense * sizes.model.ffn_size)
    numbers = 8 * sizes.model.width + (heads + gate) / mesh.tensor
    return sizes.model.num_layers * sizes.compute_bytes * numbers


def _gathered_bytes(sizes: ModelSizes, mesh: MeshShape) -> float:
    """Returns the bytes of the gathered layers in the compute type."""
    parts = mesh.fsdp * mesh.context
    whole = device_bytes(sizes.trained + sizes.frozen, mesh) * parts
    return whole * sizes.compute_bytes / 4


def _gathers_s(
    hardware: Hardware, sizes: ModelSizes, work: Workload, mesh: MeshShape, backward: bool
) -> float:
    """Returns the seconds of a micro-batch's gathers of weights and sums of gradients.

    Layers are gathered one by one, so that each waits for its own ring.
    """
    state, parts = device_bytes(sizes.trained, mesh), mesh.fsdp * mesh.context
    copies, apart = _gathered_bytes(sizes, mesh), stride(mesh, "context")
    layers = sizes.model.num_layers

    def gathered_s(num_bytes: float) -> float:
        return layers * 0.5 * all_reduce_s(hardware, num_bytes / layers, parts, apart)

    sums_s = gathered_s(state * parts)
    sums_s += all_reduce_s(hardware, state, mesh.data, stride(mesh, "data"))
    return (1 + work.repeats_products) * gathered_s(copies) + backward * sums_s


def weights_read(sizes: ModelSizes, mesh: MeshShape, tokens: int, int8_bytes: float = 1.0) -> float:
    """Returns the bytes of weights that a device reads for so many tokens of a row shard.

    Those of int8 count `int8_bytes` each.
    """
    share = sizes.model.experts_per_token / max(1, sizes.model.num_experts)
    touched = 1.0 - (1.0 - share) ** tokens
    read, has_head = 0.0, any(parameter.name == "head" for parameter in sizes.engine)
    for parameter in sizes.engine:
        if parameter.name == "embed" and has_head:
            continue
        times = touched if "E" in parameter.axes else 1.0
        times *= int8_bytes if parameter.itemsize == 1 else 1.0
        read += engine_bytes([parameter], mesh) * times
    return read


def cache_read(sizes: ModelSizes, work: Workload, mesh: MeshShape, context: int) -> float:
    """Returns the bytes of the cache that a device reads for a token; states both ways."""
    seen = sum(min(context, window or context) for window in sizes.windows) / len(sizes.windows)
    read = cache_token_bytes(sizes, work, mesh) * seen / mesh.context
    return read + 2 * state_bytes(sizes, mesh)


def _layer_flops(sizes: ModelSizes, mesh: MeshShape, experts_cut: int) -> float:
    """Returns the operations of a token in all layers' projections and networks, on a device.

    Projections to latents are not cut over `tensor`. The states of linear attention do not count:
    a few percent of its projections.
    """
    model = sizes.model
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_size
    projections, whole = model.width * heads, 0
    if model.latent_size:
        inputs = model.query_latent_size or model.width
        up = model.latent_size * (model.head_size - model.rope_size + model.value_size)
        out = model.value_size * model.width
        projections = model.num_heads * (inputs * model.head_size + up + out)
        whole = model.width * (model.cached_size + model.query_latent_size)
    dense, shared = model.num_dense_layers, model.shared_ffn_size
    networks = sizes.ffn_size * model.experts_per_token / experts_cut + shared
    networks = (model.num_layers - dense) * networks + dense * model.ffn_size
    attending = len(sizes.windows)
    if sizes.state_layers:
        projections += model.width * model.num_heads * model.head_size  # the gates of heads
        out = model.linear_value_heads * model.linear_value_size
        linear = model.width * (sizes.linear_products + out)
        projections = (attending * projections + sizes.state_layers * linear) / attending
    of_layers = attending * (projections / mesh.tensor + whole)
    return 2.0 * (of_layers + 3 * model.width * networks / mesh.tensor)


def _attention_flops(sizes: ModelSizes, context: float, size: int) -> float:
    """Returns the operations of a token that attends to so many, over all layers.

    `size` are the numbers of a head's key and value.
    """
    seen = sum(min(context, window or context) for window in sizes.windows)
    return 2.0 * sizes.model.num_heads * size * seen
