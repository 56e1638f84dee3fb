# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""config.json of `transformers` <-> ModelConfig, in its older and newer spellings."""

from collections.abc import Mapping
from typing import Any

from earl_jax.models.checkpoints.families.family import Family
from earl_jax.models.checkpoints.families.table import family_named, family_of
from earl_jax.models.checkpoints.hf_deepseek import (
    read_latent_head_size,
    read_latents,
    read_mixture,
    written_deepseek,
)
from earl_jax.models.checkpoints.hf_linear import read_states, written_states
from earl_jax.models.checkpoints.hf_rope import read_rope, written_rope
from earl_jax.models.checkpoints.hf_values import FULL, SLIDING, read_flag, read_number, read_size
from earl_jax.models.config import ModelConfig
from earl_jax.settings.errors import InputError

_REQUIRED = {"partial_rotary_factor": 1.0}
# Defaults of `transformers` for keys that config.json lacks.
_DEFAULTS = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
# `transformers` 5 computes nothing with Gemma 3's attn_logit_softcapping (no published model has
# one); here it caps the scores, as it says.
_SOFTCAPS = {
    "attention_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping",
}


def read_settings(settings: Mapping[str, Any]) -> tuple[ModelConfig, int]:
    """Returns the model that a config.json describes, and the size of its vocabulary.

    Raises:
        ValueError: an unknown family, a missing key, or one that would be computed wrongly.
    """
    family = family_named(settings)
    for key, value in {**({} if family.has_states else _REQUIRED), **family.required}.items():
        if settings.get(key) not in (None, value):
            raise InputError(f"{key} is {settings[key]!r}; only {value!r} can be computed")
    _check_quantization(settings.get("quantization_config"), family)
    settings = {**_DEFAULTS, **family.defaults, **settings}
    heads, width = read_size(settings, "num_attention_heads"), read_size(settings, "hidden_size")
    head_size = family.defaults.get("head_dim") or width // heads
    if family.has_latents:
        head_size = read_latent_head_size(settings)
    elif settings.get("head_dim") is not None:
        head_size = read_size(settings, "head_dim")
    windows = _read_windows(settings, family)
    theta, scaling, window_theta = read_rope(settings, family)
    layers = _read_layers(settings, family, head_size)
    if windows:
        layers["window_rope_theta"] = window_theta
    model = ModelConfig(
        num_layers=read_size(settings, "num_hidden_layers"),
        width=width,
        num_heads=heads,
        num_kv_heads=heads
        if settings.get("num_key_value_heads") is None
        else read_size(settings, "num_key_value_heads"),
        head_size=head_size,
        ffn_size=read_size(settings, "intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        windows=windows,
        norm_eps=read_number(settings, "rms_norm_eps"),
        tie_embeddings=read_flag(settings, "tie_word_embeddings"),
        **layers,
    )
    model.validate()
    return model, read_size(settings, "vocab_size")


def _check_quantization(quantized: Any, family: Family) -> None:
    """Raises ValueError for weights of a type that is not read."""
    method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
    if quantized is None:
        return
    if family.quantization and method == family.quantization:
        block = quantized.get("weight_block_size")
        is_block = isinstance(block, list) and [isinstance(n, int) and n > 0 for n in block]
        if method == "fp8" and is_block != [True, True]:
            raise InputError(
                f"quantization_config.weight_block_size is {block!r}; fp8 can be read where it is "
                "two whole numbers, as in [128, 128]"
            )
        return
    known = f"the quant_method {family.quantization!r}" if family.quantization else "None"
    raise InputError(f"quantization_config is {quantized!r}; only {known} can be read")


def _read_layers(settings: Mapping[str, Any], family: Family, head_size: int) -> dict[str, Any]:
    """Returns what the family's layers have, and what of it the file says."""
    layers = family.fixed
    if "query_pre_attn_scalar" in family.free:
        scalar = read_size(settings, "query_pre_attn_scalar")
        layers["query_pre_attn_scalar"] = 0 if scalar == head_size else scalar
    for field, key in _SOFTCAPS.items():
        if field in family.free:
            layers[field] = float(settings.get(key) or 0.0)
    if "num_experts" in family.free:
        # `transformers` 5 writes the second name of it, and reads both.
        settings = {"num_experts": settings.get("num_local_experts"), **settings}
        layers |= {field: read_size(settings, key) for field, key in family.expert_keys.items()}
        if "normalize_expert_weights" not in layers:
            layers["normalize_expert_weights"] = read_flag(settings, "norm_topk_prob")
    if "no_rope_every" in family.free:
        layers["no_rope_every"] = _read_no_rope(settings)
    if family.has_latents:
        layers |= read_latents(settings, family) | read_mixture(settings, family)
    if family.has_states:
        layers |= read_states(settings, family, head_size)
    return layers


def _read_windows(settings: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """Returns ModelConfig.windows, the shortest pattern that gives them."""
    if family.has_states:
        return ()  # layer_types says which layers attend (hf_linear.py)
    num_layers = read_size(settings, "num_hidden_layers")
    usual = _usual_kinds(settings, family, num_layers)
    kinds = settings.get("layer_types") or usual
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise InputError(f"layer_types is {kinds!r}; it must name the {num_layers} layers' types")
    unknown = sorted({str(kind) for kind in kinds} - {SLIDING, FULL})
    free = family.windows == "by_pattern" or (
        family.windows == "by_flag" and settings.get("use_sliding_window")
    )
    if unknown or (kinds != usual and not free):
        wanted = [SLIDING, FULL] if free else sorted(set(usual))
        raise InputError(
            f"layer_types has {', '.join(unknown or sorted(set(kinds)))}; only "
            f"{' and '.join(wanted)} can be computed, as the model_type and sliding_window say"
        )
    if SLIDING not in kinds:
        return ()
    size = read_size(settings, "sliding_window")
    windows = tuple(size if kind == SLIDING else 0 for kind in kinds)
    return next(
        windows[:period]
        for period in range(1, num_layers + 1)
        if all(window == windows[i % period] for i, window in enumerate(windows))
    )


def _usual_kinds(settings: Mapping[str, Any], family: Family, num_layers: int) -> list[str]:
    """Returns the type of each layer where layer_types is missing."""
    kind = family.windows
    if kind == "by_pattern":
        every = read_size(settings, "sliding_window_pattern")
        return [SLIDING if (i + 1) % every else FULL for i in range(num_layers)]
    if kind == "by_flag" and settings.get("use_sliding_window") and settings["sliding_window"]:
        first = read_size(settings, "max_window_layers", least=0)
        return [SLIDING if i >= first else FULL for i in range(num_layers)]
    if kind == "all" and settings["sliding_window"] is not None:
        return [SLIDING] * num_layers
    return [FULL] * num_layers


def _read_no_rope(settings: Mapping[str, Any]) -> int:
    """Returns ModelConfig.no_rope_every: no_rope_layers has 0 for a layer that does not rotate."""
    num_layers = read_size(settings, "num_hidden_layers")
    flags = settings.get("no_rope_layers")
    if flags is None:
        return read_size(settings, "no_rope_layer_interval")
    if not isinstance(flags, list) or len(flags) < num_layers:
        raise InputError(f"no_rope_layers is {flags!r}; it must have a flag for each layer")
    flags = [bool(flag) for flag in flags[:num_layers]]
    every = flags.index(False) + 1 if False in flags else 0
    if flags != [not every or bool((i + 1) % every) for i in range(num_layers)]:
        raise InputError(
            f"no_rope_layers is {settings['no_rope_layers']!r}; only every n-th layer can be "
            "without rotation"
        )
    return every


def write_settings(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Returns the inverse of `read_settings`: the config.json of this model.

    Raises:
        ValueError: no known family has such layers.
    """
    family = family_of(model)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": model.width,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        **(
            written_deepseek(model, family) if family.has_latents else {"head_dim": model.head_size}
        ),
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "vocab_size": vocab_size,
        **written_rope(model, family),
        **_written_windows(model, family),
        **_written_scores(model, family),
        **_written_experts(model, family),
        **_written_no_rope(model, family),
        **(written_states(model) if family.has_states else {}),
        **family.required,
    }


def _written_windows(model: ModelConfig, family: Family) -> dict[str, Any]:
    windows = model.layer_windows
    size = max(windows) or None
    if family.windows == "none":
        return {}
    if family.windows == "all":
        return {"sliding_window": size}
    kinds = [SLIDING if window else FULL for window in windows]
    if family.windows == "by_flag":
        written = {"layer_types": kinds, "sliding_window": size, "use_sliding_window": bool(size)}
        return written | ({"max_window_layers": kinds.index(SLIDING)} if size else {})
    # A number even where no layer has a window: `transformers` requires it.
    return {"layer_types": kinds, "sliding_window": size or family.defaults["sliding_window"]}


def _written_scores(model: ModelConfig, family: Family) -> dict[str, Any]:
    written: dict[str, Any] = {}
    if "query_pre_attn_scalar" in family.free:
        written["query_pre_attn_scalar"] = model.query_pre_attn_scalar or model.head_size
    for field, key in _SOFTCAPS.items():
        if field in family.free:
            written[key] = getattr(model, field) or None
    return written


def _written_experts(model: ModelConfig, family: Family) -> dict[str, Any]:
    if "num_experts" not in family.free:
        return {}
    written = {key: getattr(model, field) for field, key in family.expert_keys.items()}
    if "normalize_expert_weights" not in family.layers:
        written["norm_topk_prob"] = model.normalize_expert_weights
    return written


def _written_no_rope(model: ModelConfig, family: Family) -> dict[str, Any]:
    if "no_rope_every" not in family.free:
        return {}
    every, layers = model.no_rope_every, range(model.num_layers)
    return {"no_rope_layers": [int(not every or (i + 1) % every != 0) for i in layers]}
