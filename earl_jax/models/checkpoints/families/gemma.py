# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 and the language models of Gemma 3."""

from earl_jax.models.checkpoints.families.family import Family
from earl_jax.models.checkpoints.families.weights import HEAD_NORMS, PLAIN_WEIGHTS, layer_weights

_LAYERS = {
    "norm_from_one": True,
    "post_norms": True,
    "scale_embeddings": True,
    "activation": "gelu_tanh",
}
_FREE = ("query_pre_attn_scalar", "attention_softcap", "final_softcap")
_REQUIRED = {
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
}
# The norm that Llama calls the one after attention stands before the feed-forward network.
_WEIGHTS = {
    **PLAIN_WEIGHTS,
    **layer_weights(
        post_attention_norm=("post_attention_layernorm.weight", "D"),
        ffn_norm=("pre_feedforward_layernorm.weight", "D"),
        post_ffn_norm=("post_feedforward_layernorm.weight", "D"),
    ),
}
_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    layers=_LAYERS,
    free=_FREE,
    windows="by_pattern",
    required=_REQUIRED,
    weights=_WEIGHTS,
    width_by_heads=True,
    defaults={
        **_DEFAULTS,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    layers={**_LAYERS, "query_key_norm": "head"},
    free=(*_FREE, "window_rope_theta"),
    windows="by_pattern",
    required=_REQUIRED,
    weights={**_WEIGHTS, **HEAD_NORMS},
    window_rope_key="rope_local_base_freq",
    width_by_heads=True,
    defaults={
        **_DEFAULTS,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "sliding_window_pattern": 6,
    },
)
