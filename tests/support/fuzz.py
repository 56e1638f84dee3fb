# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Requests that a server should never be sent, made from a seeded generator."""

import json
import random
import struct

from jetstream.core.proto import jetstream_pb2

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
_USER = [{"role": "user", "content": "ab"}]
_BODIES = (
    (COMPLETIONS, {"prompt": "ab", "max_tokens": 2, "seed": 1, "temperature": 1.0, "n": 1}),
    (COMPLETIONS, {"prompt": [[5, 6], [7]], "max_tokens": 2, "stop": ["q"], "stream": True}),
    (CHAT, {"messages": _USER, "max_tokens": 2, "top_p": 0.5, "logprobs": True, "user": "me"}),
    (
        CHAT,
        {
            "messages": [*_USER, {"role": "assistant", "content": "a"}, *_USER],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "chat_template_kwargs": {},
            "stream_options": {"include_usage": True},
            "stream": True,
            "max_tokens": 2,
        },
    ),
    (GENERATE, {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "logprobs": 1}}),
)
_VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 10**4000, 0.5, -0.0, 1e308),
    *(float("inf"), float("-inf"), float("nan"), "", "x", "\ud800", "\0", "\U0001f642" * 50),
    *("x" * 5000, [], [[]], [None], [-1], [10**30], ["x"] * 300, {}, {"": {}}, {"a": [{}]}),
    *([{"role": "tool"}], [{"role": "user", "content": {"type": "text"}}], [[5], ["a"]]),
)


def http_request(rng: random.Random) -> bytes:
    """The bytes of one request over HTTP, of a random kind."""
    return rng.choice(_HTTP)(rng)


def grpc_message(rng: random.Random) -> bytes:
    """The bytes of one message for Decode; some of them may be a good one by chance."""
    fields = rng.choice(
        (
            {"text_content": {"text": rng.choice(("", "\0", "ab" * rng.randrange(500)))}},
            {"token_content": {"token_ids": [rng.choice((-1, 0, 5, 319, 320, 2**31 - 1))] * 3}},
            {"session_cache": "x" * rng.randrange(100)},
            {"priority": rng.randrange(-5, 5), "text_content": {"text": "ab"}},
        )
    )
    count = rng.choice((-(2**31), -1, 0, 1, 2, 127, 128, 2**31 - 1))
    data = bytearray(jetstream_pb2.DecodeRequest(max_tokens=count, **fields).SerializeToString())
    return bytes(rng.choice((_as_is, _flipped, _cut, _noise))(rng, data))


def http2_bytes(rng: random.Random) -> bytes:
    """Frames of HTTP/2 behind its preface, with random types, flags, streams and payloads."""
    data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if rng.random() < 0.9 else b""
    for _ in range(rng.randrange(1, 6)):
        payload = rng.randbytes(rng.randrange(40))
        length = len(payload) if rng.random() < 0.8 else rng.randrange(2**24)
        kind, flags, stream = rng.randrange(12), rng.randrange(256), rng.choice((0, 1, 3, 2**31))
        data += struct.pack(">I", length)[1:] + bytes((kind, flags))
        data += struct.pack(">I", stream % 2**31) + payload
    return data


def http_bytes(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    """A request with these headers behind those that it needs."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", *headers])
    return head.encode("latin-1", "replace") + b"\r\n\r\n" + body


def _body(rng: random.Random) -> tuple[str, bytes]:
    path, given = rng.choice(_BODIES)
    return path, json.dumps(given).encode()


def _strange_fields(rng: random.Random) -> bytes:
    """A good request, of which some fields, at any depth, have other values."""
    path, given = rng.choice(_BODIES)
    given = json.loads(json.dumps(given))
    for _ in range(rng.randrange(1, 3)):
        place = given
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = rng.choice([*keys, "temprature"] if isinstance(place, dict) else keys)
            inner = place.get(key) if isinstance(place, dict) else place[key]
            if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.4:
                break
            place = inner
        place[key] = rng.choice(_VALUES)
    try:
        return http_bytes(path, json.dumps(given).encode())
    except ValueError:  # Python writes no number of more than 4300 digits, and few others do
        return http_bytes(path, b'{"max_tokens": ' + b"9" * 5000 + b"}")


def _bad_json(rng: random.Random) -> bytes:
    path, body = _body(rng)
    return http_bytes(path, bytes(rng.choice((_flipped, _cut, _noise))(rng, bytearray(body))))


def _deep(rng: random.Random) -> bytes:
    depth = rng.choice((10, 500, 990, 1100, 20_000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    deep = f"{opening * depth}0{closing * depth}" if rng.random() < 0.7 else opening * depth
    field = rng.choice(("prompt", "messages", "tools", "chat_template_kwargs", "stop", "user"))
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "{field}": {deep}}}'
    path = rng.choice((COMPLETIONS, CHAT, GENERATE))
    return http_bytes(path, (body if rng.random() < 0.8 else deep).encode())


def _bad_headers(rng: random.Random) -> bytes:
    path, body = _body(rng)
    length = rng.choice(
        ("-1", "nine", "", "1e3", "99999999999999999999", str(len(body) + 5), "0x5")
    )
    lines = {
        "Host": "x",
        "Content-Type": rng.choice(("application/json", "", "text/html", "\xff" * 9, "a" * 9000)),
        "Content-Length": rng.choice((length, str(len(body)))),
        rng.choice(("Transfer-Encoding", "Expect", "Connection", "Upgrade")): rng.choice(
            ("chunked", "gzip", "100-continue", "close", "h2c", "\x01", "upgrade")
        ),
    }
    lines.pop(rng.choice((*lines, "")), None)
    head = [f"{name}: {value}" for name, value in lines.items()]
    head += [f"X-{i}: {rng.random()}" for i in range(rng.choice((0, 0, 3, 600)))]
    version = rng.choice(("HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTP/1.1", ""))
    method = rng.choice(("POST", "GET", "HEAD", "OPTIONS", "CONNECT", "TRACE", "post", "P\0ST", ""))
    target = rng.choice(
        (path, "/health", "/v1/models", "*", "//", "/" + "a" * 20_000, "\xff", "x:1")
    )
    text = "\r\n".join([f"{method} {target} {version}", *head, "", ""])
    return text.encode("latin-1") + body


def _bad_chunks(rng: random.Random) -> bytes:
    path, body = _body(rng)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    size = rng.choice((f"{len(body):x}", "zz", "-5", "f" * 30, ""))
    chunk = f"{size}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk


def _damaged(rng: random.Random) -> bytes:
    """A good request, of which any byte, also of its head, is another one."""
    return bytes(_flipped(rng, bytearray(http_bytes(*_body(rng)))))


def _cut_request(rng: random.Random) -> bytes:
    return bytes(_cut(rng, bytearray(http_bytes(*_body(rng)))))


def _large(rng: random.Random) -> bytes:
    size = rng.choice((2**16, 2**18))
    return http_bytes(COMPLETIONS, json.dumps({"prompt": "ab" * size}).encode())


def _binary(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 30, 3000)))


def _several(rng: random.Random) -> bytes:
    """Requests one behind the other, none of whose answers is waited for."""
    return b"".join(http_bytes(*_body(rng)) for _ in range(3)) + _binary(rng)


_HTTP = (
    *(_strange_fields,) * 4,
    *(_bad_json, _deep, _bad_headers, _bad_headers, _bad_chunks, _damaged, _cut_request),
    *(_large, _binary, _several),
)


def _as_is(rng: random.Random, data: bytearray) -> bytearray:
    return data


def _flipped(rng: random.Random, data: bytearray) -> bytearray:
    for _ in range(rng.randrange(1, 6)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return data


def _cut(rng: random.Random, data: bytearray) -> bytearray:
    return data[: rng.randrange(len(data))]


def _noise(rng: random.Random, data: bytearray) -> bytearray:
    place = rng.randrange(len(data))
    return data[:place] + rng.randbytes(rng.randrange(1, 30)) + data[place:]
