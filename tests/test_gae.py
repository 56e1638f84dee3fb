# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""PPO's advantages, returns and value loss by hand; against torch: test_torch_losses.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.algorithms.algorithm import RewardFacts, ValueFacts
from earl_jax.algorithms.gae import advantage_estimates, value_loss
from earl_jax.algorithms.settings import PpoSettings
from tests.support.settings import make_config

PLAIN = PpoSettings(gamma=0.9, gae_lambda=0.5, normalize_advantages=False)
TURN = dataclasses.replace(PLAIN, gae_level="turn")
estimate = jax.jit(advantage_estimates, static_argnums=1)


def facts_of(turns, rewards, values, sequences=None, **fields) -> RewardFacts:
    """One row; `rewards` by turn, as every token of the turn has it."""
    turns = np.array([turns], np.int32)
    by_token = np.array([[rewards.get(turn, 0.0) for turn in turns[0]]], np.float32)
    sequences = np.ones_like(turns) if sequences is None else np.array([sequences], np.int32)
    mask = turns > 0
    return RewardFacts(
        mask=mask,
        sequences=sequences,
        turns=turns,
        rewards=by_token,
        values=np.where(mask, np.array([values], np.float32), 0),
        old=np.zeros_like(by_token),
        **fields,
    )


# Prompt, reply of two tokens, answer, reply of two: rewards 0.5 and 1.
TURNS = [0, 1, 1, 0, 2, 2]
VALUES = [9, 0.1, 0.2, 9, 0.4, 0.3]


def test_token_level_by_hand():
    """The answer between the turns is no step, and a reward is at its turn's last token."""
    found = estimate(facts_of(TURNS, {1: 0.5, 2: 1.0}, VALUES), PLAIN)
    last = 1.0 - 0.3
    third = 0.9 * 0.3 - 0.4 + 0.45 * last
    second = 0.5 + 0.9 * 0.4 - 0.2 + 0.45 * third
    first = 0.9 * 0.2 - 0.1 + 0.45 * second
    expected = np.array([0, first, second, 0, third, last])
    np.testing.assert_allclose(found.advantages[0], expected, rtol=1e-6)
    np.testing.assert_allclose(
        found.returns[0], [0, first + 0.1, second + 0.2, 0, third + 0.4, last + 0.3], rtol=1e-6
    )


def test_turn_level_by_hand():
    """A step is a turn, of the value at its first token; all of its tokens share what it gets."""
    found = estimate(facts_of(TURNS, {1: 0.5, 2: 1.0}, VALUES), TURN)
    second = 1.0 - 0.4
    first = 0.5 + 0.9 * 0.4 - 0.1 + 0.45 * second
    np.testing.assert_allclose(found.advantages[0], [0, first, first, 0, second, second], rtol=1e-6)
    returns = [0, first + 0.1, first + 0.1, 0, 1.0, 1.0]
    np.testing.assert_allclose(found.returns[0], returns, rtol=1e-6)


# The loss of values.


def test_value_loss_and_its_gradient_by_hand():
    """Old value 1, clip 0.2: at return 2 a value of 1.5 is clipped to 1.2, whose error is larger.

    At return 0 the clipped value is the better one, and at 1.1 nothing is clipped.
    """
    given = {"mask": jnp.ones((1, 3), bool), "old": jnp.ones((1, 3))}
    returns, values = jnp.array([[2.0, 0.0, 1.4]]), jnp.array([[1.5, 1.5, 1.1]])

    def loss(values, settings):
        facts = ValueFacts(values=values, returns=returns, **given)
        return value_loss(facts, settings)

    found = loss(values, PpoSettings(value_clip=0.2))
    np.testing.assert_allclose(found.losses[0], [0.32, 1.125, 0.045], rtol=1e-5)
    np.testing.assert_array_equal(found.metrics["value_clip_fraction"][0], [1, 0, 0])
    slope = jax.grad(lambda v: loss(v, PpoSettings(value_clip=0.2)).losses.sum())(values)
    np.testing.assert_allclose(slope[0], [0, 1.5, -0.3], rtol=1e-5)
    free = loss(values, PpoSettings(value_clip=0.0))
    np.testing.assert_allclose(free.losses[0], [0.125, 1.125, 0.045], rtol=1e-5)
    assert free.metrics == {}


# The policy's part, and the settings.


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm_args.gamma=1.5"], "gamma is 1.5; it must be at least 0.0 and at most 1.0"),
        (["algorithm_args.gae_level=episode"], "choose one of 'token', 'turn'"),
        (["algorithm_args.value_clip=0.5"], "because config.train.epochs is 1"),
        (["train.critic.learning_rate=-1.0"], "config.train.critic.learning_rate is -1.0"),
        (["algorithm=grpo", "rollout.group_size=4", "train.critic.pretrain_steps=2"], "no critic"),
    ],
)
def test_settings_that_cannot_be(overrides, words):
    with pytest.raises(ValueError, match=words):
        make_config({"algorithm": "ppo", "algorithm_args": {}}, overrides)
