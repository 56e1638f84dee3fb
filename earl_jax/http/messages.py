# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Anthropic's /v1/messages, translated to and from chat completions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from earl_jax.http.chat_reply import ChatReply
from earl_jax.http.fields import (
    DRAWN,
    IDS,
    STRUCTURED,
    check_names,
    function_tool,
    is_list,
    read_text,
    shown,
    take,
)
from earl_jax.http.server import HttpError

# Fields that chat completions have too, and fields without an effect on the reply.
_SAME = ("model", "max_tokens", "stream", "chat_template_kwargs", STRUCTURED)
_SAME += (*DRAWN, *IDS)
_IDLE = ("metadata", "service_tier", "cache_control")
_THREAD = "thread"
_OWN = ("messages", "system", "tools", "tool_choice", "stop_sequences")
# Fields of which only these values are supported.
_FIXED: Mapping[str, Sequence[Any]] = MappingProxyType(
    {"thinking": ({"type": "disabled"},), "output_config": ({},)}
)
# The same of a tool; and its fields that the policy is not shown.
_FIXED_OF_TOOL: Mapping[str, Sequence[Any]] = MappingProxyType(
    {"defer_loading": (False,), "allowed_callers": (["direct"],)}
)
_NOT_SHOWN = ("type", "cache_control", "eager_input_streaming", *_FIXED_OF_TOOL)
_TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {404: "not_found_error", 408: "timeout_error", 413: "request_too_large"}
_ERRORS |= {429: "rate_limit_error", 503: "overloaded_error"}


class Messages:
    """A request, and its answer."""

    def __init__(self) -> None:
        """Begins before the request is read."""
        self._reply = ChatReply()
        self._has_begun = False

    def to_chat(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the request in the form of chat completions. Raises HttpError."""
        if _THREAD in given:
            raise HttpError(
                400,
                f"{_THREAD} is {shown(given[_THREAD])}; no conversation is kept here: leave it "
                "out, and send the whole conversation in messages",
                _THREAD,
            )
        check_names(given, (*_OWN, *_SAME, *_IDLE), fixed=_FIXED)
        chat = {name: given[name] for name in _SAME if name in given}
        system = read_text(given.get("system", ""), "system")
        chat["messages"] = [{"role": "system", "content": system}] if system else []
        messages = take(given, "messages", list, [])
        for number, message in enumerate(messages):
            chat["messages"] += _messages(message, f"messages[{number}]")
        if messages and chat["messages"][-1]["role"] == "assistant":
            raise HttpError(
                400,
                f"messages[{len(messages) - 1}] is the assistant's; a reply that is begun by the "
                "request is not supported: end with a message of the user",
                "messages",
            )
        chat["tools"] = [_tool(*each) for each in enumerate(take(given, "tools", list, []))]
        if "tool_choice" in given:
            chat |= _tool_choice(given["tool_choice"])
        if "stop_sequences" in given:
            chat["stop"] = take(given, "stop_sequences", list, [])
        return chat | {"stream_options": {"include_usage": True}}

    def whole(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a whole answer of chat completions as a message."""
        reply = self._reply
        reply.push(answer)
        reply.flush()
        content: list[dict[str, Any]] = [{"type": "text", "text": reply.text}] if reply.text else []
        content += [_tool_use(call) for call in reply.calls]
        return {**self._message(), "content": content, **self._stop(), "usage": self._usage()}

    def events(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the events for a chunk of a streamed answer."""
        events, text = [], self._reply.push(chunk)
        if not self._has_begun:
            self._has_begun = True
            events.append({"type": "message_start", "message": self._message()})
        return [*events, *self._text(text)]

    def end(self) -> list[dict[str, Any]]:
        """Returns the events behind the last chunk."""
        reply = self._reply
        events = [*self._text(reply.flush())]
        if reply.text:
            events.append({"type": "content_block_stop", "index": 0})
        for number, call in enumerate(reply.calls, start=bool(reply.text)):
            block, place = {**_tool_use(call), "input": {}}, {"index": number}
            delta = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
            events += [
                {"type": "content_block_start", **place, "content_block": block},
                {"type": "content_block_delta", **place, "delta": delta},
                {"type": "content_block_stop", **place},
            ]
        ended = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return [*events, ended, {"type": "message_stop"}]

    def error(self, error: HttpError, *, is_event: bool) -> dict[str, Any]:
        """Returns an error: the body of an answer, or the last event of a streamed one."""
        kind = "invalid_request_error" if error.status < 500 else "api_error"
        words = error.words
        if error.param == "stop":
            words = words.replace("stop", "stop_sequences", 1)
        fields: dict[str, Any] = {"type": _ERRORS.get(error.status, kind), "message": words}
        if error.param == _THREAD:
            # By this code Anthropic's client goes on without one.
            fields["details"] = {"error_code": "thread_unsupported_request"}
        return {"type": "error", "error": fields}

    def _message(self) -> dict[str, Any]:
        """Returns the message before the reply. The tokens of its prompt are counted at the end."""
        facts = {k: v for k, v in self._reply.facts.items() if k != "created"}
        head = {"id": f"msg_{self._reply.id}", "type": "message", "role": "assistant", **facts}
        stop = {"stop_reason": None, "stop_sequence": None}
        return {**head, "content": [], **stop, "usage": self._usage()}

    def _stop(self) -> dict[str, Any]:
        reply = self._reply
        reason = _STOP_REASONS[reply.finish_reason]
        is_stopped = reason == "end_turn" and isinstance(reply.stop, str)
        return {
            "stop_reason": "stop_sequence" if is_stopped else reason,
            "stop_sequence": reply.stop if is_stopped else None,
        }

    def _usage(self) -> dict[str, int]:
        usage = self._reply.usage
        counts = {"input_tokens": usage["prompt_tokens"]}
        return counts | {"output_tokens": usage["completion_tokens"]}

    def _text(self, text: str) -> Iterator[dict[str, Any]]:
        """Yields the events of new text, before the first those that begin its block."""
        if text and text == self._reply.text:
            block = {"type": "text", "text": ""}
            yield {"type": "content_block_start", "index": 0, "content_block": block}
        if text:
            delta = {"type": "text_delta", "text": text}
            yield {"type": "content_block_delta", "index": 0, "delta": delta}


def _messages(given: Any, where: str) -> list[dict[str, Any]]:
    """Returns a message as those of chat completions: results of tools are messages there.

    Raises HttpError.
    """
    role = given.get("role") if isinstance(given, dict) else None
    if role not in ("user", "assistant", "system"):
        raise HttpError(
            400,
            f"{where} is {shown(given)}; it must be an object with a role (user, assistant, "
            "system) and a content",
            where,
        )
    check_names(given, ("role", "content"), f"{where}.", fixed={})
    content: Any = given.get("content")
    if role == "assistant" and is_list(content, dict):
        return [_assistant(content, f"{where}.content")]
    if role == "user" and is_list(content, dict):
        return list(_user(content, f"{where}.content"))
    return [{"role": role, "content": read_text(content, f"{where}.content")}]


def _assistant(blocks: Sequence[Any], where: str) -> dict[str, Any]:
    text, calls = "", []
    for number, block in enumerate(blocks):
        if block.get("type") == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input", {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            text += _text_of(block, f"{where}[{number}]", "tool_use")
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _user(blocks: Sequence[Any], where: str) -> Iterator[dict[str, Any]]:
    """Yields the results of tools and the texts between them, in their order."""
    texts = list[str]()
    for number, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            texts.append(_text_of(block, f"{where}[{number}]", "tool_result"))
            continue
        if texts:
            yield {"role": "user", "content": "".join(texts)}
        texts = []
        result = read_text(block.get("content") or "", f"{where}[{number}].content")
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
    if texts or not blocks:
        yield {"role": "user", "content": "".join(texts)}


def _text_of(block: Mapping[str, Any], where: str, beside: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise HttpError(
            400,
            f"{where} is {shown(block)}; the types of blocks that are supported are text and "
            f"{beside}",
            where,
        )
    return block["text"]


def _tool(number: int, given: Any) -> dict[str, Any]:
    """Returns a tool as chat completions describe it. Raises HttpError."""
    if (
        not isinstance(given, dict)
        or given.get("type") not in (None, "custom")
        or not isinstance(given.get("input_schema"), dict)
    ):
        raise HttpError(
            400,
            f"tools[{number}] is {shown(given)}; tools of the client alone are supported: "
            '{"name": ..., "description": ..., "input_schema": ...}',
            "tools",
        )
    open_names = [name for name in given if name not in _FIXED_OF_TOOL]
    check_names(given, open_names, f"tools[{number}].", fixed=_FIXED_OF_TOOL)
    fields = {name: value for name, value in given.items() if name not in _NOT_SHOWN}
    schema = fields.pop("input_schema")
    return function_tool({**fields, "parameters": schema})


def _tool_choice(given: Any) -> dict[str, Any]:
    """Returns the fields of chat completions for a tool_choice. Raises HttpError."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in ("tool", *_TOOL_CHOICES):
        raise HttpError(
            400,
            f"tool_choice is {shown(given)}; its type must be one of tool, "
            f"{', '.join(_TOOL_CHOICES)}",
            "tool_choice",
        )
    check_names(
        given,
        ("type", "name"),
        "tool_choice.",
        fixed={"disable_parallel_tool_use": (False,)},
    )
    named = {"type": "function", "function": {"name": given.get("name")}}
    return {"tool_choice": _TOOL_CHOICES.get(kind, named)}


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    use = {"type": "tool_use", "id": call["id"], "name": function["name"]}
    return {**use, "input": json.loads(function["arguments"])}
