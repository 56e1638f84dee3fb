# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Chat requests in OpenAI's form: their messages and tools, as chat templates expect them."""

import json
from collections.abc import Mapping
from typing import Any

from earl_jax.http.fields import SAMPLING, check_names, is_list, shown, take
from earl_jax.http.server import HttpError

ROLES = ("system", "user", "assistant", "tool")


def read_chat(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Returns the sampling fields of a chat request, its messages and its tools.

    With a tool_choice of "none" the template is shown no tools. Raises HttpError.
    """
    fields = {k: v for k, v in given.items() if k != "max_completion_tokens"}
    known = ("model", "messages", "tools", "stream", "stream_options", "user")
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
    if is_list(content, dict) and all(part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise HttpError(
            400,
            f"{where}.content is {shown(given.get('content'))}; it must be a text, or a list of "
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
