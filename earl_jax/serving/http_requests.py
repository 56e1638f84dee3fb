# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The bodies of HTTP requests: read, checked, and turned into options of the engine.

A field that is not known, or that asks for what this server does not do, is an error.
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from earl_jax.engine.config import Sampling
from earl_jax.serving.config import MAX_SEED
from earl_jax.serving.http_server import HttpError, HttpRequest
from earl_jax.serving.requests import RequestLimits, RequestOptions, make_options

# The most replies to one prompt, and stop strings, of a request.
MOST_REPLIES, MOST_STOPS = 128, 16
# The length of a reply where the request says none, as OpenAI's completions and vLLM have it.
DEFAULT_MAX_TOKENS = 16
ROLES = ("system", "user", "assistant", "tool")

_DRAWN = ("temperature", "top_p", "top_k", "min_p", "seed")
_IDS = ("stop_token_ids", "allowed_token_ids")
_SAMPLING = (*_DRAWN, *_IDS, "stop", "max_tokens", "n", "logprobs")
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
    "tool_choice": ("auto", "none"),
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


def check_names(given: Mapping[str, Any], known: Sequence[str], where: str = "") -> None:
    """Raises HttpError for a field that is not known, or for a value that is not supported."""
    for name, value in given.items():
        if name in known:
            continue
        if name not in _FIXED:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}"
            raise HttpError(400, f"{where}{name} is not known here; {hint}", where + name)
        if value not in _FIXED[name]:
            allowed = " or ".join(json.dumps(each) for each in _FIXED[name])
            raise HttpError(
                400,
                f"{where}{name} is {_shown(value)}; this server supports {allowed} alone: leave "
                "it out",
                where + name,
            )


def read_reply_params(
    given: Mapping[str, Any], default: Sampling, limits: RequestLimits, where: str = ""
) -> ReplyParams:
    """Returns the sampling fields of a request. Raises HttpError and RequestError."""
    options = _options(given, default, limits, where)
    options = dataclasses.replace(options, stop_strings=_stop_strings(given, where))
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
    known = ("model", "prompt", "stream", "stream_options", "user", *_SAMPLING)
    check_names(given, known)
    found = given.get("prompt")
    if isinstance(found, str) or (_is_list(found, int) and found):
        return [found]
    if isinstance(found, list) and found and all(isinstance(p, str) for p in found):
        return found
    if isinstance(found, list) and found and all(_is_list(p, int) for p in found):
        return found
    raise HttpError(
        400,
        "prompt must be a text, a list of texts, a list of token ids or a list of such lists; got "
        f"{_shown(found)}",
        "prompt",
    )


def read_chat(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Returns the sampling fields of a chat request, its messages and its tools.

    With a tool_choice of "none" the template is shown no tools. Raises HttpError.
    """
    fields = {k: v for k, v in given.items() if k != "max_completion_tokens"}
    known = ("model", "messages", "tools", "stream", "stream_options", "user")
    known += ("chat_template_kwargs", *_SAMPLING)
    check_names(fields, known)
    if "max_completion_tokens" in given:
        if (
            given.get("max_tokens", given["max_completion_tokens"])
            != given["max_completion_tokens"]
        ):
            raise HttpError(
                400, "max_tokens and max_completion_tokens differ; send one of them", "max_tokens"
            )
        fields["max_tokens"] = take(given, "max_completion_tokens", int, None)
    messages = take(given, "messages", list, [])
    if not messages:
        raise HttpError(400, "messages is empty; the policy needs a message to answer", "messages")
    tools = take(given, "tools", list, [])
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise HttpError(
                400,
                f"tools[{number}] is {_shown(tool)}; it must be "
                '{"type": "function", "function": {"name": ..., ...}}',
                "tools",
            )
    shown = [] if given.get("tool_choice") == "none" else tools
    return fields, [_message(number, each) for number, each in enumerate(messages)], shown


def read_generate(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Returns the sampling fields of a request of ids, and its prompt. Raises HttpError."""
    check_names(given, ("model", "token_ids", "sampling_params", "request_id", "cache_salt"))
    if not _is_list(given.get("token_ids"), int):
        raise HttpError(
            400,
            f"token_ids must be a list of token ids; got {_shown(given.get('token_ids'))}",
            "token_ids",
        )
    take(given, "request_id", str, "")
    found = take(given, "sampling_params", dict, {})
    fields = {name: value for name, value in found.items() if value is not None}
    check_names(fields, _SAMPLING, "sampling_params.")
    return fields, given["token_ids"]


def take(given: Mapping[str, Any], name: str, kind: type, default: Any, where: str = "") -> Any:
    """Returns a field of this type. Raises HttpError for another type."""
    value = given.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise HttpError(
            400, f"{where}{name} must be {_WORDS[kind]}; got {_shown(value)}", where + name
        )
    return value


def _options(
    given: Mapping[str, Any], default: Sampling, limits: RequestLimits, where: str
) -> RequestOptions:
    """Returns the options of sampling. At temperature 0, cuts and a seed change nothing."""
    fields = {name: given[name] for name in (*_DRAWN, *_IDS) if name in given}
    if fields.get("top_k") == -1:
        fields["top_k"] = 0  # as vLLM names "all tokens"
    if type(seed := fields.get("seed")) is int and seed > MAX_SEED:
        fields["seed"] = seed % (MAX_SEED + 1)  # clients of OpenAI draw larger ones
    vocab_size = limits.vocab_size
    if fields.get("temperature", default.temperature) == 0:
        make_options({**fields, "temperature": 1.0}, Sampling(), vocab_size, where)
        kept = {name: fields[name] for name in _IDS if name in fields}
        return make_options(
            {**kept, "temperature": fields.get("temperature", 0)}, default, vocab_size, where
        )
    return make_options(fields, default, vocab_size, where)


def _stop_strings(given: Mapping[str, Any], where: str) -> tuple[str, ...]:
    found = given.get("stop", [])
    stops = [found] if isinstance(found, str) else found
    if not _is_list(stops, str) or "" in stops or len(stops) > MOST_STOPS:
        raise HttpError(
            400,
            f"{where}stop must be a text or a list of at most {MOST_STOPS} texts, none of them "
            f"empty; got {_shown(found)}",
            f"{where}stop",
        )
    return tuple(stops)


def _wants_logprobs(given: Mapping[str, Any], where: str) -> bool:
    """Returns whether log-probs are wanted: true, or 0 likelier tokens beside those sampled.

    For /inference/v1/generate, 1 means those sampled too.
    """
    found = given.get("logprobs", False)
    most = 1 if where else 0
    if type(found) is bool:
        return found
    if type(found) is int and 0 <= found <= most:
        return True
    raise HttpError(
        400,
        f"{where}logprobs is {_shown(found)}; this server has the log-probs of sampled tokens "
        f"alone, and not of others: send {'1' if where else 'true, or 0'}",
        f"{where}logprobs",
    )


def _message(number: int, given: Any) -> dict[str, Any]:
    """Returns a message as chat templates expect it, a developer's as one of the system's.

    Raises HttpError.
    """
    where = f"messages[{number}]"
    if isinstance(given, dict) and given.get("role") == "developer":
        given = {**given, "role": "system"}
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise HttpError(
            400,
            f"{where} is {_shown(given)}; it must be an object with a role "
            f"({', '.join(ROLES)}) and a content",
            "messages",
        )
    message = {name: value for name, value in given.items() if value not in (None, [])}
    known = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content")
    check_names(message, known, f"{where}.")
    content = message.get("content", "" if "tool_calls" in message else None)
    if _is_list(content, dict) and all(part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise HttpError(
            400,
            f"{where}.content is {_shown(given.get('content'))}; it must be a text, or a list of "
            '{"type": "text", "text": ...}',
            f"{where}.content",
        )
    message["content"] = content
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], where)
    return message


def _tool_calls(given: Any, where: str) -> list[Any]:
    """Returns calls with their arguments as objects, which templates write as JSON."""
    calls = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise HttpError(
                400,
                f"{where}.tool_calls has {_shown(call)}; each must be "
                '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}',
                f"{where}.tool_calls",
            )
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                pass  # what the policy wrote, which may be no JSON
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
