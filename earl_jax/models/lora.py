# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA, arXiv 2106.09685): trained low-rank additions to frozen projections.

An adapted projection computes y = x W + (alpha / rank) (x A) B, where A goes from the inputs to R
numbers and B from these to the outputs (section 4.1; R is the rank). B begins at zero, and with it
the policy is the base. A is cut over the mesh as W's inputs are, B as its outputs: the same rules.

In the trainer, A and B are a tree of their own, {"layers": {"query": {"a", "b"}}}, with layers
stacked; `adapt` puts them beside the frozen weights for the decoder (projection.py). The engine
knows nothing of them: it gets `merged` weights.
"""

import math
from typing import Any

from earl_jax.models.lora_config import ALL_TARGETS, PROJECTIONS, LoraConfig
from earl_jax.models.parameters import ParameterSpec, Params
from earl_jax.models.projection import Adapted
from earl_jax.settings.errors import InputError


def adapter_specs(specs: Any, lora: LoraConfig) -> dict[str, Any]:
    """Returns the specs of the adapters, from those of the base.

    A is normal with the deviation of PEFT's default, 1 / sqrt(3 fan-in); B is zero.

    Raises:
        ValueError: a target that this model has not, or a rank above what it could use.
    """
    layers = specs["layers"]
    possible = [
        name
        for name, (inputs, outputs) in PROJECTIONS.items()
        if name in layers and layers[name].axes == f"L{inputs}{outputs}"
    ]
    targets = possible if lora.targets == ALL_TARGETS else lora.targets
    for name in targets:
        if name not in possible:
            experts = " (experts take no adapters)" if "router" in layers else ""
            raise InputError(
                f"config.train.lora.targets has {name!r}, which cannot be adapted in this model"
                f"{experts}; choose from {', '.join(possible)}"
            )
    return {"layers": {name: _pair(name, layers[name], lora.rank) for name in targets}}


def _pair(name: str, weight: ParameterSpec, rank: int) -> dict[str, ParameterSpec]:
    """Returns A and B of one projection."""
    sizes = dict(zip(weight.axes, weight.shape, strict=True)) | {"R": rank}
    inputs, outputs = PROJECTIONS[name]
    fan_in, fan_out = (math.prod(sizes[letter] for letter in part) for part in (inputs, outputs))
    if rank > min(fan_in, fan_out):
        raise InputError(
            f"config.train.lora.rank is {rank}, but {name!r} is a matrix of {fan_in} x {fan_out}, "
            f"whose rank is at most {min(fan_in, fan_out)}; lower the rank, or leave {name!r} out "
            "of config.train.lora.targets"
        )

    def spec(axes: str, deviation: float) -> ParameterSpec:
        shape = tuple(sizes[letter] for letter in axes)
        return ParameterSpec(shape=shape, axes=axes, deviation=deviation, constant=0.0)

    return {
        "a": spec(f"L{inputs}R", 1 / math.sqrt(3 * fan_in)),
        "b": spec(f"LR{outputs}", 0.0),
    }


def adapt(base: Params, adapters: Params, lora: LoraConfig) -> Params:
    """Returns the decoder's tree: the base, with `Adapted` where there are adapters.

    Layers may be stacked or not. Nothing is copied.
    """
    layers = dict(base["layers"])
    for name, adapter in adapters["layers"].items():
        inputs, outputs = PROJECTIONS[name]
        layers[name] = Adapted(
            weight=layers[name],
            a=adapter["a"],
            b=adapter["b"],
            inputs=inputs,
            outputs=outputs,
            scale=lora.alpha / lora.rank,
        )
    return {**base, "layers": layers}
