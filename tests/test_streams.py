# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A supervised stream beside the loss, distillation from a teacher, and the weights' average."""

import dataclasses
import functools
import itertools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax import loop
from earl_jax.algorithms.algorithm import RewardFacts, TokenFacts
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.dispatch.packing import RowRule, ShapeHistory, pack_rows, plan_packing
from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.loop import rl_step
from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.models.checkpoints.hf_write import save_checkpoint
from earl_jax.models.config import ModelConfig
from earl_jax.models.lora_config import LoraConfig
from earl_jax.placement import rollouts
from earl_jax.placement.moves import open_session
from earl_jax.placement.parts import Part
from earl_jax.placement.problem import model_sizes
from earl_jax.placement.updates import StepUpdate
from earl_jax.run.build import build_run
from earl_jax.run.evaluation import evaluate
from earl_jax.run.source import open_reference, open_source
from earl_jax.selector.footprint import trainer_bytes
from earl_jax.selector.plans import TrainPlan
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.learner import Learner
from earl_jax.train.scoring import score_batch
from earl_jax.train.sft import sft_batch
from earl_jax.train.state import TrainState, init_state
from earl_jax.train.step import read_metrics
from earl_jax.training import train
from earl_jax.trajectory import TrajectoryBatch
from tests.support import ROOT
from tests.support.batches import make_turns
from tests.support.placements import TINY, begin, hungry
from tests.support.runs import bits, check_resume, final_state, steps_of
from tests.support.settings import make_config
from tests.support.shardings import resident_bytes

VOCAB, ROWS, LENGTH = 32, 8, 16
MODEL = ModelConfig(**TINY)
# No clip of the gradient, so that the first moment is a tenth of it.
TRAIN = TrainConfig(max_grad_norm=1e9)
ONE, CUBE, F8 = MeshShape(), MeshShape(data=2, fsdp=2, tensor=2), MeshShape(fsdp=8)
CONTROLS = np.array([1e-3, 0.01], np.float32)
WEIGHT = 0.75
make_batch = functools.partial(make_turns, VOCAB, ROWS, LENGTH)


@functools.cache
def example_rows() -> list[tuple[list[int], list[int]]]:
    """Token ids of example episodes, and who wrote each: a prompt of 2 tokens, then one reply."""
    rng = np.random.default_rng(5)
    lengths = [9, 5, 16, 7, 3, 12, 8, 10]
    return [(rng.integers(0, VOCAB, n).tolist(), [0, 0] + [1] * (n - 2)) for n in lengths]


@functools.cache
def learner_with(name: str = "grpo", lora_rank: int = 0, **train) -> Learner:
    """A learner of which tests share the programs; none changes it."""
    return Learner(
        MODEL,
        dataclasses.replace(TRAIN, lora=LoraConfig(rank=lora_rank), **train),
        ALGORITHMS[name],
        vocab_size=VOCAB,
        temperature=1.0,
        importance_cap=0.0,
        layout=make_layout,
    )


def plan_on(mesh: MeshShape, parts: int = 1) -> TrainPlan:
    return TrainPlan(mesh, parts, "none")


def on(mesh: MeshShape, batch: TrajectoryBatch) -> TrajectoryBatch:
    return jax.device_put(batch, make_layout(mesh).activations("NS"))


def examples_on(mesh: MeshShape) -> TrajectoryBatch:
    return sft_batch(example_rows(), make_layout(mesh), LENGTH)


def assert_close(one, other, **tolerance) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), one, other)


def gradient(state: TrainState):
    """The gradient of a first update: AdamW's first moment is a tenth of it."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) / 0.1, state.optimizer[1].mu)


# The supervised stream.


def streamed(
    mesh: MeshShape, batch: TrajectoryBatch, examples: TrajectoryBatch, parts: int = 1, **train
):
    """The state and the metrics behind a first update of a batch and a stream."""
    learner, plan = learner_with(**{"sft_weight": WEIGHT, **train}), plan_on(mesh, parts)
    state = learner.first_state(mesh)
    totals = learner.add_part(plan, state, on(mesh, batch), CONTROLS, None)
    totals = learner.add_stream(plan, state, examples, totals)
    after, metrics = learner.apply(plan, state, totals, CONTROLS)
    assert jax.tree.map(lambda x: x.sharding, after) == learner.state_shardings(mesh)
    return after, read_metrics(metrics)


@functools.cache
def on_one_device():
    return streamed(ONE, make_batch(), examples_on(ONE))


def test_the_gradient_is_that_of_the_loss_plus_a_weight_times_the_cross_entropy():
    """Against JAX's gradient of the formula, and the cross-entropy in numpy.

    The mean of -log policy over the tokens that the policy is to write, 0.75 times, beside the loss
    of an update without a stream.
    """
    learner, plan = learner_with(), plan_on(ONE)
    alone, metrics = learner.update(plan, learner.first_state(ONE), on(ONE, make_batch()), CONTROLS)
    examples, params = examples_on(ONE), learner.first_state(ONE).params
    mask = np.asarray(examples.turn_ids) > 0
    assert mask.sum() == sum(len(ids) - 2 for ids, _ in example_rows()) == 54

    def cross_entropy(params):
        logprobs = score_batch(MODEL, TRAIN, make_layout(ONE), 1.0, params, examples).logprobs
        return -jnp.sum(jnp.where(mask, logprobs, 0.0)) / 54, logprobs

    slope, logprobs = jax.jit(jax.grad(cross_entropy, has_aux=True))(params)
    after, found = on_one_device()
    by_hand = -np.mean(np.asarray(logprobs, np.float64)[mask])
    assert found["supervised_loss"] == pytest.approx(by_hand, rel=1e-5)
    expected = jax.tree.map(lambda g, s: g + WEIGHT * np.asarray(s), gradient(alone), slope)
    assert_close(gradient(after), expected, rtol=1e-3, atol=1e-6)
    # It is no small part of it.
    gap = jax.tree.map(lambda a, b: np.abs(a - b).max(), gradient(after), gradient(alone))
    assert max(jax.tree.leaves(gap)) > 1e-2
    # All other metrics are those of the policy's own tokens.
    alone = read_metrics(metrics)
    assert found.keys() == alone.keys() | {"supervised_loss"}
    for name in alone.keys() - {"grad_norm"}:
        assert found[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6), name
    norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(expected)))
    assert found["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_stream_beside_no_token_of_the_policy_is_an_update_of_its_own():
    empty = jax.tree.map(np.zeros_like, make_batch())
    after, metrics = streamed(ONE, empty, examples_on(ONE))
    learner = learner_with(sft_steps=1)
    alone, _ = learner.update(
        plan_on(ONE), learner.first_state(ONE), examples_on(ONE), learner.sft_controls(), sft=True
    )
    slope = jax.tree.map(lambda leaf: np.asarray(leaf) / 0.1, alone.sft_optimizer[1].mu)
    expected = jax.tree.map(lambda leaf: WEIGHT * leaf, slope)
    assert_close(gradient(after), expected, rtol=1e-4, atol=1e-7)
    assert int(after.updates) == 1 and metrics["skipped_updates"] == 0
    # Its rate is not scaled by the effective sample size of no tokens.
    scaled, _ = streamed(ONE, empty, examples_on(ONE), ess_scaling="sqrt")
    assert_close(scaled.params, after.params, rtol=1e-6, atol=1e-9)
    # And without one there either, nothing moves.
    after, metrics = streamed(ONE, empty, on(ONE, empty))
    assert bits(after.params) == bits(learner.first_state(ONE).params)
    assert int(after.updates) == 0 and metrics["skipped_updates"] == 0


def test_a_stream_that_is_not_finite_skips_the_update():
    learner, plan = learner_with(sft_weight=1e38), plan_on(ONE)
    state = learner.first_state(ONE)
    before = bits((state.params, state.optimizer))
    totals = learner.add_part(plan, state, on(ONE, make_batch()), CONTROLS, None)
    totals = learner.add_stream(plan, state, examples_on(ONE), totals)
    after, metrics = learner.apply(plan, state, totals, CONTROLS)
    assert read_metrics(metrics)["skipped_updates"] == 1
    assert bits((after.params, after.optimizer)) == before


def test_a_stream_is_the_same_on_a_mesh_and_in_micro_batches():
    state, metrics = on_one_device()
    there, found = streamed(CUBE, make_batch(), examples_on(CUBE), parts=2)
    assert found == pytest.approx(metrics, rel=1e-4, abs=2e-5)
    assert_close(gradient(there), gradient(state), rtol=1e-3, atol=2e-5)


def test_a_packed_stream_is_the_unpacked_one():
    lengths = [len(ids) for ids, _ in example_rows()]
    rule = RowRule(ROWS, 1, 1, LENGTH)
    shape = ShapeHistory().choose(lengths, rule, 0.0)
    assert shape.rows < ROWS
    packed = pack_rows(examples_on(ONE), plan_packing(lengths, rule, shape), make_layout(ONE))
    state, metrics = on_one_device()
    there, found = streamed(ONE, make_batch(), packed)
    assert found == pytest.approx(metrics, rel=1e-4, abs=2e-5)
    assert_close(gradient(there), gradient(state), rtol=1e-3, atol=2e-5)


def test_a_critic_has_no_part_in_a_stream():
    learner, plan = learner_with("ppo", sft_weight=WEIGHT), plan_on(ONE)
    rates = np.array([1e-3, 0.0, 2e-3], np.float32)
    states = []
    for has_stream in (False, True):
        state = learner.first_state(ONE)
        (scored,) = learner.score([plan], state, [on(ONE, make_batch())])
        totals = learner.add_part(plan, state, scored, rates, None)
        if has_stream:
            totals = learner.add_stream(plan, state, examples_on(ONE), totals)
        states.append(learner.apply(plan, state, totals, rates)[0])
    assert bits(states[0].critic) == bits(states[1].critic)
    assert bits(states[0].params) != bits(states[1].params)
    # Nor does what it remembers of other updates move it beside a stream alone.
    before = states[1]
    kept, params = bits((before.critic, before.moments[1])), bits(before.params)
    empty = on(ONE, jax.tree.map(np.zeros_like, make_batch()))
    (scored,) = learner.score([plan], before, [empty])
    totals = learner.add_part(plan, before, scored, rates, None)
    totals = learner.add_stream(plan, before, examples_on(ONE), totals)
    after, metrics = learner.apply(plan, before, totals, rates)
    assert read_metrics(metrics)["skipped_updates"] == 0 and int(after.updates) == 2
    assert bits((after.critic, after.moments[1])) == kept and bits(after.params) != params


def test_the_selector_plans_the_program_that_adds_the_stream():
    """It holds the sums of gradients beside all that an update without a stream holds."""
    lowered = [
        learner_with(**train).lower(plan_on(ONE), ROWS, LENGTH)
        for train in ({}, {"sft_weight": WEIGHT})
    ]
    arguments = [each.compile().memory_analysis().argument_size_in_bytes for each in lowered]
    shapes = learner_with().state_shapes().params
    assert arguments[1] - arguments[0] >= 4 * sum(leaf.size for leaf in jax.tree.leaves(shapes))


# The average.

DECAY = 0.9


def test_the_average_follows_the_weights_after_each_update():
    """In numpy: a tenth of the way to the new weights; where an update is skipped it stays."""
    learner, plan = learner_with(ema_decay=DECAY), plan_on(ONE)
    state = learner.first_state(ONE)
    before = bits(state.params)
    assert bits(state.ema) == before == bits(learner_with().first_state(ONE).params)
    # Without a rate both keep their bits.
    state, _ = learner.update(plan, state, on(ONE, make_batch()), np.zeros(2, np.float32))
    assert int(state.updates) == 1 and bits(state.ema) == bits(state.params) == before
    state = learner.first_state(ONE)
    average = jax.tree.map(np.array, state.ema)
    for seed in range(3):
        state, _ = learner.update(plan, state, on(ONE, make_batch(seed)), CONTROLS)
        average = jax.tree.map(lambda a, p: a + 0.1 * (np.asarray(p) - a), average, state.params)
        assert_close(state.ema, average, rtol=1e-6, atol=1e-7)
    assert bits(state.ema) != bits(state.params)
    kept = bits((state.params, state.ema))
    broken = make_batch().replace(advantages=np.full((ROWS, LENGTH), np.inf, np.float32))
    for batch in (broken, jax.tree.map(np.zeros_like, make_batch())):
        state, _ = learner.update(plan, state, on(ONE, batch), CONTROLS)
        assert bits((state.params, state.ema)) == kept
    # Nor does it change what is trained.
    plain = learner_with()
    alone = plain.first_state(ONE)
    for seed in range(3):
        alone, _ = plain.update(plan, alone, on(ONE, make_batch(seed)), CONTROLS)
    assert bits(alone.params) == bits(state.params) and alone.ema is None


@pytest.mark.slow
def test_the_average_of_adapters_is_the_same_on_a_mesh_and_in_parts():
    found = []
    for where in (ONE, CUBE):
        learner, plan = learner_with(ema_decay=DECAY, lora_rank=2), plan_on(where)
        state = learner.first_state(where)
        for seed in range(2):
            batch = on(where, make_batch(seed))
            totals = learner.add_part(plan, state, batch, CONTROLS, None)
            state, _ = learner.apply(plan, state, totals, CONTROLS)
        assert jax.tree.map(lambda x: x.sharding, state) == learner.state_shardings(where)
        assert jax.tree.structure(state.ema) == jax.tree.structure(state.params)
        found.append(state.ema)
    assert_close(*found, atol=5e-4)


def test_the_average_is_counted():
    """To the byte on each device, where its parameters are."""
    learner = learner_with(ema_decay=DECAY)
    shapes = learner.state_shapes()
    sizes, without = (
        model_sizes(MODEL, VOCAB, engine_dtype="float32", train=each)
        for each in (learner.config, TRAIN)
    )
    for mesh in (CUBE, F8):
        where = learner.state_shardings(mesh)
        assert where.ema == where.params
        held = resident_bytes((shapes.params, shapes.ema), (where.params, where.ema))
        assert trainer_bytes(sizes, mesh)[0] == held == 2 * trainer_bytes(without, mesh)[0]


# Distillation.


def slope_of_expectation(logits: jax.Array, loss) -> jax.Array:
    """The gradient in the logits of the mean of `loss(log-probs)` over the policy's own samples.

    Every token is its own sample, weighted by its probability, which has no gradient.
    """
    weights = jax.nn.softmax(logits)
    return jax.grad(lambda x: jnp.sum(weights * loss(jax.nn.log_softmax(x))))(logits)


@pytest.mark.parametrize(
    ("kl_in", "estimator", "direction"),
    [("reward", "k1", "reverse"), ("loss", "k2", "reverse"), ("loss", "k3", "forward")],
)
def test_the_gradient_of_distillation_is_that_of_the_divergence(kl_in, estimator, direction):
    """All of four tokens are enumerated; the divergences are computed by their definitions."""
    logits, other = jnp.array([0.3, -1.2, 0.8, 0.1]), jnp.array([1.0, 0.2, -0.5, -0.4])
    teacher = jax.nn.log_softmax(other)

    def divergence(x):
        policy = jax.nn.log_softmax(x)
        if direction == "reverse":
            return jnp.sum(jnp.exp(policy) * (policy - teacher))
        return jnp.sum(jnp.exp(teacher) * (teacher - policy))

    entry = ALGORITHMS["distillation"]
    changes = {"kl_in": kl_in, "kl_estimator": estimator}
    settings = dataclasses.replace(entry.settings, **changes)
    settings.validate("config.algorithm_args")
    first = jax.nn.log_softmax(logits)[None]
    ones = jnp.ones((1, 4), jnp.int32)
    facts = RewardFacts(
        mask=ones > 0,
        sequences=ones,
        turns=ones,
        rewards=jnp.zeros((1, 4)),
        old=first,
        reference=teacher[None],
    )
    advantages = entry.token_advantages(facts, settings)
    if kl_in == "reward":
        np.testing.assert_allclose(advantages[0], teacher - first[0], rtol=1e-5)

    def losses(logprobs):
        given = TokenFacts(
            mask=ones > 0,
            sequences=ones,
            logprobs=logprobs[None],
            entropy=jnp.zeros((1, 4)),
            behaviour=first,
            advantages=advantages,
            reference=teacher[None],
        )
        return entry.loss(given, settings).losses[0]

    found = slope_of_expectation(logits, losses)
    np.testing.assert_allclose(found, jax.grad(divergence)(logits), rtol=1e-4, atol=1e-6)


def test_later_penalties_of_a_sequence_count_less_by_their_distance():
    """By hand: penalties 1, 2, (the environment's token) and 4, then another sequence with 8."""
    settings = dataclasses.replace(ALGORITHMS["distillation"].settings, kl_discount=0.5)
    mask = jnp.array([[True, True, False, True, True]])
    facts = RewardFacts(
        mask=mask,
        sequences=jnp.array([[1, 1, 1, 1, 2]]),
        turns=mask.astype(jnp.int32),
        rewards=jnp.zeros((1, 5)),
        old=jnp.array([[-1.0, -1.0, 0.0, -1.0, -1.0]]),
        reference=jnp.array([[-2.0, -3.0, 9.0, -5.0, -9.0]]),
    )
    found = ALGORITHMS["distillation"].token_advantages(facts, settings)
    # 1 + 2 / 2 + 4 / 8, 2 + 4 / 4, nothing, 4, 8.
    np.testing.assert_allclose(found, [[-2.5, -3.0, 0.0, -4.0, -8.0]])


# Whole runs.

GIVEN = {
    "num_steps": 3,
    "model": TINY,
    "env": {"name": "trail", "args": {"num_stones": 4, "num_steps": 8}},
    "rollout": {
        "num_slots": 16,
        "episodes_per_step": 32,
        "group_size": 2,
        "max_turn_tokens": 4,
        "context_buckets": (48,),
        "patience_s": 10.0,
    },
    "selector": {
        "rollout_meshes": ("data=8",),
        "train_meshes": ("data=2,fsdp=4",),
        "table": "model",
    },
    "algorithm": "grpo",
    "algorithm_args": {},
    "train": {"mini_batches": 2, "learning_rate": 3e-3, "sft_weight": 0.5, "ema_decay": 0.5},
    "checkpoint": {"every_steps": 1, "keep": 3, "export": True},
    "eval": {"every_steps": 100, "games": 8, "final_games": 8},
}
DISTILL = {
    "algorithm": "distillation",
    "train": {"mini_batches": 1, "learning_rate": 3e-3},
    "eval": {"every_steps": 100, "games": 8, "final_games": 8},
    "checkpoint": {"every_steps": 1, "keep": 3},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The workdir of a run with a stream and an average, from start to end."""
    folder = tmp_path_factory.mktemp("streams") / "run"
    train(make_config(GIVEN), folder)
    return folder


@pytest.mark.slow
def test_a_run_with_a_stream_and_an_average_is_resumed_bit_for_bit(whole):
    check_resume(make_config(GIVEN), whole, 2)
    losses = [row["supervised_loss"] for row in steps_of(whole)]
    assert len(losses) == 3 and losses[2] < losses[0]
    state = final_state(whole, 3)
    assert int(state["updates"]) == 6
    assert bits(state["ema"]) != bits(state["params"])


def test_exports_and_new_runs_take_the_average(whole, tmp_path):
    """To the bit. Of a run without an average, its trained weights."""
    state = final_state(whole, 3)
    exported = open_checkpoint(whole / "export" / "step_000003")
    assert bits(load_parameters(exported, make_layout(ONE))) == bits(state["ema"])
    shutil.copytree(whole, tmp_path / "trained")
    path = tmp_path / "trained" / "config.json"
    path.write_text(path.read_text().replace('"ema_decay": 0.5', '"ema_decay": 0.0'))
    run = build_run(make_config(GIVEN), whole / "tokenizer")
    for source, field in ((whole, "ema"), (path.parent, "params")):
        begun = open_source(str(source)).first_state(run, MeshShape(data=2, fsdp=4))
        assert bits(begun.params) == bits(begun.ema) == bits(state[field])


def test_an_evaluation_plays_the_average_and_the_next_step_does_not(monkeypatch):
    run = build_run(make_config(GIVEN))
    placement, position = begin(run)
    position, _ = rl_step(run, placement, position)
    played = []

    def opened(placement, params, version):
        played.append(bits(params))
        return open_session(placement, params, version)

    for module in (rollouts, loop):
        monkeypatch.setattr(module, "open_session", opened)
    evaluate(run, placement, position, games=8)
    state = jax.tree.map(np.asarray, position.state)
    rl_step(run, placement, position)
    assert played == [bits(state.ema), bits(state.params)] and played[0] != played[1]


def test_examples_are_dealt_out_to_mini_batches_and_each_is_learnt_from_once_an_epoch():
    run = build_run(make_config(GIVEN))
    placement, position = begin(run)
    (examples,) = run.tasks.examples(0, 1)
    update = StepUpdate(
        placement=placement, controls=CONTROLS, rng=np.random.default_rng(0), parts=[None] * 2
    )
    update.mix_in(examples, 48)
    num_tokens = [sum(min(48, len(ids)) for ids, _ in examples[part::2]) for part in (0, 1)]
    assert [part.num_tokens for part in update.streams] == num_tokens
    for part, tokens in zip(update.streams, num_tokens, strict=True):
        assert np.count_nonzero(part.batch.segment_ids) == tokens


@pytest.mark.slow
def test_a_stream_that_runs_out_of_memory_is_added_again_on_another_mesh(monkeypatch):
    meshes = {"train_meshes": ("fsdp=8", "data=2,fsdp=4")}
    config = make_config({**GIVEN, "selector": {**GIVEN["selector"], **meshes}})
    run = build_run(config)
    placement, position = begin(run)
    first = placement.train.mesh
    before, learner = jax.device_get(position.state), run.learner
    stream_step = Learner.stream_step

    def steps(plan):
        if plan.mesh != first:
            return stream_step(learner, plan)
        return lambda state, batch, controls, totals: hungry(donated=0)(jnp.ones(4), controls)

    monkeypatch.setattr(learner, "stream_step", steps)
    examples = run.tasks.examples(0, 1)[0]
    batch = examples_batch(run, placement, examples)
    update = StepUpdate(placement=placement, controls=CONTROLS, parts=[batch])
    update.mix_in(examples, 48)
    after, (metrics,) = update.finish(position.state)
    assert placement.train.mesh != first and placement.take_log().failures
    monkeypatch.undo()
    plan = TrainPlan(placement.train.mesh, 1, "none")
    state = jax.device_put(before, learner.state_shardings(plan.mesh))
    part, stream = update.parts[0].batch, update.streams[0].batch
    totals = learner.add_part(plan, state, part, CONTROLS, None)
    totals = learner.add_stream(plan, state, stream, totals)
    expected, found = learner.apply(plan, state, totals, CONTROLS)
    assert metrics["supervised_loss"] == pytest.approx(float(found["supervised_loss"]), rel=1e-5)
    assert_close(after.params, jax.device_get(expected.params), atol=5e-5)


def test_a_stream_is_added_once_to_a_batch_that_comes_in_parts():
    """As to the same rows in one part; of groups that came while others were played."""
    run = build_run(make_config(GIVEN))
    placement, position = begin(run)
    examples, start = run.tasks.examples(0, 1)[0], jax.device_get(position.state)
    whole, learner = examples_batch(run, placement, examples), run.learner
    layout = learner.layout(placement.train.mesh).activations("NS")
    results = []
    for cuts in ((0, 32), (0, 8, 32)):
        state = jax.device_put(start, learner.state_shardings(placement.train.mesh))
        update = StepUpdate(placement=placement, controls=CONTROLS)
        for first, last in itertools.pairwise(cuts):
            rows = [np.asarray(field)[first:last] for field in jax.tree.leaves(whole.batch)]
            batch = jax.tree.unflatten(jax.tree.structure(whole.batch), rows)
            update.add(state, dataclasses.replace(whole, batch=jax.device_put(batch, layout)))
        update.mix_in(examples, 48)
        after, (metrics,) = update.finish(state)
        results.append((jax.device_get(after.params), metrics))
    (params, metrics), (others, found) = results
    assert found == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    assert_close(others, params, atol=5e-5)


def examples_batch(run, placement, examples) -> Part:
    """A part of a step, with example episodes in the place of played ones."""
    layout = run.stages.layouts.train(placement.train.mesh)
    batch = sft_batch(examples, layout, 48)
    advantages = jax.tree.map(lambda mask: 1.0 * mask, batch.turn_ids)
    batch = batch.replace(advantages=advantages, logprobs=-advantages)
    return Part(batch=batch, length=48, num_tokens=48)


def test_a_run_is_distilled_from_another_and_resumed_bit_for_bit(whole, tmp_path, capsys):
    """Its reference is the teacher's average; the divergence of the student falls."""
    loss = ("algorithm_args.kl_in=loss", "algorithm_args.kl_estimator=k2")
    overrides = [*loss, f"reference_from={whole}@3", "train.entropy_coefficient=0.0"]
    config = make_config({**GIVEN, **DISTILL, "num_steps": 4}, overrides)
    train(config, tmp_path / "student")
    assert f"the reference policy is that of {whole} after step 3" in capsys.readouterr().out
    teacher, state = final_state(whole, 3)["ema"], final_state(tmp_path / "student", 4)
    assert bits(state["reference"]) == bits(teacher)
    divergences = [row["reference_kl"] for row in steps_of(tmp_path / "student")]
    assert 0 < divergences[-1] < divergences[0]
    check_resume(config, tmp_path / "student", 2)


LARGER = {"width": 32, "num_layers": 2, "ffn_size": 32}


def write_teacher(folder, workdir) -> Path:
    """A checkpoint of a larger model with the tokenizer of the run in `workdir`."""
    model = dataclasses.replace(MODEL, **LARGER)
    tokenizer = load_tokenizer(workdir / "tokenizer")
    vocab_size = -(-len(tokenizer) // 64) * 64
    params = init_state(model, TRAIN, vocab_size, make_layout(ONE), 9).params
    save_checkpoint(
        folder,
        params,
        model=model,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        dtype="float32",
        max_positions=48,
        source=None,
        bring=lambda key, leaf: leaf,
    )
    return folder


def test_a_larger_teacher_scores_with_its_own_model(whole, tmp_path):
    """Its log-probs, beside adapters, and its bytes on each device; it begins as zeros."""
    teacher = write_teacher(tmp_path / "teacher", whole)
    lora = {"train": {**DISTILL["train"], "lora": {"rank": 2}}}
    config = make_config({**GIVEN, **DISTILL, **lora}, [f"reference_from={teacher}"])
    run = build_run(config, whole / "tokenizer")
    found = open_reference(str(teacher))
    found.check_reference(run)
    learner, mesh = run.learner, MeshShape(data=2, fsdp=4)
    state = learner.first_state(mesh)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.reference))
    state = dataclasses.replace(state, reference=found.reference(run, mesh))
    given = load_parameters(open_checkpoint(teacher), make_layout(ONE))
    assert bits(state.reference) == bits(given)
    assert jax.tree.map(lambda x: x.sharding, state) == learner.state_shardings(mesh)
    held = (state.params, state.base, state.reference)
    num_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(held))
    assert trainer_bytes(run.problem.sizes, mesh)[0] == num_bytes

    batch = jax.device_put(make_batch(), learner.layout(mesh).activations("NS"))
    (scored,) = learner.score([plan_on(mesh)], state, [batch])
    model = dataclasses.replace(MODEL, **LARGER, compute_dtype="float32")
    score = jax.jit(lambda p, b: score_batch(model, TRAIN, make_layout(ONE), 1.0, p, b).logprobs)
    np.testing.assert_allclose(scored.reference, score(given, make_batch()), atol=2e-5)
    # The advantages are made of them, where the policy wrote.
    gaps = np.asarray(scored.reference) - make_batch().logprobs
    expected = np.where(make_batch().turn_ids > 0, gaps, 0)
    np.testing.assert_allclose(scored.advantages, expected, atol=1e-5)


def test_a_mesh_that_does_not_cut_the_teacher_is_none_of_the_run(whole, tmp_path):
    teacher = write_teacher(tmp_path / "teacher", whole)
    text = (teacher / "config.json").read_text()
    config = make_config({**GIVEN, **DISTILL}, [f"reference_from={teacher}"])
    run = build_run(config, whole / "tokenizer")
    assert run.problem.weights_obstacle(MeshShape(tensor=2, data=4)) is None
    (teacher / "config.json").write_text(text.replace('"hidden_size": 32', '"hidden_size": 36'))
    config = make_config({**GIVEN, **DISTILL}, [f"reference_from={teacher}"])
    run = build_run(config, whole / "tokenizer")
    words = run.problem.weights_obstacle(MeshShape(fsdp=8))
    assert words == "config.reference_from: model.width = 36 does not divide by 8"


@pytest.mark.slow
def test_a_run_is_distilled_from_a_larger_checkpoint_and_resumed(whole, tmp_path):
    teacher = write_teacher(tmp_path / "teacher", whole)
    overrides = [f"reference_from={teacher}", f"init_from={whole}", "num_steps=2"]
    config = make_config({**GIVEN, **DISTILL}, overrides)
    train(config, tmp_path / "run")
    # Only its config.json is looked at.
    for path in teacher.glob("*.safetensors"):
        path.unlink()
    check_resume(config, tmp_path / "run", 1)
    assert final_state(tmp_path / "run", 2)["reference"]["embed"].shape[1] == 32


def test_teachers_that_cannot_be_used_are_errors(whole, tmp_path):
    given = {**GIVEN, **DISTILL}

    def refuse(words, *overrides, **changes):
        with pytest.raises(InputError, match=words):
            train(make_config({**given, **changes}, overrides), tmp_path / "run")
        assert not (tmp_path / "run" / "config.json").exists()

    refuse("would be the policy that the run begins with")
    refuse("needs no reference with its settings", f"reference_from={whole}", algorithm="grpo")
    refuse("the steps of .* are", f"reference_from={whole}@7")
    refuse("there is no such folder", f"reference_from={tmp_path / 'nowhere'}")
    other = ROOT / "tests/reference/qwen2_tied"
    refuse("has another tokenizer|entries in its vocabulary", f"reference_from={other}")
    refuse("config.model.width is 16 there, 32 here", f"reference_from={whole}", "model.width=32")


def test_the_teacher_of_adapters_is_no_run_with_adapters(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "adapted")
    path = tmp_path / "adapted" / "config.json"
    path.write_text(path.read_text().replace('"rank": 0', '"rank": 2'))
    teacher = open_reference(str(tmp_path / "adapted"))
    with pytest.raises(InputError, match="a run with adapters, which are no whole policy"):
        teacher.check_reference(
            build_run(make_config({**GIVEN, **DISTILL}, [f"reference_from={whole}"]))
        )
