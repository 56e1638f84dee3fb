# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The objectives, token by token, by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.models.logprobs import TokenScores
from earl_jax.train.losses import LossSums, policy_gradient, supervised
from earl_jax.trajectory import TrajectoryBatch

jitted_policy_gradient = jax.jit(
    policy_gradient, static_argnames=("clip_low", "clip_high", "importance_cap")
)


def make_batch(turn_ids, logprobs, advantages, proximal=None) -> TrajectoryBatch:
    """One row."""
    turn_ids = jnp.asarray([turn_ids], jnp.int32)
    return TrajectoryBatch(
        tokens=jnp.zeros_like(turn_ids),
        segment_ids=jnp.ones_like(turn_ids),
        turn_ids=turn_ids,
        logprobs=jnp.asarray([logprobs], jnp.float32),
        versions=jnp.zeros_like(turn_ids),
        advantages=jnp.asarray([advantages], jnp.float32),
        proximal=None if proximal is None else jnp.asarray([proximal], jnp.float32),
    )


def make_scores(logprobs, entropy=None) -> TokenScores:
    logprobs = jnp.asarray([logprobs], jnp.float32)
    zeros = jnp.zeros_like(logprobs)
    return TokenScores(logprobs, zeros if entropy is None else jnp.asarray([entropy], jnp.float32))


def sums_of(scores, batch, *, entropy_coefficient=0.0, importance_cap=0.0) -> LossSums:
    return jitted_policy_gradient(
        scores,
        batch,
        clip_low=0.2,
        clip_high=0.3,
        entropy_coefficient=entropy_coefficient,
        importance_cap=importance_cap,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "clipped", "slope"),
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
def test_the_four_cases_of_the_clip(ratio, advantage, gain, clipped, slope):
    batch = make_batch([1], [-2.0], [advantage])

    def loss(logprob):
        sums = sums_of(make_scores([logprob]), batch)
        return sums.loss, sums

    grad, sums = jax.grad(loss, has_aux=True)(-2.0 + math.log(ratio))
    assert sums.loss == pytest.approx(-gain, abs=1e-6)
    assert sums.clipped == clipped
    assert grad == pytest.approx(-slope, abs=1e-6)


def test_all_sums_of_one_row_by_hand():
    # Ratios 1.5, 0.5, 1.25 where the policy spoke; advantages 2, 2, -1; clip to [0.8, 1.3].
    ratios = [1.5, 0.5, 1.25]
    logs = [math.log(ratio) for ratio in ratios]
    old = [-1.0, -3.0, -0.5]
    batch = make_batch([0, 1, 1, 0, 2], [9, old[0], old[1], 9, old[2]], [9, 2, 2, 9, -1])
    new = [-4.0, old[0] + logs[0], old[1] + logs[1], -4.0, old[2] + logs[2]]
    scores = make_scores(new, entropy=[5.0, 0.25, 0.5, 5.0, 1.0])
    sums = sums_of(scores, batch, entropy_coefficient=0.1)
    # Gains 2.6 (clipped), 1, -1.25; entropies 0.25 + 0.5 + 1 = 1.75.
    assert sums.loss == pytest.approx(-(2.6 + 1.0 - 1.25 + 0.1 * 1.75), abs=1e-5)
    assert sums.entropy == pytest.approx(1.75)
    assert sums.clipped == 1
    # k3: r - 1 - log r is 0.5 - 0.405, -0.5 + 0.693, 0.25 - 0.223.
    k3 = [0.094535, 0.193147, 0.026856]
    assert k3 == pytest.approx([r - 1 - log for r, log in zip(ratios, logs, strict=True)], abs=1e-6)
    assert sums.kl == pytest.approx(sum(k3), abs=1e-5)
    # |log r|: 0.405 + 0.693 + 0.223, the largest is log 2.
    assert sums.mismatch == pytest.approx(sum(map(abs, logs)), abs=1e-5)
    assert sums.mismatch_max == pytest.approx(math.log(2), abs=1e-6)


def test_the_same_policy_has_no_ratio_no_kl_no_mismatch():
    old = [-0.1, -2.0, -30.0]
    sums = sums_of(make_scores(old), make_batch([1, 1, 2], old, [1.0, -2.0, 0.5]))
    assert sums.loss == pytest.approx(0.5)  # -(1 - 2 + 0.5)
    assert sums._replace(loss=0) == LossSums(0, 0, 0, 0, 0, 0, importance=3, truncated=0)


# The correction for who sampled.


def slope_and_sums(logprobs, batch, **settings):
    def loss(logprobs):
        sums = sums_of(TokenScores(logprobs, jnp.zeros_like(logprobs)), batch, **settings)
        return sums.loss, sums

    return jax.grad(loss, has_aux=True)(jnp.asarray([logprobs], jnp.float32))


def test_the_first_update_weights_each_token_by_trainer_over_rollout_at_most_the_cap():
    """Trainer / rollout 1.5, 3, 0.25, and cap 2: weights 1.5, 2, 0.25; the ratio is 1."""
    weights, old = [1.5, 3.0, 0.25], [-1.0, -2.0, -0.5]
    new = [b + math.log(w) for b, w in zip(old, weights, strict=True)]
    turn_ids = [1, 1, 0, 2]
    batch = make_batch(turn_ids, [*old[:2], 9, old[2]], [2.0, -1.0, 9, 4.0])
    logprobs = [*new[:2], 9, new[2]]
    slope, sums = slope_and_sums(logprobs, batch, importance_cap=2.0)
    # 1.5 x 2, 2 x -1, 0.25 x 4. The gradient of the ratio is 1: that of REINFORCE, weighted.
    assert sums.loss == pytest.approx(-(3.0 - 2.0 + 1.0), abs=1e-5)
    np.testing.assert_allclose(slope, [[-3.0, 2.0, 0.0, -1.0]], atol=1e-5)
    assert (sums.truncated, sums.clipped) == (1, 0)
    assert sums.importance == pytest.approx(1.5 + 2.0 + 0.25, abs=1e-5)
    # What is logged is the gap between the two, whatever is done about it.
    assert sums.mismatch == pytest.approx(sum(abs(math.log(w)) for w in weights), abs=1e-5)
    assert sums.mismatch_max == pytest.approx(math.log(4), abs=1e-5)
    plain = sums_of(make_scores(logprobs), batch)
    for field in ("kl", "mismatch", "mismatch_max"):
        assert getattr(sums, field) == getattr(plain, field)
    # Without the correction, 1.5 and 0.25 are cut off where that is PPO's clip: 1.3 x 2.
    assert plain.loss == pytest.approx(-(2.6 - 3.0 + 1.0), abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "weight", "advantage", "gain", "slope"),
    [
        # Clipped to [0.8, 1.3] around the proximal policy, and weighted with min(weight, 2).
        (1.5, 0.5, 2.0, 0.5 * 2.6, 0.0),
        (1.5, 0.5, -2.0, 0.5 * -3.0, 0.5 * -3.0),
        (0.5, 1.5, -2.0, 1.5 * -1.6, 0.0),
        (1.25, 4.0, 2.0, 2.0 * 2.5, 2.0 * 2.5),
        (0.9, 1.0, -1.0, -0.9, -0.9),
    ],
)
def test_later_updates_are_clipped_around_the_proximal_policy(
    ratio, weight, advantage, gain, slope
):
    behaviour = -2.0
    proximal = behaviour + math.log(weight)
    batch = make_batch([1], [behaviour], [advantage], [proximal])
    found, sums = slope_and_sums([proximal + math.log(ratio)], batch, importance_cap=2.0)
    assert sums.loss == pytest.approx(-gain, abs=1e-5)
    assert found[0, 0] == pytest.approx(-slope, abs=1e-5)
    assert sums.clipped == (slope == 0)
    assert sums.truncated == (weight > 2)


def test_where_both_agree_the_correction_is_none():
    """And a batch that says what the first update would find out gives the same."""
    old, advantages = [-0.1, -2.0, -3.0], [1.0, -2.0, 0.5]
    batch = make_batch([1, 1, 2], old, advantages)
    slope, sums = slope_and_sums(old, batch, importance_cap=2.0)
    plain_slope, plain = slope_and_sums(old, batch)
    np.testing.assert_array_equal(slope, plain_slope)
    assert sums == plain
    away = [-0.2, -1.5, -3.1]
    told = make_batch([1, 1, 2], old, advantages, proximal=away)
    found = [slope_and_sums(away, b, importance_cap=2.0) for b in (batch, told)]
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_the_gradient_is_unbiased_under_the_cap():
    """Two tokens, sampled with 0.5 and 0.5 by a rollout that should have had 0.8 and 0.2.

    Weighted by how often each is sampled, gradients add up to those of sampling from the trainer:
    sum of p A d log p. The second token is one that a clip would cut off: 0.2 / 0.5 < 0.8.
    """
    trainer, rollout, advantages = [0.8, 0.2], [0.5, 0.5], [1.0, -3.0]
    batch = make_batch([1, 1], [math.log(q) for q in rollout], advantages)
    logprobs = [math.log(p) for p in trainer]
    slope, _ = slope_and_sums(logprobs, batch, importance_cap=2.0)
    expected = [-p * a for p, a in zip(trainer, advantages, strict=True)]
    np.testing.assert_allclose(np.array(rollout) * slope[0], expected, atol=1e-6)
    clipped, _ = slope_and_sums(logprobs, batch)
    assert clipped[0, 1] == 0


def test_the_entropy_bonus_pulls_on_entropy_alone():
    batch = make_batch([1, 0, 2], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    slopes = jax.grad(
        lambda entropy: (
            sums_of(TokenScores(jnp.zeros((1, 3)), entropy), batch, entropy_coefficient=0.03).loss
        )
    )(jnp.ones((1, 3)))
    np.testing.assert_allclose(slopes, [[-0.03, 0.0, -0.03]], rtol=1e-6)


@pytest.mark.parametrize("objective", ["policy_gradient", "corrected", "supervised"])
@pytest.mark.parametrize("garbage", [1e30, -1e30, math.inf, -math.inf, math.nan])
def test_where_the_policy_did_not_speak_nothing_counts(objective, garbage):
    """Neither in a value nor in a gradient, whatever stands there."""
    turn_ids = [0, 1, 0, 2, 0]
    clean = make_batch(turn_ids, [0, -1.0, 0, -2.0, 0], [0, 1.0, 0, -1.0, 0])
    dirty = make_batch(
        turn_ids,
        [garbage, -1.0, garbage, -2.0, garbage],
        [garbage, 1.0, garbage, -1.0, garbage],
    )

    def loss(logprobs, batch):
        scores = TokenScores(logprobs, jnp.full_like(logprobs, 0.5))
        sums = (
            supervised(scores, batch)
            if objective == "supervised"
            else sums_of(
                scores,
                batch,
                entropy_coefficient=0.1,
                importance_cap=2.0 if objective == "corrected" else 0.0,
            )
        )
        return sums.loss, sums

    logprobs = jnp.array([[-7.0, -0.9, -7.0, -2.5, -7.0]])
    results = [jax.grad(loss, has_aux=True)(logprobs, batch) for batch in (clean, dirty)]
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(np.stack(results[0][1]), np.stack(results[1][1]))
    np.testing.assert_array_equal(results[0][0][0, ::2], 0)


def test_supervised_is_cross_entropy_of_the_spoken_tokens():
    batch = make_batch([0, 1, 1, 0, 2], [5.0] * 5, [5.0] * 5)
    sums = supervised(make_scores([-9.0, -0.5, -1.5, -9.0, -2.0], [9, 0.1, 0.2, 9, 0.3]), batch)
    assert sums.loss == pytest.approx(4.0)
    assert sums.entropy == pytest.approx(0.6)
    assert [float(value) for value in sums[2:]] == [0, 0, 0, 0, 0, 0]


def test_sums_add_up_over_rows():
    """What micro-batches rely on: the sums of two rows are those of each, added."""
    rng = np.random.default_rng(0)
    turn_ids = rng.integers(0, 3, (2, 6))
    old, new, advantages, entropy = (rng.normal(size=(2, 6)).astype(np.float32) for _ in range(4))
    rows = [
        sums_of(
            make_scores(new[row], entropy[row]),
            make_batch(turn_ids[row], old[row], advantages[row]),
            entropy_coefficient=0.1,
        )
        for row in range(2)
    ]
    batches = [make_batch(turn_ids[row], old[row], advantages[row]) for row in range(2)]
    both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *batches)
    sums = sums_of(
        TokenScores(jnp.asarray(new), jnp.asarray(entropy)), both, entropy_coefficient=0.1
    )
    for field in ("loss", "entropy", "clipped", "kl", "mismatch", "importance", "truncated"):
        expected = getattr(rows[0], field) + getattr(rows[1], field)
        np.testing.assert_allclose(getattr(sums, field), expected, rtol=1e-5)
    assert sums.mismatch_max == max(rows[0].mismatch_max, rows[1].mismatch_max)
