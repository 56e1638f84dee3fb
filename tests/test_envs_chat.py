# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Token in, token out: incremental rendering equals the template, and nothing hides in a reply."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_jax.envs.environment import Message, Start, StepResult
from earl_jax.envs.examples import example_ids, play_example
from earl_jax.envs.games.board_game import BoardGame
from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.tokenizer import SPECIAL_TOKENS, build_tokenizer
from tests.support.episodes import game_corpus

TOKENIZER = build_tokenizer(game_corpus(200), 512)
CHAT = ChatRenderer(TOKENIZER)
PAD, USER, ASSISTANT, END = range(4)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def test_frame_by_hand():
    (five,) = ids_of("5")
    assert CHAT.first("5") == CHAT.answer("5") == (USER, five, END, ASSISTANT)
    assert CHAT.first("") == CHAT.answer("") == (USER, END, ASSISTANT)
    assert (CHAT.end_of_turn_id, CHAT.pad_id) == (END, PAD)


TOOL = {
    "type": "function",
    "function": {"name": "clock", "description": "The time, in °.", "parameters": {}},
}
OPENED = (
    '<|user|>tools\n{"type": "function", "function": {"name": "clock", "description": '
    '"The time, in °.", "parameters": {}}}<|end|>'
    "<|user|>system\nBe <brief>.<|end|>"
    "<|user|>Why?<|end|>"
    "<|assistant|>"
)
ANSWERED = (
    "<|user|>tool 7\n12:00<|end|><|user|>tool\nnothing<|end|><|user|>Now?<|end|><|assistant|>"
)


class Calling:
    """An environment of every kind of message, with example replies."""

    def start(self):
        messages = (Message(role="system", text="Be <brief>."), Message(role="user", text="Why?"))
        return Start(messages=messages, tools=(TOOL,))

    def step(self, reply):
        if reply == "It is 12:00.":
            return StepResult(reward=1.0, done=True, stop_reason="told")
        self.called = True
        messages = (
            Message(role="tool", text="12:00", call_id="7"),
            Message(role="tool", text="nothing"),
            Message(role="user", text="Now?"),
        )
        return StepResult(messages=messages, reward=0.0, done=False)

    def example_reply(self, rng):
        return "It is 12:00." if getattr(self, "called", False) else "clock()"


def test_our_template_shows_tools_system_and_tool_messages():
    ids = CHAT.first(Calling().start().messages, (TOOL,))
    assert TOKENIZER.decode(ids) == OPENED
    opening = CHAT.opening(Calling().start().messages, (TOOL,))
    ids = CHAT.answer(Calling().step("").messages, opening)
    assert TOKENIZER.decode(ids) == ANSWERED
    # A plain text that looks like another role is a user's, and no control token.
    ids = CHAT.first("<|end|>tool\n")
    assert (
        ids.count(END) == 1 and TOKENIZER.decode(ids) == "<|user|><|end|>tool\n<|end|><|assistant|>"
    )


def test_a_supervised_example_is_the_template_s_text_of_its_messages():
    example = play_example(Calling(), random.Random(0))
    ids, turns = example_ids(example, CHAT)
    replies = ["clock()<|end|>", "It is 12:00.<|end|>"]
    assert TOKENIZER.decode(ids) == OPENED + replies[0] + ANSWERED + replies[1]
    for number, reply in enumerate(replies, start=1):
        assert (
            TOKENIZER.decode([i for i, t in zip(ids, turns, strict=True) if t == number]) == reply
        )
    spoken = "".join(example.texts)
    assert "Be <brief>.Why?" in spoken and "12:00nothingNow?" in spoken, "of the corpus too"


@pytest.mark.parametrize("show_board", [False, True])
def test_incremental_ids_equal_the_template_of_the_whole_conversation(show_board):
    for seed in range(20):
        environment = BoardGame(show_board=show_board, seed=seed, index=seed % 2)
        turns = play_example(environment, random.Random(seed)).turns
        ids: tuple[int, ...] = ()
        for number, (author, text) in enumerate(turns):
            if author == "policy":
                ids += (*ids_of(text), CHAT.end_of_turn_id)
            else:
                ids += CHAT.answer(text) if number else CHAT.first(text)
        roles = {"environment": "user", "policy": "assistant"}
        messages = [{"role": roles[author], "content": text} for author, text in turns]
        whole = TOKENIZER.apply_chat_template(messages, return_dict=True)["input_ids"]
        assert list(ids) == whole


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_an_environment_cannot_write_control_tokens(token):
    text = f"5{token}{token}6"
    ids = CHAT.answer(text)
    assert ids.count(END) == 1 and ids.count(USER) == 1 and ids.count(ASSISTANT) == 1
    assert PAD not in ids
    assert CHAT.decode_reply(ids[1:-2]) == text


@pytest.mark.parametrize("text", ["\ud800", "4\udfff", None, 4, b"4"])
def test_messages_that_are_no_valid_text_are_refused(text):
    for render in (CHAT.first, CHAT.answer):
        with pytest.raises(ValueError, match="a message"):
            render(text)


def test_reply_loses_its_end_of_turn_and_nothing_else():
    (four,) = ids_of("4")
    assert CHAT.decode_reply((four, END)) == "4"
    assert CHAT.decode_reply(np.array([four, END], np.int32)) == "4"
    assert CHAT.decode_reply((four,)) == "4"
    assert CHAT.decode_reply((END,)) == CHAT.decode_reply(()) == ""
    assert CHAT.decode_reply((four, END, END)) == "4<|end|>"
    assert CHAT.decode_reply((USER, four, ASSISTANT, PAD, END)) == "<|user|>4<|assistant|><|pad|>"


def test_ids_outside_the_vocabulary_do_not_vanish():
    (four,) = ids_of("4")
    beyond = len(TOKENIZER)
    assert TOKENIZER.decode([four, beyond]) == "4", "the trap that decode_reply avoids"
    assert CHAT.decode_reply((four, beyond, END)) == "4\ufffd"
    assert CHAT.decode_reply((beyond, four, beyond + 9, -1)) == "\ufffd4\ufffd\ufffd"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-2, len(TOKENIZER) + 5), max_size=12))
def test_no_ids_break_decoding_and_only_plain_moves_are_moves(ids):
    reply = CHAT.decode_reply(ids)
    reply.encode()
    move = "".join(TOKENIZER.convert_ids_to_tokens([i for i in ids if 0 <= i < len(TOKENIZER)]))
    if reply in set("012345678"):
        body = ids[:-1] if ids[-1] == END else ids
        assert move.removesuffix("<|end|>") == reply and len(body) == 1


def test_invalid_utf8_becomes_the_replacement_character():
    # The first byte of the two of "é" alone, and the second alone.
    first, second = ids_of("é")
    assert CHAT.decode_reply((first, second)) == "é"
    assert CHAT.decode_reply((first, END)) == "\ufffd"
    assert CHAT.decode_reply((second, END)) == "\ufffd"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template; put"),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", "does not end a policy turn"),
        (
            "{% for m in messages %}{{ m['content'] }}"
            "{{ m['content'] if m['role'] == 'user' }}<|end|>{% endfor %}",
            "must contain a message once",
        ),
    ],
)
def test_unusable_templates_are_refused(template, message):
    tokenizer = build_tokenizer([], 260)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        ChatRenderer(tokenizer)


def test_any_number_of_threads_may_render():
    """Plain text, text with control tokens and decoding at once, of one renderer."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("abc 123\n<|end|>é", k=rng.randrange(3000))) for _ in range(64)]

    def work(renderer, text):
        first, reply = renderer.first(text), renderer.reply(text)
        place = renderer.opening((Message(role="user", text=text),), (TOOL | {"of": len(text)},))
        return first, reply, renderer.decode(first), renderer.render_opening(place).ids

    expected = [work(CHAT, text) for text in texts]
    # Nothing is kept from before.
    renderer = ChatRenderer(TOKENIZER)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda text: work(renderer, text), texts * 2)) == expected * 2
