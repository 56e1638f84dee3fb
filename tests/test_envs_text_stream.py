# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Streaming: no half characters, nothing lost, nothing taken back."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.stream import StopStrings, StopWatch, TextStream
from earl_jax.envs.text.tokenizer import load_tokenizer
from tests.support.byte_ids import OURS, byte_ids

FOLDERS = Path(__file__).parent / "tokenizers"
# Bytes, bytes behind NFC, and three kinds that fall back to bytes.
FAMILIES = ("llama3", "qwen2", "gemma3", "mistral", "mistral1")
TOKENIZERS = [OURS, *(load_tokenizer(FOLDERS / name) for name in FAMILIES)]
CHATS = [ChatRenderer(tokenizer) for tokenizer in TOKENIZERS]
KINDS = range(len(CHATS))


def pieces_of(stream: TextStream, ids) -> list[str]:
    return [*(stream.push([token]) for token in ids), stream.flush()]


def test_characters_by_hand():
    chat = CHATS[0]
    stream = TextStream(chat.decode)
    # One, two, three and four bytes; each comes with its last.
    assert pieces_of(stream, byte_ids("aé€🙂".encode())) == [
        *("a", "", "é", "", "", "€", "", "", "", "🙂"),
        "",
    ]
    # The same stream again, ended within a character; an unfinished one is known by what follows.
    assert pieces_of(stream, byte_ids("🙂".encode()[:2])) == ["", "", "\ufffd"]
    assert pieces_of(stream, byte_ids(b"\xe2a")) == ["", "\ufffda", ""]
    # Several ids at once, and none.
    assert stream.push(byte_ids("né".encode())[:2]) == "n"
    assert stream.push([]) == ""
    assert stream.push(byte_ids("né".encode())[2:]) == "é"
    assert stream.flush() == ""


def test_bytes_beside_a_broken_one_are_still_characters():
    """`ByteFallback` of `tokenizers` would take back the "é" that is out already."""
    for kind in (3, 4, 5):
        chat, tokenizer = CHATS[kind], TOKENIZERS[kind]
        ids = byte_ids(b"\xc3\xa9\x80", tokenizer)
        assert tokenizer.decode(ids) == "\ufffd" * 3, "the trap that decode avoids"
        assert chat.decode(ids) == "é\ufffd"
        assert pieces_of(TextStream(chat.decode), ids) == ["", "é", "", "\ufffd"]
        # A blank at the beginning is not taken off, and stands where it was said.
        (blank,) = tokenizer.convert_tokens_to_ids(["\u2581"])
        two = [blank, *byte_ids("🙂🙃".encode(), tokenizer), blank]
        assert pieces_of(TextStream(chat.decode), two) == [
            *(" ", "", "", "", "🙂", "", "", "", "🙃", " "),
            "",
        ]


def test_invalid_bytes_are_not_withheld_forever():
    """However much of it comes: three stay behind, and pushes stay cheap."""
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return CHATS[0].decode(ids)

    pieces = pieces_of(TextStream(decode), byte_ids(b"\x80") * 500)
    assert "".join(pieces) == "\ufffd" * 500 and len(pieces[-1]) == 3
    assert max(decoded) < 20


# What each kind of vocabulary cannot tell apart.
KEPT = [
    *(str, str, lambda text: unicodedata.normalize("NFC", text)),
    *[lambda text: text.replace("\u2581", " ")] * 3,
]
PARTS = st.sampled_from(
    ["e\u0301", "\u2581", " ", "   ", "\n\n", "🙂🙃", "é", "\U0001f469\u200d\U0001f467"]
)
TEXTS = st.lists(st.one_of(st.text(max_size=9), PARTS), max_size=5).map("".join)


@settings(max_examples=80, deadline=None)
@given(TEXTS, st.sampled_from(KINDS))
def test_a_text_comes_in_characters(text, kind):
    """Whatever its tokens are; in the smallest pieces, one token a byte, too."""
    chat = CHATS[kind]
    in_bytes = byte_ids(text.encode(), TOKENIZERS[kind])
    for tokens, expected in ((chat.reply(text)[:-1], KEPT[kind](text)), (in_bytes, text)):
        pieces = pieces_of(TextStream(chat.decode), tokens)
        assert "".join(pieces) == expected
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)
            assert pieces[-1] == ""


# Bytes that begin, go on, or break characters, most of all.
BYTES = st.lists(st.sampled_from(b"ab\x80\x9f\x82\xac\xc3\xe2\xf0\xe0\xed\xff"), max_size=60)


@settings(max_examples=200, deadline=None)
@given(BYTES, st.sampled_from(KINDS), st.randoms(use_true_random=False))
def test_garbage_comes_as_it_would_at_once(data, kind, rng):
    ids, chat = byte_ids(bytes(data), TOKENIZERS[kind]), CHATS[kind]
    pieces = pieces_of(TextStream(chat.decode), ids)
    assert "".join(pieces) == chat.decode(ids) == bytes(data).decode(errors="replace")
    cut = rng.randint(0, len(ids))
    stream = TextStream(chat.decode)
    assert stream.push(ids[:cut]) + stream.push(ids[cut:]) + stream.flush() == "".join(pieces)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(KINDS))
def test_any_ids_come_as_they_would_at_once(data, kind):
    size = len(TOKENIZERS[kind])
    ids = data.draw(st.lists(st.integers(-1, size + 3), max_size=40))
    chat = CHATS[kind]
    pieces = pieces_of(TextStream(chat.decode), ids)
    assert "".join(pieces) == chat.decode(ids)


# Stop strings.


def test_a_stop_string_by_hand():
    stops = StopStrings(["END"])
    assert [stops.push(piece) for piece in ("aE", "Nb", "cEND", "d")] == ["a", "ENb", "c", ""]
    assert stops.found == "END" and stops.flush() == ""
    # What might have become one comes at the end; a text may be only that.
    stops = StopStrings(["END"])
    assert [stops.push("xEEN"), stops.flush()] == ["xE", "EN"] and stops.found is None
    # It overlaps itself: the first "aa" is not the beginning of "aab" here, the second is.
    stops = StopStrings(["aab"])
    assert [stops.push(piece) for piece in "aaab"] == ["", "", "a", ""]
    assert stops.found == "aab"
    # The one that is complete first; the longer one where both are.
    assert StopStrings(["abc", "b"]).push("xabc") == "xa"
    assert StopStrings(["b", "ab"]).push("xab") == "x"
    assert StopStrings([]).push("everything") == "everything"


STOPS = st.lists(st.text("abé", min_size=1, max_size=4), max_size=4)


@given(text=st.text("abé", max_size=30), strings=STOPS, data=st.data())
def test_stop_strings_do_not_depend_on_how_a_text_is_cut(text, strings, data):
    """As a search from the left over the whole text finds them."""
    found = None
    for end in range(len(text) + 1):
        complete = [string for string in strings if text[:end].endswith(string)]
        if complete:
            found = max(complete, key=len)
            break
    expected = text if found is None else text[: end - len(found)]
    stops, content, rest = StopStrings(strings), "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        content, rest = content + stops.push(rest[:size]), rest[size:]
        assert expected.startswith(content)
    assert content + stops.flush() == expected
    assert stops.found == found


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_watch_counts_the_ids_until_a_stop_is_complete(size):
    """However many ids come at a time; the text before the stop is what is left."""
    chat = CHATS[0]
    ids = byte_ids("naïve END".encode()) + byte_ids("END é".encode())
    watch = StopWatch(chat.decode, ("ENDE", "zz"))
    parts = [ids[first : first + size] for first in range(0, len(ids), size)]
    counts = [watch.push(part) for part in parts]
    # "naïve END" has ten bytes; the stop is complete with the next.
    assert sum(counts) == 11 and watch.found and watch.text == "naïve "
    never = StopWatch(chat.decode, ("zz",))
    assert [never.push(part) for part in parts] == [len(part) for part in parts]
    assert not never.found and never.text == "naïve ENDEND é"
