# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""PPO's advantages, returns and value loss by hand; against torch: test_torch_losses.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.algorithms.algorithm import RewardFacts, TokenFacts, ValueFacts
from earl_jax.algorithms.algorithms import ALGORITHMS, ppo_loss, turn_rewards
from earl_jax.algorithms.gae import advantage_estimates, value_loss
from earl_jax.algorithms.settings import PpoSettings
from earl_jax.config.config import Config
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


def test_without_discount_and_with_lambda_1_the_return_is_the_outcome():
    """Whatever the critic says."""
    settings = dataclasses.replace(PLAIN, gamma=1.0, gae_lambda=1.0)
    found = estimate(facts_of(TURNS, {1: 0.5, 2: 1.0}, VALUES), settings)
    np.testing.assert_allclose(found.returns[0], [0, 1.5, 1.5, 0, 1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("settings", [PLAIN, TURN], ids=["token", "turn"])
def test_nothing_crosses_from_episode_to_episode_and_a_fork_is_no_end(settings):
    """A row of two episodes; the first forks between its turns (its second sample is 2)."""
    first = facts_of([0, 1, 1, 0, 2], {1: 0.5, 2: 1.0}, [0, 0.1, 0.2, 0, 0.4], [1, 1, 1, 2, 2])
    second = facts_of([0, 1], {1: -1.0}, [0, 0.7], [3, 3])
    row = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), first, second)
    whole = facts_of([0, 1, 1, 0, 2], {1: 0.5, 2: 1.0}, [0, 0.1, 0.2, 0, 0.4])
    found, alone, other = (estimate(f, settings) for f in (row, whole, second))
    for name in ("advantages", "returns"):
        expected = np.concatenate([getattr(alone, name), getattr(other, name)], axis=1)
        np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-6)


def test_a_batch_without_tokens_and_one_of_equal_advantages_give_zeros():
    empty = facts_of([0, 0, 0], {}, [1, 1, 1])
    equal = facts_of([0, 1, 0, 2], {1: 0.0, 2: 0.0}, [0, 0, 0, 0])
    for facts in (empty, equal):
        for found in estimate(facts, PpoSettings()):
            np.testing.assert_array_equal(found, np.zeros_like(found))


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


def test_a_penalty_in_the_reward_is_not_taken_twice():
    """The loss is that of the advantages as they are; only the metric is added."""
    row = jnp.array([[-1.0, -2.0]])
    facts = TokenFacts(
        mask=jnp.ones((1, 2), bool),
        sequences=jnp.ones((1, 2), jnp.int32),
        logprobs=row,
        entropy=row,
        behaviour=row,
        advantages=jnp.array([[0.5, -1.0]]),
        reference=row - 0.25,
    )
    found = ppo_loss(facts, PpoSettings(kl_coefficient=3.0, kl_estimator="k1", kl_in="reward"))
    np.testing.assert_allclose(found.losses[0], [-0.5, 1.0], rtol=1e-6)
    np.testing.assert_allclose(found.metrics["reference_kl"][0], [0.25, 0.25], rtol=1e-5)
    in_loss = ppo_loss(facts, PpoSettings(kl_coefficient=2.0, kl_estimator="k2"))
    np.testing.assert_allclose(in_loss.losses[0], [-0.4375, 1.0625], rtol=1e-5)


def test_the_rewards_of_turns_are_what_the_devices_get():
    class Episode:
        turn_rewards = (0.0, 1.0)

    (row,) = turn_rewards([Episode()], PpoSettings())  # pyright: ignore
    np.testing.assert_array_equal(row, [0.0, 1.0])
    assert ALGORITHMS["ppo"].min_group_size == 1


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


def test_a_config_of_ppo_keeps_its_settings():
    args = {"gae_level": "turn", "gae_lambda": 1.0}
    given = {"algorithm": "ppo", "algorithm_args": args, "train": {"critic": {"pretrain_steps": 3}}}
    config = make_config(given)
    assert isinstance(config, Config) and config.networks.critic and not config.networks.reference
    assert config.algorithm_args == dataclasses.replace(ALGORITHMS["ppo"].settings, **args)
    again = make_config(config.as_dict())
    assert (again.algorithm_args, again.train) == (config.algorithm_args, config.train)
