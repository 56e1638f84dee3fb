# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The seam of algorithms: entries, a user's own, what they need, and a second network."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.algorithms.advantages import group_relative
from earl_jax.algorithms.algorithm import Algorithm, TokenFacts, TokenLosses
from earl_jax.algorithms.algorithms import ALGORITHMS, clipped_loss, grpo_advantages, no_advantages
from earl_jax.algorithms.losses import kl_estimate, likelihood_ratio
from earl_jax.algorithms.settings import GrpoSettings
from earl_jax.loop import rl_step
from earl_jax.models.config import ModelConfig
from earl_jax.models.lora_config import LoraConfig
from earl_jax.placement.delivery import row_facts
from earl_jax.run.build import build_run
from earl_jax.selector.plans import TrainPlan
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.learner import Learner
from earl_jax.train.scoring import score_batch
from earl_jax.train.state import init_state
from earl_jax.train.step import read_metrics
from earl_jax.train.update import Totals, Update, add_totals
from earl_jax.trajectory import TrajectoryBatch
from tests.support.batches import make_turns
from tests.support.placements import TINY, begin
from tests.support.settings import make_config
from tests.support.trajectories import make_outcome
from tests.support.updates import plain_learner

VOCAB, ROWS, LENGTH = 32, 8, 16
MODEL = ModelConfig(**TINY)
ONE, CUBE = MeshShape(), MeshShape(data=2, fsdp=2, tensor=2)
CONTROLS = np.array([1e-3, 0.02], np.float32)


def make_batch(rows: int = ROWS) -> TrajectoryBatch:
    """On the host."""
    return jax.tree.map(lambda field: field[:rows], make_turns(VOCAB, ROWS, LENGTH))


@functools.cache
def make_learner(algorithm: Algorithm, **train) -> Learner:
    """A learner of which tests share the programs; none changes it."""
    return plain_learner(MODEL, TrainConfig(max_grad_norm=1e9, **train), algorithm, VOCAB)


def updated(learner: Learner, batch: TrajectoryBatch, mesh: MeshShape = ONE, parts: int = 1):
    """Gradients, read from Adam's first moment, and metrics of the first update."""
    plan, layout = TrainPlan(mesh, parts, "none"), make_layout(mesh)
    state = init_state(MODEL, learner.config, VOCAB, layout, seed=0)
    batch = jax.device_put(batch, layout.activations("NS"))
    (batch,) = learner.score([plan], state, [batch])
    state, metrics = learner.update(plan, state, batch, CONTROLS)
    grads = jax.tree.map(lambda m: np.asarray(m) / 0.1, state.optimizer[1].mu)
    return grads, read_metrics(metrics)


@jax.jit
def own_scores(params, batch: TrajectoryBatch):
    """Log-probs and entropies of a batch, on one device."""
    return score_batch(MODEL, TrainConfig(), make_layout(ONE), 1.0, params, batch)


def assert_same(found, expected, **tolerances) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerances), found, expected)


# A user's own, in a module of the user's.


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnSettings:
    """Settings of OWN."""

    penalty: float = 0.1
    normalize: bool = False

    def validate(self, path: str) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        if self.penalty < 0:
            raise ValueError(f"{path}.penalty is {self.penalty}; it must be at least 0")


def own_advantages(episodes, settings: OwnSettings):
    return group_relative(
        [episode.turn_rewards for episode in episodes],
        [episode.group for episode in episodes],
        normalize=settings.normalize,
    )


def own_loss(facts: TokenFacts, settings: OwnSettings) -> TokenLosses:
    """An unclipped ratio with a penalty on the way from the policy that the step began with."""
    assert facts.proximal is not None
    distance = kl_estimate(facts.logprobs, facts.proximal)
    ratio = likelihood_ratio(facts.logprobs, facts.behaviour)
    return TokenLosses(
        losses=settings.penalty * distance - ratio * facts.advantages,
        metrics={"distance": distance, "distance_max": distance},
    )


OWN = Algorithm(
    settings=OwnSettings(),
    advantages=own_advantages,
    loss=own_loss,
    needs=frozenset({"proximal"}),
    keep_group=lambda group, settings: len({episode.reward for episode in group}) > 1,
    min_group_size=2,
)
RUN = {
    "num_steps": 2,
    "model": {"width": 32, "ffn_size": 64},
    # Games that end otherwise than by a first move that is not allowed.
    "env": {"args": {"mask_illegal": True}},
    "rollout": {"num_slots": 8, "episodes_per_step": 16, "group_size": 4},
    "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",), "table": "model"},
    "train": {"epochs": 2, "ratio": "model"},
    "algorithm": f"{__name__}:OWN",
    "algorithm_args": {"penalty": 0.5},
}


@pytest.mark.slow
def test_an_algorithm_of_ones_own_trains_by_its_name_alone():
    """Two steps; its settings come from the config, its metrics are in the record."""
    config = make_config(json.loads(json.dumps(RUN)))
    assert config.as_dict()["algorithm_args"] == {"penalty": 0.5, "normalize": False}
    saved = make_config(json.loads(json.dumps(config.as_dict())))
    assert saved.algorithm_args == config.algorithm_args and saved.as_dict() == config.as_dict()
    run = build_run(config)
    assert run.learner.algorithm.settings == OwnSettings(penalty=0.5)
    placement, position = begin(run)
    first = jax.tree.map(np.array, position.state.params)
    for step in range(2):
        position, record = rl_step(run, placement, position)
        before, after = record.updates
        # The first update of a batch starts at the proximal policy; the second is away from it.
        assert before["distance_max"] < 1e-9 < after["distance"] < after["distance_max"]
        outcomes, line = record.outcomes, record.metrics()
        counts = row_facts(run.learner.algorithm, outcomes, 64, {})["lengths"] > 0
        kept = [
            len({o.reward for o in outcomes if o.group == outcome.group}) > 1
            for outcome in outcomes
        ]
        assert counts.tolist() == kept and position.step == step + 1
        sampled = np.dot(kept, [outcome.num_policy_tokens for outcome in outcomes])
        assert before["policy_tokens"] == sum(line["staleness_tokens"]) == sampled > 0
        assert line["equal_groups"] == line["dropped_groups"] == 1 - np.mean(kept)
        assert line["train_tokens"] == 2 * np.dot(kept, [o.num_tokens for o in outcomes])
    changed = jax.tree.map(lambda a, b: (a != np.asarray(b)).any(), first, position.state.params)
    assert any(jax.tree.leaves(changed))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm_args.penalti=1"], "penalti is not a field of OwnSettings; did you mean 'pen"),
        (["algorithm_args.penalty=-1"], "config.algorithm_args.penalty is -1.0; it must be at"),
        (["algorithm_args.penalty=much"], "config.algorithm_args.penalty is 'much', a str"),
        (["rollout.group_size=1"], "set config.rollout.group_size to 2 or more"),
    ],
)
def test_settings_of_ones_own_are_as_strict_as_ours(overrides, words):
    with pytest.raises(ValueError, match=words):
        make_config(RUN, overrides)


def test_an_override_of_the_algorithm_leaves_out_the_settings_of_the_other():
    overrides = ["algorithm=grpo", "algorithm_args.clip_high=0.3"]
    assert make_config(RUN, overrides).algorithm_args == GrpoSettings(
        clip_high=0.3, aggregation="sequence"
    )


# An entry.


def test_an_algorithm_of_existing_parts_is_one_entry(monkeypatch):
    """Dr. GRPO: GRPO's parts with another default, from the config to an update."""
    entry = Algorithm(
        settings=GrpoSettings(normalize_advantages=False),
        advantages=grpo_advantages,
        loss=clipped_loss,
        min_group_size=2,
    )
    monkeypatch.setitem(ALGORITHMS, "plain_grpo", entry)
    overrides = ["algorithm=plain_grpo", "algorithm_args.clip_high=0.3", "train.epochs=2"]
    config = make_config({}, [*overrides, "rollout.group_size=2"])
    expected = GrpoSettings(normalize_advantages=False, clip_high=0.3)
    assert config.as_dict()["algorithm_args"] == dataclasses.asdict(expected)
    _, metrics = updated(make_learner(config.make_algorithm()), make_batch())
    assert metrics["clip_fraction"] > 0 and metrics["grad_norm"] > 0


# What a loss adds.


def squared_loss(facts: TokenFacts, settings: object) -> TokenLosses:
    """A loss of one file: a quadratic pull of log-probs to -1."""
    gap = facts.logprobs + 1.0
    return TokenLosses(losses=0.5 * gap**2, metrics={"gap": gap, "gap_max": gap})


SQUARED = Algorithm(advantages=no_advantages, loss=squared_loss)


def test_a_new_loss_is_minimised_and_its_metrics_are_means_and_maxima():
    """Against JAX's gradient of the same mean over `score_batch`; sharded as unsharded."""
    learner, batch = make_learner(SQUARED), make_batch()
    params = init_state(MODEL, learner.config, VOCAB, make_layout(ONE), seed=0).params
    mask = batch.turn_ids > 0

    def reference(params):
        scores = score_batch(MODEL, learner.config, make_layout(ONE), 1.0, params, batch)
        gap = scores.logprobs + 1.0
        losses = 0.5 * gap**2 - 0.02 * scores.entropy
        return jnp.sum(jnp.where(mask, losses, 0)) / mask.sum(), gap[mask]

    (loss, gap), expected = jax.jit(jax.value_and_grad(reference, has_aux=True))(params)
    grads, metrics = updated(learner, batch, CUBE)
    assert_same(grads, expected, rtol=1e-3, atol=1e-6)
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["gap"] == pytest.approx(float(gap.mean()), rel=1e-5)
    assert metrics["gap_max"] == pytest.approx(float(gap.max()), rel=1e-5)
    assert metrics["policy_tokens"] == mask.sum()


def ragged_batch() -> TrajectoryBatch:
    """As `make_batch`, but rows end after 16, 9, 4 or 2 tokens, and the longest forks at 8."""
    ends = np.array([16, 9, 4, 2] * (ROWS // 4))[:, None]
    positions, batch = np.arange(LENGTH), make_batch()
    segments = np.where(positions < ends, 1 + ((positions >= 8) & (ends == 16)), 0)
    return batch.replace(
        segment_ids=segments.astype(np.int32),
        turn_ids=np.where(positions < ends, batch.turn_ids, 0).astype(np.int32),
    )


CUT = MeshShape(data=2, context=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "aggregation", "mesh"), [("gspo", "sequence", CUT), ("grpo", "constant", CUBE)]
)
def test_means_over_sequences_are_the_same_on_a_mesh_and_in_parts(name, aggregation, mesh):
    """Their values: test_torch_losses.py."""
    settings = dataclasses.replace(
        ALGORITHMS[name].settings, aggregation=aggregation, aggregation_tokens=50
    )
    learner = make_learner(dataclasses.replace(ALGORITHMS[name], settings=settings))
    expected, metrics = updated(learner, ragged_batch())
    grads, found = updated(learner, ragged_batch(), mesh, 2)
    assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert_same(grads, expected, rtol=2e-3, atol=1e-6)


def test_a_batch_without_tokens_changes_nothing_with_any_aggregation():
    """Over tokens: test_train.py."""
    empty = ragged_batch().replace(turn_ids=np.zeros((ROWS, LENGTH), np.int32))
    for aggregation in ("sequence", "constant"):
        settings = GrpoSettings(aggregation=aggregation)
        learner = make_learner(dataclasses.replace(ALGORITHMS["grpo"], settings=settings))
        grads, metrics = updated(learner, empty)
        assert not any(leaf.any() for leaf in jax.tree.leaves(grads))
        assert metrics["skipped_updates"] == metrics["loss"] == 0


def test_the_learning_rate_is_scaled_by_the_effective_sample_size():
    """Four tokens have ratios 1, 1 in one part and 1, 3 in another: 6^2 / 12 / 4 = 3/4.

    The first step of Adam is one of the learning rate against the gradient's sign.
    """
    state = init_state(MODEL, TrainConfig(), VOCAB, make_layout(ONE), seed=0)
    grads = (jax.tree.map(lambda leaf: jnp.full_like(leaf, -2.0), state.params),)

    def totals(ratios: float, squares: float) -> Totals:
        sums = {"loss": 1.0, "divisor": 2.0, "ratio": ratios, "ratio_squared": squares}
        return Totals(grads, jax.tree.map(jnp.float32, sums), None, jnp.int32(2))

    both = add_totals(totals(2, 2), totals(4, 10))
    for scaling, expected in (("none", 1.0), ("linear", 0.75), ("sqrt", 0.75**0.5)):
        update = Update(
            MODEL,
            TrainConfig(max_grad_norm=1e9, ess_scaling=scaling),
            make_layout(ONE),
            vocab_size=VOCAB,
            temperature=1.0,
            algorithm=ALGORITHMS["grpo"],
        )
        after, metrics = jax.jit(update.apply)(state, both, CONTROLS)
        assert float(metrics["effective_sample_size"]) == pytest.approx(0.75)
        for new, old in zip(*map(jax.tree.leaves, (after.params, state.params)), strict=True):
            np.testing.assert_allclose(new - old, 1e-3 * expected, atol=1e-6)


def test_maxima_of_micro_batches_are_those_of_the_batch_below_zero_too():
    """Every gap is negative: a maximum that began at 0 would be 0."""
    whole, parts = (
        updated_in_parts(number, Algorithm(advantages=no_advantages, loss=below_zero))
        for number in (1, 4)
    )
    assert whole["low_max"] < 0
    assert parts == pytest.approx(whole, rel=1e-5, abs=1e-7)


def below_zero(facts: TokenFacts, settings: object) -> TokenLosses:
    return TokenLosses(losses=-facts.logprobs, metrics={"low_max": facts.logprobs - 1.0})


def updated_in_parts(number: int, algorithm: Algorithm) -> dict[str, float]:
    learner, plan = make_learner(algorithm), TrainPlan(ONE, number, "none")
    state = init_state(MODEL, learner.config, VOCAB, make_layout(ONE), seed=0)
    return read_metrics(learner.update(plan, state, make_batch(), CONTROLS)[1])


def test_rows_that_do_not_count_are_no_part_of_an_update():
    """An episode that its environment failed is a row of padding: no entropy, no denominator."""
    learner, few = make_learner(ALGORITHMS["reinforce"]), make_batch(4)
    padded = jax.tree.map(lambda field: np.concatenate([field, 0 * field]), few)
    (grads, metrics), (expected, alone) = updated(learner, padded), updated(learner, few)
    assert metrics == pytest.approx(alone, rel=1e-5, abs=1e-7)
    assert_same(grads, expected, rtol=1e-4, atol=1e-7)


def test_a_failed_episode_has_no_tokens_for_the_trainer():
    world = build_run(make_config({**RUN, "algorithm": "grpo", "algorithm_args": {}}))
    rewards, reasons = (1.0, 0.0, 5.0, 1.0), ("win", "loss", "environment_error", "win")
    outcomes = [
        make_outcome(episode, reward, stop_reason=reason)
        for episode, (reward, reason) in enumerate(zip(rewards, reasons, strict=True))
    ]
    facts = row_facts(world.learner.algorithm, outcomes, 32, {})
    assert facts["lengths"].tolist() == [9, 9, 0, 9]
    # Mean 2/3 of 1, 0, 1 and deviation sqrt(2) / 3.
    np.testing.assert_allclose(facts["advantages"][:, 0], [0.5**0.5, -(2**0.5), 0, 0.5**0.5])


# Runs with a copy of the first weights, with adapters on their base, and with neither.

SMALL_RUN = {
    **RUN,
    "train": {"epochs": 2, "ratio": "model", "micro_batches": 2},
    "algorithm_args": {},
}
# The settings of the algorithm, beside its defaults, and of training. Every algorithm's values and
# gradients are in test_torch_losses.py, runs of PPO and distillation in test_runs_ppo.py and
# test_streams.py.
VARIANTS = {
    "spiral": ({}, {"correction": "truncated_sequence"}),
    "grpo": ({"dual_clip": 3.0, "kl_coefficient": 0.1}, {"lora": {"rank": 2}}),
    "tba": ({"kl_coefficient": 0.5}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_of_an_algorithm(name):
    """Steps of games: the weights move, finitely, and the metrics of the setting are there."""
    settings, train = VARIANTS[name]
    given = {**SMALL_RUN, "algorithm": name, "algorithm_args": settings}
    run = build_run(make_config({**given, "train": SMALL_RUN["train"] | train}))
    placement, position = begin(run)
    first = jax.tree.map(np.array, position.state.params)
    # Without averages of a step before, the first one's are 0.
    for _ in range(2 if name == "spiral" else 1):
        averages = position.averages
        position, record = rl_step(run, placement, position)
        line = record.metrics()
        if name == "spiral":
            # Relative to the averages before the step; ratios of a first update are 1.
            gains = [o.reward - averages.get(o.role, 0.0) for o in record.outcomes]
            tokens = [o.num_policy_tokens for o in record.outcomes]
            found = record.updates[0]
            loss = found["loss"] + line["entropy_coefficient"] * found["entropy"]
            assert loss == pytest.approx(-np.average(gains, weights=tokens), rel=1e-3, abs=1e-4)
        assert line["skipped_updates"] == 0 and np.isfinite(line["loss"])
        assert 0 < line["effective_sample_size"] <= 1 + 1e-6
        assert ("clip_fraction" in line) == (name != "tba") == ("balance_error" not in line)
        assert 0 <= line.get("clip_fraction", 0) <= 1
        assert ("reference_kl" in line) == ("kl_coefficient" in settings)
        assert ("importance_mean" in line) == ("correction" in train)
        assert ("dual_clip_fraction" in line) == ("dual_clip" in settings)
        rewards = {}
        for outcome in record.outcomes:
            rewards.setdefault(outcome.group, set()).add(outcome.reward)
        assert line["equal_groups"] == np.mean([len(values) == 1 for values in rewards.values()])
        assert line["dropped_groups"] == 0
    changed = jax.tree.map(lambda a, b: (a != np.asarray(b)).any(), first, position.state.params)
    assert any(jax.tree.leaves(changed))


# What an algorithm needs.


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm_args.kl_estimator=k2"], "no effect in this run, because config.algorithm_a"),
        (["algorithm_args.aggregation_tokens=9"], "because config.algorithm_args.aggregation is"),
        (
            ["algorithm_args.normalize_advantages=False", "algorithm_args.deviation=sample"],
            "because config.algorithm_args.normalize_advantages is False",
        ),
        (["train.epochs=1", "algorithm_args.clip_high=0.3"], "because config.train.epochs is 1"),
    ],
)
def test_a_setting_that_a_run_cannot_use_is_an_error(overrides, words):
    given = {**RUN, "algorithm": "grpo", "algorithm_args": {}}
    with pytest.raises(ValueError, match=words):
        make_config(given, overrides)


def corrected_learner(config, **changes):
    """A learner of REINFORCE whose importance weights are cut at 2."""
    given = {"importance_cap": 2.0, **changes}
    return plain_learner(MODEL, config, ALGORITHMS["reinforce"], VOCAB, **given)


@pytest.mark.parametrize("correction", ["truncated", "truncated_sequence", "masked"])
def test_the_correction_that_the_config_names_is_the_update_s(correction):
    """With one update the ratio is 1: the loss is minus the mean of weight times advantage."""
    config = TrainConfig(max_grad_norm=1e9, correction=correction)
    learner = corrected_learner(config)
    # The policy's log-probs are about -3.4, those of who sampled -5.4 to -1.4.
    batch = ragged_batch()
    batch = batch.replace(logprobs=batch.logprobs - 1.4)
    state = init_state(MODEL, config, VOCAB, make_layout(ONE), seed=0)
    scores = own_scores(state.params, batch)
    mask = batch.turn_ids > 0
    gaps = np.where(mask, np.asarray(scores.logprobs, np.float64) - batch.logprobs, 0)
    if correction == "truncated_sequence":
        inside = batch.segment_ids[:, :, None] == batch.segment_ids[:, None]
        gaps = np.einsum("nts,ns->nt", inside, gaps)
    weights = np.exp(gaps)
    cut = weights > 2
    if correction == "masked":
        cut |= weights < 0.5
    weights = np.where(cut & (correction == "masked"), 0, np.minimum(weights, 2))
    controls = np.array([1e-3, 0], np.float32)
    plan = TrainPlan(ONE, 2, "none")
    metrics = read_metrics(learner.update(plan, state, batch, controls)[1])
    expected = -np.mean((weights * batch.advantages)[mask])
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["importance_mean"] == pytest.approx(weights[mask].mean(), rel=1e-4)
    assert metrics["truncated_fraction"] == pytest.approx(cut[mask].mean(), abs=1e-6)
    assert 0 < cut[mask].mean() < 1


def test_an_update_interpolates_the_proximal_policy_by_the_versions_of_the_tokens():
    """Loss and weights by hand, at step 3, of tokens that versions 0 to 3 sampled; in two parts."""
    config = TrainConfig(max_grad_norm=1e9, correction="truncated", proximal="log_linear", epochs=2)
    learner = corrected_learner(config, has_versions=True)
    assert learner.scored == ()
    versions = np.random.default_rng(3).integers(0, 4, (ROWS, LENGTH)).astype(np.int32)
    batch, controls = ragged_batch().replace(versions=versions), learner.controls(3, 9)
    state = init_state(MODEL, config, VOCAB, make_layout(ONE), seed=0)
    scores = own_scores(state.params, batch)
    mask, lag = batch.turn_ids > 0, 4 - versions
    gaps = np.where(mask, np.asarray(scores.logprobs, np.float64) - batch.logprobs, 0)
    weights, ratio = np.minimum(np.exp(gaps * (1 - 1 / lag)), 2), np.exp(gaps / lag)
    gain = np.minimum(ratio * batch.advantages, np.clip(ratio, 0.8, 1.2) * batch.advantages)
    metrics = read_metrics(learner.update(TrainPlan(ONE, 2, "none"), state, batch, controls)[1])
    assert metrics["loss"] == pytest.approx(-np.mean((weights * gain)[mask]), rel=1e-4)
    assert metrics["importance_mean"] == pytest.approx(weights[mask].mean(), rel=1e-4)


def test_the_kept_kv_gap_is_that_of_tokens_of_the_newest_version():
    """Three tokens are of version 3, with gaps 0.25, 0.5 and 0; all older ones have a gap of 2.

    In two micro-batches.
    """
    config = TrainConfig(correction="truncated", proximal="log_linear", epochs=2)
    learner = corrected_learner(config, has_versions=True)
    batch, state = ragged_batch(), init_state(MODEL, config, VOCAB, make_layout(ONE), seed=0)
    own = np.asarray(own_scores(state.params, batch).logprobs)
    places = np.argwhere(batch.turn_ids > 0)
    newest = tuple(places[[0, len(places) // 2, -1]].T)
    gaps, versions = np.full(own.shape, 2.0, np.float32), np.full(own.shape, 2, np.int32)
    gaps[newest], versions[newest] = [0.25, -0.5, 0.0], 3
    # The environment's tokens do not count, whatever version they bear.
    versions[batch.turn_ids <= 0] = 3
    batch = batch.replace(logprobs=own + gaps, versions=versions)

    def metrics_at(step: int):
        plan = TrainPlan(ONE, 2, "none")
        state = init_state(MODEL, config, VOCAB, make_layout(ONE), seed=0)
        return read_metrics(learner.update(plan, state, batch, learner.controls(step, 9))[1])

    metrics = metrics_at(3)
    assert metrics["kept_kv_gap_mean"] == pytest.approx(0.25, abs=2e-6)
    assert metrics["kept_kv_gap_max"] == pytest.approx(0.5, abs=2e-6)
    assert metrics["logprob_mismatch_max"] == pytest.approx(2, abs=2e-6)
    assert "newest" not in metrics
    none = metrics_at(4)
    assert none["kept_kv_gap_mean"] == none["kept_kv_gap_max"] == 0


@pytest.mark.slow
def test_the_reference_policy_is_the_base_of_the_adapters():
    """Uses trained adapters, whose own log-probs differ; on one device and sharded."""

    def penalty(facts: TokenFacts, settings: object) -> TokenLosses:
        assert facts.reference is not None
        distance = kl_estimate(facts.logprobs, facts.reference)
        return TokenLosses(losses=distance, metrics={"reference_kl": distance})

    algorithm = dataclasses.replace(SQUARED, loss=penalty, needs=frozenset({"reference"}))
    learner = make_learner(algorithm, lora=LoraConfig(rank=2))
    plain, mask = make_learner(ALGORITHMS["sft"]), make_batch().turn_ids > 0
    found = []
    for mesh in (ONE, CUBE):
        layout, plan = make_layout(mesh), TrainPlan(mesh, 2, "none")
        state = init_state(MODEL, learner.config, VOCAB, layout, seed=0)
        moved = jax.tree.map(lambda leaf: leaf + 0.05, state.params)
        state = dataclasses.replace(state, params=moved)
        batch = jax.device_put(make_batch(), layout.activations("NS"))
        (scored,) = learner.score([plan], state, [batch])
        score = functools.partial(score_batch, MODEL, plain.config, layout, 1.0)
        base = jax.jit(score)(state.base, batch).logprobs
        np.testing.assert_allclose(scored.reference[mask], base[mask], atol=1e-5)
        assert scored.proximal is None
        found.append(read_metrics(learner.update(plan, state, scored, CONTROLS)[1]))
    assert found[0]["reference_kl"] > 1e-4
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
