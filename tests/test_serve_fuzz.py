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

from tests.support.fuzz import (
    COMPLETIONS,
    GENERATE,
    grpc_message,
    http2_bytes,
    http_bytes,
    http_request,
)
from tests.support.http_client import ask
from tests.support.served import MODEL, Code, ids_of, prompt, request
from tests.support.serving_here import Here, serving_here, until

# What a client may be told; 5xx are a mistake of the server's but for these.
STATUS = {200, 400, 404, 405, 408, 413, 415, 429, 431, 501, 503, 505}
CODES = {Code.OK, Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.CANCELLED}
READ_S = 1.0


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
        answer = ask(self._server.http, GENERATE, token_ids=ids, sampling_params=sampling)
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
    assert beside.wrong == [] and beside.count >= 3
    assert until(lambda: server.counts() == before), (before, server.counts())
    assert server.rss_bytes() - memory < most_grown_bytes


def test_malformed_requests_disturb_nobody(server, capfd):
    play(server, send_malformed, 400, 4, 2**27)
    assert capfd.readouterr().err == ""


def test_slow_and_vanishing_clients_disturb_nobody(server, capfd):
    play(server, vanish, 60, 12, 2**27)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_ten_thousand_malformed_requests_disturb_nobody(server, capfd):
    play(server, send_malformed, 10_000, 4, 2**28)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_thousand_slow_and_vanishing_clients_disturb_nobody(server, capfd):
    play(server, vanish, 1_000, 24, 2**28)
    assert capfd.readouterr().err == ""
