# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The server of a policy: JetStream's gRPC service and OpenAI's HTTP over one driver."""

import argparse
import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import Any

import grpc
import jax

from earl_jax.engine.engine import Policy
from earl_jax.http.apis import error_body
from earl_jax.http.server import HttpServer
from earl_jax.selector.memory import is_out_of_memory
from earl_jax.serving.driver import Driver
from earl_jax.serving.endpoints import (
    Endpoints,
    http_limits,
    most_request_bytes,
    start_grpc,
    start_http,
)
from earl_jax.serving.grpc_service import PolicyServicer
from earl_jax.serving.http_api import HttpApi, ServedModel
from earl_jax.serving.requests import RequestError
from earl_jax.serving.served_engine import ServedEngine
from earl_jax.serving.served_policy import ServedPolicy
from earl_jax.serving.service import Service, deliver_in
from earl_jax.serving.texts import Texts
from earl_jax.settings.errors import InputError

# Between the end of open requests and that of the servers.
LAST_CALL_S = 0.2


def run_server(
    flags: argparse.Namespace, policy: ServedPolicy, engine: ServedEngine, params: Any
) -> None:
    """Serves `params`, the weights of this policy, until a signal ends it.

    Raises ValueError where the devices have too little memory.
    """
    texts = Texts(
        policy.tokenizer,
        policy.template_arguments,
        timeout_s=flags.text_timeout_s,
        most_bytes=most_request_bytes(engine),
    )

    def announce(http: str, grpc: str) -> None:
        print(ready_line(flags, policy, engine, http, grpc), flush=True)

    async def run(driver: Driver) -> None:
        await serve(
            driver,
            name=flags.name or policy.name,
            version=policy.version,
            texts=texts,
            endpoints=Endpoints(
                host=flags.host,
                port=flags.port,
                grpc_port=flags.grpc_port,
                max_waiting=flags.max_waiting,
                max_waiting_per_client=flags.max_waiting_per_client,
            ),
            on_ready=announce,
            stop=stop_at_signals(),
        )

    with contextlib.closing(texts):
        asyncio.run(run(open_driver(engine, Policy(params=params, version=policy.version))))


def open_driver(engine: ServedEngine, policy: Policy) -> Driver:
    """Returns a driver that has played a round, with the longest context too.

    Raises ValueError where the devices have too little memory for that.
    """
    try:
        driver = Driver(engine, policy)
        driver.warm_up()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            "beside the weights the devices have no memory for a KV cache of "
            f"{engine.cache_tokens} tokens and a context of {engine.serving.context_tokens} "
            f"({str(error).splitlines()[0]:.200}): lower --cache_tokens, --max_context or "
            "--num_slots, or let the KV cache be int8 (--kv_dtype=int8)"
        ) from error
    return driver


def ready_line(
    flags: argparse.Namespace, policy: ServedPolicy, engine: ServedEngine, http: str, grpc: str
) -> str:
    """Returns the line for a server that is ready: its addresses, limits, mesh and KV cache."""
    serving, limit = engine.serving, policy.max_context
    step = f" after step {policy.version}" if flags.workdir else ""
    step += f" as {flags.name}" if flags.name else ""
    prompt_tokens = min(serving.max_prompt_tokens, serving.context_tokens)
    short = limit and not flags.max_context and serving.context_tokens < limit
    cut = f" (the model takes {limit}; the KV cache holds no more)" if short else ""
    rule = engine.engine.config.page_rule
    behind = " in all layers (those behind windows are given up)" if rule.has_windows else ""
    return (
        f"serving {policy.name}{step} at {http} (gRPC: {grpc}): prompts of up to {prompt_tokens} "
        f"tokens, {serving.context_tokens} with their replies{cut}, {flags.num_slots} at once on "
        f"{engine.engine.layout.shape}, {engine.cache_tokens} tokens of KV cache{behind}"
    )


async def serve(
    driver: Driver,
    *,
    name: str,
    version: int,
    texts: Texts,
    endpoints: Endpoints,
    on_ready: Callable[[str, str], None],
    stop: asyncio.Event,
) -> None:
    """Serves until `stop`, then ends open requests with UNAVAILABLE, or 503.

    Args:
        driver: plays the requests; it is started here, and stopped.
        name: of the policy, for clients.
        version: of the policy.
        texts: makes the ids of prompts.
        endpoints: where requests are taken.
        on_ready: called with the addresses, of HTTP and of gRPC, once requests are taken.
        stop: ends the server; set here too where it fails.

    Raises:
        ValueError: an address cannot be used.
        RuntimeError: the devices failed; open requests have ended with INTERNAL.
    """
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.call_soon_threadsafe(stop.set)

    driver.start(deliver_in(loop), end)
    try:
        await texts.ready()
        service = Service(
            driver,
            texts,
            max_waiting=endpoints.max_waiting,
            max_waiting_per_client=endpoints.max_waiting_per_client,
        )
        model = ServedModel(name, version, int(time.time()))
        async with contextlib.AsyncExitStack() as servers:
            api = HttpApi(service, model)
            limits = http_limits(driver.served, endpoints, service.max_open)
            http = await start_http(servers, endpoints, HttpServer(api.handle, limits, error_body))
            handlers = PolicyServicer(service, limits.write_s).handlers()
            grpc_address = await start_grpc(servers, endpoints, handlers, limits)
            on_ready(http, grpc_address)
            await stop.wait()
            service.close(
                RequestError(
                    grpc.StatusCode.UNAVAILABLE,
                    "the server is being stopped; send the request again later",
                )
            )
            # For requests that are on their way: gRPC would end them with CANCELLED and no reason.
            await asyncio.sleep(LAST_CALL_S)
    finally:
        # Last, because its threads call the loop.
        await loop.run_in_executor(None, driver.stop)
    if driver.failure is not None:
        raise RuntimeError("the server failed; see above") from driver.failure


def stop_at_signals() -> asyncio.Event:
    """Returns an event of the running loop that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
