# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One description of the parameters gives shapes, logical axes, initial values and shardings.

The trainer keeps every layer stacked on a leading axis L and scans over it; the engine keeps a list
of layers and unrolls (carrying weights or a cache through a scan copies them at every token).
"""

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.models.config import ModelConfig
from earl_jax.sharding.layout import Layout

Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One parameter: `axes` has a letter of the legend per axis.

    Its initial values are normal with this deviation, or all `constant` where that is 0.
    """

    shape: tuple[int, ...]
    axes: str
    deviation: float
    constant: float = 1.0


def parameter_specs(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Returns the tree of parameter specs, layers stacked."""
    sizes = {
        "L": config.num_layers,
        "D": config.width,
        "K": config.num_kv_heads,
        "G": config.num_query_groups,
        "H": config.head_size,
        "F": config.expert_ffn_size if config.num_experts else config.ffn_size,
        "E": config.num_experts,
        "X": config.num_experts,
        "V": vocab_size,
    }

    def spec(axes: str, inputs: str = "", scale: float = 1.0) -> ParameterSpec:
        fan_in = math.prod(sizes[letter] for letter in inputs)
        deviation = scale / math.sqrt(fan_in) if inputs else 0.0
        return ParameterSpec(
            shape=tuple(sizes[letter] for letter in axes), axes=axes, deviation=deviation
        )

    def norm(axes: str) -> ParameterSpec:
        return dataclasses.replace(spec(axes), constant=0.0 if config.norm_from_one else 1.0)

    residual = config.init_scale / math.sqrt(2 * config.num_layers)
    specs: dict[str, Any] = {
        # Embeddings of deviation 1/sqrt(width) are rescaled to unit size by the first norm.
        "embed": spec("VD", "D"),
        "layers": {
            "query": spec("LDKGH", "D"),
            "key": spec("LDKH", "D"),
            "value": spec("LDKH", "D"),
            "out": spec("LKGHD", "KGH", residual),
        },
        "final_norm": norm("D"),
    }
    if config.num_experts:
        specs["layers"] |= {
            "router": spec("LDX", "D"),
            "expert_gate": spec("LEDF", "D"),
            "expert_up": spec("LEDF", "D"),
            "expert_down": spec("LEFD", "F", residual),
        }
    else:
        specs["layers"] |= {
            "gate": spec("LDF", "D"),
            "up": spec("LDF", "D"),
            "down": spec("LFD", "F", residual),
        }
    for name, axes in _from_zero(config).items():
        specs["layers"][name] = dataclasses.replace(spec(axes), constant=0.0)
    if config.query_key_norm:
        heads = {"head": ("LH", "LH"), "all": ("LKGH", "LKH")}[config.query_key_norm]
        specs["layers"] |= {"query_norm": norm(heads[0]), "key_norm": norm(heads[1])}
    if config.pre_norms:
        specs["layers"] |= {"attention_norm": norm("LD"), "ffn_norm": norm("LD")}
    if config.post_norms:
        specs["layers"] |= {"post_attention_norm": norm("LD"), "post_ffn_norm": norm("LD")}
    if not config.tie_embeddings:
        specs["head"] = spec("DV", "D")
    return specs


def _from_zero(config: ModelConfig) -> dict[str, str]:
    """Returns the axes of a layer's biases and attention sinks, which begin at 0."""
    axes: dict[str, str] = {}
    if config.attention_bias:
        axes |= {"query_bias": "LKGH", "key_bias": "LKH", "value_bias": "LKH"}
    if config.out_bias:
        axes["out_bias"] = "LD"
    if config.num_experts and config.expert_bias:
        axes |= {"router_bias": "LX", "expert_gate_bias": "LEF", "expert_up_bias": "LEF"}
        axes["expert_down_bias"] = "LED"
    if config.attention_sinks:
        axes["sinks"] = "LKG"
    return axes


def is_spec(node: Any) -> bool:
    """True for a leaf of the description."""
    return isinstance(node, ParameterSpec)


def init_parameters(specs: Any, key: jax.Array) -> Params:
    """Returns random fp32 values; a parameter's key depends on its name only."""

    def init(path: Any, spec: ParameterSpec) -> jax.Array:
        if spec.deviation == 0.0:
            return jnp.full(spec.shape, spec.constant, jnp.float32)
        name_key = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return spec.deviation * jax.random.normal(name_key, spec.shape, jnp.float32)

    return jax.tree_util.tree_map_with_path(init, specs, is_leaf=is_spec)


def parameter_shardings(specs: Any, layout: Layout) -> Any:
    """Returns the sharding of each parameter of the description."""
    return jax.tree.map(lambda spec: layout.parameters(spec.axes), specs, is_leaf=is_spec)


def parameter_shapes(specs: Any, dtype: Any = jnp.float32) -> Any:
    """Returns the parameters as shapes, for tracing; trained ones are fp32."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs, is_leaf=is_spec
    )


def unstack_layers(tree: Any, num_layers: int, take: Any = None) -> Any:
    """Returns `layers` as a list of trees instead of a stacked tree; `take(leaf, i)` is layer i.

    The default `take` slices arrays; pass another for descriptions or shardings.
    """
    take = take or (lambda leaf, index: leaf[index])
    layers = [
        jax.tree.map(lambda leaf, index=index: take(leaf, index), tree["layers"], is_leaf=is_spec)
        for index in range(num_layers)
    ]
    return {**tree, "layers": layers}


def unstacked_specs(specs: Any, num_layers: int) -> Any:
    """Returns the specs of the engine's parameters: a list of layers."""

    def take(spec: ParameterSpec, _: int) -> ParameterSpec:
        return dataclasses.replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])

    return unstack_layers(specs, num_layers, take)


def check_tensor_axis(
    config: ModelConfig, vocab_size: int, tensor: int, fsdp: int, expert: int = 1, context: int = 1
) -> str | None:
    """Returns why this model cannot be split so, in words; None where it can.

    Its width is cut over `fsdp` and `context` together.
    """
    if expert > 1 and not config.num_experts:
        return (
            f"model.num_experts = 0, so that there are no experts to be cut in {expert}; "
            "use data, fsdp or tensor"
        )
    ffn = "model.expert_ffn_size" if config.num_experts else "model.ffn_size"
    for name, size, parts in (
        ("model.num_kv_heads", config.num_kv_heads, tensor),
        (ffn, config.expert_ffn_size if config.num_experts else config.ffn_size, tensor),
        ("model.num_experts", config.num_experts, expert),
        ("vocabulary", vocab_size, tensor),
        ("model.width", config.width, fsdp * context),
    ):
        if size % parts:
            return f"{name} = {size} does not divide by {parts}"
    return None


def num_parameters(specs: Any) -> int:
    """Returns the number of parameters."""
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=is_spec))
