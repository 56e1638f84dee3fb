# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of tools in a policy's text, as Qwen's and Hermes' templates have it.

<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
"""

import json
import uuid
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCallStream:
    """Takes the calls out of a text that comes in parts. `count` is their number.

    What looks like a call and is none (no JSON, no name) stays text.
    """

    def __init__(self) -> None:
        """Begins before the text."""
        self.count, self._held = 0, ""

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
            call = _read_call(inside, self.count)
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


def _read_call(text: str, index: int) -> dict[str, Any] | None:
    """Returns a call in OpenAI's form; None for a text that is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "index": index,
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }
