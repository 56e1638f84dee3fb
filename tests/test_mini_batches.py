# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Mini-batches: a step's groups are dealt out to several updates."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from earl_jax.algorithms.algorithm import RewardFacts
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.algorithms.gae import advantage_estimates
from earl_jax.loop import rl_step
from earl_jax.placement.delivery import deal_groups
from earl_jax.run.build import build_run
from earl_jax.run.step_record import of_epoch
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.train.learner import Learner
from earl_jax.train.scoring import make_estimator
from earl_jax.train.step import read_metrics
from earl_jax.trajectory import TrajectoryBatch
from tests.support.placements import TINY, begin
from tests.support.settings import make_config

SETTINGS = {
    "num_steps": 3,
    "model": TINY,
    # Games that end otherwise than by a first move that is not allowed.
    "env": {"args": {"mask_illegal": True}},
    "rollout": {
        "num_slots": 8,
        "episodes_per_step": 16,
        "group_size": 2,
        "patience_s": 10.0,
        "context_buckets": (64,),
    },
    "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",), "table": "model"},
    "algorithm": "grpo",
    "algorithm_args": {},
    "train": {"epochs": 2, "mini_batches": 2, "ratio": "model", "correction": "truncated"},
}


def test_every_episode_is_in_one_part_with_its_group():
    """Three parts get 4 each of 13 groups of 2, one of which has no tokens."""
    groups = [index // 2 for index in range(26)]
    lengths = np.arange(1, 27, dtype=np.int32)
    lengths[[6, 7]] = 0
    # An episode that failed leaves its group a part of it.
    lengths[10] = 0
    parts = deal_groups(groups, lengths, 3, np.random.default_rng([5, 1]))
    np.testing.assert_array_equal(sum(parts), lengths)
    assert all(((part == lengths) | (part == 0)).all() for part in parts)
    members = [{groups[i] for i in np.flatnonzero(part)} for part in parts]
    assert [len(each) for each in members] == [4, 4, 4]
    assert len(set.union(*members)) == 12
    again, other = (
        deal_groups(groups, lengths, 3, np.random.default_rng(seed)) for seed in ([5, 1], [5, 2])
    )
    np.testing.assert_array_equal(again, parts)
    assert not np.array_equal(other, parts)


def test_few_groups_make_few_parts_and_none_makes_one():
    lengths, rng = np.array([3, 4, 0, 0], np.int32), np.random.default_rng(0)
    (alone,) = deal_groups([0, 0, 1, 1], lengths, 2, rng)
    np.testing.assert_array_equal(alone, lengths)
    (empty,) = deal_groups([0, 0, 1, 1], 0 * lengths, 2, rng)
    assert not empty.any()
    assert len(deal_groups([0, 1, 2, 3], lengths + 1, 8, rng)) == 4


def test_metrics_of_an_epoch_are_those_of_its_tokens():
    one = {"loss": 1.0, "gap_max": 3.0, "policy_tokens": 10.0}
    other = {"loss": 4.0, "gap_max": 5.0, "policy_tokens": 20.0}
    assert of_epoch([one]) == one
    assert of_epoch([one, other]) == {"loss": 3.0, "gap_max": 5.0, "policy_tokens": 30.0}
    none = {"loss": 0.0, "gap_max": 0.0, "policy_tokens": 0.0}
    assert of_epoch([one, none]) == one and of_epoch([none, none]) == none


def scored_rows(turn_ids, rewards, values=0.0) -> TrajectoryBatch:
    """A part whose tokens have the rewards of their turns, as a critic scored it."""
    turn_ids = np.array(turn_ids, np.int32)
    fields = (np.broadcast_to(np.float32(each), turn_ids.shape) for each in (rewards, values))
    rewards, values = fields
    return TrajectoryBatch(
        tokens=np.zeros_like(turn_ids),
        segment_ids=np.ones_like(turn_ids),
        turn_ids=turn_ids,
        logprobs=np.zeros(turn_ids.shape, np.float32),
        versions=np.zeros_like(turn_ids),
        advantages=rewards,
        values=values,
    )


@pytest.mark.parametrize(
    ("name", "settings"), [("ppo", {"gamma": 1.0, "gae_lambda": 1.0}), ("reinforce_plus_plus", {})]
)
@pytest.mark.parametrize("mesh", [MeshShape(), MeshShape(data=2, context=4)], ids=str)
def test_advantages_are_normalised_over_all_parts_of_a_step(name, settings, mesh):
    """Outcomes 3, 3 and -1, of replies of 2, 1 and 3 tokens; the mean over tokens is 1.

    The deviation is 2, so that advantages are 1 and -1. Over each part by itself they would be 0.
    As one part of the same rows they are the same.
    """
    algorithm, layout = ALGORITHMS[name], make_layout(mesh)
    settings = dataclasses.replace(algorithm.settings, **settings)
    algorithm = dataclasses.replace(algorithm, settings=settings)
    short = scored_rows([[0, 1, 1, 0], [1, 0, 0, 0]], 3.0)
    long = scored_rows([[0, 0, 1, 1, 1, 0, 0, 0], [0] * 8], -1.0)
    estimate, place = make_estimator(algorithm, layout), layout.activations("NS")
    found = estimate(jax.device_put((short, long), place))
    for part, other, advantage in zip(found, (short, long), (1, -1), strict=True):
        mask = other.turn_ids > 0
        np.testing.assert_allclose(part.advantages, np.where(mask, advantage, 0), rtol=1e-6)
        assert part.advantages.sharding == place
        if name == "ppo":
            np.testing.assert_allclose(part.returns, np.where(mask, other.advantages, 0))
    pad = ((0, 0), (0, 4))
    one = jax.tree.map(lambda a, b: np.concatenate([np.pad(a, pad), b]), short, long)
    (whole,) = estimate((jax.device_put(one, place),))
    np.testing.assert_allclose(whole.advantages[:2, :4], found[0].advantages, rtol=1e-6)
    np.testing.assert_allclose(whole.advantages[2:], found[1].advantages, rtol=1e-6)


def test_a_step_of_one_part_has_the_bits_of_its_algorithms_own_estimate():
    rng, algorithm = np.random.default_rng(0), ALGORITHMS["ppo"]
    rewards, values = rng.normal(size=(2, 4, 16)).astype(np.float32)
    batch = scored_rows(rng.integers(0, 2, (4, 16)), rewards, values)
    (found,) = make_estimator(algorithm, make_layout(MeshShape()))((batch,))
    mask = batch.turn_ids > 0
    facts = RewardFacts(
        mask=mask,
        sequences=batch.segment_ids,
        turns=batch.turn_ids,
        rewards=np.where(mask, rewards, 0),
        values=np.where(mask, values, 0),
        old=np.where(mask, batch.logprobs, 0),
    )
    settings = algorithm.settings
    expected = jax.jit(lambda facts: advantage_estimates(facts, settings))(facts)
    np.testing.assert_array_equal(found.advantages, expected.advantages)
    np.testing.assert_array_equal(found.returns, expected.returns)


def sampled(batch) -> collections.Counter:
    """The log-probs of the policy's tokens of a batch, which few tokens have in common."""
    mask = np.asarray(batch.turn_ids) > 0
    return collections.Counter(np.asarray(batch.logprobs)[mask].tolist())


@pytest.mark.slow
def test_updates_of_mini_batches_are_those_made_by_hand(monkeypatch):
    """Two epochs of two updates, from log-probs of the policy that the step began with.

    Each epoch has every token once, and the parameters are bit for bit those of four updates of
    these batches one after the other.
    """
    run = build_run(make_config(SETTINGS))
    placement, position = begin(run)
    first = jax.tree.map(np.array, position.state)
    plans, batches = [], []
    update, learner = Learner.update, run.learner

    def noted(self, plan, state, batch, controls, **kind):
        plans.append(plan)
        batches.append(batch)
        return update(self, plan, state, batch, controls, **kind)

    monkeypatch.setattr(Learner, "update", noted)
    after, record = rl_step(run, placement, position)
    monkeypatch.undo()
    tokens = [sampled(batch) for batch in batches]
    assert len(batches) == len(record.updates) == 4 and all(tokens)
    whole = collections.Counter(
        np.float32(logprob).item()
        for trajectory in record.trajectories
        for turn in trajectory.turns
        for logprob in turn.model_logprobs
    )
    assert tokens[0] + tokens[1] == tokens[2] + tokens[3] == whole
    assert tokens[0] != tokens[1] and tokens[0] in (tokens[2], tokens[3])
    controls = learner.controls(0, run.config.num_steps)
    state = jax.device_put(first, learner.state_shardings(placement.train.mesh))
    metrics = []
    for plan, batch in zip(plans, batches, strict=True):
        (own,) = learner.score([plan], first_state(learner, first, plan), [batch])
        np.testing.assert_array_equal(own.proximal, batch.proximal)
        state, found = learner.update(plan, state, batch, controls)
        metrics.append(read_metrics(found))
    assert metrics == record.updates
    for one, other in zip(
        jax.tree.leaves(after.state.params), jax.tree.leaves(state.params), strict=True
    ):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    line = record.metrics()
    assert line["policy_tokens"] == whole.total()
    assert line["train_tokens"] == 2 * sum(outcome.num_tokens for outcome in record.outcomes)
    assert line["loss"] == pytest.approx(of_epoch(metrics[2:])["loss"])


def first_state(learner, first, plan):
    return jax.device_put(first, learner.state_shardings(plan.mesh))


def test_with_mini_batches_the_clip_has_an_effect():
    """So it has with more epochs; of a single update it would be an error."""
    overrides = ("train.epochs=1", "algorithm_args.clip_high=0.3")
    assert make_config(SETTINGS, overrides).algorithm_args.clip_high == 0.3
    with pytest.raises(InputError, match="config.train.mini_batches"):
        make_config(SETTINGS, (*overrides, "train.mini_batches=1"))
