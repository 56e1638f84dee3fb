# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The processes of a run meet at the first one's address before JAX starts there.

JAX ends a process whose fellows do not come without a word of ours (jax 0.10.2 and 0.12). Here the
first one hears who has come, and tells all what it waits for in vain.
"""

import contextlib
import json
import socket
import time

_RETRY_S = 0.2
_GO = "go"


def meet(address: str, index: int, count: int, timeout_s: float) -> None:
    """Returns when all `count` processes are there, of which this is number `index`.

    Args:
        address: "HOST:PORT" of process 0, which listens there for as long as this takes.
        index: this process.
        count: how many there are.
        timeout_s: after so many seconds the others are given up.

    Raises:
        ValueError: an address that is none or cannot be listened at, or who has not come.
    """
    host, _, port = address.rpartition(":")
    where = f"config.distributed.coordinator is {address!r}"
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"{where}; write it as HOST:PORT, such as 'node0:8476'")
    end = (host.strip("[]"), int(port))
    try:
        socket.getaddrinfo(*end, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"{where}, and {host!r} is no host known here: {error}") from error
    deadline_s = time.monotonic() + timeout_s
    if index:
        _come(end, index, count, deadline_s, f"{where}, and process {index} of {count}", timeout_s)
    else:
        _receive(end[1], count, deadline_s, where, timeout_s)


def _receive(port: int, count: int, deadline_s: float, where: str, timeout_s: float) -> None:
    """The first process's part."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ValueError(
            f"{where}, and process 0 cannot listen on port {port} ({error.strerror}); take another"
        ) from error
    with contextlib.ExitStack() as stack:
        stack.enter_context(server)
        come: set[int] = set()
        peers: list[socket.socket] = []
        mistake = ""
        while not mistake and len(come) < count - 1:
            server.settimeout(max(0.01, deadline_s - time.monotonic()))
            try:
                peer = stack.enter_context(server.accept()[0])
                peer.settimeout(5.0)
                greeting = json.loads(_line(peer))
                number, of = greeting["index"], greeting["count"]
            except TimeoutError:
                absent = sorted(set(range(1, count)) - come)
                if time.monotonic() > deadline_s:
                    mistake = (
                        f"of {count} processes {', '.join(map(str, absent))} did not come within "
                        f"{timeout_s:g} s. Start the same command on every host, each with a "
                        "config.distributed.process_id of its own, or raise "
                        "config.distributed.start_timeout_s"
                    )
                continue
            except (OSError, ValueError, KeyError, TypeError):
                # Whoever knocks here and is none of us.
                continue
            if of != count:
                mistake = (
                    f"config.distributed.num_processes is {count} in process 0, {of} in process "
                    f"{number}; give every process the same"
                )
            elif number in come:
                mistake = (
                    f"two processes have config.distributed.process_id = {number}; give each its "
                    "own, from 0"
                )
            come.add(number)
            peers.append(peer)
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(f"{mistake or _GO}\n".encode())
    if mistake:
        raise ValueError(mistake)


def _come(
    end: tuple[str, int], index: int, count: int, deadline_s: float, who: str, timeout_s: float
) -> None:
    """The part of all others."""
    while True:
        try:
            with socket.create_connection(end, timeout=5.0) as first:
                first.sendall(f"{json.dumps({'index': index, 'count': count})}\n".encode())
                # It answers when all have come, or a little after it has given up.
                first.settimeout(max(1.0, deadline_s + 5.0 - time.monotonic()))
                answer = _line(first)
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise ValueError(
                    f"{who} reached nobody there for {timeout_s:g} s ({error}): process 0 has not "
                    "started, listens elsewhere, or a firewall is between"
                ) from error
            time.sleep(_RETRY_S)
            continue
        if answer == _GO:
            return
        raise ValueError(answer or f"{who} was sent away: process 0 has ended")


def _line(peer: socket.socket) -> str:
    """What the other end says in one line; "" where it hangs up."""
    with peer.makefile("r", encoding="utf-8") as stream:
        return stream.readline(10_000).strip()
