# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model and the work of a step: what bytes and speeds are computed from. Pure."""

import dataclasses
import functools
import math
from typing import NamedTuple

from earl_jax.models.config import ModelConfig
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelSizes:
    """The sizes of a decoder: its settings, and its arrays.

    `engine` are the rollout's parameters, `trained` those of the policy that are updated (fp32),
    `moments` those of all optimizers, `sft_moments` of a warm start while it lasts, `frozen` the
    base of adapters, `average` the moving average of `trained` (fp32). `teacher` are the sizes of a
    reference that is another model. In `model` a dense one has one expert a token. `compute_bytes`
    are those of a number in the trainer's products, `engine_bytes` in the engine's and its cache.
    """

    model: ModelConfig
    vocab_size: int
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

    @functools.cached_property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer that has pages, 0 for full attention."""
        return self.model.paged_windows

    @property
    def state_layers(self) -> int:
        """The number of layers of linear attention, which have states."""
        return self.model.num_layers - len(self.windows)

    @property
    def ffn_size(self) -> int:
        """The size of the network of a layer, or of one of its experts."""
        return self.model.expert_ffn_size if self.model.num_experts else self.model.ffn_size

    @property
    def result_size(self) -> int:
        """The numbers of a result of one head over cached tokens."""
        return self.model.latent_size or self.model.head_size

    @property
    def read_size(self) -> int:
        """The numbers of a query and of a result of one head over cached tokens."""
        model = self.model
        query = model.cached_size if model.latent_size else model.head_size
        return query + self.result_size

    def cached_size(self, tensor: int) -> int:
        """The numbers of a token and layer in the cache of a device, of so many that cut heads."""
        if self.model.latent_size:
            return self.model.cached_size
        return 2 * (self.model.num_kv_heads // tensor) * self.model.head_size

    @property
    def linear_products(self) -> int:
        """The numbers of a token that a layer of linear attention projects."""
        model = self.model
        values = model.linear_value_heads * (model.linear_value_size + 1)
        return 2 * (model.linear_key_heads * model.linear_key_size + values)

    @property
    def delta_numbers(self) -> int:
        """The numbers in fp32 of a token in its chunk of the delta rule, coarsely."""
        sizes = 2 * self.model.linear_key_size + self.model.linear_value_size
        return self.model.linear_value_heads * (4 * DELTA_CHUNK + 3 * sizes)

    @property
    def slot_bytes(self) -> int:
        """The bytes of a slot in a layer: its state in fp32, and inputs of convolutions."""
        model = self.model
        inputs = 2 * model.linear_key_heads * model.linear_key_size
        inputs += model.linear_value_heads * model.linear_value_size
        matrix = 4 * model.linear_value_heads * model.linear_key_size * model.linear_value_size
        return matrix + (model.conv_size - 1) * inputs * self.engine_bytes


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
    `sampled_tokens` of an episode, whose rows have `choice_width` ids more for each token.
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
    sampled_tokens: int = 16
    choice_width: int = 0

    @property
    def num_batches(self) -> int:
        """The batches of an update: that of the episodes, and a supervised one as large."""
        return 1 + self.has_stream

    @property
    def repeats_products(self) -> bool:
        """True if projections are computed again in the backward pass."""
        return self.remat in ("full", "offload")

    def repeats_attention(self, mesh: MeshShape, length: int) -> bool:
        """True if attention's forward pass is computed again in the backward pass."""
        kept = self.remat == "dots" and keeps_attention(mesh, length)
        return self.remat != "none" and not kept

    def rows_appended(self, rows: int) -> tuple[int, int]:
        """Returns how many of a row shard's slots a pass appends to, and how many tokens to each.

        Example: 256 tokens are chunks of 128 of two slots, or half a chunk of 512.
        """
        tokens = min(self.chunk_size, self.append_tokens)
        return min(rows, self.append_tokens // tokens), tokens

    def spare_rows(self, mesh: MeshShape) -> int:
        """Returns the rows for episodes of other data shards, one a slot, in several processes."""
        devices = self.row_devices or mesh.num_devices
        data_shards = math.gcd(self.num_rows, self.num_slots, devices)
        return self.num_slots if data_shards > self.num_players else 0


def keeps_attention(mesh: MeshShape, length: int) -> bool:
    """Returns True if remat "dots" keeps attention's result: not of one block.

    Nor of tokamax's kernel, which gives it no name; that is not counted.
    """
    return mesh.context > 1 or length > BLOCK_TOKENS
