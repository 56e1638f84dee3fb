# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 and 3, with norms behind attention and network alone, and the mixture OLMoE."""

from earl_jax.models.checkpoints.families.family import EXPERT_KEYS, Family
from earl_jax.models.checkpoints.families.weights import (
    ALL_HEADS_NORMS,
    EXPERTS,
    PLAIN_WEIGHTS,
    layer_weights,
)

_LAYERS = {"query_key_norm": "all", "pre_norms": False, "post_norms": True}
_WEIGHTS = {
    **PLAIN_WEIGHTS,
    **ALL_HEADS_NORMS,
    **layer_weights(
        post_attention_norm=("post_attention_layernorm.weight", "D"),
        post_ffn_norm=("post_feedforward_layernorm.weight", "D"),
    ),
}

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    layers=_LAYERS,
    required={"hidden_act": "silu", "attention_bias": False},
    weights=_WEIGHTS,
    width_by_heads=True,
    defaults={"rms_norm_eps": 1e-5},
)
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    layers=_LAYERS,
    free=("window_rope_theta",),
    windows="by_pattern",
    required={"hidden_act": "silu", "attention_bias": False},
    weights=_WEIGHTS,
    window_rope_key="rope_theta",
    width_by_heads=True,
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
)
OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    layers={"query_key_norm": "all"},
    free=("num_experts",),
    required={"hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
    weights={**PLAIN_WEIGHTS, **ALL_HEADS_NORMS, **EXPERTS},
    expert_keys={**EXPERT_KEYS, "expert_ffn_size": "intermediate_size"},
    width_by_heads=True,
    defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": False},
)
