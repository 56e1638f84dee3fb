# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The task and the settings of both trainers. Imports nothing: TRL's environment uses it too."""

PROMPTS = tuple(f"letters {number}" for number in range(8))
GROUP_SIZE = 8
MAX_TOKENS = 16
LEARNING_RATE = 2e-3
BETAS = (0.9, 0.999)
EPS = 1e-8
CLIP = 0.2
MAX_GRAD_NORM = 1.0
# A reply needs so many letters to be perfect.
FULL_LENGTH = 8
# These end a reply, as the tokenizer's end of turn does, so that random replies do end: one that
# does not end within MAX_TOKENS earns 0.
ENDS = tuple(map(chr, range(32)))


def reward(reply: str, **_: object) -> float:
    """Returns the capital letters of a reply, divided by its characters, of which 8 are the least.

    "ABCD" earns 4/8, "ABCDEFGH" 1, "ABCDEFGHij" 8/10.
    """
    return sum("A" <= char <= "Z" for char in reply) / max(FULL_LENGTH, len(reply))
