# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Mistral, whose layers have a window, and its mixture Mixtral."""

from earl_jax.models.checkpoints.families.family import EXPERT_KEYS, Family
from earl_jax.models.checkpoints.families.weights import PLAIN_WEIGHTS, layer_weights

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    windows="all",
    required={"hidden_act": "silu"},
    weights=PLAIN_WEIGHTS,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    layers={"normalize_expert_weights": True},
    free=("num_experts",),
    windows="all",
    required={"hidden_act": "silu"},
    weights={
        **PLAIN_WEIGHTS,
        **layer_weights(
            router=("block_sparse_moe.gate.weight", "X D"),
            expert_gate=("block_sparse_moe.experts.{expert}.w1.weight", "F D"),
            expert_up=("block_sparse_moe.experts.{expert}.w3.weight", "F D"),
            expert_down=("block_sparse_moe.experts.{expert}.w2.weight", "D F"),
        ),
    },
    expert_keys={
        **EXPERT_KEYS,
        "num_experts": "num_local_experts",
        "expert_ffn_size": "intermediate_size",
    },
    defaults={"num_key_value_heads": 8, "sliding_window": None, "rms_norm_eps": 1e-5},
)
