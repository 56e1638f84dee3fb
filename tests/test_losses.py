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

jitted_policy_gradient = jax.jit(policy_gradient, static_argnames=("clip_low", "clip_high"))


def make_batch(turn_ids, logprobs, advantages) -> TrajectoryBatch:
    """One row."""
    turn_ids = jnp.asarray([turn_ids], jnp.int32)
    return TrajectoryBatch(
        tokens=jnp.zeros_like(turn_ids),
        segment_ids=jnp.ones_like(turn_ids),
        turn_ids=turn_ids,
        logprobs=jnp.asarray([logprobs], jnp.float32),
        versions=jnp.zeros_like(turn_ids),
        advantages=jnp.asarray([advantages], jnp.float32),
    )


def make_scores(logprobs, entropy=None) -> TokenScores:
    logprobs = jnp.asarray([logprobs], jnp.float32)
    zeros = jnp.zeros_like(logprobs)
    return TokenScores(logprobs, zeros if entropy is None else jnp.asarray([entropy], jnp.float32))


def sums_of(scores, batch, *, clip_low=0.2, clip_high=0.3, entropy_coefficient=0.0) -> LossSums:
    return jitted_policy_gradient(
        scores,
        batch,
        clip_low=clip_low,
        clip_high=clip_high,
        entropy_coefficient=entropy_coefficient,
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
    assert [float(value) for value in sums[1:]] == [0, 0, 0, 0, 0]


def test_the_entropy_bonus_pulls_on_entropy_alone():
    batch = make_batch([1, 0, 2], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    slopes = jax.grad(
        lambda entropy: (
            sums_of(TokenScores(jnp.zeros((1, 3)), entropy), batch, entropy_coefficient=0.03).loss
        )
    )(jnp.ones((1, 3)))
    np.testing.assert_allclose(slopes, [[-0.03, 0.0, -0.03]], rtol=1e-6)


@pytest.mark.parametrize("objective", ["policy_gradient", "supervised"])
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
            else sums_of(scores, batch, entropy_coefficient=0.1)
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
    assert [float(value) for value in sums[2:]] == [0, 0, 0, 0]


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
    for field in ("loss", "entropy", "clipped", "kl", "mismatch"):
        expected = getattr(rows[0], field) + getattr(rows[1], field)
        np.testing.assert_allclose(getattr(sums, field), expected, rtol=1e-5)
    assert sums.mismatch_max == max(rows[0].mismatch_max, rows[1].mismatch_max)
