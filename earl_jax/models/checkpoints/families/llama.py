# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Llama, and SmolLM3, some of whose layers do not rotate."""

from earl_jax.models.checkpoints.families.family import Family
from earl_jax.models.checkpoints.families.weights import PLAIN_WEIGHTS

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    # A bias of attention would be one of the output projection too.
    required={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    weights=PLAIN_WEIGHTS,
    width_by_heads=True,
)
SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    free=("no_rope_every",),
    required={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    },
    weights=PLAIN_WEIGHTS,
    width_by_heads=True,
    defaults={
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
)
