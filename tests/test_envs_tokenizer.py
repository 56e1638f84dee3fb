# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The trained tokenizer: one token a move, exact round trips, the same vocabulary every time."""

import functools
import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from earl_jax.envs.games.board_game import BoardGame
from earl_jax.envs.games.openspiel import load_game
from earl_jax.envs.text.tokenizer import (
    ASSISTANT,
    END,
    MIN_VOCAB_SIZE,
    PAD,
    SPECIAL_TOKENS,
    USER,
    build_tokenizer,
    load_tokenizer,
    save_tokenizer,
)
from tests.support import run_python
from tests.support.episodes import game_corpus


def build(game="tic_tac_toe", vocab_size=512, num_games=300):
    make = functools.partial(BoardGame, game=game)
    return build_tokenizer(game_corpus(num_games, make=make), vocab_size)


TOKENIZER = build()


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def fingerprint() -> str:
    return hashlib.sha256(TOKENIZER.backend_tokenizer.to_str().encode()).hexdigest()


def test_special_tokens_come_first_and_have_their_offices():
    assert [TOKENIZER.convert_ids_to_tokens(i) for i in range(4)] == list(SPECIAL_TOKENS)
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == (END, PAD)
    assert set(TOKENIZER.all_special_tokens) == set(SPECIAL_TOKENS)
    assert len(TOKENIZER) <= 512


@pytest.mark.parametrize(
    "game", ["tic_tac_toe", "connect_four", "connect_four(rows=5,columns=5)", "othello", "hex"]
)
def test_every_move_is_one_and_the_same_token_wherever_it_stands(game):
    tokenizer = build(game, num_games=100)
    for action in range(load_game(game).num_distinct_actions()):
        (token,) = ids_of(tokenizer, str(action))
        for text in (f"{USER}{action}{END}", f"{ASSISTANT}{action}{END}", f" o plays {action}."):
            assert token in ids_of(tokenizer, text)
        assert len(ids_of(tokenizer, f"{ASSISTANT}{action}{END}")) == 3


def test_training_is_deterministic_also_across_processes():
    assert build().get_vocab() == TOKENIZER.get_vocab()
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r});"
        "import test_envs_tokenizer; print(test_envs_tokenizer.fingerprint())"
    )
    assert run_python("-c", code).stdout.strip() == fingerprint()


def test_vocabulary_of_bytes_alone_encodes_everything():
    tokenizer = build_tokenizer([], MIN_VOCAB_SIZE)
    assert len(tokenizer) == MIN_VOCAB_SIZE == 260
    # Code points up to U+07FF use every byte that UTF-8 has below 0xE0; these add the others.
    text = "".join(map(chr, range(0x800))) + "".join(chr(b << 12) for b in range(1, 13))
    text += "".join(chr(b << 18) for b in range(1, 5))
    ids = ids_of(tokenizer, text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    with pytest.raises(ValueError, match="vocab_size is 259; it must be at least 260"):
        build_tokenizer([], MIN_VOCAB_SIZE - 1)


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_any_text_round_trips(text):
    ids = TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert TOKENIZER.decode(ids) == text


def test_chat_template_marks_what_the_policy_wrote():
    messages = [
        {"role": "user", "content": "moves are 0 to 8."},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "5"},
        {"role": "assistant", "content": "6"},
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert text == (
        "<|user|>moves are 0 to 8.<|end|><|assistant|>4<|end|><|user|>5<|end|><|assistant|>6<|end|>"
    )
    marked = TOKENIZER.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    mine = [t for t, m in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if m]
    assert TOKENIZER.decode(mine) == "4<|end|>6<|end|>"
    opened = TOKENIZER.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert opened == "<|user|>moves are 0 to 8.<|end|><|assistant|>"


def test_saved_tokenizer_loads_as_itself_also_with_auto_tokenizer(tmp_path):
    save_tokenizer(TOKENIZER, tmp_path)
    text = "tic_tac_toe. you play x. moves are 0 to 8.<|end|>é"
    for loaded in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.get_vocab() == TOKENIZER.get_vocab()
        assert ids_of(loaded, text) == ids_of(TOKENIZER, text)
        assert loaded.chat_template == TOKENIZER.chat_template
        assert (loaded.eos_token_id, loaded.pad_token_id) == (3, 0)
        assert set(loaded.all_special_tokens) == set(SPECIAL_TOKENS)
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_lone_surrogate_in_the_text_is_no_error():
    assert ids_of(build_tokenizer(["x \ud800 y"], 300), "x") == [
        TOKENIZER.convert_tokens_to_ids("x")
    ]
