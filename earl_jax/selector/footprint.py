# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes per device of a stage, by kind, from shapes alone. Pure.

Resident bytes (weights, moments, pages) follow from shapes and placement, and are exact. Those of a
program are a model of XLA's memory for `train/step.py` and `engine/slots.py`: the arrays that exist
at once when most do.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from earl_jax.models.layer_groups import group_layers
from earl_jax.settings.remat import Remat
from earl_jax.sharding.layout import PARAMETER_RULES, ROLLOUT_PARAMETER_RULES, MeshShape

# The network of the first layers of a mixture.
_DENSE = ("gate", "up", "down")

Rules = Mapping[str, tuple[str, ...]]

# Tokens, turns, log-probs and versions: an i32 or f32 for each token of a row.
EXPERIENCE_BYTES = 16
# Tokens of the cache that a chip reads at a time (models/attention/paged_attention.py).
TOKENS_AT_A_TIME = 1024
# Logits of all slots during sampling: as computed, tempered, and their cumulative sums.
LOGIT_COPIES = 3
# Rows of so many tokens are attended to in one piece (models/attention/rows.py).
BLOCK_TOKENS = 128
# Tokens of a chunk of linear attention in training (models/attention/delta_rule.py).
DELTA_CHUNK = 64


class Parameter(NamedTuple):
    """Equal arrays of a model: a letter of the legend per axis, bytes of a number, how many."""

    name: str
    shape: tuple[int, ...]
    axes: str
    itemsize: int
    count: int = 1


class LatentSizes(NamedTuple):
    """The sizes of latent attention, as ModelConfig has them; `query` 0: queries have no latent."""

    latent: int
    query: int
    rope: int
    value: int

    @property
    def row(self) -> int:
        """The numbers of a token and layer in the cache, which all heads read."""
        return self.latent + self.rope


class StateSizes(NamedTuple):
    """The sizes of linear attention, as ModelConfig has them, and the number of its layers."""

    layers: int
    key_heads: int
    value_heads: int
    key: int
    value: int
    conv: int

    @property
    def products(self) -> int:
        """The numbers of a token that a layer projects: queries, keys, values, gates, two more."""
        values = self.value_heads * self.value
        return 2 * (self.key_heads * self.key + values + self.value_heads)

    @property
    def in_chunks(self) -> int:
        """The numbers in fp32 of a token in its chunk of the delta rule (delta_rule.py).

        Coarsely: its pairs with CHUNK tokens in four forms, keys, queries and values in three each.
        """
        return self.value_heads * (4 * DELTA_CHUNK + 3 * (2 * self.key + self.value))

    def slot_bytes(self, compute_bytes: int) -> int:
        """Returns the bytes of a slot in a layer: its state in fp32, and inputs of convolutions."""
        inputs = 2 * self.key_heads * self.key + self.value_heads * self.value
        matrix = 4 * self.value_heads * self.key * self.value
        return matrix + (self.conv - 1) * inputs * compute_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a decoder.

    `engine` are the rollout's parameters, `trained` those of the policy that are updated (fp32),
    `moments` the arrays of all optimizers, `sft_moments` those of the supervised updates of a warm
    start while it lasts, `frozen` the base of adapters, `reference` a frozen copy of the policy or
    a teacher, `critic` a value network that is updated too, `average` the moving average of
    `trained` (both fp32). `teacher` are the sizes of a reference that is another model.
    `ffn_size` is that of one expert where `num_experts` is not 0; of a mixture `shared_ffn_size` is
    that of its shared network, and the first `num_dense_layers` have one of `dense_ffn_size`.
    `windows` has a number for each layer that has pages, 0 for full attention; those of linear
    attention have `states` instead. Where `layers_differ`, each layer
    has its own rotation (`ModelConfig.layers_differ`). `compute_bytes` are those of a
    number in the trainer's products, `engine_bytes` in the engine's and its cache.
    """

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    num_experts: int
    experts_per_token: int
    vocab_size: int
    windows: tuple[int, ...]
    compute_bytes: int
    engine_bytes: int
    engine: tuple[Parameter, ...]
    trained: tuple[Parameter, ...]
    moments: tuple[Parameter, ...]
    sft_moments: tuple[Parameter, ...] = ()
    frozen: tuple[Parameter, ...] = ()
    reference: tuple[Parameter, ...] = ()
    critic: tuple[Parameter, ...] = ()
    average: tuple[Parameter, ...] = ()
    teacher: "ModelSizes | None" = None
    layers_differ: bool = False
    latents: LatentSizes | None = None
    states: StateSizes | None = None
    num_dense_layers: int = 0
    dense_ffn_size: int = 0
    shared_ffn_size: int = 0

    @property
    def is_tied(self) -> bool:
        """True if the embedding is the head too."""
        return not any(parameter.name == "head" for parameter in self.engine)

    @property
    def has_sinks(self) -> bool:
        """True if attention has sinks, which kernels over whole rows have not."""
        return any(parameter.name == "sinks" for parameter in self.engine)

    @property
    def read_size(self) -> int:
        """The numbers of a query and of a result of one head over cached tokens."""
        return self.latents.row + self.latents.latent if self.latents else 2 * self.head_size

    def cached_size(self, tensor: int) -> int:
        """The numbers of a token and layer in the cache of a device, of so many that cut heads."""
        if self.latents:
            return self.latents.row
        return 2 * (self.num_kv_heads // tensor) * self.head_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of a step; fields are those of the same names in the config.

    Chunks are appended in passes of up to `append_tokens` tokens; an episode has `appended` tokens
    of prompts and answers for each that it samples.
    `num_rows` are the episodes of a step, of which each of `num_players` processes plays a part;
    those of `batches` steps have rows at once. They come to the trainer in `parts`, and a
    supervised batch with them if there `has_stream`. Before the first update a forward pass
    computes each field of `scored` (`algorithms.requirements.scored_passes`).
    `kv_itemsize` 1 is a cache of int8, with a scale of 4 bytes for each token and head. On meshes
    whose `context` axis is among `in_place_contexts` a kernel reads pages where they are. Rows are
    cut for `row_devices` (`Cluster.num_row_devices`), 0: those of the mesh. A round samples up to
    `sampled_tokens` of an episode, in `burst` forward passes.
    """

    num_slots: int
    num_rows: int
    micro_batches: int
    remat: Remat
    logprob_chunk: int
    chunk_size: int
    append_tokens: int
    appended: float
    page_size: int
    kv_itemsize: int
    epochs: int = 1
    num_players: int = 1
    batches: int = 1
    parts: int = 1
    has_stream: bool = False
    scored: tuple[str, ...] = ()
    in_place_contexts: tuple[int, ...] = ()
    row_devices: int = 0
    burst: int = 16
    sampled_tokens: int = 16

    @property
    def num_batches(self) -> int:
        """The batches of an update: that of the episodes, and a supervised one as large."""
        return 1 + self.has_stream

    @property
    def repeats_products(self) -> bool:
        """True if projections are computed again in the backward pass."""
        return self.remat in ("full", "offload")

    @property
    def repeats_loops(self) -> bool:
        """True if element-wise loops are computed again in the backward pass."""
        return self.remat != "none"

    def repeats_attention(self, mesh: MeshShape, length: int, platform: str) -> bool:
        """True if attention's forward pass is computed again in the backward pass."""
        kept = self.remat == "dots" and keeps_attention(mesh, length, platform)
        return self.remat != "none" and not kept

    def rows_appended(self, rows: int) -> tuple[int, int]:
        """Returns how many of a row shard's slots a pass appends to, and how many tokens to each.

        Example: 256 tokens are chunks of 128 of two slots, or half a chunk of 512.
        """
        tokens = min(self.chunk_size, self.append_tokens)
        return min(rows, self.append_tokens // tokens), tokens

    def spare_rows(self, mesh: MeshShape) -> int:
        """Returns the rows for episodes of other data shards: one a slot in processes of several.

        There are as many data shards as divide devices, slots and episodes.
        """
        devices = self.row_devices or mesh.num_devices
        data_shards = math.gcd(self.num_rows, self.num_slots, devices)
        return self.num_slots if data_shards > self.num_players else 0


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

    def with_total(self, num_bytes: int) -> "Footprint":
        """Returns the footprint of a program of so many bytes in all, without the trainer's.

        Resident bytes stay; the others are activations, with gradients: temporaries of the program.
        """
        resident = self.weights + self.optimizer + self.cache
        return dataclasses.replace(self, gradients=0, activations=max(0, num_bytes - resident))


def parts_of(axes: str, mesh: MeshShape, rules: Rules = PARAMETER_RULES) -> int:
    """Returns the number of parts of a parameter with these axes."""
    # A plan asks this millions of times, and a loop takes half of the time of `math.prod`.
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
    scales = 4 * 2 * (sizes.num_kv_heads // mesh.tensor) if work.kv_itemsize == 1 else 0
    return len(sizes.windows) * (sizes.cached_size(mesh.tensor) * work.kv_itemsize + scales)


def state_bytes(sizes: ModelSizes, mesh: MeshShape) -> int:
    """Returns the bytes of a device's part of a slot's states, in all layers that have one."""
    states = sizes.states
    return states.layers * states.slot_bytes(sizes.engine_bytes) // mesh.tensor if states else 0


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
    sizes: ModelSizes, work: Workload, mesh: MeshShape, max_tokens: int, platform: str
) -> Footprint:
    """Returns the bytes of a rollout without its KV cache, beside no trainer."""
    rows = work.num_slots // mesh.data
    buffer_rows = work.num_rows * work.batches + work.spare_rows(mesh)
    buffers = buffer_rows // mesh.data * max_tokens * EXPERIENCE_BYTES
    at_a_time = min(TOKENS_AT_A_TIME, max_tokens // mesh.context)
    blocks = 2 * at_a_time * sizes.cached_size(mesh.tensor)
    logits = LOGIT_COPIES * rows * sizes.vocab_size * 4
    decoding = rows * blocks * sizes.engine_bytes + logits
    tokens = math.prod(work.rows_appended(rows))
    # Scores in fp32 and in the engine's type; they are freed before the layer's second half.
    scores = tokens * sizes.num_heads // mesh.tensor * at_a_time * (4 + sizes.engine_bytes)
    own = tokens // mesh.context * sizes.engine_bytes
    inside = own * _inside_width(sizes, mesh, mesh.expert)
    heads = sizes.num_heads // mesh.tensor
    stream = 6 * sizes.width + heads * sizes.read_size
    appending = own * stream + max(scores, inside)
    if mesh.context > 1:
        # Queries of all tokens, and attention's result twice in fp32.
        result = sizes.latents.latent if sizes.latents else sizes.head_size
        query = sizes.read_size - result
        appending += tokens * heads * (query * sizes.engine_bytes + result * 2 * 4)
    elif sizes.latents:
        # Results are as large as four heads of queries, and sums of them are in fp32, twice.
        appending += tokens * heads * sizes.latents.latent * 2 * 4
    beside = 0
    if sizes.states:
        # All states, and one layer's twice while it is written.
        of_slots = rows * state_bytes(sizes, mesh)
        beside = of_slots + of_slots // sizes.states.layers
        appending = max(
            appending, own * stream + 4 * tokens * sizes.states.in_chunks // mesh.tensor
        )
    if platform == "tpu":
        # The query matrices once more, in the order of axes of the decode loop.
        names = ("query",)
        beside += engine_bytes([p for p in sizes.engine if p.name in names], mesh)
    return Footprint(
        weights=engine_bytes(sizes.engine, mesh),
        activations=buffers + beside + max(decoding, appending),
    )


def train_footprint(
    sizes: ModelSizes, work: Workload, mesh: MeshShape, length: int, platform: str
) -> Footprint:
    """Returns the bytes of an update on rows of `length` tokens, in the fullest of its phases.

    Always present are the parameters in the compute type, each layer's kept activations, and with
    several micro-batches the sum of gradients in fp32. The phases add: the head's logits and
    gradient; a layer's gathered weights and activations with gradients in the compute type; all
    gradients in fp32. XLA may keep the activations of the policy and of a critic at once.
    """
    weights, _ = trainer_bytes(sizes, mesh)
    numbers = device_bytes(sizes.trained + sizes.critic, mesh) // 4
    # A base that is stored in the compute type is read as it is.
    cast = [p._replace(itemsize=1) for p in sizes.frozen if p.itemsize != sizes.compute_bytes]
    of_base = device_bytes(cast, mesh)
    copies = (numbers + of_base) * sizes.compute_bytes if sizes.compute_bytes < 4 else 0
    rows = work.num_rows // work.micro_batches // (mesh.data * mesh.fsdp * mesh.expert)
    tokens = rows * length // mesh.context
    block = tokens * _block_bytes(sizes, mesh)
    kept = 0 if work.remat == "offload" else kept_bytes(sizes, work, mesh, length, platform)
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
        optimizer=device_bytes(sizes.moments, mesh),
        gradients=gradients,
        activations=copies + working,
        trainer=device_bytes(sizes.sft_moments, mesh),
    )


def _block_bytes(sizes: ModelSizes, mesh: MeshShape) -> int:
    """Returns the bytes of a token's activations in a layer of the trainer."""
    inside = sizes.compute_bytes * _inside_width(sizes, mesh, 1)
    if sizes.states:
        inside = max(inside, 4 * sizes.states.in_chunks // mesh.tensor)
    return sizes.compute_bytes * _stream_width(sizes, mesh) + inside


def _stream_width(sizes: ModelSizes, mesh: MeshShape) -> int:
    """Returns the numbers of a token's stream: plain, normalised, queries, attention's result.

    And of latent attention keys and values, of which each head has its own.
    """
    heads = sizes.num_heads // mesh.tensor
    own = 2 * heads * sizes.head_size if sizes.latents else 0
    return 6 * sizes.width + 2 * sizes.num_heads * sizes.head_size // mesh.tensor + own


def _inside_width(sizes: ModelSizes, mesh: MeshShape, experts_cut: int) -> int:
    """Returns the numbers of a token inside the gated network, or a mixture's experts.

    A mixture has a token once for each of its experts, in training on each device of the `expert`
    axis; `experts_cut` is that axis where it has not.
    """
    inside = 4 * sizes.ffn_size // mesh.tensor
    if not sizes.num_experts:
        return inside
    pairs = sizes.experts_per_token * mesh.expert // experts_cut
    return pairs * (6 * sizes.width + inside) + 4 * sizes.shared_ffn_size // mesh.tensor


def keeps_attention(mesh: MeshShape, length: int, platform: str) -> bool:
    """Returns True if remat "dots" keeps attention's result: not of tokamax, nor of one block."""
    return mesh.context > 1 or (length > BLOCK_TOKENS and platform != "gpu")


def kept_bytes(
    sizes: ModelSizes, work: Workload, mesh: MeshShape, length: int, platform: str
) -> int:
    """Returns the bytes that the layers keep of a micro-batch for its backward pass.

    They are on the device, or with remat "offload" in its host's memory.
    """
    rows = work.num_rows // work.micro_batches // (mesh.data * mesh.fsdp * mesh.expert)
    tokens = rows * length // mesh.context * (2 if sizes.critic else 1)
    width = kept_width(sizes, mesh, length, work.remat, platform)
    return tokens * sizes.num_layers * sizes.compute_bytes * width


def kept_width(sizes: ModelSizes, mesh: MeshShape, length: int, remat: Remat, platform: str) -> int:
    """Returns the numbers that a layer keeps of a token for the backward pass.

    They are JAX's residuals, in units of the compute type. Without remat: of a norm its input, and
    its result where a matrix reads it; of a gated network both inputs of its gate, and the result.
    """
    if remat in ("full", "offload"):
        return sizes.width
    width = _kept_of_attention(sizes, mesh, length, remat, platform)
    if states := sizes.states:
        own = (2 if remat == "dots" else 4) * sizes.width + states.products // mesh.tensor
        if remat == "none":
            own += 4 // sizes.compute_bytes * states.in_chunks // mesh.tensor
        attending = sizes.num_layers - states.layers
        width = (attending * width + states.layers * own) // sizes.num_layers
    # Layers without experts are the first of a mixture.
    dense = sizes.num_dense_layers if sizes.num_experts else sizes.num_layers
    dense_size = sizes.dense_ffn_size if sizes.num_experts else sizes.ffn_size
    networks = dense * (2 + (remat == "none")) * (dense_size // mesh.tensor)
    if sizes.num_experts:
        networks += (sizes.num_layers - dense) * _kept_of_mixture(sizes, mesh, remat)
    return width + networks // sizes.num_layers


def _kept_of_attention(
    sizes: ModelSizes, mesh: MeshShape, length: int, remat: Remat, platform: str
) -> int:
    """Returns what `kept_width` counts before and behind the network."""
    fp32, latents = 4 // sizes.compute_bytes, sizes.latents
    names = {parameter.name for parameter in sizes.engine}
    heads = sizes.num_heads * sizes.head_size // mesh.tensor
    kv_heads = sizes.num_kv_heads * sizes.head_size // mesh.tensor
    if remat == "dots":
        # The layer's input, and the products that its gradient needs.
        width = (3 if "post_ffn_norm" in names else 2) * sizes.width
        width += heads + heads * keeps_attention(mesh, length, platform)
        if latents:
            both = sizes.num_heads * (sizes.head_size - latents.rope + latents.value)
            return width + latents.query + latents.row + both // mesh.tensor
        return width + 2 * kv_heads
    # Queries, keys, values, and attention's result.
    width = 2 * (1 + ("ffn_norm" in names)) * sizes.width + 2 * heads + 2 * kv_heads
    # Attention's weights in fp32 and in the compute type; or a kernel's result.
    weights = (fp32 + 1) * sizes.num_heads // mesh.tensor * length
    width += weights if length <= BLOCK_TOKENS else heads
    if "post_ffn_norm" in names:
        width += 2 * sizes.width
    if "query_norm" in names:
        width += heads + kv_heads
    if sizes.layers_differ:
        # Sines and cosines of each layer, for queries and for keys.
        width += 2 * fp32 * sizes.head_size
    if latents:
        # Both sides of the latents' norms; the result is without the zeros behind its values.
        width += 2 * (latents.query + latents.latent)
        width -= sizes.num_heads * (sizes.head_size - latents.value) // mesh.tensor
    return width


def _kept_of_mixture(sizes: ModelSizes, mesh: MeshShape, remat: Remat) -> int:
    """Returns what `kept_width` counts of experts, and of a network beside them."""
    fp32, pairs = 4 // sizes.compute_bytes, sizes.experts_per_token * mesh.expert
    products = 2 + (remat == "none")
    inside = products * sizes.ffn_size // mesh.tensor
    shared = products * sizes.shared_ffn_size // mesh.tensor
    if remat == "dots":
        return pairs * (inside + sizes.width) + shared
    # The experts' inputs and results, these in fp32 too, and the routing.
    stream = (2 + fp32) * sizes.width + sizes.width // sizes.compute_bytes
    # What the shared network reads.
    shared += sizes.width if sizes.shared_ffn_size else 0
    return pairs * (stream + inside) + shared


def _head_bytes(
    sizes: ModelSizes, work: Workload, mesh: MeshShape, rows: int, length: int, embeddings: int
) -> int:
    """Returns the larger of two phases: a chunk's logits, or the gradient of the head.

    The first has logits three times, the head and its gradient in the compute type. The second has
    the head gathered and its gradient in fp32, both also as they are cut, and `embeddings` in the
    compute type.
    """
    numbers = sizes.width * sizes.vocab_size // mesh.tensor
    matrices, parts = 4 * numbers, parts_of("D", mesh)
    if parts > 1:
        matrices = (sizes.compute_bytes + 4) * (numbers + numbers // parts)
    head = numbers * sizes.compute_bytes
    logits = rows * min(work.logprob_chunk, length) * sizes.vocab_size // mesh.tensor * 4
    return max(3 * logits + 2 * head, logits + matrices + embeddings * head)


def _scoring_bytes(
    sizes: ModelSizes, work: Workload, mesh: MeshShape, rows: int, length: int
) -> int:
    """Returns the bytes of a pass of the reference, which may be a larger teacher.

    A layer's matrices and the head, gathered, the logits of a chunk, and a layer's activations.
    """
    network = sizes.teacher or sizes
    layers = (p for p in sizes.reference if p.axes[0] == "L")
    layer = sum(device_bytes([p], mesh) // p.shape[0] for p in layers)
    head = network.vocab_size * network.width // mesh.tensor * network.compute_bytes
    logits = rows * min(work.logprob_chunk, length) * network.vocab_size // mesh.tensor * 4
    gathered = 2 * layer * parts_of("D", mesh) + head
    return gathered + 3 * logits + rows * length * _block_bytes(network, mesh)


def _layer_bytes(sizes: ModelSizes, mesh: MeshShape) -> int:
    """Returns the bytes of a layer's matrices, gathered, in the compute type."""
    layers = [p._replace(itemsize=1) for p in (*sizes.trained, *sizes.frozen) if p.axes[0] == "L"]
    # A dense layer of a mixture is the smaller one.
    smaller = _DENSE if sizes.num_dense_layers else ()
    numbers = sum(device_bytes([p], mesh) // p.shape[0] for p in layers if p.name not in smaller)
    return numbers * parts_of("D", mesh) * sizes.compute_bytes


def _largest_bytes(sizes: ModelSizes, mesh: MeshShape) -> int:
    """Returns the bytes of the largest matrix of all layers, in the compute type."""
    layers = [p for p in sizes.trained if p.axes[0] == "L"]
    return max(device_bytes([p], mesh) for p in layers) * sizes.compute_bytes // 4


def _transposed_bytes(sizes: ModelSizes, mesh: MeshShape) -> int:
    """Returns the bytes of parameters that XLA for GPUs keeps in a second order of axes."""
    names = ("down", "out", "embed", "expert_gate", "expert_up", "expert_down")
    return device_bytes([p for p in sizes.trained if p.name in names], mesh)
