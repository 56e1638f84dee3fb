# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs both servers of a command on an engine, and prints the line that says where they are."""

import argparse
import asyncio
import contextlib
from typing import Any

from earl_jax.engine.session import Policy
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


def run_server(
    flags: argparse.Namespace, policy: ServedPolicy, engine: ServedEngine, params: Any
) -> None:
    """Serves `params`, the weights of this policy, until a signal ends it."""
    driver = Driver(engine, Policy(params=params, version=policy.version))
    texts = Texts(
        policy.tokenizer,
        policy.template_arguments,
        timeout_s=flags.text_timeout_s,
        most_bytes=most_request_bytes(engine),
    )

    def announce(http: str, grpc: str) -> None:
        print(ready_line(flags, policy, engine, http, grpc), flush=True)

    async def run() -> None:
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
        driver.warm_up()
        asyncio.run(run())


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
    cache_tokens = engine.pool.total * rule.page_size // rule.num_groups
    behind = " in all layers (those behind windows are given up)" if rule.has_windows else ""
    return (
        f"serving {policy.name}{step} at {http} (gRPC: {grpc}): prompts of up to {prompt_tokens} "
        f"tokens, {serving.context_tokens} with their replies{cut}, {flags.num_slots} at once on "
        f"{engine.engine.layout.shape}, {cache_tokens} tokens of KV cache{behind}"
    )
