# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The optimizer state of supervised updates, apart from that of updates by the algorithm.

That it moves, is offloaded and kept with the rest is in test_networks.py and test_warm_start.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.algorithms.requirements import Networks
from earl_jax.models.config import ModelConfig
from earl_jax.models.lora_config import LoraConfig
from earl_jax.placement.problem import model_sizes
from earl_jax.selector.footprint import trainer_bytes
from earl_jax.selector.plans import TrainPlan
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.learner import Learner
from earl_jax.train.sft import sft_batch
from earl_jax.train.state import TrainState, init_state, state_of, state_shapes, state_shardings
from earl_jax.train.update import Totals, Update
from tests.support.batches import make_turns
from tests.support.placements import TINY
from tests.support.runs import bits
from tests.support.updates import plain_learner

VOCAB, ROWS, LENGTH = 32, 8, 16
MODEL = ModelConfig(**TINY)
# No clip of the gradient.
WARM = TrainConfig(sft_steps=1, sft_learning_rate=0.5, max_grad_norm=1e9)
COLD = dataclasses.replace(WARM, sft_steps=0)
ONE, CUBE, F8 = MeshShape(), MeshShape(data=2, fsdp=2, tensor=2), MeshShape(fsdp=8)
CONTROLS = np.array([1e-3, 0.0], np.float32)
CRITIC = Networks(critic=True)


@functools.cache
def learner_with(config: TrainConfig = WARM) -> Learner:
    """A learner of which tests share the programs; none changes it."""
    return plain_learner(MODEL, config, ALGORITHMS["grpo"], VOCAB)


def step(learner: Learner, mesh: MeshShape, state: TrainState, *, sft: bool) -> TrainState:
    """The state behind an update, supervised or by the algorithm."""
    layout, plan = make_layout(mesh), TrainPlan(mesh, 1, "none")
    if sft:
        rows = [(list(range(3, 3 + LENGTH)), [0, 0] + [1] * (LENGTH - 2))] * ROWS
        batch, controls = sft_batch(rows, layout, LENGTH), learner.sft_controls()
    else:
        batch, controls = make_turns(VOCAB, ROWS, LENGTH), CONTROLS
        batch = jax.device_put(batch, layout.activations("NS"))
    return learner.update(plan, state, batch, controls, sft=sft)[0]


# The mathematics.


def test_each_kind_of_update_is_adam_by_its_own_gradients():
    """By the algorithm with gradients 1 and 2 at rate 1; supervised ones -3 and 0.5 at rate 0.5.

    A first step of Adam is the gradient's sign. The second, by the algorithm: the first moment is
    0.9 * 0.1 * 1 + 0.1 * 2 = 0.29, over 1 - 0.81; the second 0.95 * 0.05 * 1 + 0.05 * 4 = 0.2475,
    over 1 - 0.9025: 1.52632 / sqrt(2.53846) = 0.95799. Supervised: (-0.27 + 0.05) / 0.19 =
    -1.15789 over sqrt((0.4275 + 0.0125) / 0.0975) = 2.12434 is -0.54506.
    """
    shared = {"vocab_size": VOCAB, "temperature": 1.0}
    made = [
        Update(MODEL, COLD, make_layout(ONE), algorithm=ALGORITHMS[name], **shared)
        for name in ("grpo", "sft")
    ]
    applies = [jax.jit(update.apply) for update in made]
    state = init_state(MODEL, WARM, VOCAB, make_layout(ONE), 0)
    first = jax.tree.map(np.asarray, state.params)
    moved = 0.0
    for is_sft, gradient, rate, direction in (
        (False, 1.0, 1.0, 1.0),
        (True, -3.0, 0.5, -1.0),
        (False, 2.0, 1.0, 0.95799),
        (True, 0.5, 0.5, -0.54506),
    ):
        grads = jax.tree.map(lambda leaf, g=gradient: jnp.full_like(leaf, 4 * g), state.params)
        four = {name: jnp.float32(4) for name in ("loss", "divisor", "ratio", "ratio_squared")}
        totals = Totals((grads,), four, None, jnp.int32(4))
        own = state.for_sft() if is_sft else state.without_sft()
        part, _ = applies[is_sft](own, totals, jnp.array([rate, 0.0]))
        kept = dataclasses.replace(part, sft_optimizer=state.sft_optimizer)
        state = state.after_sft(part) if is_sft else kept
        moved -= rate * direction
        for leaf, before in zip(*map(jax.tree.leaves, (state.params, first)), strict=True):
            np.testing.assert_allclose(leaf - before, moved, rtol=1e-4)
    assert int(state.updates) == 4
    assert int(state.optimizer[1].count) == int(state.sft_optimizer[1].count) == 2
    mean, other = (each[1].mu["final_norm"] for each in (state.optimizer, state.sft_optimizer))
    np.testing.assert_allclose(mean, 0.29, rtol=1e-6)
    np.testing.assert_allclose(other, -0.22, rtol=1e-6)


def test_an_update_leaves_the_other_optimizer_alone_on_a_mesh():
    """Bit for bit; each array is where its parameter is, the first moments in bf16."""
    learner = learner_with(dataclasses.replace(WARM, momentum_dtype="bfloat16"))
    shardings = learner.state_shardings(CUBE)
    assert shardings.sft_optimizer[1].mu == shardings.sft_optimizer[1].nu == shardings.params
    first = learner.first_state(CUBE)
    mu = first.sft_optimizer[1].mu
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(mu)} == {"bfloat16"}
    zero, params = bits(first.sft_optimizer), bits(first.params)
    assert zero == bits(first.optimizer)
    state = step(learner, CUBE, first, sft=False)
    assert bits(state.sft_optimizer) == zero and bits(state.params) != params
    kept, params = bits(state.optimizer), bits(state.params)
    assert kept != zero
    state = step(learner, CUBE, state, sft=True)
    assert bits(state.optimizer) == kept and bits(state.params) != params
    assert bits(state.sft_optimizer) != zero
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings


def test_programs_and_their_results_are_the_same_without_it():
    """An update whole and in parts, and the passes before it; each is compiled once."""
    learner = plain_learner(
        MODEL, dataclasses.replace(WARM, epochs=2), ALGORITHMS["grpo"], VOCAB, importance_cap=2.0
    )
    plan, controls = TrainPlan(F8, 1, "none"), learner.controls(0, 1)
    batch = jax.device_put(make_turns(VOCAB, ROWS, LENGTH), make_layout(F8).activations("NS"))
    found = []
    for is_warm in (True, False):
        state = learner.first_state(F8)
        state = state if is_warm else state.without_sft()
        (scored,) = learner.score([plan], state, [batch])
        state, _ = learner.update(plan, state, scored, controls)
        totals = learner.add_part(plan, state, scored, controls, None)
        state, _ = learner.apply(plan, state, totals, controls)
        assert (state.sft_optimizer is not None) == is_warm
        found.append(bits(state.without_sft()))
    assert found[0] == found[1] and learner.scored
    steps = learner.part_steps(plan)
    programs = (learner.program(plan, sft=False), *steps, learner.scorer(plan, learner.scored))
    assert [program._cache_size() for program in programs] == [1] * 4


def test_only_a_run_with_supervised_updates_has_it():
    learner = learner_with(COLD)
    state = learner.first_state(ONE)
    assert state.sft_optimizer is None and learner.state_shapes().sft_optimizer is None
    with pytest.raises(AssertionError, match=r"need config\.train\.sft_steps"):
        step(learner, ONE, state, sft=True)


# The state.


@pytest.mark.parametrize(
    ("changes", "networks"),
    [
        ({}, Networks()),
        ({}, CRITIC),
        ({"momentum_dtype": "bfloat16", "lora": LoraConfig(rank=2)}, Networks()),
        ({"optimizer": "muon", "ema_decay": 0.5}, CRITIC),
    ],
    ids=["alone", "critic", "adapters", "muon"],
)
def test_it_has_the_shapes_and_shardings_of_the_policys_optimizer_and_is_counted(changes, networks):
    config = dataclasses.replace(WARM, **changes)
    given = (MODEL, config, VOCAB)
    for record in (
        state_shapes(*given, networks),
        state_shardings(*given, make_layout(CUBE), networks),
    ):
        policy = record.optimizer[0] if networks.critic else record.optimizer
        assert record.sft_optimizer == policy
        assert record.with_moments(record.moments) == record

    sizes, without = (
        model_sizes(MODEL, VOCAB, engine_dtype="float32", train=train, networks=networks)
        for train in (config, dataclasses.replace(config, sft_steps=0))
    )
    shapes = jax.tree.leaves(state_shapes(*given, networks).sft_optimizer)
    own = sum(leaf.size * leaf.dtype.itemsize for leaf in shapes if leaf.shape)
    (params, moments), (same, others) = (trainer_bytes(each, ONE) for each in (sizes, without))
    assert params == same and moments == others + own and own > 0


def test_a_state_of_given_weights_has_it():
    params = init_state(MODEL, COLD, VOCAB, make_layout(F8), 0).params
    state = state_of(params, MODEL, WARM, VOCAB, make_layout(F8), 0)
    assert bits(state.sft_optimizer) == bits(state.optimizer)
    shardings = state_shardings(MODEL, WARM, VOCAB, make_layout(F8))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
