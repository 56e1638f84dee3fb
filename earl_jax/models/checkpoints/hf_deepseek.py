# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Latent attention and DeepSeek's mixtures in config.json <-> settings of ModelConfig."""

from collections.abc import Mapping
from typing import Any

from earl_jax.models.checkpoints.families.family import Family
from earl_jax.models.checkpoints.hf_values import read_flag, read_number, read_size
from earl_jax.models.config import ModelConfig
from earl_jax.settings.errors import InputError

_SIZES = {
    "latent_size": "kv_lora_rank",
    "rope_size": "qk_rope_head_dim",
    "value_size": "v_head_dim",
}
# By topk_method: a token's experts are among all, or in its best groups.
_AMONG_ALL, _IN_GROUPS = "greedy", "group_limited_greedy"


def read_latent_head_size(settings: Mapping[str, Any]) -> int:
    """Returns ModelConfig.head_size: the numbers from the latent, and the rotated ones."""
    return read_size(settings, "qk_nope_head_dim") + read_size(settings, "qk_rope_head_dim")


def read_latents(settings: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the settings of latent attention."""
    found: dict[str, Any] = {field: read_size(settings, key) for field, key in _SIZES.items()}
    has_low = settings.get("q_lora_rank") is not None
    found["query_latent_size"] = read_size(settings, "q_lora_rank") if has_low else 0
    if "rope_interleaved" in family.free:
        found["rope_interleaved"] = read_flag(settings, "rope_interleave")
    return found


def read_mixture(settings: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the settings of DeepSeek's mixtures beside those that other mixtures have."""
    found: dict[str, Any] = {
        "num_dense_layers": read_size(settings, "first_k_dense_replace", least=0),
        "shared_ffn_size": read_size(settings, "n_shared_experts")
        * read_size(settings, "moe_intermediate_size"),
        "expert_scale": read_number(settings, "routed_scaling_factor"),
    }
    # Keys that are null are absent.
    methods = (_AMONG_ALL, _IN_GROUPS) if family.required.get("topk_method") is None else ()
    method = settings.get("topk_method") or _AMONG_ALL
    if methods and method not in methods:
        raise InputError(
            f"topk_method is {method!r}; only {' and '.join(map(repr, methods))} can be computed"
        )
    if not methods or method == _IN_GROUPS:
        found["expert_groups"] = read_size(settings, "n_group")
        found["groups_per_token"] = read_size(settings, "topk_group")
    return found


def written_deepseek(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the keys of all of these settings.

    Raises ValueError for a shared network that is not a number of experts.
    """
    shared, rest = divmod(model.shared_ffn_size, model.expert_ffn_size)
    if rest or not shared:
        raise InputError(
            f"config.model.shared_ffn_size is {model.shared_ffn_size}, and `transformers` reads no "
            f"{family.architecture} whose shared network is not so many experts of "
            f"config.model.expert_ffn_size ({model.expert_ffn_size})"
        )
    written = {key: getattr(model, field) for field, key in _SIZES.items()}
    written |= {
        "qk_nope_head_dim": model.head_size - model.rope_size,
        "q_lora_rank": model.query_latent_size or None,
        "first_k_dense_replace": model.num_dense_layers,
        "n_shared_experts": shared,
        "routed_scaling_factor": model.expert_scale,
        "n_group": model.expert_groups,
        "topk_group": model.groups_per_token,
        # Layers for multi-token prediction are not read, and so are not written.
        "num_nextn_predict_layers": 0,
    }
    if "rope_interleaved" in family.free:
        written["rope_interleave"] = model.rope_interleaved
    if "topk_method" not in family.required:
        written["topk_method"] = _AMONG_ALL if model.expert_groups == 1 else _IN_GROUPS
    return written
