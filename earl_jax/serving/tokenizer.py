# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a served policy: text of ids, replies as ids, and the ends of a reply."""

import functools
from collections.abc import Sequence
from typing import Any

from earl_jax.envs.text.codec import TextCodec


class ServedTokenizer:
    """A `transformers` tokenizer as serving uses it; each of `end_ids` ends a reply."""

    def __init__(self, tokenizer: Any, end_ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._end_ids = tokenizer, tuple(end_ids)
        self._codec = TextCodec(tokenizer)

    @property
    def chat_template(self) -> str:
        """The chat template, "" where there is none."""
        return str(self._tokenizer.chat_template or "")

    def reply_ids(self, text: str) -> tuple[int, ...]:
        """Returns the ids of a whole reply of this text, as the tokenizer writes it behind text."""
        end = self._end_ids[0] if self._end_ids else self._tokenizer.eos_token_id
        ends = () if end is None else (end,)
        return (*self._codec.encode_reply(text), *ends)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of any ids.

        Control tokens are visible; bytes that are no UTF-8, and ids that are no tokens (a model's
        vocabulary is often padded), become U+FFFD.
        """
        return self._codec.decode(token_ids)

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """The most bytes of text that one token stands for."""
        longest = 1
        # A vocabulary writes a token in at least as many bytes as its text has.
        for token, number in sorted(
            self._tokenizer.get_vocab().items(), key=lambda t: -len(t[0].encode())
        ):
            if len(token.encode()) <= longest:
                break
            longest = max(longest, len(self.decode([number]).encode()))
        return longest

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a reply: the ends of turn, of a text, and the padding."""
        ends = {*self._end_ids, self._tokenizer.eos_token_id, self._tokenizer.pad_token_id}
        return frozenset(token for token in ends if token is not None)
