# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The bodies of HTTP answers: OpenAI's completions and chat, and vLLM's answers in token ids."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from earl_jax.envs.text.stream import TextStream
from earl_jax.envs.tools.calls import ToolCallStream
from earl_jax.serving.reply import Piece, Token

FINISH = {
    "end_of_turn": "stop",
    "stop_string": "stop",
    "stop_token_id": "stop",
    "max_tokens": "length",
}


@dataclasses.dataclass
class Choice:
    """One reply of an answer, as far as it has come; `stop` is the stop string that ended it."""

    index: int
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop: str | None = None

    @property
    def text(self) -> str:
        """The text of the reply."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens, the end of turn included."""
        return sum(piece.token is not None for piece in self.pieces)


class Form(Protocol):
    """The form of an endpoint's answers: whole ones, and the parts of streamed ones."""

    prefix: str
    name: str
    part_name: str

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Returns a whole reply."""
        ...

    def begin(self, index: int) -> dict[str, Any] | None:
        """Returns the first part of a streamed reply; None where there is none."""
        ...

    def part(self, choice: Choice) -> dict[str, Any]:
        """Returns a part of a streamed reply: its new pieces, or its finish reason."""
        ...


class CompletionForm:
    """Answers of /v1/completions."""

    prefix, name, part_name = "cmpl-", "text_completion", "text_completion"

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        # Of replies with log-probs, by their index: their text so far, and its length.
        self._texts: dict[int, tuple[TextStream, int]] = {}

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Returns a whole reply."""
        return self.part(choice)

    def begin(self, index: int) -> None:
        """Returns None: there is nothing before the first text."""

    def part(self, choice: Choice) -> dict[str, Any]:
        """Returns the text of these pieces."""
        scores = _scores(choice.pieces, self._decode)
        logprobs = scores and {
            "tokens": [each["token"] for each in scores],
            "token_logprobs": [each["logprob"] for each in scores],
            "top_logprobs": None,
            "text_offset": self._offsets(choice),
            "model_logprobs": [each["model_logprob"] for each in scores],
        }
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop,
        }

    def _offsets(self, choice: Choice) -> list[int]:
        """Returns where in the reply's text each token begins; earlier parts count."""
        stream, length = self._texts.get(choice.index, (TextStream(self._decode), 0))
        offsets = []
        for token in _scored(choice.pieces):
            offsets.append(length)
            length += len(stream.push([token.id]))
        self._texts[choice.index] = stream, length
        return offsets


class ChatForm:
    """Answers of /v1/chat/completions; with `tools`, calls of these are taken out of texts.

    `opening` is the beginning of a call with which the prompt ends.
    """

    prefix, name, part_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        opening: str = "",
    ) -> None:
        self._decode, self._opening = decode, opening
        self._tools = {tool["function"]["name"]: tool for tool in tools}
        # Of streamed replies, by their index.
        self._calls: dict[int, ToolCallStream] = {}

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Returns a whole reply."""
        message: dict[str, Any] = {"role": "assistant", "content": choice.text}
        reason = choice.finish_reason
        if self._tools:
            stream = self._begun()
            text, calls = stream.push(choice.text)
            # With the opening, where what was begun is no call.
            message["content"] = text = text + stream.flush()
            if calls:
                message["content"] = text if text.strip() else None
                message["tool_calls"] = [
                    {name: call[name] for name in call if name != "index"} for call in calls
                ]
            reason = _finish(reason, stream)
        return self._with(choice, "message", message, reason)

    def begin(self, index: int) -> dict[str, Any]:
        """Returns the part that names the role."""
        return self._with(Choice(index), "delta", {"role": "assistant", "content": ""}, None)

    def part(self, choice: Choice) -> dict[str, Any]:
        """Returns the text of these pieces, or the finish reason, and calls that are complete."""
        delta, reason = {"content": choice.text} if choice.pieces else {}, choice.finish_reason
        if self._tools:
            stream = self._calls.setdefault(choice.index, self._begun())
            text, calls = stream.push(choice.text)
            text += stream.flush() if reason else ""
            delta = ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})
            reason = _finish(reason, stream)
        return self._with(choice, "delta", delta, reason)

    def _begun(self) -> ToolCallStream:
        stream = ToolCallStream(self._tools)
        stream.push(self._opening)
        return stream

    def _with(self, choice: Choice, field: str, value: Any, reason: str | None) -> dict[str, Any]:
        scores = _scores(choice.pieces, self._decode)
        return {
            "index": choice.index,
            field: value,
            "logprobs": scores and {"content": scores},
            "finish_reason": reason,
            "stop_reason": choice.stop,
        }


def has_news(part: dict[str, Any]) -> bool:
    """Returns whether a part of a streamed reply says anything."""
    delta = part.get("delta", {})
    return bool(part.get("text") or any(delta.values()) or part["logprobs"])


def _finish(reason: str | None, stream: ToolCallStream) -> str | None:
    """Returns the finish reason of a text with these calls."""
    return "tool_calls" if reason == "stop" and stream.count else reason


def generated(choice: Choice) -> dict[str, Any]:
    """Returns a reply of /inference/v1/generate: every sampled id, the end of turn included."""
    tokens = [piece.token for piece in choice.pieces if piece.token is not None]
    scored = [token for token in tokens if token.logprob is not None]
    content = [
        {
            "token": f"token_id:{token.id}",
            "logprob": token.logprob,
            "model_logprob": token.model_logprob,
            "top_logprobs": [],
        }
        for token in scored
    ]
    return {
        "index": choice.index,
        "token_ids": [token.id for token in tokens],
        "logprobs": {"content": content} if scored else None,
        "finish_reason": choice.finish_reason,
    }


def usage(num_prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, int]:
    """Returns the counts of tokens."""
    sampled = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": num_prompt_tokens + sampled,
    }


def _scores(
    pieces: Sequence[Piece], decode: Callable[[Sequence[int]], str]
) -> list[dict[str, Any]] | None:
    """Returns the log-probs of the tokens of a text; None where they are not wanted."""
    scores = []
    for token in _scored(pieces):
        text = decode([token.id])
        scores.append(
            {
                "token": text,
                "logprob": token.logprob,
                "model_logprob": token.model_logprob,
                # Unknown of a part of a character.
                "bytes": None if "\ufffd" in text else list(text.encode()),
                "top_logprobs": [],
            }
        )
    return scores or None


def _scored(pieces: Sequence[Piece]) -> list[Token]:
    """Returns the tokens of a text that have log-probs."""
    tokens = (piece.token for piece in pieces if not piece.is_end)
    return [token for token in tokens if token is not None and token.logprob is not None]
