# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3: latent attention, and mixtures with shared experts (hf_deepseek.py)."""

from earl_jax.models.checkpoints.families.family import EXPERT_KEYS, Family
from earl_jax.models.checkpoints.families.weights import EXPERTS, PLAIN_WEIGHTS, layer_weights

_FREE = (
    "latent_size",
    "rope_size",
    "num_experts",
    "num_dense_layers",
    "shared_ffn_size",
    "expert_groups",
    "expert_scale",
)
# Latents of keys and values, and of queries where these have some; shared experts; the router's
# corrections.
_WEIGHTS = {
    **PLAIN_WEIGHTS,
    **EXPERTS,
    **layer_weights(
        query_down=("self_attn.q_a_proj.weight", "A D"),
        query_down_norm=("self_attn.q_a_layernorm.weight", "A"),
        query_up=("self_attn.q_b_proj.weight", "KGH A"),
        latent=("self_attn.kv_a_proj_with_mqa.weight", "A D"),
        latent_norm=("self_attn.kv_a_layernorm.weight", "A"),
        latent_up=("self_attn.kv_b_proj.weight", "KH A"),
        shared_gate=("mlp.shared_experts.gate_proj.weight", "F D"),
        shared_up=("mlp.shared_experts.up_proj.weight", "F D"),
        shared_down=("mlp.shared_experts.down_proj.weight", "D F"),
        router_correction=("mlp.gate.e_score_correction_bias", "X"),
    ),
}
_EXPERT_KEYS = {**EXPERT_KEYS, "num_experts": "n_routed_experts"}
_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    layers={"rope_interleaved": True, "group_score": 1, "normalize_expert_weights": False},
    free=_FREE,
    required={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "moe_layer_freq": 1,
    },
    weights=_WEIGHTS,
    width_by_heads=True,
    expert_keys=_EXPERT_KEYS,
    defaults={
        **_DEFAULTS,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
    },
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    also_named=("kimi_k2",),
    layers={"router_scores": "sigmoid", "router_correction": True, "group_score": 2},
    free=(*_FREE, "rope_interleaved"),
    required={
        "hidden_act": "silu",
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    weights=_WEIGHTS,
    expert_keys=_EXPERT_KEYS,
    defaults={
        **_DEFAULTS,
        "rope_interleave": True,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
    },
    quantization="fp8",
)
