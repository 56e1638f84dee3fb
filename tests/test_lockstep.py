# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Processes that play the same episodes: environments run in the first, all take its answers."""

import dataclasses
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from earl_jax.engine.pages import Pool
from earl_jax.engine.relocation import relocate
from earl_jax.envs.environment import Message, Start, StepResult
from earl_jax.envs.pool import EnvironmentPool, Failure
from earl_jax.envs.text.conversation import Observation
from earl_jax.launch.cluster import find_cluster
from earl_jax.rollout.answers import Answer
from earl_jax.rollout.end import Stopped
from earl_jax.rollout.lockstep import Lockstep
from earl_jax.settings.errors import RunError
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.placing import place
from tests.support.clusters import Meeting, OneOfTwo
from tests.support.episodes import CONFIG, collect, engine, tasks, tictactoe, weight_values
from tests.support.processes import Processes


class Env:
    """Starts with a text, answers the reply 2 with an exception, others with numbers of numpy."""

    def start(self):
        time.sleep(0.05)
        return Start(messages=(Message(role="user", text="go"),), choices=("1", "2"))

    def step(self, reply):
        if reply == "2":
            raise ArithmeticError("two")
        metrics = {"win": np.float64(1.0)}
        return StepResult(
            reward=np.float32(0.1), done=True, stop_reason="over", metrics=metrics, text=""
        )


def both(play, stop=("", "")):
    """Returns what `play(lockstep)` gives in each of two processes, or raises there."""
    meeting, pool = Meeting(), EnvironmentPool(2, 10.0)

    def process(index):
        never = pytest.fail
        lockstep = Lockstep(
            OneOfTwo(index, meeting),
            pool if index == 0 else None,
            (lambda task: Env()) if index == 0 else (lambda task: never("an environment")),
            lambda: stop[index],
        )
        try:
            return play(lockstep, index)
        except (Stopped, RunError) as error:
            return error

    try:
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(process, range(2)))
    finally:
        pool.close()


def begun(lockstep, ids=(1,)):
    def call():
        environment = lockstep.make_environment(None)
        return Answer(
            environment=environment, result=environment.start(), observation=Observation(ids)
        )

    return call


def test_every_process_takes_the_answers_of_the_first_in_its_order():
    def play(lockstep, index):
        calls = lockstep.calls()
        calls.submit({ticket: begun(lockstep, (ticket,)) for ticket in (3, 5)})
        taken, order = {}, []
        while len(taken) < 2:
            new = calls.take(at_least_one=True)
            order.append(list(new))
            taken |= new
        envs = {ticket: answer.environment for ticket, answer in taken.items()}
        calls.submit(
            {
                ticket: lambda e=envs[ticket], r=reply: Answer(environment=e, result=e.step(r))
                for ticket, reply in ((3, "1"), (5, "2"))
            }
        )
        ended = {}
        while len(ended) < 2:
            ended |= calls.take(at_least_one=True)
        starts = {t: (a.result, a.observation) for t, a in taken.items()}
        return order, starts, ended[3].result, ended[5]

    one, other = both(play)
    assert one == other
    _, starts, result, failure = one
    start = Start(messages=(Message(role="user", text="go"),), choices=("1", "2"))
    assert starts == {3: (start, Observation((3,))), 5: (start, Observation((5,)))}
    # fp32 of 0.1, as a Python number in both, so that sums of rewards are the same bits.
    assert result.reward == 0.10000000149011612 and type(result.reward) is float
    assert result.metrics == {"win": 1.0} and result.stop_reason == "over"
    assert isinstance(failure, Failure) and "two" in failure.detail


def test_a_call_without_answers_returns_none_in_any_process_and_waits_for_no_environment():
    assert both(lambda lockstep, index: lockstep.calls().take()) == [{}, {}]


def test_a_message_that_another_process_reads_otherwise_ends_it():
    def play(lockstep, index):
        calls = lockstep.calls()
        calls.submit({0: begun(lockstep, (index,))})
        return list(calls.take(at_least_one=True))

    first, other = both(play)
    assert first == [0] and "other ids in this process than in process 0" in str(other)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_signal_to_one_process_stops_both_before_the_same_round(stopped):
    stop = ["", ""]
    stop[stopped] = "SIGTERM"

    def play(lockstep, index):
        calls = lockstep.calls()
        calls.submit({0: begun(lockstep)})
        return calls.take(at_least_one=True)

    assert [str(each) for each in both(play, stop)] == ["SIGTERM", "SIGTERM"]


def test_a_signal_is_heard_while_the_first_process_waits_for_an_environment():
    stop = ["", ""]

    def play(lockstep, index):
        calls = lockstep.calls()

        def slow():
            time.sleep(5)
            return begun(lockstep)()

        calls.submit({0: slow})
        threading.Timer(0.2, lambda: stop.__setitem__(1, "SIGTERM")).start()
        start_s = time.monotonic()
        try:
            calls.take(at_least_one=True)
        except Stopped as signal:
            return str(signal), time.monotonic() - start_s < 4

    assert both(play, stop) == [("SIGTERM", True)] * 2


# Episodes on an engine over two processes.

A_SHARD_EACH = MeshShape(data=2, tensor=2)
MESHES = [A_SHARD_EACH, MeshShape(context=2, tensor=2), MeshShape(data=4)]


@dataclasses.dataclass
class Tour:
    """Lets live episodes go on elsewhere, with as few pages, where they lack some; or stay."""

    moves: bool
    calls: int = 0

    def __call__(self, session, tokens, pages):
        self.calls += self.moves
        there = engine(mesh=MESHES[self.calls % 3])
        shards = there.layout.num_row_shards
        pool = Pool(shards, max(12 // shards, session.pages.least_pages(shards)))
        return relocate(session, there, CONFIG.max_tokens_for(tokens), pool)


def play_on_four_devices(moves: bool) -> list:
    """Plays 24 games with pages for few; returns the ids of each, and what was preempted."""
    cluster, pool = find_cluster(0, 60.0), EnvironmentPool(4, 10.0)
    player, make = engine(mesh=A_SHARD_EACH), tictactoe
    params = jax.tree.map(place, weight_values(), player.parameter_shardings)
    if cluster.count > 1:
        assert player.layout.spans_processes
        pool = Lockstep(cluster, pool, tictactoe, lambda: "")
        make = pool.make_environment
    tour = Tour(moves)
    rollout = collect(
        pool, tasks(24), make, params=params, player=player, pages=6, grow=tour, preemption="host"
    )
    stats = rollout.stats
    ids = [[list(turn.token_ids) for turn in each.turns] for each in rollout.trajectories]
    return [
        ids,
        [each.reward for each in rollout.trajectories],
        [stats.rounds, stats.preempted_episodes, stats.preempted_host_bytes],
        stats.recomputed_tokens,
        tour.calls,
    ]


def play_both() -> list[list]:
    """Without moves, and with them."""
    return [play_on_four_devices(moves) for moves in (False, True)]


@pytest.fixture(scope="module")
def played():
    """Returns the episodes that each of two processes has of both, and this one's alone."""
    processes = Processes(2, 2, "test_lockstep:play_both")
    alone = json.loads(json.dumps(play_both()))
    return *processes.results(800), alone


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("moves", [False, True], ids=["stays", "moves"])
def test_preempted_and_moved_episodes_of_two_processes_are_those_of_one(played, moves):
    """Pages wait in the host memory of the process whose devices had them, or are read again."""
    one, other, alone = (each[moves] for each in played)
    assert one == other
    assert one[:2] == alone[:2]
    _, preempted, host_bytes = one[2]
    assert preempted > 0 < host_bytes
    # Where a move finds pages in host memory, one process can join the pieces of all devices; two
    # read the tokens again, and so take other rounds.
    assert (one[4] > 0) == (alone[4] > 0) == moves
    assert one[2:] == alone[2:] or moves and one[3] > 0
