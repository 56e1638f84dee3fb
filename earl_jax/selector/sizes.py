# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model and the work of a step: what bytes and speeds are computed from. Pure."""

import dataclasses
import math
from typing import NamedTuple

from earl_jax.settings.remat import Remat
from earl_jax.sharding.layout import MeshShape

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


def keeps_attention(mesh: MeshShape, length: int, platform: str) -> bool:
    """Returns True if remat "dots" keeps attention's result: not of tokamax, nor of one block."""
    return mesh.context > 1 or (length > BLOCK_TOKENS and platform != "gpu")
