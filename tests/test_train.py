# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An update is the arithmetic it says, and the same on every layout and in any number of parts."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.algorithms.settings import ReinforceSettings
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows, head_weights
from earl_jax.models.parameters import check_tensor_axis, init_parameters, parameter_specs
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.optimizer import entropy_coefficient, learning_rate
from earl_jax.train.scoring import make_scorer, score_batch
from earl_jax.train.state import TrainState, state_shapes, state_shardings
from earl_jax.train.step import batch_shapes, read_metrics
from earl_jax.trajectory import TrajectoryBatch
from tests.support.meshes import train_candidates
from tests.support.updates import lowered_update

VOCAB, ROWS, LENGTH, TEMPERATURE = 64, 16, 24, 0.8
# Eight key/value heads, so that every mesh of eight devices is allowed.
MODEL = ModelConfig(
    num_layers=2, width=32, num_heads=16, num_kv_heads=8, head_size=4, ffn_size=32, init_scale=4.0
)
# 23 tokens are scored in chunks of 10: two and a part. No gradient is clipped.
CONFIG = TrainConfig(logprob_chunk=10, max_grad_norm=1e9)
IN_PARTS = dataclasses.replace(CONFIG, micro_batches=2)
CLIPPED = dataclasses.replace(
    ALGORITHMS["reinforce"], settings=ReinforceSettings(clip_low=0.2, clip_high=0.3)
)

SFT = ALGORITHMS["sft"]
RATE, ENTROPY_COEFFICIENT = 1e-3, 0.05
CONTROLS = np.array([RATE, ENTROPY_COEFFICIENT], np.float32)
ONE_DEVICE = MeshShape()
ALL_AXES = MeshShape(data=2, fsdp=2, tensor=2)


def every_layout() -> list[MeshShape]:
    """Returns every mesh that the selector can return for this model on eight devices."""

    def check(shape: MeshShape) -> str | None:
        return check_tensor_axis(MODEL, VOCAB, shape.tensor, shape.fsdp)

    return train_candidates(8, (), check)


@functools.cache
def make_params() -> Any:
    """On the host."""
    specs = parameter_specs(MODEL, VOCAB)
    init = jax.jit(lambda key: init_parameters(specs, key))
    params = init(jax.random.key(0))
    return jax.tree.map(np.array, params)


@functools.cache
def own_scores():
    """`score_batch` on one device, jitted: batch -> (logprobs, entropy) on the host."""
    score = jax.jit(
        functools.partial(score_batch, MODEL, CONFIG, make_layout(ONE_DEVICE), TEMPERATURE)
    )
    return lambda batch: [np.asarray(part) for part in score(make_params(), batch)]


@functools.cache
def make_batch() -> TrajectoryBatch:
    """On the host: prompt of 3, then replies and answers; even rows short, odd rows long.

    The behaviour policy is this one but for noise that takes some ratios over the clip.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    turn_ids, segment_ids = np.zeros_like(tokens), np.zeros_like(tokens)
    advantages = np.zeros(tokens.shape, np.float32)
    for row in range(ROWS):
        end = 3
        for turn in range(1, 2 + (row % 2) * 3):
            reply = int(rng.integers(1, 4))
            turn_ids[row, end : end + reply] = turn
            advantages[row, end : end + reply] = rng.normal()
            end += reply + 2
        assert end <= LENGTH
        segment_ids[row, :end] = 1
    batch = TrajectoryBatch(
        tokens=tokens,
        segment_ids=segment_ids,
        turn_ids=turn_ids,
        logprobs=np.zeros(tokens.shape, np.float32),
        versions=np.zeros_like(tokens),
        advantages=advantages,
    )
    noise = rng.normal(size=tokens.shape).astype(np.float32) * 0.3
    return dataclasses.replace(batch, logprobs=own_scores()(batch)[0] + noise)


class Updated(NamedTuple):
    """On the host: what one update left. `grads` are read from Adam's first moment."""

    params: Any
    grads: Any
    metrics: dict[str, float]


@functools.cache
def compiled_step(shape: MeshShape, config: TrainConfig, algorithm, cap: float = 0.0, scored=()):
    """The step as lowered by the product; compiled in 0.8 s instead of 5 (2 cores, jax 0.10.2)."""
    return lowered_update(
        MODEL,
        config,
        make_layout(shape),
        VOCAB,
        (ROWS, LENGTH),
        scored,
        temperature=TEMPERATURE,
        algorithm=algorithm,
        importance_cap=cap,
    ).compile()


def first_state(shape: MeshShape, config: TrainConfig = CONFIG) -> TrainState:
    """`make_params` and an empty optimiser, placed."""
    zeros = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), state_shapes(MODEL, config, VOCAB)
    )
    state = dataclasses.replace(zeros, params=make_params())
    # Copies, because a state is donated and the host's arrays are needed again.
    state = jax.tree.map(np.array, state)
    return jax.device_put(state, state_shardings(MODEL, config, VOCAB, make_layout(shape)))


def update(
    batch: TrajectoryBatch,
    shape: MeshShape = ONE_DEVICE,
    config: TrainConfig = CONFIG,
    algorithm=CLIPPED,
    cap: float = 0.0,
) -> Updated:
    state = first_state(shape, config)
    placed = jax.device_put(batch, make_layout(shape).activations("NS"))
    scored = ("proximal",) if batch.proximal is not None else ()
    step = compiled_step(shape, config, algorithm, cap, scored)
    # The learner's supervised updates have no entropy bonus.
    new, metrics = step(state, placed, CONTROLS * np.float32([1, algorithm != SFT]))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state)), "the state is donated"
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(placed))
    expected = state_shardings(MODEL, config, VOCAB, make_layout(shape))
    assert jax.tree.all(
        jax.tree.map(
            lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim),
            new,
            expected,
        )
    )
    assert int(new.updates) == int((batch.turn_ids > 0).any())
    # After the first update, Adam's first moment is (1 - b1) times the gradient.
    grads = jax.tree.map(lambda m: np.asarray(m) / (1 - config.adam_b1), new.optimizer[1].mu)
    return Updated(jax.tree.map(np.asarray, new.params), grads, read_metrics(metrics))


def reference_loss(params, batch: TrajectoryBatch):
    """The objective written out once more: all logits at once, one number per token, one mean."""
    layout = make_layout(ONE_DEVICE)
    hidden = forward_rows(MODEL, layout, params, batch.tokens, batch.segment_ids)
    logits = jnp.einsum("btd,dv->btv", hidden[:, :-1], head_weights(params)) / TEMPERATURE
    logs = jax.nn.log_softmax(logits)
    targets = jax.nn.one_hot(batch.tokens[:, 1:], VOCAB)
    new = jnp.sum(logs * targets, axis=-1)
    entropy = -jnp.sum(jnp.exp(logs) * logs, axis=-1)
    spoken = (batch.turn_ids[:, 1:] > 0).astype(jnp.float32)
    log_ratio = (new - batch.logprobs[:, 1:]) * spoken
    ratio, advantages = jnp.exp(log_ratio), batch.advantages[:, 1:]
    # PPO's clip as cases: no more gain above 1.3 where good, nor below 0.8 where bad.
    cut = ((advantages > 0) & (ratio > 1.3)) | ((advantages < 0) & (ratio < 0.8))
    gain = jnp.where(cut, jnp.where(advantages > 0, 1.3, 0.8), ratio) * advantages
    count = spoken.sum()

    def mean(values):
        return jnp.sum(values * spoken) / count

    loss = -mean(gain + ENTROPY_COEFFICIENT * entropy)
    return loss, {
        "loss": loss,
        "entropy": mean(entropy),
        "clip_fraction": mean(cut),
        "effective_sample_size": mean(ratio) ** 2 / mean(ratio**2),
        "kl": mean(ratio - 1 - log_ratio),
        "logprob_mismatch_mean": mean(jnp.abs(log_ratio)),
        "logprob_mismatch_max": jnp.abs(log_ratio).max(),
        "policy_tokens": count,
        "skipped_updates": 0.0,
    }


@pytest.fixture(scope="module")
def reference():
    """Gradients of `reference_loss` and its numbers, unsharded."""
    grad = jax.jit(jax.grad(reference_loss, has_aux=True))
    grads, numbers = grad(make_params(), make_batch())
    grads = jax.tree.map(np.asarray, grads)
    numbers = {name: float(number) for name, number in numbers.items()}
    squares = [np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(grads)]
    return grads, numbers | {"grad_norm": math.sqrt(sum(squares))}


def assert_same_gradients(grads, expected, tolerance=2e-6) -> None:
    def check(path, grad, other):
        np.testing.assert_allclose(
            grad, other, rtol=1e-4, atol=tolerance, err_msg=jax.tree_util.keystr(path)
        )
        assert np.abs(other).max() > 100 * tolerance, "the comparison must mean something"

    jax.tree_util.tree_map_with_path(check, grads, expected)


def assert_same_metrics(metrics: dict[str, float], expected: dict[str, float]) -> None:
    assert metrics == pytest.approx(expected, rel=2e-5, abs=1e-6)


def assert_adams_first_update(params, grads, rate=RATE) -> None:
    """Both moments are corrected to the gradient itself: p - rate * g / (|g| + 1e-8)."""

    def check(old, new, grad):
        expected = old - rate * grad / (np.abs(grad) + 1e-8)
        # Gradients near 0 have no reliable sign; they move by less than the rate.
        sure = np.abs(grad) > 1e-4
        np.testing.assert_allclose(new[sure], expected[sure], atol=2e-7)
        assert np.abs(new - old).max() <= rate * 1.001
        assert sure.any()

    jax.tree.map(check, make_params(), params, grads)


# Sharded equals unsharded.


def test_the_reference_batch_is_a_hard_one(reference):
    """Some tokens are cut off, few rows are full, rows differ in the tokens that count."""
    _, numbers = reference
    assert 0.05 < numbers["clip_fraction"] < 0.9
    counts = (make_batch().turn_ids > 0).sum(axis=1)
    assert counts[::2].sum() * 2 < counts[1::2].sum()
    assert make_batch().segment_ids.min(axis=1).sum() < ROWS


@pytest.mark.slow_except("data=2,fsdp=2,tensor=2")
@pytest.mark.parametrize("shape", [ONE_DEVICE, *every_layout()], ids=str)
def test_an_update_is_the_same_on_every_layout(shape, reference):
    grads, numbers = reference
    got = update(make_batch(), shape)
    assert_same_metrics(got.metrics, numbers)
    assert_same_gradients(got.grads, grads)
    assert_adams_first_update(got.params, grads)


def test_micro_batches_add_up_to_one_batch(reference):
    config = dataclasses.replace(CONFIG, micro_batches=4)
    grads, numbers = reference
    got = update(make_batch(), ALL_AXES, config)
    assert_same_metrics(got.metrics, numbers)
    assert_same_gradients(got.grads, grads)
    assert_adams_first_update(got.params, grads)


# The correction for who sampled.

CAP = 1.3


def test_a_batch_is_scored_by_the_state_that_it_is_learnt_with():
    """The scores are those that the first update finds, which it then changes nothing."""
    layout, state = make_layout(ALL_AXES), first_state(ALL_AXES, IN_PARTS)
    batch = jax.device_put(make_batch(), layout.activations("NS"))
    scored = make_scorer(MODEL, IN_PARTS, layout, temperature=TEMPERATURE)(state, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, batch)))
    assert scored.proximal.sharding.is_equivalent_to(layout.activations("NS"), 2)
    spoken = make_batch().turn_ids > 0
    expected = own_scores()(make_batch())[0]
    np.testing.assert_allclose(np.asarray(scored.proximal)[spoken], expected[spoken], atol=1e-5)
    scored.validate()
    first = update(make_batch(), ALL_AXES, IN_PARTS, cap=CAP)
    rescored = update(jax.tree.map(np.asarray, scored), ALL_AXES, IN_PARTS, cap=CAP)
    assert_same_metrics(rescored.metrics, first.metrics)


# What counts and what does not.


def test_padding_and_the_environments_facts_never_count():
    """Garbage of any size, NaN included, wherever it is told to mean nothing."""
    rng = np.random.default_rng(2)
    batch = make_batch()
    silent, padding = batch.turn_ids == 0, batch.segment_ids == 0
    wild = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 3.0], np.float32)

    def spoil(field, where, garbage):
        return np.where(where, rng.choice(garbage, field.shape), field).astype(field.dtype)

    dirty = dataclasses.replace(
        batch,
        tokens=spoil(batch.tokens, padding, np.arange(VOCAB)),
        logprobs=spoil(batch.logprobs, silent, wild),
        advantages=spoil(batch.advantages, silent, wild),
        versions=spoil(batch.versions, np.ones_like(silent), np.arange(99)),
    )
    got, expected = update(dirty, ALL_AXES), update(batch, ALL_AXES)
    assert got.metrics == expected.metrics
    jax.tree.map(np.testing.assert_array_equal, got.params, expected.params)


def test_the_environments_tokens_are_context():
    """Told apart from the test above: a changed prompt changes what is learnt."""
    batch = make_batch()
    tokens = batch.tokens.copy()
    tokens[:, 1] = (tokens[:, 1] + 1) % VOCAB
    got = update(dataclasses.replace(batch, tokens=tokens)).metrics
    assert abs(got["loss"] - update(batch).metrics["loss"]) > 1e-4


def test_the_models_own_logprobs_have_no_mismatch():
    batch = make_batch()
    own, entropy = own_scores()(batch)
    metrics = update(dataclasses.replace(batch, logprobs=own)).metrics
    assert metrics["logprob_mismatch_max"] < 2e-6 and metrics["logprob_mismatch_mean"] < 2e-6
    assert metrics["clip_fraction"] == 0
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    # Ratio 1 everywhere: the loss is minus the mean advantage and the bonus.
    spoken = batch.turn_ids > 0
    expected = -np.mean(batch.advantages[spoken] + ENTROPY_COEFFICIENT * entropy[spoken])
    assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics["entropy"] == pytest.approx(entropy[spoken].mean(), rel=1e-5)


def test_scores_stand_at_their_own_token():
    """Place t holds the log-prob of token t given those before it; place 0 holds none."""
    batch = make_batch()
    logprobs, entropy = own_scores()(batch)
    assert logprobs.shape == entropy.shape == (ROWS, LENGTH)
    assert not logprobs[:, 0].any() and not entropy[:, 0].any()
    changed = batch.tokens.copy()
    changed[:, 5] = (changed[:, 5] + 1) % VOCAB
    other, other_entropy = own_scores()(dataclasses.replace(batch, tokens=changed))
    np.testing.assert_array_equal(other[:, :5], logprobs[:, :5])
    np.testing.assert_array_equal(other_entropy[:, :6], entropy[:, :6])
    assert (np.abs(other[:, 5:7] - logprobs[:, 5:7]) > 0).all()


def test_a_batch_without_a_word_of_the_policy_changes_nothing():
    batch = dataclasses.replace(make_batch(), turn_ids=np.zeros((ROWS, LENGTH), np.int32))
    got = update(batch)
    assert not any(got.metrics.values()), "the largest mismatch of no tokens is 0 too"
    jax.tree.map(np.testing.assert_array_equal, got.params, make_params())


# Supervised updates.


def test_supervised_updates_learn_the_policys_tokens_of_the_examples():
    """In two micro-batches of unequal token counts: sum over sum, not the mean of the means."""
    batch = make_batch()
    spoken = batch.turn_ids > 0
    logprobs, entropy = own_scores()(batch)
    got = update(batch, config=IN_PARTS, algorithm=SFT)
    mean = logprobs[spoken].mean()
    assert got.metrics["loss"] == pytest.approx(-mean, rel=1e-5)
    # Rows 0, 2, ... and rows 1, 3, ...: the short and the long.
    of_parts = [logprobs[part::2][spoken[part::2]].mean() for part in range(2)]
    assert abs(np.mean(of_parts) - mean) > 0.03
    assert got.metrics["entropy"] == pytest.approx(entropy[spoken].mean(), rel=1e-5)
    assert "clip_fraction" not in got.metrics
    # Neither advantages nor anybody's log-probs play a part.
    bare = dataclasses.replace(
        batch,
        advantages=np.full_like(batch.advantages, np.nan),
        logprobs=np.full_like(batch.logprobs, np.nan),
    )
    same = update(bare, config=IN_PARTS, algorithm=SFT)
    jax.tree.map(np.testing.assert_array_equal, got.params, same.params)
    # Twenty such updates make those tokens likely.
    step = compiled_step(ONE_DEVICE, IN_PARTS, SFT)
    state, losses = first_state(ONE_DEVICE, IN_PARTS), []
    for _ in range(20):
        state, metrics = step(state, batch, np.array([1e-2, 0.0], np.float32))
        losses.append(read_metrics(metrics)["loss"])
    assert losses[-1] < 0.5 * losses[0]
    assert int(state.updates) == 20


# The optimiser and its schedules.


def test_large_gradients_are_clipped_by_their_global_norm(reference):
    grads, numbers = reference
    norm = numbers["grad_norm"]
    config = dataclasses.replace(CONFIG, max_grad_norm=norm / 4)
    got = update(make_batch(), config=config)
    quarter = jax.tree.map(lambda grad: grad / 4, grads)
    assert_same_gradients(got.grads, quarter, tolerance=1e-6)
    assert got.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5), "logged before the clip"


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        # Warm-up of 4 steps to 1: 1/5, 2/5, 3/5, 4/5, then 1 at step 4; 20 steps leave 16 to fall.
        ("linear", 0, 0.2),
        ("linear", 3, 0.8),
        ("linear", 4, 1.0),
        ("linear", 8, 0.8),  # a quarter of the way from 1 to 0.2
        ("linear", 12, 0.6),
        ("linear", 19, 0.25),  # 15/16 of the way
        ("linear", 20, 0.2),
        ("linear", 99, 0.2),
        ("cosine", 0, 0.2),
        ("cosine", 4, 1.0),
        ("cosine", 12, 0.6),  # halfway
        ("cosine", 8, 0.6 + 0.4 * math.sqrt(0.5)),  # cos(pi / 4)
        ("cosine", 20, 0.2),
        ("constant", 1, 0.4),
        ("constant", 4, 1.0),
        ("constant", 19, 1.0),
    ],
)
def test_the_learning_rate_by_hand(schedule, step, rate):
    config = TrainConfig(
        schedule=schedule, warmup_steps=4, learning_rate=1.0, final_learning_rate=0.2
    )
    assert learning_rate(config, step, 20) == pytest.approx(rate, abs=1e-6)


def test_the_learning_rate_without_warmup_and_with_nothing_but_it():
    config = TrainConfig(warmup_steps=0, learning_rate=1.0, schedule="linear")
    assert [learning_rate(config, step, 4) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
    config = TrainConfig(warmup_steps=10, learning_rate=1.1, schedule="linear")
    assert learning_rate(config, 4, 5) == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_learning_rate_of_zero_is_zero(schedule):
    """A run that only measures."""
    config = TrainConfig(schedule=schedule, learning_rate=0.0, final_learning_rate=0.0)
    assert [learning_rate(config, step, 20) for step in (0, 10, 19)] == [0, 0, 0]


def test_the_entropy_coefficient_by_hand():
    config = TrainConfig(entropy_coefficient=0.5, final_entropy_coefficient=0.1)
    # Five steps are four equal falls of 0.1.
    values = [entropy_coefficient(config, step, 5) for step in range(5)]
    assert values == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1], abs=1e-6)
    assert entropy_coefficient(config, 0, 1) == pytest.approx(0.5)


def test_the_rate_and_the_bonus_are_arguments_of_one_program():
    """The same compiled step: a rate of 0 moves nothing, a bonus of 0 is left out of the loss."""
    step = compiled_step(ONE_DEVICE, CONFIG, CLIPPED)
    placed = jax.device_put(make_batch(), make_layout(ONE_DEVICE).activations("NS"))
    state, metrics = step(first_state(ONE_DEVICE), placed, np.array([0.0, 0.0], np.float32))
    jax.tree.map(np.testing.assert_array_equal, state.params, make_params())
    usual = update(make_batch()).metrics
    bonus = ENTROPY_COEFFICIENT * usual["entropy"]
    assert read_metrics(metrics)["loss"] == pytest.approx(usual["loss"] + bonus, abs=1e-6)


def test_traced_shapes_are_those_of_a_batch():
    layout = make_layout(ALL_AXES)
    shapes = batch_shapes(ROWS, LENGTH, layout)
    placed = jax.device_put(make_batch(), layout.activations("NS"))

    def describe(leaf):
        return leaf.shape, leaf.dtype, leaf.sharding

    assert jax.tree.map(describe, shapes) == jax.tree.map(describe, placed)
    shapes.validate()
    with pytest.raises(ValueError, match=r"TrajectoryBatch.advantages has shape \(16, 23\)"):
        dataclasses.replace(placed, advantages=placed.advantages[:, 1:]).validate()


@pytest.mark.parametrize(
    ("shape", "what"), [(ONE_DEVICE, "the learning rate"), (ALL_AXES, "an advantage")], ids=str
)
def test_an_update_that_is_not_finite_is_skipped(shape, what):
    """Parameters and moments keep every bit; the next batch is learnt from as if nothing was."""
    batch, controls = make_batch(), np.array(CONTROLS)
    faulty = batch
    if what == "an advantage":
        row, token = np.argwhere(batch.turn_ids > 0)[0]
        advantages = np.array(batch.advantages)
        advantages[row, token] = np.inf
        faulty = dataclasses.replace(batch, advantages=advantages)
    else:
        controls[0] = 1e38
    step, place = compiled_step(shape, CONFIG, CLIPPED), make_layout(shape).activations("NS")
    before = jax.tree.map(np.array, first_state(shape))
    state, metrics = step(first_state(shape), jax.device_put(faulty, place), controls)
    assert read_metrics(metrics)["skipped_updates"] == 1
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, state), before)
    state, metrics = step(state, jax.device_put(batch, place), CONTROLS)
    assert read_metrics(metrics)["skipped_updates"] == 0 and int(state.updates) == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, update(batch, shape).params)
