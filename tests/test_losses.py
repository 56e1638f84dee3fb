# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Losses token by token, by hand and against finite differences."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.algorithms.algorithm import TokenFacts
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.algorithms.losses import (
    clipped_surrogate,
    cross_entropy,
    kl_estimate,
    likelihood_ratio,
    truncated_importance,
)
from earl_jax.models.logprobs import TokenScores
from earl_jax.train.step import token_facts
from earl_jax.trajectory import TrajectoryBatch


def make_facts(logprobs, behaviour, advantages, **fields) -> TokenFacts:
    """One row, in which the policy sampled every token."""
    fields = {"logprobs": logprobs, "behaviour": behaviour, "advantages": advantages, **fields}
    row = {name: jnp.asarray([values], jnp.float32) for name, values in fields.items()}
    row.setdefault("entropy", jnp.zeros_like(row["logprobs"]))
    return TokenFacts(mask=jnp.ones(row["logprobs"].shape, bool), **row)


def clipped(facts: TokenFacts):
    return clipped_surrogate(facts, clip_low=0.2, clip_high=0.3)


def slope_of(loss, facts: TokenFacts) -> np.ndarray:
    """The gradient of the sum of losses with respect to the log-probs."""

    def total(logprobs):
        return loss(facts.replace(logprobs=logprobs)).losses.sum()

    return np.asarray(jax.grad(total)(facts.logprobs)[0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "clipped_off", "slope"),
    [
        # min(r A, clip(r, 0.8, 1.3) A). The slope is d gain / d log r: r A, or 0 where cut off.
        (1.5, 2.0, 2.6, 1, 0.0),  # min(3, 2.6): cut off above
        (1.5, -2.0, -3.0, 0, -3.0),  # min(-3, -2.6): too likely and bad, full pull back
        (0.5, 2.0, 1.0, 0, 1.0),  # min(1, 1.6): too unlikely and good, full pull back
        (0.5, -2.0, -1.6, 1, 0.0),  # min(-1, -1.6): cut off below
        (1.25, 2.0, 2.5, 0, 2.5),  # inside the upper bound, which is not the lower one mirrored
        (0.9, -1.0, -0.9, 0, -0.9),
        (1.0, 3.0, 3.0, 0, 3.0),
        (1.5, 0.0, 0.0, 0, 0.0),
    ],
)
def test_the_four_cases_of_the_clip(ratio, advantage, gain, clipped_off, slope):
    facts = make_facts([-2.0 + math.log(ratio)], [-2.0], [advantage])
    losses, metrics = clipped(facts)
    assert losses[0, 0] == pytest.approx(-gain, abs=1e-6)
    assert metrics["clip_fraction"][0, 0] == clipped_off
    assert slope_of(clipped, facts)[0] == pytest.approx(-slope, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "slope"),
    [
        # Clipped to [0.8, 1.3] around the proximal policy, however far away behaviour is.
        (1.5, 2.0, 2.6, 0.0),
        (1.5, -2.0, -3.0, -3.0),
        (0.5, -2.0, -1.6, 0.0),
        (1.25, 2.0, 2.5, 2.5),
        (0.9, -1.0, -0.9, -0.9),
    ],
)
def test_with_proximal_logprobs_the_clip_is_around_them(ratio, advantage, gain, slope):
    facts = make_facts([-1.0 + math.log(ratio)], [-5.0], [advantage], proximal=[-1.0])
    assert clipped(facts).losses[0, 0] == pytest.approx(-gain, abs=1e-5)
    assert slope_of(clipped, facts)[0] == pytest.approx(-slope, abs=1e-5)


def test_importance_weights_are_cut_at_the_cap():
    # Proximal / behaviour 1.5, 3, 0.25; cap 2.
    behaviour = np.array([-1.0, -2.0, -0.5])
    proximal = jnp.asarray(behaviour + np.log([1.5, 3.0, 0.25]))
    weight, cut = truncated_importance(proximal, jnp.asarray(behaviour), 2.0)
    np.testing.assert_allclose(weight, [1.5, 2.0, 0.25], rtol=1e-6)
    assert cut.tolist() == [0, 1, 0]
    slopes = jax.grad(lambda p: truncated_importance(p, jnp.asarray(behaviour), 2.0)[0].sum())
    assert not slopes(proximal).any()


def test_truncated_importance_makes_the_gradient_unbiased_under_the_cap():
    """Two tokens, sampled with 0.5 and 0.5 by a rollout that should have had 0.8 and 0.2.

    Weighted by how often each is sampled, gradients add up to those of sampling from the trainer:
    sum of p A d log p. The second token is one that a clip would cut off: 0.2 / 0.5 < 0.8.
    """
    trainer, rollout, advantages = np.array([0.8, 0.2]), np.array([0.5, 0.5]), [1.0, -3.0]
    logprobs, behaviour = np.log(trainer), np.log(rollout)
    facts = make_facts(logprobs, behaviour, advantages, proximal=logprobs)
    weight, _ = truncated_importance(facts.proximal, facts.behaviour, 2.0)
    slope = np.asarray(weight[0]) * slope_of(clipped, facts)
    np.testing.assert_allclose(rollout * slope, -trainer * advantages, atol=1e-6)
    assert slope_of(clipped, facts.replace(proximal=None))[1] == 0


def test_the_kl_estimate_by_hand_and_in_expectation():
    # k3: r - 1 - log r is 0.5 - 0.405, -0.5 + 0.693, 0.25 - 0.223.
    gaps = jnp.log(jnp.array([1.5, 0.5, 1.25]))
    found = kl_estimate(gaps, jnp.zeros(3))
    np.testing.assert_allclose(found, [0.094535, 0.193147, 0.026856], atol=1e-6)
    # Over all tokens of a distribution q the mean is KL(q, p) itself.
    q, p = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.25, 0.25])
    mean = np.sum(q * np.asarray(kl_estimate(jnp.log(p), jnp.log(q))))
    assert mean == pytest.approx(np.sum(q * np.log(q / p)), abs=1e-6)


@pytest.mark.parametrize("gap", [100.0, -100.0, math.inf, 1e30])
@pytest.mark.parametrize("advantage", [0.0, 2.0, -2.0])
def test_no_gap_of_logprobs_makes_a_loss_that_is_no_number(gap, advantage):
    """exp of a large gap times an advantage of zero was inf x 0."""
    facts = make_facts([-2.0, 0.0], [-2.0 - gap, 0.0], [advantage, 1.0])
    losses, metrics = clipped(facts)
    assert np.isfinite(losses).all() and np.isfinite(metrics["clip_fraction"]).all()
    assert np.isfinite(slope_of(clipped, facts)).all()
    weight, _ = truncated_importance(facts.logprobs, facts.behaviour, 2.0)
    assert np.isfinite(weight).all()
    assert np.isfinite(kl_estimate(facts.logprobs, facts.behaviour)).all()


def test_the_ratio_is_exact_within_its_bounds():
    gaps = np.array([-19.9, -1.0, 0.0, 1.0, 19.9])
    np.testing.assert_allclose(
        likelihood_ratio(jnp.asarray(gaps), jnp.zeros(5)), np.exp(gaps), rtol=1e-5
    )


def test_cross_entropy_is_minus_the_logprob():
    facts = make_facts([-0.5, -1.5, -2.0], [5.0] * 3, [5.0] * 3)
    assert cross_entropy(facts).losses[0].tolist() == [0.5, 1.5, 2.0]
    assert slope_of(cross_entropy, facts).tolist() == [-1, -1, -1]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("with_proximal", [False, True])
def test_gradients_are_finite_differences_of_the_loss(name, with_proximal):
    """In fp64 numpy arithmetic of central differences, away from the kinks of the clip."""
    algorithm, rng = ALGORITHMS[name], np.random.default_rng(0)
    behaviour, advantages = rng.normal(-2, 1, 40), rng.normal(size=40)
    proximal = behaviour + rng.normal(0, 0.5, 40)
    old = proximal if with_proximal else behaviour
    logprobs = old + rng.normal(0, 0.4, 40)
    ratio = np.exp(logprobs - old)
    smooth = (np.abs(ratio - 0.8) > 0.02) & (np.abs(ratio - 1.2) > 0.02)

    def loss(logprobs):
        if name == "sft":
            return -logprobs
        ratio = np.exp(logprobs - old)
        return -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)

    expected = (loss(logprobs + 1e-6) - loss(logprobs - 1e-6)) / 2e-6
    fields = {"proximal": proximal} if with_proximal else {}
    facts = make_facts(logprobs, behaviour, advantages, **fields)
    found = slope_of(lambda facts: algorithm.loss(facts, algorithm.settings), facts)
    np.testing.assert_allclose(found[smooth], expected[smooth], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        algorithm.loss(facts, algorithm.settings).losses[0], loss(logprobs), rtol=1e-5, atol=1e-6
    )


# The facts of a batch.


def make_batch(turn_ids, logprobs, advantages, **fields) -> TrajectoryBatch:
    """One row."""
    turn_ids = jnp.asarray([turn_ids], jnp.int32)
    row = {"logprobs": logprobs, "advantages": advantages, **fields}
    return TrajectoryBatch(
        tokens=jnp.zeros_like(turn_ids),
        segment_ids=jnp.ones_like(turn_ids),
        turn_ids=turn_ids,
        versions=jnp.zeros_like(turn_ids),
        **{name: jnp.asarray([values], jnp.float32) for name, values in row.items()},
    )


def test_the_proximal_policy_of_a_first_update_is_the_policy_itself():
    batch = make_batch([1, 0, 1], [-1.0, 0.0, -2.0], [1.0, 0.0, 1.0])
    scores = TokenScores(jnp.array([[-1.5, -9.0, -2.5]]), jnp.ones((1, 3)))
    assert token_facts(scores, batch).proximal is None
    assert token_facts(scores, batch).old is not None
    facts = token_facts(scores, batch, with_proximal=True)
    assert facts.proximal[0].tolist() == [-1.5, 0, -2.5]
    told = make_batch([1, 0, 1], [-1.0, 0, -2.0], [1.0, 0, 1.0], proximal=[-3.0, 7.0, -4.0])
    assert token_facts(scores, told, with_proximal=True).proximal[0].tolist() == [-3, 0, -4]
    assert token_facts(scores, told).proximal is None, "this loss does not need it"

    def total(logprobs):
        facts = token_facts(scores._replace(logprobs=logprobs), batch, with_proximal=True)
        return facts.proximal.sum()

    assert not jax.grad(total)(scores.logprobs).any()


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("garbage", [1e30, -1e30, math.inf, -math.inf, math.nan])
def test_tokens_outside_the_mask_count_neither_in_a_value_nor_in_a_gradient(name, garbage):
    algorithm, turn_ids = ALGORITHMS[name], [0, 1, 0, 2, 0]

    def results(other):
        batch = make_batch(
            turn_ids,
            [other, -1.0, other, -2.0, other],
            [other, 1.0, other, -1.0, other],
            proximal=[other, -1.0, other, -2.4, other],
            reference=[other, -1.0, other, -1.0, other],
        )

        def loss(logprobs):
            scores = TokenScores(logprobs, jnp.full_like(logprobs, 0.5))
            facts = token_facts(scores, batch, with_proximal=True)
            assert facts.reference is not None
            return jnp.sum(algorithm.loss(facts, algorithm.settings).losses), facts

        return jax.grad(loss, has_aux=True)(jnp.array([[-7.0, -0.9, -7.0, -2.5, -7.0]]))

    clean, dirty = results(0.0), results(garbage)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    np.testing.assert_array_equal(clean[0][0, ::2], 0)
    assert clean[0][0, 1::2].all()
