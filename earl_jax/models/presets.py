# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Published models by name: the settings of their config.json, without weights.

A run makes its own vocabulary; the published sizes are for planning one. Where the base and the
instruct model of a size differ (Qwen2.5 in norm_eps), these are the instruct model's settings.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from earl_jax.models.config import MODEL_SETTINGS, ModelConfig, RopeScaling
from earl_jax.settings.errors import InputError


def _config(
    num_layers: int, width: int, heads: tuple[int, int, int], ffn_size: int, **settings: Any
) -> ModelConfig:
    """Returns a preset; `heads` are query heads, key/value heads, and the size of one."""
    return ModelConfig(
        num_layers=num_layers,
        width=width,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=heads[2],
        ffn_size=ffn_size,
        **settings,
    )


def _experts(number: int, per_token: int, ffn_size: int) -> dict[str, Any]:
    return {
        "num_experts": number,
        "experts_per_token": per_token,
        "expert_ffn_size": ffn_size,
        "normalize_expert_weights": True,
    }


_QWEN2: Mapping[str, Any] = {"rope_theta": 1e6, "attention_bias": True}
_QWEN3: Mapping[str, Any] = {"rope_theta": 1e6, "query_key_norm": "head"}
_LLAMA3: Mapping[str, Any] = {
    "rope_theta": 5e5,
    "norm_eps": 1e-5,
    "rope_scaling": RopeScaling(factor=8.0),
}
_LLAMA32: Mapping[str, Any] = {
    **_LLAMA3,
    "rope_scaling": RopeScaling(factor=32.0),
    "tie_embeddings": True,
}
_GEMMA: Mapping[str, Any] = {
    "norm_from_one": True,
    "post_norms": True,
    "activation": "gelu_tanh",
    "tie_embeddings": True,
    "scale_embeddings": True,
}
_GEMMA2: Mapping[str, Any] = {
    **_GEMMA,
    "windows": (4096, 0),
    "attention_softcap": 50.0,
    "final_softcap": 30.0,
}
_GEMMA3: Mapping[str, Any] = {
    **_GEMMA,
    "rope_theta": 1e6,
    "rope_scaling": RopeScaling(kind="linear", factor=8.0),
    "windows": (1024,) * 5 + (0,),
    "window_rope_theta": 1e4,
    "query_key_norm": "head",
}
_GEMMA3_1B: Mapping[str, Any] = {
    **_GEMMA3,
    "rope_scaling": RopeScaling(),
    "windows": (512,) * 5 + (0,),
}

_OLMO3: Mapping[str, Any] = {
    "rope_theta": 5e5,
    "rope_scaling": RopeScaling(
        kind="yarn", factor=8.0, high_freq_factor=32.0, attention_factor=1.2079441541679836
    ),
    "windows": (4096,) * 3 + (0,),
    "window_rope_theta": 5e5,
    "query_key_norm": "all",
    "pre_norms": False,
    "post_norms": True,
}

_GPT_OSS: Mapping[str, Any] = {
    "rope_theta": 150_000.0,
    "rope_scaling": RopeScaling(
        kind="yarn",
        factor=32.0,
        high_freq_factor=32.0,
        original_max_position=4096,
        truncate=False,
    ),
    "windows": (128, 0),
    "attention_bias": True,
    "out_bias": True,
    "attention_sinks": True,
    "expert_bias": True,
    "activation": "swiglu_clamped",
    "norm_eps": 1e-5,
}


def _linear(
    num_layers: int,
    width: int,
    heads: tuple[int, int],
    ffn_size: int,
    linear_value_heads: int,
    **settings: Any,
) -> ModelConfig:
    """Returns a preset in which three of four layers are of linear attention.

    `heads` are query heads and key/value heads of the fourth. Where there are experts, every token
    goes through one more, of the same size.
    """
    given = {
        "query_key_norm": "head",
        "norm_from_one": True,
        "rope_theta": 1e7,
        "rope_size": 64,
        "attention_gate": True,
        "attention_every": 4,
        "linear_key_heads": 16,
        "linear_value_heads": linear_value_heads,
        "linear_key_size": 128,
        "linear_value_size": 128,
    }
    if "num_experts" in settings:
        given |= {"shared_ffn_size": settings["expert_ffn_size"], "shared_ffn_gate": True}
    return _config(num_layers, width, (*heads, 256), ffn_size, **given | settings)


def _deepseek(
    num_layers: int,
    width: int,
    num_heads: int,
    ffn_size: int,
    experts: Mapping[str, Any],
    *,
    shared: int,
    **settings: Any,
) -> ModelConfig:
    """Returns a preset with latent attention; `shared` experts are used by every token."""
    given = {
        "latent_size": 512,
        "rope_size": 64,
        "value_size": 128,
        "num_dense_layers": 1,
        "shared_ffn_size": shared * experts["expert_ffn_size"],
        **experts,
    }
    heads = num_heads, num_heads, 192
    return _config(num_layers, width, heads, ffn_size, **given | settings)


def _deepseek_yarn(score_mscale: float, factor: float = 40.0, high: float = 32.0) -> RopeScaling:
    return RopeScaling(
        kind="yarn",
        factor=factor,
        high_freq_factor=high,
        original_max_position=4096,
        attention_factor=1.0,
        score_mscale=score_mscale,
    )


_DEEPSEEK2: Mapping[str, Any] = {
    "rope_interleaved": True,
    "rope_scaling": _deepseek_yarn(0.707),
    "normalize_expert_weights": False,
}
_DEEPSEEK3: Mapping[str, Any] = {
    "rope_interleaved": True,
    "router_scores": "sigmoid",
    "router_correction": True,
    "group_score": 2,
}

PRESETS: Mapping[str, ModelConfig] = {
    "qwen2.5-0.5b": _config(24, 896, (14, 2, 64), 4864, **_QWEN2, tie_embeddings=True),
    "qwen2.5-1.5b": _config(28, 1536, (12, 2, 128), 8960, **_QWEN2, tie_embeddings=True),
    "qwen2.5-3b": _config(36, 2048, (16, 2, 128), 11008, **_QWEN2, tie_embeddings=True),
    "qwen2.5-7b": _config(28, 3584, (28, 4, 128), 18944, **_QWEN2),
    "qwen2.5-14b": _config(48, 5120, (40, 8, 128), 13824, **_QWEN2),
    "qwen2.5-32b": _config(64, 5120, (40, 8, 128), 27648, **_QWEN2),
    "qwen2.5-72b": _config(80, 8192, (64, 8, 128), 29568, **_QWEN2),
    "qwen3-0.6b": _config(28, 1024, (16, 8, 128), 3072, **_QWEN3, tie_embeddings=True),
    "qwen3-1.7b": _config(28, 2048, (16, 8, 128), 6144, **_QWEN3, tie_embeddings=True),
    "qwen3-4b": _config(36, 2560, (32, 8, 128), 9728, **_QWEN3, tie_embeddings=True),
    "qwen3-8b": _config(36, 4096, (32, 8, 128), 12288, **_QWEN3),
    "qwen3-14b": _config(40, 5120, (40, 8, 128), 17408, **_QWEN3),
    "qwen3-32b": _config(64, 5120, (64, 8, 128), 25600, **_QWEN3),
    "qwen3-30b-a3b": _config(48, 2048, (32, 4, 128), 6144, **_QWEN3, **_experts(128, 8, 768)),
    "qwen3-235b-a22b": _config(94, 4096, (64, 4, 128), 12288, **_QWEN3, **_experts(128, 8, 1536)),
    "qwen3-next-80b-a3b": _linear(48, 2048, (16, 2), 5120, 32, **_experts(512, 10, 512)),
    # The text part. 5632 is what a mixture without an intermediate_size is read with; unused.
    "qwen3.5-0.8b": _linear(24, 1024, (8, 2), 3584, 16, tie_embeddings=True),
    "qwen3.5-4b": _linear(32, 2560, (16, 4), 9216, 32, tie_embeddings=True),
    "qwen3.5-9b": _linear(32, 4096, (16, 4), 12288, 32),
    "qwen3.5-27b": _linear(64, 5120, (24, 4), 17408, 48),
    "qwen3.5-35b-a3b": _linear(40, 2048, (16, 2), 5632, 32, **_experts(256, 8, 512)),
    "qwen3.5-122b-a10b": _linear(48, 3072, (32, 2), 5632, 64, **_experts(256, 8, 1024)),
    "qwen3.5-397b-a17b": _linear(60, 4096, (32, 2), 5632, 64, **_experts(512, 10, 1024)),
    "llama3.2-1b": _config(16, 2048, (32, 8, 64), 8192, **_LLAMA32),
    "llama3.2-3b": _config(28, 3072, (24, 8, 128), 8192, **_LLAMA32),
    "llama3.1-8b": _config(32, 4096, (32, 8, 128), 14336, **_LLAMA3),
    "llama3.1-70b": _config(80, 8192, (64, 8, 128), 28672, **_LLAMA3),
    # Version 0.1, the one with a window.
    "mistral-7b": _config(32, 4096, (32, 8, 128), 14336, norm_eps=1e-5, windows=(4096,)),
    "mixtral-8x7b": _config(
        32, 4096, (32, 8, 128), 14336, rope_theta=1e6, norm_eps=1e-5, **_experts(8, 2, 14336)
    ),
    "olmo3-7b": _config(32, 4096, (32, 32, 128), 11008, **_OLMO3),
    "olmo3-32b": _config(64, 5120, (40, 8, 128), 27648, **_OLMO3),
    "olmoe-1b-7b": _config(
        16,
        2048,
        (16, 16, 128),
        1024,
        norm_eps=1e-5,
        query_key_norm="all",
        **_experts(64, 8, 1024) | {"normalize_expert_weights": False},
    ),
    "gpt-oss-20b": _config(24, 2880, (64, 8, 64), 2880, **_GPT_OSS, **_experts(32, 4, 2880)),
    "gpt-oss-120b": _config(36, 2880, (64, 8, 64), 2880, **_GPT_OSS, **_experts(128, 4, 2880)),
    "deepseek-v2-lite": _deepseek(
        27, 2048, 16, 10944, _experts(64, 6, 1408), shared=2, **_DEEPSEEK2
    ),
    "deepseek-v2": _deepseek(
        60,
        5120,
        128,
        12288,
        _experts(160, 6, 1536),
        shared=2,
        query_latent_size=1536,
        expert_groups=8,
        groups_per_token=3,
        expert_scale=16.0,
        **_DEEPSEEK2,
    ),
    "deepseek-v3": _deepseek(
        61,
        7168,
        128,
        18432,
        _experts(256, 8, 2048),
        shared=1,
        num_dense_layers=3,
        query_latent_size=1536,
        expert_groups=8,
        groups_per_token=4,
        expert_scale=2.5,
        rope_scaling=_deepseek_yarn(1.0),
        **_DEEPSEEK3,
    ),
    "kimi-k2": _deepseek(
        61,
        7168,
        64,
        18432,
        _experts(384, 8, 2048),
        shared=1,
        query_latent_size=1536,
        expert_scale=2.827,
        rope_theta=5e4,
        rope_scaling=_deepseek_yarn(1.0, factor=32.0, high=1.0),
        **_DEEPSEEK3,
    ),
    "moonlight-16b-a3b": _deepseek(
        27,
        2048,
        16,
        11264,
        _experts(64, 6, 1408),
        shared=2,
        expert_scale=2.446,
        rope_theta=5e4,
        norm_eps=1e-5,
        **_DEEPSEEK3,
    ),
    "smollm3-3b": _config(
        36, 2048, (16, 4, 128), 11008, rope_theta=5e6, no_rope_every=4, tie_embeddings=True
    ),
    "gemma2-2b": _config(26, 2304, (8, 4, 256), 9216, **_GEMMA2),
    "gemma2-9b": _config(42, 3584, (16, 8, 256), 14336, **_GEMMA2),
    "gemma2-27b": _config(46, 4608, (32, 16, 128), 36864, **_GEMMA2, query_pre_attn_scalar=144),
    "gemma3-1b": _config(26, 1152, (4, 1, 256), 6912, **_GEMMA3_1B),
    "gemma3-4b": _config(34, 2560, (8, 4, 256), 10240, **_GEMMA3),
    "gemma3-12b": _config(48, 3840, (16, 8, 256), 15360, **_GEMMA3),
    "gemma3-27b": _config(62, 5376, (32, 16, 128), 21504, **_GEMMA3, query_pre_attn_scalar=168),
}

# `vocab_size` of the published config.json, padding included, by the first name that a preset's
# begins with.
VOCAB_SIZES: Mapping[str, int] = {
    "qwen2.5-0.5b": 151_936,
    "qwen2.5-1.5b": 151_936,
    "qwen2.5-3b": 151_936,
    "qwen2.5-": 152_064,
    "qwen3-": 151_936,
    "qwen3.5-": 248_320,
    "llama3.": 128_256,
    "mistral-7b": 32_000,
    "mixtral-": 32_000,
    "olmo3-": 100_278,
    "olmoe-": 50_304,
    "gpt-oss-": 201_088,
    "smollm3-": 128_256,
    "deepseek-v2": 102_400,
    "deepseek-v3": 129_280,
    "kimi-": 163_840,
    "moonlight-": 163_840,
    "gemma2-": 256_000,
    "gemma3-1b": 262_144,
    "gemma3-": 262_208,
}


def preset_vocab_size(name: str) -> int:
    """Returns the entries of a preset's published vocabulary."""
    return next(size for start, size in VOCAB_SIZES.items() if name.startswith(start))


def preset_named(name: str) -> ModelConfig:
    """Returns the defaults of the model section: those of ModelConfig for "".

    Raises:
        ValueError: there is no such preset; the nearest names are given.
    """
    if not name:
        return ModelConfig()
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(PRESETS)}"
        )
        raise InputError(f"config.model.preset is {name!r}, which is not known; {hint}")
    return dataclasses.replace(PRESETS[name], preset=name, compute_dtype="bfloat16")


def fill_section(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model section with the settings of its preset for those that are not given.

    {"preset": "qwen2.5-7b", "num_layers": 2} -> all settings of that model, but two layers. A
    preset and a checkpoint compute in bfloat16.

    Raises:
        ValueError: no such preset, one beside a checkpoint, or a field that is no setting.
    """
    fixed = [
        field.name
        for field in dataclasses.fields(ModelConfig)
        if field.name in given and field.name not in MODEL_SETTINGS
    ]
    if fixed:
        raise InputError(
            f"config.model.{fixed[0]} is no setting: it says how a family of models computes. Name "
            "a preset of that family in config.model.preset, or a checkpoint in config.model.path; "
            f"of a preset you may set {', '.join(MODEL_SETTINGS[2:])}"
        )
    name = given.get("preset", "")
    if not isinstance(name, str) or not name:
        return ({"compute_dtype": "bfloat16"} if given.get("path") else {}) | dict(given)
    if given.get("path"):
        raise InputError(
            f"config.model.preset is {name!r} and config.model.path is {given['path']!r}; each "
            "says what the model is: remove one of the two"
        )
    return dataclasses.asdict(preset_named(name)) | dict(given)
