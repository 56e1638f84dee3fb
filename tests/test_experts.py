# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: its formula, no token for another's sake, and the same on every mesh."""

import collections
import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.engine.config import EngineConfig
from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.models.decoder import forward_rows
from earl_jax.models.lora import adapter_specs
from earl_jax.models.lora_config import LoraConfig
from earl_jax.models.moe import experts
from earl_jax.models.moe.experts import mix_experts, route
from earl_jax.models.moe.grouped_matmul import MAX_MASKED_ROWS
from earl_jax.models.parameters import parameter_shardings, parameter_specs, unstack_layers
from earl_jax.settings.remat import Remat
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
from earl_jax.sharding.placing import placed_shapes
from earl_jax.train.config import TrainConfig
from earl_jax.train.state import state_of
from earl_jax.train.step import read_metrics
from earl_jax.trajectory import TrajectoryBatch
from tests.support import engines
from tests.support.engines import NUM_SLOTS
from tests.support.experts import (
    BIASED,
    MODEL,
    by_hand,
    one_biased_layer,
    one_layer,
    params,
    tokens_TD,
)
from tests.support.forward import next_scores
from tests.support.hlo import COLLECTIVE, replica_groups
from tests.support.settings import make_config
from tests.support.slots import MAX_TOKENS, VOCAB, converse, make_scripts
from tests.support.updates import train_step

REFERENCE = Path(__file__).parent / "reference" / "qwen3_moe"


EVERY_EXPERT = np.arange(MODEL.num_experts)
GATED = ("expert_gate", "expert_up")
MIX = jax.jit(mix_experts, static_argnums=0)
BOTH = [(MODEL, one_layer), (BIASED, one_biased_layer)]


# One layer.


def test_the_router_takes_the_likeliest_and_their_probabilities():
    # Softmax of ln 1, ln 5, ln 2, ln 8 is 1/16, 5/16, 2/16, 8/16.
    logits = np.log(np.array([[1.0, 5.0, 2.0, 8.0]], np.float32))
    choose, identity = jax.jit(route, static_argnums=0), np.eye(4, dtype=np.float32)
    model = dataclasses.replace(MODEL, experts_per_token=2, normalize_expert_weights=False)
    weights, experts = choose(model, logits, identity)
    assert experts.tolist() == [[3, 1]]
    np.testing.assert_allclose(weights, [[8 / 16, 5 / 16]], rtol=1e-6)
    normalized = dataclasses.replace(model, normalize_expert_weights=True)
    weights, _ = choose(normalized, logits, identity)
    np.testing.assert_allclose(weights, [[8 / 13, 5 / 13]], 1e-6)
    # In fp32 whatever comes in: 1/256 apart, which a sum in bf16 near 1 would lose.
    near = np.array([[1.0, 1.0 + 2**-7]], jnp.bfloat16)
    weights, experts = choose(model, near, np.eye(2, dtype=jnp.bfloat16))
    assert weights.dtype == jnp.float32 and experts.tolist() == [[1, 0]]
    assert np.subtract(*np.asarray(weights)[0]) == pytest.approx(np.tanh(2**-8), rel=1e-4)


@pytest.mark.parametrize(
    ("count", "normalize"), [(1, True), (2, False), (50, True), (MAX_MASKED_ROWS // 3 + 1, False)]
)
def test_the_mixture_is_its_formula(normalize, count):
    """With one or two tokens most experts get none; with fifty every expert has its own number."""
    model = dataclasses.replace(MODEL, normalize_expert_weights=normalize)
    out = MIX(model, one_layer(), tokens_TD(count), EVERY_EXPERT)
    np.testing.assert_allclose(out, by_hand(model, one_layer(), tokens_TD(count)), atol=2e-5)


def test_biases_and_a_clamped_gate_are_their_formula():
    layer, x_TD = one_biased_layer(), tokens_TD(50)
    out = np.asarray(MIX(BIASED, layer, x_TD, EVERY_EXPERT))
    expected = by_hand(BIASED, layer, x_TD)
    np.testing.assert_allclose(out, expected, atol=2e-5 * np.abs(expected).max())
    # Each of them matters, and so does what is clamped.
    for name in ("router", "expert_gate", "expert_up", "expert_down"):
        other = by_hand(BIASED, layer | {f"{name}_bias": 0 * layer[f"{name}_bias"]}, x_TD)
        assert np.abs(out - other).max() > 0.1, name
    gates = np.einsum("TD,EDF->TEF", x_TD, layer["expert_gate"])
    assert 0.01 < np.mean(gates > 7) < 0.5


def test_all_tokens_may_want_the_same_experts():
    """Nothing is dropped: no expert has a capacity."""
    x_TD = np.tile(tokens_TD(1), (40, 1)) * np.float32(1 + 1e-3 * np.arange(40)[:, None])
    _, chosen_TU = jax.jit(route, static_argnums=0)(MODEL, x_TD, one_layer()["router"])
    assert len(np.unique(chosen_TU)) == MODEL.experts_per_token
    out = MIX(MODEL, one_layer(), x_TD, EVERY_EXPERT)
    np.testing.assert_allclose(out, by_hand(MODEL, one_layer(), x_TD), atol=2e-5)


@pytest.mark.slow_except("biased")
@pytest.mark.parametrize(("model", "layer"), BOTH, ids=["plain", "biased"])
def test_the_parts_of_the_experts_add_up_to_the_mixture(model, layer):
    """Cut over experts and over their feed-forward, as devices have them."""
    x_TD, layer = tokens_TD(20), layer()
    total = np.zeros(x_TD.shape)
    for first in range(0, 8, 2):
        own = slice(first, first + 2)
        for half in (slice(0, 8), slice(8, 16)):
            part = {name: layer[name] for name in ("router", "router_bias") if name in layer}
            part |= {
                "expert_gate": layer["expert_gate"][own, :, half],
                "expert_up": layer["expert_up"][own, :, half],
                "expert_down": layer["expert_down"][own, half],
            }
            if model.expert_bias:
                part |= {f"{name}_bias": layer[f"{name}_bias"][own, half] for name in GATED}
                # Of one half only, because halves are added up.
                part["expert_down_bias"] = layer["expert_down_bias"][own] * (half.start == 0)
            total += MIX(model, part, x_TD, EVERY_EXPERT[own])
    expected = by_hand(model, layer, x_TD)
    np.testing.assert_allclose(total, expected, atol=2e-5 * max(1, np.abs(expected).max()))


def test_gradients_are_those_of_every_expert_on_every_token():
    """Against the same mixture written without sorting: all experts, weight 0 where not chosen."""
    x_TD, layer = tokens_TD(25), one_layer()
    cotangent_TD = np.random.default_rng(9).normal(size=x_TD.shape).astype(np.float32)

    def everywhere(layer, x_TD):
        weights_TU, chosen_TU = route(MODEL, x_TD, layer["router"])
        hit_TUX = jax.nn.one_hot(chosen_TU, MODEL.num_experts)
        gate = jnp.einsum("TD,EDF->TEF", x_TD, layer["expert_gate"])
        up = jnp.einsum("TD,EDF->TEF", x_TD, layer["expert_up"])
        out = jnp.einsum("TEF,EFD->TED", jax.nn.silu(gate) * up, layer["expert_down"])
        return jnp.einsum("TED,TUE,TU->TD", out, hit_TUX, weights_TU)

    def sorted_by_expert(layer, x_TD):
        return mix_experts(MODEL, layer, x_TD, EVERY_EXPERT)

    ours, theirs = (
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(f(*a) * cotangent_TD), argnums=(0, 1)))(
            layer, x_TD
        )
        for f in (sorted_by_expert, everywhere)
    )
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.any(left)
        np.testing.assert_allclose(left, right, atol=2e-6 * float(np.max(np.abs(right))))


def test_gradients_of_biases_in_bf16_are_sums_of_thousands_of_tokens():
    """Each is rounded once: added up in bf16, most of them would be lost."""
    rounded = {name: jnp.asarray(leaf, jnp.bfloat16) for name, leaf in one_biased_layer().items()}
    x_TD = jnp.asarray(tokens_TD(2048), jnp.bfloat16)

    def gradients(dtype):
        layer = {name: leaf.astype(dtype) for name, leaf in rounded.items()}
        total = jax.grad(
            lambda layer: jnp.sum(MIX(BIASED, layer, x_TD.astype(dtype), EVERY_EXPERT))
        )
        return {name: leaf for name, leaf in total(layer).items() if name.endswith("_bias")}

    exact = gradients(jnp.float32)
    for name, rough in gradients(jnp.bfloat16).items():
        error = np.linalg.norm(np.asarray(rough, np.float32) - exact[name])
        assert error < 0.02 * np.linalg.norm(exact[name]), name


@pytest.mark.slow_except("biased")
@pytest.mark.parametrize(("model", "layer"), BOTH, ids=["plain", "biased"])
def test_no_value_or_gradient_takes_what_a_backend_leaves_behind_the_last_group(
    monkeypatch, model, layer
):
    """With products that have NaN there, as they may, and gradients that do."""

    def behind(x_MD, sizes_E):
        return jnp.arange(len(x_MD))[:, None] >= jnp.sum(sizes_E)

    @jax.custom_vjp
    def product(x_MD, weights_EDF, sizes_E):
        out = jax.lax.ragged_dot(x_MD, weights_EDF, sizes_E)
        return jnp.where(behind(x_MD, sizes_E), jnp.nan, out)

    def forward(x_MD, weights_EDF, sizes_E):
        return product(x_MD, weights_EDF, sizes_E), (x_MD, weights_EDF, sizes_E)

    def backward(saved, out_MF):
        x_MD, weights_EDF, sizes_E = saved
        none = behind(x_MD, sizes_E)
        pull = jax.vjp(lambda *a: jax.lax.ragged_dot(*a, sizes_E), x_MD, weights_EDF)[1]
        x, weights = pull(jnp.where(none, 0.0, out_MF))
        return jnp.where(none, jnp.nan, x), weights, None

    product.defvjp(forward, backward)
    layer, x_TD = layer(), tokens_TD(12)
    part = {name: leaf if "router" in name else leaf[2:4] for name, leaf in layer.items()}

    def loss(part, x_TD):
        return jnp.sum(mix_experts(model, part, x_TD, EVERY_EXPERT[2:4]) ** 2)

    expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(part, x_TD)
    monkeypatch.setattr(experts, "grouped_matmul", lambda *inputs: product(*inputs[:3]))
    found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(part, x_TD)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )


# Whole models.


MIXED = "data=1,fsdp=2,expert=2,tensor=2"


@functools.cache
def gradients(mesh: str, length: int = 12, remat: Remat = "full"):
    """Hidden states and gradients of a training forward pass with padding and two segments."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (8, length)).astype(np.int32)
    segments = np.tile([1] * 5 + [2] * (length - 6) + [0], (8, 1)).astype(np.int32)
    layout = make_layout(MeshShape.parse(mesh), row_axes=TRAINING_ROWS)

    def loss(params):
        hidden = forward_rows(MODEL, layout, params, tokens, segments, remat=remat)
        scores = next_scores(layout, params, hidden, tokens)
        return -jnp.sum(jnp.where(segments[:, 1:] > 0, scores.logprobs, 0.0)), hidden

    placed = jax.device_put(params(), parameter_shardings(parameter_specs(MODEL, VOCAB), layout))
    grads, hidden = jax.jit(jax.grad(loss, has_aux=True))(placed)
    return jax.tree.map(np.asarray, (grads, hidden))


@pytest.mark.slow_except("*-12")
@pytest.mark.parametrize(
    ("mesh", "length"),
    # Long rows are more pairs than are multiplied at once; all of them are gathered to a device.
    [(MIXED, 12), ("data=1,expert=8", MAX_MASKED_ROWS // 24 + 1)],
)
def test_training_is_the_same_on_every_mesh(mesh, length):
    assert_same_as_alone(mesh, length, "full")


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_training_is_the_same_with_every_remat_policy(remat):
    assert_same_as_alone(MIXED, 12, remat)


def assert_same_as_alone(mesh: str, length: int, remat: Remat) -> None:
    """Compares with all recomputed on one device."""
    grads, hidden = gradients(mesh, length, remat)
    expected, alone = gradients("data=1", length)
    np.testing.assert_allclose(hidden, alone, atol=2e-5)

    def check(path, left, right):
        assert np.all(np.isfinite(left)) and np.any(left), path
        np.testing.assert_allclose(
            left, right, atol=2e-5 * float(np.max(np.abs(right))), err_msg=str(path)
        )

    jax.tree_util.tree_map_with_path(check, grads, expected)


CONFIG = dataclasses.replace(
    engines.CONFIG, model=MODEL, num_rows=NUM_SLOTS, page_size=EngineConfig.page_size
)
ENGINE_MESH = "data=2,expert=2,tensor=2"


@functools.cache
def converse_on(mesh: str):
    engine = engines.engine_on(MeshShape.parse(mesh), CONFIG)
    weights = unstack_layers(jax.device_get(params()), MODEL.num_layers)
    weights = engine.load_params(jax.tree.map(jnp.asarray, weights))
    play = functools.partial(engine.play, weights)
    return converse(
        play, engine.empty_state(MAX_TOKENS), make_scripts(NUM_SLOTS, turns=2), num_slots=NUM_SLOTS
    )[1]


@pytest.mark.slow
def test_logprobs_of_the_engine_are_the_trainers():
    """Cached decoding by two experts' devices against whole rows by four."""
    transcripts = converse_on(ENGINE_MESH)
    tokens = np.zeros((NUM_SLOTS, MAX_TOKENS), np.int32)
    for row, t in enumerate(transcripts.values()):
        tokens[row, : len(t.ids)] = t.ids
    layout = make_layout(MeshShape(data=2, expert=4), row_axes=TRAINING_ROWS)

    @jax.jit
    def score(params, tokens):
        hidden = forward_rows(MODEL, layout, params, tokens, jnp.ones_like(tokens))
        return next_scores(layout, params, hidden, tokens).logprobs

    logprobs = np.asarray(score(params(), tokens))
    for row, t in enumerate(transcripts.values()):
        positions = np.flatnonzero(t.turn_ids)
        np.testing.assert_allclose(
            np.array(t.logprobs)[positions], logprobs[row, positions - 1], atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=4,expert=2", ENGINE_MESH])
def test_a_round_has_one_all_reduce_a_layer_for_its_experts_and_none_leaves_its_row_shard(mesh):
    """Row shards decode unequally long: waiting for another one would be waiting for ever.

    With a tensor axis the layer's other one is that of attention, over fewer devices where there
    are two axes; one more adds up the embedding, and the logits are gathered.
    """
    shape = MeshShape.parse(mesh)
    text = engines.engine_on(shape, CONFIG).lower_play(MAX_TOKENS).compile().as_text()
    lines = [line.strip() for line in text.splitlines() if COLLECTIVE.search(line)]
    kinds = [re.search(r"\b(all-[a-z]+|collective-[a-z]+)", line.split(" = ")[1]) for line in lines]
    counts = collections.Counter(kind[1] if kind else "other" for kind in kinds)
    within = shape.expert * shape.tensor
    # A round has two forward passes: of tiles, which stops at the last layer's keys, and of the
    # loop over tokens.
    a_layer = (within > 1) + (shape.tensor > 1)
    reduces = MODEL.num_layers * a_layer + (shape.tensor > 1)
    expected = {"all-reduce": 2 * reduces - a_layer, "all-gather": int(shape.tensor > 1)}
    assert counts == {kind: count for kind, count in expected.items() if count}
    shards = [set(range(first, first + within)) for first in range(0, 8, within)]
    for line in lines:
        assert all(any(set(g) <= shard for shard in shards) for g in replica_groups(line)), line


def test_the_training_step_gathers_tokens_over_experts_and_scatters_what_they_make_of_them():
    layout = make_layout(MeshShape(data=2, expert=4), row_axes=TRAINING_ROWS)
    tokens = jax.ShapeDtypeStruct((8, 12), jnp.int32, sharding=layout.activations("BT"))
    specs = parameter_specs(MODEL, VOCAB)
    placed = placed_shapes(params(), parameter_shardings(specs, layout))
    forward = jax.jit(
        lambda params, tokens: forward_rows(MODEL, layout, params, tokens, jnp.ones_like(tokens))
    )
    text = forward.lower(placed, tokens).compile().as_text()
    lines = [line.strip() for line in text.splitlines() if COLLECTIVE.search(line)]
    kinds = collections.Counter(
        re.search(r"\b(all-[a-z]+|reduce-scatter|collective-[a-z]+)\(", line)[1] for line in lines
    )
    # One of each in the body of the scan over layers.
    assert kinds == {"all-gather": 1, "reduce-scatter": 1}
    assert all(replica_groups(line) == {(0, 1, 2, 3), (4, 5, 6, 7)} for line in lines)


# Checkpoints and settings.


@pytest.mark.slow
def test_adapters_of_attention_are_trained_beside_frozen_experts():
    """The same update cut over experts as on one device."""
    given = open_checkpoint(REFERENCE)
    lora = LoraConfig(rank=2, targets=("query", "out"))
    config = TrainConfig(lora=lora)
    rng = np.random.default_rng(0)
    fields = {
        "tokens": rng.integers(0, given.vocab_size, (8, 12)).astype(np.int32),
        "logprobs": np.full((8, 12), -5.0, np.float32),
        "advantages": rng.normal(size=(8, 12)).astype(np.float32),
        "versions": np.zeros((8, 12), np.int32),
    }
    ones = np.ones((8, 12), np.int32)
    batch = TrajectoryBatch(**fields, segment_ids=ones, turn_ids=ones)
    updated = []
    for mesh in (MeshShape(), MeshShape(fsdp=2, expert=2, tensor=2)):
        layout = make_layout(mesh, row_axes=TRAINING_ROWS)
        base = load_parameters(given, layout)
        sizes = {"vocab_size": given.vocab_size, "layout": layout}
        state = state_of(base, given.model, config, seed=0, **sizes)
        step = train_step(given.model, config, **sizes)
        arguments = (state, batch, np.array([1e-3, 0.0], np.float32))
        state, metrics = step.lower(*arguments).compile()(*arguments)
        assert read_metrics(metrics)["grad_norm"] > 0
        updated.append(jax.tree.map(np.asarray, (state.params, state.base)))
    assert set(updated[0][0]["layers"]) == {"query", "out"}
    assert np.any(updated[0][0]["layers"]["out"]["b"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *(u[0] for u in updated))
    jax.tree.map(np.testing.assert_array_equal, *(u[1] for u in updated))
    lora = LoraConfig(rank=2, targets=("gate",))
    with pytest.raises(ValueError, match="'gate', which .*experts take no.*choose from query"):
        adapter_specs(parameter_specs(given.model, given.vocab_size), lora)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2; only 1 can be computed"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]; only \[\] can be computed"),
        ({"num_local_experts": 0}, "num_experts is 0; it must be a whole number"),
        ({"num_local_experts": 2}, "config.model.experts_per_token is 3, more than"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is None"),
    ],
)
def test_a_mixture_that_cannot_be_computed_is_an_error(tmp_path, changes, words):
    folder = Path(shutil.copytree(REFERENCE, tmp_path / "checkpoint"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(ValueError, match=words):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.num_experts=-1"], "config.model.num_experts is -1"),
        (["model.num_experts=1"], "config.model.experts_per_token is 2, more than"),
        (["model.num_experts=4", "model.expert_ffn_size=0"], "model.expert_ffn_size is 0"),
        (["model.experts_per_token=1"], "experts_per_token = 1 has no effect.*num_experts is 0"),
        (["model.num_experts=4", "model.ffn_size=64"], "model.ffn_size = 64 has no effect"),
    ],
)
def test_settings_that_make_no_sense_are_errors(overrides, words):
    with pytest.raises(ValueError, match=words):
        make_config({}, overrides)


# In a run.
