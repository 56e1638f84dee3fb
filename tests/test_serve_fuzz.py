# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A server that is sent malformed requests, by clients that are slow or vanish.

A well-behaved client beside them gets the tokens of a quiet server, and afterwards the threads,
descriptors and pages are as many as before.
"""

import concurrent.futures
import contextlib
import json
import random
import re
import socket
import struct
import threading
import time

import grpc
import pytest
from jetstream.core.proto import jetstream_pb2_grpc

from tests.support import http_client
from tests.support.fuzz import (
    COMPLETIONS,
    GENERATE,
    grpc_message,
    http2_bytes,
    http_bytes,
    http_request,
)
from tests.support.served import (
    MODEL,
    PARROT_CONTEXT,
    Code,
    ids_of,
    prompt,
    refusal,
    request,
    save_parrot,
    saying,
)
from tests.support.serving_here import Here, serving_here, until

# What a client may be told; 5xx are a mistake of the server's but for these.
STATUS = {100, 200, 400, 404, 405, 408, 413, 415, 429, 431, 501, 503, 505}
CODES = {Code.OK, Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.CANCELLED}
READ_S = 2.0


@pytest.fixture(scope="module")
def server():
    with serving_here(MODEL, read_s=READ_S, write_s=READ_S, text_timeout_s=2.0) as here:
        yield here


def opened(address: str, source: str) -> socket.socket:
    """A connection from another address of this machine, which is another client."""
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 30, source_address=(source, 0))


def statuses(client: socket.socket) -> list[int]:
    """The status of each answer, up to the end of the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(2**16):
            data += part
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


# One client each.


def send_malformed(server: Here, rng: random.Random) -> None:
    """One malformed request over any protocol."""
    source = f"127.0.0.{rng.randrange(2, 9)}"
    if (kind := rng.random()) < 0.7:
        with opened(server.http, source) as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(http_request(rng))
                client.shutdown(socket.SHUT_WR)
            found = statuses(client)
        assert set(found) <= STATUS, found
    elif kind < 0.9:
        path = "/jetstream_proto.Orchestrator/" + rng.choice(("Decode", "Decode", "HealthCheck"))
        call = server.channel.unary_stream(path)(grpc_message(rng), timeout=30)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        assert call.code() in CODES, (call.code(), call.details())
    else:
        with opened(server.address, source) as client, contextlib.suppress(ConnectionError):
            client.sendall(http2_bytes(rng))
            client.shutdown(socket.SHUT_WR)
            while client.recv(2**16):
                pass


def vanish(server: Here, rng: random.Random) -> None:
    """A good request whose client is slow to send or to read it, and goes away at any moment."""
    if rng.random() < 0.3:
        call = server.stub.Decode(request(prompt(rng.randrange(9), 9), rng.randrange(1, 100)))
        time.sleep(rng.random() * 0.1)
        call.cancel()
        return
    body = {"prompt": "x" * rng.randrange(1, 60), "max_tokens": 60, "stream": rng.random() < 0.5}
    data = http_bytes(COMPLETIONS, json.dumps(body).encode())
    with opened(server.http, f"127.0.0.{rng.randrange(2, 9)}") as client:
        with contextlib.suppress(ConnectionError):
            if rng.random() < 0.5:  # it sends a piece at a time, and maybe not all
                cut = rng.randrange(len(data))
                for place in range(0, cut, 20):
                    client.sendall(data[place : place + 20])
                    time.sleep(rng.random() * 0.01)
                if rng.random() < 0.1:
                    statuses(client)  # it waits for what the server says in the end
            else:
                client.sendall(data)
                time.sleep(rng.random() * 0.1)
                client.recv(rng.choice((1, 100, 2**16)))
        if rng.random() < 0.5:  # it is cut off, instead of closing in order
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# All of them, and one beside them.


class Beside:
    """A well-behaved client, which asks on until it is `ended`."""

    def __init__(self, server: Here) -> None:
        self._server = server
        self.asked = [(prompt(number, 5 + 9 * number), 25) for number in range(5)]
        self.quiet = [self._ask(number) for number in range(5)]
        self.wrong, self.count = [], 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _ask(self, number: int) -> tuple[list[int], list[int]]:
        ids, count = self.asked[number]
        sampling = {"max_tokens": count}
        answer = http_client.ask(
            self._server.http, GENERATE, token_ids=ids, sampling_params=sampling
        )
        return answer["choices"][0]["token_ids"], ids_of(
            self._server.stub.Decode(request(ids, count))
        )

    def _run(self) -> None:
        while not self._ended.is_set():
            number = self.count % 5
            try:
                found = self._ask(number)
                if found != self.quiet[number]:
                    self.wrong.append((number, found))
            except Exception as error:  # noqa: BLE001 - the test shows it
                self.wrong.append((number, error))
            self.count += 1

    def __enter__(self) -> "Beside":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()


def play(server: Here, client, count: int, threads: int, most_grown_bytes: int) -> None:
    with Beside(server):
        pass  # what a first request opens is not counted
    assert until(lambda: server.counts()["pages"] == 0)
    before, memory = server.counts(), server.rss_bytes()
    with Beside(server) as beside:
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(client, server, random.Random(i)) for i in range(count)]:
                done.result()
        assert until(lambda: beside.count >= 3)
    assert beside.wrong == []
    ended = until(lambda: all(now <= before[name] for name, now in server.counts().items()))
    assert ended, (before, server.counts())
    assert server.rss_bytes() - memory < most_grown_bytes


@pytest.mark.parametrize(
    ("client", "count", "threads"),
    [
        (send_malformed, 250, 4),
        (vanish, 60, 12),
        pytest.param(send_malformed, 10_000, 4, marks=pytest.mark.slow),
        pytest.param(vanish, 1_000, 24, marks=pytest.mark.slow),
    ],
)
def test_malformed_requests_and_vanishing_clients_disturb_no_other(
    server, capfd, client, count, threads
):
    play(server, client, count, threads, 2**28 if count >= 1_000 else 2**27)
    assert capfd.readouterr().err == ""


# Limits of clients over both protocols, with replies that do not end.


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    """Replies of 8,000 tokens to "x"."""
    folder = tmp_path_factory.mktemp("models") / "parrot"
    save_parrot(folder)
    bounds = {"max_waiting": 24, "max_waiting_per_client": 10}
    with serving_here(
        folder, num_slots=2, context_tokens=PARROT_CONTEXT, read_s=READ_S, write_s=READ_S, **bounds
    ) as here:
        yield here


def ask(server: Here, source: str, text: str, count: int, max_tokens: int) -> list[socket.socket]:
    """Clients of one address, each of a streamed reply."""
    body = json.dumps({"prompt": text, "max_tokens": max_tokens, "stream": True}).encode()
    clients = [opened(server.http, source) for _ in range(count)]
    for client in clients:
        client.sendall(http_bytes(COMPLETIONS, body))
        assert client.recv(2**12).startswith(b"HTTP/1.1 200 ")  # it waits, or is in a slot
    return clients


def test_one_client_cannot_take_every_place(parrot):
    """Its requests beyond 2 slots and 10 that wait are refused; another client's are served.

    The other client is the next that gets a slot, and those that wait begin one by one.
    """
    with contextlib.ExitStack() as stack:
        in_slots = [
            stack.enter_context(client) for client in ask(parrot, "127.0.0.2", "x", 2, 8000)
        ]
        waiting = [
            stack.enter_context(client) for client in ask(parrot, "127.0.0.2", "x", 10, 8000)
        ]
        with opened(parrot.http, "127.0.0.2") as client:
            client.sendall(http_bytes(COMPLETIONS, b'{"prompt": "<"}', "Connection: close"))
            found = b""
            while part := client.recv(2**16):
                found += part
        assert found.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1\r\n" in found.lower()
        assert (
            b"12 requests of 127.0.0.2 are open" in found and b"--max_waiting_per_client" in found
        )
        [other] = ask(parrot, "127.0.0.3", "<", 1, 50)
        time.sleep(0.2)
        for client in in_slots:
            client.close()
        with other:
            found = b""
            while b"[DONE]" not in found:
                found += other.recv(2**16)
        begun = 0
        for client in waiting:
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                begun += b"data: " in client.recv(2**16)
        assert begun <= 3
        many = [parrot.stub.Decode(request("x", 8000)) for _ in range(13)]
        assert until(lambda: any(call.done() for call in many))
        [over] = [call for call in many if call.done()]
        assert over.code() == Code.RESOURCE_EXHAUSTED
        assert "12 requests of 127.0.0.1 are open" in over.details()
        for each in many:
            each.cancel()
    assert until(lambda: parrot.counts()["pages"] == 0)


def test_a_client_that_does_not_read_over_grpc_is_given_up(parrot):
    """Its window, of the smallest size, is full after some tokens; then its slot is free."""
    small = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(parrot.address, options=small) as channel:
        call = jetstream_pb2_grpc.OrchestratorStub(channel).Decode(request("x", 8000))
        next(call)
        assert parrot.counts()["pages"] > 0
        assert until(lambda: parrot.counts()["pages"] == 0)
        code, words = refusal(call)
    assert code == Code.DEADLINE_EXCEEDED and f"has not read the reply for {READ_S:.0f} s" in words


def test_connections_over_grpc_are_bounded(parrot):
    """At 116 here: twice the 26 requests and 32. Silent ones are closed after READ_S."""
    before, num_clients = parrot.counts()["descriptors"], 200
    with contextlib.ExitStack() as stack:
        most = 0
        for number in range(1, num_clients + 1):
            stack.enter_context(opened(parrot.address, "127.0.0.2"))
            most = max(most, parrot.counts()["descriptors"] - before - number)
        now, deadline = most, time.monotonic() + 30
        while time.monotonic() < deadline and (most < 50 or now >= 10):
            now = parrot.counts()["descriptors"] - before - num_clients
            most = max(most, now)
            time.sleep(0.01)
        assert 50 <= most <= 116 and now < 10
    assert ids_of(parrot.stub.Decode(request("<", 50))) == saying()
    assert until(lambda: parrot.counts()["descriptors"] < before + 5), (before, parrot.counts())
