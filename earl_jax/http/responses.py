# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""OpenAI's /v1/responses, translated to and from chat completions. Nothing is stored."""

import re
import uuid
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
    read_text,
    shown,
    take,
)
from earl_jax.http.server import HttpError

# Fields that chat completions have too, and fields without an effect on the reply.
_SAME = ("model", "stream", "user", "parallel_tool_calls", "stop", "chat_template_kwargs")
_SAME += (STRUCTURED, *DRAWN, *IDS)
_IDLE = ("metadata", "service_tier", "safety_identifier", "prompt_cache_key")
_IDLE += ("prompt_cache_options", "prompt_cache_retention")
_OWN = ("input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream_options")
# Fields of which only these values are supported.
_FIXED: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "store": (False,),
        "background": (False,),
        "truncation": ("disabled",),
        "text": ({"format": {"type": "text"}}, {}),
        "reasoning": ({},),
        "include": ([], ["reasoning.encrypted_content"]),
        "top_logprobs": (0,),
    }
)
_ITEM = ("type", "id", "status")
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")


class Responses:
    """A request, and its answer."""

    def __init__(self) -> None:
        """Begins before the request is read."""
        self._given: dict[str, Any] = {}
        self._reply = ChatReply()
        self._message_id = _new_id("msg")
        # Of the next event.
        self._number = 0

    def to_chat(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the request in the form of chat completions. Raises HttpError."""
        for name in ("previous_response_id", "conversation"):
            if name in given:
                raise HttpError(
                    400,
                    f"{name} is {shown(given[name])}; no conversation is kept here: leave it out, "
                    "and send the whole conversation in input",
                    name,
                )
        check_names(given, (*_OWN, *_SAME, *_IDLE), fixed=_FIXED)
        options = take(given, "stream_options", dict, {})
        check_names(options, ("include_obfuscation",), "stream_options.", fixed={})
        self._given = dict(given)
        chat = {name: given[name] for name in _SAME if name in given}
        if instructions := take(given, "instructions", str, ""):
            chat["messages"] = [{"role": "system", "content": instructions}]
        chat["messages"] = [*chat.get("messages", ()), *_messages(given.get("input"))]
        chat["tools"] = [_tool(*each) for each in enumerate(take(given, "tools", list, []))]
        if "tool_choice" in given:
            chat["tool_choice"] = _tool_choice(given["tool_choice"])
        if "max_output_tokens" in given:
            chat["max_tokens"] = take(given, "max_output_tokens", int, None)
        return chat | {"stream_options": {"include_usage": True}}

    def whole(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a whole answer of chat completions as a response."""
        self._reply.push(answer)
        self._reply.flush()
        return self._response(self._output())

    def events(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the events for a chunk of a streamed answer."""
        return [*self._begin(chunk), *self._text(self._reply.push(chunk))]

    def end(self) -> list[dict[str, Any]]:
        """Returns the events behind the last chunk."""
        events = [*self._text(self._reply.flush())]
        output = self._output()
        for number, item in enumerate(output):
            if item["type"] == "message":
                events += self._end_text(number, item)
            else:
                events += self._call(number, item)
            events.append(self._event("output_item.done", output_index=number, item=item))
        response = self._response(output)
        return [*events, self._event(response["status"], response=response)]

    def error(self, error: HttpError, *, is_event: bool) -> dict[str, Any]:
        """Returns an error: the body of an answer, or the last event of a streamed one."""
        words = re.sub(r"\bmax_tokens\b", "max_output_tokens", error.words)
        param = "max_output_tokens" if error.param == "max_tokens" else error.param
        body = HttpError(error.status, words, param).body()
        if not is_event:
            return body
        fields = {"code": body["error"]["type"], "message": words, "param": param}
        return {"type": "error", "sequence_number": self._number, **fields}

    # Events.

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _begin(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if not self._number:
            self._reply.push({**chunk, "choices": []})
            response = self._response([], "in_progress")
            yield self._event("created", response=response)
            yield self._event("in_progress", response=response)

    def _text(self, text: str) -> Iterator[dict[str, Any]]:
        """Yields the events of new text, before the first those that begin the message."""
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        if text and text == self._reply.text:
            yield self._begin_item(0, {**self._message("in_progress"), "content": []})
            yield self._event("content_part.added", **place, part=_part(""))
        if text:
            yield self._event("output_text.delta", **place, delta=text, logprobs=[])

    def _end_text(self, number: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        [part] = item["content"]
        place = {"item_id": item["id"], "output_index": number, "content_index": 0}
        if not part["text"]:
            yield self._begin_item(number, {**item, "content": [], "status": "in_progress"})
            yield self._event("content_part.added", **place, part=part)
        yield self._event("output_text.done", **place, text=part["text"], logprobs=[])
        yield self._event("content_part.done", **place, part=part)

    def _call(self, number: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        place, arguments = {"item_id": item["id"], "output_index": number}, item["arguments"]
        yield self._begin_item(number, {**item, "arguments": "", "status": "in_progress"})
        yield self._event("function_call_arguments.delta", **place, delta=arguments)
        done = {"name": item["name"], "arguments": arguments}
        yield self._event("function_call_arguments.done", **place, **done)

    def _begin_item(self, number: int, item: Mapping[str, Any]) -> dict[str, Any]:
        return self._event("output_item.added", output_index=number, item=item)

    # The response.

    def _output(self) -> list[dict[str, Any]]:
        """Returns the items of the reply: a message, and the calls."""
        status = "incomplete" if self._reply.finish_reason == "length" else "completed"
        has_text = self._reply.text or not self._reply.calls
        items = [self._message(status)] if has_text else []
        for call in self._reply.calls:
            item = {"type": "function_call", "id": _new_id("fc"), "call_id": call["id"]}
            items.append({**item, **call["function"], "status": "completed"})
        return items

    def _message(self, status: str) -> dict[str, Any]:
        head = {"type": "message", "id": self._message_id, "status": status, "role": "assistant"}
        return {**head, "content": [_part(self._reply.text)]}

    def _response(self, output: Sequence[Any], status: str = "") -> dict[str, Any]:
        given, usage = self._given, self._reply.usage
        is_cut = self._reply.finish_reason == "length"
        status = status or ("incomplete" if is_cut else "completed")
        facts = dict(self._reply.facts)
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        echoed = ("instructions", "max_output_tokens", "temperature", "top_p", "user")
        return {
            "id": f"resp_{self._reply.id}",
            "object": "response",
            "created_at": facts.pop("created", None),
            "status": status,
            **facts,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": None if status == "in_progress" else counts,
            **{name: given.get(name) for name in echoed},
            "metadata": given.get("metadata", {}),
            "tools": given.get("tools", []),
            "tool_choice": given.get("tool_choice", "auto"),
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
        }


def _messages(given: Any) -> list[dict[str, Any]]:
    """Returns a request's input as messages. Raises HttpError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise HttpError(
            400, f"input is {shown(given)}; it must be a text or a list of items", "input"
        )
    messages = list[dict[str, Any]]()
    for number, each in enumerate(given):
        where = f"input[{number}]"
        item = {k: v for k, v in each.items() if v is not None} if isinstance(each, dict) else {}
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            _add_message(messages, item, f"{where}.")
        elif kind == "function_call":
            _add_call(messages, item, f"{where}.")
        elif kind == "function_call_output":
            check_names(item, (*_ITEM, "call_id", "output"), f"{where}.", fixed={})
            content = read_text(item.get("output"), f"{where}.output", _TEXTS)
            call_id = _required(item, "call_id", f"{where}.")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            raise HttpError(
                400,
                f"{where} is {shown(each)}; the types of items that are supported are message, "
                "function_call and function_call_output",
                where,
            )
    return messages


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    check_names(item, (*_ITEM, "role", "content", "phase"), where, fixed={})
    role = item.get("role")
    if role not in _ROLES:
        raise HttpError(
            400, f"{where}role is {shown(role)}; it must be one of {', '.join(_ROLES)}", where
        )
    content = read_text(item.get("content"), f"{where}content", _TEXTS)
    if role == "assistant" and _is_reply(messages) and messages[-1]["content"] is None:
        messages[-1]["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Adds a call to the reply whose text is before it."""
    check_names(item, (*_ITEM, "call_id", "name", "arguments"), where, fixed={})
    if not _is_reply(messages):
        messages.append({"role": "assistant", "content": None})
    names = ("name", "arguments")
    function = {name: _required(item, name, where) for name in names}
    call = {"id": _required(item, "call_id", where), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _is_reply(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether the last message is a reply."""
    return bool(messages) and messages[-1]["role"] == "assistant"


def _required(item: Mapping[str, Any], name: str, where: str) -> str:
    if name not in item:
        raise HttpError(400, f"{where}{name} is missing; it must be a text", where + name)
    return take(item, name, str, "", where)


def _tool(number: int, given: Any) -> dict[str, Any]:
    """Returns a function as chat completions describe it. Raises HttpError."""
    if not isinstance(given, dict) or given.get("type") != "function" or "name" not in given:
        raise HttpError(
            400,
            f"tools[{number}] is {shown(given)}; tools of the type function alone are supported: "
            '{"type": "function", "name": ..., "parameters": ...}',
            "tools",
        )
    return function_tool({name: value for name, value in given.items() if name != "type"})


def _tool_choice(given: Any) -> Any:
    if isinstance(given, dict) and given.keys() == {"type", "name"}:
        return {"type": given["type"], "function": {"name": given["name"]}}
    return given


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
