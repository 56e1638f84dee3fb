# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes per device of resident arrays, of a rollout and of an update, from shapes alone. Pure.

Resident bytes (weights, moments, pages) are exact. Those of programs are a model of XLA's memory
for `engine/slots.py` and `train/step.py`: the arrays that exist at once when most do.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping

from earl_jax.models.layer_groups import group_layers
from earl_jax.selector.sizes import (
    BLOCK_TOKENS,
    ModelSizes,
    Parameter,
    Workload,
    keeps_attention,
)
from earl_jax.settings.remat import Remat
from earl_jax.sharding.layout import PARAMETER_RULES, ROLLOUT_PARAMETER_RULES, MeshShape

Rules = Mapping[str, tuple[str, ...]]

# Tokens, turns, log-probs and versions: an i32 or f32 for each token of a row.
EXPERIENCE_BYTES = 16
# Tokens of the cache that a chip reads at a time (models/attention/paged_attention.py).
TOKENS_AT_A_TIME = 1024
# Logits of all slots during sampling: as computed, tempered, and their cumulative sums.
LOGIT_COPIES = 3
# The network of the first layers of a mixture.
_DENSE = ("gate", "up", "down")
# Bytes that follow from the mesh alone: a mesh has up to fifty plans.
_once_a_mesh = functools.lru_cache(maxsize=4096)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one device during a stage.

    `trainer` are those of the trainer's state that no program of the stage has as an argument:
    parameters and moments during a rollout, moments of supervised updates during other updates.
    """

    weights: int
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0
    cache: int = 0
    trainer: int = 0

    @functools.cached_property
    def total(self) -> int:
        """Their sum."""
        resident = self.weights + self.optimizer + self.gradients + self.cache + self.trainer
        return resident + self.activations


def parts_of(axes: str, mesh: MeshShape, rules: Rules = PARAMETER_RULES) -> int:
    """Returns the number of parts of a parameter with these axes."""
    # A plan asks this often, and a loop takes half of the time of `math.prod`.
    parts = 1
    for letter in axes:
        for axis in rules.get(letter, ()):
            parts *= getattr(mesh, axis)
    return parts


def device_bytes(
    parameters: Iterable[Parameter], mesh: MeshShape, rules: Rules = PARAMETER_RULES
) -> int:
    """Returns the bytes per device of parameters on this mesh."""
    return sum(
        p.count * p.itemsize * math.prod(p.shape) // parts_of(p.axes, mesh, rules)
        for p in parameters
    )


def engine_bytes(parameters: Iterable[Parameter], mesh: MeshShape) -> int:
    """Returns `device_bytes` in a rollout."""
    return device_bytes(parameters, mesh, ROLLOUT_PARAMETER_RULES)


def cache_token_bytes(sizes: ModelSizes, work: Workload, mesh: MeshShape) -> int:
    """Returns the bytes of a token's keys and values on a device that has them, in all layers.

    Layers of linear attention have none.
    """
    scales = 4 * 2 * (sizes.model.num_kv_heads // mesh.tensor) if work.kv_itemsize == 1 else 0
    return len(sizes.windows) * (sizes.cached_size(mesh.tensor) * work.kv_itemsize + scales)


def state_bytes(sizes: ModelSizes, mesh: MeshShape) -> int:
    """Returns the bytes of a device's part of a slot's states, in all layers that have one."""
    return sizes.state_layers * sizes.slot_bytes // mesh.tensor


@_once_a_mesh
def trainer_bytes(sizes: ModelSizes, mesh: MeshShape) -> tuple[int, int]:
    """Returns the bytes per device of a trainer's parameters, of all kinds, and of moments."""
    trained = device_bytes(sizes.trained + sizes.critic + sizes.average, mesh)
    frozen = device_bytes(sizes.frozen + sizes.reference, mesh)
    return trained + frozen, device_bytes(sizes.moments + sizes.sft_moments, mesh)


def page_bytes(sizes: ModelSizes, work: Workload, mesh: MeshShape) -> int:
    """Returns the bytes of a device's part of a page, which is cut over tensor and context.

    Latents are not cut over tensor. It has the tokens of one group of layers.
    """
    own_size, group = work.page_size // mesh.context, group_layers(sizes.windows).size
    return own_size * cache_token_bytes(sizes, work, mesh) * group // len(sizes.windows)


def rollout_footprint(
    sizes: ModelSizes,
    work: Workload,
    mesh: MeshShape,
    max_tokens: int,
    platform: str,
    chip: str = "",
) -> Footprint:
    """Returns the bytes of a rollout without its KV cache, beside no trainer."""
    rows = work.num_slots // mesh.data
    buffer_rows = work.num_rows * work.batches + work.spare_rows(mesh)
    buffers = buffer_rows // mesh.data * max_tokens * (EXPERIENCE_BYTES + 4 * work.choice_width)
    at_a_time = min(TOKENS_AT_A_TIME, max_tokens // mesh.context)
    blocks = 2 * at_a_time * sizes.cached_size(mesh.tensor)
    logits = LOGIT_COPIES * rows * sizes.vocab_size * 4
    decoding = rows * blocks * sizes.engine_bytes + logits
    tokens = math.prod(work.rows_appended(rows))
    # Scores in fp32 and in the engine's type; they are freed before the layer's second half.
    scores = tokens * sizes.model.num_heads // mesh.tensor * at_a_time * (4 + sizes.engine_bytes)
    own = tokens // mesh.context * sizes.engine_bytes
    inside = own * inside_width(sizes, mesh, mesh.expert)
    heads = sizes.model.num_heads // mesh.tensor
    stream = 6 * sizes.model.width + heads * sizes.read_size
    appending = own * stream + max(scores, inside)
    if mesh.context > 1:
        # Queries of all tokens, and attention's result twice in fp32.
        result = sizes.result_size
        query = sizes.read_size - result
        appending += tokens * heads * (query * sizes.engine_bytes + result * 2 * 4)
    elif sizes.model.latent_size:
        # Results are as large as four heads of queries, and sums of them are in fp32, twice.
        appending += tokens * heads * sizes.result_size * 2 * 4
    beside = 0
    if sizes.state_layers:
        # All states, and one layer's twice while it is written.
        of_slots = rows * state_bytes(sizes, mesh)
        beside = of_slots + of_slots // sizes.state_layers
        appending = max(appending, own * stream + 4 * tokens * sizes.delta_numbers // mesh.tensor)
    if platform == "tpu":
        # The query matrices once more, in the order of axes of the decode loop; on TPU7x all that
        # are multiplied, in larger tiles.
        every = chip == "tpu7x"
        again = (p for p in sizes.engine if p.name != "embed" and len(p.shape) > 1)
        beside += engine_bytes((p for p in again if every or p.name == "query"), mesh)
    return Footprint(
        weights=engine_bytes(sizes.engine, mesh),
        activations=buffers + beside + max(decoding, appending),
    )


def inside_width(sizes: ModelSizes, mesh: MeshShape, experts_cut: int) -> int:
    """Returns the numbers of a token inside the gated network, or a mixture's experts.

    In training a mixture has them on each device of the `expert` axis; else `experts_cut` is it.
    """
    inside = 4 * sizes.ffn_size // mesh.tensor
    if not sizes.model.num_experts:
        return inside
    pairs = sizes.model.experts_per_token * mesh.expert // experts_cut
    return pairs * (6 * sizes.model.width + inside) + 4 * sizes.model.shared_ffn_size // mesh.tensor


# Updates.


def train_footprint(
    sizes: ModelSizes, work: Workload, mesh: MeshShape, length: int, platform: str
) -> Footprint:
    """Returns the bytes of an update on rows of `length` tokens, in the fullest of its phases.

    Always present are the parameters in the compute type, each layer's kept activations, and with
    several micro-batches the sum of gradients in fp32. The phases add: the head's logits and
    gradient; a layer's gathered weights and activations with gradients in the compute type; all
    gradients in fp32.
    """
    weights, _ = trainer_bytes(sizes, mesh)
    numbers, copies, moments, sft_moments = _updated(sizes, mesh)
    rows = work.num_rows // work.micro_batches // (mesh.data * mesh.fsdp * mesh.expert)
    tokens = rows * length // mesh.context
    block = tokens * _block_bytes(sizes, mesh)
    kept = 0 if work.remat == "offload" else kept_bytes(sizes, work, mesh, length)
    summed = numbers * 4 if max(work.micro_batches, work.parts + work.has_stream) > 1 else 0
    apart = numbers * sizes.compute_bytes
    # TPUs gather the embedding, for a loop over micro-batches also in the other order of axes.
    embeddings = (2 if summed else 1) if platform == "tpu" else 0
    head = _head_bytes(sizes, work, mesh, rows, length // mesh.context, embeddings)
    layer = 2 * _layer_bytes(sizes, mesh) + block
    # A loop over micro-batches keeps zeros for the gradient of a matrix of all layers, twice.
    zeros = 2 * _largest_bytes(sizes, mesh) if summed else 0
    phases = [(summed, kept + head + zeros), (summed + apart, kept + layer), (numbers * 4, 0)]
    if platform == "gpu" and summed:
        # Made once, before the loop over micro-batches.
        copies += _transposed_bytes(sizes, mesh)
    if platform == "tpu":
        # Found by comparison with compiled programs: benchmarks/plan.md.
        once_more = {"dots": 0.5, "full": 1.0}.get(work.remat, 0.0) if summed else 0.0
        together = kept + int(once_more * kept) + head + block
        phases = [(summed + apart, together), (numbers * 4, 0)]
    if sizes.reference:
        phases.append((0, _scoring_bytes(sizes, work, mesh, rows, length // mesh.context)))
    gradients, working = max(phases, key=sum)
    return Footprint(
        weights=weights,
        optimizer=moments,
        gradients=gradients,
        activations=copies + working,
        trainer=sft_moments,
    )


@_once_a_mesh
def _updated(sizes: ModelSizes, mesh: MeshShape) -> tuple[int, int, int, int]:
    """Returns the numbers that are updated, and bytes: copies in the compute type, both moments."""
    numbers = device_bytes(sizes.trained + sizes.critic, mesh) // 4
    # A base that is stored in the compute type is read as it is.
    cast = [p._replace(itemsize=1) for p in sizes.frozen if p.itemsize != sizes.compute_bytes]
    copied = numbers + device_bytes(cast, mesh) if sizes.compute_bytes < 4 else 0
    moments = device_bytes(sizes.moments, mesh), device_bytes(sizes.sft_moments, mesh)
    return numbers, copied * sizes.compute_bytes, *moments


@_once_a_mesh
def _block_bytes(sizes: ModelSizes, mesh: MeshShape) -> int:
    """Returns the bytes of a token's activations in a layer of the trainer.

    Its stream is there plain and normalised, with queries and attention's result.
    """
    inside = sizes.compute_bytes * inside_width(sizes, mesh, 1)
    if sizes.state_layers:
        inside = max(inside, 4 * sizes.delta_numbers // mesh.tensor)
    model = sizes.model
    stream = 6 * model.width + 2 * model.num_heads * model.head_size // mesh.tensor
    if model.latent_size:
        stream += 2 * (model.num_heads // mesh.tensor) * model.head_size
    return sizes.compute_bytes * stream + inside


def kept_bytes(sizes: ModelSizes, work: Workload, mesh: MeshShape, length: int) -> int:
    """Returns the bytes that the layers keep of a micro-batch for its backward pass.

    They are on the device, or with remat "offload" in its host's memory.
    """
    rows = work.num_rows // work.micro_batches // (mesh.data * mesh.fsdp * mesh.expert)
    tokens = rows * length // mesh.context * (2 if sizes.critic else 1)
    width = kept_width(sizes, mesh, length, work.remat)
    return tokens * sizes.model.num_layers * sizes.compute_bytes * width


def kept_width(sizes: ModelSizes, mesh: MeshShape, length: int, remat: Remat) -> int:
    """Returns the numbers that a layer keeps of a token for the backward pass.

    They are JAX's residuals, in units of the compute type. Without remat: of a norm its input, and
    its result where a matrix reads it; of a gated network both inputs of its gate, and the result.
    """
    if remat in ("full", "offload"):
        return sizes.model.width
    width = _kept_of_attention(sizes, mesh, length, remat)
    if sizes.state_layers:
        own = (2 if remat == "dots" else 4) * sizes.model.width
        own += sizes.linear_products // mesh.tensor
        if remat == "none":
            own += 4 // sizes.compute_bytes * sizes.delta_numbers // mesh.tensor
        width = len(sizes.windows) * width + sizes.state_layers * own
        width //= sizes.model.num_layers
    # Layers without experts are the first of a mixture.
    dense = sizes.model.num_dense_layers if sizes.model.num_experts else sizes.model.num_layers
    networks = dense * (2 + (remat == "none")) * (sizes.model.ffn_size // mesh.tensor)
    if sizes.model.num_experts:
        networks += (sizes.model.num_layers - dense) * _kept_of_mixture(sizes, mesh, remat)
    return width + networks // sizes.model.num_layers


def _kept_of_attention(sizes: ModelSizes, mesh: MeshShape, length: int, remat: Remat) -> int:
    """Returns what `kept_width` counts before and behind the network."""
    fp32, model = 4 // sizes.compute_bytes, sizes.model
    names = {parameter.name for parameter in sizes.engine}
    heads = model.num_heads * model.head_size // mesh.tensor
    kv_heads = model.num_kv_heads * model.head_size // mesh.tensor
    if remat == "dots":
        # The layer's input, and the products that its gradient needs.
        width = (3 if "post_ffn_norm" in names else 2) * model.width
        width += heads + heads * keeps_attention(mesh, length)
        if model.latent_size:
            both = model.num_heads * (model.head_size - model.rope_size + model.value_size)
            return width + model.query_latent_size + model.cached_size + both // mesh.tensor
        return width + 2 * kv_heads
    # Queries, keys, values, and attention's result.
    width = 2 * (1 + ("ffn_norm" in names)) * model.width + 2 * heads + 2 * kv_heads
    # Attention's weights in fp32 and in the compute type; or a kernel's result.
    weights = (fp32 + 1) * model.num_heads // mesh.tensor * length
    width += weights if length <= BLOCK_TOKENS else heads
    if "post_ffn_norm" in names:
        width += 2 * model.width
    if "query_norm" in names:
        width += heads + kv_heads
    if model.layers_differ:
        # Sines and cosines of each layer, for queries and for keys.
        width += 2 * fp32 * model.head_size
    if model.latent_size:
        # Both sides of the latents' norms; the result is without the zeros behind its values.
        width += 2 * (model.query_latent_size + model.latent_size)
        width -= model.num_heads * (model.head_size - model.value_size) // mesh.tensor
    return width


def _kept_of_mixture(sizes: ModelSizes, mesh: MeshShape, remat: Remat) -> int:
    """Returns what `kept_width` counts of experts, and of a network beside them."""
    fp32, pairs = 4 // sizes.compute_bytes, sizes.model.experts_per_token * mesh.expert
    products = 2 + (remat == "none")
    inside = products * sizes.ffn_size // mesh.tensor
    shared = products * sizes.model.shared_ffn_size // mesh.tensor
    if remat == "dots":
        return pairs * (inside + sizes.model.width) + shared
    # The experts' inputs and results, these in fp32 too, and the routing.
    stream = (2 + fp32) * sizes.model.width + sizes.model.width // sizes.compute_bytes
    # What the shared network reads.
    shared += sizes.model.width if sizes.model.shared_ffn_size else 0
    return pairs * (stream + inside) + shared


def _head_bytes(
    sizes: ModelSizes, work: Workload, mesh: MeshShape, rows: int, length: int, embeddings: int
) -> int:
    """Returns the larger of two phases: a chunk's logits, or the gradient of the head.

    The second has the head gathered and its gradient in fp32, both also as they are cut, and
    `embeddings` in the compute type.
    """
    numbers = sizes.model.width * sizes.vocab_size // mesh.tensor
    matrices, parts = 4 * numbers, parts_of("D", mesh)
    if parts > 1:
        matrices = (sizes.compute_bytes + 4) * (numbers + numbers // parts)
    head = numbers * sizes.compute_bytes
    logits = rows * min(work.logprob_chunk, length) * sizes.vocab_size // mesh.tensor * 4
    return max(3 * logits + 2 * head, logits + matrices + embeddings * head)


def _scoring_bytes(
    sizes: ModelSizes, work: Workload, mesh: MeshShape, rows: int, length: int
) -> int:
    """Returns the bytes of a pass of the reference, which may be a larger teacher."""
    network = sizes.teacher or sizes
    layers = (p for p in sizes.reference if p.axes[0] == "L")
    layer = sum(device_bytes([p], mesh) // p.shape[0] for p in layers)
    head = network.vocab_size * network.model.width // mesh.tensor * network.compute_bytes
    logits = rows * min(work.logprob_chunk, length) * network.vocab_size // mesh.tensor * 4
    gathered = 2 * layer * parts_of("D", mesh) + head
    return gathered + 3 * logits + rows * length * _block_bytes(network, mesh)


@_once_a_mesh
def _layer_bytes(sizes: ModelSizes, mesh: MeshShape) -> int:
    """Returns the bytes of a layer's matrices, gathered, in the compute type."""
    layers = [p._replace(itemsize=1) for p in (*sizes.trained, *sizes.frozen) if p.axes[0] == "L"]
    # A dense layer of a mixture is the smaller one.
    smaller = _DENSE if sizes.model.num_dense_layers else ()
    numbers = sum(device_bytes([p], mesh) // p.shape[0] for p in layers if p.name not in smaller)
    return numbers * parts_of("D", mesh) * sizes.compute_bytes


@_once_a_mesh
def _largest_bytes(sizes: ModelSizes, mesh: MeshShape) -> int:
    """Returns the bytes of the largest matrix of all layers, in the compute type."""
    layers = [p for p in sizes.trained if p.axes[0] == "L"]
    return max(device_bytes([p], mesh) for p in layers) * sizes.compute_bytes // 4


@_once_a_mesh
def _transposed_bytes(sizes: ModelSizes, mesh: MeshShape) -> int:
    """Returns the bytes of parameters that XLA for GPUs keeps in a second order of axes."""
    names = ("down", "out", "embed", "expert_gate", "expert_up", "expert_down")
    return device_bytes([p for p in sizes.trained if p.name in names], mesh)
