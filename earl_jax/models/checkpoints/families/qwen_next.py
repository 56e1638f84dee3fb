# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next and the language models of Qwen3.5: most layers are of linear attention."""

from earl_jax.models.checkpoints.families.family import Family
from earl_jax.models.checkpoints.families.weights import (
    EXPERTS,
    HEAD_NORMS,
    PLAIN_WEIGHTS,
    layer_weights,
)

_LAYERS = {"query_key_norm": "head", "norm_from_one": True, "attention_gate": True}
_FREE = ("attention_every", "rope_size")
_MIXTURE_LAYERS = {"shared_ffn_gate": True, **_LAYERS}
_MIXTURE_FREE = (*_FREE, "num_experts", "shared_ffn_size")

# The gate of attention is in the tensor of queries, of each head behind its query.
_WEIGHTS = {
    **PLAIN_WEIGHTS,
    **HEAD_NORMS,
    **layer_weights(
        query=("self_attn.q_proj.weight", "KG|H D"),
        attention_gate=("self_attn.q_proj.weight", "KG|H D"),
        linear_query_taps=("linear_attn.conv1d.weight", "|KH . I"),
        linear_key_taps=("linear_attn.conv1d.weight", "|KH . I"),
        linear_value_taps=("linear_attn.conv1d.weight", "|KGH . I"),
        linear_decay_bias=("linear_attn.dt_bias", "KG"),
        linear_log_decay=("linear_attn.A_log", "KG"),
        linear_norm=("linear_attn.norm.weight", "H"),
        linear_out=("linear_attn.out_proj.weight", "D KGH"),
    ),
}
# The projections of linear attention: of Qwen3-Next by heads of keys, of Qwen3.5 end to end.
_PROJECTIONS_BY_HEADS = layer_weights(
    linear_query=("linear_attn.in_proj_qkvz.weight", "K|H D"),
    linear_key=("linear_attn.in_proj_qkvz.weight", "K|H D"),
    linear_value=("linear_attn.in_proj_qkvz.weight", "K|GH D"),
    linear_gate=("linear_attn.in_proj_qkvz.weight", "K|GH D"),
    linear_rate=("linear_attn.in_proj_ba.weight", "K|G D"),
    linear_decay=("linear_attn.in_proj_ba.weight", "K|G D"),
)
_PROJECTIONS_END_TO_END = layer_weights(
    linear_query=("linear_attn.in_proj_qkv.weight", "|KH D"),
    linear_key=("linear_attn.in_proj_qkv.weight", "|KH D"),
    linear_value=("linear_attn.in_proj_qkv.weight", "|KGH D"),
    linear_gate=("linear_attn.in_proj_z.weight", "KGH D"),
    linear_rate=("linear_attn.in_proj_b.weight", "KG D"),
    linear_decay=("linear_attn.in_proj_a.weight", "KG D"),
)
_MIXTURE_WEIGHTS = {
    **EXPERTS,
    **layer_weights(
        shared_gate=("mlp.shared_expert.gate_proj.weight", "F D"),
        shared_up=("mlp.shared_expert.up_proj.weight", "F D"),
        shared_down=("mlp.shared_expert.down_proj.weight", "D F"),
        shared_router=("mlp.shared_expert_gate.weight", "X D"),
    ),
}
# As `transformers` 5 has experts, and Qwen3.5 is published.
_FUSED_EXPERTS = layer_weights(
    expert_gate=("mlp.experts.gate_up_proj", "E |F D"),
    expert_up=("mlp.experts.gate_up_proj", "E |F D"),
    expert_down=("mlp.experts.down_proj", "E D F"),
)

_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MIXTURE_DEFAULTS = {
    **_DEFAULTS,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    # Of a model all of whose layers have experts it is not read; nor is it written for Qwen3.5.
    "intermediate_size": 5632,
}

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    layers=_MIXTURE_LAYERS,
    free=_MIXTURE_FREE,
    required={
        "hidden_act": "silu",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    weights={**_WEIGHTS, **_PROJECTIONS_BY_HEADS, **_MIXTURE_WEIGHTS},
    defaults={**_MIXTURE_DEFAULTS, "num_experts": 512, "num_experts_per_tok": 10},
)
QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    layers=_LAYERS,
    free=_FREE,
    required={"hidden_act": "silu", "attention_bias": False},
    weights={**_WEIGHTS, **_PROJECTIONS_END_TO_END},
    defaults={**_DEFAULTS, "num_key_value_heads": 4},
    text_of="qwen3_5",
)
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    layers={**_MIXTURE_LAYERS, "normalize_expert_weights": True},
    free=_MIXTURE_FREE,
    required={"hidden_act": "silu", "attention_bias": False},
    weights={**_WEIGHTS, **_PROJECTIONS_END_TO_END, **_MIXTURE_WEIGHTS},
    defaults={**_MIXTURE_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
    text_of="qwen3_5_moe",
    fused_weights=_FUSED_EXPERTS,
)
