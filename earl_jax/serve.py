# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Serves a policy: python -m earl_jax.serve --workdir=DIR | --model=HF_DIR [--port=9000]."""

import argparse
import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earl_jax.launch.start import exit_status, start_jax
from earl_jax.serving.serve_flags import (
    DEFAULT_SLOT_TOKENS,
    check_against_model,
    check_flags,
    check_prompt,
    parse_flags,
    sampling,
)
from earl_jax.serving.served_policy import ServedPolicy, model_policy

if TYPE_CHECKING:
    from earl_jax.sharding.layout import MeshShape

# The share of a device's memory for weights and KV cache; the rest is for prompts that are read and
# for the temporaries of programs.
CACHE_SHARE = 0.8
# Tokens of a slot's table at first. Beyond them programs are compiled anew as requests grow; below,
# a longer table costs nothing. But drafts are looked up in all of it, at each step.
FIRST_TOKENS, DRAFTING_FIRST_TOKENS = 2**15, 2**12
# A cache that grows stands beside the one before it, and beside the prompt that it grows for.
WHILE_GROWING = 3
# The longest context, where neither the model nor memory allows less.
MOST_TOKENS = 2**30


def run_policy(flags: argparse.Namespace) -> ServedPolicy:
    """Returns the newest checkpoint of a run."""
    from earl_jax.config.file import read_workdir_config

    config = read_workdir_config(flags.workdir)
    start_jax(config.devices.platform, config.devices.num_cpu_devices)
    from earl_jax.workdir import read_newest

    run, position, _ = read_newest(config, flags.workdir)
    params = run.learner.policy(position.state)
    dtype = flags.compute_dtype or config.rollout.computes_as(config.model.compute_dtype)
    return ServedPolicy(
        name=f"{flags.workdir} after step {position.step}",
        model=dataclasses.replace(run.origin.model, compute_dtype=dtype),
        vocab_size=run.origin.vocab_size,
        tokenizer=run.origin.tokenizer,
        end_ids=run.actor.renderer.end_of_turn_ids,
        max_context=run.origin.checkpoint and run.origin.checkpoint.max_context,
        weight_dtype=flags.weight_dtype or config.rollout.weight_dtype,
        kv_dtype=flags.kv_dtype or config.rollout.kv_dtype,
        load=lambda layout: params,
        num_draft_tokens=config.rollout.num_draft_tokens,
    )


def serve_command(arguments: Sequence[str]) -> None:
    """Runs the command until it is ended. Raises ValueError for bad input."""
    flags = parse_flags(arguments)
    from earl_jax.sharding.layout import MeshShape

    check_flags(flags)
    mesh = MeshShape.parse(flags.mesh) if flags.mesh else None
    policy = run_policy(flags) if flags.workdir else model_policy(flags, mesh or MeshShape())
    drawn = sampling(flags, policy.sampling)

    import jax

    from earl_jax.serving.server import serve, warm_up

    mesh = mesh or MeshShape(data=len(jax.devices()))
    engine, params = _open_engine(flags, policy, mesh, drawn)
    name, limit = policy.name, policy.max_context
    del policy  # its fp32 weights
    warm_up(engine, params)
    serving, config = engine.serving, engine.engine.config
    short = limit and not flags.max_context and serving.context_tokens < limit

    def announce(address: str) -> None:
        print(
            f"serving {name} at {address}: prompts of up to "
            f"{min(serving.max_prefill_length, serving.context_tokens)} tokens, "
            f"{serving.context_tokens} with their replies"
            + (f" (the model takes {limit}; memory holds no more)" if short else "")
            + f", {flags.num_slots} at once on {mesh}, "
            f"{engine.first_pool.total * config.page_size} tokens of KV cache",
            flush=True,
        )

    asyncio.run(
        serve(
            engine,
            params,
            host=flags.host,
            port=flags.port,
            max_waiting=flags.max_waiting,
            on_ready=announce,
        )
    )


def _open_engine(
    flags: argparse.Namespace, policy: ServedPolicy, mesh: "MeshShape", drawn: Any
) -> tuple[Any, Any]:
    """Returns the engine on this mesh, and the policy's weights in it. Raises ValueError."""
    from earl_jax.dispatch.weights import publish
    from earl_jax.engine.config import EngineConfig, SlotRules
    from earl_jax.engine.engine import Engine
    from earl_jax.serving._jetstream import padded_length
    from earl_jax.serving.config import ServingConfig
    from earl_jax.serving.jetstream_engine import JetStreamEngine
    from earl_jax.sharding.layout import make_layout

    check_against_model(
        flags, mesh, policy.name, policy.model, policy.vocab_size, policy.max_context
    )
    drafts = flags.num_draft_tokens
    layout = make_layout(mesh)
    config = EngineConfig(
        model=policy.model,
        vocab_size=policy.vocab_size,
        weight_dtype=policy.weight_dtype,
        kv_dtype=policy.kv_dtype,
        num_slots=flags.num_slots,
        # Rows of experience, of which serving needs none.
        num_rows=layout.num_row_shards,
        chunk_size=1,
        rules=SlotRules(
            burst=1,
            end_of_turn_ids=policy.end_ids,
            choice_branches=flags.max_choice_tokens,
            draft=policy.num_draft_tokens if drafts is None else drafts,
        ),
        seed=flags.seed,
    )
    engine = Engine(config, layout)
    params = publish(
        policy.load(layout), engine.parameter_shapes, engine.parameter_shardings
    ).params
    # Only now is it known how much memory the weights leave.
    cache_tokens, holds = _cache_tokens(flags, engine)
    context_tokens = _context_tokens(flags, policy.max_context, holds)
    serving = ServingConfig(
        max_prefill_length=flags.max_prompt_tokens or padded_length(context_tokens),
        context_tokens=context_tokens,
        first_context_tokens=DRAFTING_FIRST_TOKENS if config.rules.draft else FIRST_TOKENS,
        cache_tokens=cache_tokens,
        sampling=drawn,
    )
    return JetStreamEngine(engine, serving, policy.tokenizer), params


def _context_tokens(flags: argparse.Namespace, max_context: int | None, holds: int) -> int:
    """Returns the tokens of a prompt with its reply: the model's context, or what memory `holds`.

    Raises ValueError.
    """
    if holds < (flags.max_context or 2):
        raise ValueError(
            f"--max_context={flags.max_context or 2}; beside the weights the devices' memory holds "
            f"a context of {holds} tokens: lower it, let the KV cache be int8 "
            "(--kv_dtype=int8), or cut it over more devices (--mesh=tensor=...)"
        )
    context_tokens = flags.max_context or min(max_context or holds, holds)
    check_prompt(flags, context_tokens)
    return context_tokens


def _cache_tokens(flags: argparse.Namespace, engine: Any) -> tuple[int, int]:
    """Returns the tokens of the KV cache at first, and of the longest context in the end.

    The cache begins with the memory that the devices have left, if they report it.
    """
    import jax

    from earl_jax.engine.pages import Pool

    stats = jax.local_devices()[0].memory_stats() or {}
    is_known = "bytes_limit" in stats
    if is_known:
        free = CACHE_SHARE * stats["bytes_limit"] - stats["bytes_in_use"]
    else:
        free = CACHE_SHARE * _host_bytes() / jax.local_device_count()
    size, shards = engine.config.page_size, engine.layout.num_row_shards
    pages = engine.state_shapes(size, Pool(shards, 1)).cache.layers
    token_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))
    shape = engine.layout.shape
    token_bytes /= shards * size * shape.tensor * shape.context
    shard_tokens = max(1, int(free / token_bytes))
    first = shards * shard_tokens if is_known else DEFAULT_SLOT_TOKENS * engine.config.num_slots
    first = flags.cache_tokens or first
    return first, min(MOST_TOKENS, max(first // shards, shard_tokens // WHILE_GROWING))


def _host_bytes() -> int:
    """Returns the free memory of this machine, in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        [line] = [line for line in lines if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Runs the command of the console."""
    # Until the server is up; then it ends open requests first.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    sys.exit(exit_status(lambda: serve_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
