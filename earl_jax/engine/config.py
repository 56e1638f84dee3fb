# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of an engine: its programs' sizes, the rules of a round, sampling."""

import dataclasses
import functools
from typing import Literal, NamedTuple

from earl_jax.models.config import ModelConfig
from earl_jax.models.layer_groups import PageRule, make_page_rule
from earl_jax.settings.errors import InputError

# Stop ids that a slot holds on the devices, and what is in place of one that it does not have.
MAX_STOP_IDS, NO_ID = 8, -1
# The number of tokens where there is no limit.
NO_LIMIT = 2**31 - 1
# Tokens of a forward pass that appends chunks, of one data shard. On a chip about as many as it
# computes in the time in which it reads the weights (H100: 295 in bf16, v5e: 240, v6e: 560): fewer
# would cost as much, and more would make a short answer dear. On a CPU of two cores a pass of 64
# reads long prompts as fast as one of 256 (benchmarks/appending.md).
APPEND_TOKENS, APPEND_TOKENS_ON_CPU = 256, 64
# Beyond it every token is as likely as any other.
_MOST_TEMPERATURE = 1e6
# Tokens of a tile (appending.py). Half of a tile is empty on the average at the end of a chunk.
TILE_WIDTH = 16


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

    @property
    def truncates(self) -> bool:
        """True where some tokens are cut off, at whatever temperature."""
        return (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)

    def validate(self, where: str) -> None:
        """Raises ValueError naming the field, after `where`, that breaks a rule."""
        if not 0 <= self.temperature <= _MOST_TEMPERATURE:
            raise InputError(
                f"{where}temperature is {self.temperature}; it must be finite and at least 0 "
                f"(0 takes the likeliest token), and at most {_MOST_TEMPERATURE:g}"
            )
        if not 0 <= self.top_k < 2**31:
            raise InputError(f"{where}top_k is {self.top_k}; it must be at least 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise InputError(f"{where}top_p is {self.top_p}; it must lie in (0, 1] (1: all tokens)")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"{where}min_p is {self.min_p}; it must lie in [0, 1] (0: all tokens)")
        if self.temperature == 0 and self.truncates:
            raise InputError(
                f"{where}temperature is 0, which takes the likeliest token: {where}top_k, "
                f"{where}top_p and {where}min_p have no effect beside it; remove them"
            )


class SlotRules(NamedTuple):
    """Rules of a round that are fixed when its program is compiled.

    A slot has at most `burst` forward passes a round. Each of `end_of_turn_ids` ends a turn. Chunks
    are appended in tiles of `tile_width` tokens, `append_tokens` a pass (appending.py). With
    `model_logprobs` each token's log-prob under the model itself is recorded too, which takes one
    more pass over the logits. Without `truncates` no slot's sampling may truncate, and a decode
    step has no branches for that. With `choice_branches` a turn can be restricted to replies whose
    tree has at most so many branches, or to so many tokens. With `choice_width` the rows of
    experience say which tokens, at most so many, each one was chosen among, and log-probs under the
    model itself are among these too. With `draft` above 0 each forward pass also scores up to so
    many drafted tokens: those that followed the slot's last `ngram` ids before (`drafts.look_up`).
    `attention` over pages: see `kernels.choose_pages_kernel`.
    """

    burst: int
    end_of_turn_ids: tuple[int, ...]
    tile_width: int = TILE_WIDTH
    append_tokens: int = APPEND_TOKENS_ON_CPU
    model_logprobs: bool = False
    truncates: bool = True
    choice_branches: int = 0
    choice_width: int = 0
    ngram: int = 3
    draft: int = 0
    attention: Literal["auto", "blockwise", "triton", "pallas_tpu"] = "auto"

    @property
    def round_tokens(self) -> int:
        """The most tokens that a slot generates in a round."""
        return self.burst * (1 + self.draft)


def append_tokens_for(platform: str | None, model: ModelConfig) -> int:
    """Returns the tokens of a pass that appends chunks; `platform` None is the CPU.

    On a chip so many times more of a mixture of experts as it has experts for each that a token
    goes to: a pass reads all of them, and computes with few.
    """
    if platform in (None, "cpu"):
        return APPEND_TOKENS_ON_CPU
    return APPEND_TOKENS * max(1, model.num_experts // max(1, model.experts_per_token))


def tile_width_for(width: int, page_size: int, parts: int, *, whole_pages: bool) -> int:
    """Returns the tokens of a tile: `width`, so that they divide over `parts` devices; or a page.

    Where `whole_pages` are written, two tiles of one pass must not write to one page.
    """
    return page_size if whole_pages else width + -width % parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings that one engine's programs are compiled for.

    `num_slots` episodes live at once over all devices, and write `num_rows` rows of experience,
    spare ones included (`rows.Rows`). `chunk_size` tokens of a
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
    page_size: int = 64
    weight_dtype: Literal["compute", "int8"] = "compute"
    kv_dtype: Literal["compute", "int8"] = "compute"

    @functools.cached_property
    def page_rule(self) -> PageRule:
        """The pages of an episode."""
        windows, round_tokens = self.model.paged_windows, self.rules.round_tokens
        return make_page_rule(windows, self.page_size, self.chunk_size, round_tokens)
