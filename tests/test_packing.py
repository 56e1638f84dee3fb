# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Episodes share rows: the plan by hand, every token once, and an update that stays the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.algorithms.algorithms import ALGORITHMS, ReinforceSettings
from earl_jax.algorithms.settings import PolicySettings
from earl_jax.dispatch.packing import (
    MOST_SHAPES,
    Packing,
    RowRule,
    Shape,
    ShapeHistory,
    add_rows,
    balance_rows,
    best_fit,
    pack_rows,
    plan_packing,
)
from earl_jax.models.attention import splash
from earl_jax.models.attention.rows import BLOCK_SIZE
from earl_jax.models.attention.segment_blocks import blocks_looked_at
from earl_jax.models.config import ModelConfig
from earl_jax.placement.delivery import row_facts
from earl_jax.selector.plans import TrainPlan
from earl_jax.sharding.layout import TRAINING_ROWS, Layout, MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.learner import Learner
from earl_jax.train.scoring import score_batch
from earl_jax.train.step import read_metrics
from earl_jax.trajectory import TrajectoryBatch, TurnState
from tests.support import experts
from tests.support.trajectories import make_outcome


def training_layout(mesh: str) -> Layout:
    return make_layout(MeshShape.parse(mesh), row_axes=TRAINING_ROWS)


def log_normal(rng: np.random.Generator, number: int, mean: float = 1024) -> np.ndarray:
    """Lengths with a spread of 1.0, rounded up."""
    return np.ceil(rng.lognormal(np.log(mean) - 0.5, 1.0, number)).astype(int)


def packing_of(lengths, rule: RowRule, samples=None) -> Packing:
    """The first packing of a run."""
    lengths = [int(length) for length in lengths]
    return plan_packing(lengths, rule, ShapeHistory().choose(lengths, rule, 0.0), samples)


# The plan.


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        # 6 opens a row with 2 left, 3 another with 5 left; 2 goes where 2 are left.
        ([3, 0, 6, 2], [[2, 3], [0]]),
        # 5 and 3 fill a row; 4 and 4 another.
        ([4, 5, 3, 4], [[1, 2], [0, 3]]),
        # Of 7 5 2 1: 2 does not fit beside 7, but beside 5; 1 fits both, and fills both.
        ([7, 5, 2, 1], [[0, 3], [1, 2]]),
        # Equal episodes keep their order.
        ([8, 8], [[0], [1]]),
        ([0, 0], []),
        ([], []),
    ],
)
def test_episodes_go_to_the_fullest_row_that_holds_them(lengths, rows):
    assert best_fit(lengths, 8) == rows


def test_a_plan_says_where_each_episode_begins():
    packing = plan_packing([3, 0, 6, 2], RowRule(4, 1, 1, 8), Shape(2, 8), num_samples=[1, 1, 2, 3])
    assert packing.order.tolist() == [2, 3, 0, 1]
    assert packing.starts.tolist() == [0, 6, 8, 16]
    assert packing.lengths.tolist() == [6, 2, 3, 0]
    # Episode 3 comes behind the two samples of episode 2.
    assert packing.offsets.tolist() == [0, 2, 0, 0]
    assert packing.fill == 11 / 16


def test_an_episode_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="an episode of 9 tokens does not fit rows of 8"):
        plan_packing([3, 9], RowRule(2, 1, 1, 8), Shape(2, 8))


@pytest.mark.parametrize(
    ("rule", "shapes"),
    [
        # Rows of 64 tokens are of 72 too where there is memory for more rows.
        (RowRule(2, 1, 1, 64), [(1, 64), (1, 72), (1, 80), (1, 88), (1, 96), (1, 104), (1, 112)]),
        (RowRule(4, 2, 2, 64), [(2, 64), (4, 64)]),
        (RowRule(8, 1, 8, 64), [(8, 64)]),
        (RowRule(3, 1, 1, 16), [(1, 16), (1, 24), (2, 16), (3, 16)]),
    ],
)
def test_shapes_are_few_rows_each_little_longer(rule, shapes):
    found = list(map(tuple, rule.shapes))
    assert found[: len(shapes)] == shapes
    assert found[-1] == rule.largest


def test_every_shape_divides_over_micro_batches_and_shards():
    for shards in (1, 2, 4):
        for micro_batches in (1, 2, 3, 4, 6):
            rule = RowRule(24 * shards, micro_batches, shards, 40)
            assert rule.largest in rule.shapes
            for shape in rule.shapes:
                parts = rule.parts(shape)
                assert shape.length >= 40 and shape.rows % (parts * shards) == 0
                # No micro-batch has more tokens than one with a row for each episode.
                assert shape.positions // parts <= rule.largest.positions // micro_batches
                assert parts == -(-shape.positions * micro_batches // rule.largest.positions)


def test_rows_that_were_packed_for_another_plan_go_into_equal_micro_batches():
    """Fifteen rows need two micro-batches by their positions, and go into three."""
    rule = RowRule(32, 4, 1, 1024)
    assert rule.least_parts(Shape(15, 1056)) == 2 and rule.parts(Shape(15, 1056)) == 3
    for shards in (1, 2, 4):
        for micro_batches in (1, 2, 4, 8):
            rule = RowRule(32, micro_batches, shards, 64)
            for rows in range(shards, 33, shards):
                for length in (64, 72, 120):
                    parts = rule.parts(Shape(rows, length))
                    assert rows // shards % parts == 0
                    assert parts >= rule.least_parts(Shape(rows, length))
            # Those of the rule itself need no more than by their positions.
            assert all(rule.parts(each) == rule.least_parts(each) for each in rule.shapes)


def test_known_shapes_are_used_again():
    rule, history = RowRule(128, 1, 1, 8), ShapeHistory()
    assert history.choose([8] * 16, rule, 0) == (16, 8)
    # 17 rows with the headroom of a new shape.
    assert history.choose([8] * 17, rule, 0) == (18, 8)
    # 16 rows are little more than 15 and some.
    assert history.choose([8] * 15 + [4], rule, 0) == (16, 8)
    assert history.choose([8] * 10, rule, 0) == (11, 8)
    assert history.choose([8] * 13, rule, 0) == (14, 8)
    assert history.choose([8] * 3, rule, 0) == (4, 8)
    # The sixth is for batches that are larger than all before.
    assert history.choose([8] * 6, rule, 0) == (11, 8)
    assert history.choose([8] * 30, rule, 0) == (32, 8)
    assert history.choose([8] * 20, rule, 0) == (32, 8)
    assert history.choose([8] * 41, rule, 0) == (128, 8)
    assert history.shapes == [(16, 8), (18, 8), (11, 8), (14, 8), (4, 8), (32, 8)]
    # Known ones that another plan's shards do not divide do not count.
    assert history.choose([8] * 9, RowRule(128, 1, 8, 8), 0) == (16, 8)
    assert history.choose([8] * 17, RowRule(128, 1, 8, 8), 0) == (32, 8)


def test_tighter_shape_is_compiled_when_its_compilation_was_wasted():
    rule, history = RowRule(128, 1, 1, 8), ShapeHistory()
    assert history.choose([8] * 20, rule, 2.0) == (21, 8)
    # Each batch wastes half an update more than a tighter shape; a compilation takes two.
    for _ in range(3):
        assert history.choose([8] * 14, rule, 2.0) == (21, 8)
    assert history.wasted == 1.5
    assert history.choose([8] * 14, rule, 1.9) == (15, 8)
    assert history.wasted == 0.0


@pytest.mark.parametrize("program_updates", [0.0, 3.0, 100.0])
@pytest.mark.parametrize("growth", [1.0, 1.02])
def test_a_run_has_few_shapes(growth, program_updates):
    rng, rule, history = np.random.default_rng(0), RowRule(128, 1, 2, 512), ShapeHistory()
    used = set()
    for step in range(60):
        lengths = np.minimum(log_normal(rng, 128, 64 * growth**step), 512).tolist()
        shape = history.choose(lengths, rule, program_updates)
        assert len(best_fit(lengths, shape.length)) <= shape.rows
        used.add(shape)
    # A batch that all of these are too small for has a row for each episode.
    assert len(used - {rule.largest}) <= MOST_SHAPES
    assert growth > 1 or rule.largest not in used
    assert len(used) <= 4 or not program_updates > 50


@pytest.mark.parametrize(("number", "least"), [(128, 0.95), (512, 0.965)])
@pytest.mark.parametrize("shards", [1, 8])
def test_rows_of_a_run_are_full(number, least, shards):
    fills, history = [], ShapeHistory()
    rule = RowRule(number, 1, shards, 8192)
    for seed in range(20):
        lengths = np.minimum(log_normal(np.random.default_rng(seed), number), 8192).tolist()
        shape = history.choose(lengths, rule, 0.0)
        fills.append(plan_packing(lengths, rule, shape).fill)
    assert np.mean(fills) >= least, fills


def test_attention_is_balanced_over_shards_and_micro_batches():
    # Rows of 8 tokens with 64, 34, 32, 16 pairs of tokens: 64 + 16 on a shard, 34 + 32 on another.
    lengths, rows = [8, 5, 3, 4, 4, 4], [[0], [1, 2], [3, 4], [5]]
    placed = balance_rows(rows, lengths, Shape(4, 8), RowRule(16, 1, 2, 8))
    assert placed == {0: [0], 1: [5], 2: [1, 2], 3: [3, 4]}
    # In two micro-batches each has a row of each shard: rows 0 and 2, and rows 1 and 3.
    placed = balance_rows(rows, lengths, Shape(4, 8), RowRule(4, 2, 2, 8))
    assert placed == {0: [0], 2: [1, 2], 1: [3, 4], 3: [5]}


@pytest.mark.parametrize("number", [128, 512])
def test_attention_computes_at_most_twice_the_pairs_of_tokens(number):
    rule = RowRule(number, 1, 8, 8192)
    lengths = np.minimum(log_normal(np.random.default_rng(0), number), 8192).tolist()
    packing = packing_of(lengths, rule)
    segments = np.zeros(packing.shape.positions, np.int32)
    for episode, (start, size) in enumerate(zip(packing.starts, packing.lengths, strict=True)):
        segments[start : start + size] = 1 + episode
    rows = segments.reshape(packing.shape)
    rows = np.pad(rows, ((0, 0), (0, -packing.shape.length % BLOCK_SIZE)))
    blocks = int(jnp.sum(jax.jit(jax.vmap(blocks_looked_at))(rows)))
    # Causal attention has half the squares of the lengths.
    assert blocks * BLOCK_SIZE**2 <= np.square(lengths).sum()
    # Splash's blocks are wider.
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % splash.BLOCK)))
    kernel = splash._kernel(1, rows.shape[1], splash.BLOCK, 0.0, None, interpret=True)

    def visited(row):
        return splash._leave_out_other_documents(kernel, row, splash.BLOCK).fwd_mask_info.block_mask

    blocks = int(jnp.sum(jax.jit(jax.vmap(visited))(rows) > 0))
    assert blocks * splash.BLOCK**2 <= np.square(lengths).sum()


# The gather.


def random_batch(lengths, length: int, *, samples=None, scored=()) -> TrajectoryBatch:
    """On the host: rows of random numbers, and garbage behind the episodes but for segments."""
    rng, shape = np.random.default_rng(len(lengths)), (len(lengths), length)
    fields = {
        name: rng.integers(1, 99, shape).astype(np.int32)
        for name in ("tokens", "turn_ids", "versions")
    }
    fields |= {
        name: rng.normal(size=shape).astype(np.float32)
        for name in ("logprobs", "advantages", *scored)
    }
    segments = np.zeros(shape, np.int32)
    for row, size in enumerate(lengths):
        number = samples[row] if samples else 1
        segments[row, :size] = 1 + np.arange(size) * number // max(1, size)
    allowed = tuple(rng.integers(0, 9, (2, *shape)).astype(np.int32))
    return TrajectoryBatch(**fields, segment_ids=segments, allowed=allowed)


def fields_of(batch) -> dict[str, np.ndarray]:
    paths = jax.tree_util.tree_leaves_with_path(batch)
    return {jax.tree_util.keystr(path): np.asarray(values) for path, values in paths}


def assert_every_token_once(batch, packed, packing) -> None:
    """Episode by episode: the same tokens beside each other, and zeros everywhere else."""
    seen, got = np.zeros(packing.shape, bool), fields_of(packed)
    for episode, start, size, offset in zip(
        packing.order, packing.starts, packing.lengths, packing.offsets, strict=True
    ):
        row, at = divmod(int(start), packing.shape.length)
        if not size:
            continue
        place = row, slice(at, at + int(size))
        assert not seen[place].any()
        seen[place] = True
        for name, values in fields_of(batch).items():
            more = offset if name == ".segment_ids" else 0
            expected = values[episode, :size] + more
            np.testing.assert_array_equal(got[name][place], expected, err_msg=name)
    assert seen.sum() == packing.lengths.sum()
    for name, values in got.items():
        assert not values[~seen].any(), name


@pytest.mark.parametrize(
    ("seed", "mesh"),
    list(enumerate(["data=1", "data=8", "data=2,fsdp=2,tensor=2", "data=2,context=4"])),
)
def test_every_token_is_there_once(mesh, seed):
    layout, rng = training_layout(mesh), np.random.default_rng(seed)
    lengths = np.minimum(log_normal(rng, 32, 6), 24) * (rng.random(32) < 0.9)
    samples = rng.integers(1, 4, 32).tolist()
    batch = random_batch(lengths, 24, samples=samples, scored=("proximal",))
    packing = packing_of(lengths, RowRule(32, 2, layout.num_row_shards, 24), samples)
    assert sorted(packing.order.tolist()) == list(range(32))
    assert np.all(np.diff(packing.starts) >= 0)
    placed = jax.device_put(batch, layout.activations("NS"))
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        packed = jax.block_until_ready(pack_rows(placed, packing, layout))
    packed.validate()
    assert all(
        field.sharding.is_equivalent_to(layout.activations("NS"), 2)
        for field in jax.tree.leaves(packed)
    )
    assert_every_token_once(batch, packed, packing)
    # Neighbours in a row are told apart.
    segments = np.asarray(packed.segment_ids)
    for start, size in zip(packing.starts, packing.lengths, strict=True):
        row, at = divmod(int(start), packing.shape.length)
        if size and at:
            assert segments[row, at - 1] < segments[row, at]


def test_a_batch_without_tokens_is_padding():
    layout = training_layout("data=8")
    packing = packing_of([0] * 16, RowRule(16, 1, 8, 8))
    assert packing.shape == (8, 8)
    placed = jax.device_put(random_batch([0] * 16, 8), layout.activations("NS"))
    packed = pack_rows(placed, packing, layout)
    assert not any(np.asarray(field).any() for field in jax.tree.leaves(packed))


def test_rows_of_padding_come_behind():
    layout = training_layout("data=4,tensor=2")
    batch = random_batch([3, 4, 5, 6], 8)
    longer = add_rows(jax.device_put(batch, layout.activations("NS")), 8)
    for name, values in fields_of(batch).items():
        got = fields_of(longer)[name]
        np.testing.assert_array_equal(got[:4], values)
        assert not got[4:].any()


# The update.

VOCAB, EPISODES, LENGTH = 32, 16, 24
DENSE = ModelConfig(
    num_layers=2, width=32, num_heads=4, num_kv_heads=2, head_size=8, ffn_size=64, init_scale=4.0
)
CONTROLS = np.array([1e-3, 0.05], np.float32)


def episodes() -> tuple[TrajectoryBatch, list[int], list[int]]:
    """On the host: 16 episodes of 0 to 24 tokens, their lengths and samples; some have two.

    Some of the policy's tokens were chosen among two.
    """
    rng = np.random.default_rng(3)
    lengths = [24, 0, *rng.integers(4, 15, EPISODES - 2).tolist()]
    samples = [1 + (row % 3 == 0) for row in range(EPISODES)]
    batch = random_batch(lengths, LENGTH, samples=samples)
    positions = np.arange(LENGTH)
    # A sample begins with a prompt.
    begins = np.diff(batch.segment_ids, axis=1, prepend=0) != 0
    policy = (batch.segment_ids > 0) & ~begins & (positions % 4 > 0)
    tokens, is_restricted = batch.tokens % VOCAB, policy & (rng.random(policy.shape) < 0.4)
    pair = tokens, (tokens + rng.integers(1, VOCAB, tokens.shape)) % VOCAB
    return (
        dataclasses.replace(
            batch,
            tokens=tokens,
            allowed=tuple(np.where(is_restricted, 1 + ids, 0).astype(np.int32) for ids in pair),
            turn_ids=np.where(policy, 1 + positions // 4, 0).astype(np.int32),
            logprobs=(batch.logprobs - 3).astype(np.float32),
        ),
        lengths,
        samples,
    )


def learner_of(kind: str, **settings) -> Learner:
    mixture = kind == "mixture"
    return Learner(
        experts.MODEL if mixture else DENSE,
        TrainConfig(
            max_grad_norm=1e9, logprob_chunk=10, balance_coefficient=0.5 * mixture, **settings
        ),
        dataclasses.replace(
            ALGORITHMS["reinforce"], settings=ReinforceSettings(clip_low=0.2, clip_high=0.3)
        ),
        vocab_size=VOCAB,
        temperature=0.8,
        importance_cap=1.3,
        layout=functools.partial(make_layout, row_axes=TRAINING_ROWS),
        seed=1,
    )


def updated(kind: str, mesh: str, *, packs: bool, micro_batches: int = 1):
    """Gradients (read from Adam's first moment), metrics and scores of an update.

    The log-probs are found by `Learner.score`, as for the first of two epochs.
    """
    learner, layout = learner_of(kind, epochs=2), training_layout(mesh)
    batch, lengths, samples = episodes()
    batch = jax.device_put(batch, layout.activations("NS"))
    if packs:
        rule = RowRule(EPISODES, micro_batches, layout.num_row_shards, LENGTH)
        packing = packing_of(lengths, rule, samples)
        assert packing.shape.rows <= EPISODES // 2
        assert rule.parts(packing.shape) == (2 if micro_batches == 4 else 1)
        batch, micro_batches = pack_rows(batch, packing, layout), rule.parts(packing.shape)
    plan = TrainPlan(layout.shape, micro_batches, "none")
    state = learner.init_state(plan.mesh)
    (batch,) = learner.score([plan], state, [batch])
    state, metrics = learner.update(plan, state, batch, CONTROLS)
    grads = jax.tree.map(lambda m: np.asarray(m) / 0.1, state.optimizer[1].mu)
    found = np.asarray(batch.proximal)[np.asarray(batch.turn_ids) > 0]
    return grads, read_metrics(metrics), np.sort(found)


def assert_same_gradients(got, expected):
    def check(path, grad, other):
        largest = np.abs(other).max()
        np.testing.assert_allclose(
            grad, other, atol=3e-5 * largest, err_msg=jax.tree_util.keystr(path)
        )
        assert largest > 1e-4

    jax.tree_util.tree_map_with_path(check, got, expected)


@pytest.mark.slow_except("dense-*")
@pytest.mark.parametrize(
    ("kind", "mesh", "micro_batches"),
    [
        # With 16 rows in 4 parts, 8 or fewer packed rows are in 2.
        ("dense", "data=2,fsdp=2,context=2", 4),
        ("mixture", "data=2,fsdp=2,tensor=2", 1),
    ],
)
def test_a_packed_update_is_the_same(kind, mesh, micro_batches):
    expected = updated(kind, "data=1", packs=False)
    got = updated(kind, mesh, packs=True, micro_batches=micro_batches)
    assert got[1] == pytest.approx(expected[1], rel=5e-5, abs=1e-6)
    assert expected[1]["truncated_fraction"] > 0.05 and expected[1]["policy_tokens"] > 50
    np.testing.assert_allclose(got[2], expected[2], atol=1e-5)
    assert_same_gradients(got[0], expected[0])


PENALTY = {"kl_coefficient": 0.5, "kl_estimator": "k1", "kl_in": "reward"}


@functools.cache
def learner_by(name: str) -> Learner:
    """A learner of which each algorithm's programs are compiled once.

    With a penalty in the rewards, where the algorithm can have one.
    """
    algorithm = ALGORITHMS[name]
    if isinstance(algorithm.settings, PolicySettings):
        settings = dataclasses.replace(algorithm.settings, **PENALTY)
        algorithm = dataclasses.replace(algorithm, settings=settings)
    return Learner(
        dataclasses.replace(DENSE, num_layers=1),
        TrainConfig(max_grad_norm=1e9),
        algorithm,
        vocab_size=VOCAB,
        temperature=0.8,
        importance_cap=0.0,
        layout=functools.partial(make_layout, row_axes=TRAINING_ROWS),
        seed=1,
    )


def updated_in_order(name: str, order: np.ndarray):
    """Gradients and metrics of an update by an algorithm, and the tokens as they are packed.

    The episodes are in groups of four and have one turn or more with a reward each.
    """
    learner, layout = learner_by(name), training_layout("data=1")
    batch, lengths, samples = episodes()
    rewards = np.random.default_rng(0).normal(size=(EPISODES, LENGTH))
    outcomes = [
        make_outcome(
            row,
            group=row // 4,
            turn_rewards=tuple(
                rewards[row, : max(1, batch.turn_ids[row, : lengths[row]].max(initial=0))]
            ),
            stop_reason="end" if lengths[row] else "environment_error",
            num_tokens=lengths[row],
            # Each turn answers one of two messages.
            turn_states=tuple(TurnState((row + turn) % 2, 0) for turn in range(LENGTH)),
        )
        for row in order
    ]
    batch = jax.tree.map(lambda field: field[order], batch)
    facts = row_facts(learner.algorithm, outcomes, LENGTH, {})
    at_turn = np.take_along_axis(facts["advantages"], np.maximum(batch.turn_ids, 1) - 1, axis=1)
    groups = facts.get("groups")
    if groups is not None:
        groups = np.where(batch.segment_ids > 0, groups[:, None], 0)
    batch = dataclasses.replace(
        batch, advantages=np.where(batch.turn_ids > 0, at_turn, 0), groups=groups
    )
    packing = packing_of(
        facts["lengths"], RowRule(EPISODES, 1, 1, LENGTH), [samples[row] for row in order]
    )
    packed = pack_rows(jax.device_put(batch, layout.activations("NS")), packing, layout)
    plan = TrainPlan(layout.shape, 1, "none")
    state = learner.init_state(plan.mesh)
    if state.critic is not None:
        head = state.critic["value_head"] + 0.1
        state = dataclasses.replace(state, critic=state.critic | {"value_head": head})
    (scored,) = learner.score([plan], state, [packed])
    controls = np.full(learner.num_controls, 1e-3, np.float32)
    state, metrics = learner.update(plan, state, scored, controls)
    grads = [jax.tree.map(lambda m: np.asarray(m) / 0.1, each[1].mu) for each in state.moments]
    return grads, read_metrics(metrics), np.asarray(packed.tokens)


@pytest.mark.slow_except("ppo", "gigpo")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_order_of_episodes_and_groups_does_not_matter(name):
    """The groups in another order, and the episodes of each group apart."""
    grads, metrics, tokens = updated_in_order(name, np.arange(EPISODES))
    shuffled = np.random.default_rng(1).permutation(EPISODES)
    others, found, placed = updated_in_order(name, shuffled)
    assert placed.shape == tokens.shape and (placed != tokens).any()
    assert found == pytest.approx(metrics, rel=5e-5, abs=1e-6)
    assert metrics["policy_tokens"] > 50 and abs(metrics["loss"]) > 1e-3
    assert_same_gradients(others, grads)


def test_the_first_token_of_an_episode_is_not_scored_from_its_neighbour():
    layout = training_layout("data=1")
    batch, lengths, samples = episodes()
    packing = packing_of(lengths, RowRule(EPISODES, 1, 1, LENGTH), samples)
    packed = pack_rows(jax.device_put(batch, layout.activations("NS")), packing, layout)
    params = learner_of("dense").init_state(layout.shape).params
    score = jax.jit(functools.partial(score_batch, DENSE, TrainConfig(), layout, 1.0))
    scores = score(params, packed)
    segments = np.asarray(packed.segment_ids)
    begins = (np.diff(segments, axis=1, prepend=0) != 0) & (segments > 0)
    assert begins[:, 1:].any()
    assert not np.asarray(scores.logprobs)[begins].any()
    assert not np.asarray(scores.entropy)[begins].any()
    assert np.asarray(scores.logprobs)[~begins & (segments > 0)].all()
