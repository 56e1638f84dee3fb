# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters in the format of PEFT, for `peft.PeftModel.from_pretrained(base, folder)`."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from earl_jax.models.checkpoints.families.table import family_of
from earl_jax.models.checkpoints.families.weights import Weight
from earl_jax.models.checkpoints.hf_write import whole_folder
from earl_jax.models.config import LoraConfig, ModelConfig
from earl_jax.models.lora import PROJECTIONS
from earl_jax.models.parameters import Params, layers_with


def save_adapter(
    folder: Path, adapters: Params, *, model: ModelConfig, lora: LoraConfig, base: str
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, in fp32.

    Args:
        folder: must not exist.
        adapters: the trainer's tree, layers stacked.
        model: what they adapt; must be of a known family.
        lora: their rank and scale.
        base: where the base is: a folder of `transformers`, or its name on a hub.

    Raises:
        ValueError: no known family has such layers, or the folder exists or cannot be written.
    """
    weights = family_of(model).weights
    tensors: dict[str, np.ndarray] = {}
    for name, adapter in adapters["layers"].items():
        weight = weights[f"layers.{name}"]
        for place, layer in enumerate(layers_with(name, len(adapter["a"]), model.num_layers)):
            module = f"base_model.model.{_module(weight).format(layer=layer)}"
            a_RX, b_XR = _as_matrices(name, adapter["a"][place], adapter["b"][place], weight)
            tensors |= {f"{module}.lora_A.weight": a_RX, f"{module}.lora_B.weight": b_XR}
    targets = [_module(weights[f"layers.{name}"]).rsplit(".", 1)[1] for name in adapters["layers"]]
    with whole_folder(folder) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        text = json.dumps(_settings(lora, targets, base), indent=2) + "\n"
        (partial / "adapter_config.json").write_text(text)


def _module(weight: Weight) -> str:
    return weight.name.removesuffix(".weight")


def _settings(lora: LoraConfig, targets: list[str], base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def _as_matrices(
    name: str, a: jax.Array, b: jax.Array, weight: Weight
) -> tuple[np.ndarray, np.ndarray]:
    """Returns A as [rank, inputs] and B as [outputs, rank], axes in the order of the tensor."""
    inputs, outputs = PROJECTIONS[name]
    their_outputs, their_inputs = weight.axes.split()
    a_order = [f"{inputs}R".index(letter) for letter in f"R{their_inputs}"]
    b_order = [f"R{outputs}".index(letter) for letter in f"{their_outputs}R"]
    rank = b.shape[0]
    return (
        np.ascontiguousarray(np.asarray(a).transpose(a_order).reshape(rank, -1)),
        np.ascontiguousarray(np.asarray(b).transpose(b_order).reshape(-1, rank)),
    )
