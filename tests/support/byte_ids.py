# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Ids of single bytes in a tokenizer's vocabulary."""

from earl_jax.envs.text.tokenizer import build_tokenizer

OURS = build_tokenizer(["naïve café 你好 🙂🙃"], 300)


def byte_ids(data: bytes, tokenizer=OURS) -> list[int]:
    """One token of the vocabulary for each byte."""
    vocab = tokenizer.get_vocab()
    if "<0x00>" in vocab:
        return [vocab[f"<0x{byte:02X}>"] for byte in data]
    names = {}
    for byte in range(256):
        # The byte-level alphabet, as GPT-2 made it.
        plain = 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
        names[byte] = chr(byte if plain else 256 + len([n for n in names.values() if ord(n) > 255]))
    return [vocab[names[byte]] for byte in data]
