# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The fields of requests in JSON: read and checked.

A field that is not known, or that asks for what is not done here, is an error.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from earl_jax.http.server import HttpError, HttpRequest

# Fields that say how a token is drawn, those of token ids, the one of the replies that are allowed,
# as vLLM names it, and all fields of sampling.
DRAWN = ("temperature", "top_p", "top_k", "min_p", "seed")
IDS = ("stop_token_ids", "allowed_token_ids")
STRUCTURED = "structured_outputs"
SAMPLING = (*DRAWN, *IDS, STRUCTURED, "stop", "max_tokens", "n", "logprobs")
# The most stop strings of a request.
MOST_STOPS = 16
# Fields of which only these values are supported; None is any field's default.
_FIXED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "priority": (0,),
}
_WORDS = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    dict: "an object",
    list: "a list",
}


def read_object(request: HttpRequest) -> dict[str, Any]:
    """Returns the JSON object in a request. Raises HttpError."""
    if request.content_type != "application/json":
        raise HttpError(
            415, "the body must be JSON; send the header Content-Type: application/json"
        )
    try:
        given = json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is no JSON ({error})") from None
    if not isinstance(given, dict):
        raise HttpError(400, f"the body must be a JSON object; got a {type(given).__name__}")
    return {name: value for name, value in given.items() if value is not None}


def check_names(
    given: Mapping[str, Any],
    known: Sequence[str],
    where: str = "",
    *,
    fixed: Mapping[str, Sequence[Any]] = MappingProxyType(_FIXED),
) -> None:
    """Raises HttpError for a field that is not known, or for a value that is not supported.

    `fixed` are the values that are supported of fields that only may have these.
    """
    for name, value in given.items():
        if name in known:
            continue
        if name not in fixed:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}"
            raise HttpError(400, f"{where}{name} is not known here; {hint}", where + name)
        if value not in fixed[name]:
            allowed = " or ".join(json.dumps(each) for each in fixed[name])
            raise HttpError(
                400,
                f"{where}{name} is {shown(value)}; this server supports {allowed} alone: leave "
                "it out",
                where + name,
            )


def take(given: Mapping[str, Any], name: str, kind: type, default: Any, where: str = "") -> Any:
    """Returns a field of this type. Raises HttpError for another type."""
    value = given.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise HttpError(
            400, f"{where}{name} must be {_WORDS[kind]}; got {shown(value)}", where + name
        )
    return value


def read_stop(given: Mapping[str, Any], where: str = "") -> tuple[str, ...]:
    """Returns the texts that end a reply: `stop`, one or a list. Raises HttpError."""
    found = given.get("stop", [])
    stops = [found] if isinstance(found, str) else found
    if not is_list(stops, str) or "" in stops or len(stops) > MOST_STOPS:
        raise HttpError(
            400,
            f"{where}stop must be a text or a list of at most {MOST_STOPS} texts, none of them "
            f"empty; got {shown(found)}",
            f"{where}stop",
        )
    return tuple(stops)


def read_choices(given: Mapping[str, Any], where: str = "") -> list[Any] | None:
    """Returns the allowed replies, `{"choice": [...]}`; None without. Raises HttpError."""
    if STRUCTURED not in given:
        return None
    found = take(given, STRUCTURED, dict, {}, where)
    found = {name: value for name, value in found.items() if value is not None}
    where = f"{where}{STRUCTURED}."
    check_names(found, ("choice",), where, fixed={})
    return take(found, "choice", list, [], where)


def read_text(value: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Returns a text, which may come as a list of parts of these types. Raises HttpError."""
    if is_list(value, dict) and all(part.get("type") in kinds for part in value):
        value = "".join(str(part.get("text", "")) for part in value)
    if not isinstance(value, str):
        raise HttpError(
            400,
            f"{where} is {shown(value)}; it must be a text, or a list of "
            f'{{"type": "{kinds[0]}", "text": ...}}',
            where,
        )
    return value


def is_list(value: Any, kind: type) -> bool:
    """Returns whether it is a list of values of this type."""
    return isinstance(value, list) and all(type(each) is kind for each in value)


def shown(value: Any) -> str:
    """Returns a value as JSON, cut where it is long, for errors."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def function_tool(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool with these fields, first those that all have, in the order of OpenAI's docs.

    So the order of a client's fields does not change the prompt.
    """
    first = ("name", "description", "parameters")
    names = dict.fromkeys([*first, *fields])
    function = {name: fields[name] for name in names if fields.get(name) is not None}
    return {"type": "function", "function": function}
