# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters in the format of PEFT, for `peft.PeftModel.from_pretrained(base, folder)`.

Where parameters share a tensor of the checkpoint, each has an adapter of its own. Written they are
one, whose rank is the sum of theirs: A has the rows of all, and the rows of B that are of one
parameter are zero in the columns of the others.
"""

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from earl_jax.models.checkpoints.families.table import family_named, family_of
from earl_jax.models.checkpoints.families.weights import Weight
from earl_jax.models.checkpoints.hf_read import Checkpoint, weights_of
from earl_jax.models.checkpoints.hf_write import whole_folder
from earl_jax.models.config import ModelConfig
from earl_jax.models.lora_config import PROJECTIONS, LoraConfig
from earl_jax.models.parameters import Params, layers_with, parameter_specs


def save_adapter(
    folder: Path,
    adapters: Params,
    *,
    model: ModelConfig,
    lora: LoraConfig,
    base: str,
    source: Checkpoint | None = None,
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, in fp32.

    Args:
        folder: must not exist.
        adapters: the trainer's tree, layers stacked.
        model: what they adapt; must be of a known family.
        lora: their rank and scale.
        base: where the base is: a folder of `transformers`, or its name on a hub.
        source: the checkpoint that training began with, where there is one.

    Raises:
        ValueError: no known family has such layers, or the folder exists or cannot be written.
    """
    family = family_of(model) if source is None else family_named(source.settings)
    weights = weights_of(parameter_specs(model, vocab_size=1), family)
    # The parameters of each tensor.
    modules: dict[str, list[str]] = {}
    for name in adapters["layers"]:
        module = weights[f"layers.{name}"].name.removesuffix(".weight")
        modules.setdefault(module, []).append(name)
    tensors: dict[str, np.ndarray] = {}
    for module, names in modules.items():
        number = len(adapters["layers"][names[0]]["a"])
        for place, layer in enumerate(layers_with(names[0], number, model.num_layers)):
            parts = [
                _matrices(
                    name,
                    adapters["layers"][name]["a"][place],
                    adapters["layers"][name]["b"][place],
                    weights[f"layers.{name}"],
                )
                for name in names
            ]
            path = f"base_model.model.{module.format(layer=layer)}"
            a_RX, b_XR = _joined(parts, [weights[f"layers.{name}"] for name in names])
            tensors |= {f"{path}.lora_A.weight": a_RX, f"{path}.lora_B.weight": b_XR}
    numbers = {module.partition("{layer}.")[2]: len(names) for module, names in modules.items()}
    with whole_folder(folder) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        settings = _settings(lora, numbers, base, has_experts=model.num_experts > 0)
        text = json.dumps(settings, indent=2) + "\n"
        (partial / "adapter_config.json").write_text(text)


def _settings(
    lora: LoraConfig, numbers: dict[str, int], base: str, *, has_experts: bool
) -> dict[str, Any]:
    """Returns adapter_config.json. `numbers` has how many adapters are written as a module's."""
    # PEFT 0.21 takes every target module that ends in "gate_proj" for the experts' own.
    networks = [module for module in numbers if has_experts and module.startswith("mlp.")]
    several = {module: number for module, number in numbers.items() if number > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "rank_pattern": {module: number * lora.rank for module, number in several.items()},
        "alpha_pattern": {module: number * lora.alpha for module, number in several.items()},
        "target_modules": sorted(numbers.keys() - networks),
        "target_parameters": sorted(f"{module}.weight" for module in networks) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def _matrices(
    name: str, a: jax.Array, b: jax.Array, weight: Weight
) -> tuple[np.ndarray, np.ndarray]:
    """Returns A as [rank, inputs], axes in the order of the tensor, and B likewise.

    B is [outputs, 1, rank], or with several parameters to a tensor [parameters, own numbers, rank].
    """
    inputs, outputs = PROJECTIONS[name]
    their_outputs, their_inputs = weight.axes.split()
    whole, _, own = their_outputs.partition("|")
    a_order = [f"{inputs}R".index(letter) for letter in f"R{their_inputs}"]
    b_order = [f"R{outputs}".index(letter) for letter in f"{whole}{own}R"]
    a_RX = np.asarray(a).transpose(a_order).reshape(b.shape[0], -1)
    ordered = np.asarray(b).transpose(b_order)
    parameters = math.prod(ordered.shape[: len(whole)])
    return a_RX, ordered.reshape(parameters, -1, b.shape[0])


def _joined(
    parts: list[tuple[np.ndarray, np.ndarray]], weights: list[Weight]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns A [ranks, inputs] and B [outputs, ranks] of a tensor from those of its parameters."""
    a_RX = np.concatenate([a for a, _ in parts])
    b = np.zeros((len(parts[0][1]), max(weights[0].total, 1), len(a_RX)), np.float32)
    column = 0
    for (_, own), weight in zip(parts, weights, strict=True):
        rows = slice(weight.first, weight.first + own.shape[1])
        b[:, rows, column : column + own.shape[2]] = own
        column += own.shape[2]
    return np.ascontiguousarray(a_RX), b.reshape(-1, len(a_RX))
