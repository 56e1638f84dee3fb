# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What the planner says that layers keep for their gradients, against what JAX saves."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from earl_jax.models.attention import BLOCK_SIZE
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows
from earl_jax.models.kernels import Kernel
from earl_jax.models.parameters import parameter_shapes, parameter_specs
from earl_jax.models.presets import PRESETS
from earl_jax.placement.problem import model_sizes
from earl_jax.selector.footprint import BLOCK_TOKENS, kept_width
from earl_jax.sharding.layout import MeshShape, make_layout

VOCAB = 64
SMALL = {"width": 256, "num_heads": 4, "num_kv_heads": 2, "head_size": 128, "ffn_size": 512}
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 128}
FAMILIES = ["qwen2.5-7b", "qwen3-8b", "gemma3-12b", "qwen3-30b-a3b"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("preset", FAMILIES)
def test_without_remat_a_layer_keeps_what_jax_saves(preset, dtype):
    """With a kernel, of long rows."""
    assert_it_keeps_what_jax_saves(preset, dtype, "splash", 512)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_of_rows_of_one_block_attentions_weights_are_kept(dtype):
    assert BLOCK_TOKENS == BLOCK_SIZE
    assert_it_keeps_what_jax_saves("qwen2.5-7b", dtype, "blockwise", BLOCK_SIZE)


def assert_it_keeps_what_jax_saves(preset: str, dtype: str, kernel: Kernel, length: int) -> None:
    """Within 2 %: what there is of a head or a token and not of its width is left out."""
    model = dataclasses.replace(PRESETS[preset], **SMALL, compute_dtype=dtype)
    model = dataclasses.replace(model, **(EXPERTS if model.num_experts else {}))
    sizes = model_sizes(model, VOCAB, engine_dtype=dtype)
    computed = kept_width(sizes, MeshShape(), length) * jnp.dtype(dtype).itemsize
    # Of more rows and more layers, so that neither weights count nor what is there once.
    more = {
        layers: saved_bytes(model, kernel, layers, 4, length)
        - saved_bytes(model, kernel, layers, 2, length)
        for layers in (6, 12)
    }
    saved = (more[12] - more[6]) / (6 * 2 * length)
    assert computed == pytest.approx(saved, rel=0.02)


def saved_bytes(
    model: ModelConfig, kernel: Kernel, num_layers: int, num_rows: int, length: int
) -> int:
    """Of all that is saved for the gradient when so many layers see these rows."""
    model = dataclasses.replace(model, num_layers=num_layers)
    layout = make_layout(MeshShape(), jax.devices()[:1])

    def saved(params, tokens, segments):
        def forward(params):
            return forward_rows(model, layout, params, tokens, segments, kernel=kernel)

        return jax.vjp(forward, params)[1]

    rows = jax.ShapeDtypeStruct((num_rows, length), jnp.int32)
    shapes = jax.eval_shape(saved, parameter_shapes(parameter_specs(model, VOCAB)), rows, rows)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
