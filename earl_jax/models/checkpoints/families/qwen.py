# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5, with biases of queries, keys and values; Qwen3, with norms of them."""

from earl_jax.models.checkpoints.families.family import Family
from earl_jax.models.checkpoints.families.weights import (
    BIASES,
    EXPERTS,
    HEAD_NORMS,
    PLAIN_WEIGHTS,
)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    layers={"attention_bias": True},
    windows="by_flag",
    required={"hidden_act": "silu"},
    weights={**PLAIN_WEIGHTS, **BIASES},
    defaults={"sliding_window": 4096, "max_window_layers": 28},
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    layers={"query_key_norm": "head"},
    windows="by_flag",
    required={"hidden_act": "silu", "attention_bias": False},
    weights={**PLAIN_WEIGHTS, **HEAD_NORMS},
    defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    layers={"query_key_norm": "head"},
    free=("num_experts",),
    required={
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        # Layers without experts beside layers with them cannot be stacked for the scan.
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    weights={**PLAIN_WEIGHTS, **HEAD_NORMS, **EXPERTS},
    defaults={"num_key_value_heads": 4, "norm_topk_prob": False},
)
