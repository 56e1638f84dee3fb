# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The bodies of HTTP requests: read, checked, and turned into options of the engine.

A field that is not known, or that asks for what this server does not do, is an error.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from earl_jax.engine.config import Sampling
from earl_jax.http.fields import (
    DRAWN,
    IDS,
    SAMPLING,
    check_names,
    is_list,
    read_choices,
    read_stop,
    shown,
    take,
)
from earl_jax.http.server import HttpError
from earl_jax.serving.config import MAX_SEED
from earl_jax.serving.requests import RequestLimits, RequestOptions, make_options

# The most replies to one prompt of a request.
MOST_REPLIES = 128
# The length of a reply where the request says none, as OpenAI's completions and vLLM have it.
DEFAULT_MAX_TOKENS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplyParams:
    """Parameters of the replies to a prompt: `count` of them, sampled by `options`.

    `max_tokens` None: as many as the context holds. A seed is that of the first reply; those after
    it have the seeds after it.
    """

    options: RequestOptions
    max_tokens: int | None
    count: int
    streams: bool = False
    counts_usage: bool = False

    def options_of(self, number: int) -> RequestOptions:
        """Returns the options of the reply of this number to a prompt."""
        if self.options.seed is None:
            return self.options
        seed = (self.options.seed + number) % (MAX_SEED + 1)
        return dataclasses.replace(self.options, seed=seed)


def read_reply_params(
    given: Mapping[str, Any], default: Sampling, limits: RequestLimits, where: str = ""
) -> ReplyParams:
    """Returns the sampling fields of a request. Raises HttpError and RequestError."""
    options = _options(given, default, limits, where)
    options = dataclasses.replace(options, stop_strings=read_stop(given, where))
    scored = _wants_logprobs(given, where)
    options = dataclasses.replace(options, logprobs=scored, model_logprobs=scored)
    count = take(given, "n", int, 1, where)
    if not 1 <= count <= MOST_REPLIES:
        raise HttpError(
            400, f"{where}n is {count}; it must lie between 1 and {MOST_REPLIES}", where + "n"
        )
    max_tokens = take(given, "max_tokens", int, None, where)
    if max_tokens is not None and not 1 <= max_tokens < limits.context_tokens:
        raise HttpError(
            400,
            f"{where}max_tokens is {max_tokens}; it must be at least 1, and with the prompt at "
            f"most {limits.context_tokens}",
            f"{where}max_tokens",
        )
    stream = take(given, "stream_options", dict, {}, where)
    check_names(stream, ("include_usage",), "stream_options.")
    return ReplyParams(
        options=options,
        max_tokens=max_tokens,
        count=count,
        streams=take(given, "stream", bool, False, where),
        counts_usage=take(stream, "include_usage", bool, False, "stream_options."),
    )


def read_completion(given: Mapping[str, Any]) -> list[Any]:
    """Returns the prompts of a completion, each a text or ids. Raises HttpError."""
    known = ("model", "prompt", "stream", "stream_options", "user", *SAMPLING)
    check_names(given, known)
    found = given.get("prompt")
    if isinstance(found, str) or (is_list(found, int) and found):
        return [found]
    if isinstance(found, list) and found and all(isinstance(p, str) for p in found):
        return found
    if isinstance(found, list) and found and all(is_list(p, int) for p in found):
        return found
    raise HttpError(
        400,
        "prompt must be a text, a list of texts, a list of token ids or a list of such lists; got "
        f"{shown(found)}",
        "prompt",
    )


def read_generate(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Returns the sampling fields of a request of ids, and its prompt. Raises HttpError."""
    check_names(given, ("model", "token_ids", "sampling_params", "request_id", "cache_salt"))
    if not is_list(given.get("token_ids"), int):
        raise HttpError(
            400,
            f"token_ids must be a list of token ids; got {shown(given.get('token_ids'))}",
            "token_ids",
        )
    take(given, "request_id", str, "")
    found = take(given, "sampling_params", dict, {})
    fields = {name: value for name, value in found.items() if value is not None}
    check_names(fields, SAMPLING, "sampling_params.")
    return fields, given["token_ids"]


def _options(
    given: Mapping[str, Any], default: Sampling, limits: RequestLimits, where: str
) -> RequestOptions:
    """Returns the options of sampling. At temperature 0, cuts and a seed change nothing."""
    fields = {name: given[name] for name in (*DRAWN, *IDS) if name in given}
    if (choices := read_choices(given, where)) is not None:
        fields["choices"] = choices
    if fields.get("top_k") == -1:
        fields["top_k"] = 0  # as vLLM names "all tokens"
    if type(seed := fields.get("seed")) is int and seed > MAX_SEED:
        fields["seed"] = seed % (MAX_SEED + 1)  # clients of OpenAI draw larger ones
    vocab_size = limits.vocab_size
    if fields.get("temperature", default.temperature) == 0:
        make_options({**fields, "temperature": 1.0}, Sampling(), vocab_size, where)
        kept = {name: fields[name] for name in (*IDS, "choices") if name in fields}
        return make_options(
            {**kept, "temperature": fields.get("temperature", 0)}, default, vocab_size, where
        )
    return make_options(fields, default, vocab_size, where)


def _wants_logprobs(given: Mapping[str, Any], where: str) -> bool:
    """Returns whether log-probs are wanted: true, 0 or 1, which all mean those of sampled tokens.

    OpenAI's completions name the number of likeliest tokens beside these, vLLM's ids count them in.
    """
    found = given.get("logprobs", False)
    if type(found) is bool:
        return found
    if type(found) is int and 0 <= found <= 1:
        return True
    raise HttpError(
        400,
        f"{where}logprobs is {shown(found)}; this server has the log-probs of sampled tokens "
        "alone, and not of others: send true, 0 or 1",
        f"{where}logprobs",
    )
