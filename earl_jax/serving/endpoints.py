# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The addresses of a server: where it takes requests, their limits, and the sockets of both."""

import contextlib
import dataclasses
import socket

import grpc

from earl_jax.http.server import HttpLimits, HttpServer
from earl_jax.serving.served_engine import ServedEngine
from earl_jax.settings.errors import InputError

# The size of a request beside its prompt, and at least for each token of the longest prompt: an id
# in JSON, or a short token whose text is escaped.
LEAST_BYTES, LEAST_TOKEN_BYTES = 2**16, 16
# The size of all requests that are open, at least; connections beside those of requests.
MOST_HELD_BYTES, SPARE_CONNECTIONS = 2**27, 32
# A client whose machine vanished is noticed after the sum of these.
KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 30, 10
GRACE_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoints:
    """The addresses of a server, 0 for any port that is free, and how many requests may wait.

    At most `max_waiting` in all, and `max_waiting_per_client` of one address. A client has `read_s`
    to send an HTTP request, and `write_s` to read each part of an answer.
    """

    host: str
    port: int
    grpc_port: int
    max_waiting: int
    max_waiting_per_client: int
    read_s: float = 75.0
    write_s: float = 60.0


def most_request_bytes(engine: ServedEngine) -> int:
    """Returns the size limit of a request, in bytes: what the longest prompt can have."""
    longest = engine.tokenizer.longest_token_bytes
    tokens = min(engine.serving.max_prompt_tokens, engine.serving.context_tokens)
    return LEAST_BYTES + tokens * max(LEAST_TOKEN_BYTES, longest)


def http_limits(engine: ServedEngine, endpoints: Endpoints, max_open: int) -> HttpLimits:
    """Returns the limits of a server of this engine with at most so many open requests."""
    most_bytes = most_request_bytes(engine)
    return HttpLimits(
        most_bytes=most_bytes,
        most_held_bytes=max(MOST_HELD_BYTES, 4 * most_bytes),
        max_connections=2 * (max_open + SPARE_CONNECTIONS),
        read_s=endpoints.read_s,
        write_s=endpoints.write_s,
    )


async def start_http(
    servers: contextlib.AsyncExitStack, endpoints: Endpoints, server: HttpServer
) -> str:
    """Starts the HTTP server, which ends with `servers`. Returns its address."""
    try:
        bound = await server.start(endpoints.host, endpoints.port)
    except OSError as error:
        raise InputError(_unusable(endpoints.host, "port", endpoints.port, error)) from error
    servers.push_async_callback(server.stop, GRACE_S)
    return f"http://{address(endpoints.host, bound)}"


async def start_grpc(
    servers: contextlib.AsyncExitStack,
    endpoints: Endpoints,
    handlers: grpc.GenericRpcHandler,
    limits: HttpLimits,
) -> str:
    """Starts the gRPC server, which ends with `servers`. Returns its address."""
    host, port = endpoints.host, endpoints.grpc_port
    server = grpc.aio.server(
        options=[
            # Else a second server on the same port would be given half of the requests.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", limits.most_bytes),
            ("grpc.max_allowed_incoming_connections", limits.max_connections),
            ("grpc.max_concurrent_streams", limits.max_connections),
            # A connection whose client says nothing at all.
            ("grpc.server_handshake_timeout_ms", int(1000 * limits.read_s)),
            ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ]
    )
    try:
        bound = server.add_insecure_port(address(host, port))
    except RuntimeError as error:
        raise InputError(_unusable(host, "grpc_port", port, error)) from error
    server.add_generic_rpc_handlers((handlers,))
    await server.start()
    servers.push_async_callback(server.stop, GRACE_S)
    return address(host, bound)


def check_address(host: str, flag: str, port: int) -> None:
    """Raises ValueError for an address, with the port of this flag, that is not to be had now."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as tried:
            # As gRPC does: a port whose last server has just ended is free.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(where)
    except OSError as error:
        raise InputError(_unusable(host, flag, port, error)) from error


def _unusable(host: str, flag: str, port: int, error: Exception) -> str:
    return (
        f"--host={host} --{flag}={port} cannot be used ({error}); --host must be an address of "
        "this machine, and no other program may have the port: choose another one, or 0 for any "
        "that is free"
    )


def address(host: str, port: int) -> str:
    """Returns the address in gRPC's form: 127.0.0.1:9000, [::1]:9000."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
