# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A search for the lost process of a run, the stages of the others, and counters for all.

JAX tells a process that another one is lost, and not which. So each process answers, in a thread
and on a port of its own, with its stage; one that loses another asks all of them. Process 0 also
counts there for all: two processes that take from a counter get different numbers.
"""

import json
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from earl_jax.telemetry.timing import stage_now

_ANSWER_S = 2.0
# How long a connection may take to say what it asks. Others wait meanwhile.
_REQUEST_S = 1.0
# Before another connection is taken where one could not be.
_PAUSE_S = 0.1
_LONGEST = 2**10
# A process that ends because another one is lost answers for so long: it is not the lost one.
LINGER_S = 3.0
_NAMED = 8


class Place(NamedTuple):
    """A process and where it answers: its number, the host's name and address, and the port."""

    index: int
    host: str
    address: str
    port: int


class Presence:
    """Answers other processes, and asks them. One for each process."""

    def __init__(self, address: str) -> None:
        """Begins to answer at this address of the host; "" for all of its interfaces."""
        self._waits_for = ""
        self._ends = False
        self._failed = ""
        self._others: tuple[Place, ...] = ()
        # In every process: the number of counters so far. In process 0: the newest one and its
        # value, which processes take from in turns.
        self._num_counters = 0
        self._counter, self._count = 0, 0
        self._counts = threading.Lock()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self.address, self.port = address, int(self._listener.getsockname()[1])
        threading.Thread(target=self._answer, name="presence", daemon=True).start()

    def meet(self, others: Sequence[Place]) -> None:
        """Sets where the other processes answer."""
        self._others = tuple(others)

    def waits(self, what: str) -> None:
        """Notes what this process waits for others with; "" for nothing."""
        self._waits_for = what

    def new_counter(self) -> int:
        """Returns the number of a new counter, at 0; every process calls it when all left the last.

        Processes that make as many counters mean the same one by a number.
        """
        self._num_counters += 1
        return self._num_counters

    def count(self, counter: int, number: int) -> int:
        """Adds `number` to the newest counter, at process 0. Returns the value before.

        Raises OSError where process 0 has ended.
        """
        if (first := self._first) is None:
            return self._count_here(counter, number)
        return _answer_of(first, [counter, number], None)

    @property
    def _first(self) -> Place | None:
        """Process 0; None: this is it."""
        return next((place for place in self._others if place.index == 0), None)

    def _count_here(self, counter: int, number: int) -> int:
        with self._counts:
            if counter > self._counter:
                self._counter, self._count = counter, 0
            assert counter == self._counter, f"counter {counter} behind {self._counter}"
            before, self._count = self._count, self._count + number
            return before

    def lost(self, why: str) -> str:
        """Returns which processes are gone, or are not where this one waits, in words; "" for none.

        This process ends because of them, or where none is, because of what it says: `why`. Takes a
        few seconds at most.
        """
        self._ends = True
        if not self._others:
            return ""
        with ThreadPoolExecutor(min(64, len(self._others))) as pool:
            found = [words for words in pool.map(self._ask, self._others) if words]
        self._failed = "" if found else why
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        return "; ".join(found[:_NAMED]) + more

    def here(self) -> str:
        """Returns the stage of this process in words."""
        waits = f", waiting for {self._waits_for}" if self._waits_for else ""
        return f"in the stage {stage_now()}{waits}"

    def _ask(self, other: Place) -> str:
        """Returns why another process may be the lost one; "" where it waits as this one does."""
        name = f"process {other.index} on {other.host}"
        try:
            answer = _answer_of(other, [], _ANSWER_S)
        except ConnectionError:
            return f"{name} has ended"
        except TimeoutError:
            return f"{name} does not answer (stopped, or its host or network hangs)"
        except (OSError, ValueError) as error:
            return f"{name} cannot be reached ({error})"
        if answer["failed"]:
            return f"{name} failed: {answer['failed']}"
        return "" if answer["waits"] else f"{name} is still in the stage {answer['stage']}"

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # A connection that broke before, or no descriptor is free: others try again.
                time.sleep(_PAUSE_S)
                continue
            try:
                with connection:
                    connection.settimeout(_REQUEST_S)
                    request = json.loads(connection.makefile().readline(_LONGEST))
                    answer = self._count_here(*request) if request else self._here()
                    connection.sendall(json.dumps(answer).encode() + b"\n")
            except (OSError, ValueError, TypeError, AssertionError, RecursionError):
                # The other process ended in between, or is something else.
                continue

    def _here(self) -> dict[str, Any]:
        return {
            "stage": stage_now(),
            "waits": self._ends or bool(self._waits_for),
            "failed": self._failed,
        }


def _answer_of(place: Place, request: list[int], timeout_s: float | None) -> Any:
    """Returns what a process answers: to [] where it is, to a counter and a number the count."""
    with socket.create_connection(place[2:], timeout_s) as connection:
        connection.sendall(json.dumps(request).encode() + b"\n")
        if not (line := connection.makefile().readline()):
            raise ConnectionResetError("it ended")
    return json.loads(line)


_presence: Presence | None = None


def be_present(address: str) -> Presence:
    """Returns the presence of this process, which answers from the first call on, at `address`."""
    global _presence
    if _presence is None:
        _presence = Presence(address)
    return _presence


def waits(what: str) -> None:
    """Notes what this process waits for others with; "" for nothing."""
    if _presence is not None:
        _presence.waits(what)


def presence() -> Presence:
    """Returns the presence of this process, which is one of several."""
    assert _presence is not None, "the processes have met"
    return _presence


def lost_in_words(why: str) -> tuple[str, str]:
    """Returns this process's stage, and which others are lost; "" where that is not known.

    Where none of them is, this process has failed itself, and tells others that ask: `why`.
    """
    if _presence is None:
        return "", ""
    return f", {_presence.here()}", _presence.lost(why)
