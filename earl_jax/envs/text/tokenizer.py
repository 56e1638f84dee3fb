# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A small tokenizer trained on the environment's own text, so that nothing has to be downloaded."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from earl_jax.settings.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD = "<|pad|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
SPECIAL_TOKENS = (PAD, USER, ASSISTANT, END)
# The 256 bytes and the special tokens: with these alone every text can be encoded.
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

# Text is cut only around numbers and before line breaks; whatever lies between may grow into one
# token. Tic-Tac-Toe's opening is then 5 or 7 tokens instead of 16, and a move is the same token
# wherever it stands.
_PIECES = r"[0-9]+|\n?[^0-9\n]+|\n"

# A message that is not a user's begins with a line that says what it is: "system", "tools" (a JSON
# description a line), or "tool" with the id of its call. These are words and no control tokens, so
# that vocabularies, and runs that have them, stay as they are.
CHAT_TEMPLATE = (
    "{% if tools %}"
    "<|user|>tools{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}<|end|>"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% elif message['role'] == 'system' %}"
    "<|user|>{{ 'system\\n' + message['content'] }}<|end|>"
    "{% elif message['role'] == 'tool' %}"
    "<|user|>tool{% if message['tool_call_id'] %}{{ ' ' + message['tool_call_id'] }}{% endif %}"
    "{{ '\\n' + message['content'] }}<|end|>"
    "{% else %}"
    "<|user|>{{ message['content'] }}<|end|>"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Trains a byte-level BPE on `texts`; the same texts give the same vocabulary.

    Every text round-trips, seen or not. `len` of the result is at most `vocab_size`: training stops
    early when nothing is left to merge.

    Raises ValueError for a `vocab_size` too small for the 256 bytes and the special tokens.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise InputError(
            f"vocab_size is {vocab_size}; it must be at least {MIN_VOCAB_SIZE}: 256 bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # A lone surrogate, which no text can have, ends its own episode later.
    bpe.train_from_iterator((text.encode(errors="replace").decode() for text in texts), trainer)
    return tokenizer_from(bpe.to_str())


def tokenizer_from(text: str) -> "PreTrainedTokenizerFast":
    """Returns a tokenizer of `build_tokenizer` from the text of its tokenizer.json."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text),
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: str | os.PathLike[str]) -> None:
    """Writes the tokenizer and its chat template in the format of Hugging Face."""
    tokenizer.save_pretrained(os.fspath(folder))


def load_tokenizer(folder: str | os.PathLike[str]) -> "PreTrainedTokenizerFast":
    """Returns the tokenizer and chat template of a folder, without the network.

    It is what tokenizer.json says. `AutoTokenizer` would put Qwen's way of cutting text in the
    place of the file's wherever config.json says qwen2 (transformers 5.23).

    Raises ValueError where the folder holds no tokenizer.
    """
    if not (Path(folder) / "tokenizer.json").is_file():
        raise InputError(f"{os.fspath(folder)!r} holds no tokenizer: tokenizer.json is missing")
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(os.fspath(folder), local_files_only=True)
