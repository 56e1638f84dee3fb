# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes of a server: its engine, and the KV cache that memory holds beside the weights."""

import argparse
import os
from pathlib import Path
from typing import Any

import jax

from earl_jax.engine.config import EngineConfig
from earl_jax.engine.engine import Engine
from earl_jax.engine.pages import Pool
from earl_jax.rollout.config import RolloutConfig
from earl_jax.serving.config import ServingConfig
from earl_jax.serving.serve_flags import DEFAULT_SLOT_TOKENS, check_against_model, check_prompt
from earl_jax.serving.served_engine import ServedEngine, build_engine, rollout_config
from earl_jax.serving.served_policy import ServedPolicy
from earl_jax.serving.tokenizer import ServedTokenizer
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape, make_layout

# The share of a device's memory for weights and KV cache; the remainder is for the temporaries of
# programs.
CACHE_SHARE = 0.8
# Tokens of a slot's table at first. Beyond them programs are compiled anew as requests grow; below,
# a longer table costs nothing. But drafts are looked up in all of it, at each step.
FIRST_TOKENS, DRAFTING_FIRST_TOKENS = 2**15, 2**12
# The longest context, where neither the model nor memory allows less.
MOST_TOKENS = 2**30


def make_engine(
    flags: argparse.Namespace, policy: ServedPolicy, mesh: MeshShape
) -> tuple[Engine, RolloutConfig]:
    """Returns the engine on this mesh, and the settings under which requests are played.

    Raises ValueError where the model does not fit the flags.
    """
    check_against_model(
        flags, mesh, policy.name, policy.model, policy.vocab_size, policy.max_context
    )
    drafts = flags.num_draft_tokens
    rollout = rollout_config(
        flags.num_slots,
        EngineConfig.page_size,
        weight_dtype=policy.weight_dtype,
        kv_dtype=policy.kv_dtype,
        num_draft_tokens=policy.num_draft_tokens if drafts is None else drafts,
    )
    engine = build_engine(
        rollout,
        policy.model,
        policy.vocab_size,
        make_layout(mesh),
        ends=ServedTokenizer(policy.tokenizer, policy.end_ids).ends,
        choice_branches=flags.max_choice_tokens,
        seed=flags.seed,
    )
    return engine, rollout


def served_engine(
    flags: argparse.Namespace,
    policy: ServedPolicy,
    engine: Engine,
    rollout: RolloutConfig,
    drawn: Any,
) -> ServedEngine:
    """Returns the engine with its sizes, once the weights are on the devices. Raises ValueError."""
    cache_tokens, holds = cache_tokens_of(flags, engine)
    context_tokens = context_tokens_of(flags, policy.max_context, holds)
    drafts = engine.config.rules.draft
    serving = ServingConfig(
        max_prompt_tokens=min(flags.max_prompt_tokens or context_tokens, context_tokens),
        context_tokens=context_tokens,
        prompt_limit=prompt_limit_of(flags, policy.max_context, context_tokens),
        first_context_tokens=DRAFTING_FIRST_TOKENS if drafts else FIRST_TOKENS,
        cache_tokens=cache_tokens,
        sampling=drawn,
        keep_replies=flags.keep_replies,
    )
    tokenizer = ServedTokenizer(policy.tokenizer, policy.end_ids)
    return ServedEngine(engine=engine, rollout=rollout, serving=serving, tokenizer=tokenizer)


def context_tokens_of(flags: argparse.Namespace, max_context: int | None, holds: int) -> int:
    """Returns the tokens of a prompt with its reply: the model's context, or what memory `holds`.

    Raises ValueError.
    """
    if holds < (flags.max_context or 2):
        raise InputError(
            f"--max_context={flags.max_context or 2}; beside the weights the devices' memory holds "
            f"a context of {holds} tokens: lower it, let the KV cache be int8 "
            "(--kv_dtype=int8), or cut it over more devices (--mesh=tensor=...)"
        )
    context_tokens = flags.max_context or min(max_context or holds, holds)
    check_prompt(flags, context_tokens)
    return context_tokens


def prompt_limit_of(flags: argparse.Namespace, max_context: int | None, context_tokens: int) -> str:
    """Returns what limits prompts: a flag, the model's `max_context`, or memory."""
    if flags.max_prompt_tokens:
        return f"--max_prompt_tokens={flags.max_prompt_tokens}"
    if flags.max_context:
        return f"--max_context={flags.max_context}"
    return "the model's context" if context_tokens == max_context else "the memory of its devices"


def cache_tokens_of(flags: argparse.Namespace, engine: Any) -> tuple[int, int]:
    """Returns the tokens of the KV cache, and those of the longest context that can be served.

    They are what the devices have memory left for, if they report it. On CPUs both are modest
    unless flags ask for more: a cache is allocated whole.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    is_known = "bytes_limit" in stats
    if is_known:
        free = CACHE_SHARE * stats["bytes_limit"] - stats["bytes_in_use"]
    else:
        free = CACHE_SHARE * _host_bytes() / jax.local_device_count()
    rule, shards = engine.config.page_rule, engine.layout.num_row_shards
    pools = engine.state_shapes(rule.page_size, Pool(shards, 1)).cache.pools
    # Of a token in all layers: a page has those of one group.
    token_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools))
    shape = engine.layout.shape
    token_bytes *= rule.num_groups / (shards * rule.page_size * shape.tensor * shape.context)
    holds = max(1, int(free / token_bytes))
    tokens = shards * holds
    if not is_known:
        tokens = min(tokens, DEFAULT_SLOT_TOKENS * engine.config.num_slots)
        wanted = max(tokens, flags.cache_tokens or 0) // shards
        holds = min(holds, max(wanted, flags.max_context or 0, flags.max_prompt_tokens or 0))
    if any(rule.windows):
        # Layers with a window leave their pages to the others.
        holds = rule.most_tokens(rule.num_groups * holds // rule.page_size)
    return flags.cache_tokens or tokens, min(MOST_TOKENS, holds)


def _host_bytes() -> int:
    """Returns the free memory of this machine, in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        [line] = [line for line in lines if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
