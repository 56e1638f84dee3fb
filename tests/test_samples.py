# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Episodes that fork into samples, from their environment to the trainer's log-probs.

The chat template here forgets some digits of the policy's earlier turns, so that an episode forks
behind exactly those turns that have one.
"""

import dataclasses
import functools
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.dispatch.pack import dispatch, sample_starts
from earl_jax.engine.config import NO_LIMIT, Sampling
from earl_jax.engine.engine import Engine, Policy, empty_session
from earl_jax.engine.pages import Pool
from earl_jax.envs.environment import Message, Start, StepResult
from earl_jax.envs.games.board_game import BoardGame
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.envs.text.conversation import Conversation
from earl_jax.rollout.actor import collect as play_all
from earl_jax.rollout.config import CacheRules
from earl_jax.rollout.results import Rollout
from earl_jax.rollout.service import RolloutService
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.scoring import score_batch
from earl_jax.trajectory import Trajectory, Turn
from tests.support.episodes import (
    CONFIG,
    FORGOTTEN,
    MODEL,
    NUM_DEVICES,
    GrowPool,
    check_rows,
    engine,
    forgetful_renderer,
    tasks,
    weights,
)

NUM_TASKS, TURNS, MAX_TOKENS = 32, 4, 256
# Of a row shard; enough for all that its two slots play.
PAGES = 24


class Quiz:
    """Asks as a system and a user, answers as a tool or a user; four replies."""

    def __init__(self, seed: int):
        self.seed, self.replies = seed, 0

    def start(self) -> Start:
        system = Message(role="system", text="count")
        return Start(role="x", messages=(system, Message(role="user", text=f"{self.seed}?")))

    def step(self, reply: str) -> StepResult:
        self.replies += 1
        if self.replies == TURNS:
            return StepResult(reward=1.0, done=True, stop_reason="win")
        if self.replies % 2:
            messages = (Message(role="tool", text="né"), Message(role="user", text="so?"))
            return StepResult(reward=0.0, done=False, messages=messages)
        return StepResult(text=f"{self.seed}", reward=0.0, done=False)


def collect(
    history: str,
    todo=None,
    max_tokens: int = MAX_TOKENS,
    grow_pool: GrowPool | None = None,
    max_context: int = NO_LIMIT,
    player: Engine | None = None,
    cache_rules: CacheRules | None = None,
    make=lambda task: Quiz(task.episode),
    pages: int = PAGES,
    **changes,
) -> Rollout:
    player = player or engine()
    pool = EnvironmentPool(2, timeout_s=60.0)
    shards, policy = player.layout.num_row_shards, Policy(params=weights(), version=2)
    service = RolloutService(
        empty_session(player, policy, max_tokens, Pool(shards, pages * NUM_DEVICES // shards)),
        dataclasses.replace(CONFIG, **changes),
        lambda: Conversation(forgetful_renderer(), history),
        pool,
        make,
        grow_pool or GrowPool(),
        num_devices=NUM_DEVICES,
        sampling=Sampling(),
        max_context=max_context,
        cache_rules=cache_rules,
    )
    rollout = play_all(service, todo or tasks(NUM_TASKS))
    pool.close()
    return rollout


@pytest.fixture(scope="module")
def forked() -> Rollout:
    return collect("fork")


def most_forked(rollout: Rollout) -> Trajectory:
    return max(rollout.trajectories, key=lambda trajectory: len(trajectory.sample_starts))


def test_an_episode_forks_behind_the_turns_that_the_template_rewrites(forked):
    """And nowhere else; a sample begins with the template's own text of all that was said."""
    seen = set()
    for trajectory in forked.trajectories:
        assert trajectory.stop_reason == "win" and trajectory.num_turns == TURNS
        sampled = []
        for reply, answer in zip(trajectory.turns[1::2], trajectory.turns[2::2], strict=False):
            sampled.append(reply.text)
            assert answer.forks == any(digit in reply.text for digit in FORGOTTEN)
            seen.add(answer.forks)
            text = forgetful_renderer().decode(answer.token_ids)
            kept = [
                f"<|assistant|>{t.translate(dict.fromkeys(map(ord, FORGOTTEN)))}" for t in sampled
            ]
            assert [
                part in text for part in ("<|user|>system\ncount<|end|>", kept[-1] + "<|end|>")
            ] == [answer.forks, answer.forks]
            assert text.count("<|assistant|>") == (1 + len(sampled) if answer.forks else 1)
            assert text.endswith("<|end|><|assistant|>")
        assert len(trajectory.sample_starts) == 1 + sum(turn.forks for turn in trajectory.turns)
    assert seen == {True, False}
    assert max(len(t.sample_starts) for t in forked.trajectories) >= 3


def test_rows_hold_every_sample_end_to_end_and_nothing_that_was_not_sampled_is_the_policys(forked):
    check_rows(forked, NUM_TASKS)
    turn = forked.trajectories[0].turns[2]
    assert turn.messages == (("tool", "né"), ("user", "so?")) and turn.text == "né\nso?"
    assert all(not turn.messages for turn in forked.trajectories[0].turns[4::4])


def lengths_of_samples(trajectory: Trajectory) -> list[int]:
    bounds = [*trajectory.sample_starts, trajectory.num_tokens]
    return [end - begin for begin, end in itertools.pairwise(bounds)]


def test_it_is_the_sample_that_may_not_be_longer_than_the_model_reads(forked):
    """Episodes come to more than the longest of their samples, which the model reads alone."""
    lengths = {t.episode: lengths_of_samples(t) for t in forked.trajectories}
    longest = max(max(samples) for samples in lengths.values())
    assert any(sum(samples) > longest for samples in lengths.values())
    assert collect("fork", max_context=longest).trajectories == forked.trajectories
    cut = collect("fork", max_context=longest - 1)
    for whole, same in zip(forked.trajectories, cut.trajectories, strict=True):
        if max(lengths[whole.episode]) < longest:
            assert same == whole
        else:
            assert same.stop_reason == "episode_too_long"
            assert max(lengths_of_samples(same)) < longest


def test_forks_are_read_anew_and_counted(forked):
    environment_tokens = sum(
        len(turn.token_ids)
        for trajectory in forked.trajectories
        for turn in trajectory.turns
        if turn.author == "environment"
    )
    assert forked.stats.prefill_tokens + forked.stats.shared_tokens == environment_tokens
    assert forked.stats.shared_tokens > 0, "the system message at least is read once a data shard"
    assert forked.stats.context_tokens_max == max(t.num_tokens for t in forked.trajectories)
    # What is in the caches is less than what is in the rows: earlier samples are forgotten.
    flat = collect("append")
    assert not any(turn.forks for t in flat.trajectories for turn in t.turns)
    assert flat.stats.prefill_tokens < environment_tokens
    alone = collect("fork", tasks(1, first=most_forked(forked).episode))
    (trajectory,) = alone.trajectories
    ids = [turn.token_ids for turn in trajectory.turns]
    assert ids == [turn.token_ids for turn in most_forked(forked).turns]
    ends = (*trajectory.sample_starts[1:], trajectory.num_tokens)
    samples = [end - start for start, end in zip(trajectory.sample_starts, ends, strict=True)]
    assert alone.stats.tokens_in_flight_max == max(samples) < sum(samples) / 2


def test_fork_of_a_preempted_episode_drops_its_saved_pages_and_rows_grow_under_it(forked):
    """Pages for one sample a data shard of two slots; environments answer meanwhile."""
    longest = forked.stats.tokens_in_flight_max // NUM_DEVICES + 2 * CONFIG.chunk_size
    pages = -(-longest // CONFIG.page_size)
    preempted = collect(
        "fork",
        max_tokens=MAX_TOKENS // 2,
        pages=pages,
        grow_pool=GrowPool(most_pages=pages),
        cache_rules=CacheRules(preemption="host"),
    )
    assert preempted.session.max_tokens == MAX_TOKENS
    check_rows(preempted, NUM_TASKS)
    assert preempted.stats.preempted_episodes > 0
    assert preempted.stats.preempted_host_bytes > 0
    for one, other in zip(forked.trajectories, preempted.trajectories, strict=True):
        assert [t.token_ids for t in one.turns] == [t.token_ids for t in other.turns]
        assert one.sample_starts == other.sample_starts


def test_a_fork_behind_a_sample_that_is_read_again_in_part_stands_at_its_place(forked):
    """New weights come while the environment thinks; it answers when a chunk is read again."""
    arrived, may_answer = threading.Event(), threading.Event()

    class Slow(Quiz):
        def step(self, reply: str) -> StepResult:
            arrived.set()
            assert may_answer.wait(60)
            may_answer.clear()
            return super().step(reply)

    whole, player, pool = most_forked(forked), engine(), EnvironmentPool(1, timeout_s=60.0)
    policy = Policy(params=weights(), version=2)
    service = RolloutService(
        empty_session(player, policy, MAX_TOKENS, Pool(NUM_DEVICES, PAGES)),
        dataclasses.replace(CONFIG, patience_s=0.001),
        lambda: Conversation(forgetful_renderer(), "fork"),
        pool,
        lambda task: Slow(task.episode),
        GrowPool(),
        num_devices=NUM_DEVICES,
        sampling=Sampling(),
        max_context=NO_LIMIT,
    )
    service.submit(tasks(1, first=whole.episode))
    finished, partly_read = [], 0
    while not finished:
        if arrived.wait(0.05):
            arrived.clear()
            service.update_weights(Policy(params=weights(), version=2), "recompute")
            finished += service.step()
            partly_read += any(each is not None and len(each.queue) > 0 for each in service._slots)
            may_answer.set()
        finished += service.step()
    assert partly_read, "a sample is longer than a chunk"
    [episode] = finished
    ids = [token for turn in episode.trajectory.turns for token in turn.token_ids]
    assert ids == [token for turn in whole.turns for token in turn.token_ids]
    row = np.asarray(service.session.state.experience.tokens)[episode.row]
    assert row[: len(ids)].tolist() == ids and not row[len(ids) :].any()
    pool.close()


@pytest.fixture(scope="module")
def self_play() -> Rollout:
    def make(task):
        return BoardGame(opponent="self", illegal_reward=-2.0)

    return collect("append", tasks(NUM_TASKS), make=make)


def test_a_side_of_self_play_sees_its_own_messages_and_replies_id_for_id(self_play):
    """And nothing else: of the other side it is told the moves."""
    render, longest = forgetful_renderer(), 0
    for trajectory in self_play.trajectories:
        messages, replies = trajectory.turns[::2], trajectory.turns[1::2]
        roles = ["xo"[turn % 2] for turn in range(len(messages))]
        assert [*(trajectory.turn_roles or "x" * len(replies))] == roles
        assert [turn.forks for turn in messages] == [turn > 0 for turn in range(len(messages))]
        seen = {"x": render.first("tic_tac_toe. you play x. moves are 0 to 8.")}
        for turn, (role, message) in enumerate(zip(roles, messages, strict=True)):
            told = replies[turn - 1].text if turn else ""
            if turn == 1:
                opening = f"tic_tac_toe. you play o. moves are 0 to 8. x plays {told}."
                seen[role] = render.first(opening)
            elif turn:
                seen[role] += render.answer(told)
            assert message.token_ids == seen[role]
            seen[role] += replies[turn].token_ids
        longest = max(longest, len(roles))
    assert longest >= 4, "both sides see replies of their own"
    check_rows(self_play, NUM_TASKS)


@pytest.fixture(scope="module")
def trainer_params():
    """The weights as the trainer has them: layers stacked."""
    engines = weights()
    layers = jax.tree.map(lambda *leaves: np.stack(leaves), *engines["layers"])
    return {
        **jax.tree.map(np.asarray, {k: v for k, v in engines.items() if k != "layers"}),
        "layers": layers,
    }


def test_the_trainer_scores_every_sample_as_it_was_sampled(forked, trainer_params):
    """Its log-probs of the policy's tokens are the engine's, fork or not, on other layouts too."""
    layout = make_layout(MeshShape(data=2, fsdp=2, tensor=2))
    rows = forked.experience.tokens.shape[0]
    lengths = np.zeros(rows, np.int32)
    lengths[:NUM_TASKS] = [t.num_tokens for t in forked.trajectories]
    starts = np.full((rows, 4), MAX_TOKENS)
    starts[:NUM_TASKS] = sample_starts([t.sample_starts for t in forked.trajectories], MAX_TOKENS)
    facts = {"length": MAX_TOKENS, "lengths": lengths, "advantages": np.ones((rows, 8), np.float32)}
    score = jax.jit(functools.partial(score_batch, MODEL, TrainConfig(), layout, 1.0))
    params = jax.tree.map(jnp.asarray, trainer_params)

    def differences(**more) -> np.ndarray:
        batch = dispatch(forked.experience, layout, **facts, **more).batch
        spoken = np.asarray(batch.turn_ids) > 0
        return np.abs(np.asarray(score(params, batch).logprobs - batch.logprobs))[spoken]

    differs = differences(sample_starts=starts)
    assert len(differs) == sum(t.num_policy_tokens for t in forked.trajectories)
    assert differs.max() < 5e-5
    # The claim can fail: rows taken for one sample each are scored otherwise.
    assert differences().max() > 1e-3


def test_the_table_of_samples_by_hand():
    def trajectory(*turns):
        return Trajectory(
            episode=0,
            group=0,
            role="x",
            turns=tuple(
                Turn(author="environment", text="", token_ids=(1,) * n, forks=forks)
                for n, forks in turns
            ),
            turn_rewards=(),
            stop_reason="win",
            row=0,
        )

    whole, failed = trajectory((3, False), (2, False)), trajectory()
    twice = trajectory((3, False), (2, True), (4, False), (1, True))
    assert whole.sample_starts == failed.sample_starts == (0,)
    assert twice.sample_starts == (0, 3, 9)
    assert sample_starts([(0,), (0,)], 16).tolist() == [[0], [0]]
    assert sample_starts([(0,), (0, 3, 9)], 16).tolist() == [[0, 16, 16, 16], [0, 3, 9, 16]]
