# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the folders beside it: tokenizers that behave as those of the families, without weights.

    PYTHONPATH=. python tests/tokenizers/make_tokenizers.py

Each is a BPE of a few hundred entries with the family's special tokens, and with its way of taking
text apart and putting it together: bytes (Qwen's behind NFC), or SentencePiece's blanks, of which
Mistral puts one before a text (v0.3, here mistral) or before every text between control tokens
(v0.1, here mistral1), with bytes for what the vocabulary lacks. The chat templates, which behave as
the families' do, are written by hand: FAMILY/chat_template.jinja is read and kept. Made with
transformers 5.23.0, tokenizers 0.23.3.
"""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
NUM_MERGES = 60
CORPUS = [
    "you are a helpful assistant. the user asks, the assistant answers with a tool call. ",
    '{"name": "function", "arguments": {"city": "Paris"}} the weather in Paris is fine today. ',
    "system user assistant model tool response parameters type string description ",
]

BLANK = "\u2581"
# How Qwen and Llama 3 cut text: up to one and up to three digits in a piece.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Control tokens, which nobody can write as text; marks, which are tokens but text; settings.
FAMILIES = {
    "qwen2": {
        "kind": "nfc",
        "control": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "marks": ["<tool_call>", "</tool_call>"],
        "tokens": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "ends": ["<|im_end|>", "<|endoftext|>"],
        "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
    },
    "qwen3": {
        "kind": "nfc",
        "control": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "marks": [
            *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
            *("<think>", "</think>"),
        ],
        "tokens": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "ends": ["<|im_end|>", "<|endoftext|>"],
        "sampling": {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
    },
    "llama3": {
        "kind": "bytes",
        "control": [
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|finetune_right_pad_id|>"),
        ],
        "marks": [],
        "tokens": {
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "pad_token": "<|finetune_right_pad_id|>",
        },
        "ends": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        "sampling": {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    },
    "mistral": {
        "kind": "metaspace",
        "control": [
            *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ],
        "marks": [],
        "tokens": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "ends": ["</s>"],
        "sampling": {},
    },
    "mistral1": {
        "kind": "prepend",
        "control": ["<unk>", "<s>", "</s>"],
        "marks": [],
        "tokens": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "ends": ["</s>"],
        "sampling": {},
    },
    "gemma3": {
        "kind": "replace",
        "control": ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
        "marks": ["\n\n", BLANK * 2],
        "tokens": {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
        },
        "ends": ["<eos>", "<end_of_turn>"],
        "sampling": {"do_sample": True, "top_k": 64, "top_p": 0.95},
    },
}


def make(name: str, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json."""
    family = FAMILIES[name]
    kind = family["kind"]
    bpe = _of_bytes(kind) if kind in ("nfc", "bytes") else _with_blanks(kind, family["control"])
    bpe.add_special_tokens(family["control"])
    bpe.add_tokens([AddedToken(mark, normalized=False) for mark in family["marks"]])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, clean_up_tokenization_spaces=False, **family["tokens"]
    )
    tokenizer.chat_template = (HERE / name / "chat_template.jinja").read_text()
    tokenizer.save_pretrained(str(folder))
    ends = tokenizer.convert_tokens_to_ids(family["ends"])
    generation = {"eos_token_id": ends if len(ends) > 1 else ends[0], **family["sampling"]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _of_bytes(kind: str) -> Tokenizer:
    """Byte-level BPE, as Qwen's and Llama 3's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE())
    if kind == "nfc":
        bpe.normalizer = normalizers.NFC()
    pieces = Regex(PIECES.replace("DIGITS", "" if kind == "nfc" else "{1,3}"))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + NUM_MERGES, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CORPUS, trainer)
    return bpe


def _with_blanks(kind: str, control: list[str]) -> Tokenizer:
    """BPE over characters, in which "\u2581" is a blank, as SentencePiece makes it."""
    # Words for merges as in the real ones: a blank begins a word.
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement=BLANK, prepend_scheme="never")
    alphabet = [BLANK, "\n", *map(chr, range(33, 127)), "é"]
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + NUM_MERGES, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].get)
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    bpe = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", BLANK)
    decoded = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "replace":
        bpe.normalizer = replace
        bpe.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    elif kind == "metaspace":
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=BLANK, prepend_scheme="first", split=False
        )
    else:
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), replace])
    if kind != "replace":
        decoded.append(decoders.Strip(" ", 1, 0))
    bpe.decoder = decoders.Sequence(decoded)
    return bpe


if __name__ == "__main__":
    for name in FAMILIES:
        make(name, HERE / name)
