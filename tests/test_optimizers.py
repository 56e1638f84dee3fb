# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers: one update by hand, what decays, state by its axes, and the same on every layout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.models.config import ModelConfig
from earl_jax.models.lora_config import LoraConfig
from earl_jax.models.parameters import is_spec
from earl_jax.placement.problem import model_sizes
from earl_jax.selector.footprint import trainer_bytes
from earl_jax.selector.plans import TrainPlan
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.optimizer import is_decayed, make_optimizer, matrix_axes, moment_axes
from earl_jax.train.state import state_shapes, state_shardings, trained_specs
from tests.support.batches import make_turns
from tests.support.optimizers import specs_of
from tests.support.settings import make_config
from tests.support.shardings import resident_bytes
from tests.support.updates import plain_learner

NAMES = ("adamw", "adafactor", "lion", "muon")
# All matrices but key and value are large enough for Adafactor to factor: 16 heads of 8 make 128.
MODEL = ModelConfig(
    num_layers=2,
    width=128,
    num_heads=16,
    num_kv_heads=2,
    head_size=8,
    ffn_size=128,
    attention_bias=True,
    query_key_norm="head",
)
VOCAB = 128
CUBE = MeshShape(data=2, fsdp=2, tensor=2)
# One update of gradients 3 and -4 by zero moments, without clipping.
PARAMS = {"p": jnp.array([[0.5, -0.25]])}
GRADS = {"p": jnp.array([[3.0, -4.0]])}


def first_direction(grads=GRADS, params=PARAMS, specs=None, **settings):
    config = TrainConfig(max_grad_norm=1e9, **settings)
    optimizer = make_optimizer(config, specs or specs_of({"F": 2}, p="DF"))
    update = jax.jit(lambda grads, params: optimizer.update(grads, optimizer.init(params), params))
    direction, _ = update(grads, params)
    return jax.tree.map(np.asarray, direction)


# By hand.


def test_adamw_by_hand():
    """m / (1 - b1) is g and v / (1 - b2) is g^2: g / (|g| + eps), and the decay."""
    got = first_direction(adam_eps=1.0, weight_decay=0.1)["p"]
    np.testing.assert_allclose(got, [[3 / 4 + 0.05, -4 / 5 - 0.025]], rtol=1e-5)


def test_lion_by_hand():
    """The sign of (1 - b1) g, and the decay."""
    got = first_direction(optimizer="lion", weight_decay=0.1)["p"]
    np.testing.assert_allclose(got, [[1.05, -1.025]], rtol=1e-6)


@pytest.mark.parametrize(
    ("axes", "as_matrix"),
    [
        ("LDF", (128, 136)),
        ("LDKGH", (128, 384)),
        ("LDKH", (128, 128)),
        ("LKGHD", (384, 128)),
        ("LEDF", (128, 136)),
        ("VD", (150, 128)),
    ],
)
def test_adafactor_by_hand_where_it_is_factored(axes, as_matrix):
    """v of a matrix is the product of the means over rows and over columns, by their mean.

    Heads of 64 are outputs of one matrix. Layers and experts, of which there are more than 128
    here, count matrices; the gradients of one of them are larger than the others'.
    """
    sizes = {"L": 2, "E": 140, "D": 128, "K": 2, "G": 3, "H": 64, "F": 136, "V": 150}
    specs = specs_of(sizes, p=axes)
    grads = np.random.default_rng(0).normal(size=specs["p"].shape).astype(np.float32)
    grads[0] *= 1e3
    params = {"p": np.zeros(grads.shape, np.float32)}
    got = first_direction({"p": jnp.array(grads)}, params, specs, optimizer="adafactor")["p"]
    got, grads = got.reshape(-1, *as_matrix), grads.reshape(-1, *as_matrix)
    for found, grad in zip(got, grads, strict=True):
        squares = grad.astype(np.float64) ** 2
        rows, columns = squares.mean(1, keepdims=True), squares.mean(0, keepdims=True)
        expected = grad / np.sqrt(rows * columns / rows.mean())
        expected /= max(1.0, np.sqrt(np.mean(expected**2)))
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def adafactor_updates(specs, gradients):
    """The directions of several updates."""
    config = TrainConfig(max_grad_norm=1e9, optimizer="adafactor")
    optimizer = make_optimizer(config, specs)
    params = jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), specs, is_leaf=is_spec)
    state, update, found = jax.jit(optimizer.init)(params), jax.jit(optimizer.update), []
    for grads in gradients:
        direction, state = update(grads, state, params)
        found.append(jax.tree.map(np.asarray, direction))
    return found


@pytest.mark.parametrize("axes", ["LD", "LDF", "LDKGH"])
def test_adafactor_updates_a_layer_whatever_the_gradients_of_others_are(axes):
    """The second layer's updates are equal bit for bit; the last one's gradient is clipped."""
    specs = specs_of({"L": 3, "D": 128, "K": 1, "G": 2, "H": 64, "F": 128}, p=axes)
    shape, rng = specs["p"].shape, np.random.default_rng(0)
    own = [size * rng.normal(size=shape[1:]).astype(np.float32) for size in (1, 1, 10)]
    found = []
    for scale in (0.01, 100.0):
        others = scale * rng.normal(size=(3, *shape)).astype(np.float32)
        others[:, 1] = own
        found.append(
            [each["p"][1] for each in adafactor_updates(specs, [{"p": g} for g in others])]
        )
    np.testing.assert_array_equal(*found)
    assert np.sqrt(np.mean(found[0][2] ** 2)) == pytest.approx(1.0, rel=1e-5)


def test_adafactor_is_that_of_optax_for_a_single_matrix():
    """Over several updates, of a factored matrix and of a vector."""
    specs = specs_of({"D": 128, "F": 160}, matrix="DF", vector="F")
    rng = np.random.default_rng(0)
    gradients = [
        {
            name: (1 + step) * rng.normal(size=spec.shape).astype(np.float32)
            for name, spec in specs.items()
        }
        for step in range(4)
    ]
    theirs = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    params = {name: np.zeros(spec.shape, np.float32) for name, spec in specs.items()}
    state, update = jax.jit(theirs.init)(params), jax.jit(theirs.update)
    for grads, found in zip(gradients, adafactor_updates(specs, gradients), strict=True):
        expected, state = update(grads, state, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, expected)


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Newton-Schulz as in Keller Jordan's Muon: five steps of a X + b A X + c A A X."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


@pytest.mark.parametrize(
    ("axes", "as_matrix"),
    [("LDKGH", (2, 16, 24)), ("LKGHD", (2, 24, 16)), ("LEDF", (2, 3, 16, 10)), ("LDR", (2, 16, 4))],
)
def test_muon_makes_each_layers_projection_orthogonal(axes, as_matrix):
    sizes = {"L": 2, "E": 3, "D": 16, "K": 2, "G": 3, "H": 4, "F": 10, "R": 4}
    specs = specs_of(sizes, p=axes)
    grads = np.random.default_rng(1).normal(size=specs["p"].shape).astype(np.float32)
    params = {"p": np.zeros(grads.shape, np.float32)}
    got = first_direction({"p": jnp.array(grads)}, params, specs, optimizer="muon")["p"]
    got, grads = got.reshape(-1, *as_matrix[-2:]), grads.reshape(-1, *as_matrix[-2:])
    for found, grad in zip(got, grads, strict=True):
        # The first momentum is the gradient times a factor, which does not matter. Of the size of
        # AdamW's updates: RMS 0.2 for a matrix with singular values of 1.
        expected = 0.2 * np.sqrt(max(grad.shape)) * orthogonal(grad.astype(np.float64))
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert 0.1 < np.sqrt(np.mean(found**2)) < 0.25


def test_muon_updates_vectors_embedding_and_head_as_adamw():
    specs, _ = trained_specs(MODEL, TrainConfig(), VOCAB)
    rng = np.random.default_rng(2)
    grads = jax.tree.map(
        lambda spec: rng.normal(size=spec.shape).astype(np.float32), specs, is_leaf=is_spec
    )
    params = jax.tree.map(np.zeros_like, grads)
    muon = first_direction(grads, params, specs, optimizer="muon")
    adam = first_direction(grads, params, specs)
    same = jax.tree.map(lambda a, b: bool(np.allclose(a, b, rtol=1e-5)), muon, adam)
    others = {"query", "key", "value", "out", "gate", "up", "down"}
    assert same["embed"] and same["head"] and same["final_norm"]
    assert {name for name, is_same in same["layers"].items() if not is_same} == others


# What is a matrix.


@pytest.mark.parametrize(
    ("axes", "found"),
    [
        ("LDKGH", ("D", "KGH")),
        ("LDKH", ("D", "KH")),
        ("LKGHD", ("KGH", "D")),
        ("LDF", ("D", "F")),
        ("LFD", ("F", "D")),
        ("LEDF", ("D", "F")),
        ("LEFD", ("F", "D")),
        ("LDX", ("D", "X")),
        ("VD", ("V", "D")),
        ("DV", ("D", "V")),
        ("LDR", ("D", "R")),
        ("LKGHR", ("KGH", "R")),
        ("LRKGH", ("R", "KGH")),
        ("LD", None),
        ("D", None),
        ("LH", None),
        ("LKGH", None),
        ("LKH", None),
    ],
)
def test_inputs_and_outputs_of_a_matrix(axes, found):
    assert matrix_axes(axes) == found


@pytest.mark.parametrize("name", NAMES)
def test_norms_biases_and_embeddings_do_not_decay(name):
    specs, _ = trained_specs(MODEL, TrainConfig(), VOCAB)
    params = jax.tree.map(lambda spec: np.ones(spec.shape, np.float32), specs, is_leaf=is_spec)
    zeros = jax.tree.map(np.zeros_like, params)
    got = first_direction(zeros, params, specs, optimizer=name, weight_decay=0.5)
    decayed = {"query", "key", "value", "out", "gate", "up", "down"}
    assert {key for key, value in got["layers"].items() if value.any()} == decayed
    assert not got["embed"].any() and not got["final_norm"].any()
    np.testing.assert_allclose(got["head"], 0.5, rtol=1e-6)
    adapters, _ = trained_specs(MODEL, TrainConfig(lora=LoraConfig(rank=4)), VOCAB)
    assert all(map(is_decayed, jax.tree.leaves(adapters, is_leaf=is_spec)))


# State.


@pytest.mark.parametrize(
    ("axes", "row", "column"),
    [
        ("LDKGH", "LD", "LKGH"),
        ("LKGHD", "LKGH", "LD"),
        ("LEDF", "LED", "LEF"),
        ("VD", "V", "D"),
        ("LDR", None, None),
        ("LKGH", None, None),
        ("LD", None, None),
    ],
)
def test_adafactor_s_moments_and_their_axes(axes, row, column):
    """A matrix of at least 128 by 128 has a number a row and one a column, in every layer."""
    sizes = {"L": 130, "E": 3, "D": 129, "K": 2, "G": 3, "H": 64, "F": 131, "V": 150, "R": 8}
    specs = specs_of(sizes, p=axes)
    optimizer = make_optimizer(TrainConfig(optimizer="adafactor"), specs)
    params = jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), specs, is_leaf=is_spec)
    state = jax.eval_shape(optimizer.init, params)
    named = moment_axes(state, specs)[1][0]
    expected = (row, column) if row else (axes,)
    assert jax.tree.leaves(named) == ["", *expected]
    for letters, leaf in zip(expected, jax.tree.leaves(state[1][0])[1:], strict=True):
        assert leaf.shape == tuple(sizes[letter] for letter in letters)


@pytest.mark.parametrize("mesh", ["data=8", "data=2,fsdp=2,tensor=2", "fsdp=8"])
@pytest.mark.parametrize("name", NAMES)
def test_selector_counts_the_bytes_of_the_state(name, mesh):
    layout = make_layout(MeshShape.parse(mesh), row_axes=TRAINING_ROWS)
    config = TrainConfig(optimizer=name)
    state = state_shapes(MODEL, config, VOCAB)
    shardings = state_shardings(MODEL, config, VOCAB, layout)
    sizes = model_sizes(MODEL, VOCAB, engine_dtype="float32", train=config)
    _, moments = trainer_bytes(sizes, layout.shape)
    counters = sum(4 for leaf in jax.tree.leaves(state.optimizer) if not leaf.shape)
    assert moments == resident_bytes(state.optimizer, shardings.optimizer) - counters


def test_moments_of_a_small_dtype():
    halved = state_shapes(MODEL, TrainConfig(momentum_dtype="bfloat16"), VOCAB).optimizer[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(halved.mu)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(halved.nu)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("optimizer", "setting"),
    [
        ("adafactor", "momentum_dtype='bfloat16'"),
        ("adafactor", "adam_b2=0.5"),
        ("lion", "adam_eps=1e-5"),
    ],
)
def test_a_setting_without_effect_is_an_error(optimizer, setting):
    with pytest.raises(InputError, match=f"no effect.*config.train.optimizer is '{optimizer}'"):
        make_config({}, [f"train.optimizer={optimizer}", f"train.{setting}"])


# Updates.


def updated(name: str, mesh: MeshShape):
    """Parameters before and after two updates, and the learning rate."""
    layout = functools.partial(make_layout, row_axes=TRAINING_ROWS)
    # Adafactor alone treats large matrices in another way than small ones.
    small = dataclasses.replace(MODEL, width=32, ffn_size=32)
    learner = plain_learner(
        MODEL if name == "adafactor" else small,
        TrainConfig(optimizer=name, weight_decay=0.1),
        dataclasses.replace(ALGORITHMS["reinforce"]),
        VOCAB,
        layout=layout,
    )
    batch = jax.device_put(make_turns(VOCAB, 16, 12), layout(mesh).activations("NS"))
    state, plan = learner.init_state(mesh), TrainPlan(mesh, 1, "none")
    before = jax.tree.map(np.array, state.params)
    for _ in range(2):
        state, metrics = learner.update(plan, state, batch, np.array([1e-3, 0.0], np.float32))
    assert metrics["skipped_updates"] == 0
    return before, jax.tree.map(np.array, state.params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_an_update_is_the_same_on_a_mesh(name):
    """AdamW: test_train.py."""
    before, expected = updated(name, MeshShape())
    _, got = updated(name, CUBE)

    def check(path, start, alone, cut):
        step = np.abs(alone - start)
        assert step.max() > 1e-4
        # Signs of gradients near zero, and first steps of Adam, differ by rounding.
        off = np.abs(alone - cut) > 0.02 * step.max()
        assert off.mean() < 0.01, (jax.tree_util.keystr(path), off.mean())

    jax.tree_util.tree_map_with_path(check, before, expected, got)
