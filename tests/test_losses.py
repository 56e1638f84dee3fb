# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Losses token by token, by hand; all algorithms against torch: test_torch_losses.py."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.algorithms.algorithm import TokenFacts, TokenLosses
from earl_jax.algorithms.algorithms import ALGORITHMS, gspo_loss
from earl_jax.algorithms.losses import (
    clipped_surrogate,
    clipped_weight,
    importance_weights,
    kl_estimate,
    likelihood_ratio,
    policy_kl,
    truncated_importance,
)
from earl_jax.algorithms.requirements import scored_passes
from earl_jax.algorithms.sequences import aggregate, sequence_sums, sums_from
from earl_jax.algorithms.settings import (
    CispoSettings,
    DapoSettings,
    GrpoSettings,
    ReinforceSettings,
    RlooSettings,
)
from earl_jax.models.logprobs import TokenScores
from earl_jax.settings.errors import InputError
from earl_jax.train.scoring import with_estimates
from earl_jax.train.update import token_facts
from earl_jax.trajectory import TrajectoryBatch


def make_facts(logprobs, behaviour, advantages, **fields) -> TokenFacts:
    """One row, in which the policy sampled every token."""
    fields = {"logprobs": logprobs, "behaviour": behaviour, "advantages": advantages, **fields}
    row = {name: jnp.asarray([values], jnp.float32) for name, values in fields.items()}
    row.setdefault("entropy", jnp.asarray(np.zeros((1, len(logprobs)), np.float32)))
    ones = np.ones((1, len(logprobs)), np.int32)
    return TokenFacts(mask=jnp.asarray(ones > 0), sequences=jnp.asarray(ones), **row)


def clipped(facts: TokenFacts):
    return clipped_surrogate(facts, clip_low=0.2, clip_high=0.3)


def dual(facts: TokenFacts):
    return clipped_surrogate(facts, clip_low=0.2, clip_high=0.3, dual_clip=3.0)


def cispo(facts: TokenFacts):
    return clipped_weight(facts, clip_low=1.0, clip_high=4.0)


@functools.cache
def compiled(loss):
    """One program of this loss and of its gradient, for all tests and cases."""

    def total(logprobs, facts):
        found = loss(facts.replace(logprobs=logprobs))
        return found.losses.sum(), found

    return jax.jit(jax.grad(total, has_aux=True))


def computed(loss, facts: TokenFacts) -> TokenLosses:
    return jax.device_get(compiled(loss)(facts.logprobs, facts)[1])


def slope_of(loss, facts: TokenFacts) -> np.ndarray:
    """The gradient of the sum of losses with respect to the log-probs."""
    return np.asarray(compiled(loss)(facts.logprobs, facts)[0])[0]


@functools.cache
def importance(cap: float):
    """Truncated importance weights, as one program."""
    return jax.jit(functools.partial(truncated_importance, cap=cap))


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
    losses, metrics, _ = computed(clipped, facts)
    assert losses[0, 0] == pytest.approx(-gain, abs=1e-6)
    assert metrics["clip_fraction"][0, 0] == clipped_off
    assert slope_of(clipped, facts)[0] == pytest.approx(-slope, abs=1e-6)


def test_a_ratio_exactly_at_a_bound_of_the_clip_is_not_cut_off():
    """There r A and clip(r) A are equal: the slope is r A, not half of it, whatever A is.

    The bounds are e^0.25 and e^-0.25 as the devices compute them. A little further out the two
    tokens whose gain the clip makes smaller are cut off.
    """
    gaps, advantages = np.array([0.25, 0.25, -0.25, -0.25]), [2.0, -2.0, 2.0, -2.0]
    at = make_facts(gaps, np.zeros(4), advantages)
    high, _, low, _ = np.asarray(jax.jit(likelihood_ratio)(at.logprobs, at.behaviour))[0].tolist()
    loss = functools.partial(clipped_surrogate, clip_low=1.0 - low, clip_high=high - 1.0)
    assert computed(loss, at).metrics["clip_fraction"].tolist() == [[0, 0, 0, 0]]
    gains = [2 * high, -2 * high, 2 * low, -2 * low]
    np.testing.assert_allclose(slope_of(loss, at), np.negative(gains), rtol=1e-6)
    beyond = at.replace(logprobs=1.001 * at.logprobs)
    assert computed(loss, beyond).metrics["clip_fraction"].tolist() == [[1, 0, 0, 1]]
    assert (slope_of(loss, beyond) == 0).tolist() == [True, False, False, True]


def test_importance_weights_are_cut_at_the_cap():
    # Proximal / behaviour 1.5, 3, 0.25; cap 2.
    behaviour = np.array([-1.0, -2.0, -0.5])
    proximal = jnp.asarray(behaviour + np.log([1.5, 3.0, 0.25]))
    weight, cut = importance(2.0)(proximal, jnp.asarray(behaviour))
    np.testing.assert_allclose(weight, [1.5, 2.0, 0.25], rtol=1e-6)
    assert cut.tolist() == [0, 1, 0]
    slopes = jax.jit(jax.grad(lambda p, b: truncated_importance(p, b, 2.0)[0].sum()))
    assert not np.any(slopes(proximal, jnp.asarray(behaviour)))


def test_truncated_importance_makes_the_gradient_unbiased_under_the_cap():
    """Two tokens, sampled with 0.5 and 0.5 by a rollout that should have had 0.8 and 0.2.

    Weighted by how often each is sampled, gradients add up to those of sampling from the trainer:
    sum of p A d log p. The second token is one that a clip would cut off: 0.2 / 0.5 < 0.8.
    """
    trainer, rollout, advantages = np.array([0.8, 0.2]), np.array([0.5, 0.5]), [1.0, -3.0]
    logprobs, behaviour = np.log(trainer), np.log(rollout)
    facts = make_facts(logprobs, behaviour, advantages, proximal=logprobs)
    weight, _ = importance(2.0)(facts.proximal, facts.behaviour)
    slope = np.asarray(weight)[0] * slope_of(clipped, facts)
    np.testing.assert_allclose(rollout * slope, -trainer * advantages, atol=1e-6)
    assert slope_of(clipped, facts.replace(proximal=None))[1] == 0


@pytest.mark.parametrize("gap", [100.0, -100.0, math.inf, 1e30])
@pytest.mark.parametrize("advantage", [0.0, 2.0, -2.0])
def test_no_gap_of_logprobs_makes_a_loss_that_is_no_number(gap, advantage):
    """exp of a large gap times an advantage of zero was inf x 0."""
    facts = make_facts([-2.0, 0.0], [-2.0 - gap, 0.0], [advantage, 1.0])
    losses, metrics, _ = computed(clipped, facts)
    assert np.isfinite(losses).all() and np.isfinite(metrics["clip_fraction"]).all()
    assert np.isfinite(slope_of(clipped, facts)).all()
    weight, _ = importance(2.0)(facts.logprobs, facts.behaviour)
    assert np.isfinite(weight).all()
    assert np.isfinite(jax.jit(kl_estimate)(facts.logprobs, facts.behaviour)).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "cut", "slope"),
    [
        # max(min(r A, clip(r, 0.8, 1.3) A), 3 A) for A < 0, min(r A, clip(r) A) else.
        (2.9, -2.0, -5.8, 0, -5.8),
        (3.1, -2.0, -6.0, 1, 0.0),  # -6.2 is below 3 A
        (1e6, -2.0, -6.0, 1, 0.0),
        (3.1, 2.0, 2.6, 0, 0.0),  # PPO's clip, above
        (0.5, -2.0, -1.6, 0, 0.0),  # PPO's clip, below
        (3.1, 0.0, 0.0, 0, 0.0),
    ],
)
def test_the_dual_clip_bounds_the_loss_of_bad_tokens(ratio, advantage, gain, cut, slope):
    facts = make_facts([-2.0 + math.log(ratio)], [-2.0], [advantage])
    losses, metrics, _ = computed(dual, facts)
    assert losses[0, 0] == pytest.approx(-gain, abs=1e-5)
    assert metrics["dual_clip_fraction"][0, 0] == cut
    assert slope_of(dual, facts)[0] == pytest.approx(-slope, abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped_off", "slope"),
    [
        # -min(r, 5) A log p with log p = -2; the slope is -min(r, 5) A, never 0.
        (1.0, 3.0, 6.0, 0, -3.0),
        (5.5, 2.0, 20.0, 1, -10.0),
        (5.5, -2.0, -20.0, 1, 10.0),
        (0.01, 2.0, 0.04, 0, -0.02),
    ],
)
def test_cispo_cuts_weights_and_keeps_gradients(ratio, advantage, loss, clipped_off, slope):
    facts = make_facts([-2.0], [-2.0 - math.log(ratio)], [advantage])
    losses, metrics, _ = computed(cispo, facts)
    assert losses[0, 0] == pytest.approx(loss, rel=1e-5)
    assert metrics["clip_fraction"][0, 0] == clipped_off
    assert slope_of(cispo, facts)[0] == pytest.approx(slope, rel=1e-5)


# Sequences.


def make_rows(sequences, mask, **fields) -> TokenFacts:
    """One row of several sequences; fields are 0 outside the mask."""
    given = np.array([mask], bool)
    names = ("logprobs", "behaviour", "advantages", "entropy")
    rows = {name: np.array([fields.get(name, [0.0] * given.size)]) for name in names}
    rows = {name: jnp.asarray(np.where(given, row, 0.0), jnp.float32) for name, row in rows.items()}
    numbers = jnp.asarray([sequences], jnp.int32)
    return TokenFacts(mask=jnp.asarray(given), sequences=numbers, **rows)


def test_sums_over_sequences_by_hand():
    values = np.array([[1.0, 2, 3, 4, 5, 6], [1.0, 1, 1, 1, 1, 1]], np.float32)
    sequences = np.array([[1, 1, 1, 2, 3, 3], [1, 2, 2, 2, 2, 0]])
    sums = [[6, 6, 6, 4, 11, 11], [1, 4, 4, 4, 4, 1]]
    assert jax.jit(sequence_sums)(values, sequences).tolist() == sums
    following = [[6, 5, 3, 4, 11, 6], [1, 4, 3, 2, 1, 1]]
    following_sums = jax.jit(sums_from)
    assert following_sums(values, sequences).tolist() == following
    # Discount 1/2: 1 + 2/2 + 3/4, 2 + 3/2, 3; 4; 5 + 6/2, 6. And 1 + 1/2 + 1/4 + 1/8.
    halved = [[2.75, 3.5, 3, 4, 8, 6], [1, 1.875, 1.75, 1.5, 1, 1]]
    assert following_sums(values, sequences, 0.5).tolist() == halved


def test_a_sum_is_not_rounded_on_the_scale_of_another_sequence():
    values = np.array([[1e8, 1e8, 0.25, 0.5]], np.float32)
    found = jax.jit(sequence_sums)(values, np.array([[1, 1, 2, 2]]))
    assert found.tolist() == [[2e8, 2e8, 0.75, 0.75]]


def test_aggregations_by_hand():
    # Sequences of 1 and 3 tokens of the mask, one of none, padding.
    facts = make_rows([1, 1, 2, 2, 2, 2, 3, 0], [0, 1, 1, 0, 1, 1, 0, 0])
    assert aggregate(facts, "token", 7) is None
    weights_and_shares = jax.jit(aggregate, static_argnums=(1, 2))
    third = 1 / 3
    shares = [0, 1, third, 0, third, third, 0, 0]
    by_sequence = jax.device_get(weights_and_shares(facts, "sequence", 7))
    np.testing.assert_allclose(by_sequence.weights[0], shares, rtol=1e-6)
    np.testing.assert_allclose(by_sequence.shares[0], shares, rtol=1e-6)
    constant = jax.device_get(weights_and_shares(facts, "constant", 10))
    np.testing.assert_allclose(constant.weights[0], [0, 0.1, 0.1, 0, 0.1, 0.1, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(constant.shares[0], shares, rtol=1e-6)
    none = make_rows([0, 1, 1, 2, 2, 0, 0, 0], [0] * 8)
    nothing = jax.device_get(weights_and_shares(none, "sequence", 7))
    assert not nothing.weights.any() and not nothing.shares.any()


def test_gspo_by_hand():
    """Eq. 5 of arXiv 2507.18071: the mean over sequences of min(s A, clip(s) A).

    Ratios 1.2 and 0.9 give s = sqrt(1.08) = 1.0392; 0.8 alone is cut off below for A < 0, and 2
    alone is too likely and bad: full pull back.
    """
    sequences, mask = [1, 1, 1, 2, 3, 0], [1, 0, 1, 1, 1, 0]
    ratios, advantages = np.array([1.2, 1, 0.9, 0.8, 2.0, 1]), np.array([1.0, 0, 1, -2, -1, 0])
    behaviour = np.full(6, -2.0)
    logprobs = behaviour + np.log(ratios)
    facts = make_rows(
        sequences, mask, logprobs=logprobs, behaviour=behaviour, advantages=advantages
    )
    settings = GrpoSettings(clip_low=0.1, clip_high=0.1, aggregation="sequence")
    losses, metrics, _ = jax.device_get(jax.jit(gspo_loss, static_argnums=1)(facts, settings))
    s = math.sqrt(1.08)
    np.testing.assert_allclose(losses[0], [-s, 0, -s, 1.8, 2.0, 0], rtol=1e-5)
    assert metrics["clip_fraction"][0].tolist() == [0, 0, 0, 1, 0, 0]


# The penalty.


def test_kl_estimators_by_hand_and_in_expectation():
    # r = reference / policy 0.5 and 2: log r -0.6931, 0.6931.
    kl = jax.jit(policy_kl, static_argnums=2)
    policy, reference = np.zeros(2, np.float32), np.log(np.array([0.5, 2.0], np.float32))
    expected = {
        "k1": [0.693147, -0.693147],
        "k2": [0.240227, 0.240227],
        "k3": [0.5 - 1 + 0.693147, 2 - 1 - 0.693147],
    }
    for estimator, values in expected.items():
        np.testing.assert_allclose(kl(policy, reference, estimator), values, atol=1e-6)
    # k1 and k3 are unbiased, over all tokens that the policy samples.
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.25, 0.25])
    for estimator in ("k1", "k3"):
        mean = np.sum(p * np.asarray(kl(np.log(p), np.log(q), estimator)))
        assert mean == pytest.approx(np.sum(p * np.log(p / q)), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (GrpoSettings(clip_low=1.5), "clip_low is 1.5; it must be at least 0.0 and at most 1.0"),
        (GrpoSettings(clip_high=-0.1), "clip_high is -0.1"),
        (GrpoSettings(kl_coefficient=-1.0), "kl_coefficient is -1.0"),
        (GrpoSettings(aggregation="constant", aggregation_tokens=0), "aggregation_tokens is 0"),
        (GrpoSettings(**{"aggregation": "mean"}), "aggregation is 'mean'; choose one of 'token'"),
        (DapoSettings(overlong_tokens=100), "overlong_buffer is 0; it must be at least 1 and at"),
        (DapoSettings(overlong_tokens=100, overlong_buffer=200), r"overlong_tokens \(100\)"),
        (ReinforceSettings(turn_discount=1.5), "turn_discount is 1.5"),
        (ReinforceSettings(**{"baseline": "mean"}), "baseline is 'mean'; choose one of 'batch'"),
        (CispoSettings(clip_low=2.0), "clip_low is 2.0"),
    ],
)
def test_settings_that_break_a_rule_are_errors(settings, words):
    with pytest.raises(InputError, match=words):
        settings.validate("config.algorithm_args")


# The facts of a batch.


def make_batch(turn_ids, logprobs, advantages, **fields) -> TrajectoryBatch:
    """One row."""
    turn_ids = jnp.asarray([turn_ids], jnp.int32)
    zeros = np.zeros(turn_ids.shape, np.int32)
    row = {"logprobs": logprobs, "advantages": advantages, **fields}
    return TrajectoryBatch(
        tokens=jnp.asarray(zeros),
        segment_ids=jnp.asarray(zeros + 1),
        turn_ids=turn_ids,
        versions=jnp.asarray(zeros),
        **{name: jnp.asarray([values], jnp.float32) for name, values in row.items()},
    )


def test_the_proximal_policy_of_a_first_update_is_the_policy_itself():
    batch = make_batch([1, 0, 1], [-1.0, 0.0, -2.0], [1.0, 0.0, 1.0])
    scores = TokenScores(jnp.asarray([[-1.5, -9.0, -2.5]]), jnp.asarray([[1.0] * 3]))
    assert token_facts(scores, batch).proximal is None
    assert token_facts(scores, batch).old is not None
    facts = token_facts(scores, batch, with_proximal=True)
    assert facts.proximal[0].tolist() == [-1.5, 0, -2.5]
    given = make_batch([1, 0, 1], [-1.0, 0, -2.0], [1.0, 0, 1.0], proximal=[-3.0, 7.0, -4.0])
    assert token_facts(scores, given, with_proximal=True).proximal[0].tolist() == [-3, 0, -4]
    assert token_facts(scores, given).proximal is None, "this loss does not need it"

    def total(logprobs):
        facts = token_facts(scores._replace(logprobs=logprobs), batch, with_proximal=True)
        return facts.proximal.sum()

    assert not jax.grad(total)(scores.logprobs).any()


def test_the_proximal_policy_interpolated_by_hand():
    """Three tokens were sampled by the policies one, two and four updates ago.

    | lag | behaviour | policy | proximal | weight | ratio | advantage | loss |
    |---|---|---|---|---|---|---|---|
    | 1 | 1/4 | 0.275 | 1/4 | 1 | 1.1 | 2 | -1 * 2.2 |
    | 2 | 0.04 | 0.16 | sqrt(0.04 * 0.16) = 0.08 | 2 | 2 | -1 | -2 * -2 |
    | 4 | 1/16 | 1 | (1/16)^(1/4) = 1/2 | 8 | 2 | 1 | -8 * 1.2, clipped |
    """
    behaviour, policy = [[0.25, 1.0, 0.04, 1 / 16]], [[0.275, 1.0, 0.16, 1.0]]
    batch = make_batch([1, 0, 1, 2], np.log(behaviour[0]), [2.0, 9.0, -1.0, 1.0])
    lag = jnp.asarray(8 - np.array([[7, 8, 6, 4]]))

    @functools.partial(jax.grad, has_aux=True)
    def losses(logprobs):
        scores = TokenScores(logprobs, jnp.zeros_like(logprobs))
        facts = token_facts(scores, batch, with_proximal=True, lag=lag)
        weights, _ = importance_weights(facts, "truncated", 10.0)
        found = clipped_surrogate(facts, clip_low=0.2, clip_high=0.2).losses * weights
        return jnp.sum(found), (found, facts.proximal)

    logprobs = np.log(np.array(policy, np.float32))
    slope, (found, proximal) = jax.device_get(jax.jit(losses)(logprobs))
    np.testing.assert_allclose(np.exp(proximal[0]), [0.25, 1.0, 0.08, 0.5], rtol=1e-5)
    np.testing.assert_allclose(found[0], [-2.2, 0, 4.0, -9.6], rtol=1e-5)
    # Of the ratio alone: neither the weight nor the proximal policy has a gradient.
    np.testing.assert_allclose(slope[0], [-2.2, 0, 4.0, 0], rtol=1e-5)


def test_no_pass_is_made_for_an_interpolated_proximal_policy():
    passes = functools.partial(scored_passes, ALGORITHMS["reinforce"], corrects=True)
    assert passes(updates=2) == ("proximal",)
    assert passes(updates=2, recomputes=False) == passes(updates=1) == ()
    penalized = dataclasses.replace(ALGORITHMS["grpo"], settings=GrpoSettings(kl_coefficient=0.1))
    passes = scored_passes(penalized, updates=2, corrects=True, recomputes=False)
    assert passes == ("reference",)


def test_penalties_in_the_reward_are_of_the_policy_that_the_step_begins_with():
    """Not of the one that sampled: teacher and policy agree, so that nothing is to be learnt."""
    distilled, first = ALGORITHMS["distillation"], ("proximal", "reference", "advantages")
    for updates in (1, 2):
        passes = functools.partial(scored_passes, distilled, updates=updates)
        assert passes(corrects=True, recomputes=False) == first
        assert passes(corrects=False) == first[1:]
    rloo = dataclasses.replace(
        ALGORITHMS["rloo"], settings=RlooSettings(kl_coefficient=0.1, kl_in="reward")
    )
    assert scored_passes(rloo, updates=1, corrects=True) == first
    assert scored_passes(rloo, updates=1, corrects=False) == first[1:]
    assert rloo.all_needs == {"reference", "groups"}
    for settings in (RlooSettings(), RlooSettings(kl_coefficient=0.1)):
        plain = dataclasses.replace(rloo, settings=settings)
        assert "advantages" not in scored_passes(plain, updates=2, corrects=True)
        assert "groups" not in plain.all_needs
    grpo = dataclasses.replace(
        ALGORITHMS["grpo"], settings=GrpoSettings(kl_coefficient=0.1, kl_in="reward")
    )
    passes = functools.partial(scored_passes, grpo, corrects=True, recomputes=False)
    # The only update of a step has these log-probs itself.
    assert (passes(updates=1), passes(updates=2)) == (first[1:2], first[:2])
    token, number = jnp.full((1, 3), -1.0), jnp.ones((1, 3), jnp.int32)
    batch = TrajectoryBatch(
        tokens=number,
        segment_ids=number,
        turn_ids=number,
        logprobs=3 * token,
        versions=number,
        advantages=0 * token,
        reference=token,
        proximal=token,
    )
    np.testing.assert_array_equal(with_estimates(batch, distilled).advantages, 0 * token)


@functools.cache
def gradient_and_facts(name: str):
    """One program of an algorithm's loss of a batch."""
    algorithm = ALGORITHMS[name]

    def loss(logprobs, batch):
        scores = TokenScores(logprobs, jnp.full_like(logprobs, 0.5))
        facts = token_facts(scores, batch, with_proximal=True)
        assert facts.reference is not None
        return jnp.sum(algorithm.loss(facts, algorithm.settings).losses), facts

    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("garbage", [1e30, math.nan])
def test_tokens_outside_the_mask_count_neither_in_a_value_nor_in_a_gradient(name, garbage):
    turn_ids = [0, 1, 0, 2, 0]

    def results(other):
        batch = make_batch(
            turn_ids,
            [other, -1.0, other, -2.0, other],
            [other, 1.0, other, -1.0, other],
            proximal=[other, -1.0, other, -2.4, other],
            reference=[other, -1.0, other, -1.0, other],
        )
        logprobs = np.array([[-7.0, -0.9, -7.0, -2.5, -7.0]], np.float32)
        return jax.device_get(gradient_and_facts(name)(logprobs, batch))

    clean, dirty = results(0.0), results(garbage)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    np.testing.assert_array_equal(clean[0][0, ::2], 0)
    assert clean[0][0, 1::2].all()
