# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rows cut over the `context` axis: the same attention, the same updates, less of them a device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.dispatch.weights import publish
from earl_jax.models.attention import splash
from earl_jax.models.attention.folding import fold, unfold
from earl_jax.models.attention.kernels import Kernel, attend_rows, context_obstacle
from earl_jax.models.attention.rows import part_length
from earl_jax.models.config import ModelConfig, RopeScaling
from earl_jax.models.engine_parameters import engine_shapes, engine_specs
from earl_jax.models.lora_config import LoraConfig
from earl_jax.models.parameters import is_spec, unstack_layers
from earl_jax.run.build import build_run
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
from earl_jax.sharding.reshard import reshard
from earl_jax.train.config import TrainConfig
from earl_jax.train.state import TrainState, init_state, state_shapes, state_shardings
from earl_jax.train.step import read_metrics
from earl_jax.trajectory import TrajectoryBatch
from tests.support.meshes import train_candidates
from tests.support.rows import make_rows
from tests.support.settings import make_config
from tests.support.shardings import resident_bytes
from tests.support.updates import train_step

HEADS, GROUPS, HEAD_SIZE = 2, 2, 8


def layout_of(mesh: str):
    shape = MeshShape.parse(mesh)
    return make_layout(shape, jax.devices()[: shape.num_devices], row_axes=TRAINING_ROWS)


# Folding.


def test_a_row_is_folded_in_the_middle():
    """By hand: eight tokens on two shards are 0 1 6 7 | 2 3 4 5, and the last two are none."""
    layout = layout_of("context=2")
    rows = jnp.arange(6)[None]
    folded = fold(layout, rows)
    np.testing.assert_array_equal(folded, [[0, 1, 0, 0, 2, 3, 4, 5]])
    assert folded.sharding.spec == layout.activation_spec("BT")
    np.testing.assert_array_equal(unfold(layout, folded, 6), rows)


@pytest.mark.parametrize(("length", "context"), [(1, 2), (2100, 8)])
def test_unfolding_inverts_folding(length, context):
    layout = layout_of(f"context={context}")
    rows = jax.random.randint(jax.random.key(0), (3, length), 1, 99)
    folded = fold(layout, rows)
    assert folded.shape[1] == 2 * context * part_length(length, context)
    np.testing.assert_array_equal(unfold(layout, folded, length), rows)


def test_all_shards_look_at_as_many_keys():
    """Token t looks at t + 1, itself among them."""
    seen = fold(layout_of("context=4"), jnp.arange(1, 49)[None])
    assert seen.reshape(4, -1).sum(axis=1).tolist() == [48 * 49 // 2 // 4] * 4


# Attention.


def fold_along(layout, array, axis):
    """`fold` for what has more axes than rows and tokens."""
    array = jnp.moveaxis(array, axis, -1)
    folded = fold(layout, array.reshape(-1, array.shape[-1]))
    return jnp.moveaxis(folded.reshape(*array.shape[:-1], -1), -1, axis)


def unfold_along(layout, array, axis, length):
    array = jnp.moveaxis(array, axis, -1)
    whole = unfold(layout, array.reshape(-1, array.shape[-1]), length)
    return jnp.moveaxis(whole.reshape(*array.shape[:-1], length), -1, axis)


def attention_of(mesh: str, settings, kernel: Kernel = "blockwise"):
    """Returns the attention output of whole rows, and gradients of a weighted sum of it."""
    layout = layout_of(mesh)

    def run(query, key, value, segments):
        def total(query, key, value):
            length = query.shape[1]
            inputs = [
                fold_along(layout, a, k)
                for a, k in zip((query, key, value), (1, 2, 2), strict=True)
            ]
            out = attend_rows(kernel, layout, *inputs, segments, **settings)
            out = unfold_along(layout, out, 1, length)
            weights = jax.random.normal(jax.random.key(1), out.shape)
            out = jnp.where((segments > 0)[:, :, None, None, None], out, 0.0)
            return jnp.sum(out * weights), out

        grads, out = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(query, key, value)
        return out, *grads

    return jax.jit(run)


@pytest.mark.slow_except("triton-data=1,context=2,tensor=2-40-settings0")
@pytest.mark.parametrize(
    ("mesh", "length", "settings"),
    [
        ("data=1,context=2,tensor=2", 40, {"softcap": 1.5, "window": 7}),
        # Two blocks in each part, which do not divide a row.
        ("data=2,context=4", 1099, {"window": 300}),
        ("data=1,context=4", 900, {}),
    ],
)
@pytest.mark.parametrize("kernel", ["blockwise", "triton", "splash"])
def test_attention_is_that_of_whole_rows(mesh, length, settings, kernel, monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", 128)
    arrays, segments = make_rows(length, HEADS, GROUPS, HEAD_SIZE)
    settings = {"scale": 0.3, **settings}
    ours = attention_of(mesh, settings, kernel)(*arrays, segments)
    theirs = attention_of("data=1", settings)(*arrays, segments)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("kernel", ["blockwise", "triton", "splash"])
@pytest.mark.parametrize("settings", [{}, {"window": 12}], ids=["segments", "window"])
def test_parts_that_do_not_meet_are_not_looked_at(settings, kernel):
    """Values that are no numbers would be seen even with a weight of 0."""
    (query, key, value), _ = make_rows(64, HEADS, GROUPS, HEAD_SIZE)
    # On four shards parts of eight tokens: of two samples, or of a window, the far ones.
    segments = jnp.asarray(np.repeat([[1, 2]], [32, 32], axis=1), jnp.int32)
    segments = jnp.ones_like(segments) if settings else segments
    value = value.at[:, :, :16].set(jnp.nan)
    run = attention_of("context=4", {"scale": 0.3, **settings}, kernel)
    out, of_query, _, _ = run(query[:1], key[:1], value[:1], segments)
    assert np.all(np.isfinite(out[:, 32:])) and np.any(np.isnan(out[:, :16]))
    assert np.all(np.isfinite(of_query[:, 32:]))


def test_memory_is_that_of_a_shard_forward_and_backward():
    """Temporaries on one device by the compiler: in eight parts less than a third of those in two.

    Without gradients that go round, or with what was looked at kept, it would be as much.
    """
    rows, length = 1, 4096

    def temporaries(mesh: str) -> int:
        layout = layout_of(mesh)

        def total(query, key, value, segments):
            out = attend_rows("blockwise", layout, query, key, value, segments, scale=0.3)
            return jnp.sum(out * out)

        def shape(letters, *sizes, dtype=jnp.float32):
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=layout.activations(letters))

        side = shape("BKTH", rows, HEADS, length, HEAD_SIZE)
        query = shape("BTKGH", rows, length, HEADS, GROUPS, HEAD_SIZE)
        segments = shape("BS", rows, length, dtype=jnp.int32)
        grad = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
        compiled = grad.lower(query, side, side, segments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries("context=8") < temporaries("context=2") / 3


# The training step.

VOCAB, ROWS, LENGTH = 64, 8, 21
SIZES = {"num_layers": 2, "width": 32, "num_heads": 4, "num_kv_heads": 2, "head_size": 8}
SIZES |= {"ffn_size": 32, "init_scale": 4.0}
# Layers with windows beside one without, caps, norms behind and within, a tied embedding.
GEMMA = ModelConfig(
    **SIZES | {"num_layers": 3},
    windows=(5, 9, 0),
    window_rope_theta=100.0,
    attention_softcap=2.0,
    final_softcap=3.0,
    query_key_norm="head",
    post_norms=True,
    tie_embeddings=True,
    scale_embeddings=True,
    norm_from_one=True,
)
# Norms over all heads and behind alone, and a layer that does not rotate beside stretched ones.
OLMO = ModelConfig(
    **SIZES | {"num_layers": 3},
    windows=(5, 9, 0),
    rope_scaling=RopeScaling(
        kind="yarn", factor=4.0, high_freq_factor=32.0, original_max_position=16
    ),
    no_rope_every=2,
    query_key_norm="all",
    pre_norms=False,
    post_norms=True,
)
# Attention sinks, biases everywhere, and experts.
GPT_OSS = ModelConfig(
    **SIZES,
    windows=(5, 0),
    attention_bias=True,
    out_bias=True,
    attention_sinks=True,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_size=16,
    expert_bias=True,
    activation="swiglu_clamped",
)
MODELS = {
    "gemma": GEMMA,
    "olmo": OLMO,
    "gpt_oss": GPT_OSS,
    "mistral": ModelConfig(**SIZES, windows=(7,)),
    "adapters": ModelConfig(**SIZES, attention_bias=True),
}
# Several chunks of log-probs a shard, of which the last is filled up. No gradient is clipped.
PLAIN = TrainConfig(logprob_chunk=2, max_grad_norm=1e9, remat="full")
CONFIGS = {
    "gemma": PLAIN,
    "olmo": PLAIN,
    "gpt_oss": dataclasses.replace(PLAIN, balance_coefficient=0.1, micro_batches=2),
    "mistral": dataclasses.replace(PLAIN, remat="none", logprob_chunk=512),
    "adapters": dataclasses.replace(PLAIN, lora=LoraConfig(rank=2, alpha=12.0)),
}
CONTROLS = np.array([1e-3, 0.05], np.float32)


@functools.cache
def make_batch() -> TrajectoryBatch:
    """On the host: two or three samples a row, some padding, half of the tokens the policy's."""
    rng = np.random.default_rng(0)
    segments = np.ones((ROWS, LENGTH), np.int32)
    for row in range(ROWS):
        first, second, end = 5 + row, 14, LENGTH - row % 4
        segments[row, first:] = 2
        segments[row, second:] = 3
        segments[row, end:] = 0
    turn_ids = ((rng.random((ROWS, LENGTH)) < 0.5) & (segments > 0)).astype(np.int32)
    turn_ids[:, 0] = 0
    return TrajectoryBatch(
        tokens=rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32),
        segment_ids=segments,
        turn_ids=turn_ids,
        logprobs=-np.log(VOCAB) + rng.normal(size=(ROWS, LENGTH)).astype(np.float32) * 0.3,
        versions=np.zeros((ROWS, LENGTH), np.int32),
        advantages=rng.normal(size=(ROWS, LENGTH)).astype(np.float32),
    )


@functools.cache
def first_state(family: str) -> TrainState:
    """On the host; adapters have gradients in both of their parts."""
    model, config = MODELS[family], CONFIGS[family]
    state = jax.tree.map(np.array, init_state(model, config, VOCAB, layout_of("data=1"), 0))
    rng = np.random.default_rng(1)
    stir = {"adapters": 0.1}.get(family, 0.0)
    params = jax.tree.map(
        lambda leaf: leaf + stir * rng.normal(size=leaf.shape).astype(np.float32), state.params
    )
    return dataclasses.replace(state, params=params)


def placed_on(family: str, layout) -> tuple[TrainState, TrajectoryBatch]:
    """Copies, because a state is donated."""
    where = state_shardings(MODELS[family], CONFIGS[family], VOCAB, layout)
    state = jax.device_put(jax.tree.map(np.array, first_state(family)), where)
    return state, jax.device_put(make_batch(), layout.activations("NS"))


@functools.cache
def update(family: str, mesh: str) -> tuple[Any, dict[str, float]]:
    """Gradients, read from Adam's first moment, and metrics of one update."""
    model, config, layout = MODELS[family], CONFIGS[family], layout_of(mesh)
    step = train_step(model, config, layout, VOCAB, temperature=0.8)
    state, metrics = step(*placed_on(family, layout), CONTROLS)
    grads = jax.tree.map(lambda m: np.asarray(m) / (1 - config.adam_b1), state.optimizer[1].mu)
    return grads, read_metrics(metrics)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        pytest.param("gemma", "fsdp=2,context=2,tensor=2", marks=pytest.mark.slow),
        pytest.param("olmo", "fsdp=2,context=2,tensor=2", marks=pytest.mark.slow),
        ("mistral", "data=2,context=2,tensor=2"),
        pytest.param("gpt_oss", "context=2,expert=2,tensor=2", marks=pytest.mark.slow),
        pytest.param("adapters", "fsdp=2,context=2,tensor=2", marks=pytest.mark.slow),
    ],
)
def test_an_update_is_that_of_one_device(family, mesh):
    """Updates rows whose tokens do not divide, with samples that begin in the middle of a shard."""
    (grads, numbers), (expected, alone) = update(family, mesh), update(family, "data=1")
    assert numbers == pytest.approx(alone, rel=2e-5, abs=1e-6)

    def check(path, left, right):
        largest = float(np.abs(right).max())
        assert largest > 1e-4, path
        np.testing.assert_allclose(left, right, atol=2e-5 * largest + 1e-6, err_msg=str(path))

    jax.tree_util.tree_map_with_path(check, grads, expected)


def test_a_run_considers_to_cut_long_rows(tmp_path):
    """With an empty list of training meshes; as many micro-batches as there are rows leave
    one row at a time, which only meshes that cut rows or heads can share.
    """
    overrides = ["selector.train_meshes=()", "selector.rollout_meshes=()"]
    overrides += ["model.num_kv_heads=2", "rollout.episodes_per_step=16", "rollout.num_slots=16"]
    world = build_run(make_config({}, overrides), tmp_path / "tokenizer")
    assert {shape.context for shape in world.problem.meshes("train", 64)} == {1}
    long = world.problem.meshes("train", 131_072)
    assert {shape.context for shape in long} == {1, 2, 4, 8}
    most = [
        max(plan.micro_batches for plan in world.problem.train_plans(tokens))
        for tokens in (64, 131_072)
    ]
    assert most == [4, 16]
    one_row = [shape for shape in long if world.problem.train_obstacle(shape, 16) is None]
    assert {str(shape) for shape in one_row} == {"data=1,context=8", "data=1,context=4,tensor=2"}
    with pytest.raises(ValueError, match="its kernel takes whole rows"):
        train_candidates(8, ("data=4,context=2",), lambda s: context_obstacle("tokamax", s))


def test_parameters_are_cut_over_context_as_over_fsdp():
    """And nothing else of the state is there twice for it."""
    layout = layout_of("fsdp=2,context=2,tensor=2")
    where = state_shardings(GEMMA, PLAIN, VOCAB, layout)
    shapes = state_shapes(GEMMA, PLAIN, VOCAB)
    other = state_shardings(GEMMA, PLAIN, VOCAB, layout_of("fsdp=4,tensor=2"))
    assert resident_bytes(shapes, where) == resident_bytes(shapes, other)


def test_train_state_moves_to_a_mesh_without_context_and_back():
    """Parameters and moments, from device to device; and the policy to an engine's layout."""
    state, _ = placed_on("gemma", layout_of("context=4,tensor=2"))
    there = state_shardings(GEMMA, PLAIN, VOCAB, layout_of("data=2,fsdp=4"))
    back = jax.tree.map(lambda leaf: leaf.sharding, state)
    moved = reshard(state, there)
    assert jax.tree.map(lambda leaf: leaf.sharding, moved) == there
    home = reshard(moved, back)
    jax.tree.map(np.testing.assert_array_equal, home, first_state("gemma"))
    engine = make_layout(MeshShape(data=4, tensor=2))
    specs = engine_specs(GEMMA, VOCAB, "compute")
    shapes = engine_shapes(specs, "float32")
    got = publish(
        home.params,
        shapes,
        jax.tree.map(lambda s: engine.parameters(s.axes), specs, is_leaf=is_spec),
    )
    expected = unstack_layers(first_state("gemma").params, GEMMA.num_layers)
    jax.tree.map(np.testing.assert_array_equal, got.params, expected)
