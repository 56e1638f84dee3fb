# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Values that other libraries publish, as what their own tests expect, are those of our functions.

Tunix (github.com/google/tunix): tests/rl/grpo/grpo_helpers_test.py at 0078b10, common_test.py at
00b3afe, and algo_core_test.py at 035dbdb. TRL (github.com/huggingface/trl) 0.12 to 0.20:
tests/test_rloo_trainer.py. TRL's tests of GRPO publish none for what is computed here: they are of
masks by entropy, of SAPO, and of runs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.algorithms.advantages import group_relative, leave_one_out
from earl_jax.algorithms.algorithm import TokenFacts
from earl_jax.algorithms.algorithms import ALGORITHMS, clipped_loss, gspo_loss
from earl_jax.algorithms.losses import policy_kl
from earl_jax.algorithms.sequences import aggregate
from earl_jax.algorithms.settings import GrpoSettings


@pytest.fixture(autouse=True)
def setting_of_tunix():
    """The bits that it draws are those of this setting of JAX."""
    with jax.threefry_partitionable(False):
        yield


def uniform(key: jax.Array, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(jax.random.uniform(key, shape))


@pytest.mark.parametrize(
    ("normalize", "published", "tolerance"),
    [
        # Divided by the deviation of a sample and 1e-6.
        (True, [0.307498, -1.117636, 0.810138, 1.094526, -0.228671, -0.865855], 1e-3),
        (False, [0.10245, -0.372365, 0.269915, 0.246179, -0.051432, -0.194747], 1e-5),
    ],
)
def test_tunix_s_advantages_of_grpo(normalize, published, tolerance):
    rewards = [(reward,) for reward in uniform(jax.random.PRNGKey(0), (1, 6))[0].tolist()]
    rows = group_relative(rewards, [0, 0, 0, 1, 1, 1], normalize=normalize, of_sample=True)
    np.testing.assert_allclose(np.concatenate(rows), published, rtol=tolerance, atol=tolerance)


def test_tunix_s_advantages_of_rloo():
    rows = leave_one_out([(1,), (2,), (3,), (4,), (5,), (6,)], [0, 0, 0, 1, 1, 1])
    assert np.concatenate(rows).tolist() == [-1.5, 0, 1.5, -1.5, 0, 1.5]


def test_trl_s_advantages_of_rloo():
    """Four answers to each of three prompts, prompt by prompt within an answer."""
    rewards = [1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    rows = leave_one_out([(reward,) for reward in rewards], [0, 1, 2] * 4)
    assert rows[0][0] == pytest.approx(1 - (2 + 5 + 8) / 3, abs=1e-6)
    assert rows[7][0] == pytest.approx(6 - (3 + 2 + 9) / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "published"),
    [
        (
            "k1",
            [0.38486493, 0.7469206, 0.3495195, 0.5621129]
            + [-0.4474684, -0.13095665, 0.46064317, -0.19887352]
            + [0.43108296, 0.53564644, -0.25296474, 0.44137287]
            + [-0.06834459, -0.12115264, -0.61533415, 0.15468943],
        ),
        (
            "k2",
            [0.07406051, 0.27894518, 0.06108194, 0.15798548]
            + [0.10011399, 0.00857482, 0.10609607, 0.01977534]
            + [0.09291626, 0.14345856, 0.03199558, 0.09740501]
            + [0.00233549, 0.00733898, 0.18931806, 0.01196441],
        ),
        (
            "k3",
            [0.0654075, 0.220744, 0.0545462, 0.1321163, 0.1168784, 0.0089617, 0.0915209]
            + [0.0211542, 0.080888, 0.1209372, 0.0348731, 0.0845257, 0.0023897, 0.0076445]
            + [0.2349406, 0.0113707],
        ),
    ],
)
def test_tunix_s_estimates_of_the_kl_divergence(estimator, published):
    first, second = jax.random.split(jax.random.PRNGKey(0))
    policy, reference = uniform(first, (2, 2, 4)), uniform(second, (2, 2, 4))
    found = policy_kl(jnp.asarray(policy), jnp.asarray(reference), estimator)
    np.testing.assert_allclose(found.ravel(), published, atol=1e-5)


def facts_of(lengths: tuple[int, ...], advantages: list[float]) -> TokenFacts:
    """A row of sequences of these lengths, whose policy is that which sampled it."""
    sequences = np.repeat(np.arange(1, len(lengths) + 1), lengths)[None]
    row = jnp.zeros(sequences.shape, jnp.float32)
    return TokenFacts(
        mask=jnp.ones(sequences.shape, bool),
        sequences=jnp.asarray(sequences, jnp.int32),
        logprobs=row,
        behaviour=row,
        entropy=row,
        advantages=jnp.asarray([advantages], jnp.float32),
    )


@pytest.mark.parametrize(
    ("aggregation", "divisor", "published"),
    [
        # "token-mean", "sequence-mean-token-mean", "sequence-mean-token-scale" by the width of
        # the rows.
        ("token", 1, (0.1 + 0.2 + 0.4 + 0.5 + 0.6) / 5),
        ("sequence", 1, ((0.1 + 0.2) / 2 + (0.4 + 0.5 + 0.6) / 3) / 2),
        ("constant", 3, ((0.1 + 0.2) / 3 + (0.4 + 0.5 + 0.6) / 3) / 2),
    ],
)
def test_tunix_s_means_of_the_losses_of_tokens(aggregation, divisor, published):
    losses = jnp.asarray([[0.1, 0.2, 0.4, 0.5, 0.6]])
    facts = facts_of((2, 3), [0.0] * 5)
    weighted = aggregate(facts, aggregation, divisor)
    mean = losses.mean() if weighted is None else (losses * weighted.weights).sum() / 2
    assert float(mean) == pytest.approx(published, rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "settings"), [(clipped_loss, GrpoSettings()), (gspo_loss, ALGORITHMS["gspo"].settings)]
)
def test_tunix_s_losses_of_grpo_and_gspo_where_nothing_has_changed_yet(loss, settings):
    """Three tokens of advantage 1.5 and one of 3, packed: (-1.5 - 3) / 2."""
    facts = facts_of((3, 1), [1.5, 1.5, 1.5, 3.0])
    losses = loss(facts, settings)[0]
    weights = aggregate(facts, "sequence", 1).weights
    assert float((losses * weights).sum() / 2) == pytest.approx(-2.25, rel=1e-4)
