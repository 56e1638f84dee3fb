# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of serving."""

import dataclasses

from earl_jax.engine.config import Sampling

# The largest seed of a request; those of requests that name none are greater.
MAX_SEED = 2**30 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The sizes of a server.

    Prompts have up to `max_prompt_tokens` tokens, and `context_tokens` together with their reply;
    messages name what set the former: `prompt_limit`.
    `sampling` applies to requests that bring none. The KV cache is allocated once. It holds
    `cache_tokens` over all slots, and at least one whole context a row shard; 0: one for every
    slot. Where it is full requests wait for others. A slot's table of its pages holds
    `first_context_tokens` tokens at first (0: all), and doubles as requests grow.

    `keep_replies` is that of `CacheRules`: the next request of a conversation reads only what is
    new. Without it a reply depends on its prompt, its seed and the weights alone, to the last bit.
    """

    max_prompt_tokens: int = 64
    context_tokens: int = 128
    prompt_limit: str = "--max_prompt_tokens"
    first_context_tokens: int = 0
    cache_tokens: int = 0
    sampling: Sampling = Sampling()
    keep_replies: bool = False

    @property
    def first_slot_tokens(self) -> int:
        """Tokens that a slot's table of pages holds at first."""
        return min(self.first_context_tokens or self.context_tokens, self.context_tokens)
