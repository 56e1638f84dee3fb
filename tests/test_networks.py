# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The networks beside the policy: a frozen reference without adapters, and a critic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.algorithms.requirements import Networks
from earl_jax.models.config import LoraConfig, ModelConfig
from earl_jax.selector.plans import TrainPlan
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.sharding.reshard import reshard
from earl_jax.train.backup import StateBackup
from earl_jax.train.checkpoint import Checkpoints
from earl_jax.train.config import TrainConfig
from earl_jax.train.learner import Learner
from earl_jax.train.offload import is_offloaded, load_moments, offload_moments
from earl_jax.train.scoring import score_batch
from earl_jax.train.state import TrainState, init_state, state_of, state_shapes, state_shardings
from earl_jax.train.step import read_metrics
from earl_jax.trajectory import TrajectoryBatch
from tests.support.placements import TINY

VOCAB, ROWS, LENGTH = 32, 8, 16
MODEL = ModelConfig(**TINY)
TRAIN = TrainConfig(max_grad_norm=1e9)
BOTH = Networks(reference=True, critic=True)
ONE, CUBE, F8 = MeshShape(), MeshShape(data=2, fsdp=2, tensor=2), MeshShape(fsdp=8)
CONTROLS = np.array([1e-3, 0.0], np.float32)


def make_batch() -> TrajectoryBatch:
    """On the host: a prompt of 3 tokens, then replies of 3 and answers of 2."""
    rng = np.random.default_rng(0)
    shape, places = (ROWS, LENGTH), np.arange(LENGTH)
    turn_ids = np.where((places >= 3) & ((places - 3) % 5 < 3), 1 + (places - 3) // 5, 0)
    return TrajectoryBatch(
        tokens=rng.integers(0, VOCAB, shape).astype(np.int32),
        segment_ids=np.ones(shape, np.int32),
        turn_ids=np.broadcast_to(turn_ids, shape).astype(np.int32),
        logprobs=-rng.random(shape, np.float32) * 4,
        versions=np.zeros(shape, np.int32),
        advantages=rng.normal(size=shape).astype(np.float32),
    )


def learner_with(name: str, model: ModelConfig = MODEL, lora_rank: int = 0, **settings) -> Learner:
    algorithm = ALGORITHMS[name]
    return Learner(
        model,
        dataclasses.replace(TRAIN, lora=LoraConfig(rank=lora_rank)),
        dataclasses.replace(
            algorithm, settings=dataclasses.replace(algorithm.settings, **settings)
        ),
        vocab_size=VOCAB,
        temperature=1.0,
        importance_cap=0.0,
        layout=make_layout,
    )


def bits(tree) -> list[bytes]:
    return [np.array(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def moved(state: TrainState) -> TrainState:
    """The state after something was learnt."""
    params = jax.tree.map(lambda leaf: leaf + 0.05 * jnp.sin(100 * leaf), state.params)
    return dataclasses.replace(state, params=params)


# The reference.


def test_only_a_run_that_needs_networks_has_them():
    assert learner_with("grpo").networks == Networks()
    assert learner_with("grpo", kl_coefficient=0.1).networks == Networks(reference=True)
    # The base of adapters is a reference already.
    assert learner_with("grpo", lora_rank=2, kl_coefficient=0.1).networks == Networks()


def test_the_reference_in_the_compute_type_scores_as_the_fp32_weights_did():
    """In bf16, bit for bit: half the bytes cost nothing."""
    model = dataclasses.replace(MODEL, compute_dtype="bfloat16")
    learner = learner_with("grpo", model, kl_coefficient=0.1)
    state, plan = learner.first_state(ONE), TrainPlan(ONE, 1, False)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.reference)} == {jnp.dtype("bfloat16")}
    scored = learner.score(plan, moved(state), jax.device_put(make_batch()))

    @jax.jit
    def score(params, batch):
        return score_batch(model, learner.config, make_layout(ONE), 1.0, params, batch).logprobs

    expected = score(state.params, make_batch())
    np.testing.assert_array_equal(scored.reference, expected)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("mesh", [ONE, CUBE, F8], ids=str)
def test_a_penalty_without_adapters_is_that_of_the_first_weights(mesh, kl_in):
    """Loss and metric by hand in numpy, from the log-probs of both policies; k1 and k3."""
    kind = "k3" if kl_in == "loss" else "k1"
    learner = learner_with("grpo", kl_coefficient=0.5, kl_estimator=kind, kl_in=kl_in)
    layout, plan, batch = make_layout(mesh), TrainPlan(mesh, 2, False), make_batch()
    first = learner.first_state(mesh)
    kept, state = bits(first.reference), moved(first)
    policy, reference = (
        np.asarray(score_batch(MODEL, TRAIN, layout, 1.0, params, batch).logprobs, np.float64)
        for params in (state.params, first.params)
    )
    mask = batch.turn_ids > 0
    gap = np.where(mask, policy - reference, 0)
    distance = gap if kind == "k1" else np.exp(-gap) - 1 + gap
    advantages = np.where(mask, batch.advantages, 0).astype(np.float64)
    if kl_in == "reward":
        advantages -= 0.5 * np.cumsum(distance[:, ::-1], axis=1)[:, ::-1]
    ratio = np.exp(policy - batch.logprobs)
    gain = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    losses = -gain + (0.5 * distance if kl_in == "loss" else 0)
    on_mesh = jax.device_put(batch, layout.activations("NS"))
    after, metrics = learner.update(plan, state, learner.score(plan, state, on_mesh), CONTROLS)
    found = read_metrics(metrics)
    assert found["loss"] == pytest.approx(losses[mask].mean(), rel=1e-4)
    assert found["reference_kl"] == pytest.approx(distance[mask].mean(), rel=1e-4)
    assert abs(found["reference_kl"]) > 1e-3
    # Frozen, in buffers of its own: the parameters that it was made of were donated.
    assert bits(after.reference) == kept
    assert jax.tree.map(lambda x: x.sharding, after) == learner.state_shardings(mesh)


def test_a_state_of_given_weights_begins_with_them_as_reference():
    learner = learner_with("grpo", kl_coefficient=0.1)
    params = init_state(MODEL, TRAIN, VOCAB, make_layout(CUBE), 7).params
    expected = bits(params)
    state = learner.state_of(params, CUBE)
    assert bits(state.params) == bits(state.reference) == expected
    assert bits(learner.first_state(CUBE).reference) == bits(learner.first_state(CUBE).params)


# Both networks in the state.


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_critic_begins_with_the_models_weights_and_a_head_of_zeros(lora_rank):
    config = dataclasses.replace(TRAIN, lora=LoraConfig(rank=lora_rank))
    networks, layout = Networks(critic=True), make_layout(CUBE)
    drawn = init_state(MODEL, config, VOCAB, layout, 3, networks)
    model = drawn.base if lora_rank else drawn.params
    for state in (drawn, state_of(model, MODEL, config, VOCAB, layout, 3, networks)):
        trunk = {name: tree for name, tree in state.critic.items() if name != "value_head"}
        same = {name: tree for name, tree in model.items() if name != "head"}
        assert bits(trunk) == bits(same)
        assert not np.asarray(state.critic["value_head"]).any()
        shapes = state_shapes(MODEL, config, VOCAB, networks)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
            lambda x: (x.shape, x.dtype), shapes
        )


def places(mesh: MeshShape) -> TrainState:
    return state_shardings(MODEL, TRAIN, VOCAB, make_layout(mesh), BOTH)


def test_both_networks_move_offload_and_checkpoint_with_the_rest(tmp_path):
    """Bit for bit, parameters and moments, and where the specs of all networks say."""
    state = init_state(MODEL, TRAIN, VOCAB, make_layout(CUBE), 3, BOTH)
    state = dataclasses.replace(
        state, optimizer=jax.tree.map(lambda x: x + x.size, state.optimizer)
    )
    state = jax.device_put(state, places(CUBE))
    assert state.critic["embed"].sharding.spec != ()
    expected = bits(state)
    assert len(expected) == len(jax.tree.leaves(places(CUBE)))
    there = reshard(state, places(F8))
    assert bits(there) == expected
    for name in ("reference", "critic"):
        assert getattr(there, name)["embed"].sharding == getattr(places(F8), name)["embed"]

    away = offload_moments(there)
    assert is_offloaded(away) and all(
        leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(away.optimizer)
    )
    there = load_moments(away)
    assert bits(there) == expected

    backup = StateBackup()
    backup.save("update", there)
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(there)
    there = backup.restore(there)
    assert bits(there) == expected

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(1, there, {})
    checkpoints.wait()
    shapes = state_shapes(MODEL, TRAIN, VOCAB, BOTH)
    back = checkpoints.state(1, shapes, places(CUBE))
    checkpoints.close()
    assert bits(back) == expected
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert back.critic["embed"].sharding.is_equivalent_to(places(CUBE).critic["embed"], 2)
