# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Connections of the HTTP server: their number, their size, and clients that take their time."""

import asyncio
import contextlib
import socket
import time

from earl_jax.http import server as http_server
from earl_jax.http.server import HttpLimits, HttpServer
from tests.support.fuzz import http_bytes

LIMITS = {"most_bytes": 1000, "most_held_bytes": 2500, "max_connections": 6}
PART = {"text": "x" * 2**16}


class Playing:
    """A server of one handler, and what its handlers did."""

    def __init__(self, **limits):
        given = {**LIMITS, "read_s": 0.5, "write_s": 0.5, **limits}
        self.server = HttpServer(self.handle, HttpLimits(**given))
        self.sent, self.ended = 0, []
        self.go_on = asyncio.Event()

    async def handle(self, request, connection) -> None:
        """Answers at once, or after `go_on`, or sends events without end."""
        try:
            if request.path == "/silent":
                await connection.begin_events()
            if request.path in ("/wait", "/silent"):
                await self.go_on.wait()
            if request.path == "/endless":
                await connection.begin_events()
                while True:
                    await connection.send_event(PART)
                    self.sent += 1
            await connection.send_json(200, {})
        except BaseException as error:
            self.ended.append(type(error))
            raise


@contextlib.asynccontextmanager
async def playing(**limits):
    here = Playing(**limits)
    port = await here.server.start("127.0.0.1", 0)
    yield here, port
    await here.server.stop(1)


def connected(port: int, source: str = "127.0.0.1") -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.bind((source, 0))
    client.connect(("127.0.0.1", port))
    client.setblocking(False)
    return client


async def answer_to(client: socket.socket, data: bytes, *, whole: bool = True) -> bytes:
    """Returns the answer, up to the end of the connection or, unless `whole`, the first part."""
    loop, found = asyncio.get_running_loop(), b""
    if data:
        await loop.sock_sendall(client, data)
    with contextlib.suppress(ConnectionError):
        while part := await asyncio.wait_for(loop.sock_recv(client, 2**16), 20):
            found += part
            if not whole:
                break
    return found


async def trickle(client: socket.socket, head: bytes) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client, head)
    while True:
        await asyncio.sleep(0.05)
        await loop.sock_sendall(client, b"x")


def test_a_body_that_trickles_is_given_up():
    async def play() -> None:
        async with playing() as (here, port):
            for head in (b"POST / HTTP/1.1\r\nHost", http_bytes("/", b"x" * 100)[:-50]):
                with connected(port) as client:
                    start = time.monotonic()
                    trickling = asyncio.ensure_future(trickle(client, head))
                    found = await answer_to(client, b"")
                    assert 0.4 < time.monotonic() - start < 10
                    trickling.cancel()
                assert found.startswith(b"HTTP/1.1 408 ") and b"not whole after 0.5 s" in found
            # One that says nothing is closed without a word.
            with connected(port) as client:
                assert await answer_to(client, b"") == b""
            assert here.ended == [] and here.server.held_bytes == 0

    asyncio.run(play())


def test_a_client_that_does_not_read_is_given_up():
    """Its handler ends, and its socket, with all that was written to it."""

    async def play() -> None:
        async with playing() as (here, port):
            with connected(port) as client:
                data = http_bytes("/endless", b"{}")
                await asyncio.get_running_loop().sock_sendall(client, data)
                async with asyncio.timeout(20):
                    while not here.ended:
                        await asyncio.sleep(0.01)
                    while here.server._open:
                        await asyncio.sleep(0.01)
                assert here.ended == [TimeoutError]
                # All but what was in the sockets' buffers is gone, and no more comes.
                found = await answer_to(client, b"")
                assert 0 < len(found) < here.sent * len(PART["text"]) + 2**22

    asyncio.run(play())


def test_connections_are_bounded_in_all_and_of_one_address(monkeypatch):
    # Longer than a client takes for 16 MiB.
    monkeypatch.setattr(http_server, "LINGER_S", 30.0)

    async def play() -> None:
        async with playing(read_s=20) as (here, port), contextlib.AsyncExitStack() as stack:

            async def connect(source: str) -> tuple[socket.socket, bytes]:
                client = stack.enter_context(connected(port, source))
                return client, await answer_to(client, http_bytes("/", b"{}"), whole=False)

            for source in ("127.0.0.2", "127.0.0.3"):
                clients = [await connect(source) for _ in range(3)]
                assert all(found.startswith(b"HTTP/1.1 200 ") for _, found in clients)
                _, found = await connect(source)
                assert found.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in found.lower()
                assert b"3 of them yours; this server takes 6, and 3 of one address" in found
            _, found = await connect("127.0.0.4")
            assert b"6 connections are open, 0 of them yours" in found
            # One that sends more than the sockets hold reads why, too.
            with connected(port, "127.0.0.5") as client:
                found = await answer_to(client, http_bytes("/", b"x" * 2**24))
            assert b"6 connections are open, 0 of them yours" in found
            clients[0][0].close()
            async with asyncio.timeout(20):
                while len(here.server._open) == 6:
                    await asyncio.sleep(0.01)
            assert (await connect("127.0.0.4"))[1].startswith(b"HTTP/1.1 200 ")

    asyncio.run(play())


def test_the_bodies_of_open_requests_are_bounded_together():
    async def play() -> None:
        async with playing(max_connections=40, read_s=20) as (here, port):
            body = b"x" * 1000
            with contextlib.ExitStack() as stack:
                waiting = [stack.enter_context(connected(port)) for _ in range(2)]
                for client in waiting:
                    data = http_bytes("/wait", body)
                    await asyncio.get_running_loop().sock_sendall(client, data)
                async with asyncio.timeout(20):
                    while here.server.held_bytes < 2000:
                        await asyncio.sleep(0.01)
                with connected(port) as client:
                    found = await answer_to(client, http_bytes("/", body))
                assert found.startswith(b"HTTP/1.1 503 ") and b"3000 bytes, more than" in found
                with connected(port) as client:
                    found = await answer_to(client, http_bytes("/", b"{}"), whole=False)
                assert found.startswith(b"HTTP/1.1 200 ")
                # One goes away, and the other gets its answer.
                waiting[0].close()
                here.go_on.set()
                assert (await answer_to(waiting[1], b"", whole=False)).startswith(b"HTTP/1.1 200 ")
            async with asyncio.timeout(20):
                while here.server.held_bytes or here.server._open:
                    await asyncio.sleep(0.01)

    asyncio.run(play())


def test_a_client_that_ends_its_side_of_the_connection_gets_its_answers():
    """Both of two requests; once it is gone it is waited for no longer, whatever it asked for."""

    async def play() -> None:
        async with playing(max_connections=40, read_s=20) as (here, port):
            with connected(port) as client:
                both = http_bytes("/wait", b"{}") + http_bytes("/wait", b"{}")
                await asyncio.get_running_loop().sock_sendall(client, both)
                client.shutdown(socket.SHUT_WR)
                await asyncio.sleep(3 * http_server.PROBE_S)
                assert len(here.server._open) == 1 and not here.ended
                here.go_on.set()
                found = await answer_to(client, b"")
            parts = found.split(b"HTTP/1.1 ")[1:]
            assert len(parts) > 3 and {part[:3] for part in parts} == {b"100", b"200"}
            assert found.count(b"HTTP/1.1 200 ") == 2
            here.go_on.clear()
            for path in ("/wait", "/silent"):
                with connected(port) as client:
                    await asyncio.get_running_loop().sock_sendall(client, http_bytes(path, b"{}"))
                    client.shutdown(socket.SHUT_WR)
                    await asyncio.sleep(2 * http_server.PROBE_S)
                    assert len(here.server._open) == 1
                async with asyncio.timeout(20):
                    while here.server._open:
                        await asyncio.sleep(0.01)
            assert here.ended == [asyncio.CancelledError] * 2
            # Who speaks HTTP/1.0 knows of no interim answers.
            with connected(port) as client:
                old = http_bytes("/wait", b"{}").replace(b"HTTP/1.1", b"HTTP/1.0")
                await asyncio.get_running_loop().sock_sendall(client, old)
                client.shutdown(socket.SHUT_WR)
                async with asyncio.timeout(20):
                    while len(here.ended) < 3 or here.server._open:
                        await asyncio.sleep(0.01)

    asyncio.run(play())


def test_a_head_has_no_body():
    async def play() -> None:
        async with playing() as (_, port):
            with connected(port) as client:
                both = http_bytes("/", b"", method="HEAD") + http_bytes("/", b"{}")
                found = await answer_to(client, both)
        assert found.count(b"HTTP/1.1 200 ") == 2 and found.count(b"{}") == 1

    asyncio.run(play())
