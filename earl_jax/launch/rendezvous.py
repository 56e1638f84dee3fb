# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rendezvous: process 0 waits for the others before JAX does, to know which of them do not fit.

jax.distributed waits for its whole time where two processes have one number, and then aborts each
of them without saying so (jax 0.10.2). So every process first connects to process 0, at the address
where JAX's coordinator will listen, sends its number, and stays until it receives how to go on.
"""

import contextlib
import json
import math
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from earl_jax.settings.errors import InputError

# The first line that a process reads from process 0.
_GREETING = b"earl_jax rendezvous\n"
_GREETING_S = 3.0
# How long process 0 waits for further processes behind a mistake, to tell them too.
_LATE_S = 5.0
# A process that waits says so behind so many seconds.
_SILENT_S = 5.0
_AGAIN_S = 0.2
_LONGEST = 2**16
_NAMED = 8


class Member(NamedTuple):
    """A process as it was started, and its host."""

    process_id: int
    num_processes: int
    host: str


def find_mistake(members: Sequence[Member]) -> str:
    """Returns why these processes are not those of one run, in words; "" if they may be.

    Example: numbers 0, 1, 1 of 3 -> "two processes have config.distributed.process_id=1, on a and
    on b; ...".
    """
    first = members[0]
    for each in members:
        if each.num_processes != first.num_processes:
            return (
                f"config.distributed.num_processes is {first.num_processes} in process "
                f"{first.process_id} on {first.host} and {each.num_processes} in process "
                f"{each.process_id} on {each.host}; give all processes the same"
            )
    number, times = Counter(each.process_id for each in members).most_common(1)[0]
    if times == 1:
        return ""
    hosts = " and on ".join(each.host for each in members if each.process_id == number)
    return (
        f"{'two' if times == 2 else times} processes have config.distributed.process_id={number}, "
        f"on {hosts}; number those of this run from 0 to {first.num_processes - 1}, each once"
    )


def numbers_in_words(numbers: Iterable[int]) -> str:
    """Returns processes by their numbers. Example: 2 1 -> "processes 1, 2"."""
    found = sorted(numbers)
    shown = ", ".join(map(str, found[:_NAMED])) + ", ..." * (len(found) > _NAMED)
    return f"process{'es' if len(found) > 1 else ''} {shown}"


def wait_for_others(listeners: Sequence[socket.socket], own: Member, timeout_s: float) -> list[int]:
    """Returns, in process 0, the numbers of those that did not come in time; [] when all have come.

    The others receive the status that all end with: 0 where the run goes on, 1 where some are
    absent, 2 for a mistake in how they were started. A longer wait is noted on stderr, once.

    Raises:
        InputError: that mistake.
    """
    start_s, mistake = time.monotonic(), ""
    deadline_s, silent_s = start_s + timeout_s, start_s + _SILENT_S
    met = dict[socket.socket, Member]()
    with selectors.DefaultSelector() as ready:
        for listener in listeners:
            listener.setblocking(False)
            ready.register(listener, selectors.EVENT_READ)
        while len(met) < own.num_processes - 1 and (left := deadline_s - time.monotonic()) > 0:
            silent_left = max(0.0, silent_s - time.monotonic())
            if not silent_left:
                _say_waits(numbers_in_words(_absent(own, met.values())), timeout_s)
                silent_left = silent_s = math.inf
            for key, _ in ready.select(min(left, silent_left)):
                # Both are sockets: those that listen, and connections.
                found = cast(socket.socket, key.fileobj)
                if found in listeners:
                    _greet(found, ready)
                else:
                    _read_member(found, met, ready)
            if not mistake and (mistake := find_mistake([own, *met.values()])):
                deadline_s = min(deadline_s, time.monotonic() + _LATE_S)
    absent = _absent(own, met.values())
    # First the port is free again: a process that has its status goes to JAX's coordinator there.
    for listener in listeners:
        listener.close()
    for connection in met:
        _tell(connection, 2 if mistake else int(bool(absent)))
    if mistake:
        raise InputError(mistake)
    return sorted(absent)


def join(host: str, port: int, own: Member, *, timeout_s: float, others_end_s: float) -> int | None:
    """Returns the status that process 0 says, as `wait_for_others`; None: it did not come in time.

    `others_end_s` is how long what listens there may be something else, such as the run before this
    one, whose process 0 has yet to notice that it lost this process.

    Raises:
        InputError: something else listens at its address for longer.
    """
    start_s, other_s = time.monotonic(), None
    deadline_s, silent_s = start_s + timeout_s, start_s + _SILENT_S
    while (now_s := time.monotonic()) < deadline_s:
        if now_s > silent_s:
            _say_waits(f"process 0 at {host}:{port}", timeout_s)
            silent_s = math.inf
        try:
            status = ask(host, port, own, deadline_s - now_s)
        except OSError:
            other_s = None
        else:
            if status is not None:
                return status
            other_s = other_s or now_s
            if now_s - other_s >= min(others_end_s, timeout_s / 2):
                raise InputError(
                    f"config.distributed.coordinator is '{host}:{port}', and another program "
                    "listens there, or a run that has begun; take another port, or end it"
                )
        time.sleep(_AGAIN_S)
    return None


def ask(host: str, port: int, own: Member, timeout_s: float) -> int | None:
    """Returns the status that process 0 says; None where it is not what listens there.

    Raises:
        OSError: nothing listens there, or it ended.
    """
    with socket.create_connection((host, port), _GREETING_S) as connection:
        lines = connection.makefile("rb")
        try:
            greeting = lines.readline(len(_GREETING))
        except TimeoutError:
            return None
        if greeting != _GREETING:
            return None
        connection.sendall(json.dumps(own).encode() + b"\n")
        # Process 0 may have come later, and says when its own time is over.
        connection.settimeout(timeout_s + _LATE_S)
        if not (status := lines.readline(_LONGEST)):
            raise ConnectionResetError("process 0 ended")
        return int(status)


def _absent(own: Member, met: Iterable[Member]) -> set[int]:
    return {*range(1, own.num_processes)} - {member.process_id for member in met}


def _say_waits(whom: str, timeout_s: float) -> None:
    limit = f"up to {timeout_s:g} s (config.distributed.start_timeout_s)"
    print(f"waiting for {whom}, {limit}", file=sys.stderr, flush=True)


def _greet(listener: socket.socket, ready: selectors.BaseSelector) -> None:
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        connection.settimeout(_AGAIN_S)
        ready.register(connection, selectors.EVENT_READ)
        connection.sendall(_GREETING)


def _read_member(
    connection: socket.socket, met: dict[socket.socket, Member], ready: selectors.BaseSelector
) -> None:
    """Adds the process of a connection to those that were met; removes one that is gone."""
    try:
        number, count, host = json.loads(connection.recv(_LONGEST))
        met[connection] = Member(int(number), int(count), str(host))
    except (OSError, ValueError, TypeError):
        # It ended, or is something else; a process that goes on connects again.
        met.pop(connection, None)
        ready.unregister(connection)
        connection.close()


def _tell(connection: socket.socket, status: int) -> None:
    with contextlib.suppress(OSError), connection:
        connection.settimeout(_GREETING_S)
        connection.sendall(f"{status}\n".encode())
        # The other side closes first, so that no connection lingers at the port.
        connection.recv(1)
