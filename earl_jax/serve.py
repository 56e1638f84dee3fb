# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Serves a policy: python -m earl_jax.serve --workdir=DIR | --model=HF_DIR [--port=9000]."""

import argparse
import asyncio
import dataclasses
import signal
import sys
from collections.abc import Sequence
from typing import Any

from earl_jax.main import exit_status
from earl_jax.serve_flags import DEFAULT_SLOT_TOKENS, check_flags, parse_flags, sampling
from earl_jax.served_policy import ServedPolicy, model_policy, run_policy

# Of a device's memory for weights and KV cache; the rest is for prompts that are read, and for what
# programs need beside their arguments.
CACHE_SHARE = 0.8


def serve_command(arguments: Sequence[str]) -> None:
    """The whole command, until it is ended. Raises ValueError for bad input."""
    flags = parse_flags(arguments)
    from earl_jax.sharding.layout import MeshShape

    check_flags(flags)
    mesh = MeshShape.parse(flags.mesh) if flags.mesh else None
    if flags.workdir:
        policy = run_policy(flags)
    else:
        policy = model_policy(flags, mesh.num_devices if mesh else 1)
    drawn = sampling(flags, policy.told)

    import jax

    from earl_jax.rollout.server import serve, warm_up

    mesh = mesh or MeshShape(data=len(jax.devices()))
    engine, params = _open_engine(flags, policy, mesh, drawn)
    name = policy.name
    del policy  # its fp32 weights
    warm_up(engine, params)
    room, pages = engine.config.serving, engine.serving_pool.total

    def say(address: str) -> None:
        print(
            f"serving {name} at {address}: prompts of up to {room.max_prefill_length} tokens, "
            f"{room.places} with their replies, {flags.num_slots} at once on {mesh}, "
            f"{pages * engine.config.page_size} tokens of KV cache",
            flush=True,
        )

    asyncio.run(
        serve(
            engine,
            params,
            host=flags.host,
            port=flags.port,
            max_waiting=flags.max_waiting,
            on_ready=say,
        )
    )


def _open_engine(
    flags: argparse.Namespace, policy: ServedPolicy, mesh: Any, drawn: Any
) -> tuple[Any, Any]:
    """The engine on this mesh, and the policy's weights in it. Raises ValueError."""
    from earl_jax.models.parameters import check_tensor_axis
    from earl_jax.rollout.engine import PolicyEngine
    from earl_jax.rollout.engine_config import EngineConfig, Serving
    from earl_jax.rollout.slots import SlotRules
    from earl_jax.sharding.layout import make_layout
    from earl_jax.weights import publish

    obstacle = check_tensor_axis(
        policy.model, policy.vocab_size, mesh.tensor, mesh.fsdp, mesh.expert
    )
    if mesh.context > 1:
        obstacle = "context is an axis of training; use data, expert and tensor"
    if obstacle:
        raise ValueError(f"--mesh={mesh} cannot hold this model: {obstacle}")
    layout = make_layout(mesh)
    if flags.num_slots % layout.num_row_shards:
        raise ValueError(
            f"--num_slots={flags.num_slots} does not divide over the mesh {mesh}; choose a "
            f"multiple of {layout.num_row_shards}"
        )
    prompt_tokens, places = _room(flags, policy)
    config = EngineConfig(
        model=policy.model,
        vocab_size=policy.vocab_size,
        weight_dtype=policy.weight_dtype,
        kv_dtype=policy.kv_dtype,
        num_slots=flags.num_slots,
        # Rollouts' own: nothing is written down here.
        num_rows=layout.num_row_shards,
        chunk_size=1,
        rules=SlotRules(
            burst=1, end_of_turn_ids=policy.end_ids, choice_branches=flags.max_choice_tokens
        ),
        seed=flags.seed,
        serving=Serving(max_prefill_length=prompt_tokens, places=places, sampling=drawn),
    )
    engine = PolicyEngine(config, layout, policy.tokenizer)
    params = publish(
        policy.load(layout), engine.parameter_shapes, engine.parameter_shardings
    ).params
    # Only now is it known how much memory the weights leave.
    cache_tokens = flags.cache_tokens or _cache_tokens(engine)
    room = dataclasses.replace(config.serving, cache_tokens=cache_tokens)
    return PolicyEngine(dataclasses.replace(config, serving=room), layout, policy.tokenizer), params


def _room(flags: argparse.Namespace, policy: ServedPolicy) -> tuple[int, int]:
    """Tokens of the longest prompt, and of a prompt and its reply. Raises ValueError."""
    from earl_jax.rollout._jetstream import PREFILL_LENGTHS

    limit = policy.max_context
    places = flags.max_context or limit
    if places > limit:
        raise ValueError(
            f"--max_context={places}; that of {policy.name} is {limit} tokens: lower it"
        )
    enough = next((n for n in PREFILL_LENGTHS if n >= places), PREFILL_LENGTHS[-1])
    prompt = flags.max_prompt_tokens or enough
    if prompt > enough:
        raise ValueError(
            f"--max_prompt_tokens={prompt} is more than a context of {places} tokens holds; "
            f"choose at most {enough}"
        )
    return prompt, places


def _cache_tokens(engine: Any) -> int:
    """Room in the KV cache over all slots: what memory the devices have left, if they say so."""
    import jax

    from earl_jax.rollout.pages import Pool

    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return DEFAULT_SLOT_TOKENS * engine.config.num_slots
    free = CACHE_SHARE * stats["bytes_limit"] - stats["bytes_in_use"]
    size, lanes = engine.config.page_size, engine.layout.num_row_shards
    pages = engine.state_shapes(size, Pool(lanes, 1)).cache.layers
    token_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))
    token_bytes /= lanes * size * engine.layout.shape.tensor
    return max(1, int(lanes * free / token_bytes))


def main() -> None:
    """The entry point."""
    # Until the server is up; then it ends open requests first.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    sys.exit(exit_status(lambda: serve_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
