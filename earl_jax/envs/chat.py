# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Messages to token ids and sampled ids to text; nothing is ever encoded twice."""

import functools
import itertools
from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

# Stand-ins for a message and a reply while the chat template is taken apart. A template that
# contains them itself is refused by the checks below.
_TEXT = "earl-observation"
_REPLY = "earl-reply"
_REPLACEMENT = "\ufffd"


class ChatRenderer:
    """Renders an environment's messages for a policy that continues a stream of token ids.

    An episode is `first(text)`, sampled ids up to `end_of_turn_id`, `answer(text)`, sampled ids and
    so on. With the tokenizer of `build_tokenizer` the ids equal those of its chat template applied
    to the whole conversation. The frame around a message comes from the chat template, its text is
    encoded on its own and never as control tokens.

    Raises ValueError for a tokenizer without chat template or end of turn, or whose template does
    not append turn by turn. For use by one thread at a time, as the tokenizer underneath.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer = tokenizer
        if not tokenizer.chat_template or tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer needs a chat template and an eos token (end of turn)")
        self.end_of_turn_id = _one_id(tokenizer.eos_token_id)
        self.pad_id = (
            self.end_of_turn_id
            if tokenizer.pad_token_id is None
            else _one_id(tokenizer.pad_token_id)
        )
        self._known_ids = frozenset(tokenizer.get_vocab().values())
        opening = self._template([("user", _TEXT)])
        later = self._template([("user", _TEXT), ("assistant", _REPLY), ("user", _TEXT)])
        end = str(tokenizer.eos_token)
        parts = later.split(_REPLY)
        if len(parts) != 2 or not parts[1].startswith(end):
            raise ValueError(
                f"the chat template does not end a policy turn with {end!r}: {later!r}"
            )
        self._first_frame = self._frame(opening)
        self._answer_frame = self._frame(parts[1].removeprefix(end))
        # Short games answer with few distinct texts: a hit costs 0.3 us, an encoding 17 us.
        self._encode_once = functools.lru_cache(maxsize=4096)(self._encode)

    def first(self, text: str) -> tuple[int, ...]:
        """Ids of the opening message, up to where the policy's reply begins.

        Raises ValueError for what is no text or cannot be encoded (a lone surrogate).
        """
        return self._render(self._first_frame, text)

    def answer(self, text: str) -> tuple[int, ...]:
        """Ids to append after a policy turn that ended with `end_of_turn_id`; raises as `first`."""
        return self._render(self._answer_frame, text)

    def reply(self, text: str) -> tuple[int, ...]:
        """Ids that a policy would sample to say `text`, end of turn included."""
        return (*self._encode_once(text), self.end_of_turn_id)

    def decode_reply(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn without its end of turn; never raises for any ids.

        Bytes that are no UTF-8 and ids that are no tokens (a model's vocabulary is often padded)
        become U+FFFD; special tokens stay visible. So a strict environment refuses them all.
        """
        ids = [int(token) for token in ids]
        if ids and ids[-1] == self.end_of_turn_id:
            ids.pop()
        return "".join(
            self._decode(list(run)) if known else _REPLACEMENT * len(list(run))
            for known, run in itertools.groupby(ids, key=self._known_ids.__contains__)
        )

    def _template(self, turns: Sequence[tuple[str, str]]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert isinstance(rendered, str)
        return rendered

    def _frame(self, rendered: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids before and after the message; here special tokens are what they say."""
        parts = rendered.split(_TEXT)
        if len(parts) != 2:
            raise ValueError(f"the chat template must contain a message once: {rendered!r}")
        before, after = (
            tuple(self._tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts
        )
        return before, after

    def _render(self, frame: tuple[tuple[int, ...], tuple[int, ...]], text: str) -> tuple[int, ...]:
        if not isinstance(text, str):
            raise ValueError(f"a message must be a str; got a {type(text).__name__}")
        before, after = frame
        return (*before, *self._encode_once(text), *after)

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a message cannot be encoded as UTF-8: {error}") from error
        # An environment that writes "<|end|>" gets seven characters, not the end of its turn.
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return tuple(encoded["input_ids"])

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def _one_id(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"a special token must have one id; the tokenizer gives {value!r}")
    return value
