# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings in config.json <-> settings of ModelConfig, in older and newer spellings."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from earl_jax.models.checkpoints.families.family import Family
from earl_jax.models.checkpoints.hf_values import (
    FULL,
    SLIDING,
    read_flag,
    read_number,
    read_size,
)
from earl_jax.models.config import ModelConfig, RopeScaling
from earl_jax.settings.errors import InputError


def read_rope(settings: Mapping[str, Any], family: Family) -> tuple[float, RopeScaling, float]:
    """Returns ModelConfig's rope_theta, rope_scaling, window_rope_theta.

    Older files have rope_theta, rope_local_base_freq and rope_scaling, newer ones all of it in
    rope_parameters, for each type of layer where a family's differ.
    """
    key = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    rope = settings.get(key) or family.defaults.get(key) or {}
    by_layer_type = bool(family.window_rope_key)
    kinds = [rope.get(kind) for kind in (SLIDING, FULL)] if isinstance(rope, Mapping) else [rope]
    if not all(kind is None or isinstance(kind, Mapping) for kind in kinds):
        raise InputError(f"{key} is {rope!r}; it must be an object, with one for each layer type")
    if by_layer_type and settings.get("rope_scaling") and settings.get("rope_parameters"):
        raise InputError("rope_scaling and rope_parameters are both there; leave one of them out")
    is_nested, is_newer = SLIDING in rope or FULL in rope, key == "rope_parameters"
    if rope and is_nested != (by_layer_type and is_newer):
        wanted = "for each layer type" if by_layer_type and is_newer else "for all layers at once"
        raise InputError(f"{key} is {rope!r}; this model_type has it {wanted}")
    if not by_layer_type:
        if family.has_states:
            # How much of a head rotates is another setting; of text all three positions are one.
            own = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
            rope = {name: value for name, value in rope.items() if name not in own}
        theta, scaling = _one_rope(rope, settings, "rope_theta", key)
        if family.has_latents and scaling.kind == "yarn":
            scaling = dataclasses.replace(scaling, score_mscale=_read_score_mscale(rope))
        return theta, scaling, 0.0
    theta, scaling = _one_rope(
        (rope.get(FULL) or {}) if is_nested else rope, settings, "rope_theta", key
    )
    sliding = (rope.get(SLIDING) or {}) if is_nested else {}
    local = _one_rope(sliding, settings, family.window_rope_key, key)
    if local == (theta, scaling):
        return theta, scaling, 0.0
    if local[1].factor != 1:
        raise InputError(
            f"{key}.{SLIDING} is {sliding!r}; layers with a window can be stretched only as the "
            "others are"
        )
    return theta, scaling, local[0]


def _one_rope(
    rope: Mapping[str, Any], settings: Mapping[str, Any], theta_key: str, key: str
) -> tuple[float, RopeScaling]:
    """Returns a layer type's base and scaling; `theta_key` has the base in an older file."""
    has_theta = "rope_theta" in rope
    theta = (
        read_number(rope, "rope_theta", f"{key}.")
        if has_theta
        else read_number(settings, theta_key)
    )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(
            f"{key}.partial_rotary_factor is {rope['partial_rotary_factor']!r}; only whole heads "
            "are rotated here"
        )
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=read_number(rope, "factor", f"{key}."))
    # `transformers` takes the longest context of the model where the file says nothing else.
    rope = {"original_max_position_embeddings": settings.get("max_position_embeddings"), **rope}
    if kind == "llama3":
        return theta, RopeScaling(
            factor=read_number(rope, "factor", f"{key}."),
            low_freq_factor=read_number(rope, "low_freq_factor", f"{key}."),
            high_freq_factor=read_number(rope, "high_freq_factor", f"{key}."),
            original_max_position=read_size(rope, "original_max_position_embeddings"),
        )
    if kind == "yarn":
        return theta, _read_yarn(rope, key)
    raise InputError(
        f"{key} is of the type {kind!r}; only 'default', 'linear', 'llama3' and 'yarn' can be "
        "computed"
    )


def _read_yarn(rope: Mapping[str, Any], key: str) -> RopeScaling:
    """Returns YaRN's scaling; a key that is null is absent."""
    rope = {name: value for name, value in rope.items() if value is not None}
    usual = {"attention_factor": 0.0, "beta_slow": 1.0, "beta_fast": 32.0}
    attention_factor, slow, fast = (read_number(usual | rope, name, f"{key}.") for name in usual)
    factor = read_number(rope, "factor", f"{key}.")
    if not attention_factor and rope.get("mscale") and rope.get("mscale_all_dim"):
        scales = (read_number(rope, name, f"{key}.") for name in ("mscale", "mscale_all_dim"))
        above, below = (0.1 * scale * math.log(max(factor, 1.0)) + 1.0 for scale in scales)
        attention_factor = above / below
    if factor == 1 and attention_factor not in (0, 1):
        raise InputError(
            f"{key}.attention_factor is {attention_factor} with a factor of 1; only 1 can be "
            "computed"
        )
    return RopeScaling(
        kind="yarn",
        factor=factor,
        low_freq_factor=slow,
        high_freq_factor=fast,
        original_max_position=read_size(rope, "original_max_position_embeddings"),
        attention_factor=attention_factor,
        truncate=read_flag({"truncate": True} | rope, "truncate", f"{key}."),
    )


def _read_score_mscale(rope: Mapping[str, Any]) -> float:
    """Returns RopeScaling.score_mscale."""
    has_one = rope.get("mscale_all_dim") is not None
    return read_number(rope, "mscale_all_dim", "rope_scaling.") if has_one else 0.0


def written_rope(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns rope_parameters, the newer spelling."""
    scaling = model.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if scaling.factor > 1:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind != "linear":
            yarn = scaling.kind == "yarn"
            rope |= {
                "beta_slow" if yarn else "low_freq_factor": scaling.low_freq_factor,
                "beta_fast" if yarn else "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
            if scaling.attention_factor:
                rope["attention_factor"] = scaling.attention_factor
            if not scaling.truncate:
                rope["truncate"] = False
            rope |= _written_mscale(scaling)
    if family.has_states:
        # Where `transformers` 5 looks for it.
        rope["partial_rotary_factor"] = model.rotated_size / model.head_size
    if "window_rope_theta" not in family.free:
        return {"rope_parameters": rope}
    local = {"rope_type": "default", "rope_theta": model.window_rope_theta}
    return {"rope_parameters": {FULL: rope, SLIDING: local if model.window_rope_theta else rope}}


def _written_mscale(scaling: RopeScaling) -> dict[str, float]:
    """Returns the keys of YaRN's factors, of queries and keys and of scores."""
    if not scaling.score_mscale:
        return {}
    # attention_factor, for those who read mscale instead.
    step = 0.1 * math.log(scaling.factor)
    mscale = (scaling.magnitude * (step * scaling.score_mscale + 1.0) - 1.0) / step
    return {"mscale": round(mscale, 6), "mscale_all_dim": scaling.score_mscale}
