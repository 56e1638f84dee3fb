# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The decoder as a Flax NNX module, for programs that expect one (Tunix, qwix, MaxText).

    model = Decoder(config, params)                # our tree of parameters, nothing is copied
    logits_BTV, _ = model(tokens_BT)
    graphdef, state = nnx.split(model)             # any NNX program from here on
    params = to_tree(state)                        # and back: what `dispatch.weights` publishes

The module wraps the functions of decoder.py and is on no path of a run: `nnx.jit` costs 11 ms of
Python a call at 24 layers. Layers are stacked as the trainer has them, or a list as the engine has
them; qwix, which replaces single products, needs the list.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from earl_jax.models.attention.rows import cap
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows, head_weights
from earl_jax.models.parameters import (
    ParameterSpec,
    Params,
    is_spec,
    parameter_specs,
    stack_layers,
    unstacked_specs,
)
from earl_jax.settings.errors import InputError
from earl_jax.sharding.axes import LETTERS
from earl_jax.sharding.layout import Layout, MeshShape, make_layout


class Decoder(nnx.Module):
    """A decoder whose attributes are the entries of our tree of parameters, each an `nnx.Param`.

    The metadata of a Param has its logical axes, the letters of sharding/axes.py, as `out_sharding`
    ("V", "D" for the embedding) and the layout's rules as `sharding_rules`, from which
    `nnx.get_partition_spec` makes the specs that `layout.parameters` gives.
    """

    def __init__(self, config: ModelConfig, params: Params, layout: Layout | None = None):
        """Takes the parameters as they are, on their devices; `layout` defaults to one device.

        Raises:
            ValueError: parameters of another model or with adapters, or a `context` axis.
        """
        layout = layout or make_layout(MeshShape())
        if layout.shape.context > 1:
            raise InputError(
                f"mesh {layout} splits rows over context, but the module returns logits of whole "
                "rows; use a mesh of data, fsdp, expert and tensor"
            )
        self.config = config
        self.layout = layout
        specs = parameter_specs(config, params["embed"].shape[0])
        if isinstance(params["layers"], list):
            specs = unstacked_specs(specs, config.num_layers)
        expected, found = _shapes(specs), _shapes(params)
        if differing := sorted({path for path, _ in expected.items() ^ found.items()}):
            path = differing[0]
            raise InputError(
                f"params{path} is {found.get(path, 'missing')} and should be "
                f"{expected.get(path, 'left out')} for this config; merge adapters first "
                "(models/lora.py) and do not quantise"
            )
        rules = _rules(layout)

        def param(spec: ParameterSpec, value: jax.Array) -> nnx.Param:
            # Values are where they should be: no resharding, which would need an ambient mesh.
            return nnx.Param(
                value, out_sharding=tuple(spec.axes), sharding_rules=rules, eager_sharding=False
            )

        nodes = jax.tree.map(param, specs, params, is_leaf=is_spec)
        layers = nodes.pop("layers")
        is_list = isinstance(layers, list)
        self.layers = nnx.List(map(nnx.Dict, layers)) if is_list else nnx.Dict(layers)
        for name, node in nodes.items():
            setattr(self, name, node)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        cache: None = None,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        """Returns (logits f32[B,T,V], None) of whole rows, causal within each segment.

        The signature is Tunix's. Segments, 0 where a row is padding, come from `segment_ids`, else
        from the diagonal of `attention_mask` bool[B,T,T] (padding does not see itself), else each
        row is one. Positions count from the start of each segment, as Tunix counts them, so that
        `positions` is not read.

        Raises:
            ValueError: a cache. Decoding is `forward_chunk`'s.
        """
        del positions
        if cache is not None:
            raise InputError("Decoder keeps no cache; decode with decoder.forward_chunk")
        segments = jnp.ones_like(tokens) if segment_ids is None else segment_ids
        if segment_ids is None and attention_mask is not None:
            segments = jnp.diagonal(attention_mask, axis1=-2, axis2=-1).astype(jnp.int32)
        params = to_tree(nnx.state(self, nnx.Param))
        if isinstance(params["layers"], list):
            params = {**params, "layers": stack_layers(params["layers"])}
        x_BTD = forward_rows(self.config, self.layout, params, tokens, segments)
        head_DV = head_weights(params).astype(x_BTD.dtype)
        logits_BTV = jnp.einsum("BTD,DV->BTV", x_BTD, head_DV, preferred_element_type=jnp.float32)
        return cap(logits_BTV, self.config.final_softcap), None


def to_tree(state: Any) -> Params:
    """Returns our tree from a state of a `Decoder`: of its parameters, or of their gradients."""
    tree = nnx.to_pure_dict(state)
    layers = tree["layers"]
    is_list = all(isinstance(index, int) for index in layers)
    return {**tree, "layers": [layers[index] for index in sorted(layers)] if is_list else layers}


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_spec)
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}


def _rules(layout: Layout) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
    """Returns the mesh axes of every letter; None for one that is not split."""
    rules = dict(layout.parameter_rules)
    return tuple((letter, rules.get(letter)) for letter in LETTERS)
