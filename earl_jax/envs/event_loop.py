# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An event loop in a thread of its own, for environments whose methods are coroutines."""

import asyncio
import collections
import contextlib
import functools
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# A coroutine that was cancelled is cancelled again so often, until it ends.
_AGAIN_S = 1.0
# The loop shows so often that nothing holds it up.
_BEAT_S = 1.0
# Threads, at most, of `asyncio.to_thread` in all coroutines together. Python's own few would let
# blocking requests of some episodes wait for those of others until all are overdue.
_MOST_THREADS = 1024


class Awaits(Exception):  # noqa: N818 - no error
    """A call waits for `awaitable`: its result is what `then` makes of what that comes to.

    An exception, because the call has no result yet; `pool.EnvironmentPool` takes it on.
    """

    def __init__(self, awaitable: Awaitable[Any], then: Callable[[Any], Any]):
        super().__init__("an environment's coroutine, which only an EnvironmentPool awaits")
        self.awaitable, self.then = awaitable, then


class Overdue(Exception):  # noqa: N818 - becomes a stop reason
    """A call took longer than its time limit."""

    def __init__(self, timeout_s: float, why: str = ""):
        super().__init__(f"no answer within {timeout_s} s (config.env.timeout_s){why}")


class Waiting(NamedTuple):
    """A coroutine to run. Its call has taken `used_s` of the time limit.

    `deliver` lets another thread make the rest of the call: it takes a function that returns the
    call's result or raises, and the seconds of the time limit that the rest has used already.
    """

    awaits: Awaits
    used_s: float
    deliver: Callable[[Callable[[], Any], float], None]


def after(value: Any, then: Callable[[Any], T]) -> T:
    """Returns `then(value)`; raises Awaits if `value` is a coroutine, or else awaitable."""
    if inspect.isawaitable(value):
        raise Awaits(value, then)
    return then(value)


def settle(value: Any) -> Any:
    """Returns `value`, or what it comes to if it is awaitable; waits without a time limit."""
    if not inspect.isawaitable(value):
        return value
    settled = _settle(Awaits(value, lambda result: result))
    return asyncio.run_coroutine_threadsafe(settled, _shared_loop()).result()()


@functools.cache
def _shared_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="examples-loop", daemon=True).start()
    return loop


class EventLoop:
    """A thread that runs coroutines, each under a time limit.

    One that takes longer than `timeout_s` is cancelled, once a second until it ends, and whatever
    it returns is dropped. A coroutine that blocks or computes holds up all others: after
    `timeout_s` the loop `is_blocked`, and is to be given up for another one with the same `todo`,
    from which each coroutine begins.

    The thread takes no lock that others take, so that SystemExit may be raised in it once it is
    given up.
    """

    def __init__(self, timeout_s: float, todo: collections.deque[Waiting]):
        """Starts the thread; raises RuntimeError or OSError where the process may start no more."""
        self._timeout_s, self._todo = timeout_s, todo
        self._under_way: dict[Awaits, Waiting] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_overdue = 0
        self._ended = False
        self._beat_s = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS, "environment-thread"))
        self._loop.call_soon(self._beat)
        self.thread = threading.Thread(target=self._run, name="environment-loop", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    # Called by other threads.

    def begin(self) -> None:
        """Begins with the coroutines in `todo`; returns at once."""
        self._call(self._begin)

    def end(self) -> None:
        """Ends the thread, without waiting; cancels what is under way."""
        self._ended = True
        self._call(self._loop.stop)

    def give_up(self) -> None:
        """Ends a blocked loop; all that is under way has had its time."""
        self.end()
        why = "; a coroutine holds up the event loop: it computes, or waits without await"
        for waiting in list(self._under_way.values()):
            error = Overdue(self._timeout_s, why)
            waiting.deliver(functools.partial(_raise, error), 0.0)

    @property
    def is_blocked(self) -> bool:
        """True if coroutines wait, and the loop has been held up for more than the time limit."""
        silent_s = time.monotonic() - self._beat_s
        # Whatever is under way began before the loop was held up, so that it is overdue too.
        return silent_s > self._timeout_s + _BEAT_S and bool(self._under_way or self._todo)

    @property
    def num_overdue(self) -> int:
        """The number of coroutines that were cancelled and have not ended."""
        return self._num_overdue

    def _call(self, callback: Callable[[], None]) -> None:
        # The loop may be closed, after `end`.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    # Called by the loop's own thread.

    def _run(self) -> None:
        while not self._ended:
            # SystemExit comes out of the loop, if a task has it that an environment made itself.
            with contextlib.suppress(BaseException):
                self._loop.run_forever()
        with contextlib.suppress(BaseException):
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left, timeout=_AGAIN_S))
        self._loop.close()

    def _beat(self) -> None:
        self._beat_s = time.monotonic()
        self._loop.call_later(_BEAT_S, self._beat)

    def _begin(self) -> None:
        while self._todo and not self._ended:
            waiting = self._todo.popleft()
            self._under_way[waiting.awaits] = waiting
            self._start(waiting)

    def _start(self, waiting: Waiting) -> None:
        # asyncio itself holds tasks weakly.
        task = self._loop.create_task(self._limit(waiting))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._finish, waiting))

    def _finish(self, waiting: Waiting, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if waiting.awaits in self._under_way and not self._ended:
            # An environment has cancelled all tasks, this one before it began.
            self._start(waiting)

    async def _limit(self, waiting: Waiting) -> None:
        """Runs a coroutine, and delivers what it comes to in its time."""
        began_s = time.monotonic()
        until_s = began_s + self._timeout_s - waiting.used_s
        task = None
        # One that is cancelled before it begins has not touched the coroutine.
        while task is None or task.cancelled():
            task = asyncio.ensure_future(_settle(waiting.awaits))
            is_done = await self._ends(task, until_s)
        del self._under_way[waiting.awaits]
        if is_done:
            used_s = waiting.used_s + time.monotonic() - began_s
            waiting.deliver(task.result(), used_s)
            return
        waiting.deliver(functools.partial(_raise, Overdue(self._timeout_s)), 0.0)
        self._num_overdue += 1
        while not is_done:
            task.cancel()
            is_done = await self._ends(task, time.monotonic() + _AGAIN_S)
        self._num_overdue -= 1

    async def _ends(self, task: asyncio.Task[Any], until_s: float) -> bool:
        """Returns whether the task ends until then, by time.monotonic().

        An environment may cancel all tasks of the loop, which must not end this wait.
        """
        while True:
            try:
                done, _ = await asyncio.wait((task,), timeout=until_s - time.monotonic())
                return bool(done)
            except asyncio.CancelledError:
                if self._ended:
                    raise


async def _settle(awaits: Awaits) -> Callable[[], Any]:
    """Returns a function that goes on with the call, or that raises what was raised."""
    try:
        return functools.partial(awaits.then, await awaits.awaitable)
    # As in `pool`: an environment is not our code, and SystemExit would end the loop.
    except BaseException as error:  # noqa: BLE001
        return functools.partial(_raise, error)


def _raise(error: BaseException) -> Any:
    raise error
