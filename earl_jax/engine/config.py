# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of an engine: its programs' sizes, the rules of a round, sampling."""

import dataclasses
import math
from typing import Literal, NamedTuple

from earl_jax.models.config import ModelConfig
from earl_jax.settings.errors import InputError

# Stop ids that a slot holds on the devices.
MAX_STOP_IDS = 8
# Slots of a data shard whose full chunks are appended in one forward pass.
APPEND_ROWS = 8
# Short chunks are appended in a narrower forward pass: of so many tokens a slot, or a 16th of a
# chunk where that is more; and of more slots at once, so that it has about NARROW_TOKENS tokens.
NARROW_WIDTH, NARROW_TOKENS = 16, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution of tokens: tempered, then cut to `top_k`, then to `top_p`, then to `min_p`.

    `temperature` 0 takes the likeliest token. `top_k` keeps the k likeliest tokens (0: all),
    `top_p` the fewest of these whose share of their mass is at least so much (1: all; arXiv
    1904.09751), `min_p` those at least so likely as that fraction of the likeliest (0: all; arXiv
    2407.01082). Tokens as likely as the last that is kept are kept too.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def validate(self, where: str) -> None:
        """Raises ValueError naming the field, after `where`, that breaks a rule."""
        if not 0 <= self.temperature < math.inf:
            raise InputError(
                f"{where}temperature is {self.temperature}; it must be finite and at least 0 "
                "(0 takes the likeliest token)"
            )
        if not 0 <= self.top_k < 2**31:
            raise InputError(f"{where}top_k is {self.top_k}; it must be at least 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise InputError(f"{where}top_p is {self.top_p}; it must lie in (0, 1] (1: all tokens)")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"{where}min_p is {self.min_p}; it must lie in [0, 1] (0: all tokens)")
        cuts = (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)
        if self.temperature == 0 and cuts:
            raise InputError(
                f"{where}temperature is 0, which takes the likeliest token: {where}top_k, "
                f"{where}top_p and {where}min_p have no effect beside it; remove them"
            )


class SlotRules(NamedTuple):
    """Rules of a round that are fixed when its program is compiled.

    A slot has at most `burst` forward passes a round. Each of `end_of_turn_ids` ends a turn. Chunks
    are appended for `append_rows` slots of a data shard at a time, short ones apart
    (`append_widths`). A decode step computes
    `step_rows` rows of a data shard (`decode_some`); 0: one for each of its slots. With
    `model_logprobs` each token's log-prob under the model itself is recorded too, which takes one
    more pass over the logits. With `choice_branches` a turn can be restricted to replies whose tree
    has at most so many branches, or to so many tokens. With `draft` above 0 each forward pass also
    scores up to so many drafted tokens: those that followed the slot's last `ngram` ids before
    (`drafts.look_up`). `attention` over pages: see `kernels.choose_pages_kernel`.
    """

    burst: int
    end_of_turn_ids: tuple[int, ...]
    append_rows: int = APPEND_ROWS
    narrow_width: int = NARROW_WIDTH
    step_rows: int = 0
    model_logprobs: bool = False
    choice_branches: int = 0
    ngram: int = 3
    draft: int = 0
    attention: Literal["auto", "blockwise", "triton", "pallas_tpu"] = "auto"

    def append_widths(self, chunk_size: int, parts: int = 1) -> tuple[int, ...]:
        """Returns the widths of the forward passes that append chunks, in ascending order.

        An answer's chunk goes into the first that it fits in, whatever its neighbours' lengths are,
        so that its numbers do not depend on them. A prompt's goes into the last: passes of several
        widths round differently, and how much of a prompt is left to read depends on what other
        slots have read. Widths divide over `parts` devices, if a chunk does.

        Example: chunks of 128 tokens: (16, 128); of 512: (32, 512); of 16: (16,).
        """
        narrow = max(self.narrow_width, chunk_size // 16)
        narrow += -narrow % parts
        return (narrow, chunk_size) if narrow < chunk_size else (chunk_size,)

    def rows_appended(self, width: int, chunk_size: int) -> int:
        """Returns the slots of a forward pass of this width: at least `append_rows`.

        It has no more tokens than that of full chunks, or NARROW_TOKENS.
        """
        tokens = min(NARROW_TOKENS, self.append_rows * chunk_size)
        return max(self.append_rows, tokens // width)

    @property
    def round_tokens(self) -> int:
        """The most tokens that a slot generates in a round."""
        return self.burst * (1 + self.draft)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings that one engine's programs are compiled for.

    `num_slots` episodes live at once over all devices, and write `num_rows` rows of experience,
    spare ones included (`rows.Rows`). A decode step of a rollout has `step_rows` rows over all
    devices, 0: one for each slot; `rules.step_rows` is derived from it. `chunk_size` tokens of a
    prompt or an answer are appended per slot and round. The KV cache comes in pages of `page_size`
    tokens. `weight_dtype` is "compute", the model's compute type, or "int8"
    (models/quantization.py).
    """

    model: ModelConfig
    vocab_size: int
    num_slots: int
    num_rows: int
    chunk_size: int
    rules: SlotRules
    seed: int
    step_rows: int = 0
    page_size: int = 64
    weight_dtype: Literal["compute", "int8"] = "compute"
    kv_dtype: Literal["compute", "int8"] = "compute"
