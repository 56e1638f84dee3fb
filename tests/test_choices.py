# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Turns that must be one of some replies: no other comes, and log-probs are among these alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_collect import (
    CONFIG,
    MODEL,
    assert_same_episodes,
    check_rows,
    collect,
    renderer,
    tasks,
    weights,
)
from test_control import Script, swap_to
from test_tasks import GIVEN, one_step

from earl_jax.config_file import make_config
from earl_jax.envs.environment import EnvConfig, Start, StepResult
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.envs.repertoire import all_replies, make_environment
from earl_jax.models.decoder import forward_rows, head_weights
from earl_jax.rollout.choices import (
    ALWAYS,
    FREE,
    allowed_logits,
    check_choices,
    choice_tree,
    no_choices,
    set_allowed,
    set_choices,
    walk,
)
from earl_jax.rollout.config import Sampling
from earl_jax.rollout.engine import PolicyEngine
from earl_jax.rollout.engine_config import EngineConfig
from earl_jax.rollout.slots import SlotRules
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.world import World

MASKED = EnvConfig(mask_illegal=True)
HOT = 300.0
BRANCHES = 18
REPLIES = ((5, 0), (5, 7, 0), (6, 0))


@pytest.fixture(scope="module")
def pool():
    pool = EnvironmentPool(2, timeout_s=60.0)
    yield pool
    pool.close()


@functools.cache
def engine_for(branches: int, burst: int = CONFIG.burst, mesh: MeshShape | None = None):
    rules = SlotRules(
        burst=burst,
        end_of_turn_ids=renderer().end_of_turn_ids,
        model_logprobs=True,
        choice_branches=branches,
    )
    config = EngineConfig(
        model=MODEL,
        vocab_size=320,
        num_slots=CONFIG.num_slots,
        num_rows=CONFIG.episodes_per_step,
        chunk_size=CONFIG.chunk_size,
        rules=rules,
        seed=3,
    )
    return PolicyEngine(config, make_layout(mesh or MeshShape(data=8)))


def test_the_tree_of_three_replies_by_hand():
    parents, tokens = choice_tree(REPLIES)
    assert parents.tolist() == [0, 1, 1, 3, 0, 5]
    assert tokens.tolist() == [5, 0, 7, 0, 6, 0]
    check_choices(REPLIES, 6)
    with pytest.raises(ValueError, match="6 branches; the engine has room for 5"):
        check_choices(REPLIES, 5)


def test_a_walk_meets_the_tokens_that_may_come_and_no_others():
    """Three slots: one says 5 7 0, one 6 0, one may say anything."""
    rows = no_choices(3, 8)
    for slot in (0, 1):
        set_choices(rows, slot, REPLIES)
    choices = jax.tree.map(jnp.asarray, rows)
    logits = jnp.arange(30, dtype=jnp.float32).reshape(3, 10)
    # Behind its reply a slot may say anything.
    expected = [({5, 6}, {5, 6}), ({0, 7}, {0}), ({0}, set(range(10)))]
    for said, allowed in zip(([5, 6, 9], [7, 0, 9], [0, 0, 9]), expected, strict=True):
        masked = np.asarray(allowed_logits(logits, choices))
        for slot, may in enumerate(allowed):
            places = sorted(may)
            assert np.flatnonzero(np.isfinite(masked[slot])).tolist() == places
            np.testing.assert_array_equal(masked[slot, places], np.asarray(logits)[slot, places])
        np.testing.assert_array_equal(masked[2], logits[2])
        # Who does not move stays where it is.
        assert walk(choices, jnp.array(said), jnp.zeros(3, bool)).node.tolist() == (
            choices.node.tolist()
        )
        choices = walk(choices, jnp.array(said), jnp.ones(3, bool))
    assert choices.node.tolist() == [FREE] * 3


def test_certain_tokens_alone_come_for_as_long_as_the_turn_lasts():
    rows = no_choices(2, 3)
    set_allowed(rows, 1, (7, 2))
    choices = jax.tree.map(jnp.asarray, rows)
    logits = jnp.zeros((2, 10))
    for said in (7, 2, 2):
        masked = np.asarray(allowed_logits(logits, choices))
        assert np.isfinite(masked[0]).all()
        assert np.flatnonzero(np.isfinite(masked[1])).tolist() == [2, 7]
        choices = walk(choices, jnp.array([said, said]), jnp.ones(2, bool))
    assert choices.node.tolist() == [FREE, ALWAYS]


class Words:
    """Allows words of different lengths that begin alike, then others, then anything."""

    ROUNDS = (("1", "12", "123", "21"), ("0", "00"), ())

    def __init__(self, heard: list[tuple[str, ...]]):
        self.heard, self.replies = heard, []

    def start(self):
        return Start(text="go.", role="x", choices=self.ROUNDS[0])

    def step(self, reply: str):
        self.replies.append(reply)
        self.heard.append(tuple(self.replies))
        if len(self.replies) == len(self.ROUNDS):
            return StepResult(reward=1.0, done=True, stop_reason="win")
        choices = self.ROUNDS[len(self.replies)]
        return StepResult(text="7.", reward=0.0, done=False, choices=choices)


def hand_logprobs(replies, ids, logits):
    """Log-probs of a turn's ids among these replies, or all, from the logits at each of them."""
    logprobs = []
    for index, token in enumerate(ids):
        so_far = tuple(ids[:index])
        may = sorted({r[index] for r in replies if len(r) > index and r[:index] == so_far})
        of = logits[index][may] if replies else logits[index]
        logprobs.append(float(logits[index][token] - np.logaddexp.reduce(of)))
    return logprobs


def full_logits(trajectory):
    """f64[T,V] behind each token of an episode, by the trainer's forward pass."""
    params = jax.tree.map(np.asarray, weights())
    params["layers"] = jax.tree.map(lambda *layers: np.stack(layers), *params["layers"])
    layout = make_layout(MeshShape(), jax.devices()[:1])
    ids = np.zeros((1, 64), np.int32)
    whole = [token for turn in trajectory.turns for token in turn.token_ids]
    ids[0, : len(whole)] = whole
    segments = (np.arange(64) < len(whole)).astype(np.int32)[None]
    hidden = jax.jit(lambda t, s: forward_rows(MODEL, layout, params, t, s))(ids, segments)
    return np.asarray(jnp.einsum("BTD,DV->BTV", hidden, head_weights(params)), np.float64)[0]


def test_only_the_allowed_is_said_with_log_probs_among_the_allowed(pool):
    heard = []
    # Else what this policy is sure of is all that is ever said.
    hot = Sampling(temperature=HOT)
    rollout = collect(
        pool, tasks(40), lambda task: Words(heard), player=engine_for(BRANCHES), sampling=hot
    )
    check_rows(rollout, 40)
    # Every reply that may be said is, by some, and no other; then anything.
    assert {said[0] for said in heard} == set(Words.ROUNDS[0])
    assert {said[1] for said in heard if len(said) > 1} == set(Words.ROUNDS[1])
    anything = [t.turns[5].token_ids for t in rollout.trajectories if len(t.turns) == 6]
    assert len({token for ids in anything for token in ids}) > 30
    for trajectory in rollout.trajectories[:4]:
        logits = full_logits(trajectory)
        place = 0
        rounds = itertools.chain.from_iterable(zip([None] * 3, Words.ROUNDS, strict=True))
        for turn, words in zip(trajectory.turns, rounds, strict=True):
            ids = turn.token_ids
            if turn.author == "policy":
                there = logits[place - 1 : place - 1 + len(ids)]
                under_model = hand_logprobs((), ids, there)
                np.testing.assert_allclose(turn.model_logprobs, under_model, atol=1e-4)
                replies = [renderer().reply(word) for word in words or ()]
                expected = hand_logprobs(replies, ids, there / HOT)
                np.testing.assert_allclose(turn.logprobs, expected, atol=1e-4)
            place += len(ids)


@pytest.mark.parametrize(
    ("burst", "mesh"), [(1, MeshShape(data=8)), (8, MeshShape(data=4, tensor=2))]
)
def test_bursts_and_meshes_change_nothing(pool, burst, mesh):
    first, other = (
        collect(
            pool,
            tasks(24),
            lambda task: Words([]),
            player=engine_for(BRANCHES, length, where),
            burst=length,
        )
        for length, where in ((CONFIG.burst, MeshShape(data=8)), (burst, mesh))
    )
    assert_same_episodes(first.trajectories, other.trajectories)
    check_rows(other, 24)


def test_a_turn_that_is_read_again_in_its_middle_stays_among_its_choices(pool):
    """Other weights take over between two tokens of a turn, of every turn of somebody."""
    heard = []
    rollout = collect(
        pool,
        tasks(16),
        lambda task: Words(heard),
        player=engine_for(BRANCHES, 1),
        burst=1,
        sampling=Sampling(temperature=HOT),
        control=Script({number: swap_to(number, "recompute") for number in (2, 4, 7)}),
    )
    check_rows(rollout, 16)
    turns = [turn for t in rollout.trajectories for turn in t.turns[1:4:2]]
    assert any(len(set(turn.versions)) > 1 for turn in turns)
    assert {said[0] for said in heard} <= set(Words.ROUNDS[0])
    assert {said[1] for said in heard if len(said) > 1} <= set(Words.ROUNDS[1])


@pytest.mark.slow
def test_no_shard_waits_for_another_in_the_choices():
    text = engine_for(BRANCHES, 8, MeshShape(data=4, tensor=2)).lower_play(32).compile().as_text()
    assert "collective-permute" not in text


def test_no_illegal_move_is_played_where_they_are_masked(pool):
    """Random play loses half of its games to illegal moves where they are not."""
    replies = tuple(map(renderer().reply, all_replies(MASKED)))
    assert len(choice_tree(replies)[0]) == BRANCHES
    player = engine_for(BRANCHES)

    def make(env):
        return lambda task: make_environment(env, seed=task.env_seed, player=task.player)

    masked = collect(pool, tasks(40), make(MASKED), player=player)
    check_rows(masked, 40)
    assert {t.stop_reason for t in masked.trajectories} <= {"win", "draw", "loss"}
    free = collect(pool, tasks(40), make(EnvConfig()), player=player)
    assert sum(t.stop_reason == "illegal" for t in free.trajectories) > 15


def test_choices_without_room_end_their_own_episode(pool):
    def make(task):
        return Words([]) if task.episode % 2 else make_environment(EnvConfig(), seed=1, player=0)

    rollout = collect(pool, tasks(8), make)
    for trajectory in rollout.trajectories:
        assert (trajectory.stop_reason == "unencodable") == (trajectory.episode % 2 == 1)
    assert "room for 0 (SlotRules.choice_branches)" in rollout.trajectories[1].detail


@pytest.mark.slow
def test_a_run_with_masked_moves_learns_from_a_ratio_of_one():
    given = {**GIVEN, "env": {"mask_illegal": True}}
    record = one_step(World(make_config(given)))
    assert {t.stop_reason for t in record.trajectories} <= {"win", "draw", "loss"}
    assert record.updates[0].mismatch_max < 1e-4 and record.updates[0].clip_fraction == 0


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="mask_illegal is True with config.train.ratio 'behav"):
        make_config({}, ["env.mask_illegal=True"])
    masked = {**GIVEN, "env": {"mask_illegal": True}}
    with pytest.raises(ValueError, match="env.illegal_reward = -0.5 has no effect.*mask_illegal"):
        make_config(masked, ["env.illegal_reward=-0.5"])
    with pytest.raises(ValueError, match="takes 2 tokens.*config.rollout.max_turn_tokens is 1"):
        World(make_config(masked, ["rollout.max_turn_tokens=1"]))
    assert World(make_config(masked)).choice_branches == 18
    assert World(make_config(GIVEN)).choice_branches == 0
