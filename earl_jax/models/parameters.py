# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One description of the parameters gives shapes, logical axes, initial values and shardings.

The trainer keeps every layer stacked on a leading axis L and scans over it; the engine keeps a list
of layers and unrolls (carrying weights or a cache through a scan copies them at every token).
"""

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.models.config import ModelConfig
from earl_jax.sharding.layout import Layout

Params = Any

# Parameters that keep fp32 where others are in the compute type: experts are chosen by differences
# of the first that bf16 has not, and the others give the exponents of decays.
FP32_PARAMETERS = ("router_correction", "linear_decay_bias", "linear_log_decay")
# The network of the first layers of a mixture (`num_dense_layers`). Whatever else not all layers
# have is of those behind them, but for what layers of linear attention have ("linear_...") and
# those that attend beside them.
_DENSE = ("gate", "up", "down")
_ATTENTION = ("query", "key", "value", "out", "attention_gate", "query_norm", "key_norm")
_ATTENTION += ("query_bias", "key_bias", "value_bias")


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
    """Returns the tree of parameter specs, layers stacked: of each parameter those that have it."""
    make = _Maker(config, vocab_size)
    layers = _attention_specs(config, make)
    if config.has_states:
        attending = config.num_layers - config.num_linear_layers
        layers = {
            name: dataclasses.replace(spec, shape=(attending, *spec.shape[1:]))
            for name, spec in layers.items()
        }
        layers |= _linear_specs(config, make)
    if config.num_experts:
        layers |= _mixture_specs(config, make)
    else:
        layers |= _network_specs(make, "")
    if config.pre_norms:
        layers |= {"attention_norm": make.norm("LD"), "ffn_norm": make.norm("LD")}
    if config.post_norms:
        layers |= {"post_attention_norm": make.norm("LD"), "post_ffn_norm": make.norm("LD")}
    specs: dict[str, Any] = {
        # Embeddings of deviation 1/sqrt(width) are rescaled to unit size by the first norm.
        "embed": make.matrix("VD", "D"),
        "layers": layers,
        "final_norm": make.norm("D"),
    }
    if not config.tie_embeddings:
        specs["head"] = make.matrix("DV", "D")
    return specs


class _Maker:
    """Makes specs of a model's parameters; `own` are sizes of axes that only this one has."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        self._sizes = {
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
        # Of projections that write into the residual stream.
        self.residual = config.init_scale / math.sqrt(2 * config.num_layers)
        self._norm = 0.0 if config.norm_from_one else 1.0

    def matrix(self, axes: str, inputs: str, scale: float = 1.0, **own: int) -> ParameterSpec:
        sizes = self._sizes | own
        fan_in = math.prod(sizes[letter] for letter in inputs)
        shape = tuple(sizes[letter] for letter in axes)
        return ParameterSpec(shape=shape, axes=axes, deviation=scale / math.sqrt(fan_in))

    def constant(self, axes: str, value: float = 0.0, **own: int) -> ParameterSpec:
        shape = tuple((self._sizes | own)[letter] for letter in axes)
        return ParameterSpec(shape=shape, axes=axes, deviation=0.0, constant=value)

    def norm(self, axes: str, **own: int) -> ParameterSpec:
        return self.constant(axes, self._norm, **own)


def _attention_specs(config: ModelConfig, make: _Maker) -> dict[str, ParameterSpec]:
    out = make.matrix("LKGHD", "KGH", make.residual, H=config.value_head_size)
    if config.latent_size:
        return {"out": out, **_latent_specs(config, make)}
    specs = {
        "query": make.matrix("LDKGH", "D"),
        "key": make.matrix("LDKH", "D"),
        "value": make.matrix("LDKH", "D"),
        "out": out,
    }
    biases: dict[str, str] = {}
    if config.attention_bias:
        biases |= {"query_bias": "LKGH", "key_bias": "LKH", "value_bias": "LKH"}
    if config.out_bias:
        biases["out_bias"] = "LD"
    if config.attention_sinks:
        biases["sinks"] = "LKG"
    specs |= {name: make.constant(axes) for name, axes in biases.items()}
    if config.attention_gate:
        specs["attention_gate"] = make.matrix("LDKGH", "D")
    if config.query_key_norm:
        heads = {"head": ("LH", "LH"), "all": ("LKGH", "LKH")}[config.query_key_norm]
        specs |= {"query_norm": make.norm(heads[0]), "key_norm": make.norm(heads[1])}
    return specs


def _linear_specs(config: ModelConfig, make: _Maker) -> dict[str, ParameterSpec]:
    """Returns what layers of linear attention have: letters K and G are of their own heads.

    Inputs are projected to queries, keys, values and gates of the result, and to a rate and a decay
    of each head; `taps` are the weights of the convolution, the last that of the token itself.
    """
    own = {"L": config.num_linear_layers, "K": config.linear_key_heads, "G": config.linear_groups}
    keys = own | {"H": config.linear_key_size, "I": config.conv_size}
    values = own | {"H": config.linear_value_size, "I": config.conv_size}
    return {
        "linear_query": make.matrix("LDKH", "D", **keys),
        "linear_key": make.matrix("LDKH", "D", **keys),
        "linear_value": make.matrix("LDKGH", "D", **values),
        "linear_gate": make.matrix("LDKGH", "D", **values),
        "linear_rate": make.matrix("LDKG", "D", **own),
        "linear_decay": make.matrix("LDKG", "D", **own),
        "linear_query_taps": make.matrix("LKHI", "I", **keys),
        "linear_key_taps": make.matrix("LKHI", "I", **keys),
        "linear_value_taps": make.matrix("LKGHI", "I", **values),
        "linear_decay_bias": make.constant("LKG", 1.0, **own),
        # A state halves in one token to some; `transformers` begins with factors of 0.01 to 16.
        "linear_log_decay": make.constant("LKG", 0.0, **own),
        "linear_norm": make.constant("LH", 1.0, L=own["L"], H=config.linear_value_size),
        "linear_out": make.matrix("LKGHD", "KGH", make.residual, **values),
    }


def _latent_specs(config: ModelConfig, make: _Maker) -> dict[str, ParameterSpec]:
    """Returns what latent attention has: `latent` makes a latent with a rotated key behind it."""
    of_head = config.head_size - config.rope_size + config.value_size
    specs = {
        "latent": make.matrix("LDA", "D", A=config.cached_size),
        "latent_norm": make.norm("LA", A=config.latent_size),
        "latent_up": make.matrix("LAKH", "A", A=config.latent_size, H=of_head),
    }
    low = config.query_latent_size
    if not low:
        return {**specs, "query": make.matrix("LDKGH", "D")}
    return {
        **specs,
        "query_down": make.matrix("LDA", "D", A=low),
        "query_down_norm": make.norm("LA", A=low),
        "query_up": make.matrix("LAKGH", "A", A=low),
    }


def _network_specs(make: _Maker, prefix: str, **own: int) -> dict[str, ParameterSpec]:
    return {
        f"{prefix}gate": make.matrix("LDF", "D", **own),
        f"{prefix}up": make.matrix("LDF", "D", **own),
        f"{prefix}down": make.matrix("LFD", "F", make.residual, **own),
    }


def _mixture_specs(config: ModelConfig, make: _Maker) -> dict[str, ParameterSpec]:
    """Returns the experts' parameters, and those of networks before and beside them."""
    dense = config.num_dense_layers
    layers = config.num_layers - dense
    specs = {
        "router": make.matrix("LDX", "D", L=layers),
        "expert_gate": make.matrix("LEDF", "D", L=layers),
        "expert_up": make.matrix("LEDF", "D", L=layers),
        "expert_down": make.matrix("LEFD", "F", make.residual, L=layers),
    }
    if dense:
        specs |= _network_specs(make, "", L=dense, F=config.ffn_size)
    if config.shared_ffn_size:
        specs |= _network_specs(make, "shared_", L=layers, F=config.shared_ffn_size)
    if config.shared_ffn_gate:
        specs["shared_router"] = make.matrix("LDX", "D", L=layers, X=1)
    from_zero: dict[str, str] = {}
    if config.expert_bias:
        from_zero |= {"router_bias": "LX", "expert_gate_bias": "LEF", "expert_up_bias": "LEF"}
        from_zero["expert_down_bias"] = "LED"
    if config.router_correction:
        from_zero["router_correction"] = "LX"
    return specs | {name: make.constant(axes, L=layers) for name, axes in from_zero.items()}


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


def compute_dtype_of(name: str, dtype: Any) -> Any:
    """Returns the type that the parameter of this name is computed in, where others are in `dtype`.

    `name` is the last key of its path.
    """
    return jnp.float32 if name in FP32_PARAMETERS else dtype


def cast_parameters(params: Params, dtype: Any) -> Params:
    """Returns parameters in the types that they are computed in."""

    def cast(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf.astype(compute_dtype_of(getattr(path[-1], "key", ""), dtype))

    return jax.tree_util.tree_map_with_path(cast, params)


def layers_with(name: str, num_stacked: int, num_layers: int) -> Sequence[int]:
    """Returns the layers that have this parameter, of which so many are stacked, in their order.

    Example: of four layers with 3 stacked "linear_query" and 1 "query" it is 0 1 2, and 3.
    """
    if name in _DENSE or num_stacked == num_layers:
        return range(num_stacked)
    if name in _ATTENTION:
        every = num_layers // num_stacked
        return range(every - 1, num_layers, every)
    if name.startswith("linear_"):
        every = num_layers // (num_layers - num_stacked)
        return [layer for layer in range(num_layers) if (layer + 1) % every]
    return range(num_layers - num_stacked, num_layers)


def unstack_layers(tree: Any, num_layers: int, take: Any = None) -> Any:
    """Returns `layers` as a list of trees instead of a stacked tree; `take(leaf, i)` is layer i.

    The default `take` slices arrays; pass another for descriptions or shardings. A layer has the
    parameters that are stacked for it.
    """
    take = take or (lambda leaf, index: leaf[index])
    layers: list[dict[str, Any]] = [{} for _ in range(num_layers)]
    for name, stacked in tree["layers"].items():
        first = jax.tree.leaves(stacked, is_leaf=is_spec)[0]
        number = getattr(first, "shape", (num_layers,))[0]
        for place, index in enumerate(layers_with(name, number, num_layers)):
            layers[index][name] = jax.tree.map(
                lambda leaf, place=place: take(leaf, place), stacked, is_leaf=is_spec
            )
    return {**tree, "layers": layers}


def stack_layers(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the inverse: of each parameter an array of the layers that have it."""
    names = {name: None for layer in layers for name in layer}
    return {
        name: jax.tree.map(
            lambda *leaves: jnp.stack(leaves), *(layer[name] for layer in layers if name in layer)
        )
        for name in names
    }


def uniform_stacks(
    layers: Mapping[str, Any], num_layers: int, num_dense: int
) -> list[tuple[slice, Any]]:
    """Returns stacked layers as one tree, or two where the first `num_dense` have other parameters.

    Before each tree is which layers it has; all its parameters are of all of them.
    """
    if not num_dense:
        return [(slice(0, num_layers), layers)]

    def part(first: int, stop: int) -> tuple[slice, dict[str, Any]]:
        found = {}
        for name, stacked in layers.items():
            having = layers_with(name, jax.tree.leaves(stacked)[0].shape[0], num_layers)
            if first in having:
                own = slice(having.index(first), having.index(stop - 1) + 1)
                found[name] = jax.tree.map(lambda leaf, own=own: leaf[own], stacked)
        return slice(first, stop), found

    return [part(0, num_dense), part(num_dense, num_layers)]


def periods(layers: Mapping[str, Any], num_layers: int, every: int) -> Any:
    """Returns stacked layers in periods of `every` layers: of each parameter those of a period."""

    def fold(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(num_layers // every, -1, *leaf.shape[1:])

    return {name: jax.tree.map(fold, stacked) for name, stacked in layers.items()}


def layer_of_period(period: Mapping[str, Any], place: int, every: int) -> dict[str, Any]:
    """Returns layer `place` of a period, which has the parameters that are there for it."""
    found = {}
    for name, stacked in period.items():
        having = layers_with(name, jax.tree.leaves(stacked)[0].shape[0], every)
        if place in having:
            index = having.index(place)
            found[name] = jax.tree.map(lambda leaf, index=index: leaf[index], stacked)
    return found


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
    if config.has_states and context > 1:
        return (
            f"model.attention_every = {config.attention_every}: a layer of linear attention reads "
            "the tokens of a row in their order, so that none are cut over context; use data, "
            "fsdp, tensor or expert"
        )
    if expert > 1 and not config.num_experts:
        return (
            f"model.num_experts = 0, so that there are no experts to be cut in {expert}; "
            "use data, fsdp or tensor"
        )
    networks = [("model.ffn_size", config.ffn_size)]
    if config.num_experts:
        networks = networks if config.num_dense_layers else []
        networks.append(("model.expert_ffn_size", config.expert_ffn_size))
        networks.append(("model.shared_ffn_size", config.shared_ffn_size))
    for name, size, parts in (
        ("model.num_kv_heads", config.num_kv_heads, tensor),
        ("model.linear_key_heads", config.linear_key_heads if config.has_states else 0, tensor),
        *((name, size, tensor) for name, size in networks),
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
