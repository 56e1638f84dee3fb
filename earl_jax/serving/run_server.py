# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs both servers of a command on an engine, and prints the line that says where they are."""

import argparse
import asyncio
import contextlib
from typing import Any

import jax

from earl_jax.engine.session import Policy
from earl_jax.selector.memory import is_out_of_memory
from earl_jax.serving.driver import Driver
from earl_jax.serving.served_engine import ServedEngine
from earl_jax.serving.served_policy import ServedPolicy
from earl_jax.serving.server import (
    Endpoints,
    most_request_bytes,
    serve,
    stop_at_signals,
)
from earl_jax.serving.texts import Texts
from earl_jax.settings.errors import InputError


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
