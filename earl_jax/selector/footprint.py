# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes per device of a stage on a mesh that is not here, by what they are for. Pure arithmetic.

What lies there from round to round (weights, moments, pages) follows from shapes and placement, and
is exact. What a program needs beside it is a model of what XLA makes of `train/step.py` and
`engine/slots.py`: the arrays that are there at once in the fullest moment.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from earl_jax.sharding.layout import PARAMETER_RULES, ROLLOUT_PARAMETER_RULES, MeshShape

Rules = Mapping[str, tuple[str, ...]]

# Tokens, turns, log-probs and versions: an i32 or f32 for each place of a row.
EXPERIENCE_BYTES = 16
# What is read of the cache at a time on a chip (models/attention/paged_attention.py).
PLACES_AT_A_TIME = 1024
# Of the logits of all slots while tokens are drawn: as they are, tempered, added up.
LOGIT_COPIES = 3
# Rows of so many tokens are attended to in one piece (models/attention/rows.py).
BLOCK_TOKENS = 128
# What is kept of a gated network for its gradient: arrays of its width, by activation.
GATE_ARRAYS = {"silu": 6, "gelu_tanh": 8}


class Parameter(NamedTuple):
    """Equal arrays of a model: a letter of the legend per axis, bytes of a number, how many."""

    name: str
    shape: tuple[int, ...]
    axes: str
    itemsize: int
    count: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A decoder, as far as bytes and operations go.

    `engine` is what the rollout holds, `trained` what is updated (fp32), `frozen` the base that
    adapters are beside. `ffn_size` is that of one expert of a mixture, where `num_experts` is not
    0. `windows` has a number for each layer, 0 where it looks back over all. `compute_bytes` are
    those of a number in the trainer's matrix work, `engine_bytes` in the engine's and its cache.
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
    frozen: tuple[Parameter, ...] = ()
    activation: str = "silu"

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is the head too."""
        return not any(parameter.name == "head" for parameter in self.engine)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What the stages do in a step; the fields of the same names in the config say what they are.

    `num_rows` are the episodes of a step, of which each of `num_players` processes plays a part.
    `kv_itemsize` 1 is a cache of int8, which has a scale of 4 bytes for each token and head beside
    it.
    """

    num_slots: int
    num_rows: int
    micro_batches: int
    remat: bool
    logprob_chunk: int
    chunk_size: int
    append_rows: int
    burst: int
    page_size: int
    kv_itemsize: int
    step_rows: int = 0
    epochs: int = 1
    num_players: int = 1

    def guests(self, mesh: MeshShape) -> int:
        """Rows for guests over all devices: one a slot where a process has several data shards.

        As engine/scheduler.py cuts them: so many data shards as divide its devices, slots and
        episodes.
        """
        data_shards = math.gcd(self.num_rows, self.num_slots, mesh.num_devices)
        return self.num_slots if data_shards > self.num_players else 0

    def rows_a_step(self, mesh: MeshShape, rows: int) -> int:
        """Rows of a decode step where so many of a row shard's are busy."""
        return min(rows, -(-self.step_rows // mesh.data) or rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one device while a stage runs.

    `trainer` is what training leaves there during a rollout: parameters and moments.
    """

    weights: int
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0
    cache: int = 0
    trainer: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        resident = self.weights + self.optimizer + self.gradients + self.cache + self.trainer
        return resident + self.activations

    def with_total(self, num_bytes: int) -> "Footprint":
        """With so many bytes of the stage's own program.

        What is resident stays, the trainer beside it too; the rest are activations, gradients among
        them: they are temporaries of the program.
        """
        own = self.total - self.trainer
        if num_bytes == own:
            return self
        resident = self.weights + self.optimizer + self.cache
        return dataclasses.replace(self, gradients=0, activations=max(0, num_bytes - resident))

    def as_dict(self) -> dict[str, int]:
        """By kind, those that there are."""
        return {kind: size for kind, size in dataclasses.asdict(self).items() if size}


def parts_of(axes: str, mesh: MeshShape, rules: Rules = PARAMETER_RULES) -> int:
    """Into how many parts a parameter with these axes is cut."""
    parts = 1
    for letter in axes:
        for axis in rules.get(letter, ()):
            parts *= getattr(mesh, axis)
    return parts


def device_bytes(
    parameters: Iterable[Parameter], mesh: MeshShape, rules: Rules = PARAMETER_RULES
) -> int:
    """Bytes per device of parameters placed on this mesh, by a trainer's rules or others."""
    return sum(
        parameter.count
        * parameter.itemsize
        * math.prod(parameter.shape)
        // parts_of(parameter.axes, mesh, rules)
        for parameter in parameters
    )


def engine_bytes(parameters: Iterable[Parameter], mesh: MeshShape) -> int:
    """`device_bytes` in a rollout."""
    return device_bytes(parameters, mesh, ROLLOUT_PARAMETER_RULES)


def cache_token_bytes(sizes: ModelSizes, work: Workload, mesh: MeshShape) -> int:
    """Bytes that a token of context takes on a device that has its place, over all layers."""
    of_a_head = sizes.head_size * work.kv_itemsize + (4 if work.kv_itemsize == 1 else 0)
    heads = sizes.num_kv_heads // mesh.tensor
    return 2 * sizes.num_layers * heads * of_a_head


def trainer_bytes(sizes: ModelSizes, mesh: MeshShape) -> tuple[int, int]:
    """Bytes per device of a trainer at rest: its parameters with a frozen base, and its moments."""
    trained = device_bytes(sizes.trained, mesh)
    return trained + device_bytes(sizes.frozen, mesh), 2 * trained


def row_bytes(sizes: ModelSizes, work: Workload, mesh: MeshShape, max_tokens: int) -> int:
    """Bytes per device of the pages of a full row."""
    pages = -(-max_tokens // work.page_size)
    return pages * work.page_size // mesh.context * cache_token_bytes(sizes, work, mesh)


def rollout_footprint(
    sizes: ModelSizes,
    work: Workload,
    mesh: MeshShape,
    max_tokens: int,
    rows_at_once: int,
    trainer: int,
    platform: str,
) -> Footprint:
    """Of a rollout beside `trainer` bytes, with pages for so many full rows of a row shard."""
    rows = work.num_slots // mesh.data
    buffers = (work.num_rows + work.guests(mesh)) // mesh.data * max_tokens * EXPERIENCE_BYTES
    at_a_time = min(PLACES_AT_A_TIME, max_tokens // mesh.context)
    blocks = 4 * at_a_time * sizes.num_kv_heads // mesh.tensor * sizes.head_size
    logits = LOGIT_COPIES * rows * sizes.vocab_size * 4
    decoding = work.rows_a_step(mesh, rows) * blocks * sizes.engine_bytes + logits
    together = min(rows, work.append_rows)
    tokens = together * work.chunk_size
    # Scores in fp32, and what they are once they weigh values; they are gone before the layer's
    # second half.
    scores = tokens * sizes.num_heads // mesh.tensor * at_a_time * (4 + sizes.engine_bytes)
    own = tokens // mesh.context * sizes.engine_bytes
    inside = own * _inside_width(sizes, mesh, mesh.expert)
    appending = own * _stream_width(sizes, mesh) + max(scores, inside)
    if mesh.context > 1:
        # Queries of all tokens, and twice what they saw, in fp32.
        width = sizes.num_heads * sizes.head_size // mesh.tensor
        appending += tokens * width * (sizes.engine_bytes + 2 * 4)
    beside = 0
    if platform == "tpu":
        # Attention's matrices, in the order of axes that the decode loop wants.
        names = ("query", "key", "value", "out")
        beside = engine_bytes([p for p in sizes.engine if p.name in names], mesh)
    return Footprint(
        weights=engine_bytes(sizes.engine, mesh),
        cache=rows_at_once * row_bytes(sizes, work, mesh, max_tokens),
        activations=buffers + beside + max(decoding, appending),
        trainer=trainer,
    )


def train_footprint(
    sizes: ModelSizes, work: Workload, mesh: MeshShape, length: int, platform: str
) -> Footprint:
    """Of an update on rows of `length` tokens, in the fullest of its phases.

    All the time there are the parameters in the compute type, what each layer keeps of the rows,
    and with several micro-batches the sum of gradients in fp32. Beside these, first the head's
    logits and gradient; then a layer's gathered weights, what is between them, and the layers'
    gradients in the compute type; in the end all gradients in fp32.
    """
    weights, moments = trainer_bytes(sizes, mesh)
    numbers = device_bytes(sizes.trained, mesh) // 4
    of_base = device_bytes([p._replace(itemsize=1) for p in sizes.frozen], mesh)
    copies = (numbers + of_base) * sizes.compute_bytes if sizes.compute_bytes < 4 else 0
    rows = work.num_rows // work.micro_batches // (mesh.data * mesh.fsdp * mesh.expert)
    tokens = rows * length // mesh.context
    block = tokens * _block_width(sizes, mesh, 1) * sizes.compute_bytes
    kept = tokens * sizes.num_layers * sizes.compute_bytes
    kept *= sizes.width if work.remat else kept_width(sizes, mesh, length)
    summed = numbers * 4 if work.micro_batches > 1 else 0
    apart = numbers * sizes.compute_bytes
    # On TPUs the embedding gathered, and for a loop over micro-batches once more, before it, in the
    # other order of axes.
    embeddings = (2 if summed else 1) if platform == "tpu" else 0
    head = _head_bytes(sizes, work, mesh, rows, length // mesh.context, embeddings)
    layer = 2 * _layer_bytes(sizes, mesh) + block
    # A loop over micro-batches keeps zeros for the gradient of a matrix of all layers, twice.
    zeros = 2 * _largest_bytes(sizes, mesh) if summed else 0
    phases = [(summed, kept + head + zeros), (summed + apart, kept + layer), (numbers * 4, 0)]
    if platform == "gpu" and summed:
        # What all micro-batches use is made before them.
        copies += _transposed_bytes(sizes, mesh)
    if platform == "tpu":
        # By what compilers say, which do not say why: benchmarks/plan.md.
        together = kept * (2 if work.remat and summed else 1) + head + block
        phases = [(summed + apart, together), (numbers * 4, 0)]
    gradients, working = max(phases, key=sum)
    return Footprint(
        weights=weights,
        optimizer=moments,
        gradients=gradients,
        activations=copies + working,
    )


def _block_width(sizes: ModelSizes, mesh: MeshShape, experts_cut: int) -> int:
    """Numbers that a layer has for a token at once: of the stream, and between its matrices.

    In a mixture a token is there once for each of its experts, and in training on each device of
    the `expert` axis; `experts_cut` is that axis where it is not.
    """
    return _stream_width(sizes, mesh) + _inside_width(sizes, mesh, experts_cut)


def _stream_width(sizes: ModelSizes, mesh: MeshShape) -> int:
    """Numbers of a token's stream: as it is and normalised, queries, and what attention gives."""
    return 6 * sizes.width + 2 * sizes.num_heads * sizes.head_size // mesh.tensor


def _inside_width(sizes: ModelSizes, mesh: MeshShape, experts_cut: int) -> int:
    """Numbers of a token between the matrices of the gated network, or of a mixture's experts."""
    inside = 4 * sizes.ffn_size // mesh.tensor
    if not sizes.num_experts:
        return inside
    pairs = sizes.experts_per_token * mesh.expert // experts_cut
    return pairs * (6 * sizes.width + inside)


def kept_width(sizes: ModelSizes, mesh: MeshShape, length: int) -> int:
    """Numbers that a layer keeps of a token of a row for the backward pass, without remat.

    What JAX saves, in numbers of the compute type: of a norm its input and what is normalised, both
    in fp32, and what it gives where that goes into a matrix.
    """
    fp32 = 4 // sizes.compute_bytes
    names = {parameter.name for parameter in sizes.engine}
    heads = sizes.num_heads * sizes.head_size // mesh.tensor
    kv_heads = sizes.num_kv_heads * sizes.head_size // mesh.tensor
    # Queries, keys and values, and what attention gives.
    width = 2 * (2 * fp32 + 1) * sizes.width + 2 * heads + 2 * kv_heads
    # Attention's weights, in fp32 and as they weigh values; or what a kernel gives, as it does.
    weights = (fp32 + 1) * sizes.num_heads // mesh.tensor * length
    width += weights if length <= BLOCK_TOKENS else heads
    if "post_ffn_norm" in names:
        width += 2 * 2 * fp32 * sizes.width
    if "query_norm" in names:
        width += 2 * fp32 * (heads + kv_heads)
    if len(set(sizes.windows)) > 1:
        # Sines and cosines, which are of a layer then: for queries, and for keys.
        width += 2 * fp32 * sizes.head_size
    inside = GATE_ARRAYS[sizes.activation] * sizes.ffn_size // mesh.tensor
    if not sizes.num_experts:
        return width + inside
    # Before and behind the experts, there in fp32 too, and which of them are here.
    stream = (2 + fp32) * sizes.width + sizes.width // sizes.compute_bytes
    return width + sizes.experts_per_token * mesh.expert * (stream + inside)


def _head_bytes(
    sizes: ModelSizes, work: Workload, mesh: MeshShape, rows: int, length: int, embeddings: int
) -> int:
    """Of what is fuller: a chunk's logits and gradients of these, or gradients of the head.

    For logits there is room three times, beside the head and its gradient in the compute type. For
    the other the head is gathered, its gradient in fp32, both are there as they are cut too, with
    so many `embeddings` in the compute type.
    """
    numbers = sizes.width * sizes.vocab_size // mesh.tensor
    matrices, parts = 4 * numbers, parts_of("D", mesh)
    if parts > 1:
        matrices = (sizes.compute_bytes + 4) * (numbers + numbers // parts)
    head = numbers * sizes.compute_bytes
    logits = rows * min(work.logprob_chunk, length) * sizes.vocab_size // mesh.tensor * 4
    return max(3 * logits + 2 * head, logits + matrices + embeddings * head)


def _layer_bytes(sizes: ModelSizes, mesh: MeshShape) -> int:
    """A layer's matrices, gathered, in the compute type."""
    layers = [p for p in (*sizes.trained, *sizes.frozen) if p.axes[0] == "L"]
    numbers = device_bytes([p._replace(itemsize=1) for p in layers], mesh)
    return numbers * parts_of("D", mesh) * sizes.compute_bytes // sizes.num_layers


def _largest_bytes(sizes: ModelSizes, mesh: MeshShape) -> int:
    """The largest matrix of all layers, in the compute type."""
    layers = [p for p in sizes.trained if p.axes[0] == "L"]
    return max(device_bytes([p], mesh) for p in layers) * sizes.compute_bytes // 4


def _transposed_bytes(sizes: ModelSizes, mesh: MeshShape) -> int:
    """Parameters that XLA for GPUs keeps a second time, in the order of axes of their product."""
    names = ("down", "out", "embed", "expert_gate", "expert_up", "expert_down")
    return device_bytes([p for p in sizes.trained if p.name in names], mesh)
