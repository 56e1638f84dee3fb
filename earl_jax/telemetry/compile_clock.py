# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Seconds that each thread spends until XLA has compiled a program, or has loaded it from a cache.

And the number of these programs. JAX reports them (`jax.monitoring`). Tracing and lowering are not
among them. Where a version of JAX calls the event otherwise, there are none.
"""

import collections
import functools
import threading
from typing import Any

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


class CompileClock:
    """Counts from `start` to `stop`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = collections.defaultdict[int, float](float)
        self._taken: dict[int, float] = {}
        # Since the last `take_number`.
        self._programs = collections.Counter[int]()
        self._runs = False

    def start(self) -> None:
        """Starts counting; a second call does nothing."""
        if not self._runs:
            jax.monitoring.register_event_duration_secs_listener(self._listen)
        self._runs = True

    def stop(self) -> None:
        """Stops counting; a second call does nothing."""
        if self._runs:
            jax.monitoring.unregister_event_duration_listener(self._listen)
        self._runs = False

    def seconds(self, thread: threading.Thread) -> float:
        """Returns the seconds of this thread since the start."""
        with self._lock:
            return self._seconds[thread.ident or 0]

    def own_seconds(self) -> float:
        """Returns the seconds of the calling thread since the start."""
        return self.seconds(threading.current_thread())

    def take(self, but: threading.Thread | None) -> float:
        """Returns the seconds of all other threads since the last call."""
        with self._lock:
            before, self._taken = self._taken, dict(self._seconds)
            new = {ident: s - before.get(ident, 0.0) for ident, s in self._taken.items()}
        return sum(seconds for ident, seconds in new.items() if but is None or ident != but.ident)

    def take_number(self, but: threading.Thread | None) -> int:
        """Returns the number of programs of all other threads since the last call."""
        with self._lock:
            programs, self._programs = self._programs, collections.Counter()
        return sum(number for ident, number in programs.items() if not but or ident != but.ident)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == EVENT:
            with self._lock:
                self._seconds[threading.get_ident()] += duration_secs
                self._programs[threading.get_ident()] += 1


@functools.cache
def compile_clock() -> CompileClock:
    """Returns the process's clock, which counts from the first call on."""
    clock = CompileClock()
    clock.start()
    return clock
