# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Chat requests in OpenAI's form: their messages and tools, as chat templates expect them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from earl_jax.http.fields import SAMPLING, STRUCTURED, check_names, read_text, shown, take
from earl_jax.http.server import HttpError

ROLES = ("system", "user", "assistant", "tool")


def read_chat(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Returns the sampling fields of a chat request, its messages and its tools.

    With a tool_choice of "none" the template is shown no tools. Raises HttpError.
    """
    fields = {k: v for k, v in given.items() if k != "max_completion_tokens"}
    known = ("model", "messages", "tools", "tool_choice", "stream", "stream_options", "user")
    known += ("chat_template_kwargs", *SAMPLING)
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
                f"tools[{number}] is {shown(tool)}; it must be "
                '{"type": "function", "function": {"name": ..., ...}}',
                "tools",
            )
    visible = [] if given.get("tool_choice") == "none" else tools
    return fields, [_message(number, each) for number, each in enumerate(messages)], visible


def demanded_call(fields: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the name of the tool that a request's tool_choice demands a call of.

    "" is a call of any of them, None no demand. Raises HttpError.
    """
    choice = fields.get("tool_choice", "auto")
    if choice in ("auto", "none"):
        return None
    if STRUCTURED in fields:
        raise HttpError(
            400,
            f"{STRUCTURED} restricts the reply, and tool_choice demands a call; send one of them",
            "tool_choice",
        )
    names = [tool["function"]["name"] for tool in tools]
    if choice == "required" and names:
        return ""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name in names and choice == {"type": "function", "function": {"name": name}}:
        return name
    raise HttpError(
        400,
        f'tool_choice is {shown(choice)}; it must be "auto", "none", "required" or '
        '{"type": "function", "function": {"name": ...}}, the last two with such a tool in tools: '
        f"there are {', '.join(names) or 'none'}",
        "tool_choice",
    )


def cannot_demand() -> HttpError:
    """Returns the error of a tool_choice that demands a call, with a template that begins none."""
    return HttpError(
        400,
        "tool_choice demands a call, and this policy's chat template does not write calls between "
        '<tool_call> and </tool_call>; leave it out, or send "auto"',
        "tool_choice",
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
            f"{where} is {shown(given)}; it must be an object with a role "
            f"({', '.join(ROLES)}) and a content",
            "messages",
        )
    message = {name: value for name, value in given.items() if value not in (None, [])}
    known = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content")
    check_names(message, known, f"{where}.")
    content = message.get("content", "" if "tool_calls" in message else None)
    message["content"] = read_text(content, f"{where}.content")
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
                f"{where}.tool_calls has {shown(call)}; each must be "
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
