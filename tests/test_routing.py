# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The balance of routers: by hand, on every mesh, and the effect of the loss for it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.models.decoder import forward_rows_routed
from earl_jax.models.moe.routing import Routing, balance_loss, count_routing, load_of_experts
from earl_jax.models.parameters import parameter_shardings, parameter_specs
from earl_jax.run.build import build_run
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.state import state_of
from earl_jax.train.step import read_metrics
from earl_jax.trajectory import TrajectoryBatch
from tests.support.experts import MODEL, params
from tests.support.references import CHECKPOINT
from tests.support.settings import make_config
from tests.support.slots import VOCAB
from tests.support.updates import train_step

PAIR = dataclasses.replace(MODEL, num_experts=2, experts_per_token=1)
ROWS, LENGTH = 8, 12


def log(*probabilities: float) -> jax.Array:
    """Logits, where the router is the identity."""
    return jnp.log(jnp.array(probabilities))


def test_a_routing_counts_the_real_tokens_of_each_row():
    x_BTD = jnp.stack(
        [
            jnp.stack([log(3 / 4, 1 / 4), log(5 / 8, 3 / 8), log(1 / 8, 7 / 8)]),
            jnp.stack([log(1 / 4, 3 / 4), log(1 / 2 + 1 / 8, 3 / 8), log(1 / 8, 7 / 8)]),
        ]
    )
    real_BT = jnp.array([[1, 1, 0], [1, 1, 1]], bool)
    found = count_routing(PAIR, x_BTD, jnp.eye(2), real_BT)
    assert found.chosen.tolist() == [[2, 0], [1, 2]]
    np.testing.assert_allclose(found.probability, [[11 / 8, 5 / 8], [1, 2]], rtol=1e-6)


def test_the_loss_and_the_loads_by_hand():
    """Layer 0: two tokens to expert 0. Layer 1: one to each, and probabilities that are even."""
    crowded = Routing(jnp.array([[2.0, 0.0]]), jnp.array([[11 / 8, 5 / 8]]))
    assert float(balance_loss(PAIR, crowded)) == pytest.approx(2 * 1 * 11 / 16)
    assert tuple(map(float, load_of_experts(crowded))) == (2, 0)
    both = Routing(jnp.array([[2.0, 0.0], [1.0, 1.0]]), jnp.array([[11 / 8, 5 / 8], [1.0, 1.0]]))
    assert float(balance_loss(PAIR, both)) == pytest.approx((11 / 8 + 1) / 2)
    assert tuple(map(float, load_of_experts(both))) == (2, 0), "those of the worst layer"
    # Three experts a token, of eight: 10 tokens, evenly.
    even = Routing(jnp.full((2, 8), 30 / 8), jnp.full((2, 8), 10 / 8))
    assert float(balance_loss(MODEL, even)) == pytest.approx(3)
    assert tuple(map(float, load_of_experts(even))) == pytest.approx((1, np.log(8)))
    uneven = Routing(jnp.array([[3.0, 1.0]]), jnp.array([[2.0, 2.0]]))
    assert tuple(map(float, load_of_experts(uneven))) == pytest.approx(
        (1.5, -0.75 * np.log(0.75) - 0.25 * np.log(0.25))
    )


def test_no_token_is_no_loss():
    nothing = Routing(jnp.zeros((2, 8)), jnp.zeros((2, 8)))
    assert float(balance_loss(MODEL, nothing)) == 0
    assert np.all(np.isfinite(load_of_experts(nothing)))


def test_a_routers_gradient_lowers_the_probability_of_the_crowded_expert():
    logits = log(3 / 4, 1 / 4)[None, None]

    def loss(x_BTD):
        found = count_routing(PAIR, x_BTD, jnp.eye(2), jnp.ones((1, 1), bool))
        return balance_loss(PAIR, found)

    # The loss is 2 * P_0, whose gradient by the logits is 2 * (3/4 * 1/4, -3/4 * 1/4).
    np.testing.assert_allclose(jax.grad(loss)(logits)[0, 0], [3 / 8, -3 / 8], rtol=1e-5)


# On meshes.


def make_batch() -> TrajectoryBatch:
    """Two segments a row and some padding; the policy wrote every third token."""
    rng = np.random.default_rng(0)
    segments = np.tile([1] * 5 + [2] * (LENGTH - 6) + [0], (ROWS, 1)).astype(np.int32)
    segments[3, 7:] = 0
    spoken = (np.arange(LENGTH) % 3 == 2) & (segments > 0)
    return TrajectoryBatch(
        tokens=rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32),
        segment_ids=segments,
        turn_ids=spoken.astype(np.int32),
        logprobs=np.full((ROWS, LENGTH), -3.0, np.float32),
        versions=np.zeros((ROWS, LENGTH), np.int32),
        advantages=rng.normal(size=(ROWS, LENGTH)).astype(np.float32),
    )


@functools.cache
def updated(mesh: str, **settings):
    """Gradients and metrics of one update."""
    config = TrainConfig(**settings)
    layout = make_layout(MeshShape.parse(mesh), row_axes=TRAINING_ROWS)
    shardings = parameter_shardings(parameter_specs(MODEL, VOCAB), layout)
    # A copy, because a state is donated.
    placed = jax.device_put(jax.tree.map(np.array, params()), shardings)
    state = state_of(placed, MODEL, config, VOCAB, layout, seed=0)
    step = train_step(MODEL, config, layout, VOCAB)
    state, metrics = step(state, make_batch(), np.array([1e-3, 0.0], np.float32))
    # Adam's first moment is (1 - b1) times the gradient.
    grads = jax.tree.map(lambda m: np.asarray(m) / (1 - config.adam_b1), state.optimizer[1].mu)
    return grads, read_metrics(metrics)


def same_gradients(grads, expected) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5 * float(np.max(np.abs(b)))),
        grads,
        expected,
    )


WEIGHTED = {"balance_coefficient": 0.5, "max_grad_norm": 1e9}


@pytest.mark.slow
def test_an_update_adds_the_loss_and_says_how_even_the_loads_are():
    """Against the same loss by JAX's gradient of `forward_rows_routed`."""
    batch, layout = make_batch(), make_layout(MeshShape())

    def balance(params):
        _, routing = forward_rows_routed(MODEL, layout, params, batch.tokens, batch.segment_ids)
        return balance_loss(MODEL, routing), routing

    extra, routing = jax.jit(jax.grad(balance, has_aux=True))(params())
    assert float(routing.chosen.sum()) == 2 * 3 * np.sum(batch.segment_ids > 0)
    (grads, metrics), (plain, bare) = (
        updated("data=1", **WEIGHTED),
        updated("data=1", max_grad_norm=1e9),
    )
    same_gradients(grads, jax.tree.map(lambda g, e: g + 0.5 * np.asarray(e), plain, extra))
    assert metrics["loss"] == pytest.approx(bare["loss"] + 0.5 * bare["balance_loss"], rel=1e-5)
    for found in (metrics, bare):
        assert found["balance_loss"] == pytest.approx(float(balance_loss(MODEL, routing)), rel=1e-5)
        load = load_of_experts(routing)
        assert found["expert_load_max"] == pytest.approx(float(load.busiest), rel=1e-5)
        assert found["expert_load_entropy"] == pytest.approx(float(load.entropy), rel=1e-5)
    assert 1 < metrics["expert_load_max"] < 8 / 3
    assert 0 < metrics["expert_load_entropy"] < np.log(8)


@pytest.mark.slow
def test_the_update_is_the_same_on_a_mesh():
    grads, metrics = updated("data=1,fsdp=2,expert=2,tensor=2", **WEIGHTED)
    expected, alone = updated("data=1", **WEIGHTED)
    same_gradients(grads, expected)
    assert metrics == pytest.approx(alone, rel=2e-5, abs=1e-6)


@pytest.mark.slow
def test_micro_batches_report_the_loads_of_the_whole_update():
    _, parts = updated("data=1", micro_batches=4, **WEIGHTED)
    _, whole = updated("data=1", **WEIGHTED)
    for name in ("balance_loss", "expert_load_max", "expert_load_entropy", "policy_tokens"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-5), name


@pytest.mark.slow
def test_updates_with_the_loss_even_out_a_crowded_router():
    """Routers that know three experts only; the policy's own gradient is nought."""
    crowded = jnp.zeros_like(params()["layers"]["router"]).at[..., :3].set(0.05)
    lopsided = {**params(), "layers": {**params()["layers"], "router": crowded}}
    config = TrainConfig(balance_coefficient=1.0)
    layout = make_layout(MeshShape())
    state = state_of(jax.tree.map(jnp.copy, lopsided), MODEL, config, VOCAB, layout, seed=0)
    step = train_step(MODEL, config, layout, VOCAB)
    batch = dataclasses.replace(make_batch(), advantages=np.zeros((ROWS, LENGTH), np.float32))
    rows = []
    for _ in range(20):
        state, metrics = step(state, batch, np.array([3e-2, 0.0], np.float32))
        rows.append(read_metrics(metrics))
    assert rows[-1]["balance_loss"] < rows[0]["balance_loss"]
    assert rows[-1]["expert_load_max"] < 1.5 < 1.8 < rows[0]["expert_load_max"]
    assert rows[-1]["expert_load_entropy"] > 0.98 * np.log(8) > rows[0]["expert_load_entropy"]


# Settings.


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.balance_coefficient=-0.1"], "config.train.balance_coefficient is -0.1; it must"),
        (["train.balance_coefficient=0.1"], "has no effect.*config.model.num_experts is 0"),
    ],
)
def test_a_coefficient_that_makes_no_sense_is_an_error(overrides, words):
    with pytest.raises(ValueError, match=words):
        make_config({}, overrides)


def test_a_dense_checkpoint_has_nothing_to_balance():
    given = {"model": {"path": str(CHECKPOINT)}, "train": {"balance_coefficient": 0.1}}
    with pytest.raises(ValueError, match="balance_coefficient is 0.1, but the model.*no experts"):
        build_run(make_config(given))
