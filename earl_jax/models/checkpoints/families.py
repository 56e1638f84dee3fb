# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The model families whose `transformers` checkpoints can be read and written.

To add a family whose layers the decoder has already, write in this file:

1. its `Family` in FAMILIES, under the `model_type` of its config.json: which settings of
   ModelConfig its layers have, and which keys of config.json must hold which value, because the
   decoder computes only that;
2. its table of weights: for each parameter of parameters.py, the tensor's name, and the letters of
   its axes as the tensor has them. Letters that stand together are one axis of the tensor.

If its layers need more, ModelConfig gets a setting (and _PLAIN its value where layers are without),
hf_settings.py its key of config.json, parameters.py the parameters, decoder.py the computation;
layers never ask for a family.

Then let tests/reference/make_reference.py write a small model of it, and name one in presets.py:
tests/test_families.py and tests/test_presets.py ask for both. tests/test_adding_a_family.py reads,
computes and writes one that is made up, of nothing but two entries.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from earl_jax.models.activations import SWIGLU_ALPHA, SWIGLU_LIMIT
from earl_jax.models.config import ModelConfig
from earl_jax.settings.errors import InputError


@dataclasses.dataclass(frozen=True)
class Weight:
    """A tensor of a checkpoint: its name, and its axes ("KGH D").

    "{layer}" and "{expert}" in the name are numbers; each layer and expert is a tensor of its own.
    A dot is an axis of one number.

    Where parameters share a tensor, one of its axes is cut between letters, at "|": each place of
    those before has the numbers of all these parameters, one parameter after the other in the order
    of the table. Of "D F|" and "D F|" the one has the even columns, the other the odd ones; of
    "|KH D" and "|F D" the one has the first rows, the other those behind. Of the numbers of such a
    place the parameter's begin at `first`, and there are `total`.
    """

    name: str
    axes: str
    first: int = 0
    total: int = 0

    @property
    def letters(self) -> str:
        """The axes that the parameter has too, in the order of the tensor."""
        return "".join(filter(str.isalpha, self.axes))

    @property
    def is_shared(self) -> bool:
        """True if the tensor has another parameter too."""
        return "|" in self.axes

    @property
    def shared_letters(self) -> str:
        """The letters behind the cut."""
        return self.axes.partition("|")[2].partition(" ")[0]


# Keyed by where parameters.py has the parameter.
_WEIGHTS: Mapping[str, Weight] = {
    "embed": Weight("model.embed_tokens.weight", "V D"),
    "layers.attention_norm": Weight("model.layers.{layer}.input_layernorm.weight", "D"),
    "layers.query": Weight("model.layers.{layer}.self_attn.q_proj.weight", "KGH D"),
    "layers.key": Weight("model.layers.{layer}.self_attn.k_proj.weight", "KH D"),
    "layers.value": Weight("model.layers.{layer}.self_attn.v_proj.weight", "KH D"),
    "layers.out": Weight("model.layers.{layer}.self_attn.o_proj.weight", "D KGH"),
    "layers.ffn_norm": Weight("model.layers.{layer}.post_attention_layernorm.weight", "D"),
    "layers.gate": Weight("model.layers.{layer}.mlp.gate_proj.weight", "F D"),
    "layers.up": Weight("model.layers.{layer}.mlp.up_proj.weight", "F D"),
    "layers.down": Weight("model.layers.{layer}.mlp.down_proj.weight", "D F"),
    "final_norm": Weight("model.norm.weight", "D"),
    "head": Weight("lm_head.weight", "V D"),
}
_BIASES: Mapping[str, Weight] = {
    "layers.query_bias": Weight("model.layers.{layer}.self_attn.q_proj.bias", "KGH"),
    "layers.key_bias": Weight("model.layers.{layer}.self_attn.k_proj.bias", "KH"),
    "layers.value_bias": Weight("model.layers.{layer}.self_attn.v_proj.bias", "KH"),
}
_NORMS: Mapping[str, Weight] = {
    "layers.query_norm": Weight("model.layers.{layer}.self_attn.q_norm.weight", "H"),
    "layers.key_norm": Weight("model.layers.{layer}.self_attn.k_norm.weight", "H"),
}
_EXPERTS: Mapping[str, Weight] = {
    "layers.router": Weight("model.layers.{layer}.mlp.gate.weight", "X D"),
    "layers.expert_gate": Weight(
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", "F D"
    ),
    "layers.expert_up": Weight("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", "F D"),
    "layers.expert_down": Weight(
        "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", "D F"
    ),
}


_MIXTRAL_EXPERTS: Mapping[str, Weight] = {
    "layers.router": Weight("model.layers.{layer}.block_sparse_moe.gate.weight", "X D"),
    "layers.expert_gate": Weight(
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight", "F D"
    ),
    "layers.expert_up": Weight(
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight", "F D"
    ),
    "layers.expert_down": Weight(
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight", "D F"
    ),
}


# Biases of attention and experts, attention sinks, and the experts' gate and up in one tensor.
_GPT_OSS: Mapping[str, Weight] = {
    "layers.out_bias": Weight("model.layers.{layer}.self_attn.o_proj.bias", "D"),
    "layers.sinks": Weight("model.layers.{layer}.self_attn.sinks", "KG"),
    "layers.router": Weight("model.layers.{layer}.mlp.router.weight", "X D"),
    "layers.router_bias": Weight("model.layers.{layer}.mlp.router.bias", "X"),
    "layers.expert_gate": Weight("model.layers.{layer}.mlp.experts.gate_up_proj", "E D F|"),
    "layers.expert_up": Weight("model.layers.{layer}.mlp.experts.gate_up_proj", "E D F|"),
    "layers.expert_down": Weight("model.layers.{layer}.mlp.experts.down_proj", "E F D"),
    "layers.expert_gate_bias": Weight("model.layers.{layer}.mlp.experts.gate_up_proj_bias", "E F|"),
    "layers.expert_up_bias": Weight("model.layers.{layer}.mlp.experts.gate_up_proj_bias", "E F|"),
    "layers.expert_down_bias": Weight("model.layers.{layer}.mlp.experts.down_proj_bias", "E D"),
}


# Latents of keys and values, and of queries where these have some; shared experts; the router's
# corrections.
_DEEPSEEK: Mapping[str, Weight] = {
    "layers.query_down": Weight("model.layers.{layer}.self_attn.q_a_proj.weight", "A D"),
    "layers.query_down_norm": Weight("model.layers.{layer}.self_attn.q_a_layernorm.weight", "A"),
    "layers.query_up": Weight("model.layers.{layer}.self_attn.q_b_proj.weight", "KGH A"),
    "layers.latent": Weight("model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight", "A D"),
    "layers.latent_norm": Weight("model.layers.{layer}.self_attn.kv_a_layernorm.weight", "A"),
    "layers.latent_up": Weight("model.layers.{layer}.self_attn.kv_b_proj.weight", "KH A"),
    "layers.shared_gate": Weight("model.layers.{layer}.mlp.shared_experts.gate_proj.weight", "F D"),
    "layers.shared_up": Weight("model.layers.{layer}.mlp.shared_experts.up_proj.weight", "F D"),
    "layers.shared_down": Weight("model.layers.{layer}.mlp.shared_experts.down_proj.weight", "D F"),
    "layers.router_correction": Weight(
        "model.layers.{layer}.mlp.gate.e_score_correction_bias", "X"
    ),
}


_SHARED_EXPERT: Mapping[str, Weight] = {
    "layers.shared_gate": Weight("model.layers.{layer}.mlp.shared_expert.gate_proj.weight", "F D"),
    "layers.shared_up": Weight("model.layers.{layer}.mlp.shared_expert.up_proj.weight", "F D"),
    "layers.shared_down": Weight("model.layers.{layer}.mlp.shared_expert.down_proj.weight", "D F"),
    "layers.shared_router": Weight("model.layers.{layer}.mlp.shared_expert_gate.weight", "X D"),
}
# As `transformers` 5 has experts, and Qwen3.5 is published.
_FUSED_EXPERTS: Mapping[str, Weight] = {
    "layers.expert_gate": Weight("model.layers.{layer}.mlp.experts.gate_up_proj", "E |F D"),
    "layers.expert_up": Weight("model.layers.{layer}.mlp.experts.gate_up_proj", "E |F D"),
    "layers.expert_down": Weight("model.layers.{layer}.mlp.experts.down_proj", "E D F"),
}
# Layers of linear attention, and the gate that attention has beside them: of each head behind its
# query.
_LINEAR: Mapping[str, Weight] = {
    "layers.query": Weight("model.layers.{layer}.self_attn.q_proj.weight", "KG|H D"),
    "layers.attention_gate": Weight("model.layers.{layer}.self_attn.q_proj.weight", "KG|H D"),
    "layers.linear_query_taps": Weight("model.layers.{layer}.linear_attn.conv1d.weight", "|KH . I"),
    "layers.linear_key_taps": Weight("model.layers.{layer}.linear_attn.conv1d.weight", "|KH . I"),
    "layers.linear_value_taps": Weight(
        "model.layers.{layer}.linear_attn.conv1d.weight", "|KGH . I"
    ),
    "layers.linear_decay_bias": Weight("model.layers.{layer}.linear_attn.dt_bias", "KG"),
    "layers.linear_log_decay": Weight("model.layers.{layer}.linear_attn.A_log", "KG"),
    "layers.linear_norm": Weight("model.layers.{layer}.linear_attn.norm.weight", "H"),
    "layers.linear_out": Weight("model.layers.{layer}.linear_attn.out_proj.weight", "D KGH"),
}
# In one tensor by heads of keys, or in one end to end and in three.
_LINEAR_BY_HEADS: Mapping[str, Weight] = {
    f"layers.linear_{name}": Weight(
        f"model.layers.{{layer}}.linear_attn.in_proj_{tensor}.weight", axes
    )
    for name, tensor, axes in (
        ("query", "qkvz", "K|H D"),
        ("key", "qkvz", "K|H D"),
        ("value", "qkvz", "K|GH D"),
        ("gate", "qkvz", "K|GH D"),
        ("rate", "ba", "K|G D"),
        ("decay", "ba", "K|G D"),
    )
}
_LINEAR_APART: Mapping[str, Weight] = {
    f"layers.linear_{name}": Weight(
        f"model.layers.{{layer}}.linear_attn.in_proj_{tensor}.weight", axes
    )
    for name, tensor, axes in (
        ("query", "qkv", "|KH D"),
        ("key", "qkv", "|KH D"),
        ("value", "qkv", "|KGH D"),
        ("gate", "z", "KGH D"),
        ("rate", "b", "KG D"),
        ("decay", "a", "KG D"),
    )
}


# What Llama calls the norm after attention stands before the feed-forward network.
_GEMMA_NORMS: Mapping[str, Weight] = {
    "layers.post_attention_norm": Weight(
        "model.layers.{layer}.post_attention_layernorm.weight", "D"
    ),
    "layers.ffn_norm": Weight("model.layers.{layer}.pre_feedforward_layernorm.weight", "D"),
    "layers.post_ffn_norm": Weight("model.layers.{layer}.post_feedforward_layernorm.weight", "D"),
}


_WHOLE_NORMS: Mapping[str, Weight] = {
    "layers.query_norm": Weight("model.layers.{layer}.self_attn.q_norm.weight", "KGH"),
    "layers.key_norm": Weight("model.layers.{layer}.self_attn.k_norm.weight", "KH"),
}
_OLMO_NORMS: Mapping[str, Weight] = {
    **_WHOLE_NORMS,
    "layers.post_attention_norm": _GEMMA_NORMS["layers.post_attention_norm"],
    "layers.post_ffn_norm": _GEMMA_NORMS["layers.post_ffn_norm"],
}
_EXPERT_KEYS: Mapping[str, str] = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn_size": "moe_intermediate_size",
}
_LOCAL_EXPERT_KEYS: Mapping[str, str] = {
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn_size": "intermediate_size",
}
_ROUTED_EXPERT_KEYS: Mapping[str, str] = {**_EXPERT_KEYS, "num_experts": "n_routed_experts"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A description of layers, and a table of weights.

    `layers` are the settings of ModelConfig that this family fixes, `required` the keys of
    config.json with the one value that is computed rightly (a key that is absent or null has it),
    `defaults` what `transformers` takes for keys that are absent.

    `windows` selects the layers with a sliding window: "none"; "all", where there is a
    sliding_window; "by_flag", those from max_window_layers where use_sliding_window; "by_pattern",
    all but every sliding_window_pattern-th. With the last two layer_types may say otherwise.
    `window_rope_key` has the rotary base of these layers in an older config.json; "": that of all.
    `expert_keys` are the keys of settings of experts, which a family without them never reads.
    Where `width_by_heads`, `transformers` reads only models whose heads divide their width.
    `quantization` is the quant_method of weights that are read (quantised ones are never written).
    A family that is the `text_of` a model_type that reads images as well is read from its
    checkpoints too, of which the text_config and the weights of "model.language_model." count;
    `fused_weights` are those that differ there.
    """

    architecture: str
    layers: Mapping[str, Any]
    required: Mapping[str, Any]
    weights: Mapping[str, Weight]
    windows: Literal["none", "all", "by_flag", "by_pattern"] = "none"
    window_rope_key: str = ""
    expert_keys: Mapping[str, str] = dataclasses.field(default_factory=lambda: _EXPERT_KEYS)
    width_by_heads: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quantization: str = ""
    text_of: str = ""
    fused_weights: Mapping[str, Weight] = dataclasses.field(default_factory=dict)

    @property
    def has_latents(self) -> bool:
        """True for latent attention, with the mixtures of DeepSeek (hf_deepseek.py)."""
        return "latent_size" not in self.layers

    @property
    def has_states(self) -> bool:
        """True for layers of linear attention (hf_linear.py)."""
        return "attention_every" not in self.layers


# Of DeepSeek.
_NO_LATENTS: Mapping[str, Any] = {
    "rope_interleaved": False,
    "latent_size": 0,
    "num_dense_layers": 0,
    "shared_ffn_size": 0,
    "router_scores": "softmax",
    "router_correction": False,
    "expert_groups": 1,
    "expert_scale": 1.0,
}
_NO_STATES: Mapping[str, Any] = {"attention_every": 0, "attention_gate": False, "rope_size": 0}
_PLAIN: Mapping[str, Any] = {
    **_NO_LATENTS,
    **_NO_STATES,
    "shared_ffn_gate": False,
    "attention_bias": False,
    "out_bias": False,
    "attention_sinks": False,
    "expert_bias": False,
    "query_key_norm": "",
    "norm_from_one": False,
    "pre_norms": True,
    "post_norms": False,
    "scale_embeddings": False,
    "activation": "silu",
    "window_rope_theta": 0.0,
    "no_rope_every": 0,
    "query_pre_attn_scalar": 0,
    "attention_softcap": 0.0,
    "final_softcap": 0.0,
    "num_experts": 0,
}
_SILU = {"hidden_act": "silu"}
# A bias of these would be one of the output projection too.
_NO_BIAS = {"attention_bias": False}
_GEMMA: Mapping[str, Any] = {
    **_NO_LATENTS,
    **_NO_STATES,
    "shared_ffn_gate": False,
    "attention_bias": False,
    "out_bias": False,
    "attention_sinks": False,
    "expert_bias": False,
    "norm_from_one": True,
    "pre_norms": True,
    "post_norms": True,
    "no_rope_every": 0,
    "scale_embeddings": True,
    "activation": "gelu_tanh",
    "num_experts": 0,
}
_GEMMA_REQUIRED: Mapping[str, Any] = _NO_BIAS | {
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
}
_OLMO2: Mapping[str, Any] = {
    **_PLAIN,
    "query_key_norm": "all",
    "pre_norms": False,
    "post_norms": True,
}


def _without(settings: Mapping[str, Any], *fields: str) -> dict[str, Any]:
    return {field: value for field, value in settings.items() if field not in fields}


_LATENTS: Mapping[str, Any] = _without(_PLAIN, *_NO_LATENTS, "num_experts", "rope_size")
# Of Qwen3-Next and Qwen3.5.
_STATES: Mapping[str, Any] = {
    **_without(_PLAIN, *_NO_STATES),
    "attention_gate": True,
    "query_key_norm": "head",
    "norm_from_one": True,
}
_STATE_MIXTURE: Mapping[str, Any] = {
    **_without(_STATES, "num_experts", "shared_ffn_size"),
    "shared_ffn_gate": True,
}
_STATE_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MIXTURE_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    # Of a model all of whose layers have experts it is not read; nor is it written for Qwen3.5.
    "intermediate_size": 5632,
}
_LATENT_WEIGHTS: Mapping[str, Weight] = {
    **_without(_WEIGHTS, "layers.key", "layers.value"),
    **_EXPERTS,
    **_DEEPSEEK,
}
_DEEPSEEK_DEFAULTS: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        layers=_PLAIN,
        required=_SILU | _NO_BIAS | {"mlp_bias": False},
        weights=_WEIGHTS,
        width_by_heads=True,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        layers=_PLAIN,
        required=_SILU,
        weights=_WEIGHTS,
        windows="all",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        layers={**_PLAIN, "attention_bias": True},
        required=_SILU,
        weights={**_WEIGHTS, **_BIASES},
        windows="by_flag",
        defaults={"sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        layers={**_PLAIN, "query_key_norm": "head"},
        required=_SILU | _NO_BIAS,
        weights={**_WEIGHTS, **_NORMS},
        windows="by_flag",
        defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        layers={
            **_without(_PLAIN, "num_experts"),
            "query_key_norm": "head",
        },
        required=_SILU
        | _NO_BIAS
        # Layers without experts beside layers with them cannot be stacked for the scan.
        | {"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        weights={**_WEIGHTS, **_NORMS, **_EXPERTS},
        defaults={"num_key_value_heads": 4, "norm_topk_prob": False},
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        layers={**_without(_PLAIN, "num_experts"), "normalize_expert_weights": True},
        required=_SILU,
        weights={**_WEIGHTS, **_MIXTRAL_EXPERTS},
        windows="all",
        expert_keys=_LOCAL_EXPERT_KEYS,
        defaults={"num_key_value_heads": 8, "sliding_window": None, "rms_norm_eps": 1e-5},
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        layers=_OLMO2,
        required=_SILU | _NO_BIAS,
        weights={**_without(_WEIGHTS, "layers.attention_norm", "layers.ffn_norm"), **_OLMO_NORMS},
        width_by_heads=True,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        layers=_without(_OLMO2, "window_rope_theta"),
        required=_SILU | _NO_BIAS,
        weights={**_without(_WEIGHTS, "layers.attention_norm", "layers.ffn_norm"), **_OLMO_NORMS},
        windows="by_pattern",
        window_rope_key="rope_theta",
        width_by_heads=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        layers={**_without(_PLAIN, "num_experts"), "query_key_norm": "all"},
        required=_SILU | _NO_BIAS | {"clip_qkv": None},
        weights={**_WEIGHTS, **_WHOLE_NORMS, **_EXPERTS},
        expert_keys={**_EXPERT_KEYS, "expert_ffn_size": "intermediate_size"},
        width_by_heads=True,
        defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": False},
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        layers={
            **_without(_PLAIN, "num_experts"),
            "attention_bias": True,
            "out_bias": True,
            "attention_sinks": True,
            "expert_bias": True,
            "normalize_expert_weights": True,
            "activation": "swiglu_clamped",
        },
        required=_SILU
        | {"attention_bias": True, "swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT},
        weights={**_WEIGHTS, **_BIASES, **_GPT_OSS},
        windows="by_pattern",
        expert_keys=_LOCAL_EXPERT_KEYS,
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
    ),
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        layers={
            **_LATENTS,
            "rope_interleaved": True,
            "router_scores": "softmax",
            "router_correction": False,
            "group_score": 1,
            "normalize_expert_weights": False,
        },
        required=_SILU
        | _NO_BIAS
        | {
            "mlp_bias": False,
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "moe_layer_freq": 1,
        },
        weights=_LATENT_WEIGHTS,
        width_by_heads=True,
        expert_keys=_ROUTED_EXPERT_KEYS,
        defaults={
            **_DEEPSEEK_DEFAULTS,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
        },
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        layers={
            **_LATENTS,
            "router_scores": "sigmoid",
            "router_correction": True,
            "group_score": 2,
        },
        required=_SILU
        | _NO_BIAS
        | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        weights=_LATENT_WEIGHTS,
        expert_keys=_ROUTED_EXPERT_KEYS,
        defaults={
            **_DEEPSEEK_DEFAULTS,
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
    ),
    "qwen3_next": Family(
        architecture="Qwen3NextForCausalLM",
        layers=_STATE_MIXTURE,
        required=_SILU | _NO_BIAS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        weights={
            **_WEIGHTS,
            **_NORMS,
            **_EXPERTS,
            **_SHARED_EXPERT,
            **_LINEAR,
            **_LINEAR_BY_HEADS,
        },
        defaults={
            **_STATE_DEFAULTS,
            **_MIXTURE_DEFAULTS,
            "num_experts": 512,
            "num_experts_per_tok": 10,
        },
    ),
    "qwen3_5_text": Family(
        architecture="Qwen3_5ForCausalLM",
        layers=_STATES,
        required=_SILU | _NO_BIAS,
        weights={**_WEIGHTS, **_NORMS, **_LINEAR, **_LINEAR_APART},
        defaults={**_STATE_DEFAULTS, "num_key_value_heads": 4},
        text_of="qwen3_5",
    ),
    "qwen3_5_moe_text": Family(
        architecture="Qwen3_5MoeForCausalLM",
        layers={**_STATE_MIXTURE, "normalize_expert_weights": True},
        required=_SILU | _NO_BIAS,
        weights={
            **_WEIGHTS,
            **_NORMS,
            **_EXPERTS,
            **_SHARED_EXPERT,
            **_LINEAR,
            **_LINEAR_APART,
        },
        defaults={
            **_STATE_DEFAULTS,
            **_MIXTURE_DEFAULTS,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        text_of="qwen3_5_moe",
        fused_weights=_FUSED_EXPERTS,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        layers=_without(_PLAIN, "no_rope_every"),
        required=_SILU | _NO_BIAS | {"mlp_bias": False, "use_sliding_window": False},
        weights=_WEIGHTS,
        width_by_heads=True,
        defaults={
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        layers={**_GEMMA, "query_key_norm": "", "window_rope_theta": 0.0},
        required=_GEMMA_REQUIRED,
        weights={**_WEIGHTS, **_GEMMA_NORMS},
        windows="by_pattern",
        width_by_heads=True,
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        layers={**_GEMMA, "query_key_norm": "head"},
        required=_GEMMA_REQUIRED,
        weights={**_WEIGHTS, **_NORMS, **_GEMMA_NORMS},
        windows="by_pattern",
        window_rope_key="rope_local_base_freq",
        width_by_heads=True,
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10_000.0,
            "rope_theta": 1_000_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
    ),
}
# Known, and why they are not in the table.
_REFUSED = {
    "gemma3": (
        "which reads images as well; only its language model can be trained here: save that "
        "alone, as Gemma3ForCausalLM, whose model_type is 'gemma3_text'"
    ),
}


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the config.json of the text part of a model that reads images too, else None."""
    for name, family in FAMILIES.items():
        if family.text_of and settings.get("model_type") == family.text_of:
            text = settings.get("text_config")
            if not isinstance(text, Mapping):
                raise InputError(f"text_config is {text!r}; it must be an object")
            kept = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
            above = {key: settings[key] for key in kept if key in settings}
            own = {"model_type": name, "architectures": [family.architecture]}
            return {**above, **text, **own}
    return None


def family_named(settings: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json. Raises ValueError listing those known."""
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        reason = _REFUSED.get(str(name), "which is not known here")
        raise InputError(f"model_type is {name!r}, {reason}; known are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_of(model: ModelConfig) -> Family:
    """Returns the family that has such layers. Raises ValueError where there is none."""
    for family in FAMILIES.values():
        fixed = all(getattr(model, field) == value for field, value in family.layers.items())
        fixed = fixed and family.has_latents == (model.latent_size > 0)
        fixed = fixed and family.has_states == model.has_states
        if fixed and _has_windows(family, model):
            if family.width_by_heads and model.width % model.num_heads:
                raise InputError(
                    f"config.model.width={model.width} is no multiple of num_heads="
                    f"{model.num_heads}, and `transformers` reads no such {family.architecture}"
                )
            return family
    given = [
        f"config.model.{field}={getattr(model, field)!r}"
        for field, value in (*_PLAIN.items(), ("windows", ()))
        if getattr(model, field) != value
    ]
    known = "; ".join(
        f"{name} has " + ", ".join(_particular(family)) for name, family in FAMILIES.items()
    )
    raise InputError(
        f"no known family has layers with {', '.join(given)}: {known}; all windows are of one size"
    )


def _has_windows(family: Family, model: ModelConfig) -> bool:
    """Returns True if the family can have these; a config.json holds one size of window."""
    sizes = set(model.layer_windows)
    if family.windows == "none":
        return sizes == {0}
    if family.windows == "all":
        return len(sizes) == 1
    return len(sizes - {0}) <= 1


def _particular(family: Family) -> list[str]:
    """Returns the features of a family beyond plain layers, in words."""
    words = [
        f"{field}={value!r}" for field, value in family.layers.items() if value != _PLAIN.get(field)
    ]
    free = [f"any {field}" for field in _PLAIN if field not in family.layers]
    windows = {"none": "no windows", "all": "windows in all layers"}
    return [*words, *free, windows.get(family.windows, "windows in any layers")]
