# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A chat template taken apart: the text it writes around messages, and its changes to their text.

This module handles text only; chat.py handles ids. The text around messages is found by rendering
stand-ins in their place, so that no environment's text can act on the template.
"""

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from earl_jax.envs.environment import Message
from earl_jax.settings.errors import InputError, in_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Stand-ins for texts. A template that contains them itself is refused by the checks below.
_REPLY = "earl-reply"
_REASON = "earl-reason"
# Text that templates change where they change any: they trim, quote or escape it. And text that
# tokenizers change: they compose or replace characters, lower them, or lose blanks.
PROBE = '  \n"earl" \\ <probé> Ee\u0301 \u2581  \ufb01\u2167\t\U0001f642 \n'

# A call of a tool by which a template is found to write calls down.
_PROBE_WORDS = ("earl_name", "earl_key", "earl_value")
_PROBE_CALL = {
    "id": "earlcall0",
    "type": "function",
    "function": {"name": "earl_name", "arguments": {"earl_key": "earl_value"}},
}
_ANSWER = "earl-answer"

Content = str | Sequence[Message]


@functools.cache
def _given() -> set[str]:
    """Returns the variables that this module or `transformers` gives to the template."""
    from transformers import PreTrainedTokenizerFast

    return {"messages", *inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters}


def messages_of(content: Content) -> tuple[Message, ...]:
    """Returns the content as messages; a plain text becomes a user's message.

    Raises ValueError for anything else.
    """
    if isinstance(content, str):
        return (Message(role="user", text=content),)
    if not isinstance(content, Sequence) or not all(isinstance(m, Message) for m in content):
        raise InputError(f"a message must be a str or Messages; got a {type(content).__name__}")
    return tuple(content)


@dataclasses.dataclass(frozen=True)
class Kind:
    """An environment's message without its text, as the template sees it."""

    role: str
    call_id: str = ""
    name: str = ""

    def filled(self, text: str) -> dict[str, str]:
        """Returns the message with this text, as chat templates expect it."""
        given = {"tool_call_id": self.call_id, "name": self.name}
        named = {key: value for key, value in given.items() if value}
        return {"role": self.role, "content": text, **named}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Messages without their texts, and their position: these determine the text around them.

    `opening` are the messages that began the episode, where these come behind a policy's turn;
    None where these begin it. `tools` is the JSON of the list of the tools' descriptions.
    """

    kinds: tuple[Kind, ...]
    tools: str = "[]"
    opening: tuple[Kind, ...] | None = None

    @classmethod
    def of(
        cls, messages: Sequence[Message], tools: str = "[]", opening: "Place | None" = None
    ) -> "Place":
        """Returns the place of these messages, which open an episode or come after `opening`."""
        kinds = tuple(Kind(each.role, each.call_id, each.name) for each in messages)
        if opening is None:
            return cls(kinds=kinds, tools=tools)
        return cls(kinds=kinds, tools=opening.tools, opening=opening.kinds)


@dataclasses.dataclass(frozen=True)
class Frame:
    """The text that the template writes around messages: `pieces` with a slot between each two.

    A slot is the index of the message whose text stands there. Some templates repeat the opening
    of the conversation: -1 is the last of the opening's messages, -2 the one before.
    """

    pieces: tuple[str, ...]
    slots: tuple[int, ...]

    def filled(self, texts: Sequence[str], opening: Sequence[str] = ()) -> list[str]:
        """Returns the text of each slot."""
        return [texts[slot] if slot >= 0 else opening[slot] for slot in self.slots]


class TemplateRefusal(InputError):
    """Raised where the template does not accept these messages in this order."""


class ChatTemplate:
    """The chat template of a tokenizer. `end` is the control token that ends a policy's turn.

    `arguments` are given to it by name beside the messages, such as Qwen3's `enable_thinking`.

    Raises ValueError for a tokenizer without one, one that does not end the policy's turns, and an
    argument that it does not read.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ):
        if not tokenizer.chat_template:
            raise InputError(
                f"the tokenizer of {tokenizer.name_or_path or 'this run'} has no chat template; "
                "put the model's into a file chat_template.jinja beside its tokenizer.json"
            )
        for name in arguments:
            if name in _given() or not re.search(
                rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)
            ):
                raise InputError(
                    f"config.chat.template_arguments has {name!r}, which the chat template does "
                    "not read, or which a config cannot set; remove it"
                )
        self._tokenizer, self._arguments = tokenizer, dict(arguments)
        added = tokenizer.added_tokens_decoder.values()
        self._control = tuple(str(token) for token in added if token.special)
        self.frame = functools.lru_cache(maxsize=256)(self._take_apart)
        self.is_verbatim = functools.lru_cache(maxsize=256)(self._is_verbatim)
        self._writes_calls = functools.lru_cache(maxsize=256)(self._find_calls)
        self._heads = functools.lru_cache(maxsize=256)(self._find_heads)
        try:
            self.end = self._find_end()
            self.frame(Place(kinds=(Kind("user"),)))
        except InputError as error:
            raise InputError(f"{_file_of(tokenizer)}{error}") from error

    def shown(self, place: Place, index: int, text: str) -> str:
        """Returns the text of message `index` as the template shows it there.

        Raises ValueError where the text changes what is around it.
        """
        shown = text if self.is_verbatim(place, index) else self._cut(place, index, text)
        if shown is None:
            raise InputError(
                f"the chat template writes something else around the text {text!r:.80} than around "
                "any other; the environment must write it differently"
            )
        return shown

    def whole(self, conversation: Sequence[tuple[Kind | None, str]], tools: str) -> Frame:
        """Returns the frame around the environment's messages of a whole conversation.

        Each entry is an environment's message, or None and the text of a turn of the policy, which
        the template sees. The policy's turn comes after the last. Slots count the messages.

        Raises TemplateRefusal.
        """
        replies = [text for kind, text in conversation if kind is None]
        name = "earl-message"
        while any(name in text for text in replies):
            name += "-"
        messages, stand_ins = [], []
        for kind, text in conversation:
            if kind is None:
                messages.append({"role": "assistant", "content": text})
            else:
                stand_ins.append(f"{name}<{len(stand_ins)}>")
                messages.append(kind.filled(stand_ins[-1]))
        return _split(self._write(messages, tools), stand_ins)

    def with_calls(self, content: str, calls: Sequence[Mapping[str, Any]], tools: str) -> str:
        """Returns a turn of the policy with calls of tools as the template writes it, but its end.

        Calls are those of OpenAI's `tool_calls`, with arguments as objects; `tools` as of `Place`.

        Raises ValueError where the template does not write calls, or leaves out the content beside
        them, and for the name of a control token in either.
        """
        if not self._writes_calls(tools):
            raise InputError(
                "the chat template does not write tool_calls; write the calls into the content, as "
                "the policy is to write them"
            )
        given = json.dumps([content, *calls], ensure_ascii=False)
        for token in (*self._control, _ANSWER):
            if token in given:
                raise InputError(
                    f"a message with tool_calls must not contain {token!r}, which means something "
                    "of its own"
                )
        text = self._calling(content, calls, tools)
        if "".join(content.split()) not in "".join(text.split()):
            raise InputError(
                f"the chat template leaves out the content beside tool_calls, {content!r:.60}; "
                "make it null, or write the calls into it as the policy is to write them"
            )
        return text

    def _find_calls(self, tools: str) -> bool:
        try:
            text = self._calling("", [_PROBE_CALL], tools)
        except ValueError:
            return False
        return all(word in text for word in _PROBE_WORDS)

    def _calling(self, content: str, calls: Sequence[Mapping[str, Any]], tools: str) -> str:
        """Returns the text of a turn with calls that answers to a user, and has answers behind it.

        Raises ValueError where there is none.
        """
        reply = {"role": "assistant", "content": content, "tool_calls": list(calls)}
        answers = [
            Kind("tool", each.get("id") or "", each["function"]["name"]).filled(_ANSWER)
            for each in calls
        ]
        written = self._write([{"role": "user", "content": "earl"}, reply, *answers], tools)
        head = next((head for head in self._heads(tools) if written.startswith(head)), None)
        text, found, _ = written.removeprefix(head or "").partition(self.end)
        if head is None or not found or _ANSWER in text:
            raise InputError(
                f"the chat template does not write a turn with tool_calls up to {self.end!r}: "
                f"{written!r:.500}"
            )
        return text

    def _find_heads(self, tools: str) -> tuple[str, ...]:
        """Returns the texts that may stand before a turn: if it is asked for, or was answered.

        Mistral's template writes a blank before words, and none before calls.
        """
        user, reply = {"role": "user", "content": "earl"}, {"role": "assistant", "content": _REPLY}
        answered = self._write([user, reply, user], tools).split(_REPLY)[0]
        return self._write([user], tools), answered, answered.rstrip(" ")

    def broken_prefix(self, opening: Place) -> str:
        """Returns how the template rewrites earlier text, in words; "" where it only appends.

        Raises ValueError where there are tools and the template does not show them.
        """
        opened = _fill(opening.kinds, "earl-opening")
        begun = self._write(opened, opening.tools)
        if opening.tools != "[]" and begun == self._write(opened, "[]"):
            raise InputError("the chat template has no place for tools, and there are some")
        reasoned = f"<think>\n{_REASON}\n</think>\n\n{_REPLY}"
        for reply, kept, reason in (
            (_REPLY, _REPLY, "moves what it wrote at the beginning"),
            (reasoned, _REASON, "drops earlier reasoning"),
        ):
            turns = [{"role": "assistant", "content": reply}, {"role": "user", "content": "earl"}]
            try:
                later = self._write([*opened, *turns], opening.tools)
            except ValueError:
                return ""  # no user's message is accepted here: nothing to compare with
            if not later.startswith(begun) or kept not in later:
                return reason
        return ""

    def _find_end(self) -> str:
        user, reply = {"role": "user", "content": "earl"}, {"role": "assistant", "content": _REPLY}
        written = self._write([user, reply, user], "[]")
        _, found, behind = written.partition(_REPLY)
        ends = [token for token in self._control if behind.startswith(token)]
        if not found:
            raise InputError(
                f"the chat template does not show a reply as it is: of {_REPLY!r} it makes "
                f"{written!r}"
            )
        if not ends:
            raise InputError(
                "the chat template does not end a policy turn with a control token of the "
                f"tokenizer: {written!r}"
            )
        return max(ends, key=len)

    def _take_apart(self, place: Place) -> Frame:
        # These are written between what the template writes itself, and encoded with it.
        kinds = (*place.kinds, *(place.opening or ()))
        for text in (place.tools, *(word for k in kinds for word in (k.call_id, k.name))):
            for token in (*self._control, "earl-message", "earl-opening", _REPLY):
                if token in text:
                    raise InputError(
                        f"descriptions and names of tools and ids of calls must not contain "
                        f"{token!r}, which means something of its own; got {text!r:.200}"
                    )
        opened = _stand_ins(place.opening or (), "earl-opening")
        stand_ins = _stand_ins(place.kinds, "earl-message")
        written = self._around(stand_ins, place)
        frame = _split(written, stand_ins, opened)
        content = [slot for slot in frame.slots if slot >= 0]
        if content != list(range(len(stand_ins))) or _REPLY in written:
            raise InputError(f"the chat template must contain a message once: {written!r}")
        return frame

    def _is_verbatim(self, place: Place, index: int) -> bool:
        self.frame(place)  # raises first if the template cannot be taken apart
        return self._cut(place, index, PROBE) == PROBE

    def _cut(self, place: Place, index: int, text: str) -> str | None:
        """Returns the text as the template shows it; None if it changes the text around it."""
        texts = _stand_ins(place.kinds, "earl-message")
        head, _, tail = self._around(texts, place).partition(texts[index])
        texts[index] = text
        written = self._around(texts, place)
        fits = written.startswith(head) and written[len(head) :].endswith(tail)
        return written[len(head) : len(written) - len(tail)] if fits else None

    def _around(self, texts: Sequence[str], place: Place) -> str:
        """Returns the template's text of these messages, after the policy's end of turn if any."""
        messages = [kind.filled(text) for kind, text in zip(place.kinds, texts, strict=True)]
        if place.opening is None:
            return self._write(messages, place.tools)
        opened = _fill(place.opening, "earl-opening")
        replies = {"role": "assistant", "content": _REPLY}
        written = self._write([*opened, replies, *messages], place.tools)
        _, found, behind = written.partition(_REPLY)
        if not found or not behind.startswith(self.end):
            raise InputError(
                f"the chat template does not end a policy turn with {self.end!r}: {written!r}"
            )
        return behind.removeprefix(self.end)

    def _write(self, messages: Sequence[Mapping[str, Any]], tools: str) -> str:
        described: list[Any] = json.loads(tools)
        try:
            written = self._tokenizer.apply_chat_template(
                list(messages),  # pyright: ignore[reportArgumentType]
                tools=described or None,
                tokenize=False,
                add_generation_prompt=True,
                **self._arguments,
            )
        except Exception as error:
            # A template is a program: it may divide by zero.
            words = str(error) if isinstance(error, TemplateError) else in_words(error)
            raise TemplateRefusal(f"the chat template refuses the messages: {words}") from error
        assert isinstance(written, str)
        return written


def _file_of(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Returns the file of the chat template and a colon; "" for a tokenizer that was not read."""
    folder = Path(tokenizer.name_or_path)
    names = ("chat_template.jinja", "tokenizer_config.json")
    return next((f"{folder / name}: " for name in names if (folder / name).is_file()), "")


def _stand_ins(kinds: Sequence[Kind], name: str) -> list[str]:
    return [f"{name}<{index}>" for index in range(len(kinds))]


def _fill(kinds: Sequence[Kind], name: str) -> list[dict[str, str]]:
    return [k.filled(text) for k, text in zip(kinds, _stand_ins(kinds, name), strict=True)]


def _split(written: str, stand_ins: Sequence[str], opened: Sequence[str] = ()) -> Frame:
    """Splits text at stand-ins; slots are their numbers, less than 0 for those of the opening."""
    number = {name: i - len(opened) for i, name in enumerate([*opened, *stand_ins])}
    parts = re.split(f"({'|'.join(map(re.escape, number))})", written)
    return Frame(tuple(parts[::2]), tuple(number[name] for name in parts[1::2]))
