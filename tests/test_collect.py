# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Episodes of real environments on a real engine: every task once, every token once."""

import collections
import dataclasses
import heapq
import math
import threading
import time

import pytest

from earl_jax.engine.engine import Engine
from earl_jax.envs.environment import Start, StepResult
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.envs.text.codec import TextCodec
from earl_jax.rollout.config import Limits
from earl_jax.rollout.task import Prompt, Task
from earl_jax.sharding.layout import MeshShape
from tests.support.environments import Lecture, Talker, Watched
from tests.support.episodes import (
    CONFIG,
    NUM_DEVICES,
    GrowPool,
    assert_same_episodes,
    check_nothing_is_held,
    check_rows,
    check_turns,
    collect,
    engine,
    renderer,
    tasks,
    tictactoe,
    weights,
)


@pytest.fixture(scope="module")
def games(pool):
    """Forty games of Tic-Tac-Toe by a policy of random moves, on sixteen slots."""
    return collect(pool, tasks(40))


def test_every_task_gets_one_trajectory_in_order(games):
    assert [t.episode for t in games.trajectories] == list(range(40))
    assert [t.group for t in games.trajectories] == list(range(40))
    assert [t.row for t in games.trajectories] == list(range(40))
    assert [t.role for t in games.trajectories] == ["x", "o"] * 20
    reasons = {t.stop_reason for t in games.trajectories}
    assert reasons <= {"win", "loss", "draw", "illegal"}
    assert {"win", "loss", "illegal"} <= reasons
    assert {t.num_turns for t in games.trajectories} >= {1, 2, 3, 4}
    for t in games.trajectories:
        assert len(t.turn_rewards) == t.num_turns
        assert t.reward == {"win": 1.0, "draw": 0.0}.get(t.stop_reason, -1.0)


def test_a_trajectory_is_the_game_that_its_replies_play(games):
    """The engine's replies, given to a fresh environment, get the same answers."""
    for task, trajectory in zip(tasks(40), games.trajectories, strict=True):
        check_turns(trajectory)
        environment = tictactoe(task)
        texts = [environment.start().text]
        for turn in trajectory.turns[1::2]:
            result = environment.step(turn.text)
            texts += [] if result.done else [result.text]
        assert result.done and result.stop_reason == trajectory.stop_reason
        assert texts == [turn.text for turn in trajectory.turns[::2]]


def test_rows_hold_the_turns_end_to_end_marked_by_author(games):
    check_rows(games, 40)


def test_every_token_is_prefilled_or_sampled_once(games):
    turns = [turn for t in games.trajectories for turn in t.turns]
    tokens = collections.Counter()
    for turn in turns:
        tokens[turn.author] += len(turn.token_ids)
    assert games.stats.prefill_tokens == tokens["environment"]
    assert games.stats.rollout_tokens == tokens["policy"]
    # Each sampled token is one row of a decode step.
    assert games.stats.decode_rows - games.stats.idle_rows == tokens["policy"]
    assert games.stats.context_tokens_max == max(t.num_tokens for t in games.trajectories)
    assert 0 < games.stats.tokens_in_flight_max <= 16 * games.stats.context_tokens_max


def test_a_slot_without_work_is_a_row_of_its_devices_steps(pool):
    """One episode on sixteen slots, two a device: beside each row that speaks one is idle.

    Devices where nobody speaks take no step.
    """
    rollout = collect(pool, tasks(1))
    steps = rollout.stats.rollout_tokens
    assert (rollout.stats.decode_rows, rollout.stats.idle_rows) == (2 * steps, steps)
    assert steps > 0


def rounds_of(trajectory) -> int:
    """Rounds that an episode needs: chunks of each message, behind the token sampled last."""
    return sum(
        math.ceil((len(turn.token_ids) + (index > 0)) / CONFIG.chunk_size)
        for index, turn in enumerate(trajectory.turns)
        if turn.author == "environment"
    )


def test_no_slot_is_free_while_an_episode_waits(pool, games, monkeypatch):
    """Forty episodes end in fewer rounds than data shard by data shard."""
    player, services, seen = engine(), [], []
    play = player.play

    def counting(*given, **settings):
        (service,) = services
        waiting = service._scheduler.num_waiting
        seen.append((service.num_live, 40 - service.num_live - waiting))
        return play(*given, **settings)

    monkeypatch.setattr(player, "play", counting)
    rollout = collect(pool, tasks(40), player=player, services=services)
    assert len(seen) == rollout.stats.rounds == games.stats.rounds
    assert {live - min(16, 40 - over) for live, over in seen} == {0}
    assert 0 < rollout.stats.other_shard_episodes < 20
    # List scheduling in each data shard of two slots and six rows by itself.
    needed = [rounds_of(t) for t in games.trajectories]
    ends = []
    for first in range(0, 40, 6):
        free_at = [0, 0]
        for rounds in needed[first : first + 6]:
            heapq.heappush(free_at, heapq.heappop(free_at) + rounds)
        ends.append(max(free_at))
    assert rollout.stats.rounds < max(ends)


def test_tasks_that_come_from_elsewhere_begin_when_slots_are_free(pool, games, monkeypatch):
    """Sixteen tasks are given, and 24 are taken as slots need them: no slot is ever free for one.

    They come to the end of `todo` in groups of three, so that some wait for slots meanwhile.
    """
    todo, left, services, seen = tasks(16), tasks(40)[16:], [], []
    player = engine()
    play = player.play

    def more(num_free):
        assert 0 < num_free <= 16
        taken, left[:] = left[: 3 * -(-num_free // 3)], left[3 * -(-num_free // 3) :]
        return taken

    def counting(*given, **settings):
        (service,) = services
        seen.append((service.num_live, service._scheduler.num_waiting, len(left)))
        return play(*given, **settings)

    monkeypatch.setattr(player, "play", counting)
    rollout = collect(pool, todo, player=player, services=services, more=more)
    check_rows(rollout, 40)
    assert_same_episodes(games.trajectories, rollout.trajectories)
    assert all(live == 16 or not waiting + behind for live, waiting, behind in seen)
    assert all(waiting < 3 for _, waiting, _ in seen), "none is taken long before its slot is free"
    assert {waiting for _, waiting, _ in seen} >= {0, 1}
    check_nothing_is_held(services[0])


def test_tasks_come_from_elsewhere_also_when_all_slots_are_free_at_once(pool):
    """A prompt of a turn of one token, one after the other: each ends behind its only round."""
    limits = Limits(max_turn_tokens=1)
    prompts = [
        Task(episode=number, group=number, prompt=Prompt(token_ids=(5, 6, 7)), limits=limits)
        for number in range(4)
    ]
    left = prompts[1:]
    rollout = collect(pool, prompts[:1], more=lambda num_free: [left.pop(0)] if left else [])
    assert [trajectory.episode for trajectory in rollout.trajectories] == [0, 1, 2, 3]
    assert all(trajectory.num_policy_tokens == 1 for trajectory in rollout.trajectories)


def test_an_episode_is_the_same_among_other_episodes(pool, games):
    other = collect(pool, [*tasks(5, first=500), *tasks(30)[10:]])
    ours = [dataclasses.replace(t, row=0) for t in games.trajectories[10:30]]
    theirs = [dataclasses.replace(t, row=0) for t in other.trajectories[5:]]
    assert_same_episodes(ours, theirs)


def test_session_grows_before_an_episode_outgrows_it(pool, games):
    """From the second bucket to the third, live episodes and all."""
    grow_pool = GrowPool()
    _, second, third = CONFIG.context_buckets
    grown = collect(pool, tasks(40), max_tokens=second, grow=grow_pool)
    [(max_tokens, tokens)] = grow_pool.wanted
    assert max_tokens == second < tokens
    assert grown.session.max_tokens == third
    assert max(t.num_tokens for t in grown.trajectories) > second
    check_rows(grown, 40)
    assert_same_episodes(games.trajectories, grown.trajectories)


def test_within_a_context_bucket_one_program_and_one_pool_hold_contexts_of_any_length(pool):
    """As in a run with one bucket: no length is a reason to compile, or to grow."""
    player, grow_pool = engine(), GrowPool()
    rollout = collect(pool, tasks(40), player=player, grow=grow_pool)
    assert grow_pool.wanted == grow_pool.wanted_pages == []
    assert player._play._cache_size() == 1
    first, second, _ = CONFIG.context_buckets
    lengths = [trajectory.num_tokens for trajectory in rollout.trajectories]
    assert min(lengths) <= first and second < max(lengths), "or the test shows nothing"


@pytest.mark.slow
def test_pages_are_made_where_they_are_needed(pool, games):
    """Shards of two slots begin with five pages: too few for two episodes of up to 30 tokens."""
    grow_pool = GrowPool()
    grown = collect(pool, tasks(40), pages=5, grow=grow_pool)
    assert grow_pool.wanted == []
    ((had, wanted),) = grow_pool.wanted_pages
    assert had == 5 and 5 < wanted <= 9 and grown.session.pool.pages == 12
    check_rows(grown, 40)
    assert_same_episodes(games.trajectories, grown.trajectories)
    assert grown.stats.preempted_episodes == 0


@pytest.mark.slow_except("data=8-4")
@pytest.mark.parametrize(
    ("mesh", "burst"),
    [(MeshShape(data=8), CONFIG.burst), (MeshShape(data=2, tensor=2), 1)],
    ids=str,
)
def test_where_there_are_no_more_pages_episodes_wait_and_are_read_again(pool, games, mesh, burst):
    """Pages for one episode a data shard of two slots: nothing is lost, and nothing read twice is
    news.

    With short bursts some are preempted in the middle of a turn.
    """
    grow_pool = GrowPool(most_pages=5)
    player = engine(mesh=mesh, burst=burst)
    preempted = collect(
        pool, tasks(40), pages=5, grow=grow_pool, player=player, burst=burst, preemption="recompute"
    )
    assert preempted.session.pool.pages == 5 and grow_pool.wanted_pages
    assert preempted.stats.preempted_host_bytes == 0
    assert preempted.stats.preempted_episodes > 0
    assert preempted.stats.recomputed_tokens > 0
    check_rows(preempted, 40)
    assert_same_episodes(games.trajectories, preempted.trajectories)
    assert preempted.stats.prefill_tokens == games.stats.prefill_tokens
    assert preempted.stats.rollout_tokens == games.stats.rollout_tokens


@pytest.mark.parametrize(("tokens", "grows"), [(20, False), (21, True)])
def test_session_holds_a_whole_burst(pool, tokens, grows):
    """24 tokens hold a prompt of twenty tokens and a turn of four, and not one more."""
    _, max_tokens, _ = CONFIG.context_buckets
    frame = len(renderer().first(""))
    text = "".join(chr(ord("A") + i) for i in range(tokens - frame))
    assert len(renderer().first(text)) == tokens and max_tokens == 20 + CONFIG.burst

    class Asking(Talker):
        def start(self):
            return Start(text=text, role="x")

    grow_pool = GrowPool()
    rollout = collect(
        pool,
        tasks(8),
        lambda task: Asking(0),
        params=weights(ends_turns=False),
        max_tokens=max_tokens,
        grow=grow_pool,
    )
    assert grow_pool.wanted == [(max_tokens, tokens + CONFIG.burst)] * grows
    assert {t.num_tokens for t in rollout.trajectories} == {tokens + CONFIG.max_turn_tokens}
    check_rows(rollout, 8)


def cut_texts(trajectories):
    """Returns the authors, lengths and stop reason of each episode."""
    return [
        (
            "".join(turn.author[0] for turn in t.turns),
            [len(turn.token_ids) for turn in t.turns],
            t.stop_reason,
            t.turn_rewards,
        )
        for t in trajectories
    ]


def test_an_episode_ends_at_its_own_limit_of_tokens(pool):
    """Nine tokens of prompt; turns of two, which the environment answers with five more.

    So the whole episode is e9 p2 e5 p2 e5 p2: 25 tokens. Limits below cut it in a turn, or at an
    answer that leaves no tokens for one.
    """
    whole = collect(pool, tasks(1), lambda task: Talker(0)).trajectories[0]
    lengths = [len(turn.token_ids) for turn in whole.turns]
    prompt, turn, answer = lengths[:3]
    assert lengths == [prompt, turn, answer, turn, answer, turn] and turn == 2
    first, second = prompt + turn, prompt + 2 * turn + answer
    expected = {
        prompt: ("", [], "prompt_too_long", ()),
        prompt + 1: ("ep", [prompt, 1], "episode_too_long", (-0.5,)),
        first: ("ep", [prompt, 2], "episode_too_long", (-0.25,)),
        first + answer: ("ep", [prompt, 2], "episode_too_long", (-0.25,)),
        second - 1: ("epep", [prompt, 2, answer, 1], "episode_too_long", (0.25, -0.5)),
        second: ("epep", [prompt, 2, answer, 2], "episode_too_long", (0.25, -0.25)),
        second + answer + turn: ("epepep", lengths, "win", (0.25,) * 3),
    }
    todo = [
        dataclasses.replace(
            task, limits=Limits(max_turn_tokens=CONFIG.max_turn_tokens, max_episode_tokens=limit)
        )
        for task, limit in zip(tasks(len(expected)), expected, strict=True)
    ]
    rollout = collect(pool, todo, lambda task: Talker(0))
    assert cut_texts(rollout.trajectories) == list(expected.values())
    check_rows(rollout, len(expected))
    for trajectory, limit in zip(rollout.trajectories, expected, strict=True):
        assert trajectory.num_tokens <= limit
        assert trajectory.stop_reason == "win" or str(limit) in trajectory.detail
    # By the config: the same.
    limit = prompt + 1
    other = collect(pool, tasks(2), lambda task: Talker(0), max_episode_tokens=limit)
    assert cut_texts(other.trajectories) == [expected[limit]] * 2
    # By the model, which reads no more: whatever the tasks and the config allow.
    for limit in (prompt, first, second - 1):
        model = collect(pool, tasks(2), lambda task: Talker(0), max_context=limit)
        assert cut_texts(model.trajectories) == [expected[limit]] * 2
        assert str(limit) in model.trajectories[0].detail


def test_a_turn_without_end_is_cut_at_its_episodes_own_limit_or_that_of_the_config(pool):
    limits = (1, 2, 3, 9)
    todo = [
        dataclasses.replace(task, limits=Limits(max_turn_tokens=limit))
        for task, limit in zip(tasks(4), limits, strict=True)
    ]
    rollout = collect(pool, [*todo, *tasks(5)[4:]], params=weights(ends_turns=False))
    check_rows(rollout, 5)
    cut_at = (*limits, CONFIG.max_turn_tokens)
    for trajectory, limit in zip(rollout.trajectories, cut_at, strict=True):
        assert trajectory.stop_reason == "turn_too_long"
        assert trajectory.detail == f"no end of turn within {limit} tokens"
        assert [turn.author for turn in trajectory.turns] == ["environment", "policy"]
        reply = trajectory.turns[1].token_ids
        assert len(reply) == limit and renderer().end_of_turn_id not in reply
        assert trajectory.turn_rewards == (CONFIG.unfinished_reward,)


class Endless(Talker):
    """Never ends."""

    def step(self, reply: str):
        return StepResult(text="go on", reward=0.25, done=False)


def test_an_episode_ends_at_its_number_of_turns(pool):
    todo = tasks(3)
    todo[1] = dataclasses.replace(
        todo[1], limits=Limits(max_turn_tokens=CONFIG.max_turn_tokens, max_turns=1)
    )
    rollout = collect(pool, todo, lambda task: Endless(0), max_turns=3)
    check_rows(rollout, 3)
    for trajectory, turns in zip(rollout.trajectories, (3, 1, 3), strict=True):
        assert trajectory.num_turns == turns
        assert trajectory.stop_reason == "too_many_turns"
        assert trajectory.detail == f"no end of the episode within {turns} turns"
        assert trajectory.turn_rewards == (0.25,) * (turns - 1) + (-0.25,)
        assert trajectory.turns[-1].author == "policy"
    # A game that ends with its last turn has ended.
    (whole,) = collect(pool, tasks(1), lambda task: Talker(0), max_turns=3).trajectories
    assert (whole.stop_reason, whole.num_turns) == ("win", 3)


class Verbose(Talker):
    """Its second message is `text`, of any size."""

    def __init__(self, text: str):
        super().__init__(0)
        self.text = text

    def step(self, reply: str):
        result = super().step(reply)
        return dataclasses.replace(result, text=self.text) if self.replies == 2 else result


def test_text_that_never_fits_is_not_encoded_and_slow_text_has_a_time_limit(monkeypatch):
    """By the thread of the environment: the others go on meanwhile, and the same tokens come."""
    text, begun, released = "12345678" * 2_000, [], threading.Event()
    encode = TextCodec.encode

    def encode_slowly(codec, words, **given):
        if text in words:
            begun.append(threading.get_ident())
            released.wait(60)
        return encode(codec, words, **given)

    def make(task: Task):
        return Verbose(text) if task.episode == 3 else Talker(0)

    monkeypatch.setattr(TextCodec, "encode", encode_slowly)
    pool = EnvironmentPool(2, timeout_s=2.0)
    try:
        sound = collect(pool, tasks(12), lambda task: Talker(0))
        bounded = collect(pool, tasks(12), make, max_context=100)
        assert begun == []
        # Where there is no limit, the time is one.
        slow = collect(pool, tasks(12), make)
        assert len(begun) == 1 and begun != [threading.get_ident()]
    finally:
        released.set()
        pool.close()
    for done, reason in ((bounded, "episode_too_long"), (slow, "environment_timeout")):
        check_rows(done, 12)
        for one, other in zip(sound.trajectories, done.trajectories, strict=True):
            if other.episode == 3:
                assert (other.stop_reason, other.num_turns) == (reason, 2)
            else:
                assert_same_episodes([one], [other])


def test_session_grows_to_no_more_than_an_episode_may_have(pool):
    _, max_tokens, _ = CONFIG.context_buckets
    grow_pool = GrowPool()
    rollout = collect(
        pool, tasks(8), lambda task: Talker(10_000), max_tokens=max_tokens, grow=grow_pool,
        max_episode_tokens=max_tokens,
    )  # fmt: skip
    assert grow_pool.wanted == [] and rollout.session.max_tokens == max_tokens
    assert {t.stop_reason for t in rollout.trajectories} == {"episode_too_long"}
    check_rows(rollout, 8)


def test_limits_that_cannot_be_are_refused_before_anything_is_played(pool):
    task = dataclasses.replace(tasks(1)[0], limits=Limits(max_turn_tokens=0))
    with pytest.raises(ValueError, match=r"episode 0: Task.limits.max_turn_tokens is 0"):
        collect(pool, [task])


class Faulty(Talker):
    """Goes wrong at its start, or at its second step."""

    def __init__(self, seed: int, when: str, fault):
        super().__init__(seed)
        self.when, self.fault = when, fault
        if when == "making":
            fault()

    def start(self):
        return self.fault() if self.when == "start" else super().start()

    def step(self, reply: str):
        honest = super().step(reply)
        return self.fault() if self.when == "step" and self.replies == 2 else honest


def test_environments_that_misbehave_end_their_own_episode_only():
    released = threading.Event()

    def crash():
        raise OSError("the game server is gone")

    def says(text):
        return lambda: StepResult(text=text, reward=0.25, done=False)

    faults = {
        0: ("making", crash, "environment_error"),
        3: ("start", crash, "environment_error"),
        4: ("start", released.wait, "environment_timeout"),
        5: ("start", lambda: "hello", "environment_error"),
        6: ("start", lambda: Start(text="\ud800", role="x"), "unencodable"),
        9: ("step", crash, "environment_error"),
        11: ("step", released.wait, "environment_timeout"),
        14: ("step", lambda: ("7", 0.0), "environment_error"),
        17: ("step", says("\ud800"), "unencodable"),
        20: ("step", lambda: StepResult(text="", reward=math.nan, done=False), "environment_error"),
        23: ("step", lambda: exec("raise SystemExit"), "environment_error"),
    }

    def make(task: Task):
        if task.episode not in faults:
            return Talker(task.args["seed"])
        when, fault, _ = faults[task.episode]
        return Faulty(task.args["seed"], when, fault)

    # Long enough for a sound environment on a busy machine.
    pool = EnvironmentPool(2, timeout_s=3.0)
    try:
        healthy = collect(pool, tasks(30), lambda task: Talker(task.args["seed"]))
        rollout = collect(pool, tasks(30), make)
    finally:
        released.set()
        pool.close()
    assert {t.stop_reason for t in healthy.trajectories} == {"win"}
    check_rows(rollout, 30)
    for trajectory, sound in zip(rollout.trajectories, healthy.trajectories, strict=True):
        if trajectory.episode not in faults:
            assert trajectory.turn_rewards == (0.25,) * 3
            assert_same_episodes([sound], [trajectory])
            continue
        when, _, reason = faults[trajectory.episode]
        assert trajectory.stop_reason == reason
        assert trajectory.detail
        # What was said before the fault is kept, and is what would have been said anyway.
        assert len(trajectory.turns) == (4 if when == "step" else 0)
        for turn, same in zip(trajectory.turns, sound.turns, strict=False):
            assert turn.token_ids == same.token_ids
    turns = [turn for t in rollout.trajectories for turn in t.turns]
    prefilled = sum(len(turn.token_ids) for turn in turns if turn.author == "environment")
    assert rollout.stats.prefill_tokens == prefilled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "copies"),
    [(MeshShape(data=8), "off"), (MeshShape(data=2, tensor=2), "on")],
    ids=["a row shard", "in all"],
)
def test_shared_beginnings_of_prompts_are_prefilled_once(pool, mesh, copies, monkeypatch):
    """Two prompts that differ in one token of 29, for 44 episodes.

    Read by each of eight row shards of two slots; or once, where two shards of eight slots copy
    from each other, two pages a call.
    """
    prompts = [renderer().first(Lecture(seed).start().text) for seed in range(2)]
    common = next(i for i, ids in enumerate(zip(*prompts, strict=True)) if len(set(ids)) > 1)
    assert common == 26 and len(prompts[0]) == 29

    def lecture(task):
        return Lecture(task.args["seed"])

    alone = collect(pool, tasks(44), lecture, max_tokens=64)
    player = engine(mesh=mesh)
    monkeypatch.setattr(player.page_copies, "pages_a_call", 2)
    shared = collect(
        pool, tasks(44), lecture, max_tokens=64, player=player, share_prefixes=True,
        copy_prefixes=copies,
    )  # fmt: skip
    assert_same_episodes(alone.trajectories, shared.trajectories)
    check_rows(shared, 44)
    taken, takers = shared.stats.shared_tokens, 44 - (1 if copies == "on" else NUM_DEVICES)
    assert (shared.stats.copied_tokens > 0) == (copies == "on")
    # Two more of episodes that got the same words to the end, but for the token before its reply.
    assert takers * common < taken < takers * (common + 2)
    assert (alone.stats.shared_tokens, shared.stats.shared_tokens) == (0, taken)
    assert alone.stats.prefill_tokens - shared.stats.prefill_tokens == taken
    assert shared.stats.rounds < alone.stats.rounds


@pytest.mark.parametrize("patience_s", [0.0, "auto"])
def test_environment_at_work_delays_no_other_episode(pool, games, patience_s):
    """The first episode's environment answers when all others are over, and not before."""
    others_over = threading.Event()
    over = []

    def wait():
        assert others_over.wait(60), "the others wait for the first"

    def count():
        over.append(1)
        if len(over) == 39:
            others_over.set()

    def make(task):
        return Watched(task, wait) if task.episode == 0 else Watched(task, lambda: None, count)

    rollout = collect(pool, tasks(40), make, patience_s=patience_s)
    check_rows(rollout, 40)
    assert_same_episodes(games.trajectories, rollout.trajectories)
    assert rollout.stats.rollout_tokens == games.stats.rollout_tokens
    assert rollout.stats.prefill_tokens == games.stats.prefill_tokens


def test_one_thread_alone_speaks_to_the_devices(pool, monkeypatch):
    """Environments run in two others. Whatever is asked of the engine, it alone asks."""
    speakers, thinkers = set(), set()

    def noting(player, name):
        speakers.add(threading.get_ident())
        return object.__getattribute__(player, name)

    def think():
        thinkers.add(threading.get_ident())
        # Long enough for the other one to take the next.
        time.sleep(0.002)

    def make(task):
        return Watched(task, think)

    monkeypatch.setattr(Engine, "__getattribute__", noting)
    rollout = collect(pool, tasks(20), make, patience_s=0.0)
    assert rollout.stats.rounds > 3
    assert speakers == {threading.get_ident()}
    assert len(thinkers) > 1 and not thinkers & speakers


def test_waiting_for_everybody_is_counted(pool):
    def make(task):
        time.sleep(0.3)
        return tictactoe(task)

    rollout = collect(pool, tasks(2), make, patience_s=0.0)
    # The calls may begin some time before the wait for them.
    assert rollout.stats.env_wait_s >= 0.1
