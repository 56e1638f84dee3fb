# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Incremental decoding of a stream of ids: text in whole characters, and stop strings."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most three of them can be a beginning.
_UNFINISHED = 3
_WINDOW = 16


class TextStream:
    """Decodes a stream of ids piece by piece.

    The pieces of `push` and at last `flush` together are `decode` of all ids, and later ids change
    no character of an earlier piece: a character whose bytes are split over tokens is held back
    until it is whole, three bytes at most. Exact for vocabularies of bytes, and for those that fall
    back to bytes, as `TextCodec.decode` decodes them.

    Example: "é" in two tokens, then "!": push gives "", then "é", then "!".
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        """Begins an empty stream; `decode` as of `ChatRenderer`, with U+FFFD for invalid bytes."""
        self._decode = decode
        # The last ids, and how many characters of their text were returned.
        self._ids: list[int] = []
        self._given = 0

    def push(self, ids: Sequence[int]) -> str:
        """Returns the characters that these ids complete."""
        return "".join(self._push(int(token)) for token in ids)

    def flush(self) -> str:
        """Returns the remaining text at the end; U+FFFD for an unfinished character."""
        text = self._decode(self._ids)[self._given :]
        self._ids, self._given = [], 0
        return text

    def _push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        settled = len(text)
        while settled and text[settled - 1] == _REPLACEMENT and len(text) - settled < _UNFINISHED:
            settled -= 1
        settled = max(settled, self._given)
        piece, self._given = text[self._given : settled], settled
        if settled == len(text):
            # The last id stays: some vocabularies decode the first id of a text differently.
            self._ids = [token]
            self._given = len(self._decode(self._ids))
        elif len(self._ids) > _WINDOW:
            self._shorten(text)
        return piece

    def _shorten(self, text: str) -> None:
        """Drops ids whose text was returned, at a position that splits no character."""
        for kept in range(_UNFINISHED + 1, _WINDOW):
            front, back = self._decode(self._ids[:-kept]), self._decode(self._ids[-kept:])
            if front + back == text and len(front) <= self._given:
                self._ids = self._ids[-kept:]
                self._given -= len(front)
                return


class StopStrings:
    """Lets a text through piece by piece, up to the first of some strings.

    The first string is the one that is complete first; of those that end at the same position, the
    longest. The result does not depend on the pieces: text that may be the beginning of a stop
    string is held back until more text decides it.

    Example: until "END", "aE", "Nb" and "cEND" give "a", "ENb" and "c".
    """

    def __init__(self, strings: Sequence[str]):
        """Begins a stream; no string in `strings` may be empty. Without strings all text passes."""
        self._strings = tuple(strings)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that this piece releases; "" once a stop string was found."""
        if self.found is not None:
            return ""
        text = self._held + text
        starts = ((text.find(string), string) for string in self._strings)
        ends = [(start + len(string), start, string) for start, string in starts if start >= 0]
        if ends:
            _, start, self.found = min(ends)
            self._held = ""
            return text[:start]
        held = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Returns the text held back at the end: the beginning of an incomplete stop string."""
        text, self._held = self._held, ""
        return text


class StopWatch:
    """Watches a stream of ids, one by one, for the first of some strings.

    The result does not depend on the number of ids in a call.

    Example: until "END", the ids of "aE", "ND!" and "b": `push` counts two of three, `text` is "a".
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], strings: Sequence[str]):
        """Begins a stream; `decode` as for `TextStream`, `strings` as for `StopStrings`."""
        self._stream, self._stops = TextStream(decode), StopStrings(strings)
        self.text = ""

    @property
    def found(self) -> bool:
        """True if one of the strings was found; `text` is then all text before it."""
        return self._stops.found is not None

    def push(self, ids: Sequence[int]) -> int:
        """Returns the number of ids until one of the strings is complete; all if none is."""
        for number, token in enumerate(ids):
            if self.found:
                return number
            self.text += self._stops.push(self._stream.push([token]))
        return len(ids)


def _overlap(text: str, string: str) -> int:
    """Returns the length of the longest end of `text` that is a proper beginning of `string`."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
