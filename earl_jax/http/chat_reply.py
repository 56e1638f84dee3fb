# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The reply in an answer of chat completions, for the APIs that it is translated to."""

from collections.abc import Mapping
from typing import Any


class ChatReply:
    """A reply that comes whole or in chunks: its text, then its calls.

    Text that follows calls goes before them, and blank text beside calls is none: so a streamed
    reply has the parts of a whole one. `facts` are what the answer says of itself, `id` is its own
    without the prefix.
    """

    def __init__(self) -> None:
        """Begins without text."""
        self.text, self._blank = "", ""
        self.calls: list[Mapping[str, Any]] = []
        self.finish_reason, self.stop = "stop", None
        self.usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        self.facts: dict[str, Any] = {}
        self.id = ""

    def push(self, chunk: Mapping[str, Any]) -> str:
        """Takes a chunk, or a whole answer. Returns the text that is new."""
        names = ("created", "model", "policy_version")
        self.facts = {name: chunk[name] for name in names if name in chunk}
        self.id = chunk["id"].removeprefix("chatcmpl-")
        self.usage = chunk.get("usage") or self.usage
        text = self._blank
        for choice in chunk["choices"]:
            message = choice["message"] if "message" in choice else choice["delta"]
            text += message.get("content") or ""
            self.calls += message.get("tool_calls") or ()
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.stop = choice.get("stop_reason") or self.stop
        is_blank = not (self.text or text.strip())
        self._blank = text if is_blank else ""
        return self._add("" if is_blank else text)

    def flush(self) -> str:
        """Returns the text that was held back, at the end."""
        return self._add("" if self.calls else self._blank)

    def _add(self, text: str) -> str:
        self.text += text
        return text
