# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of tools in a policy's text, in the formats of known chat templates.

Qwen's and Hermes':

    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>

and, between the same tags, that of Qwen3-Coder and Qwen3.5, whose arguments are texts:

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

Llama 3's, which is the whole reply: {"name": "add", "parameters": {"a": 1}}

Mistral's: [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "a1b2c3d4e"}]
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_LLAMA = "<|python_tag|>"


class Call(NamedTuple):
    """A call of a tool as the policy wrote it; `call_id` is "" where the format has none.

    `error` says why the text is no call, "" where it is one. With `is_texts` the arguments are
    texts, which the types in the tool's description tell how to read (`typed`).
    """

    name: str = ""
    arguments: Mapping[str, Any] = MappingProxyType({})
    call_id: str = ""
    error: str = ""
    is_texts: bool = False


def hermes_calls(text: str) -> list[Call]:
    """Returns the calls between <tool_call> and </tool_call>; one that is not closed is an error.

    Text around them is none: <think>...</think>, or words to the user.
    """
    calls = list[Call]()
    _, *parts = text.split(OPEN)
    for part in parts:
        inside, closed, _ = part.partition(CLOSE)
        call = _call_of(inside) if closed else Call(error=f"the call has no {CLOSE}")
        calls.append(call._replace(call_id=""))
    return calls


def llama3_calls(text: str) -> list[Call]:
    """Returns the call that a reply is, if it is a JSON object with "name" and "parameters".

    One that begins as a call, with "name" or <|python_tag|>, and is none is an error.
    """
    text = text.strip()
    inside = text.removeprefix(_LLAMA)
    begins = inside != text or re.match(r'\{\s*"name"', inside) is not None
    try:
        given = json.loads(inside)
    except (ValueError, RecursionError) as error:
        return [Call(error=f"the call is no JSON: {error}")] if begins else []
    if not isinstance(given, dict) or not {"name", "parameters"} <= given.keys():
        why = 'a call must be a JSON object with "name" and "parameters", alone in its reply'
        return [Call(error=why)] if begins else []
    return [_call_from(given, "parameters")]


def mistral_calls(text: str) -> list[Call]:
    """Returns the calls of the JSON list behind [TOOL_CALLS].

    The template takes ids of nine letters and digits; a call without one has zeros.
    """
    _, found, behind = text.partition(_MISTRAL)
    if not found:
        return []
    try:
        given = json.loads(behind)
    except (ValueError, RecursionError) as error:
        return [_with_id(Call(error=f"what follows {_MISTRAL} is no JSON: {error}"))]
    if not isinstance(given, list) or not given:
        return [_with_id(Call(error=f"what follows {_MISTRAL} must be a JSON list of calls"))]
    return [_with_id(_call_from(each)) for each in given]


def _with_id(call: Call) -> Call:
    is_id = re.fullmatch("[a-zA-Z0-9]{9}", call.call_id)
    return call if is_id else call._replace(call_id="0" * 9)


# The calls in a reply, by the name of the format.
CALL_FORMATS: dict[str, Callable[[str], list[Call]]] = {
    "hermes": hermes_calls,
    "llama3": llama3_calls,
    "mistral": mistral_calls,
}


def text_beside(text: str) -> str:
    """Returns the text of a reply beside its calls, in any of these formats; "" where it is blank.

    Of a reply with calls in another format it is "".
    """
    if OPEN in text:
        before, *parts = text.split(OPEN)
        text = before + "".join(part.partition(CLOSE)[2] for part in parts)
    else:
        before, found, _ = text.partition(_MISTRAL)
        text = before if found else ""
    return text if text.strip() else ""


def call_opening(template: str, name: str) -> str:
    """Returns the text with which a chat template's calls of a tool begin, those of any if "".

    It is "" for a template that does not write calls between <tool_call> and </tool_call>.
    """
    if OPEN not in template:
        return ""
    if not name:
        return f"{OPEN}\n"
    if "<function=" in template:
        return f"{OPEN}\n<function={name}>\n"
    return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments":'


def _call_of(text: str) -> Call:
    if (function := _FUNCTION.fullmatch(text)) is not None:
        name, inside = function.groups()
        arguments = dict(_PARAMETER.findall(inside))
        if _PARAMETER.sub("", inside).strip():
            return Call(error="between <parameter=NAME> ... </parameter> there is other text")
        return Call(name, arguments, is_texts=True)
    try:
        return _call_from(json.loads(text))
    except (ValueError, RecursionError) as error:
        return Call(error=f"the call is no JSON: {error}")


def _call_from(given: Any, key: str = "arguments") -> Call:
    """Returns the call that a JSON value is; arguments may be the JSON of an object as a text."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return Call(error='a call must be a JSON object with a "name"')
    arguments = given.get(key, {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return Call(error=f'"{key}" is no JSON: {error}')
    if not isinstance(arguments, dict):
        return Call(error=f'"{key}" must be a JSON object')
    call_id = given.get("id")
    return Call(given["name"], arguments, call_id if isinstance(call_id, str) else "")


def typed(call: Call, description: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns a call's arguments; those that are texts as their types in a tool's description say.

    A text stays one where the description allows a text, or says nothing of the argument, and where
    it is no JSON.
    """
    schema = (description or {}).get("function", {}).get("parameters")
    known = schema.get("properties") if isinstance(schema, Mapping) else None
    if not call.is_texts or not isinstance(known, Mapping):
        return call.arguments
    return {name: _typed(text, known.get(name)) for name, text in call.arguments.items()}


def _typed(text: Any, schema: Any) -> Any:
    if not isinstance(schema, Mapping) or '"string"' in json.dumps(schema, default=str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class ToolCallStream:
    """Takes the calls out of a text that comes in parts. `count` is their number.

    What looks like a call and is none (no JSON, no name) stays text. `tools` are descriptions, by
    name, of those that may be called.
    """

    def __init__(self, tools: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Begins before the text."""
        self.count, self._held, self._tools = 0, "", tools

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Returns the text that is certainly outside of calls, and the calls that are complete."""
        self._held += text
        if self._held.startswith(OPEN) and ">" not in text:
            return "", []  # a long call is not searched again for each of its tokens
        outside, calls = "", []
        while True:
            before, opened, behind = self._held.partition(OPEN)
            if not opened:
                kept = _possible_start(before)
                self._held = before[len(before) - kept :]
                return outside + before[: len(before) - kept], calls
            inside, closed, rest = behind.partition(CLOSE)
            outside += before
            if not closed:
                self._held = opened + behind
                return outside, calls
            call = _read_call(inside, self.count, self._tools)
            if call is None:
                outside += opened + inside + closed
            else:
                self.count += 1
                calls.append(call)
            self._held = rest

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the reply."""
        text, self._held = self._held, ""
        return text


def _possible_start(text: str) -> int:
    """Returns the length of the text's end with which OPEN may begin."""
    return max(n for n in range(len(OPEN)) if OPEN.startswith(text[len(text) - n :] if n else ""))


def _read_call(text: str, index: int, tools: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a call in OpenAI's form; None for a text that is none."""
    call = _call_of(text)
    if call.error:
        return None
    return {
        "index": index,
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {
            "name": call.name,
            "arguments": json.dumps(typed(call, tools.get(call.name)), ensure_ascii=False),
        },
    }
