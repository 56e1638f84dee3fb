# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Messages to token ids and sampled ids to text; nothing is ever encoded twice."""

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from earl_jax.envs.text.chat_template import (
    PROBE,
    ChatTemplate,
    Content,
    Frame,
    Kind,
    Place,
    messages_of,
)
from earl_jax.envs.text.codec import TextCodec
from earl_jax.envs.tools.calls import call_opening
from earl_jax.settings.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_logger = logging.getLogger(__name__)

# Texts up to this long are cached with their ids; longer ones are rarely repeated.
_SHORT = 1024
_PRINTABLE = "".join(map(chr, range(33, 127)))
_ONE_USER = Place(kinds=(Kind("user"),))


@dataclasses.dataclass(frozen=True)
class Opening:
    """The messages that opened an episode, and their texts as the template shows them.

    Without texts they are unknown, which matters only to templates that repeat them.
    """

    place: Place = _ONE_USER
    texts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendered:
    """Messages rendered by the template, as text and as ids; `shown` are their own texts."""

    text: str
    ids: tuple[int, ...]
    shown: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Part:
    """Template text between two messages: plain text, ids with control tokens, plain text."""

    head: str
    control: tuple[int, ...]
    tail: str


class ChatRenderer:
    """Renders an environment's messages for a policy that continues a stream of token ids.

    An episode is `first(content)`, sampled ids up to one of `end_of_turn_ids`, `answer(content)`,
    sampled ids and so on: ids are only ever appended. The text around a message comes from the chat
    template; its text, as the template shows it (some trim or quote), is never taken for control
    tokens. `answer` gives what the template writes behind a policy's turn that follows the opening.
    So the stream is the template's text of the whole conversation, wherever the template keeps its
    prefix; one that rewrites earlier turns is named in the log, once.

    Ids are those that the tokenizer gives to the template's whole text (where no message names a
    control token), cut at the policy's turns: text between two control tokens is encoded as one.
    They preserve the text up to `TextCodec.kept`: canonical equivalence with a tokenizer that
    composes characters (Qwen), U+2581 for a blank with SentencePiece's (Gemma, Mistral).

    A turn may end with the template's own token (`end_of_turn_id`), the tokenizer's eos, or one of
    `end_ids`. Any number of threads may use a renderer.

    The template is given `template_arguments` too, the same for every message.

    Raises ValueError for a tokenizer without chat template, that changes text in any other way, or
    whose template does not end the policy's turns or does not read one of the arguments.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        end_ids: Sequence[int] = (),
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
    ):
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, template_arguments)
        self._codec = TextCodec(tokenizer)
        self.end_of_turn_id = _one_id(tokenizer.convert_tokens_to_ids(self._template.end))
        eos = [] if tokenizer.eos_token_id is None else [_one_id(tokenizer.eos_token_id)]
        self.end_of_turn_ids = tuple(dict.fromkeys((self.end_of_turn_id, *eos, *end_ids)))
        self.pad_id = (
            self.end_of_turn_id
            if tokenizer.pad_token_id is None
            else _one_id(tokenizer.pad_token_id)
        )
        # Games answer with few distinct texts: a hit costs 1 us, an answer anew 60 us.
        self._kept_ids = functools.lru_cache(maxsize=4096)(self._encode)
        self._kept_reply = functools.lru_cache(maxsize=4096)(self._reply)
        self._kept_answer = functools.lru_cache(maxsize=4096)(self._answer_any_opening)
        self._around = functools.lru_cache(maxsize=256)(self._around_at)
        self._checked = functools.lru_cache(maxsize=256)(self._check_opening)
        self._broken: set[str] = set()
        self._check_codec(self.render_opening(self.opening(PROBE)))

    def opening(self, content: Content, tools: Sequence[Mapping[str, Any]] = ()) -> Opening:
        """Returns the opening of an episode with these messages and tools for the policy.

        Raises ValueError for content that is not text, and for messages or tools that the chat
        template refuses.
        """
        place = _ONE_USER
        if tools or not isinstance(content, str):
            place = Place.of(messages_of(content), json.dumps(list(tools), ensure_ascii=False))
        self._checked(place)
        return Opening(place, self.shown(place, content))

    def first(self, content: Content, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Returns the ids of the opening messages, up to the start of the policy's reply.

        Raises ValueError as `opening`, and for text that cannot be encoded (a lone surrogate).
        """
        return self.render_opening(self.opening(content, tools)).ids

    def answer(self, content: Content, opening: Opening = Opening()) -> tuple[int, ...]:  # noqa: B008
        """Returns the ids to append after a policy turn that ended with one of `end_of_turn_ids`.

        `opening` is the opening of the episode. Raises as `first`.
        """
        return self.render_answer(content, opening).ids

    def render_opening(self, opening: Opening) -> Rendered:
        """Renders the opening messages; `first` returns the ids of the result."""
        frame = self._template.frame(opening.place)
        texts = frame.filled(opening.texts)
        return self._join(frame, self._around(opening.place), texts, opening.texts)

    def render_answer(self, content: Content, opening: Opening) -> Rendered:
        """Renders an answer to a policy turn; `answer` returns the ids of the result."""
        if isinstance(content, str) and len(content) <= _SHORT:
            kept = self._kept_answer(content, opening.place)
            if kept is not None:
                return kept
        place = Place.of(messages_of(content), opening=opening.place)
        frame, shown = self._template.frame(place), self.shown(place, content)
        if not opening.texts and min(frame.slots, default=0) < 0:
            raise InputError(
                "the chat template says again how the conversation began; give `answer` its opening"
            )
        texts = frame.filled(shown, opening.texts)
        return self._join(frame, self._around(place), texts, shown)

    def render_whole(self, conversation: Sequence[tuple[Kind | None, str]], tools: str) -> Rendered:
        """Renders a whole conversation that the policy is to continue.

        Each entry is an environment's message and its text as `shown`, or None and the text of a
        turn of the policy. The policy's turns are encoded as the template writes them, control
        tokens included.

        Raises TemplateRefusal.
        """
        frame = self._template.whole(conversation, tools)
        shown = tuple(text for kind, text in conversation if kind is not None)
        around = tuple(map(self._part, frame.pieces))
        return self._join(frame, around, frame.filled(shown), shown)

    def call_opening(self, name: str) -> str:
        """Returns the text with which calls of a tool begin (`tools.calls.call_opening`)."""
        return call_opening(str(self._tokenizer.chat_template), name)

    def beginning(self, text: str) -> tuple[int, ...]:
        """Returns the ids of the beginning of a policy turn, in which control tokens are such."""
        return self._codec.encode_control(text)

    def reply(self, text: str) -> tuple[int, ...]:
        """Returns the ids of a policy turn with this text, end of turn included."""
        return self._kept_reply(text) if len(text) <= _SHORT else self._reply(text)

    def reply_with_calls(
        self, content: str, calls: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...]:
        """Returns the ids of a policy turn that calls tools, as the chat template writes it.

        Control tokens are those of the template. Raises as `ChatTemplate.with_calls`.
        """
        described = json.dumps(list(tools), ensure_ascii=False)
        text = self._template.with_calls(content, calls, described)
        _check_utf8(text)
        return (*self._codec.encode_reply(text), self.end_of_turn_id)

    def ends_turn(self, ids: Sequence[int]) -> bool:
        """Returns True if the last id is an end of turn."""
        return len(ids) > 0 and int(ids[-1]) in self.end_of_turn_ids

    def decode_reply(self, ids: Sequence[int]) -> str:
        """Returns the text of a sampled turn without its end of turn; never raises.

        Invalid UTF-8 and ids that are no tokens (a model's vocabulary is often padded) become
        U+FFFD; special tokens stay visible. So a strict environment refuses them all.
        """
        return self.decode(ids[:-1] if self.ends_turn(ids) else ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of these ids; never raises, see `decode_reply`."""
        return self._codec.decode(ids)

    @property
    def longest_token(self) -> int:
        """The most characters that a token stands for."""
        return self._codec.longest_token

    def kept(self, text: str) -> str:
        """Returns the part of a text that its ids preserve; equal results decode to equal texts.

        See `TextCodec.kept`.
        """
        return self._codec.kept(text)

    def _answer_any_opening(self, content: str, opening: Place) -> Rendered | None:
        """Renders an answer for any opening texts; None if the template repeats these texts."""
        place = Place.of(messages_of(content), opening=opening)
        frame, shown = self._template.frame(place), self.shown(place, content)
        if min(frame.slots) < 0:
            return None
        return self._join(frame, self._around(place), frame.filled(shown), shown)

    def shown(self, place: Place, content: Content) -> tuple[str, ...]:
        """Returns the texts of messages as the template shows them there."""
        texts = [message.text for message in messages_of(content)]
        for text in texts:
            if not isinstance(text, str):
                raise InputError(f"a message must be a str; got a {type(text).__name__}")
        return tuple(self._template.shown(place, i, text) for i, text in enumerate(texts))

    def _around_at(self, place: Place) -> tuple[_Part, ...]:
        return tuple(map(self._part, self._template.frame(place).pieces))

    def _part(self, piece: str) -> _Part:
        head, control, tail = self._codec.around_control(piece)
        return _Part(head, self._codec.encode_control(control) if control else (), tail)

    def _join(
        self, frame: Frame, around: Sequence[_Part], texts: Sequence[str], shown: tuple[str, ...]
    ) -> Rendered:
        ids: tuple[int, ...] = ()
        plain = ""
        for part, inner in zip(around, (*texts, ""), strict=True):
            plain += part.head
            if part.control:
                ids += self._encode_text(plain) + part.control
                plain = part.tail
            plain += inner
        pairs = zip(frame.pieces, (*texts, ""), strict=True)
        text = "".join(piece + inner for piece, inner in pairs)
        return Rendered(text=text, ids=ids + self._encode_text(plain), shown=shown)

    def _check_codec(self, probe: Rendered) -> None:
        """Raises ValueError for a tokenizer that does not preserve text, see the class."""
        decoded = self.decode(probe.ids)
        if self.kept(decoded) != self.kept(probe.text):
            raise InputError(
                f"the tokenizer makes {decoded!r} of {probe.text!r}; it must keep text as it is, "
                "but that it may compose characters (NFC) and take U+2581 for a blank: otherwise "
                "the policy reads another text than the environment's. See normalizer, "
                "pre_tokenizer and decoder in tokenizer.json"
            )
        lost = "".join(each for each in _PRINTABLE if self._loses(each))
        if lost:
            raise InputError(
                f"the tokenizer has no tokens for {lost!r}, and none that says so (unk_token): it "
                "would leave these out of texts without a word. Give it an unk_token, or tokens "
                "for all bytes (pre_tokenizers.ByteLevel.alphabet() as the initial alphabet of its "
                "trainer)"
            )
        if self._codec.encode_control(probe.text) != probe.ids:
            raise InputError(
                f"the tokenizer gives {probe.text!r} other ids as a whole than in parts, and a "
                "conversation is encoded in parts: its control tokens strip blanks beside them, or "
                "are not found everywhere (see lstrip, rstrip, single_word and normalized of "
                "added_tokens in tokenizer.json; these must be false)"
            )

    def _loses(self, letter: str) -> bool:
        try:
            return not self._encode(letter)
        except InputError:
            return False

    def _check_opening(self, opening: Place) -> None:
        """Warns if the template rewrites earlier turns. Raises as `ChatTemplate.broken_prefix`."""
        broken = self._template.broken_prefix(opening)
        if broken and broken not in self._broken:
            self._broken.add(broken)
            _logger.warning(
                "the chat template %s as a conversation goes on. Sampled ids are never changed; "
                "config.chat.history sets what happens instead",
                broken,
            )

    def _encode_text(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        return self._kept_ids(text) if len(text) <= _SHORT else self._encode(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        _check_utf8(text)
        # An environment that writes "<|end|>" gets seven characters, not the end of its turn.
        return self._codec.encode(text, behind_control=True)

    def _reply(self, text: str) -> tuple[int, ...]:
        _check_utf8(text)
        return (*self._codec.encode(text), self.end_of_turn_id)


def _check_utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"a message cannot be encoded as UTF-8: {error}") from error


def _one_id(value: object) -> int:
    if not isinstance(value, int):
        raise InputError(f"a special token must have one id; the tokenizer gives {value!r}")
    return value
