# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes per device of resident arrays and of a rollout, by kind, from shapes alone. Pure.

Resident bytes (weights, moments, pages) follow from shapes and placement, and are exact. Those of
the rollout's programs are a model of XLA's memory for `engine/slots.py`: the arrays that exist at
once when most do. Those of an update are in train_footprint.py.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping

from earl_jax.models.layer_groups import group_layers
from earl_jax.selector.sizes import ModelSizes, Parameter, Workload
from earl_jax.sharding.layout import PARAMETER_RULES, ROLLOUT_PARAMETER_RULES, MeshShape

Rules = Mapping[str, tuple[str, ...]]

# Tokens, turns, log-probs and versions: an i32 or f32 for each token of a row.
EXPERIENCE_BYTES = 16
# Tokens of the cache that a chip reads at a time (models/attention/paged_attention.py).
TOKENS_AT_A_TIME = 1024
# Logits of all slots during sampling: as computed, tempered, and their cumulative sums.
LOGIT_COPIES = 3


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
    scales = 4 * 2 * (sizes.model.num_kv_heads // mesh.tensor) if work.kv_itemsize == 1 else 0
    return len(sizes.windows) * (sizes.cached_size(mesh.tensor) * work.kv_itemsize + scales)


def state_bytes(sizes: ModelSizes, mesh: MeshShape) -> int:
    """Returns the bytes of a device's part of a slot's states, in all layers that have one."""
    return sizes.state_layers * sizes.slot_bytes // mesh.tensor


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
    buffers = buffer_rows // mesh.data * max_tokens * EXPERIENCE_BYTES
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

    A mixture has a token once for each of its experts, in training on each device of the `expert`
    axis; `experts_cut` is that axis where it has not.
    """
    inside = 4 * sizes.ffn_size // mesh.tensor
    if not sizes.model.num_experts:
        return inside
    pairs = sizes.model.experts_per_token * mesh.expert // experts_cut
    return pairs * (6 * sizes.model.width + inside) + 4 * sizes.model.shared_ffn_size // mesh.tensor
