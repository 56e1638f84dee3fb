# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The model families whose `transformers` checkpoints can be read and written.

To add a family whose layers the decoder has already, write in this file:

1. its `Family` in FAMILIES, under the `model_type` of its config.json: which settings of
   ModelConfig its layers have, and which keys of config.json must hold which value, because the
   decoder computes only that;
2. its table of weights: for each parameter of parameters.py, the tensor's name, and the letters of
   its axes as the tensor has them. Letters that stand together are one axis of the tensor.

If its layers need more, ModelConfig gets a setting, parameters.py the parameters, decoder.py the
computation; layers never ask for a family. Then let tests/reference/make_reference.py write a small
model of it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from earl_jax.models.config import ModelConfig, RopeScaling


@dataclasses.dataclass(frozen=True)
class Weight:
    """A tensor of a checkpoint: its name ("{layer}" is a number), and its axes ("KGH D")."""

    name: str
    axes: str


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A description of layers, and a table of weights.

    `layers` are the settings of ModelConfig that this family fixes, `required` the keys of
    config.json with the one value that is computed rightly (a key that is absent has it),
    `head_dim` the size of a head where config.json leaves it out (None: width / heads).
    """

    architecture: str
    layers: Mapping[str, Any]
    required: Mapping[str, Any]
    weights: Mapping[str, Weight]
    head_dim: int | None = None


_NO_WINDOW = {"use_sliding_window": False}
# A bias of these would be one of the output projection too.
_NO_BIAS = {"attention_bias": False}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        layers={"attention_bias": False, "query_key_norm": False},
        required=_NO_BIAS | {"mlp_bias": False},
        weights=_WEIGHTS,
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        layers={"attention_bias": True, "query_key_norm": False},
        required=_NO_WINDOW,
        weights={**_WEIGHTS, **_BIASES},
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        layers={"attention_bias": False, "query_key_norm": True},
        required=_NO_WINDOW | _NO_BIAS,
        weights={**_WEIGHTS, **_NORMS},
        head_dim=128,
    ),
}
_REQUIRED = {"hidden_act": "silu", "quantization_config": None, "partial_rotary_factor": 1.0}
# What `transformers` takes where config.json says nothing.
_ROPE_THETA = 10_000.0
_NORM_EPS = 1e-6


def family_named(settings: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ValueError listing those known."""
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"model_type is {name!r}, which is not known here; known are {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def family_of(model: ModelConfig) -> Family:
    """The family whose layers these are. Raises ValueError where there is none."""
    for family in FAMILIES.values():
        if all(getattr(model, field) == value for field, value in family.layers.items()):
            return family
    known = "; ".join(
        f"{name} has " + ", ".join(f"{field}={value}" for field, value in family.layers.items())
        for name, family in FAMILIES.items()
    )
    raise ValueError(
        "no known family has layers with config.model.attention_bias="
        f"{model.attention_bias}, config.model.query_key_norm={model.query_key_norm}: {known}"
    )


def read_settings(settings: Mapping[str, Any]) -> tuple[ModelConfig, int]:
    """The model that a config.json describes, and the size of its vocabulary.

    Raises:
        ValueError: an unknown family, a missing key, or one that would be computed wrongly.
    """
    family = family_named(settings)
    for key, value in {**_REQUIRED, **family.required}.items():
        if settings.get(key, value) != value:
            raise ValueError(f"{key} is {settings[key]!r}; only {value!r} can be computed")
    kinds = set(settings.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ValueError(
            f"layer_types has {', '.join(sorted(kinds))}; only full_attention can be computed"
        )

    def size(key: str) -> int:
        value = settings.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key} is {value!r}; it must be a whole number of at least 1")
        return value

    heads, width = size("num_attention_heads"), size("hidden_size")
    if settings.get("head_dim") is not None:
        head_size = size("head_dim")
    else:
        head_size = family.head_dim or width // heads
    theta, scaling = _read_rope(settings)
    model = ModelConfig(
        num_layers=size("num_hidden_layers"),
        width=width,
        num_heads=heads,
        num_kv_heads=heads
        if settings.get("num_key_value_heads") is None
        else size("num_key_value_heads"),
        head_size=head_size,
        ffn_size=size("intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=settings.get("rms_norm_eps", _NORM_EPS),
        tie_embeddings=settings.get("tie_word_embeddings", False),
        **family.layers,
    )
    model.validate()
    return model, size("vocab_size")


def _read_rope(settings: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Older files have rope_theta and rope_scaling, newer ones both in rope_parameters."""
    key = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    rope = settings.get(key) or {}
    theta = float(rope.get("rope_theta", settings.get("rope_theta", _ROPE_THETA)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{key}.partial_rotary_factor is {rope['partial_rotary_factor']!r}; only whole heads "
            "are rotated here"
        )
    if kind == "default":
        return theta, RopeScaling()
    if kind != "llama3":
        raise ValueError(
            f"{key} is of the type {kind!r}; only 'default' and 'llama3' can be computed"
        )
    try:
        return theta, RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ValueError(f"{key} of the type 'llama3' has no {error.args[0]}") from error


def write_settings(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The inverse of `read_settings`: what a config.json must say of this model.

    Raises:
        ValueError: no known family has such layers.
    """
    family = family_of(model)
    scaling = model.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if scaling.factor > 1:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    return {
        "architectures": [family.architecture],
        "model_type": next(name for name, known in FAMILIES.items() if known is family),
        "hidden_act": "silu",
        "hidden_size": model.width,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": model.tie_embeddings,
        "vocab_size": vocab_size,
        **family.required,
    }
