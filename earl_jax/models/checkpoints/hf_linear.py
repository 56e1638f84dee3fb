# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Linear attention of Qwen3-Next and Qwen3.5 in config.json <-> settings of ModelConfig."""

from collections.abc import Mapping
from typing import Any

from earl_jax.models.checkpoints.families.family import Family
from earl_jax.models.checkpoints.hf_values import FULL, LINEAR, read_number, read_size
from earl_jax.models.config import ModelConfig
from earl_jax.settings.errors import InputError

_SIZES = {
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_key_size": "linear_key_head_dim",
    "linear_value_size": "linear_value_head_dim",
    "conv_size": "linear_conv_kernel_dim",
}
_SHARED_SIZE = "shared_expert_intermediate_size"


def read_states(settings: Mapping[str, Any], family: Family, head_size: int) -> dict[str, Any]:
    """Returns the settings of layers of linear attention, and of those that attend beside them.

    Raises ValueError for layers of which not every so many-th one attends.
    """
    found: dict[str, Any] = {field: read_size(settings, key) for field, key in _SIZES.items()}
    found["attention_every"] = _read_every(settings)
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    where = rope if "partial_rotary_factor" in rope else settings
    rotated = int(head_size * read_number(where, "partial_rotary_factor"))
    found["rope_size"] = 0 if rotated == head_size else rotated
    if "shared_ffn_size" in family.free:
        found["shared_ffn_size"] = read_size(settings, _SHARED_SIZE)
    return found


def _read_every(settings: Mapping[str, Any]) -> int:
    num_layers = read_size(settings, "num_hidden_layers")
    kinds = settings.get("layer_types")
    if kinds is None:
        return read_size(settings, "full_attention_interval", least=2)
    every = kinds.index(FULL) + 1 if isinstance(kinds, list) and FULL in kinds else 0
    if every < 2 or kinds != layer_kinds(num_layers, every) or num_layers % every:
        raise InputError(
            f"layer_types is {kinds!r}; with linear_attention every n-th of the {num_layers} "
            "layers, and the last, must have full_attention"
        )
    return every


def layer_kinds(num_layers: int, every: int) -> list[str]:
    """Returns layer_types where every so many-th layer attends."""
    return [LINEAR if (layer + 1) % every else FULL for layer in range(num_layers)]


def written_states(model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of these settings."""
    written = {key: getattr(model, field) for field, key in _SIZES.items()}
    written["layer_types"] = layer_kinds(model.num_layers, model.attention_every)
    if model.num_experts:
        written[_SHARED_SIZE] = model.shared_ffn_size
    return written
