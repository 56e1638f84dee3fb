# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Environments whose methods are coroutines: on one event loop, and otherwise as plain ones."""

import asyncio
import random
import re
import threading
import time
from functools import partial

import pytest

from earl_jax.envs.environment import Start, StepResult, check_start, check_step
from earl_jax.envs.event_loop import Awaits, after
from earl_jax.envs.examples import corpus, play_example
from earl_jax.envs.pool import EnvironmentPool, Failure
from earl_jax.run.build import build_run
from tests.support import ROOT, run_python, wait_until
from tests.support.environments import Talker
from tests.support.episodes import assert_same_episodes, check_rows, collect, tasks
from tests.support.placements import TINY, one_step
from tests.support.settings import make_config


class Step:
    """An environment whose step is the coroutine function `does`."""

    def __init__(self, does):
        self.step = does

    def __call__(self):
        """A call of the pool, as the rollout makes one."""
        return after(self.step(), lambda value: value)


@pytest.fixture
def open_pool():
    """Opens pools with this time limit and two threads, and closes them."""
    pools = []

    def opened(timeout_s: float) -> EnvironmentPool:
        pools.append(EnvironmentPool(2, timeout_s))
        return pools[-1]

    yield opened
    for pool in pools:
        pool.close()


async def answer(value=1, wait_s=0.0):
    await asyncio.sleep(wait_s)
    return value


def test_a_thousand_environments_wait_at_once_in_one_thread(open_pool):
    """Their results are checked in the threads of the workers."""
    loops, workers, threads = set(), set(), []
    waiting, everybody = [], asyncio.Event()

    async def step(number):
        loops.add(threading.get_ident())
        waiting.append(number)
        if len(waiting) == 1000:
            everybody.set()
        await everybody.wait()
        threads.append(threading.active_count())
        return StepResult(text=f"{number}", reward=0.0, done=False)

    def check(result):
        workers.add(threading.get_ident())
        return check_step(result).text

    pool, before = open_pool(30.0), threading.active_count()
    calls = [lambda number=number: after(step(number), check) for number in range(1000)]
    assert pool.run(calls) == [str(number) for number in range(1000)]
    assert len(loops) == 1 and not loops & workers
    assert max(threads) <= before + 1


def test_an_exception_is_the_same_failure_as_that_of_a_plain_function(open_pool):
    errors = [
        ValueError("bad"), SystemExit(3), KeyError("k"), asyncio.CancelledError(), TimeoutError(),
    ]  # fmt: skip

    def plain(error):
        raise error

    async def coroutine(error, wait_s):
        await asyncio.sleep(wait_s)
        plain(error)

    pool = open_pool(30.0)
    expected = pool.run([partial(plain, error) for error in errors])
    assert {failure.stop_reason for failure in expected} == {"environment_error"}
    for wait_s in (0.0, 0.05):
        calls = [Step(partial(coroutine, error, wait_s)) for error in errors]
        assert pool.run([*calls, Step(answer)]) == [*expected, 1]
    (garbage,) = pool.run([lambda: after(answer("4"), check_start)])
    assert garbage.detail == "start() must return a Start; got '4'"


def test_a_task_that_an_environment_makes_cannot_end_the_loop(open_pool):
    async def leave():
        raise SystemExit

    async def step():
        made.append(asyncio.create_task(leave()))
        await asyncio.sleep(0.1)
        return 2

    pool, made = open_pool(30.0), []
    assert pool.run([Step(step), Step(answer)]) == [2, 1]
    assert isinstance(made[0].exception(), SystemExit)
    assert pool.run([Step(answer)]) == [1]


def test_a_coroutine_that_cancels_all_others_holds_up_no_call(open_pool):
    """Calls whose coroutines have ended fail, and later ones go on."""

    async def wait():
        begun.append(1)
        await asyncio.sleep(50.0)

    def cancel_all():
        own = asyncio.current_task()
        return sum(task.cancel() for task in asyncio.all_tasks() if task is not own)

    async def cancel_those_that_wait():
        while len(begun) < 2:
            await asyncio.sleep(0.01)
        return cancel_all()

    async def cancel_again_and_again():
        """In every round of the loop, so that others are cancelled before they begin."""
        until_s = time.monotonic() + 0.3
        while time.monotonic() < until_s:
            await asyncio.sleep(0)
            cancel_all()
            rounds.append(1)

    pool, found, begun, rounds = open_pool(60.0), {}, [], []
    calls = pool.calls()
    calls.submit({0: Step(cancel_those_that_wait), **dict.fromkeys((1, 2), Step(wait))})
    assert wait_until(lambda: found.update(calls.take()) or len(found) == 3)
    assert found[0] == 5, "two of each other call, and that which waits for this one"
    cancelled = found[1]
    assert cancelled.stop_reason == "environment_error" and "CancelledError" in cancelled.detail
    assert found[2] == cancelled
    found.clear()
    calls.submit({0: Step(cancel_again_and_again)})
    assert wait_until(lambda: rounds)
    calls.submit(dict.fromkeys((1, 2), Step(answer)))
    assert wait_until(lambda: found.update(calls.take()) or len(found) == 3)
    assert all(found[key] in (1, cancelled) for key in (1, 2))


def test_a_coroutine_that_hangs_is_cancelled_and_delays_no_other(open_pool):
    ended = []

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(time.monotonic())

    pool = open_pool(1.0)
    calls, found = pool.calls(), {}
    began = time.monotonic()
    calls.submit({0: Step(hang), 1: Step(answer), 2: Step(partial(answer, 2, 0.1))})
    while len(found) < 2:
        found |= calls.take(at_least_one=True)
    assert found == {1: 1, 2: 2}
    detail = "no answer within 1.0 s (config.env.timeout_s)"
    overdue = Failure(stop_reason="environment_timeout", detail=detail)
    assert calls.take(at_least_one=True) == {0: overdue}
    assert 1.0 <= time.monotonic() - began < 10.0
    assert wait_until(lambda: ended and pool.num_hung == 0)
    plain = threading.Event()
    assert pool.run([plain.wait]) == [overdue], "as for a plain function"
    plain.set()
    assert calls.take() == {}


def test_a_coroutine_that_catches_its_cancellation_is_cancelled_until_it_ends(open_pool):
    caught, released = [], []

    async def stay():
        while not released:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                caught.append(True)

    pool = open_pool(1.0)
    (outcome,) = pool.run([Step(stay)])
    assert isinstance(outcome, Failure) and outcome.stop_reason == "environment_timeout"
    assert wait_until(lambda: len(caught) >= 2)
    assert pool.num_hung == 1
    assert pool.run([Step(answer)]) == [1]
    released.append(True)
    assert wait_until(lambda: pool.num_hung == 0)


def test_the_time_limit_is_for_a_whole_call(open_pool):
    """For what comes before its coroutine, and behind it, too."""

    def call():
        time.sleep(0.3)
        return after(answer(1, 0.3), lambda value: value)

    def go_on(value):
        time.sleep(0.4)
        return value

    pool = open_pool(0.5)
    outcomes = pool.run([call, lambda: after(answer(1, 0.3), go_on)])
    assert [outcome.stop_reason for outcome in outcomes] == ["environment_timeout"] * 2


def spin():
    while True:
        sum(range(9))


@pytest.mark.parametrize("where", ["in Python", "in C"])
def test_a_coroutine_that_holds_up_the_loop_costs_those_that_run_and_no_later_one(open_pool, where):
    """All have their outcomes before the loop is free."""
    threads, released = set(), threading.Event()
    block = spin if where == "in Python" else partial(released.wait, 60)

    async def hold_up():
        threads.add(threading.current_thread())
        await asyncio.sleep(0.1)
        block()

    pool = open_pool(2.0)
    calls = pool.calls()
    calls.submit({"guilty": Step(hold_up), "beside": Step(partial(answer, 1, 30.0))})
    assert calls.take(0.2) == {}
    calls.submit({"later": Step(answer)})
    outcomes = {}
    while len(outcomes) < 3:
        outcomes |= calls.take(at_least_one=True)
    assert outcomes.pop("later") == 1
    assert {failure.stop_reason for failure in outcomes.values()} == {"environment_timeout"}
    words = r"no answer within 2.0 s \(config.env.timeout_s\); a coroutine holds up the event loop"
    assert all(re.match(words, failure.detail) for failure in outcomes.values())
    # A loop of Python code may have been ended already.
    assert pool.num_hung == 1 or where == "in Python"
    released.set()

    def ended():
        pool.run([Step(answer)])
        return pool.num_hung == 0

    assert wait_until(ended) and not any(thread.is_alive() for thread in threads)
    assert pool.run([Step(answer)]) == [1]
    assert calls.take() == {}


def test_a_closed_pool_cancels_its_coroutines():
    ended, begun = [], threading.Event()

    async def hang():
        try:
            begun.set()
            await asyncio.sleep(1000)
        finally:
            ended.append(threading.current_thread())

    pool = EnvironmentPool(1, timeout_s=30.0)
    pool.calls().submit({0: Step(hang)})
    assert begun.wait(30)
    pool.close()
    assert wait_until(lambda: ended and not ended[0].is_alive())


def test_a_process_with_environments_that_hang_exits_at_once():
    code = """
import asyncio, time
from earl_jax.envs.event_loop import after
from earl_jax.envs.pool import EnvironmentPool
async def block():
    time.sleep(1000)
pool = EnvironmentPool(2, timeout_s=1.0)
calls = [lambda: after(asyncio.sleep(1000), str), lambda: after(asyncio.sleep(0, 1), str),
         lambda: after(block(), str), lambda: time.sleep(1000), lambda: 2]
print([getattr(o, 'stop_reason', o) for o in pool.run(calls[:2]) + pool.run(calls[2:])])
pool.calls().submit({0: calls[0]})
"""
    # The time limit is the claim: the calls hang for 1000 s.
    done = run_python("-c", code, timeout=60)
    hung = "environment_timeout"
    assert done.stdout == f"{[hung, '1', hung, hung, 2]}\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_a_coroutine_outside_a_pool_is_an_error():
    coroutine = answer()
    with pytest.raises(Awaits, match="only an EnvironmentPool awaits"):
        after(coroutine, check_start)
    coroutine.close()


# Episodes.

GIVEN = {
    "num_steps": 2,
    "model": TINY,
    "rollout": {"num_slots": 8, "episodes_per_step": 8, "group_size": 1},
    "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",), "table": "model"},
    "train": {"sft_steps": 1},
}


class AsyncStart(Talker):
    """Its start is a coroutine, its step is none."""

    async def start(self):
        await asyncio.sleep(0.001)
        return super().start()


class AsyncStep(Talker):
    """Its step is a coroutine, its start is none."""

    async def step(self, reply: str):
        # The order of the answers is not that of the tasks.
        await asyncio.sleep(0.002 * (self.seed % 5))
        return super().step(reply)


class AsyncBoth(AsyncStart, AsyncStep):
    """Both are coroutines."""


def test_episodes_are_those_of_the_same_environment_with_plain_functions(pool):
    kinds = (AsyncStart, AsyncStep, AsyncBoth, Talker)
    plain = collect(pool, tasks(40), lambda task: Talker(task.args["seed"]))
    mixed = collect(pool, tasks(40), lambda task: kinds[task.episode % 4](task.args["seed"]))
    check_rows(mixed, 40)
    assert {t.stop_reason for t in mixed.trajectories} == {"win"}
    assert_same_episodes(plain.trajectories, mixed.trajectories)


class Shows(Talker):
    """Shows a reply."""

    def example_reply(self, rng):
        return str(rng.randint(0, 9))


class AsyncShows(AsyncBoth, Shows):
    """Shows a reply, and is made of coroutines."""


class Sevens:
    """A task source."""

    def batch(self, step):
        return [{"seed": 7}]


def test_examples_are_those_of_plain_functions():
    assert play_example(AsyncShows(7), random.Random(0)) == play_example(Shows(7), random.Random(0))
    of = partial(corpus, tasks=Sevens(), num_steps=1, num_episodes=2, seed=0)
    assert of(AsyncBoth) == of(Talker) == ["7.", "7."]
    assert of(AsyncShows) == of(Shows) and len(of(Shows)) == 12


@pytest.mark.slow
def test_a_run_is_that_of_the_same_environment_with_plain_functions():
    """Named by the config, with a tokenizer of its own and a supervised first step."""
    plain, coroutines = (
        build_run(make_config(GIVEN | {"env": {"name": f"{__name__}:{name}"}}))
        for name in ("Shows", "AsyncShows")
    )
    of_both = [run.actor.renderer.first("7.") for run in (plain, coroutines)]
    assert of_both[0] == of_both[1]
    played = one_step(coroutines).trajectories
    assert {t.stop_reason for t in played} <= {"win", "turn_too_long"}
    assert max(t.num_turns for t in played) > 1


def test_the_environment_of_the_how_to_asks_a_server(open_pool):
    """A hundred episodes at once, whose judge answers when it has heard all of them."""
    page = (ROOT / "docs" / "howto" / "environment.md").read_text()
    (code,) = re.findall(r"```python\n(# judged.py\n.*?)```", page, re.DOTALL)
    names = {}
    exec(code, names)
    heard, everybody = [], asyncio.Event()

    async def judge(reader, writer):
        heard.append(await reader.readline())
        if len(heard) == 100:
            everybody.set()
        await everybody.wait()
        writer.write(f"{len(heard[-1]) / 100}\n".encode())
        writer.close()

    async def serve(started):
        server = await asyncio.start_server(judge, "localhost", 0)
        started(server)
        async with server:
            await everybody.wait()
            await asyncio.sleep(0.5)

    ports, ready = [], threading.Event()

    def started(server):
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()

    thread = threading.Thread(target=asyncio.run, args=(serve(started),), daemon=True)
    thread.start()
    assert ready.wait(30)
    environments = [names["Judged"](port=ports[0]) for _ in range(100)]
    assert environments[0].start() == Start(text="say something nice")
    outcomes = open_pool(30.0).run(
        [lambda e=e: after(e.step("well done"), check_step) for e in environments]
    )
    assert outcomes == [StepResult(reward=0.12, done=True, stop_reason="judged")] * 100
    thread.join(30)
