# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The task and the settings of both trainers. TRL's environment imports it too."""

from typing import Any

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
# Characters that end a reply, as the tokenizer's end of turn does, so that many random ones do: a
# reply that does not end within MAX_TOKENS earns 0.
ENDS = tuple(map(chr, range(8)))


def end_ids(tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids of ENDS, each a byte and so a token."""
    return tuple(tokenizer.encode(char)[0] for char in ENDS)


def reward(reply: str, **_: object) -> float:
    """Returns the capital letters of a reply, divided by its characters, of which 8 are the least.

    "ABCD" earns 4/8, "ABCDEFGH" 1, "ABCDEFGHij" 8/10.
    """
    return sum("A" <= char <= "Z" for char in reply) / max(FULL_LENGTH, len(reply))
