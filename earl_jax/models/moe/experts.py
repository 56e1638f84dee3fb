# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: a router, and feed-forward networks of which each token uses a few.

No token is dropped and no expert has a capacity: pairs of a token and one of its experts are sorted
by expert, and each expert multiplies its own stretch of them. What a token gets does not depend on
its neighbours. The router is trained through the weights of the experts that it chose; a loss for
balance (routing.py) pulls the policy away from its objective, and is added where it is asked for.

Experts (E) are cut over the `expert` axis and their feed-forward (F) over `tensor`. Every device
computes its own experts for all tokens of its group, so that nothing travels but activations:

- In the rollout, tokens are whole on all devices of a row shard. One all-reduce over (expert,
  tensor) adds up the parts, as behind a dense layer. Rows cannot be cut over `expert` there: row
  shards decode unequally long, and one that had ended would keep the others waiting for ever.
- In training, rows are cut over `expert` too: else attention and the head, a large part of a
  model with small experts, would be computed alike on each of its devices. Tokens are gathered
  over `expert` before, and the parts scattered and added behind, which is as many bytes as the
  all-reduce would be. All-to-all would send less where tokens use fewer experts than there are
  shards, but needs buffers for the worst case, or drops tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from earl_jax.models.activations import gated
from earl_jax.models.config import ModelConfig
from earl_jax.models.moe.grouped_matmul import Products, choose_products, grouped_matmul
from earl_jax.models.moe.routing import choose_experts, router_probabilities
from earl_jax.models.quantization import Quantized
from earl_jax.models.remat import mark_product
from earl_jax.sharding.axes import MESH_AXES
from earl_jax.sharding.layout import PARAMETER_RULES, Layout

# Letters of a layer's weights, without L.
_WEIGHTS = {"router": "DX", "expert_gate": "EDF", "expert_up": "EDF", "expert_down": "EFD"}
_BIASES = {
    "router_bias": "X",
    "expert_gate_bias": "EF",
    "expert_up_bias": "EF",
    "expert_down_bias": "ED",
}
_WITHIN_ROWS = ("expert", "tensor")


def _letters(config: ModelConfig) -> dict[str, str]:
    """Returns the letters of the weights that a layer of this model has."""
    found = _WEIGHTS | _BIASES if config.expert_bias else _WEIGHTS
    return found | {"router_correction": "X"} if config.router_correction else found


def route(
    config: ModelConfig,
    x_TD: jax.Array,
    router_DX: jax.Array,
    bias_X: jax.Array | None = None,
    correction_X: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the experts of each token, the best first, and their weights.

    Returns:
        weights_TU f32 and experts_TU i32.
    """
    probability_TX = router_probabilities(config, x_TD, router_DX, bias_X)
    experts_TU = choose_experts(config, probability_TX, correction_X)
    weights_TU = jnp.take_along_axis(probability_TX, experts_TU, axis=-1)
    if config.normalize_expert_weights:
        # Sigmoids may all be 0.
        weights_TU = weights_TU / (jnp.sum(weights_TU, axis=-1, keepdims=True) + 1e-20)
    return config.expert_scale * weights_TU, experts_TU


def mix_experts(
    config: ModelConfig,
    layer: Any,
    x_TD: jax.Array,
    experts_E: jax.Array,
    products: Products = "xla",
) -> jax.Array:
    """Returns the sum over the experts `experts_E` (numbers, rising by one) for each token.

    `layer` has their weights, of which F may be a part, and the whole router: over all parts of E
    and F, these sums add up to the mixture, if only one part of F has a bias of `expert_down`. For
    weights and biases of experts, E is that of `experts_E`.

    Returns:
        out_TD in the type of `x_TD`.
    """
    router = layer["router"], layer.get("router_bias"), layer.get("router_correction")
    weights_TU, chosen_TU = route(config, x_TD, *router)
    num_experts, per_token = len(experts_E), config.experts_per_token
    here_TU = (chosen_TU >= experts_E[0]) & (chosen_TU <= experts_E[-1])
    # Pairs of other devices' experts are sorted behind all of ours, and belong to no group.
    local_M = jnp.where(here_TU, chosen_TU - experts_E[0], num_experts).reshape(-1)
    order_M = jnp.argsort(local_M, stable=True)
    sizes_E = jnp.sum(local_M[:, None] == jnp.arange(num_experts)[None], axis=0, dtype=jnp.int32)
    x_TUD = jnp.broadcast_to(x_TD[:, None], (len(x_TD), per_token, x_TD.shape[-1]))
    x_MD = _permute(x_TUD.reshape(-1, x_TD.shape[-1]), order_M)
    # Behind the last group a backend may leave anything, NaN included: in gradients, which are
    # taken out here, and in results, below.
    is_ours_M = local_M[order_M] < num_experts
    x_MD = _with_gradients_of(is_ours_M, x_MD)
    expert_M = jnp.minimum(local_M[order_M], num_experts - 1)

    def multiply(x_MD: jax.Array, weight: str) -> jax.Array:
        product_MF = mark_product(_multiply(x_MD, layer[weight], sizes_E, expert_M, products))
        if not config.expert_bias:
            return product_MF
        bias_MF = _biases(num_experts, layer[f"{weight}_bias"], expert_M)
        return product_MF + _with_gradients_of(is_ours_M, bias_MF)

    gate_MF, up_MF = multiply(x_MD, "expert_gate"), multiply(x_MD, "expert_up")
    hidden_MF = gated(config.activation, gate_MF, up_MF)
    out_MD = multiply(hidden_MF, "expert_down")
    out_TUD = _permute(out_MD, jnp.argsort(order_M)).reshape(x_TUD.shape)
    out_TUD = jnp.where(here_TU[..., None], out_TUD, 0).astype(jnp.float32)
    return jnp.einsum("TUD,TU->TD", out_TUD, weights_TU).astype(x_TD.dtype)


def _multiply(
    x_MD: jax.Array,
    weights_EDF: jax.Array | Quantized,
    sizes_E: jax.Array,
    expert_M: jax.Array,
    products: Products,
) -> jax.Array:
    """Runs `grouped_matmul`, also of int8. `expert_M` is each row's group, any after the last."""
    if not isinstance(weights_EDF, Quantized):
        return grouped_matmul(x_MD, weights_EDF, sizes_E, products)
    product_MF = grouped_matmul(x_MD, weights_EDF.values.astype(x_MD.dtype), sizes_E, products)
    scale_MF = weights_EDF.scale[expert_M]
    return (product_MF.astype(jnp.float32) * scale_MF).astype(x_MD.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _biases(num_experts: int, bias_EF: jax.Array, expert_M: jax.Array) -> jax.Array:
    """Returns the bias of each row's expert; experts rise. Backward rows are summed in fp32.

    By a product: JAX's own sum is in the compute type, one row after the other, and loses most of
    some thousand rows in bf16 (256 + 1 is 256).
    """
    return bias_EF.at[expert_M].get(mode="promise_in_bounds", indices_are_sorted=True)


def _biases_forward(num_experts: int, bias_EF: jax.Array, expert_M: jax.Array) -> Any:
    return _biases(num_experts, bias_EF, expert_M), expert_M


def _biases_backward(num_experts: int, expert_M: jax.Array, gradient_MF: jax.Array) -> Any:
    chosen_ME = jax.nn.one_hot(expert_M, num_experts, dtype=gradient_MF.dtype)
    sums_EF = jnp.einsum("ME,MF->EF", chosen_ME, gradient_MF, preferred_element_type=jnp.float32)
    return sums_EF.astype(gradient_MF.dtype), None


_biases.defvjp(_biases_forward, _biases_backward)


@jax.custom_vjp
def _with_gradients_of(is_ours_M: jax.Array, x_MD: jax.Array) -> jax.Array:
    """Returns `x_MD`, whose gradient is 0 where a row is not ours.

    `jnp.where` would keep a mask of all elements for the backward pass.
    """
    return x_MD


def _with_gradients_forward(is_ours_M: jax.Array, x_MD: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x_MD, is_ours_M


def _with_gradients_backward(
    is_ours_M: jax.Array, gradient_MD: jax.Array
) -> tuple[None, jax.Array]:
    return None, jnp.where(is_ours_M[:, None], gradient_MD, 0)


_with_gradients_of.defvjp(_with_gradients_forward, _with_gradients_backward)


def _permute(x_MD: jax.Array, order_M: jax.Array) -> jax.Array:
    """Returns rows in another order. As no row comes twice, its gradient needs no atomic adds."""
    return x_MD.at[order_M].get(mode="promise_in_bounds", unique_indices=True)


def _own_experts(config: ModelConfig, layout: Layout) -> jax.Array:
    """Returns the numbers of this device's experts; all mesh axes must be manual.

    They are computed here and not cut from `arange(num_experts)` by a specification: XLA merges
    arrays of equal contents, so that other aranges of that length (the tokens of a burst or of a
    chunk) were cut over `expert` as well, with permutes and gathers after them.
    """
    num_local = config.num_experts // layout.shape.expert
    return jax.lax.axis_index("expert") * num_local + jnp.arange(num_local)


def _adding_once(layout: Layout, weights: Any) -> Any:
    """Returns the weights with a bias of `expert_down` on one device of the `tensor` axis only.

    Results are added up over it; all mesh axes of the weights must be manual.
    """
    name = "expert_down_bias"
    if name not in weights or layout.shape.tensor == 1:
        return weights
    is_first = jax.lax.axis_index("tensor") == 0
    return {**weights, name: jnp.where(is_first, weights[name], 0)}


def experts_of_rows(config: ModelConfig, layout: Layout, layer: Any, x_BTD: jax.Array) -> jax.Array:
    """Computes the mixture for whole rows on the trainer's layout.

    Weights are gathered over `fsdp` and `context` for use, and their gradients scattered.
    """
    # XLA for CPU keeps collectives over an axis of size 1, as copies: those are left out here.
    cut = {axis for axis, size in layout.mesh.shape.items() if size > 1}
    gathered = tuple(axis for axis in PARAMETER_RULES["D"] if axis in cut)
    rows_cut = "expert" in cut & set(layout.row_axes)
    adds = tuple(
        axis for axis in _WITHIN_ROWS if axis in cut and not (rows_cut and axis == "expert")
    )
    of_weights = _letters(config)
    specs = {name: layout.parameter_spec(letters) for name, letters in of_weights.items()}
    products = choose_products(layout, config)

    def mix(weights: Any, x_BTD: jax.Array) -> jax.Array:
        if gathered:
            weights = {
                name: jax.lax.all_gather(leaf, gathered, axis=letters.index("D"), tiled=True)
                if "D" in (letters := of_weights[name])
                else leaf
                for name, leaf in weights.items()
            }
        weights = _adding_once(layout, weights)
        if rows_cut:
            x_BTD = jax.lax.all_gather(x_BTD, "expert", tiled=True)
        experts_E = _own_experts(config, layout)
        x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
        out_BTD = mix_experts(config, weights, x_TD, experts_E, products).reshape(x_BTD.shape)
        out_BTD = jax.lax.psum_scatter(out_BTD, "expert", tiled=True) if rows_cut else out_BTD
        return jax.lax.psum(out_BTD, adds) if adds else out_BTD

    rows = layout.activation_spec("BT.")
    mixed = jax.shard_map(
        mix,
        mesh=layout.mesh,
        in_specs=(specs, rows),
        out_specs=rows,
        axis_names=set(MESH_AXES),
        check_vma=False,
    )
    return mixed({name: layer[name] for name in specs}, x_BTD)


def experts_of_shard(
    config: ModelConfig, layout: Layout | None, layer: Any, x_BTD: jax.Array
) -> jax.Array:
    """Computes the mixture inside the engine's `shard_map`; `layout` None: weights are whole."""
    of_weights = _letters(config)
    weights = {name: layer[name] for name in of_weights}
    products = choose_products(layout, config)

    def mix(experts_E: jax.Array, weights: Any, x_BTD: jax.Array) -> jax.Array:
        x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
        return mix_experts(config, weights, x_TD, experts_E, products).reshape(x_BTD.shape)

    axes: set[str] = set()
    if products == "tokamax":
        # XLA cannot split the kernel: whatever axis is left is by hand, those of size 1 too.
        axes = set[str](MESH_AXES).difference(jax.sharding.get_abstract_mesh().manual_axes)
    elif layout is not None and layout.shape.expert * layout.shape.tensor > 1:
        axes = set[str](_WITHIN_ROWS)
    if layout is None or not axes:
        return mix(jnp.arange(config.num_experts), weights, x_BTD)

    # Axes of rows are manual already, and so are no part of a specification here.
    def within_rows(letters: str) -> P:
        spec = layout.parameter_spec(letters)
        return P(*(axis if axis in _WITHIN_ROWS else None for axis in spec))

    specs = {
        name: _placed(weights[name], letters, within_rows) for name, letters in of_weights.items()
    }

    def mix_own(weights: Any, x_BTD: jax.Array) -> jax.Array:
        out_BTD = mix(_own_experts(config, layout), _adding_once(layout, weights), x_BTD)
        # XLA for CPU ends the process at this sum of bf16 (jaxlib 0.10.2: "Invalid binary
        # instruction opcode copy"; since meshes have a `context` axis, of size 1 here).
        dtype = jnp.float32 if layout.platform == "cpu" else out_BTD.dtype
        return jax.lax.psum(out_BTD.astype(dtype), _WITHIN_ROWS).astype(out_BTD.dtype)

    mixed = jax.shard_map(
        mix_own,
        in_specs=(specs, P()),
        out_specs=P(),
        axis_names=axes,
        check_vma=False,
    )
    return mixed(weights, x_BTD)


def _placed(weight: Any, letters: str, place: Callable[[str], P]) -> Any:
    """Returns the specification of a matrix, or of both parts of a quantised one."""
    if not isinstance(weight, Quantized):
        return place(letters)
    outputs = "".join(letter for letter in letters if letter not in weight.inputs)
    return dataclasses.replace(weight, values=place(letters), scale=place(outputs))
