# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The engine of a server: the rollouts' own, with the sizes of serving."""

import dataclasses

from earl_jax.engine.config import SlotRules
from earl_jax.engine.engine import Engine
from earl_jax.engine.pages import Pool, dense_pool
from earl_jax.models.config import ModelConfig
from earl_jax.rollout.config import RolloutConfig, make_engine_config
from earl_jax.serving.config import ServingConfig
from earl_jax.serving.tokenizer import ServedTokenizer
from earl_jax.sharding.layout import Layout

# Tokens of a prompt that a slot reads in a round. While others reply, a round reads at most as many
# as cost about what its decode steps cost (`Engine.append_budget`), or one such chunk.
CHUNK_TOKENS = 256
# Decode steps of a round. A client has its tokens round by round, and a request that comes or goes
# waits for one; 8 steps cost the host as much as one does.
BURST = 8


def rollout_config(num_slots: int, page_size: int, **changes: object) -> RolloutConfig:
    """Returns the settings under which requests are played, with these changes."""
    settings = RolloutConfig(
        num_slots=num_slots,
        episodes_per_step=num_slots,
        group_size=1,
        chunk_size=CHUNK_TOKENS,
        burst=BURST,
        patience_s=0.0,
        page_size=page_size,
    )
    return dataclasses.replace(settings, **changes)  # pyright: ignore[reportArgumentType]


def build_engine(
    rollout: RolloutConfig,
    model: ModelConfig,
    vocab_size: int,
    layout: Layout,
    *,
    ends: frozenset[int],
    choice_branches: int,
    seed: int,
) -> Engine:
    """Returns the engine; a reply ends with any of `ends`."""
    config = make_engine_config(
        rollout,
        model,
        vocab_size,
        num_devices=layout.num_row_shards,
        seed=seed,
        model_logprobs=True,
    )
    rules: SlotRules = config.rules._replace(
        end_of_turn_ids=tuple(sorted(ends)), truncates=True, choice_branches=choice_branches
    )
    return Engine(dataclasses.replace(config, rules=rules), layout)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ServedEngine:
    """An engine (`build_engine`), the settings that it was built by, and its tokenizer."""

    engine: Engine
    rollout: RolloutConfig
    serving: ServingConfig
    tokenizer: ServedTokenizer

    @property
    def pool(self) -> Pool:
        """The pages of the KV cache."""
        serving, rule = self.serving, self.engine.config.page_rule
        shards = self.engine.layout.num_row_shards
        pool = dense_pool(shards, self.rollout.num_slots, serving.context_tokens, rule)
        if not serving.cache_tokens:
            return pool
        least = rule.most_pages(serving.context_tokens)
        tokens = serving.cache_tokens // shards
        pages = max(least, rule.num_groups * tokens // rule.page_size)
        return pool._replace(pages=min(pool.pages, pages))

    @property
    def cache_tokens(self) -> int:
        """Tokens of the KV cache, over all slots."""
        rule = self.engine.config.page_rule
        return self.pool.total * rule.page_size // rule.num_groups
