# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A plain HTTP client of python -m earl_jax.serve."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

JSON = {"Content-Type": "application/json"}


def connect(address: str) -> http.client.HTTPConnection:
    """A connection to http://HOST:PORT."""
    host, port = address.removeprefix("http://").rsplit(":", 1)
    return http.client.HTTPConnection(host, int(port), timeout=60)


def send(address: str, path: str, body: Any = None, method: str = "") -> tuple[int, Any]:
    """Status and JSON of the answer to a value, or to bytes as they are; GET without a body."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body)
    with contextlib.closing(connect(address)) as client:
        client.request(method or ("GET" if body is None else "POST"), path, data, JSON)
        answer = client.getresponse()
        return answer.status, json.loads(answer.read())


def ask(address: str, path: str, **body: Any) -> dict[str, Any]:
    """The answer to a request that is served."""
    status, answer = send(address, path, body)
    assert status == 200, answer
    return answer


def events(address: str, path: str, **body: Any) -> Iterator[Any]:
    """The events of a streamed answer, which must end with [DONE]."""
    with contextlib.closing(connect(address)) as client:
        client.request("POST", path, json.dumps({"stream": True, **body}), JSON)
        answer = client.getresponse()
        assert answer.status == 200 and answer.getheader("Content-Type") == "text/event-stream"
        for line in answer:
            if line == b"data: [DONE]\n":
                assert answer.read() == b"\n"
                return
            if line != b"\n":
                yield json.loads(line.removeprefix(b"data: "))
        raise AssertionError("the answer ended without [DONE]")
