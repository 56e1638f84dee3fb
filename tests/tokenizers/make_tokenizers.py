# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the folders beside it: tokenizers that behave as those of the families, without weights.

    PYTHONPATH=. python tests/tokenizers/make_tokenizers.py

Each is a byte-level BPE of a few hundred entries with the family's special tokens. The chat
templates, which behave as the families' do, are written by hand: FAMILY/chat_template.jinja is read
and kept. Made with transformers 5.23.0, tokenizers 0.23.3.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
NUM_MERGES = 60
CORPUS = [
    "you are a helpful assistant. the user asks, the assistant answers with a tool call. ",
    '{"name": "function", "arguments": {"city": "Paris"}} the weather in Paris is fine today. ',
    "system user assistant model tool response parameters type string description ",
]

# Control tokens, which nobody can write as text; marks, which are tokens but text; settings.
FAMILIES = {
    "qwen2": {
        "control": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "marks": ["<tool_call>", "</tool_call>"],
        "tokens": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "ends": ["<|im_end|>", "<|endoftext|>"],
        "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
    },
    "qwen3": {
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
        "control": [
            *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ],
        "marks": [],
        "tokens": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "ends": ["</s>"],
        "sampling": {},
    },
    "gemma3": {
        "control": ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        "marks": [],
        "tokens": {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
        "ends": ["<eos>", "<end_of_turn>"],
        "sampling": {"do_sample": True, "top_k": 64, "top_p": 0.95},
    },
}


def make(name: str, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json."""
    family = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + NUM_MERGES, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CORPUS, trainer)
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


if __name__ == "__main__":
    for name in FAMILIES:
        make(name, HERE / name)
