# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The work of all engines: one tiny Qwen2, prompts of an exact length, lengths of replies."""

import dataclasses
import functools
import random

from transformers import PreTrainedTokenizerFast

from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.tokenizer import build_tokenizer
from earl_jax.models.config import ModelConfig

VOCAB_SIZE = 2048
MAX_POSITIONS = 32_768
MODEL = ModelConfig(
    num_layers=4,
    width=256,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    ffn_size=1024,
    attention_bias=True,
)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of VOCAB_SIZE ids, and any number of two digits as one of them."""
    # Numbers of two digits most often, so that they are merged before those of four.
    two = [" ".join(f"{number:02}" for number in range(100))] * 100
    return build_tokenizer([*two, " ".join(map(str, range(1000, 10_000)))], VOCAB_SIZE)


@functools.cache
def renderer() -> ChatRenderer:
    """Returns the renderer of `tokenizer`."""
    return ChatRenderer(tokenizer())


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of an environment, and the ids that a chat makes of it."""

    text: str
    ids: tuple[int, ...]


def make_messages(seed: str, number: int, num_tokens: int) -> list[Message]:
    """A conversation's `number` messages to the policy, each `num_tokens` ids with its frame."""
    rng = random.Random(seed)
    made = []
    for index in range(number):
        render = renderer().answer if index else renderer().first
        # A number and a space are an id each; the frame takes the others.
        pieces = [" " if i % 2 else f"{rng.randrange(100):02}" for i in range(num_tokens)]
        text = "".join(pieces[: num_tokens - len(render(""))])
        ids = render(text)
        assert len(ids) == num_tokens, f"{len(ids)} ids where {num_tokens} were wanted"
        made.append(Message(text, ids))
    return made


# Shares of the replies that are so many times the median; all others are 16 times.
TAIL = ((0.5, 0.375), (1, 0.375), (2, 0.125), (4, 0.09375), (8, 0.0234375))


def tail_lengths(number: int, median: int) -> list[int]:
    """Lengths of replies in order of arrival: most short, the longest 16 times the median.

    Of 256: 96 of half the median, 96 of the median, 32 of twice, 24 of 4 times, 6 of 8 times, and 2
    of 16 times. The same for all engines, and few different ones, so that a static batch, compiled
    for its longest, is compiled seldom.
    """
    lengths = [int(median * times) for times, share in TAIL for _ in range(int(number * share))]
    lengths += [16 * median] * (number - len(lengths))
    random.Random("lengths").shuffle(lengths)
    return lengths
