# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of requests, before the driver sees them, and their options."""

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from earl_jax.engine.choices import choice_tree
from earl_jax.engine.config import Sampling
from earl_jax.serving.config import MAX_SEED

# The key of the metadata with a request's options, as JSON.
SAMPLING_KEY = "sampling"
IN_METADATA = f"{SAMPLING_KEY}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of requests: 1 to `max_prompt_tokens` ids, `context_tokens` ids with the reply.

    `prompt_limit` names what set the former, such as "--max_context".
    """

    vocab_size: int
    max_prompt_tokens: int
    context_tokens: int
    prompt_limit: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options of one request: its sampling, its stops, its log-probs.

    `seed` None: one that no other request has. The reply ends before the first of
    `stop_token_ids`, and its text before the first of `stop_strings`, besides the end of turn. It
    is one of `choices`, whose ids are `choice_ids`, or of `allowed_token_ids` alone, where there
    are any. Its tokens come with their log-probs: with `logprobs` under the
    distribution that each was drawn from (at temperature 0 that of the model), with
    `model_logprobs` under the model itself, untempered and with nothing cut off or forbidden.
    """

    sampling: Sampling
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    choices: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    choice_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: bool = False
    model_logprobs: bool = False

    @property
    def scored(self) -> bool:
        """Returns whether any log-probs are wanted."""
        return self.logprobs or self.model_logprobs


class RequestError(Exception):
    """Ends one request, with a status and a sentence for its client."""

    def __init__(self, code: grpc.StatusCode, words: str) -> None:
        super().__init__(words)
        self.code, self.words = code, words


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """Bytes that are no message, and the reason."""

    reason: str


def reader(message: Any) -> Callable[[bytes], Any]:
    """Returns a parser of bytes to a message of this type, or `Unreadable`.

    gRPC would answer an exception of its own parser with INTERNAL and without the reason.
    """

    def read(data: bytes) -> Any:
        try:
            return message.FromString(data)
        except DecodeError as error:
            return Unreadable(str(error))

    return read


def check_fields(request: Any, limits: RequestLimits) -> None:
    """Checks a DecodeRequest as far as that needs no encoding of its text.

    Raises RequestError.
    """
    if isinstance(request, Unreadable):
        raise _invalid(
            f"this is no jetstream_proto.DecodeRequest ({request.reason}); text must be UTF-8, "
            "which has no lone surrogates"
        )
    unknown = sorted({field.field_number for field in UnknownFieldSet(request)})
    if unknown:
        raise _invalid(
            f"field {', '.join(map(str, unknown))} of the request is not known to JetStream 0.2.2; "
            "send max_tokens, and text_content or token_content"
        )
    if request.session_cache or request.priority:
        raise _invalid(
            "session_cache and priority have no effect here; leave them out, and send a whole "
            "conversation with each request"
        )
    content = request.WhichOneof("content")
    if content is None:
        raise _invalid(
            "the request has no prompt; set text_content.text, or token_content.token_ids"
        )
    if not 1 <= request.max_tokens < limits.context_tokens:
        raise _invalid(
            f"max_tokens is {request.max_tokens}; it must be at least 1, and with the prompt at "
            f"most {limits.context_tokens}"
        )
    if content == "token_content":
        check_ids(request.token_content.token_ids, request.max_tokens, limits)
    elif not request.text_content.text:
        raise _invalid("text_content.text is empty; the policy needs a prompt to go on from")


def check_ids(ids: Sequence[int], max_tokens: int, limits: RequestLimits) -> None:
    """Checks a prompt's ids, and the tokens left behind them. Raises RequestError."""
    count = len(ids)
    if not count:
        raise _invalid("the prompt has no tokens; the policy needs a prompt to go on from")
    if count > limits.max_prompt_tokens:
        raise _invalid(
            f"the prompt has {count} tokens; this server takes at most {limits.max_prompt_tokens} "
            f"(by {limits.prompt_limit}). Shorten it"
        )
    if count + max_tokens > limits.context_tokens:
        raise _invalid(
            f"the prompt's {count} tokens and max_tokens={max_tokens} need "
            f"a context of {count + max_tokens}; this server has {limits.context_tokens}: "
            + (
                f"lower max_tokens to at most {limits.context_tokens - count}"
                if count < limits.context_tokens
                else "shorten the prompt"
            )
        )
    low, high = min(ids), max(ids)
    if low < 0 or high >= limits.vocab_size:
        raise _invalid(
            f"token id {low if low < 0 else high} is not in the vocabulary; ids go from 0 to "
            f"{limits.vocab_size - 1}"
        )


_SAMPLING_FIELDS = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "seed": int,
    "stop_strings": str,
    "stop_token_ids": int,
    "choices": str,
    "allowed_token_ids": int,
    "logprobs": bool,
    "model_logprobs": bool,
}
_LISTS = ("stop_strings", "stop_token_ids", "choices", "allowed_token_ids")
_EXAMPLE = '{"temperature": 0.7, "seed": 1, "stop_strings": ["\\n"]}'


def read_options(metadata: Any, default: Sampling, vocab_size: int) -> RequestOptions:
    """Returns the options in the metadata of a request; `default` is its sampling without any.

    Raises RequestError.
    """
    texts = [value for key, value in metadata or () if key == SAMPLING_KEY]
    if not texts:
        return RequestOptions(sampling=default)
    if len(texts) > 1:
        raise _invalid(f"the metadata have {len(texts)} values of '{SAMPLING_KEY}'; send one")
    try:
        given = json.loads(texts[0])
    except (TypeError, ValueError, RecursionError) as error:
        raise _invalid(
            f"the metadata's '{SAMPLING_KEY}' is no JSON ({error}); send such as {_EXAMPLE}"
        ) from None
    if not isinstance(given, dict):
        raise _invalid(f"the metadata's '{SAMPLING_KEY}' must be an object such as {_EXAMPLE}")
    return make_options(given, default, vocab_size)


def make_options(
    given: Mapping[str, Any], default: Sampling, vocab_size: int, where: str = IN_METADATA
) -> RequestOptions:
    """Returns the options of these fields, which messages name behind `where`.

    Raises RequestError.
    """
    fields = {name: _field(name, value, where) for name, value in given.items()}
    drawn = {
        name: fields.pop(name)
        for name in ("temperature", "top_k", "top_p", "min_p") & fields.keys()
    }
    # At temperature 0 the server's own cuts have no effect.
    sampling = dataclasses.replace(
        Sampling() if drawn.get("temperature") == 0 else default, **drawn
    )
    try:
        sampling.validate(where)
    except ValueError as error:
        raise _invalid(str(error)) from None
    options = RequestOptions(sampling=sampling, **fields)
    if options.seed is not None:
        if not 0 <= options.seed <= MAX_SEED:
            raise _invalid(f"{where}seed is {options.seed}; it must lie between 0 and {MAX_SEED}")
        if sampling.temperature == 0:
            raise _invalid(
                f"{where}seed has no effect at temperature 0, which draws nothing; remove "
                "it, or set a temperature"
            )
    _check_lists(options, given, vocab_size, where)
    return options


def _check_lists(
    options: RequestOptions, given: Mapping[str, Any], vocab_size: int, where: str
) -> None:
    for name in ("stop_strings", "choices"):
        if "" in getattr(options, name):
            raise _invalid(f"{where}{name} holds an empty string; remove it")
    if any("\ud800" <= letter <= "\udfff" for text in options.choices for letter in text):
        raise _invalid(f"{where}choices holds a lone surrogate, which no text can have; remove it")
    for name in ("stop_token_ids", "allowed_token_ids"):
        strange = [token for token in getattr(options, name) if not 0 <= token < vocab_size]
        if strange:
            raise _invalid(f"{where}{name} holds {strange[0]}; ids go from 0 to {vocab_size - 1}")
    for name in ("choices", "allowed_token_ids"):
        if name in given and not given[name]:
            raise _invalid(
                f"{where}{name} is an empty list, which allows no reply; give some, or leave it out"
            )
    if options.choices and options.allowed_token_ids:
        raise _invalid(
            f"{where}choices and {where}allowed_token_ids each restrict the reply; send one of them"
        )


def allow(
    options: RequestOptions,
    max_tokens: int,
    branches: int,
    ids_of: Callable[[str], tuple[int, ...]],
    token_bytes: int,
    where: str = IN_METADATA,
) -> RequestOptions:
    """Returns the options with `choice_ids`, for an engine of at most so many `branches`.

    `ids_of` returns the ids of a whole reply of a text, its end included; a token has at most
    `token_bytes` bytes of it. Raises RequestError.
    """
    if not options.choices and not options.allowed_token_ids:
        return options

    def check(what: str, needed: int, words: str = "") -> None:
        if needed > branches:
            raise _invalid(
                f"{where}{what} takes {words}{needed} different continuations, token by token; "
                f"this server takes {branches} (--max_choice_tokens when it was started)"
            )

    # Before they are encoded, which holds up other requests, and their tree is kept.
    most_bytes = max((len(text.encode()) for text in options.choices), default=0)
    least = max(len({*options.choices}), -(-most_bytes // token_bytes))
    check("choices", least, "at least ")
    replies = tuple(dict.fromkeys(map(ids_of, options.choices)))
    tokens = tuple(dict.fromkeys(options.allowed_token_ids))
    longest = max(map(len, replies), default=0) - 1
    if longest > max_tokens:
        raise _invalid(
            f"{where}choices holds a reply of {longest} tokens, and max_tokens is "
            f"{max_tokens}; raise it"
        )
    what = "choices" if replies else "allowed_token_ids"
    possible = {token for reply in replies for token in reply}.union(tokens)
    idle = [token for token in options.stop_token_ids if token not in possible]
    if idle:
        raise _invalid(
            f"{where}stop_token_ids holds {idle[0]}, which {where}{what} never "
            "lets come; add it there, or remove it"
        )
    check(what, len(choice_tree(replies)[0]) or len(tokens))
    return dataclasses.replace(options, choice_ids=replies)


def _field(name: str, value: Any, where: str) -> Any:
    """Returns a field's value for `RequestOptions`. Raises RequestError for another type."""
    if name not in _SAMPLING_FIELDS:
        near = difflib.get_close_matches(name, _SAMPLING_FIELDS, 1)
        raise _invalid(
            f"{where}{name} is not known"
            + (
                f"; did you mean '{near[0]}'?"
                if near
                else f"; known are {', '.join(_SAMPLING_FIELDS)}"
            )
        )
    kind = _SAMPLING_FIELDS[name]
    if name in _LISTS:
        if isinstance(value, list) and all(type(entry) is kind for entry in value):
            return tuple(value)
        raise _invalid(f"{where}{name} must be a list of {kind.__name__}; got {value!r:.80}")
    if type(value) is kind or (kind is float and type(value) is int and abs(value) < 2**31):
        return kind(value)
    words = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
    raise _invalid(f"{where}{name} must be {words}; got {value!r:.80}")


def _invalid(words: str) -> RequestError:
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, words)
