# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Text to ids and back where neither is alone: in the middle of a stream that goes on."""

import functools
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

_REPLACEMENT = "\ufffd"
# What SentencePiece vocabularies write for a blank; "" is "▁".
_BLANK = "\u2581"


class TextCodec:
    """A tokenizer without what it does to the beginning of a text.

    The tokenizers of Llama 2 and Mistral put a blank before a text and take one from what they
    decode, which is right for a whole text and for no part of one. Here neither happens: parts are
    encoded and decoded as they stand in the middle. One kind (a `Prepend` normalizer: Mistral 7B
    v0.1, v0.2) has a blank behind every control token too, in the ids that the models know and so
    in ours. No text has it: `decode` leaves it out, but where the control token is not among the
    ids that it gets, so that there it cannot be told from a blank that was said.

    `decode` is that of a stream of bytes: tokens of one byte (`<0xE2>`) are joined, and what is no
    character costs nothing around it (the `ByteFallback` of `tokenizers` drops a whole run). Ids
    that are no tokens are U+FFFD each.

    A text comes back as it was but for what the tokenizer cannot tell apart, see `kept`.

    Encoding is for one thread at a time; decoding for any number.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        self._prepends = any(step["type"] == "Prepend" for step in _steps(settings["normalizer"]))
        self._inside = _backend(settings, prepends=False)
        self._behind_control = _backend(settings, prepends=True) if self._prepends else self._inside
        vocab = tokenizer.get_vocab()
        self._known = frozenset(vocab.values())
        self._bytes: dict[int, int] = {}
        if any(step["type"] == "ByteFallback" for step in _steps(settings["decoder"])):
            for byte in range(256):
                if (token := vocab.get(f"<0x{byte:02X}>")) is not None:
                    self._bytes[token] = byte
        control = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self._control = frozenset(control) if self._prepends else frozenset()
        self._begins_blank = frozenset(i for t, i in vocab.items() if t.startswith(_BLANK))
        names = sorted(control.values(), key=len, reverse=True)
        self._control_names = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def kept(self, text: str) -> str:
        """What the ids of a text keep of it: two texts with the same `kept` are the same to them.

        With a normalizer of NFC (Qwen) that is the text up to canonical equivalence: "e" and an
        accent come back as "é". Where U+2581 means a blank (SentencePiece: Gemma, Mistral, Llama 2)
        it comes back as one. All else is kept by every tokenizer that ChatRenderer takes.
        """
        composes, blanks = self._merges
        text = unicodedata.normalize("NFC", text) if composes else text
        return text.replace(_BLANK, " ") if blanks else text

    def encode(self, text: str, *, behind_control: bool = False) -> tuple[int, ...]:
        """Ids of a text that says nothing but itself: the name of a control token is text.

        `behind_control`: it stands behind a control token, or begins all.
        """
        return _encode(self._behind_control if behind_control else self._inside, text, plain=True)

    def encode_control(self, text: str) -> tuple[int, ...]:
        """Ids of a text that begins all or a turn, in which control tokens are what they say."""
        return _encode(self._behind_control, text, plain=False)

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """As `encode_control`, for what stands behind text."""
        return _encode(self._inside, text, plain=False)

    def around_control(self, text: str) -> tuple[str, str, str]:
        """What is before the first control token, from there to the last, and behind it.

        All of it is before, where there is none.
        """
        found = [match.span() for match in self._control_names.finditer(text)]
        first, last = (found[0][0], found[-1][1]) if found else (len(text), len(text))
        return text[:first], text[first:last], text[last:]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of any ids; never raises. Control tokens are visible."""
        text, behind_control = "", False
        for decode, group in itertools.groupby(map(int, ids), key=self._decoder_of):
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
        # As any tokens; a run of its own, so that it is known what begins behind one.
        return self._inside.decode(run, skip_special_tokens=False)

    @functools.cached_property
    def _merges(self) -> tuple[bool, bool]:
        """Whether accents are composed, and whether U+2581 becomes a blank; found by trying."""
        composed, blank = (self.decode(self.encode(text)) for text in ("e\u0301", _BLANK))
        return composed == "\u00e9", blank == " "


def _decode_unknown(run: list[int]) -> str:
    return _REPLACEMENT * len(run)


def _encode(backend: Tokenizer, text: str, *, plain: bool) -> tuple[int, ...]:
    # Set only where it must be: a server's threads decode with the same meanwhile, and `tokenizers`
    # does not let one set what another uses.
    if backend.encode_special_tokens != plain:
        backend.encode_special_tokens = plain
    return tuple(backend.encode(text, add_special_tokens=False).ids)


_INNER = ("normalizers", "pretokenizers", "decoders")


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a part of tokenizer.json, one after the other."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner = next(part[key] for key in _INNER if key in part)
    return [step for each in inner for step in _steps(each)]


def _backend(settings: dict[str, Any], *, prepends: bool) -> Tokenizer:
    """The tokenizer, with nothing put before a text, and nothing taken off what is decoded.

    `prepends`: but for its `Prepend`.
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
    backend.no_truncation()
    backend.no_padding()
    return backend


def _inside(step: dict[str, Any]) -> dict[str, Any]:
    """The same step, as it acts in the middle of a text."""
    if step["type"] == "Metaspace":
        return step | {"prepend_scheme": "never"}
    if step["type"] == "ByteLevel":
        return step | {"add_prefix_space": False}
    return step
