# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA, arXiv 2106.09685): trained low-rank additions to frozen projections.

An adapted projection computes y = x W + (alpha / rank) (x A) B, where A goes from the inputs to R
numbers and B from these to the outputs (section 4.1; R is the rank). B begins at zero, and with it
the policy is the base. A is cut over the mesh as W's inputs are, B as its outputs: the same rules.

In the trainer, A and B are a tree of their own, {"layers": {"query": {"a", "b"}}}, with layers
stacked; `adapt` puts them beside the frozen weights for the decoder. The engine knows nothing of
them: it gets `merged` weights.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from earl_jax.models.config import ALL_TARGETS, LoraConfig
from earl_jax.models.contraction import Contract, contract_flat
from earl_jax.models.parameters import ParameterSpec, Params
from earl_jax.models.quantization import Quantized, matmul
from earl_jax.settings.errors import InputError

# The letters that each projection reads and writes. One with other axes cannot be adapted here.
PROJECTIONS = {
    "query": ("D", "KGH"),
    "query_down": ("D", "A"),
    "query_up": ("A", "KGH"),
    "latent": ("D", "A"),
    "latent_up": ("A", "KH"),
    "key": ("D", "KH"),
    "value": ("D", "KH"),
    "attention_gate": ("D", "KGH"),
    "out": ("KGH", "D"),
    "linear_query": ("D", "KH"),
    "linear_key": ("D", "KH"),
    "linear_value": ("D", "KGH"),
    "linear_gate": ("D", "KGH"),
    "linear_out": ("KGH", "D"),
    "gate": ("D", "F"),
    "up": ("D", "F"),
    "down": ("F", "D"),
    "shared_gate": ("D", "F"),
    "shared_up": ("D", "F"),
    "shared_down": ("F", "D"),
}


@struct.dataclass(frozen=True, kw_only=True)
class Adapted:
    """A projection in a tree of parameters: `weight` is frozen, `a` and `b` are trained.

    For a query, `inputs` is "D" and `outputs` "KGH": weight_DKGH, a_DR, b_RKGH; each with L before
    it where layers are stacked.
    """

    weight: Any
    a: Any
    b: Any
    inputs: str = struct.field(pytree_node=False)
    outputs: str = struct.field(pytree_node=False)
    scale: float = struct.field(pytree_node=False)


def is_adapted(node: Any) -> bool:
    """True for an adapted projection."""
    return isinstance(node, Adapted)


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


def project(
    equation: str,
    x: jax.Array,
    weight: jax.Array | Adapted | Quantized,
    contract: Contract = contract_flat,
) -> jax.Array:
    """Computes `einsum(equation, x, weight)`, plus the adapter's part where the weight has one.

    The second operand of the equation must be the weight's inputs, then its outputs. `contract`
    computes each product (contraction.py).
    """
    if isinstance(weight, Quantized):
        return matmul(equation, x, weight)
    if not isinstance(weight, Adapted):
        return contract(equation, x, weight)
    operands, result = equation.split("->")
    given, axes = operands.split(",")
    inputs, outputs = weight.inputs, weight.outputs
    assert axes == inputs + outputs, equation
    rows = "".join(letter for letter in given if letter not in inputs)
    x_R = contract(f"{given},{inputs}R->{rows}R", x, weight.a)
    added = contract(f"{rows}R,R{outputs}->{result}", x_R, weight.b)
    return contract(equation, x, weight.weight) + weight.scale * added


def merged(weight: jax.Array | Adapted) -> jax.Array:
    """Returns W + (alpha / rank) A B in fp32; a weight without adapter unchanged. Any stacking."""
    if not isinstance(weight, Adapted):
        return weight
    inputs, outputs = weight.inputs, weight.outputs
    # Highest: a TPU would otherwise round A and B to bf16.
    added = jnp.einsum(
        f"...{inputs}R,...R{outputs}->...{inputs}{outputs}",
        weight.a,
        weight.b,
        precision=jax.lax.Precision.HIGHEST,
    )
    return weight.weight.astype(jnp.float32) + weight.scale * added


# Changes whenever `fingerprint` returns other numbers; checkpoints hold it.
FINGERPRINT_VERSION = 2


@jax.jit
def fingerprint(tree: Any) -> jax.Array:
    """Returns a u32 that depends on every bit of the arrays and its index, not on their layout.

    A change of one number always changes it. Changes of several cancel by chance alone, once in
    2**32: of two flipped signs, too.
    """

    def add(leaf: jax.Array) -> jax.Array:
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32)
        place = jnp.zeros(leaf.shape, jnp.uint32)
        for axis, size in enumerate(leaf.shape):
            place = place * size + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        # Integers add up to the same in any order.
        return jnp.sum(_mixed(bits ^ _mixed(place)), dtype=jnp.uint32)

    total = jnp.zeros((), jnp.uint32)
    for leaf in jax.tree.leaves(tree):
        total = total * 31 + add(leaf)
    return total


def _mixed(number: jax.Array) -> jax.Array:
    """Returns a u32 of which every bit depends on every bit of `number`, each from one number.

    MurmurHash3's finalizer. Without it the highest bit, a sign, would only reach the highest bit of
    a sum, where two changes cancel.
    """
    number = (number ^ (number >> 16)) * jnp.uint32(0x85EBCA6B)
    number = (number ^ (number >> 13)) * jnp.uint32(0xC2B2AE35)
    return number ^ (number >> 16)
