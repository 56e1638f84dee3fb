# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The NNX module: the same parameters, logits and gradients as the plain functions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows, head_weights
from earl_jax.models.lora import adapt, adapter_specs
from earl_jax.models.lora_config import LoraConfig
from earl_jax.models.nnx import Decoder, to_tree
from earl_jax.models.parameters import (
    init_parameters,
    parameter_shardings,
    parameter_specs,
    unstack_layers,
)
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout

VOCAB = 40
DENSE = ModelConfig(
    num_layers=3,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    ffn_size=48,
    windows=(4, 0),
    query_key_norm="head",
    tie_embeddings=True,
    final_softcap=5.0,
)
EXPERTS = dataclasses.replace(
    DENSE,
    num_layers=2,
    windows=(),
    tie_embeddings=False,
    final_softcap=0.0,
    num_experts=4,
    expert_ffn_size=16,
)
# Norms behind alone, and over all heads.
OLMO = dataclasses.replace(
    DENSE, query_key_norm="all", pre_norms=False, post_norms=True, no_rope_every=2
)
FAMILIES = {"dense": DENSE, "experts": EXPERTS, "olmo": OLMO}
TOKENS = jax.random.randint(jax.random.key(1), (4, 12), 0, VOCAB)
# Two samples in a row, padding behind, padding before.
SEGMENTS = jnp.array([[1] * 12, [1] * 5 + [2] * 7, [1] * 9 + [0] * 3, [0] * 4 + [1] * 8])


def make_params(config: ModelConfig):
    return jax.jit(lambda key: init_parameters(parameter_specs(config, VOCAB), key))(
        jax.random.key(0)
    )


def plain_loss(config, layout, params, segments):
    """Returns (a loss that weighs every logit of a real token, logits)."""
    hidden = forward_rows(config, layout, params, TOKENS, segments)
    logits = jnp.einsum("BTD,DV->BTV", hidden, head_weights(params))
    if config.final_softcap:
        logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
    return weigh(logits, segments), logits


def weigh(logits, segments):
    weights = jnp.sin(jnp.arange(logits.size).reshape(logits.shape))
    return jnp.sum(logits * weights * (segments > 0)[..., None])


@pytest.mark.slow_except("dense-*")
@pytest.mark.parametrize(
    ("family", "stacked"), [("dense", True), ("experts", False), ("olmo", True)]
)
def test_logits_and_gradients_are_those_of_the_functions(family, stacked):
    config, layout = FAMILIES[family], make_layout(MeshShape())
    params = make_params(config)
    own = params if stacked else unstack_layers(params, config.num_layers)
    model = Decoder(config, own)

    plain = jax.jit(
        jax.value_and_grad(lambda p: plain_loss(config, layout, p, SEGMENTS), has_aux=True)
    )
    (_, expected), gradients = plain(params)

    @nnx.jit
    def through_module(model):
        def loss(model):
            logits, cache = model(TOKENS, segment_ids=SEGMENTS)
            assert cache is None
            return weigh(logits, SEGMENTS), logits

        return nnx.value_and_grad(loss, has_aux=True)(model)

    (_, logits), state = through_module(model)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    if not stacked:
        gradients = unstack_layers(gradients, config.num_layers)
    assert float(jnp.abs(gradients["embed"]).max()) > 0.1
    jax.tree.map(
        lambda ours, plain: np.testing.assert_allclose(ours, plain, atol=1e-4),
        to_tree(state),
        gradients,
    )


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
def test_split_and_merge_return_the_same_arrays_in_our_tree(stacked):
    params = make_params(EXPERTS)
    own = params if stacked else unstack_layers(params, EXPERTS.num_layers)
    graphdef, state = nnx.split(Decoder(EXPERTS, own))
    again = to_tree(nnx.state(nnx.merge(graphdef, state)))
    assert jax.tree.structure(again) == jax.tree.structure(own)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(own), strict=True))


@pytest.mark.slow_except("list")
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
def test_partition_specs_of_the_metadata_are_those_of_the_layout(stacked):
    shape = MeshShape(data=1, fsdp=2, expert=2, tensor=2)
    layout = make_layout(shape, row_axes=TRAINING_ROWS)
    specs = parameter_specs(EXPERTS, VOCAB)
    shardings = parameter_shardings(specs, layout)
    params = jax.device_put(make_params(EXPERTS), shardings)
    expected = jax.tree.map(lambda sharding: sharding.spec, shardings)
    if not stacked:
        params = unstack_layers(params, EXPERTS.num_layers)
        expected = unstack_layers(expected, EXPERTS.num_layers, lambda spec, _: P(*tuple(spec)[1:]))
    model = Decoder(EXPERTS, params, layout)
    found = to_tree(nnx.get_partition_spec(nnx.state(model)))
    assert model.embed.get_metadata("out_sharding") == ("V", "D")
    jax.tree.map(lambda a, b: check_same_spec(a, b), found, expected, is_leaf=is_partition)
    if not stacked:
        return
    # The same logits where parameters and rows are split.
    run = nnx.jit(lambda model: model(TOKENS, segment_ids=SEGMENTS))
    (sharded, _), (whole, _) = run(model), run(Decoder(EXPERTS, make_params(EXPERTS)))
    real = np.asarray(SEGMENTS) > 0
    np.testing.assert_allclose(np.asarray(sharded)[real], np.asarray(whole)[real], atol=1e-4)


def is_partition(node) -> bool:
    return isinstance(node, P)


def check_same_spec(found: P, expected: P) -> None:
    def axes(spec: P):
        return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]

    assert axes(found) == axes(expected)


def test_a_mask_of_tunix_gives_the_logits_of_its_segments():
    """Left-padded prompts: the causal mask without the padding, and no segments."""
    model = Decoder(DENSE, make_params(DENSE))
    real = SEGMENTS[2:] > 0
    mask = jnp.tril(jnp.ones((2, 12, 12), bool)) & real[:, None, :]

    @nnx.jit
    def both(model):
        logits, _ = model(TOKENS[2:], positions=None, cache=None, attention_mask=mask)
        return logits, model(TOKENS[2:], segment_ids=SEGMENTS[2:])[0]

    logits, expected = both(model)
    np.testing.assert_array_equal(logits, expected)
    with pytest.raises(ValueError, match="forward_chunk"):
        model(TOKENS, cache={})


def test_parameters_of_another_model_are_refused():
    params = make_params(DENSE)
    with pytest.raises(ValueError, match=r"\['head'\] is missing and should be \(32, 40\)"):
        Decoder(dataclasses.replace(DENSE, tie_embeddings=False), params)
    with pytest.raises(ValueError, match=r"\['layers'\]\['key_norm'\] is \(3, 8\)"):
        Decoder(dataclasses.replace(DENSE, query_key_norm=""), params)
    with pytest.raises(ValueError, match=r"\['down'\] is \(3, 48, 32\).*\(3, 50, 32\)"):
        Decoder(dataclasses.replace(DENSE, ffn_size=50), params)
    adapters = init_parameters(
        adapter_specs(parameter_specs(DENSE, VOCAB), LoraConfig(rank=2)), jax.random.key(0)
    )
    with pytest.raises(ValueError, match="merge adapters first"):
        Decoder(DENSE, adapt(params, adapters, LoraConfig(rank=2)))
    with pytest.raises(ValueError, match="context"):
        Decoder(DENSE, params, make_layout(MeshShape(context=2)))
