# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Trajectory balance (TBA): by hand, over rows and micro-batches, and what it is refused with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.algorithms.requirements import Networks, networks_of, scored_passes
from earl_jax.algorithms.settings import TbaSettings
from earl_jax.models.config import ModelConfig
from earl_jax.models.logprobs import TokenScores
from earl_jax.placement.delivery import row_facts
from earl_jax.selector.plans import TrainPlan
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.scoring import with_estimates
from earl_jax.train.state import init_state
from earl_jax.train.step import read_metrics
from earl_jax.train.update import token_facts
from earl_jax.trajectory import TrajectoryBatch
from tests.support.placements import TINY
from tests.support.settings import make_config
from tests.support.trajectories import make_outcome
from tests.support.updates import plain_learner

TBA = ALGORITHMS["tba"]
VOCAB, ROWS, LENGTH = 32, 8, 16
MODEL = ModelConfig(**TINY)
ONE, MESH = MeshShape(), MeshShape(fsdp=2, context=2, tensor=2)


def two_rows(**changes) -> TrajectoryBatch:
    """Sequences A (two tokens) and B in the first row, C and D in the second, one of padding.

    | sequence | group | r / beta | log policy | log reference | log-ratio |
    |---|---|---|---|---|---|
    | A | 1 | 2 | -1 -2 | -1.5 -0.5 | -1 |
    | C | 1 | 0 | -1 | -2 | 1 |
    | B | 2 | 2 | -1 | -1 | 0 |
    | D | 2 | 2 | -3 | -1 | -2 |

    log Z is mean(2 + 1, 0 - 1) = 1 of group 1 and mean(2 - 0, 2 + 2) = 3 of group 2.
    """
    turn_ids = jnp.array([[0, 1, 1, 0, 1], [0, 1, 0, 1, 0]])
    real = {
        "advantages": [[9.0, 2, 2, 9, 2], [9, 0, 9, 2, 9]],
        "proximal": [[9.0, -1, -2, 9, -1], [9, -1, 9, -3, 9]],
        "reference": [[9.0, -1.5, -0.5, 9, -1], [9, -2, 9, -1, 9]],
        "logprobs": [[9.0, -5, -5, 9, -5], [9, -5, 9, -5, 9]],
    } | changes
    return TrajectoryBatch(
        tokens=turn_ids,
        segment_ids=jnp.array([[1, 1, 1, 2, 2], [1, 1, 2, 2, 0]]),
        turn_ids=turn_ids,
        versions=turn_ids,
        groups=jnp.array([[1, 1, 1, 2, 2], [1, 1, 2, 2, 0]]),
        **{name: jnp.array(values) for name, values in real.items()},
    )


def mean_loss(batch: TrajectoryBatch, logprobs: jax.Array) -> jax.Array:
    facts = token_facts(TokenScores(logprobs, jnp.zeros_like(logprobs)), batch)
    losses, _, aggregation = TBA.loss(facts, TBA.settings)
    assert aggregation is not None
    return jnp.sum(losses * aggregation.weights) / jnp.sum(aggregation.shares)


loss_and_slope = jax.jit(jax.value_and_grad(mean_loss, argnums=1))


@jax.jit
def estimated(batch: TrajectoryBatch) -> TrajectoryBatch:
    return with_estimates(batch, TBA)


def test_the_loss_and_its_gradient_by_hand():
    """Errors log Z + log-ratio - r / beta are A 1 - 1 - 2 = -2, C 2, B 3 + 0 - 2 = 1, D -1.

    The loss is (4 + 4 + 1 + 1) / 4 and its gradient, at each token of a sequence, half its error.
    """
    batch = estimated(two_rows())
    assert batch.groups is None, "the update has no use for them"
    expected = [[0, 1, 1, 0, -1], [0, -1, 0, -1, 0]]
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-6)
    policy = two_rows().proximal
    loss, slope = loss_and_slope(batch, policy)
    assert float(loss) == pytest.approx(2.5)
    np.testing.assert_allclose(slope, [[0, -1, -1, 0, 0.5], [0, 1, 0, -0.5, 0]], atol=1e-6)


def test_the_host_gives_centred_rewards_over_beta_and_numbers_of_groups():
    """Rewards 1 and 0 with beta 0.25: 4 and 0, less their mean. A failure has no tokens."""
    algorithm = dataclasses.replace(TBA, settings=TbaSettings(kl_coefficient=0.25))
    outcomes = [
        make_outcome(0, 1.0, group=40),
        make_outcome(1, 0.0, group=40),
        make_outcome(2, 0.5, group=7),
        make_outcome(3, 0.5, group=7, stop_reason="environment_error"),
    ]
    facts = row_facts(algorithm, outcomes, 16, {})
    assert facts["advantages"][:, 0].tolist() == [2, -2, 0, 0]
    assert facts["groups"].tolist() == [1, 1, 2, 2]
    assert facts["lengths"].tolist() == [9, 9, 9, 0]
    assert "groups" not in row_facts(ALGORITHMS["grpo"], outcomes, 16, {})


# On the devices.


def ragged_batch() -> TrajectoryBatch:
    """Rows of one, two or three sequences of unequal lengths, of three groups across the rows."""
    rng = np.random.default_rng(0)
    shape, positions = (ROWS, LENGTH), np.arange(LENGTH)
    segments = np.zeros(shape, np.int32)
    for row, ends in enumerate([(16,), (9, 15), (4, 7, 16), (5,)] * (ROWS // 4)):
        for number, end in enumerate(ends, 1):
            begin = (0, *ends)[number - 1]
            segments[row, begin:end] = number
    groups = np.where(segments > 0, 1 + (np.arange(ROWS)[:, None] + segments) % 3, 0)
    spoken = (segments > 0) & (positions % 3 > 0)
    return TrajectoryBatch(
        tokens=rng.integers(0, VOCAB, shape).astype(np.int32),
        segment_ids=segments,
        turn_ids=spoken.astype(np.int32),
        logprobs=-rng.random(shape, np.float32) * 4,
        versions=np.zeros(shape, np.int32),
        advantages=(rng.integers(-3, 4, (ROWS, 4))[np.arange(ROWS)[:, None], segments]).astype(
            np.float32
        ),
        groups=groups.astype(np.int32),
    )


def updated(mesh: MeshShape, micro_batches: int):
    """Loss and gradient of `ragged_batch`, with a reference of other weights."""
    config = TrainConfig(max_grad_norm=1e9, micro_batches=micro_batches)
    learner, layout = plain_learner(MODEL, config, TBA, VOCAB), make_layout(mesh)
    assert learner.networks == Networks(reference=True)
    state, other = (
        init_state(MODEL, config, VOCAB, layout, seed=seed, networks=learner.networks)
        for seed in (0, 1)
    )
    state = dataclasses.replace(state, reference=other.reference)
    plan = TrainPlan(mesh, micro_batches, "none")
    batch = jax.device_put(ragged_batch(), layout.activations("NS"))
    (scored,) = learner.score([plan], state, [batch])
    after, metrics = learner.update(plan, state, scored, np.array([1e-3, 0], np.float32))
    grads = jax.tree.map(lambda moment: np.asarray(moment) / 0.1, after.optimizer[1].mu)
    return read_metrics(metrics)["loss"], grads


@pytest.mark.slow
def test_an_update_is_the_same_on_a_mesh_and_in_parts():
    """Sequences of a group are in several rows, micro-batches and shards, and cut over devices.

    The value: test_torch_losses.py.
    """
    (loss, expected), (found, grads) = updated(ONE, 1), updated(MESH, 2)
    assert found == pytest.approx(loss, rel=1e-4)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5 * largest),
        grads,
        expected,
    )


# What it needs, and what it is refused with.


def test_both_policies_are_scored_before_the_only_update_too():
    passes = ("proximal", "reference", "advantages")
    assert scored_passes(TBA, updates=1, corrects=False) == passes
    assert scored_passes(TBA, updates=2, corrects=False, recomputes=False) == passes
    # With adapters the reference is their base.
    assert networks_of(TBA, has_base=True) == Networks()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm_args.kl_coefficient=0"], "config.algorithm_args.kl_coefficient is 0"),
        (["algorithm_args.clip_high=0.3"], "clip_high is not a field of TbaSettings"),
        (
            ["train.proximal=log_linear", "train.epochs=2", "asynchrony.max_staleness=1"],
            "config.train.proximal = 'log_linear' has no effect",
        ),
        (["train.importance_cap=5", "rollout.weight_dtype=int8"], "there is no correction here"),
    ],
)
def test_a_setting_that_a_run_cannot_use_is_an_error(overrides, words):
    given = {"algorithm": "tba", "rollout": {"group_size": 4}}
    with pytest.raises(InputError, match=words):
        make_config(given, overrides)


def test_older_weights_and_another_precision_need_no_correction():
    for overrides in (["asynchrony.max_staleness=2"], ["rollout.weight_dtype=int8"]):
        given = {"rollout": {"group_size": 4}}
        assert make_config(given | {"algorithm": "tba"}, overrides).importance_cap == 0
        assert make_config(given | {"algorithm": "grpo"}, overrides).importance_cap == 2
