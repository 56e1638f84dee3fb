# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Messages in JSON between all processes of a run, which process 0 collects and sends to all.

They go from host to host, beside the devices: a program that gathered them would wait, on each
device, for the programs before it. Process 0 listens on a port of its own, and has a connection
with each other process; where it listens the others learn by such a program, the first of a run.
The list of all messages is as long as there are processes, and is sent as often: among many it is
compressed once (benchmarks/messages.md).
"""

import functools
import json
import secrets
import socket
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from earl_jax.launch.distributed import address_among, when_ending
from earl_jax.launch.open_files import allow_connections

_PROCESS = "process"
# Bytes of what processes say of themselves by a program: a host's name, or an address and a token.
_ROW_BYTES = 256
# How long process 0 may take to accept a connection, and its other side to say whose it is.
_REACHED_S = 10.0
# From so many other processes on a list is compressed. To compress and unpack it takes about as
# long as sending it eight times at 10 Gbit/s, and leaves a fifth or less (benchmarks/messages.md).
_PACKED_FROM = 16
# Firewalls forget connections that are silent for longer, such as 10 minutes in Google's cloud.
_ALIVE_S = 60


class ProcessesFailed(RuntimeError):
    """Raised in every process at a gather: some processes cannot go on.

    `errors` are theirs, by the number of the process, each of "who", "words" and "is_mistake".
    """

    def __init__(self, errors: dict[int, dict[str, Any]]) -> None:
        super().__init__("; ".join(error["words"] for error in errors.values()))
        self.errors = errors

    @property
    def is_mistake(self) -> bool:
        """True if all of them are mistakes in what was given."""
        return all(error["is_mistake"] for error in self.errors.values())

    def in_words(self, count: int) -> str:
        """Returns the errors and who has them; one that all `count` processes have, once."""
        words = {error["words"] for error in self.errors.values()}
        if len(words) == 1 and len(self.errors) == count:
            return words.pop()
        return "; ".join(f"{error['who']}: {error['words']}" for error in self.errors.values())


class Line(NamedTuple):
    """A connection with another process, with a message in each line."""

    connection: socket.socket
    lines: Any

    def send(self, message: bytes) -> None:
        """Sends a line."""
        self.connection.sendall(message + b"\n")

    def receive(self) -> bytes:
        """Returns the next line. Raises OSError where the other process has ended."""
        if not (line := self.lines.readline()).endswith(b"\n"):
            raise ConnectionResetError("a process ended")
        return line[:-1]

    def receive_list(self) -> bytes:
        """Returns the next list of messages, as `as_sent` makes it. Raises as `receive`."""
        line = self.receive()
        if line.startswith(b"["):
            return line
        packed = self.lines.read(int(line))
        if len(packed) < int(line):
            raise ConnectionResetError("a process ended")
        return zlib.decompress(packed)

    def end(self) -> None:
        """Ends the connection for the other process too."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the connection up."""
        self.lines.close()
        self.connection.close()


def exchange(message: dict[str, Any], *, in_first: bool = False) -> list[dict[str, Any]]:
    """Returns the messages of all processes, process by process; all of them call it.

    In one thread, because the order of the calls says which messages belong together. With
    `in_first` the first process alone gets them; the others get the errors among them, and {} for
    each other message.

    Raises:
        OSError: another process has ended, or this one does not reach process 0.
    """
    lines, own = _lines(), json.dumps(message).encode()
    answer = error_alone if in_first else None
    return json.loads(exchange_lines(lines, own, is_first=jax.process_index() == 0, answer=answer))


def exchange_lines(
    lines: Sequence[Line],
    own: bytes,
    *,
    is_first: bool,
    answer: Callable[[bytes], bytes] | None = None,
) -> bytes:
    """Returns the messages of all processes as a list. `lines` are those of `accept`, or `join`'s.

    The others get what `answer` makes of each message; None: the messages.

    Raises:
        OSError: another process has ended.
    """
    if not is_first:
        lines[0].send(own)
        return lines[0].receive_list()
    messages = [own, *(line.receive() for line in lines)]
    every = _as_list(messages)
    sent = as_sent(_as_list(map(answer, messages)) if answer else every, len(lines))
    for line in lines:
        line.connection.sendall(sent)
    return every


def _as_list(messages: Iterable[bytes]) -> bytes:
    return b"[" + b",".join(messages) + b"]"


def as_sent(every: bytes, times: int) -> bytes:
    """Returns a list of messages as `Line.receive_list` reads it, which is sent so many times.

    That is a line; or where it is sent often, its length when compressed in a line, and then that.
    """
    if times < _PACKED_FROM:
        return every + b"\n"
    # The messages of processes are alike: the fastest level leaves little of them.
    packed = zlib.compress(every, 1)
    return b"%d\n" % len(packed) + packed


def error_alone(message: bytes) -> bytes:
    """Returns a message that is an error; {} for another one."""
    return message if message.startswith(b'{"error"') else b"{}"


def accept(listener: socket.socket, token: str, count: int) -> list[Line]:
    """Returns, in process 0, the lines to the others of `count` processes, in their order.

    Each sends the token; a connection without it is of another program, and is closed.
    """
    found = dict[int, Line]()
    while len(found) < count - 1:
        connection, _ = listener.accept()
        line = _line_of(connection)
        try:
            given, index = json.loads(line.receive())
        except (OSError, ValueError, TypeError):
            given, index = None, 0
        if given == token:
            connection.settimeout(None)
            found[index] = line
        else:
            line.close()
    return [found[index] for index in range(1, count)]


def join(address: str, port: int, token: str, index: int) -> Line:
    """Returns the line to process 0 of the process with this number. Raises OSError without one."""
    try:
        connection = socket.create_connection((address, port), _REACHED_S)
    except OSError as error:
        raise ConnectionError(
            f"process 0 is not reached at {address}:{port} ({error}), where messages of all "
            "processes go; open its ports to the other hosts, or give "
            "config.distributed.coordinator, an address at which they reach it"
        ) from None
    line = _line_of(connection)
    line.send(json.dumps([token, index]).encode())
    connection.settimeout(None)
    return line


def _line_of(connection: socket.socket) -> Line:
    connection.settimeout(_REACHED_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Line(connection, connection.makefile("rb"))


@functools.lru_cache(maxsize=1)
def _lines() -> list[Line]:
    """Returns the lines of this process, for `exchange_lines`. Every process calls it."""
    lines = _connect()
    for line in lines:
        when_ending(line.end)
    return lines


def _connect() -> list[Line]:
    if jax.process_index() == 0 and (words := allow_connections(jax.process_count())):
        raise ConnectionError(words)
    hosts = _by_devices(socket.gethostname())
    if jax.process_index() > 0:
        address, port, token = json.loads(_by_devices("")[0])
        return [join(address or hosts[0], port, token, jax.process_index())]
    address, token = address_among(hosts), secrets.token_hex(16)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=len(hosts)) as listener:
        _by_devices(json.dumps([address, listener.getsockname()[1], token]))
        return accept(listener, token, len(hosts))


def _by_devices(words: str) -> list[str]:
    """Returns the words of all processes, gathered by a program on the first device of each."""
    row = np.frombuffer(words.encode().ljust(_ROW_BYTES), np.uint8)
    assert len(row) == _ROW_BYTES, words
    mesh, to_all = _gather_program()
    own = jax.device_put(row[None], mesh.local_devices[0])
    rows = jax.make_array_from_single_device_arrays(
        (mesh.size, *row.shape), NamedSharding(mesh, PartitionSpec(_PROCESS)), [own]
    )
    every = jax.block_until_ready(to_all(rows))
    return [row.tobytes().decode().rstrip() for row in np.asarray(every.addressable_data(0))]


@functools.lru_cache(maxsize=1)
def _gather_program() -> tuple[Mesh, Any]:
    """Returns a mesh of the first device of each process, and what gathers its rows in each."""
    devices = sorted(jax.devices(), key=lambda device: device.process_index)
    first = {device.process_index: device for device in reversed(devices)}
    mesh = Mesh(np.array([first[n] for n in sorted(first)], dtype=object), (_PROCESS,))
    return mesh, jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
