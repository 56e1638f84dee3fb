# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Threads for environment calls, and an event loop for those that are coroutines.

Calls may raise or hang; each has an outcome.
"""

import collections
import ctypes
import dataclasses
import functools
import math
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any, Generic, TypeVar

from earl_jax.envs.environment import ENVIRONMENT_ERROR, ENVIRONMENT_TIMEOUT
from earl_jax.envs.event_loop import Awaits, EventLoop, Overdue, Waiting
from earl_jax.envs.round_wait import RoundWait
from earl_jax.settings.errors import InputError, RunError, where_raised

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

# A caller that waits for calls looks around so often.
_LOOK_S = 1.0
# So many keys of slow calls are remembered.
_MOST_SLOW = 10_000
# A thread that was given up is asked to end this long after, and so often.
_END_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A call that gave no result: "environment_error" or "environment_timeout", and why."""

    stop_reason: str
    detail: str


class EnvironmentPool:
    """Threads that make environment calls under a time limit.

    A call that takes longer than `timeout_s` is given up: its thread is replaced, whatever it
    returns later is dropped, and so should its environment be. SystemExit is raised in the thread,
    which ends a loop of Python code, and a wait in C code when that returns; until then it keeps
    its stack (8 MB of address space, of which it uses some 0.1). So any number of calls may hang,
    as long as the process may start threads. Threads are daemons, so the end of the process waits
    for none of them. While every worker hangs the other calls wait, at most `timeout_s` for each
    `num_workers` hung calls. A call that holds the GIL in C code cannot be timed out.

    A call that waits for a coroutine (`event_loop.after`) leaves its worker. All coroutines run on
    one event loop, in one more thread, and a worker makes the rest of the call with the result. The
    time limit is for all of it. A coroutine that takes longer is cancelled. One that computes or
    blocks holds up the others: after `timeout_s` all that run fail, the thread is replaced like a
    worker that hangs, and coroutines that had not begun go on in the new one.

    Cost per call (2 shared cores of an x86 machine, 2026-11, Python 3.11): 0.7 us in a burst of
    256, 1.5 us in one of 16, 14 us alone.
    """

    def __init__(self, num_workers: int, timeout_s: float):
        if num_workers < 1 or not timeout_s > 0:
            raise InputError(
                f"num_workers is {num_workers} and timeout_s {timeout_s}; both must be positive: "
                "change config.env.num_workers or config.env.timeout_s"
            )
        self.timeout_s = timeout_s
        self.num_workers = num_workers
        self._waiting: queue.SimpleQueue[Calls | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Threads that were given up, and when; or when they were last asked to end.
        self._given_up: dict[threading.Thread, float] = {}
        self._in_call: set[threading.Thread] = set()
        self._calls: weakref.WeakSet[Calls] = weakref.WeakSet()
        # The event loop, once there was a coroutine; and coroutines that it has not begun.
        self._loop: EventLoop | None = None
        self._coroutines: collections.deque[Waiting] = collections.deque()
        for _ in range(num_workers):
            self._start_worker(None)

    def calls(self, look: Callable[[], None] = lambda: None) -> "Calls[Any, Any]":
        """Returns a queue of calls for one rollout, separate from those of other rollouts.

        Who waits for calls calls `look` every second; what it raises ends the wait.
        """
        made = Calls(self, look)
        with self._lock:
            self._calls.add(made)
        return made

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T | Failure]:
        """Makes the calls, in any order and in other threads; outcomes are in the order of `calls`.

        Raises RunError as `Calls.take`.
        """
        made = self.calls()
        made.submit(dict(enumerate(calls)))
        outcomes: dict[int, T | Failure] = {}
        while len(outcomes) < len(calls):
            outcomes |= made.take(at_least_one=True)
        return [outcomes[index] for index in range(len(calls))]

    def close(self) -> None:
        """Ends the idle workers without waiting; the pool cannot be used again.

        Coroutines are cancelled.
        """
        for _ in range(self.num_workers):
            self._waiting.put(None)
        with self._lock:
            if self._loop is not None:
                self._loop.end()

    def wake(self, calls: "Calls[Any, Any]", workers: int) -> None:
        """Sends so many workers to these calls."""
        for _ in range(min(self.num_workers, workers)):
            self._waiting.put(calls)

    @property
    def num_hung(self) -> int:
        """The number of calls that were given up and have not returned."""
        loop = self._loop
        coroutines = 0 if loop is None else loop.num_overdue
        return coroutines + sum(thread.is_alive() for thread in list(self._given_up))

    def make(self, call: Callable[[], T]) -> T | Failure | Awaits:
        """Makes a call in this thread; only meanwhile may SystemExit be raised here.

        Anywhere else it could leave a lock held.
        """
        thread = threading.current_thread()
        with self._lock:
            self._in_call.add(thread)
        try:
            outcome = _outcome(call)
        except SystemExit:
            # While `_outcome` put another error into words.
            outcome = Failure(stop_reason=ENVIRONMENT_ERROR, detail="SystemExit")
        while thread in self._in_call:
            # It may come until the lock is held; also while a context manager would be made.
            try:  # noqa: SIM105
                with self._lock:
                    self._in_call.discard(thread)
            except SystemExit:
                pass
        return outcome

    def run_coroutine(self, waiting: Waiting) -> None:
        """Runs a coroutine on the event loop; returns at once."""
        try:
            self._begin_coroutines(waiting)
        except (RuntimeError, OSError) as error:
            waiting.deliver(functools.partial(_failure, error), waiting.used_s)

    def replace_worker(self, thread: threading.Thread, calls: "Calls[Any, Any]") -> None:
        """Gives up a worker that hangs; a new one goes on with its calls.

        Raises RunError where the process may start no more threads.
        """
        self._replace(thread, functools.partial(self._start_worker, calls))

    def _replace(self, thread: threading.Thread, start_another: Callable[[], None]) -> None:
        with self._lock:
            self._given_up[thread] = time.monotonic()
        try:
            start_another()
        except (RuntimeError, OSError) as error:
            raise RunError(
                f"{self.num_hung} environment calls hang, each beyond {self.timeout_s} s, and this "
                f"process can start no thread for others ({error}); repair the environment, or "
                "raise the limit of threads or of memory; the run goes on from its checkpoint"
            ) from error

    def give_up_overdue(self) -> None:
        """Gives up the calls that ran too long, those of callers that wait for none included.

        Raises SystemExit in those that were given up, once a second, until they return. Raises
        RunError as `replace_worker`.
        """
        with self._lock:
            every, loop = list(self._calls), self._loop
        for calls in every:
            calls.give_up_overdue()
        if loop is not None and loop.is_blocked:
            self._replace_loop(loop)
        now = time.monotonic()
        with self._lock:
            for thread, since in list(self._given_up.items()):
                if not thread.is_alive():
                    del self._given_up[thread]
                    self._in_call.discard(thread)
                elif thread in self._in_call and now - since >= _END_S and thread.ident is not None:
                    self._given_up[thread] = now
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
                    )

    def _replace_loop(self, loop: EventLoop) -> None:
        with self._lock:
            if self._loop is not loop:
                return
            self._loop = None
            # It holds no lock of ours at any time.
            self._in_call.add(loop.thread)
        loop.give_up()
        self._replace(loop.thread, self._begin_coroutines)

    def _begin_coroutines(self, *more: Waiting) -> None:
        with self._lock:
            if self._loop is None:
                self._loop = EventLoop(self.timeout_s, self._coroutines)
            self._coroutines.extend(more)
            self._loop.begin()

    def _start_worker(self, calls: "Calls[Any, Any] | None") -> None:
        threading.Thread(
            target=_work, args=(self._waiting, calls), name="environment-worker", daemon=True
        ).start()


class Calls(Generic[K, T]):
    """Calls under way, each with a key, and all the state that workers and caller share.

    For one caller. A key is free again once its outcome was taken.
    """

    def __init__(self, pool: EnvironmentPool, look: Callable[[], None]):
        self._pool, self._look = pool, look
        self._changed = threading.Condition()
        self._todo: collections.deque[tuple[K, Callable[[], T]]] = collections.deque()
        # Calls whose coroutines have ended, and the seconds that they have used of the time limit.
        self._returned: collections.deque[tuple[Awaits, Callable[[], T], float]] = (
            collections.deque()
        )
        self._awaited: dict[Awaits, K] = {}
        # When each began; less what its coroutine took.
        self._running: dict[threading.Thread, tuple[K, float]] = {}
        self._outcomes: dict[K, T | Failure] = {}
        # When the calls under way were submitted.
        self._since: dict[K, float] = {}
        # Those submitted since the last `take`; and those whose last call took longer than a round.
        self._new: set[K] = set()
        self._slow: set[K] = set()
        self._round_s = math.inf
        # Workers wake the caller for the first outcome, or the last one that it waits for.
        self._one_is_enough = False
        self._waited_for: set[K] = set()

    def submit(self, calls: Mapping[K, Callable[[], T]]) -> None:
        """Lets workers make these calls; returns at once."""
        with self._changed:
            self._todo.extend(calls.items())
            self._since |= dict.fromkeys(calls, time.monotonic())
            self._new |= calls.keys()
        self._pool.wake(self, len(calls))

    def take(
        self, wait: float | RoundWait = 0.0, *, at_least_one: bool = False
    ) -> dict[K, T | Failure]:
        """Returns the finished outcomes, after waiting for others.

        Each call is waited for once, so that a slow one does not hold up each `take`: up to `wait`
        seconds from `submit` on, or, with a RoundWait, in the first `take` behind `submit`, unless
        the last call with this key took longer than a round. With `at_least_one` the first outcome
        is waited for without a limit (a hung call fails after the pool's `timeout_s`), unless no
        call is under way.

        Raises RunError where calls hang, and the process may start no more threads.
        """
        while True:
            # Not with the lock held: the calls of others have locks too.
            self._pool.give_up_overdue()
            with self._changed:
                now = time.monotonic()
                under_way = self._since.keys() - self._outcomes.keys()
                self._waited_for, until = self._to_wait_for(wait, under_way, now)
                enough = bool(self._outcomes) or not at_least_one
                if (enough and not self._waited_for) or not under_way:
                    self._one_is_enough, self._waited_for = False, set()
                    outcomes, self._outcomes = self._outcomes, {}
                    for key in outcomes:
                        del self._since[key]
                    self._new.clear()
                    return outcomes
                # Each outcome shortens a RoundWait.
                self._one_is_enough = not enough or isinstance(wait, RoundWait)
                look_at = min(self._next_overdue(), now + _LOOK_S)
                self._changed.wait(max(0.0, (min(until, look_at) if enough else look_at) - now))
            self._look()

    def _to_wait_for(
        self, wait: float | RoundWait, under_way: Set[K], now: float
    ) -> tuple[set[K], float]:
        """Returns the calls to wait for now, and until when; none where the wait is over."""
        if isinstance(wait, RoundWait):
            self._round_s = wait.round_s
            awaited = (self._new - self._slow) & under_way
            left_s = wait.left_s(now, len(awaited), len(self._outcomes))
            return (awaited if left_s > 0 else set()), now + left_s
        deadlines = {key: self._since[key] + wait for key in under_way}
        awaited = {key for key, at in deadlines.items() if at > now}
        return awaited, max(deadlines.values(), default=now)

    def poll(self, polls: Mapping[K, Callable[[], str | None]]) -> dict[K, str]:
        """Returns what these return now, in their order, but for None."""
        found = ((key, poll()) for key, poll in polls.items())
        return {key: name for key, name in found if name is not None}

    def work(self) -> bool:
        """Makes calls until none is left; False if this thread was given up meanwhile."""
        thread = threading.current_thread()
        while True:
            with self._changed:
                following = self._next()
                if following is None:
                    return True
                key, call, used_s = following
                began_s = time.monotonic() - used_s
                self._running[thread] = (key, began_s)
            outcome = self._pool.make(call)
            # A call that keeps the interpreter to itself may end before anyone sees it overdue.
            took_s, timeout_s = time.monotonic() - began_s, self._pool.timeout_s
            if took_s >= timeout_s and not isinstance(outcome, Awaits):
                outcome = _failure(Overdue(timeout_s))
            with self._changed:
                if self._running.pop(thread, None) is None:
                    return False
                if isinstance(outcome, Awaits):
                    self._awaited[outcome] = key
                else:
                    self._outcomes[key] = outcome
                    self._note_speed(key)
                    is_last = self._waited_for == {key}
                    self._waited_for.discard(key)
                    if self._one_is_enough or is_last:
                        self._changed.notify()
            if isinstance(outcome, Awaits):
                go_on = functools.partial(self._go_on, outcome)
                self._pool.run_coroutine(Waiting(outcome, took_s, go_on))

    def _note_speed(self, key: K) -> None:
        """Notes whether a call that has ended took longer than a round."""
        if time.monotonic() - self._since[key] < self._round_s:
            self._slow.discard(key)
            return
        if len(self._slow) == _MOST_SLOW:
            # Nobody says which keys come no more.
            self._slow.clear()
        self._slow.add(key)

    def _next(self) -> tuple[K, Callable[[], T], float] | None:
        """Returns a call to make and the seconds that it has taken, one that was begun first."""
        while self._returned:
            awaits, call, used_s = self._returned.popleft()
            # Else its loop was given up, and what it comes to is late.
            if awaits in self._awaited:
                return self._awaited.pop(awaits), call, used_s
        return (*self._todo.popleft(), 0.0) if self._todo else None

    def _go_on(self, awaits: Awaits, call: Callable[[], T], used_s: float) -> None:
        """Lets a worker go on with a call whose coroutine has ended. Takes no lock."""
        self._returned.append((awaits, call, used_s))
        self._pool.wake(self, 1)

    def _next_overdue(self) -> float:
        oldest = min((start for _, start in self._running.values()), default=time.monotonic())
        return oldest + self._pool.timeout_s

    def give_up_overdue(self) -> None:
        """Closes the calls that ran too long, and replaces the threads that still make them."""
        timeout_s, now = self._pool.timeout_s, time.monotonic()
        with self._changed:
            for thread, (key, start) in list(self._running.items()):
                if now - start >= timeout_s:
                    del self._running[thread]
                    self._outcomes[key] = _failure(Overdue(timeout_s))
                    self._pool.replace_worker(thread, self)


def _work(waiting: "queue.SimpleQueue[Calls[Any, Any] | None]", calls: Calls | None) -> None:
    """Runs a worker; a replacement begins with the calls of the thread that it replaces."""
    while calls is None or calls.work():
        calls = waiting.get()
        if calls is None:
            return


def _outcome(call: Callable[[], T]) -> T | Failure | Awaits:
    try:
        return call()
    # A traceback has the frames of callers that hold the error: a circle that would keep the
    # environment and its episode until the collector comes.
    except Awaits as awaits:
        return awaits.with_traceback(None)
    # The one place where everything is caught: an environment is not our code. SystemExit too, it
    # would end the worker without a word and cost a timeout.
    except BaseException as error:  # noqa: BLE001
        failure = _failure(error)
        error.__traceback__ = None
        return failure


def _failure(error: BaseException) -> Failure:
    if isinstance(error, Overdue):
        return Failure(stop_reason=ENVIRONMENT_TIMEOUT, detail=str(error))
    if isinstance(error, InputError):
        detail = str(error)
    else:
        # An error's own text may raise, which this outlives.
        words = "".join(traceback.format_exception_only(error))
        detail = words.strip() + where_raised(error)
    return Failure(stop_reason=ENVIRONMENT_ERROR, detail=detail)
