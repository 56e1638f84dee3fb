# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Encoding and decoding of text in the middle of a stream, without effects of a text's start."""

import functools
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_REPLACEMENT = "\ufffd"
# SentencePiece vocabularies write this for a blank.
_BLANK = "\u2581"


class TextCodec:
    """A tokenizer without its special treatment of the beginning of a text.

    The tokenizers of Llama 2 and Mistral put a blank before a text and take one from what they
    decode, which is right for a whole text and wrong for a part of one. This codec does neither:
    parts are encoded and decoded as they stand in the middle. One kind (a `Prepend` normalizer:
    Mistral 7B v0.1, v0.2) also puts a blank after every control token, in the ids that the models
    were trained on and so in ours. `decode` leaves that blank out if the control token is among its
    ids; otherwise it cannot be distinguished from a blank of the text.

    `decode` joins tokens of one byte (`<0xE2>`), and an invalid byte changes nothing around it (the
    `ByteFallback` of `tokenizers` drops a whole run). Ids that are no tokens become U+FFFD each.

    Encoding and decoding preserve a text up to `kept`.

    Any number of threads may encode and decode.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast"):
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        self._prepends = any(step["type"] == "Prepend" for step in _steps(settings["normalizer"]))
        # Each has its settings for good: `tokenizers` allows no change while a thread encodes.
        self._inside = self._behind_control = _backend(settings, prepends=False, plain=True)
        self._named = self._named_behind = _backend(settings, prepends=False, plain=False)
        if self._prepends:
            self._behind_control = _backend(settings, prepends=True, plain=True)
            self._named_behind = _backend(settings, prepends=True, plain=False)
        vocab = tokenizer.get_vocab()
        # An entry of bytes (GPT-2's alphabet) has a character for each, so never fewer than it
        # stands for.
        self.longest_token = max(map(len, vocab))
        self._known = frozenset(vocab.values())
        self._bytes: dict[int, int] = {}
        if any(step["type"] == "ByteFallback" for step in _steps(settings["decoder"])):
            for byte in range(256):
                if (token := vocab.get(f"<0x{byte:02X}>")) is not None:
                    self._bytes[token] = byte
        control = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self._control = frozenset(control) if self._prepends else frozenset()
        # Tokens that a run of any length is decoded with as it is.
        self._plain = self._known - self._control - self._bytes.keys()
        self._begins_blank = frozenset(i for t, i in vocab.items() if t.startswith(_BLANK))
        names = sorted(control.values(), key=len, reverse=True)
        self._control_names = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def kept(self, text: str) -> str:
        """Returns the part of a text that its ids preserve; equal results decode to equal texts.

        With a normalizer of NFC (Qwen) that is the text up to canonical equivalence: "e" and an
        accent come back as "é". Where U+2581 means a blank (SentencePiece: Gemma, Mistral, Llama 2)
        it comes back as one. All else is kept by every tokenizer that ChatRenderer takes.
        """
        composes, blanks = self._merges
        text = unicodedata.normalize("NFC", text) if composes else text
        return text.replace(_BLANK, " ") if blanks else text

    def encode(self, text: str, *, behind_control: bool = False) -> tuple[int, ...]:
        """Returns the ids of plain text, in which the name of a control token is text too.

        `behind_control`: the text follows a control token, or begins the stream.
        """
        return _encode(self._behind_control if behind_control else self._inside, text)

    def encode_control(self, text: str) -> tuple[int, ...]:
        """Returns the ids of text with control tokens that begins the stream or a turn."""
        return _encode(self._named_behind, text)

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """Returns the ids of text with control tokens that follows other text."""
        return _encode(self._named, text)

    def around_control(self, text: str) -> tuple[str, str, str]:
        """Splits a text before its first and after its last control token.

        Without a control token all of it is in the first part.
        """
        found = [match.span() for match in self._control_names.finditer(text)]
        first, last = (found[0][0], found[-1][1]) if found else (len(text), len(text))
        return text[:first], text[first:last], text[last:]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of these ids; never raises. Control tokens are visible."""
        ids = list(ids)
        if self._plain.issuperset(ids):
            # Nearly every turn: token by token they would take ten times as long.
            return self._decode_tokens(ids)
        text, behind_control = "", False
        for decode, group in itertools.groupby(ids, key=self._decoder_of):
            run = list(group)
            piece = decode(run)
            drops = self._prepends and behind_control and run[0] in self._begins_blank
            text += piece[1:] if drops else piece
            behind_control = run[-1] in self._control
        return text

    def _decoder_of(self, token: int) -> Callable[[list[int]], str]:
        if token in self._bytes:
            return self._decode_bytes
        if token in self._control:
            return self._decode_control
        return self._decode_tokens if token in self._known else _decode_unknown

    def _decode_bytes(self, run: list[int]) -> str:
        return bytes(map(self._bytes.__getitem__, run)).decode(errors="replace")

    def _decode_tokens(self, run: list[int]) -> str:
        return self._inside.decode(run, skip_special_tokens=False)

    def _decode_control(self, run: list[int]) -> str:
        # Control tokens are a run of their own, so that `decode` sees which run follows one.
        return self._inside.decode(run, skip_special_tokens=False)

    @functools.cached_property
    def _merges(self) -> tuple[bool, bool]:
        """Two flags, found by trying: accents are composed, and U+2581 becomes a blank."""
        composed, blank = (self.decode(self.encode(text)) for text in ("e\u0301", _BLANK))
        return composed == "\u00e9", blank == " "


def _decode_unknown(run: list[int]) -> str:
    return _REPLACEMENT * len(run)


def _encode(backend: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(backend.encode(text, add_special_tokens=False).ids)


_INNER = ("normalizers", "pretokenizers", "decoders")


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the steps of a part of tokenizer.json, in order."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner = next(part[key] for key in _INNER if key in part)
    return [step for each in inner for step in _steps(each)]


def _backend(settings: dict[str, Any], *, prepends: bool, plain: bool) -> Tokenizer:
    """Returns the tokenizer without prefixes of encoded text and without stripping of decoded text.

    `prepends` keeps its `Prepend` normalizer; `plain` takes the names of control tokens for text.
    """
    dropped = {"decoder": {"Strip"}, "normalizer": set() if prepends else {"Prepend"}}
    parts = {}
    for name, key in zip(("normalizer", "pre_tokenizer", "decoder"), _INNER, strict=True):
        if settings[name] is None:
            continue
        steps = [_inside(step) for step in _steps(settings[name])]
        kept = [step for step in steps if step["type"] not in dropped.get(name, ())]
        parts[name] = {"type": "Sequence", key: kept}
    backend = Tokenizer.from_str(json.dumps(settings | parts))
    backend.encode_special_tokens = plain
    backend.no_truncation()
    backend.no_padding()
    return backend


def _inside(step: dict[str, Any]) -> dict[str, Any]:
    """Returns the step with its effect in the middle of a text."""
    if step["type"] == "Metaspace":
        return step | {"prepend_scheme": "never"}
    if step["type"] == "ByteLevel":
        return step | {"add_prefix_space": False}
    return step
