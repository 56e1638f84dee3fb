# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What JetStream may be asked: requests are checked here, before any of its threads sees them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Prompts of 1 to `max_prompt_tokens` ids, `places` ids together with the reply."""

    vocab_size: int
    max_prompt_tokens: int
    places: int


class RequestError(Exception):
    """Ends one request: the status, and a sentence, for the one who sent it."""

    def __init__(self, code: grpc.StatusCode, words: str) -> None:
        super().__init__(words)
        self.code, self.words = code, words


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """Stands for bytes that are no message."""

    reason: str


def reader(message: Any) -> Callable[[bytes], Any]:
    """Bytes to a message of this type, or `Unreadable`.

    gRPC would answer what its own reader raises with INTERNAL and no word of the reason.
    """

    def read(data: bytes) -> Any:
        try:
            return message.FromString(data)
        except DecodeError as error:
            return Unreadable(str(error))

    return read


def check_fields(request: Any, limits: RequestLimits) -> None:
    """All that can be said of a DecodeRequest without encoding its text.

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
    if request.max_tokens < 1:
        raise _invalid(
            f"max_tokens is {request.max_tokens}; it must be at least 1, and with the prompt at "
            f"most {limits.places}"
        )
    if content == "token_content":
        check_ids(request.token_content.token_ids, request.max_tokens, limits)
    elif not request.text_content.text:
        raise _invalid("text_content.text is empty; the policy needs a prompt to go on from")


def check_ids(ids: Sequence[int], max_tokens: int, limits: RequestLimits) -> None:
    """A prompt's ids, and the room behind them. Raises RequestError."""
    count = len(ids)
    if not count:
        raise _invalid("the prompt has no tokens; the policy needs a prompt to go on from")
    if count > limits.max_prompt_tokens:
        raise _invalid(
            f"the prompt has {count} tokens; this server takes at most {limits.max_prompt_tokens} "
            "(--max_prompt_tokens when it was started). Shorten it"
        )
    if count + max_tokens > limits.places:
        raise _invalid(
            f"the prompt's {count} tokens and max_tokens={max_tokens} need "
            f"{count + max_tokens} places; there are {limits.places}: lower max_tokens to at most "
            f"{limits.places - count}"
        )
    low, high = min(ids), max(ids)
    if low < 0 or high >= limits.vocab_size:
        raise _invalid(
            f"token id {low if low < 0 else high} is not in the vocabulary; ids go from 0 to "
            f"{limits.vocab_size - 1}"
        )


def _invalid(words: str) -> RequestError:
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, words)
