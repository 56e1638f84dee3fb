# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The pool under environments that raise, hang, talk nonsense, or come back too late."""

import asyncio
import random
import re
import threading
import time
from functools import partial

import pytest

from earl_jax.envs.event_loop import after
from earl_jax.envs.pool import EnvironmentPool, Failure
from earl_jax.envs.round_wait import RoundWait
from tests.support import run_python, wait_until


@pytest.fixture
def released():
    """An event on which calls hang; set at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("num_workers", [1, 5])
def test_outcomes_are_in_the_order_of_the_calls(num_workers):
    pool = EnvironmentPool(num_workers, timeout_s=30.0)
    for size in (0, 1, 2, 3, 300):
        assert pool.run([partial(lambda i: i * i, i) for i in range(size)]) == [
            i * i for i in range(size)
        ]
    pool.close()


class UnprintableError(Exception):
    def __str__(self):
        raise ZeroDivisionError


def test_exceptions_become_failures_and_workers_survive():
    def fail(error: BaseException):
        raise error

    errors = [ValueError("bad"), SystemExit(3), KeyError("k"), UnprintableError()]
    pool = EnvironmentPool(1, timeout_s=30.0)
    outcomes = pool.run([*(partial(fail, e) for e in errors), lambda: "fine"])
    assert all(
        isinstance(o, Failure) and o.stop_reason == "environment_error" for o in outcomes[:4]
    )
    details = [o.detail for o in outcomes[:4] if isinstance(o, Failure)]
    line = fail.__code__.co_firstlineno + 1
    words = ["ValueError: bad", "SystemExit: 3", "KeyError: 'k'"]
    assert details[:3] == [f"{each} ({__file__}, line {line})" for each in words]
    assert "UnprintableError" in details[3]
    assert outcomes[4] == "fine"
    pool.close()


def test_hang_costs_one_timeout_and_delays_no_other_call(released):
    pool = EnvironmentPool(2, timeout_s=2.0)
    calls, outcomes = pool.calls(), {}
    began = time.monotonic()
    calls.submit({i: released.wait if i == 3 else partial(int, i) for i in range(101)})
    while len(outcomes) < 100:
        outcomes |= calls.take(at_least_one=True)
    made = {i: i for i in range(101) if i != 3}
    assert outcomes == made, "the other worker made the other calls meanwhile"
    hung = calls.take(at_least_one=True)[3]
    assert 2.0 <= time.monotonic() - began < 10.0
    assert isinstance(hung, Failure) and hung.stop_reason == "environment_timeout"
    assert "2.0 s" in hung.detail and "config.env.timeout_s" in hung.detail
    assert pool.run([lambda: 1] * 10) == [1] * 10, "the thread was replaced"
    pool.close()


def test_any_number_of_calls_may_hang_and_those_that_return_are_forgotten(released):
    pool = EnvironmentPool(8, timeout_s=1.0)
    outcomes = pool.run([released.wait] * 16 + [lambda: 7] * 20)
    assert [isinstance(o, Failure) for o in outcomes[:16]] == [True] * 16
    assert outcomes[16:] == [7] * 20
    assert pool.num_hung == 16
    released.set()
    assert wait_until(lambda: pool.num_hung == 0)
    assert pool.run([lambda: 1] * 10) == [1] * 10
    pool.close()


def test_a_loop_without_end_is_ended():
    """Ends an endless loop of Python code, also one that catches exceptions."""
    threads, cleaned = [], []

    def loop():
        threads.append(threading.current_thread())
        try:
            while True:
                try:
                    sum(range(9))
                except Exception:  # noqa: BLE001
                    continue
        finally:
            cleaned.append(True)

    pool = EnvironmentPool(2, timeout_s=1.0)
    outcomes = pool.run([loop, lambda: 1, loop])
    assert [isinstance(o, Failure) for o in outcomes] == [True, False, True]

    def ended():
        pool.run([lambda: 2])
        return not any(thread.is_alive() for thread in threads) and pool.num_hung == 0

    assert wait_until(ended) and cleaned == [True, True]
    assert pool.run([lambda: 2]) == [2]
    pool.close()


def test_calls_that_return_while_they_are_ended_leave_no_lock_held(monkeypatch):
    """Many calls are ended at about the moment at which they return."""
    monkeypatch.setattr("earl_jax.envs.pool._END_S", 0.001)
    rng = random.Random(0)

    def busy():
        end = time.monotonic() + 0.06 * rng.random()
        while time.monotonic() < end:
            sum(range(50))
        return 1

    pool = EnvironmentPool(16, timeout_s=0.01)
    for _ in range(4):
        outcomes = pool.run([busy] * 32)
        assert {getattr(o, "stop_reason", o) for o in outcomes} <= {1, "environment_timeout"}
    assert wait_until(lambda: pool.num_hung == 0)
    pool.close()


def test_a_process_that_can_start_no_more_threads_says_how_many_calls_hang():
    """A limit of address space stands for one of threads, which root does not have."""
    code = """
import resource, threading
from earl_jax.envs.event_loop import after
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.launch.start import exit_status
pool = EnvironmentPool(4, timeout_s=0.1)
used = 4096 * int(open('/proc/self/statm').read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
raise SystemExit(exit_status(lambda: pool.run([threading.Event().wait] * 300)))
"""
    done = run_python("-c", code)
    assert done.returncode == 1
    words = r"error: \d+ environment calls hang, each beyond 0.1 s, and this process can start no"
    assert re.match(words, done.stderr), done.stderr


def test_outcomes_are_taken_as_they_come(released):
    pool = EnvironmentPool(2, timeout_s=30.0)
    calls = pool.calls()
    assert calls.take(at_least_one=True) == {}, "nothing is under way"
    began = time.monotonic()
    calls.submit({"slow": released.wait, "quick": lambda: 1})
    assert calls.take(at_least_one=True) == {"quick": 1}
    assert calls.take() == {}
    assert calls.take(0.5) == {}
    assert time.monotonic() - began >= 0.5
    calls.submit({"quick": lambda: 2})
    assert calls.take(at_least_one=True) == {"quick": 2}
    released.set()
    assert calls.take(30.0) == {"slow": True}
    assert time.monotonic() - began < 15, "nobody waits once everything is there"
    pool.close()


def test_a_slow_call_is_waited_for_once(released):
    """The next look returns with the quick ones, and at once where there are none."""
    pool = EnvironmentPool(2, timeout_s=60.0)
    calls, patience_s = pool.calls(), 2.0
    calls.submit({"slow": released.wait})
    assert calls.take(patience_s) == {}
    began = time.monotonic()
    calls.submit({"quick": lambda: 1})
    assert calls.take(patience_s) == {"quick": 1}
    assert calls.take(patience_s) == {}
    assert time.monotonic() - began < patience_s
    released.set()
    assert calls.take(at_least_one=True) == {"slow": True}
    pool.close()


def test_quick_calls_are_waited_for_together():
    pool = EnvironmentPool(4, timeout_s=60.0)
    calls = pool.calls()
    calls.submit({number: lambda: time.sleep(0.05) for number in range(8)})
    assert len(calls.take(RoundWait(round_s=60.0, num_working=4))) == 8
    pool.close()


def test_a_slow_call_is_waited_for_once_and_the_next_one_of_its_key_not_at_all(released):
    pool = EnvironmentPool(4, timeout_s=60.0)
    calls, began = pool.calls(), time.monotonic()
    calls.submit({"slow": released.wait, "quick": lambda: 1, "other": lambda: 2})
    # 0.9 at stake, and then at most 0.3 of three slots.
    assert calls.take(RoundWait(round_s=0.3, num_working=1)) == {"quick": 1, "other": 2}
    assert calls.take(RoundWait(round_s=60.0, num_working=1)) == {}
    calls.take(RoundWait(round_s=0.1, num_working=1))
    time.sleep(0.1)
    released.set()
    assert calls.take(at_least_one=True) == {"slow": True}
    released.clear()
    calls.submit({"slow": released.wait, "quick": lambda: 3})
    assert calls.take(RoundWait(round_s=60.0, num_working=1)) == {"quick": 3}
    released.set()
    assert calls.take(RoundWait(round_s=60.0, num_working=0), at_least_one=True) == {"slow": True}
    # That took less than a round of 60 s: it is waited for again.
    calls.submit({"slow": lambda: time.sleep(0.1)})
    assert calls.take(RoundWait(round_s=60.0, num_working=1)) == {"slow": None}
    assert time.monotonic() - began < 30
    pool.close()


def test_a_call_is_overdue_though_it_ends_before_anybody_looks():
    """Such as one that keeps the interpreter to itself: the time decides, not who looks first."""
    pool = EnvironmentPool(1, timeout_s=1.0)
    calls = pool.calls()
    calls.submit({"late": lambda: time.sleep(1.1), "next": lambda: 1})
    time.sleep(1.6)
    outcomes = calls.take(30.0)
    assert outcomes.pop("late").stop_reason == "environment_timeout"
    assert outcomes == {"next": 1}
    pool.close()


def test_hung_calls_of_a_caller_that_waits_no_more_are_given_up(released):
    """Such as those of open episodes while others are evaluated, or of a rollout given up."""
    pool = EnvironmentPool(2, timeout_s=1.0)
    theirs, ours = pool.calls(), pool.calls()
    theirs.submit(dict.fromkeys(range(2), released.wait))
    assert theirs.take() == {}
    ours.submit({"next": lambda: 1})
    began = time.monotonic()
    assert ours.take(20.0) == {"next": 1}
    assert time.monotonic() - began < 10
    assert {each.stop_reason for each in theirs.take().values()} == {"environment_timeout"}
    pool.close()


def test_callers_do_not_take_each_others_outcomes():
    pool = EnvironmentPool(2, timeout_s=30.0)
    ours, theirs = pool.calls(), pool.calls()
    ours.submit({0: lambda: "ours"})
    theirs.submit({0: lambda: "theirs", 1: lambda: "more"})
    assert ours.take(30.0) == {0: "ours"}
    assert theirs.take(30.0) == {0: "theirs", 1: "more"}
    pool.close()


@pytest.mark.parametrize(("num_workers", "timeout_s"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_senseless_limits_are_refused(num_workers, timeout_s):
    with pytest.raises(ValueError, match=r"config\.env"):
        EnvironmentPool(num_workers, timeout_s)


def test_blocking_calls_of_many_coroutines_wait_together():
    """`asyncio.to_thread` in a coroutine: as many as an agent's requests at once in 40 episodes."""
    barrier = threading.Barrier(40, timeout=20)

    async def blocks():
        return await asyncio.to_thread(barrier.wait)

    def call():
        return after(blocks(), lambda place: place)

    pool = EnvironmentPool(2, timeout_s=20.0)
    assert sorted(pool.run([call] * 40)) == list(range(40))
    pool.close()
