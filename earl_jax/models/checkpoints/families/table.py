# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The table of families, and the family of a config.json and of a model."""

from collections.abc import Mapping
from typing import Any

from earl_jax.models.checkpoints.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from earl_jax.models.checkpoints.families.family import PLAIN, Family
from earl_jax.models.checkpoints.families.gemma import GEMMA2, GEMMA3
from earl_jax.models.checkpoints.families.gpt_oss import GPT_OSS
from earl_jax.models.checkpoints.families.llama import LLAMA, SMOLLM3
from earl_jax.models.checkpoints.families.mistral import MISTRAL, MIXTRAL
from earl_jax.models.checkpoints.families.olmo import OLMO2, OLMO3, OLMOE
from earl_jax.models.checkpoints.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from earl_jax.models.checkpoints.families.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from earl_jax.models.config import ModelConfig
from earl_jax.settings.errors import InputError

# By model_type. Of families that have the same layers a model without a source is of the first.
FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        MIXTRAL,
        OLMO2,
        OLMO3,
        OLMOE,
        GPT_OSS,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        SMOLLM3,
        GEMMA2,
        GEMMA3,
    )
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
    for family in FAMILIES.values():
        if family.text_of and settings.get("model_type") == family.text_of:
            text = settings.get("text_config")
            if not isinstance(text, Mapping):
                raise InputError(f"text_config is {text!r}; it must be an object")
            kept = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
            above = {key: settings[key] for key in kept if key in settings}
            own = {"model_type": family.model_type, "architectures": [family.architecture]}
            return {**above, **text, **own}
    return None


def family_named(settings: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json. Raises ValueError listing those known."""
    name = settings.get("model_type")
    for family in FAMILIES.values():
        if name in (family.model_type, *family.also_named):
            return family
    reason = _REFUSED.get(str(name), "which is not known here")
    raise InputError(f"model_type is {name!r}, {reason}; known are {', '.join(FAMILIES)}")


def family_of(model: ModelConfig) -> Family:
    """Returns the family that has such layers. Raises ValueError where there is none."""
    for family in FAMILIES.values():
        if _fits(family, model):
            if family.width_by_heads and model.width % model.num_heads:
                raise InputError(
                    f"config.model.width={model.width} is no multiple of num_heads="
                    f"{model.num_heads}, and `transformers` reads no such {family.architecture}"
                )
            return family
    given = [
        f"config.model.{field}={getattr(model, field)!r}"
        for field, value in (*PLAIN.items(), ("windows", ()))
        if getattr(model, field) != value
    ]
    known = "; ".join(
        f"{name} has " + ", ".join(_particular(family)) for name, family in FAMILIES.items()
    )
    raise InputError(
        f"no known family has layers with {', '.join(given)}: {known}; all windows are of one size"
    )


def _fits(family: Family, model: ModelConfig) -> bool:
    """Returns True if the family has such layers."""
    return (
        all(getattr(model, field) == value for field, value in family.fixed.items())
        and family.has_latents == (model.latent_size > 0)
        and family.has_states == model.has_states
        and _has_windows(family, model)
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
    words = [f"{field}={value!r}" for field, value in family.layers.items()]
    free = [f"any {field}" for field in PLAIN if field in family.free]
    windows = {"none": "no windows", "all": "windows in all layers"}
    return [*words, *free, windows.get(family.windows, "windows in any layers")]
