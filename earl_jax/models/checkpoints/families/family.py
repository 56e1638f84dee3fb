# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A family of models: what its layers have, and how its checkpoints describe and store them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from earl_jax.models.checkpoints.families.weights import Weight

# The settings of ModelConfig that say how layers compute, as plain layers, those of Llama, have
# them. A family states what differs.
PLAIN: Mapping[str, Any] = {
    # Latent attention, and the mixtures of DeepSeek.
    "rope_interleaved": False,
    "latent_size": 0,
    "num_dense_layers": 0,
    "shared_ffn_size": 0,
    "router_scores": "softmax",
    "router_correction": False,
    "expert_groups": 1,
    "expert_scale": 1.0,
    # Linear attention.
    "attention_every": 0,
    "attention_gate": False,
    "rope_size": 0,
    "shared_ffn_gate": False,
    # Biases and sinks.
    "attention_bias": False,
    "out_bias": False,
    "attention_sinks": False,
    "expert_bias": False,
    # Norms and activations.
    "query_key_norm": "",
    "norm_from_one": False,
    "pre_norms": True,
    "post_norms": False,
    "scale_embeddings": False,
    "activation": "silu",
    # Rotation and scores.
    "window_rope_theta": 0.0,
    "no_rope_every": 0,
    "query_pre_attn_scalar": 0,
    "attention_softcap": 0.0,
    "final_softcap": 0.0,
    "num_experts": 0,
}
# The keys of config.json that give the settings of experts.
EXPERT_KEYS: Mapping[str, str] = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn_size": "moe_intermediate_size",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The layers of a family, its config.json, and its tensors.

    The settings of its layers:

    - `layers`: settings of ModelConfig that every model of the family has, and plain layers have
      not.
    - `free`: the settings that config.json gives. All others of PLAIN are as there.
    - `windows`: the layers with a sliding window. "none"; "all", where there is a sliding_window;
      "by_flag", those from max_window_layers where use_sliding_window; "by_pattern", all but every
      sliding_window_pattern-th. With the last two layer_types may say otherwise.

    Its config.json:

    - `model_type`, `architecture`: its names there.
    - `also_named`: other model_types of such models; they are written under `model_type`.
    - `required`: keys with the one value that is computed rightly; a key that is absent or null has
      it.
    - `defaults`: what `transformers` takes for keys that are absent.
    - `expert_keys`: the keys of settings of experts, which a family without them never reads.
    - `window_rope_key`: has the rotary base of layers with a window in an older file; "": that of
      all layers.
    - `width_by_heads`: `transformers` reads only models whose heads divide their width.
    - `quantization`: the quant_method of weights that are read; quantised ones are never written.

    Its tensors:

    - `weights`: by the keys of parameters; those that a model does not have are passed over.
    - `text_of`: the model_type of a model that reads images as well, whose checkpoints are read
      too; their text_config and the weights of "model.language_model." count.
    - `fused_weights`: the weights that differ there.
    """

    model_type: str
    architecture: str
    also_named: tuple[str, ...] = ()
    weights: Mapping[str, Weight]
    layers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    free: tuple[str, ...] = ()
    windows: Literal["none", "all", "by_flag", "by_pattern"] = "none"
    required: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    expert_keys: Mapping[str, str] = dataclasses.field(default_factory=lambda: EXPERT_KEYS)
    window_rope_key: str = ""
    width_by_heads: bool = False
    quantization: str = ""
    text_of: str = ""
    fused_weights: Mapping[str, Weight] = dataclasses.field(default_factory=dict)

    @property
    def fixed(self) -> dict[str, Any]:
        """The settings that every model of the family has."""
        plain = {field: value for field, value in PLAIN.items() if field not in self.free}
        return {**plain, **self.layers}

    @property
    def has_latents(self) -> bool:
        """True for latent attention, with the mixtures of DeepSeek (hf_deepseek.py)."""
        return "latent_size" in self.free

    @property
    def has_states(self) -> bool:
        """True for layers of linear attention (hf_linear.py)."""
        return "attention_every" in self.free
