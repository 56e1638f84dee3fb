# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The flags of `python -m earl_jax.serve`, and their checks."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earl_jax.settings.errors import InputError
from earl_jax.settings.flags import parse_known

if TYPE_CHECKING:
    from earl_jax.models.config import ModelConfig
    from earl_jax.sharding.layout import MeshShape

# The sampling where neither a flag nor the model sets it.
DRAWN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# KV cache a slot, where the devices do not report their memory.
DEFAULT_SLOT_TOKENS = 2048
_HELP = """\
Serves a policy: OpenAI's and Anthropic's HTTP (--port) and JetStream's gRPC (--grpc_port: Decode
and HealthCheck of jetstream_proto.Orchestrator), on this machine alone unless --host is given.
There is no password and no encryption: every client that reaches an address may use it.

examples:
  python -m earl_jax.serve --workdir=runs/tictactoe_tiny_cpu
      the newest checkpoint of a run
  python -m earl_jax.serve --model=Qwen2.5-0.5B-Instruct --temperature=0.7 --top_p=0.8
      a folder with a checkpoint of transformers, or what a run exported; a name as ORG/NAME that is
      no folder is asked of the model hub

HTTP: GET /health and /v1/models; POST /v1/completions and /v1/chat/completions as OpenAI's, with
stream, n, stop, logprobs and seed, and as vLLM's top_k, min_p, stop_token_ids; POST /v1/responses
as OpenAI's and /v1/messages as Anthropic's, of text and tools, without a store; POST
/inference/v1/generate takes token_ids and sampling_params and returns every sampled id with its
log-probs. A conversation is rendered by the policy's chat template. Answers have a policy_version,
the training step of a run. A request that cannot be served is answered with status 400 and what to
change, one too many with 429. A client (an address) has a share of the slots and of those who wait.

gRPC: a request is a text or token ids, and max_tokens. A text is taken as it is, control tokens
included: no chat template is applied. The answer is a stream of messages, one for each round, with
ids, and text where the prompt was text. It ends at an end of turn, which is not sent, or
after max_tokens. A request that cannot be served is answered with INVALID_ARGUMENT and what to
change, one too many with RESOURCE_EXHAUSTED.

All requests share the pages of one KV cache (--cache_tokens), and take more as their replies grow.
Where there are none left the shortest requests wait, and go on where they were. None is cut: on
each part of --mesh that decodes slots of its own the cache holds at least one request of the
longest context (--max_context). Tokens come in rounds of 8 steps at most.

A gRPC request sets its own sampling with metadata: `sampling`, a JSON object with any of
temperature, top_k, top_p, min_p, seed (the same reply each time, whatever else is served),
stop_strings and stop_token_ids, and choices (texts, one of which the reply is) or allowed_token_ids
(of which it is made). Without these, the flags apply, and without flags the model's
generation_config.json. The trailing metadata `finish-reason` is end_of_turn,
max_tokens, stop_string or stop_token_id. With "logprobs": true each token comes with its log-prob
under the sampling distribution, with "model_logprobs": true with that under the model itself, in
two more fields of its sample (earl_jax/serving/scores.py).

Of a run, the model and its devices are as in WORKDIR/config.json, whose settings
python -m earl_jax.main --help explains.

SIGTERM and SIGINT (Ctrl-C) end it. Exit status: 0 then, 2 for a mistake in what was given, 1 if the
devices failed.
"""


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the flags. Raises InputError for one that does not exist or has an empty value."""
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
    parser.add_argument(
        "--name",
        help="the `model` of requests and answers (default: the value of --workdir or --model)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument(
        "--port", type=int, default=8000, help="of HTTP; 0: any that is free (%(default)s)"
    )
    parser.add_argument(
        "--grpc_port", type=int, default=9000, help="of gRPC; 0: any that is free (%(default)s)"
    )
    _add_limits(parser.add_argument_group("limits"))
    _add_sampling(parser.add_argument_group("sampling of requests that say nothing of it"))
    _add_engine(parser.add_argument_group("engine and devices"))
    return parse_known(parser, arguments)


def _add_limits(group: Any) -> None:
    """Adds the flags that bound what requests and clients may take."""
    group.add_argument(
        "--num_slots", type=int, default=16, help="requests decoded at once (%(default)s)"
    )
    group.add_argument(
        "--max_waiting", type=int, default=256, help="requests that may wait (%(default)s)"
    )
    group.add_argument(
        "--max_waiting_per_client",
        type=int,
        default=128,
        help="of these, at most so many of one address (%(default)s)",
    )
    group.add_argument(
        "--text_timeout_s",
        type=float,
        default=10.0,
        help="time limit of writing and encoding a prompt, in seconds (%(default)s)",
    )
    group.add_argument(
        "--max_prompt_tokens",
        type=int,
        help="most tokens of a prompt (default: those of the longest context)",
    )
    group.add_argument(
        "--max_context",
        type=int,
        help="most tokens of a prompt with its reply (default: the model's context, as far as the "
        "KV cache goes)",
    )
    group.add_argument(
        "--cache_tokens",
        type=int,
        help="tokens of the KV cache, over all slots (default: what the devices' memory holds "
        f"beside the weights; on CPUs {DEFAULT_SLOT_TOKENS} a slot)",
    )
    group.add_argument(
        "--keep_replies",
        action="store_true",
        help="keep the KV cache of replies as well as of prompts, on the devices and then in up to "
        "4 GiB of host memory, so that the next request of a conversation reads only what is new; "
        "a reply may then differ by rounding with what was kept",
    )
    group.add_argument(
        "--max_choice_tokens",
        type=int,
        default=256,
        help="most choices of a request, token by token, or allowed tokens; each "
        "step looks at so many for every slot (%(default)s)",
    )


def _add_sampling(group: Any) -> None:
    """Adds the flags of how tokens are drawn."""
    for name, kind, text in (
        ("temperature", float, "0 takes the likeliest token"),
        ("top_k", int, "draw from the k likeliest tokens; 0: from all"),
        ("top_p", float, "draw from the fewest tokens with this share of the probability"),
        ("min_p", float, "draw from tokens at least so likely, relative to the likeliest"),
    ):
        default = DRAWN[name]
        words = f"{text} (default: as generation_config.json of --model says, else {default})"
        group.add_argument(f"--{name}", type=kind, help=words)
    group.add_argument("--seed", type=int, default=0, help="of what is drawn (%(default)s)")


def _add_engine(group: Any) -> None:
    """Adds the flags of the mesh, of types and of speculation."""
    group.add_argument(
        "--mesh", help="such as data=2,tensor=4 (default: every device decodes its own slots)"
    )
    group.add_argument(
        "--compute_dtype",
        choices=("float32", "bfloat16"),
        help="type of matrix work and KV cache (default: the run's; for a model float32 where its "
        "weights are, else bfloat16)",
    )
    group.add_argument(
        "--weight_dtype",
        choices=("compute", "int8"),
        help="type that matrices are kept in: as they are multiplied, or a byte a number (default: "
        "the run's; for a model compute)",
    )
    group.add_argument(
        "--kv_dtype",
        choices=("compute", "int8"),
        help="type that the KV cache is kept in (default: the run's; for a model compute)",
    )
    group.add_argument(
        "--num_draft_tokens",
        type=int,
        help="drafted tokens a step, looked up in the request's own text: the same tokens in fewer "
        "steps where text repeats itself; 0: no speculation (default: the run's; for a model 0)",
    )
    group.add_argument(
        "--platform",
        choices=("auto", "cpu", "gpu", "tpu"),
        help="devices for --model (auto); a run's own config says its",
    )


def check_flags(flags: argparse.Namespace) -> None:
    """Checks the flags as far as that needs no model. Raises ValueError."""
    from earl_jax.serving.endpoints import check_address

    for name, low, high in (
        ("port", 0, 65535),
        ("grpc_port", 0, 65535),
        ("num_slots", 1, 2**20),
        ("max_waiting", 0, 2**20),
        ("max_waiting_per_client", 0, 2**20),
        ("text_timeout_s", 0.01, 3600),
        ("max_choice_tokens", 0, 2**20),
        ("max_prompt_tokens", 1, 2**30),
        ("max_context", 2, 2**30),
        ("cache_tokens", 1, 2**40),
        ("seed", 0, 2**31 - 1),
        ("num_draft_tokens", 0, 2**10),
    ):
        value = getattr(flags, name)
        if value is not None and not low <= value <= high:
            raise InputError(f"--{name}={value}; it must lie between {low} and {high}")
    if flags.workdir and flags.platform:
        raise InputError(
            "--platform has no effect beside --workdir: config.devices of the run says its "
            "devices; remove one of the two"
        )
    if flags.temperature == 0 and flags.seed:
        raise InputError(
            f"--seed={flags.seed} has no effect with --temperature=0, which draws nothing; remove "
            "one of the two"
        )
    sampling(flags, {})
    if flags.port and flags.port == flags.grpc_port:
        raise InputError(
            f"--port={flags.port} is HTTP's and --grpc_port={flags.grpc_port} gRPC's; give one of "
            "them another port, or 0 for any that is free"
        )
    check_address(flags.host, "port", flags.port)
    check_address(flags.host, "grpc_port", flags.grpc_port)


def check_against_model(
    flags: argparse.Namespace,
    mesh: "MeshShape",
    name: str,
    model: "ModelConfig",
    vocab_size: int,
    max_context: int | None,
) -> None:
    """Checks the flags against the model on this mesh, before its weights are read.

    Raises ValueError.
    """
    from earl_jax.engine.config import EngineConfig
    from earl_jax.models.parameters import check_tensor_axis
    from earl_jax.sharding.layout import ROLLOUT_ROWS

    obstacle = check_tensor_axis(model, vocab_size, mesh.tensor, mesh.fsdp, mesh.expert)
    if EngineConfig.page_size % mesh.context:
        obstacle = f"a page of {EngineConfig.page_size} tokens does not divide by {mesh.context}"
    if obstacle:
        raise InputError(f"--mesh={mesh} cannot hold this model: {obstacle}")
    if model.has_states and flags.keep_replies:
        raise InputError(
            "--keep_replies has no effect on this model, whose layers of linear attention have "
            "states that do not go back to where a request begins: remove it"
        )
    if model.has_states and flags.num_draft_tokens:
        raise InputError(
            f"--num_draft_tokens={flags.num_draft_tokens}, but this model has layers of linear "
            "attention, whose states do not go back before drafts that are not taken: remove it"
        )
    if model.latent_size and flags.kv_dtype == "int8":
        raise InputError(
            "--kv_dtype=int8, but this model caches latents, of which one scale a token is too "
            "coarse: remove it"
        )
    shards = math.prod(getattr(mesh, axis) for axis in ROLLOUT_ROWS)
    if flags.num_slots % shards:
        raise InputError(
            f"--num_slots={flags.num_slots} does not divide over the mesh {mesh}; choose a "
            f"multiple of {shards}"
        )
    context_tokens = flags.max_context or max_context
    if max_context and context_tokens and context_tokens > max_context:
        raise InputError(
            f"--max_context={context_tokens}; that of {name} is {max_context} tokens: lower it"
        )
    check_prompt(flags, context_tokens)


def check_prompt(flags: argparse.Namespace, context_tokens: int | None) -> None:
    """Raises ValueError for a longest prompt beyond `context_tokens`, None: without a limit."""
    prompt = flags.max_prompt_tokens
    if context_tokens and prompt and prompt > context_tokens:
        raise InputError(
            f"--max_prompt_tokens={prompt} is over a context of {context_tokens} tokens; "
            f"choose at most {context_tokens}"
        )


def sampling(flags: argparse.Namespace, of_model: Mapping[str, float]) -> Any:
    """Returns the sampling of requests that set none: by the flags, and else `of_model`.

    Greedy flags drop the model's cuts, and cuts in flags drop a greedy model's temperature. Raises
    ValueError.
    """
    from earl_jax.engine.config import Sampling

    given = {name: getattr(flags, name) for name in DRAWN if getattr(flags, name) is not None}
    if given and 0 in (given.get("temperature"), of_model.get("temperature")):
        of_model = {}
    chosen = Sampling(**{**of_model, **given})
    chosen.validate("--")
    return chosen
