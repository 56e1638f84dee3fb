# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Serves a policy: python -m earl_jax.serve --workdir=DIR | --model=HF_DIR [--port=9000]."""

import argparse
import asyncio
import dataclasses
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from earl_jax.main import exit_status, start_jax

# How a token is drawn where neither a flag nor the model says it.
_DRAWN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_HELP = """\
Serves a policy through JetStream's gRPC service (jetstream_proto.Orchestrator: Decode and
HealthCheck), on this machine alone unless --host says otherwise. There is no password and no
encryption: whoever reaches the address may use it.

examples:
  python -m earl_jax.serve --workdir=runs/tictactoe_tiny_cpu
      the newest checkpoint of a run
  python -m earl_jax.serve --model=Qwen2.5-0.5B-Instruct --temperature=0.7 --top_p=0.8
      a folder with a checkpoint of transformers, or what a run exported; a name as ORG/NAME that is
      no folder is asked of the model hub

A request is a text or token ids, and max_tokens. A text is taken as it is, control tokens included:
no chat template is applied. To chat, render the template and send what comes of it. The answer is a
stream of messages, one for each token, with its id, and its text where the prompt was text. It ends
at an end of turn, which is not sent, or after max_tokens. A request that cannot be served is
answered with INVALID_ARGUMENT and what to change, one too many with RESOURCE_EXHAUSTED.

The KV cache grows with the replies, up to the model's context, from pages that all requests share.
Where there are no more (--cache_tokens) the shortest requests wait, their pages in host memory, and
go on where they were; none is cut.

A request draws its reply in its own way with metadata: `sampling`, a JSON object with any of
temperature, top_k, top_p, min_p, seed (the same reply each time, whatever else is served),
stop_strings and stop_token_ids, and choices (texts, one of which the reply is) or allowed_token_ids
(of which it is made). One that says nothing is drawn as the flags say, and where these say nothing
as the model's generation_config.json does. The trailing metadata `finish-reason` is end_of_turn,
max_tokens, stop_string or stop_token_id.

SIGTERM and SIGINT (Ctrl-C) end it. Exit status: 0 then, 2 for a mistake in what was given, 1 if
the devices failed.
"""
# Of the model, where its checkpoint does not say.
DEFAULT_CONTEXT = 2048
# Of the KV cache a slot, where the devices do not say how much memory they have.
DEFAULT_SLOT_TOKENS = 2048
# Of a device's memory for weights and KV cache; the rest is for prompts that are read, and for what
# programs need beside their arguments.
CACHE_SHARE = 0.8


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags. Exits with status 2 for one that does not exist."""
    parser = argparse.ArgumentParser(
        prog="python -m earl_jax.serve",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    policy = parser.add_mutually_exclusive_group(required=True)
    policy.add_argument("--workdir", type=Path, help="the folder of a run")
    policy.add_argument(
        "--model", help="a folder with a checkpoint of transformers, or its name on a hub"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=9000, help="0: any that is free (%(default)s)")
    parser.add_argument(
        "--num_slots", type=int, default=16, help="requests decoded at once (%(default)s)"
    )
    parser.add_argument(
        "--max_waiting", type=int, default=256, help="requests that may wait (%(default)s)"
    )
    parser.add_argument(
        "--max_prompt_tokens",
        type=int,
        help="longest prompt, a power of two from 16 to 32768 (default: the smallest that holds "
        "the longest context)",
    )
    parser.add_argument(
        "--max_context",
        type=int,
        help="most tokens of a prompt with its reply (default: the model's context)",
    )
    parser.add_argument(
        "--cache_tokens",
        type=int,
        help="tokens that the KV cache has room for, over all slots (default: what the devices' "
        f"memory holds beside the weights; on CPUs {DEFAULT_SLOT_TOKENS} a slot)",
    )
    parser.add_argument(
        "--max_choice_tokens",
        type=int,
        default=256,
        help="room for the choices of a request, token by token, or for its allowed tokens; each "
        "step looks at so many for every slot (%(default)s)",
    )
    for name, kind, text in (
        ("temperature", float, "0 takes the likeliest token"),
        ("top_k", int, "draw from the k likeliest tokens; 0: from all"),
        ("top_p", float, "draw from the fewest tokens with this share of the probability"),
        ("min_p", float, "draw from tokens at least so likely, relative to the likeliest"),
    ):
        default = _DRAWN[name]
        words = f"{text} (default: as generation_config.json of --model says, else {default})"
        parser.add_argument(f"--{name}", type=kind, help=words)
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (%(default)s)")
    parser.add_argument(
        "--mesh", help="such as data=2,tensor=4 (default: every device decodes its own slots)"
    )
    parser.add_argument(
        "--compute_dtype",
        choices=("float32", "bfloat16"),
        help="type of matrix work and KV cache (default: the run's; for a model float32 where its "
        "weights are, else bfloat16)",
    )
    parser.add_argument(
        "--weight_dtype",
        choices=("compute", "int8"),
        help="type that matrices are kept in: as they are multiplied, or a byte a number (default: "
        "the run's; for a model compute)",
    )
    parser.add_argument(
        "--kv_dtype",
        choices=("compute", "int8"),
        help="type that the KV cache is kept in (default: the run's; for a model compute)",
    )
    parser.add_argument(
        "--platform",
        choices=("auto", "cpu", "gpu", "tpu"),
        help="devices for --model (auto); a run's own config says its",
    )
    return parser.parse_args(arguments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Policy:
    """What is served. `max_context` of the model, in tokens.

    `load` gives the parameters, fp32 with layers stacked; they may lie on the layout given, or
    elsewhere. `told` is how the model's own files say that tokens are drawn.
    """

    name: str
    model: Any
    vocab_size: int
    tokenizer: Any
    end_ids: tuple[int, ...]
    max_context: int
    weight_dtype: Literal["compute", "int8"]
    kv_dtype: Literal["compute", "int8"]
    load: Callable[[Any], Any]
    told: Mapping[str, float] = dataclasses.field(default_factory=dict)


def serve_command(arguments: Sequence[str]) -> None:
    """The whole command, until it is ended. Raises ValueError for bad input."""
    flags = parse_flags(arguments)
    from earl_jax.sharding.layout import MeshShape

    _check_flags(flags)
    mesh = MeshShape.parse(flags.mesh) if flags.mesh else None
    if flags.workdir:
        policy = _run_policy(flags)
    else:
        policy = _model_policy(flags, mesh.num_devices if mesh else 1)
    sampling = _sampling(flags, policy.told)

    import jax

    from earl_jax.models.parameters import check_tensor_axis
    from earl_jax.rollout.engine import EngineConfig, PolicyEngine, Serving
    from earl_jax.rollout.server import serve, warm_up
    from earl_jax.rollout.slots import SlotRules
    from earl_jax.sharding.layout import make_layout
    from earl_jax.weights import publish

    mesh = mesh or MeshShape(data=len(jax.devices()))
    obstacle = check_tensor_axis(
        policy.model, policy.vocab_size, mesh.tensor, mesh.fsdp, mesh.expert
    )
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
        serving=Serving(max_prefill_length=prompt_tokens, places=places, sampling=sampling),
    )
    engine = PolicyEngine(config, layout, policy.tokenizer)
    params = publish(
        policy.load(layout), engine.parameter_shapes, engine.parameter_shardings
    ).params
    # Only now is it known how much memory the weights leave.
    cache_tokens = flags.cache_tokens or _cache_tokens(engine)
    room = dataclasses.replace(config.serving, cache_tokens=cache_tokens)
    engine = PolicyEngine(dataclasses.replace(config, serving=room), layout, policy.tokenizer)
    cache_tokens = engine.serving_pool.total * config.page_size
    name = policy.name
    del policy  # its fp32 weights
    warm_up(engine, params)

    def say(address: str) -> None:
        print(
            f"serving {name} at {address}: prompts of up to {prompt_tokens} tokens, {places} with "
            f"their replies, {flags.num_slots} at once on {mesh}, {cache_tokens} tokens of KV "
            "cache",
            flush=True,
        )

    serving = serve(
        engine,
        params,
        host=flags.host,
        port=flags.port,
        max_waiting=flags.max_waiting,
        on_ready=say,
    )
    asyncio.run(serving)


def _check_flags(flags: argparse.Namespace) -> None:
    """What needs no model. Raises ValueError."""
    from earl_jax.rollout._jetstream import PREFILL_LENGTHS
    from earl_jax.rollout.server import check_address

    for name, low, high in (
        ("port", 0, 65535),
        ("num_slots", 1, 2**20),
        ("max_waiting", 0, 2**20),
        ("max_choice_tokens", 0, 2**20),
        ("max_context", 2, 2**30),
        ("cache_tokens", 1, 2**40),
        ("seed", 0, 2**31 - 1),
    ):
        value = getattr(flags, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{name}={value}; it must lie between {low} and {high}")
    if flags.max_prompt_tokens is not None and flags.max_prompt_tokens not in PREFILL_LENGTHS:
        raise ValueError(
            f"--max_prompt_tokens={flags.max_prompt_tokens}; JetStream pads prompts to powers of "
            f"two: choose one of {', '.join(map(str, PREFILL_LENGTHS))}"
        )
    if flags.workdir and flags.platform:
        raise ValueError(
            "--platform has no effect beside --workdir: config.devices of the run says its "
            "devices; remove one of the two"
        )
    if flags.temperature == 0 and flags.seed:
        raise ValueError(
            f"--seed={flags.seed} has no effect with --temperature=0, which draws nothing; remove "
            "one of the two"
        )
    _sampling(flags, {})
    check_address(flags.host, flags.port)


def _sampling(flags: argparse.Namespace, told: Mapping[str, float]) -> Any:
    """How tokens are drawn for who does not say: by the flags, and else as the model is `told`.

    Who wants the likeliest token wants no cuts of the model's; who wants cuts, not its likeliest
    token. Raises ValueError.
    """
    from earl_jax.rollout.config import Sampling

    given = {name: getattr(flags, name) for name in _DRAWN if getattr(flags, name) is not None}
    if given and 0 in (given.get("temperature"), told.get("temperature")):
        told = {}
    sampling = Sampling(**{**told, **given})
    sampling.validate("--")
    return sampling


def _room(flags: argparse.Namespace, policy: _Policy) -> tuple[int, int]:
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


def _run_policy(flags: argparse.Namespace) -> _Policy:
    """The newest checkpoint of a run."""
    from earl_jax.config_file import read_workdir_config

    config = read_workdir_config(flags.workdir)
    start_jax(config.devices.platform, config.devices.num_cpu_devices)
    from earl_jax.run import read_newest

    world, position, _ = read_newest(config, flags.workdir)
    params = world.policy(position.state)
    dtype = flags.compute_dtype or config.rollout.computes_as(config.model.compute_dtype)
    return _Policy(
        name=f"{flags.workdir} after step {position.step}",
        model=dataclasses.replace(world.model, compute_dtype=dtype),
        vocab_size=world.vocab_size,
        tokenizer=world.tokenizer,
        end_ids=world.renderer.end_of_turn_ids,
        # Nothing limits it without a checkpoint; the longest episodes may be over the buckets.
        max_context=_max_context(world.checkpoint)
        if world.checkpoint
        else 2 * config.rollout.context_buckets[-1],
        weight_dtype=flags.weight_dtype or config.rollout.weight_dtype,
        kv_dtype=flags.kv_dtype or config.rollout.kv_dtype,
        load=lambda layout: params,
    )


def _model_policy(flags: argparse.Namespace, num_cpu_devices: int) -> _Policy:
    """A checkpoint of `transformers`."""
    from earl_jax.envs.tokenizer import load_tokenizer
    from earl_jax.models.generation import read_generation_settings
    from earl_jax.models.hf_read import load_parameters, open_checkpoint
    from earl_jax.models.hub import find_folder

    # Cheap first: a mistake shows before the devices start.
    folder = find_folder(flags.model, "--model")
    checkpoint = open_checkpoint(folder)
    tokenizer = load_tokenizer(folder)
    if len(tokenizer) > checkpoint.vocab_size:
        raise ValueError(
            f"--model={flags.model} has a tokenizer of {len(tokenizer)} entries, but a model of "
            f"{checkpoint.vocab_size}"
        )
    generation = read_generation_settings(folder)
    told = _told(generation)
    start_jax(flags.platform or "auto", num_cpu_devices)
    dtype = flags.compute_dtype or ("float32" if checkpoint.dtype == "float32" else "bfloat16")
    return _Policy(
        name=flags.model,
        model=dataclasses.replace(checkpoint.model, compute_dtype=dtype),
        vocab_size=checkpoint.vocab_size,
        tokenizer=tokenizer,
        end_ids=generation.end_ids_of(tokenizer),
        max_context=_max_context(checkpoint),
        weight_dtype=flags.weight_dtype or "compute",
        kv_dtype=flags.kv_dtype or "compute",
        load=lambda layout: load_parameters(checkpoint, layout),
        told=told,
    )


def _told(generation: Any) -> dict[str, float]:
    """How the model's files say that tokens are drawn; what else they say is told the user.

    Raises ValueError naming the file.
    """
    from earl_jax.rollout.config import Sampling

    told = generation.drawn_by()
    Sampling(**told).validate(f"{generation.path}: ")
    unused = {name: v for name, v in generation.sampling.items() if name not in _DRAWN}
    for word, fields in (("taken for requests that say nothing", told), ("not used", unused)):
        if fields:
            named = ", ".join(f"{name}={value!r}" for name, value in fields.items())
            print(f"{generation.path}: {named} {word}", file=sys.stderr)
    return told


def _max_context(checkpoint: Any) -> int:
    """The context that a checkpoint is made for, in tokens."""
    return checkpoint.max_context or DEFAULT_CONTEXT


def main() -> None:
    """The entry point."""
    # Until the server is up; then it ends open requests first.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    sys.exit(exit_status(lambda: serve_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
