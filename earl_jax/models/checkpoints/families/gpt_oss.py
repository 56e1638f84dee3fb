# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: attention sinks, biases of attention and experts, and weights in MXFP4."""

from earl_jax.models.activations import SWIGLU_ALPHA, SWIGLU_LIMIT
from earl_jax.models.checkpoints.families.family import EXPERT_KEYS, Family
from earl_jax.models.checkpoints.families.weights import BIASES, PLAIN_WEIGHTS, layer_weights

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    layers={
        "attention_bias": True,
        "out_bias": True,
        "attention_sinks": True,
        "expert_bias": True,
        "activation": "swiglu_clamped",
        "normalize_expert_weights": True,
    },
    free=("num_experts",),
    windows="by_pattern",
    required={
        "hidden_act": "silu",
        "attention_bias": True,
        "swiglu_alpha": SWIGLU_ALPHA,
        "swiglu_limit": SWIGLU_LIMIT,
    },
    # The experts' gate and up are in one tensor, column by column.
    weights={
        **PLAIN_WEIGHTS,
        **BIASES,
        **layer_weights(
            out_bias=("self_attn.o_proj.bias", "D"),
            sinks=("self_attn.sinks", "KG"),
            router=("mlp.router.weight", "X D"),
            router_bias=("mlp.router.bias", "X"),
            expert_gate=("mlp.experts.gate_up_proj", "E D F|"),
            expert_up=("mlp.experts.gate_up_proj", "E D F|"),
            expert_down=("mlp.experts.down_proj", "E F D"),
            expert_gate_bias=("mlp.experts.gate_up_proj_bias", "E F|"),
            expert_up_bias=("mlp.experts.gate_up_proj_bias", "E F|"),
            expert_down_bias=("mlp.experts.down_proj_bias", "E D"),
        ),
    },
    expert_keys={
        **EXPERT_KEYS,
        "num_experts": "num_local_experts",
        "expert_ffn_size": "intermediate_size",
    },
    defaults={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "sliding_window_pattern": 2,
    },
    quantization="mxfp4",
)
