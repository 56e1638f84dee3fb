# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The networks beside the policy: a frozen reference without adapters, and a critic."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.algorithms.requirements import Networks
from earl_jax.dispatch.packing import RowRule, ShapeHistory, pack_rows, plan_packing
from earl_jax.models.config import ModelConfig
from earl_jax.models.lora_config import LoraConfig
from earl_jax.selector.plans import TrainPlan
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.sharding.reshard import reshard
from earl_jax.train.backup import StateBackup
from earl_jax.train.checkpoint import Checkpoints
from earl_jax.train.config import CriticConfig, TrainConfig
from earl_jax.train.learner import Learner
from earl_jax.train.offload import is_offloaded, load_moments, offload_moments
from earl_jax.train.scoring import critic_values, score_batch
from earl_jax.train.spread import explained_variance
from earl_jax.train.state import TrainState, init_state, state_of, state_shapes, state_shardings
from earl_jax.train.step import read_metrics
from earl_jax.train.update import Totals, add_totals, value_sums
from earl_jax.trajectory import TrajectoryBatch
from tests.support.batches import make_turns
from tests.support.placements import TINY
from tests.support.runs import bits
from tests.support.updates import plain_learner

VOCAB, ROWS, LENGTH = 32, 8, 16
MODEL = ModelConfig(**TINY)
TRAIN = TrainConfig(max_grad_norm=1e9)
BOTH = Networks(reference=True, critic=True)
ONE, CUBE, F8 = MeshShape(), MeshShape(data=2, fsdp=2, tensor=2), MeshShape(fsdp=8)
CONTROLS = np.array([1e-3, 0.0], np.float32)
make_batch = functools.partial(make_turns, VOCAB, ROWS, LENGTH)


@functools.cache
def learner_with(
    name: str,
    model: ModelConfig = MODEL,
    lora_rank: int = 0,
    train: TrainConfig = TRAIN,
    **settings,
) -> Learner:
    """A learner of which tests share the programs; none changes it."""
    algorithm = ALGORITHMS[name]
    return plain_learner(
        model,
        dataclasses.replace(train, lora=LoraConfig(rank=lora_rank)),
        dataclasses.replace(
            algorithm, settings=dataclasses.replace(algorithm.settings, **settings)
        ),
        VOCAB,
    )


def moved(state: TrainState) -> TrainState:
    """The state after something was learnt."""
    learn = jax.jit(lambda params: jax.tree.map(lambda x: x + 0.05 * jnp.sin(100 * x), params))
    return dataclasses.replace(state, params=learn(state.params))


@functools.cache
def scorer(model: ModelConfig, mesh: MeshShape):
    """Returns the log-probs of a batch as a compiled function of (parameters, batch)."""
    score = functools.partial(score_batch, model, TRAIN, make_layout(mesh), 1.0)
    return jax.jit(lambda params, batch: score(params, batch).logprobs)


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
    state, plan = learner.first_state(ONE), TrainPlan(ONE, 1, "none")
    assert {leaf.dtype for leaf in jax.tree.leaves(state.reference)} == {jnp.dtype("bfloat16")}
    (scored,) = learner.score([plan], moved(state), [jax.device_put(make_batch())])
    np.testing.assert_array_equal(scored.reference, scorer(model, ONE)(state.params, make_batch()))


def test_a_reference_without_adapters_is_the_first_weights_frozen():
    """On a mesh, in two parts; values and gradients of penalties: test_torch_losses.py."""
    learner = learner_with("grpo", kl_coefficient=0.5)
    layout, plan, batch = make_layout(CUBE), TrainPlan(CUBE, 2, "none"), make_batch()
    first = learner.first_state(CUBE)
    kept, state = bits(first.reference), moved(first)
    policy, reference = (
        np.asarray(scorer(MODEL, CUBE)(params, batch), np.float64)
        for params in (state.params, first.params)
    )
    mask = batch.turn_ids > 0
    gap = (policy - reference)[mask]
    (scored,) = learner.score([plan], state, [jax.device_put(batch, layout.activations("NS"))])
    np.testing.assert_allclose(np.asarray(scored.reference)[mask], reference[mask], atol=1e-5)
    after, metrics = learner.update(plan, state, scored, CONTROLS)
    distance = np.mean(np.exp(-gap) - 1 + gap)
    assert read_metrics(metrics)["reference_kl"] == pytest.approx(distance, rel=1e-4)
    # In buffers of its own: the parameters that it was made of were donated.
    assert bits(after.reference) == kept
    assert jax.tree.map(lambda x: x.sharding, after) == learner.state_shardings(CUBE)


def test_a_state_of_given_weights_begins_with_them_as_reference():
    learner = learner_with("grpo", kl_coefficient=0.1)
    params = init_state(MODEL, TRAIN, VOCAB, make_layout(CUBE), 7).params
    expected = bits(params)
    state = learner.state_of(params, CUBE)
    assert bits(state.params) == bits(state.reference) == expected
    assert bits(learner.first_state(CUBE).reference) == bits(learner.first_state(CUBE).params)


# Both networks in the state.


@pytest.mark.slow_except("2")
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


# Whatever a state can have.
WHOLE = dataclasses.replace(
    TRAIN, sft_steps=1, ema_decay=0.9, optimizer="muon", momentum_dtype="bfloat16"
)


def shardings_on(mesh: MeshShape) -> TrainState:
    return state_shardings(MODEL, WHOLE, VOCAB, make_layout(mesh), BOTH)


def test_every_part_of_a_state_moves_is_offloaded_and_comes_back(tmp_path):
    """Bit for bit, where the specs say: both networks, the average, the moments of Muon and AdamW.

    Those of supervised updates are apart.
    """
    rng, shapes = np.random.default_rng(0), state_shapes(MODEL, WHOLE, VOCAB, BOTH)
    values = jax.tree.map(
        lambda leaf: (100 * rng.standard_normal(leaf.shape)).astype(leaf.dtype), shapes
    )
    state = jax.device_put(values, shardings_on(CUBE))
    expected = bits(state)
    assert None not in (state.reference, state.critic, state.ema, state.sft_optimizer)
    there = reshard(state, shardings_on(F8))
    assert bits(there) == expected
    assert jax.tree.map(lambda leaf: leaf.sharding, there) == shardings_on(F8)

    away = offload_moments(there)
    moments = jax.tree.leaves((away.optimizer, away.sft_optimizer))
    assert is_offloaded(away) and {x.sharding.memory_kind for x in moments} == {"pinned_host"}
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(there.sft_optimizer))
    there = load_moments(away)
    assert bits(there) == expected
    assert jax.tree.map(lambda leaf: leaf.sharding, there) == shardings_on(F8)

    backup = StateBackup()
    backup.save("update", there)
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(there)
    there = backup.restore(there)
    assert bits(there) == expected

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(1, there, {})
    checkpoints.wait()
    back = checkpoints.state(1, shapes, shardings_on(CUBE))
    checkpoints.close()
    assert bits(back) == expected
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for name in ("critic", "ema"):
        where = getattr(shardings_on(CUBE), name)["embed"]
        assert getattr(back, name)["embed"].sharding.is_equivalent_to(where, 2)


# PPO's update.

RATES = np.array([1e-3, 0.0, 2e-3], np.float32)
LENGTHS = [16, 9, 13, 6, 16, 8, 5, 11]


def rewarded_batch() -> TrajectoryBatch:
    """Returns rows of several lengths with a reward a turn; the first forks before its third."""
    batch, positions = make_batch(), np.arange(LENGTH)
    inside = positions < np.array(LENGTHS)[:, None]
    segments = np.where(inside, 1, 0)
    segments[0, 11:] = 2
    turn_ids = np.where(inside, batch.turn_ids, 0)
    rewards = np.random.default_rng(4).normal(size=(ROWS, 4))
    return batch.replace(
        segment_ids=segments.astype(np.int32),
        turn_ids=turn_ids.astype(np.int32),
        advantages=np.take_along_axis(rewards, turn_ids, 1).astype(np.float32),
    )


def trained_critic(state: TrainState) -> TrainState:
    """The state with a critic whose values differ."""
    critic = state.critic | {"value_head": 0.3 * jnp.cos(jnp.arange(MODEL.width))}
    return dataclasses.replace(state, critic=critic)


def ppo_updates(mesh: MeshShape, batch: TrajectoryBatch, parts: int = 1, **settings):
    """The scored batch, the state after two updates of it, and the metrics of both."""
    learner, layout = learner_with("ppo", **settings), make_layout(mesh)
    plan = TrainPlan(mesh, parts, "none")
    state = jax.device_put(trained_critic(learner.first_state(mesh)), learner.state_shardings(mesh))
    (scored,) = learner.score([plan], state, [jax.device_put(batch, layout.activations("NS"))])
    metrics = []
    for _ in range(2):
        state, found = learner.update(plan, state, scored, RATES)
        metrics.append(read_metrics(found))
    assert jax.tree.map(lambda x: x.sharding, state) == learner.state_shardings(mesh)
    return jax.tree.map(np.asarray, (scored, state)), metrics


SETTINGS = {"gae_level": "turn", "kl_coefficient": 0.1}


@functools.cache
def on_one_device():
    return ppo_updates(ONE, rewarded_batch(), **SETTINGS)


def test_values_are_those_of_the_tokens_before():
    """No token's own id changes its value, but that of the next; the first of a segment has 0."""
    state = trained_critic(init_state(MODEL, TRAIN, VOCAB, make_layout(ONE), 3, BOTH))
    batch = rewarded_batch()
    value = jax.jit(
        lambda batch: critic_values(MODEL, TRAIN, make_layout(ONE), state.critic, batch)
    )
    changed = batch.tokens.copy()
    changed[:, 4] = (changed[:, 4] + 1) % VOCAB
    before, after = (np.asarray(value(batch.replace(tokens=t))) for t in (batch.tokens, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5] != after[:, 5])[batch.segment_ids[:, 5] == 1].all()
    assert (before[:, 0] == 0).all() and before[0, 11] == 0
    # Behind the fork nothing before it is seen.
    np.testing.assert_array_equal(before[0, 11:], after[0, 11:])


def test_the_critic_minimises_the_mean_squared_error_of_its_returns():
    """Loss, gradient and explained variance against JAX's of the formula, at the first update."""
    learner, plan, batch = learner_with("ppo"), TrainPlan(ONE, 2, "none"), rewarded_batch()
    state = trained_critic(learner.first_state(ONE))
    (scored,) = learner.score([plan], state, [jax.device_put(batch)])
    mask, returns = batch.turn_ids > 0, np.asarray(scored.returns, np.float64)

    def loss(critic):
        values = critic_values(MODEL, TRAIN, make_layout(ONE), critic, batch)
        return 0.5 * jnp.sum(jnp.where(mask, (values - scored.returns) ** 2, 0)) / mask.sum()

    value, slope = jax.jit(jax.value_and_grad(loss))(state.critic)
    first = jax.tree.map(np.asarray, state.critic)
    after, metrics = learner.update(plan, state, scored, RATES)
    moments = jax.tree.map(lambda m: np.asarray(m) / 0.1, after.optimizer[1][1].mu)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), moments, slope
    )
    # Adam's first step is one of the learning rate against the gradient's sign.
    step = np.asarray(after.critic["value_head"]) - first["value_head"]
    np.testing.assert_allclose(step, -2e-3 * np.sign(slope["value_head"]), rtol=1e-3)
    found = read_metrics(metrics)
    assert found["value_loss"] == pytest.approx(float(value), rel=1e-5)
    error = (returns - np.asarray(scored.values))[mask]
    expected = 1 - error.var() / returns[mask].var()
    assert found["explained_variance"] == pytest.approx(expected, abs=1e-4)
    norm = np.sqrt(sum((np.asarray(leaf) ** 2).sum() for leaf in jax.tree.leaves(slope)))
    assert found["critic_grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    ("mean", "distance", "expected"),
    [(1000.0, 0.125, 0.75), (0.0, 2.0**-13, 0.75), (-1000.1, 0.0, 0.0), (0.0, 0.0, 0.0)],
)
def test_explained_variance_keeps_its_digits_over_parts(mean, distance, expected):
    """Returns differ from their mean by `distance`, values from returns by half of it and by 7.

    1 - (d / 2)^2 / d^2 = 0.75. Sums of squares in fp32 would have none of its digits. Returns of a
    row are equal, so that the means of the parts differ; two rows do not count.
    """
    batch, signs = make_batch(), np.array([[1, 1, 0, 1, -1, 0, -1, -1]]).T
    returns = (mean + distance * np.tile(signs, LENGTH)).astype(np.float32)
    values = returns - 7 - np.float32(distance / 2) * np.resize([1, 1, -1, -1], (ROWS, LENGTH))
    batch = batch.replace(returns=returns, values=values, turn_ids=np.ones((ROWS, LENGTH), int))
    batch.turn_ids[[2, 5]] = 0
    totals = []
    for rows in (slice(2, 3), slice(0, 1), slice(2, 3), slice(1, 8)):
        part = jax.tree.map(lambda field, rows=rows: jnp.asarray(field[rows]), batch)
        sums = value_sums(ALGORITHMS["ppo"], part.values, part)
        totals.append(Totals((), sums, None, jnp.sum(part.turn_ids)))
    sums = functools.reduce(add_totals, totals).sums
    found = explained_variance(sums["returns"], sums["errors"])
    assert float(found) == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_ppo_is_the_same_on_a_mesh_and_in_parts():
    mesh = MeshShape(fsdp=2, context=2, tensor=2)
    (scored, state), metrics = on_one_device()
    (other, there), found = ppo_updates(mesh, rewarded_batch(), parts=2, **SETTINGS)
    mask = scored.turn_ids > 0
    for name in ("values", "advantages", "returns", "reference"):
        one, two = getattr(scored, name)[mask], getattr(other, name)[mask]
        np.testing.assert_allclose(two, one, atol=2e-5, err_msg=name)
    for one, two in zip(metrics, found, strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=5e-4), there.critic, state.critic
    )


@pytest.mark.slow
def test_packed_ppo_is_unpacked_ppo():
    """Same losses and metrics, and the same advantage at each token, whatever its row."""
    batch = rewarded_batch()
    rule = RowRule(ROWS, 1, 1, LENGTH)
    shape = ShapeHistory().choose(LENGTHS, rule, 0.0)
    packing = plan_packing(LENGTHS, rule, shape, [2] + [1] * (ROWS - 1))
    assert shape.rows < ROWS
    packed = pack_rows(jax.device_put(batch), packing, make_layout(ONE))
    (scored, state), metrics = on_one_device()
    (other, there), found = ppo_updates(ONE, packed, **SETTINGS)
    for one, two in zip(metrics, found, strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=5e-4), there.critic, state.critic
    )
    for name in ("advantages", "returns"):
        rows, found = getattr(scored, name), getattr(other, name).reshape(-1)
        for at, start in zip(packing.order, packing.starts, strict=True):
            own = rows[at, : LENGTHS[at]]
            np.testing.assert_allclose(found[start : start + len(own)], own, atol=2e-5)


def test_an_update_without_values_leaves_the_critic_alone():
    """A supervised one, and one of a batch without tokens: parameters and moments, bit for bit.

    A supervised one leaves the reference and the policy's other moments too; the average follows.
    """
    train = dataclasses.replace(TRAIN, sft_steps=1, ema_decay=0.5)
    learner, plan = learner_with("ppo", train=train, kl_coefficient=0.1), TrainPlan(F8, 1, "none")
    batch = jax.device_put(rewarded_batch(), make_layout(F8).activations("NS"))
    (scored,) = learner.score([plan], learner.first_state(F8), [batch])
    first, _ = learner.update(plan, learner.first_state(F8), scored, RATES)
    kept = bits((first.critic, first.reference, first.optimizer))
    params, average = bits(first.params), bits(first.ema)
    state, _ = learner.update(plan, first, batch, CONTROLS, sft=True)
    assert state.critic is first.critic and state.reference is first.reference
    assert bits((state.critic, state.reference, state.optimizer)) == kept
    assert bits(state.params) != params and average != bits(state.ema) != bits(state.params)
    assert int(state.updates) == 2
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == learner.state_shardings(F8)
    kept, params = bits((state.critic, state.optimizer[1])), bits(state.params)
    empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), scored)
    empty = jax.device_put(empty, make_layout(F8).activations("NS"))
    state, metrics = learner.update(plan, state, empty, RATES)
    assert bits((state.critic, state.optimizer[1])) == kept and bits(state.params) == params
    assert read_metrics(metrics)["skipped_updates"] == 0


def test_the_critic_has_a_learning_rate_of_its_own_and_may_begin_alone():
    config = dataclasses.replace(
        TRAIN,
        warmup_steps=3,
        schedule="linear",
        critic=CriticConfig(learning_rate=0.5, pretrain_steps=2),
    )
    learner = copy.copy(learner_with("ppo"))
    learner.config = config
    found = np.array([learner.controls(step, 8) for step in range(8)])
    np.testing.assert_allclose(found[:, 2], [0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5, 0.5])
    np.testing.assert_array_equal(found[:2, 0], 0)
    assert found[2, 0] == np.float32(0.75e-6)
    # Adapters beside a whole critic.
    assert learner_with("ppo", lora_rank=2).networks == Networks(critic=True)
    assert learner_with("grpo").controls(0, 8).shape == (2,)
    assert (learner.num_controls, learner_with("grpo").num_controls) == (found.shape[1], 2)
