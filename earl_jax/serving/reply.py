# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One reply to a request: its tokens as they come, as pieces of text until something ends it."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from typing import NamedTuple

from earl_jax.envs.text.stream import StopStrings, TextStream
from earl_jax.serving.requests import RequestOptions


class Token(NamedTuple):
    """A sampled token, and its log-probs as it was drawn and under the model, if wanted."""

    id: int
    logprob: float | None = None
    model_logprob: float | None = None


class Piece(NamedTuple):
    """A part of a reply: a token with the text that it completes, or the last text alone.

    `is_end`: the token ended the reply and has no text: an end of turn, or a stop token id.
    """

    text: str
    token: Token | None = None
    is_end: bool = False


class Reply:
    """One reply: its `pieces`, then its `finish_reason`, then the number of tokens in `count`.

    The reason is end_of_turn, max_tokens, stop_string or stop_token_id.
    """

    def __init__(
        self,
        tokens: AsyncIterator[Sequence[Token]],
        max_tokens: int,
        options: RequestOptions,
        decode: Callable[[Sequence[int]], str],
        ends: Collection[int],
        *,
        is_text: bool,
    ) -> None:
        """Begins a reply, which each of `ends` ends.

        If not `is_text` it is of ids alone, which text may only stop.
        """
        self.finish_reason, self.count = "", 0
        self._ends = ends
        self._tokens, self._max_tokens, self._options = tokens, max_tokens, options
        self._is_text = is_text
        self._stops = StopStrings(options.stop_strings)
        # Ids need text only where a stop string may end them.
        self._stream = TextStream(decode) if is_text or options.stop_strings else None

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """Yields the pieces of the reply, those of a round together.

        Raises RequestError where it fails.
        """
        async for tokens in self._tokens:
            pieces = []
            for token in tokens:
                pieces.append(self._take(token))
                if self.finish_reason:
                    break
            self.count += len(pieces)
            yield pieces
            if self.finish_reason:
                break
        if rest := self._flush():
            yield [Piece(rest)]
        self.finish_reason = self.finish_reason or (
            "max_tokens" if self.count >= self._max_tokens else "end_of_turn"
        )

    @property
    def stop(self) -> str | None:
        """The stop string that ended the reply."""
        return self._stops.found

    def _take(self, token: Token) -> Piece:
        if token.id in self._ends:
            self.finish_reason = "end_of_turn"
            return Piece("", token, is_end=True)
        if token.id in self._options.stop_token_ids:
            self.finish_reason = "stop_token_id"
            return Piece("", token, is_end=True)
        text = "" if self._stream is None else self._until_stop(self._stream.push([token.id]))
        return Piece(text, token)

    def _flush(self) -> str:
        """Returns the text that was held back, at the end of the reply."""
        if self._stream is None or self._stops.found is not None:
            return ""
        return self._until_stop(self._stream.flush()) + (
            self._stops.flush() if self._is_text else ""
        )

    def _until_stop(self, text: str) -> str:
        text = self._stops.push(text)
        if self._stops.found is not None:
            self.finish_reason = "stop_string"
        return text if self._is_text else ""
