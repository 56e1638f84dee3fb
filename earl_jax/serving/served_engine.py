# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The engine of a server: the rollouts' own, with the sizes of serving, and services over it."""

import dataclasses

import jax

from earl_jax.engine.config import SlotRules
from earl_jax.engine.engine import Engine
from earl_jax.engine.pages import Pool, dense_pool
from earl_jax.engine.row_copies import RowMove
from earl_jax.engine.rows import NO_ROW
from earl_jax.engine.session import Policy, Session, empty_session, relocate
from earl_jax.envs.text.conversation import Completion
from earl_jax.models.config import ModelConfig
from earl_jax.rollout.config import CacheRules, Limits, RolloutConfig, make_engine_config
from earl_jax.rollout.episode import Prompt, Task
from earl_jax.rollout.rounds import OnTokens
from earl_jax.rollout.row_pool import move_rows
from earl_jax.rollout.service import RolloutService
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

    def open(self, policy: Policy, on_tokens: OnTokens) -> RolloutService:
        """Returns a service with empty slots, whose tables and rows are short at first.

        Before that a round runs with the longest that a request can widen them to: no request is
        the first to need so much memory.

        Raises:
            JaxRuntimeError: there is too little memory.
        """
        if self.serving.first_slot_tokens < self.serving.context_tokens:
            self._play_longest(policy)
        return self._open(policy, on_tokens)

    def _play_longest(self, policy: Policy) -> None:
        service = self._open(policy, lambda ticket, tokens: None)
        while (tokens := service.session.max_tokens) < self.serving.context_tokens:
            service.move(self.widen(service.session, tokens + 1, 0))
        play_one(service)
        # Rows that are written again are cleared by a program that holds as many once more.
        jax.block_until_ready(move_rows(service.session, [RowMove(0, NO_ROW, 0)]).state)

    def _open(self, policy: Policy, on_tokens: OnTokens) -> RolloutService:
        tokens, layout = self.serving.first_slot_tokens, self.engine.layout
        return RolloutService(
            empty_session(self.engine, policy, tokens, self.pool),
            self.rollout,
            lambda: Completion(self.tokenizer.decode, self.tokenizer.ends),
            None,
            None,
            self.widen,
            num_devices=layout.num_row_shards,
            sampling=self.serving.sampling,
            max_context=self.serving.context_tokens,
            cache_rules=CacheRules(keep_replies=self.serving.keep_replies),
            on_tokens=on_tokens,
        )

    def widen(self, session: Session, tokens: int, pages: int) -> Session:
        """Returns a session whose tables and rows hold so many tokens, at least twice as many.

        Its pool stays: where requests want more `pages` some of them are preempted.
        """
        del pages
        if tokens <= session.max_tokens:
            return session
        max_tokens = min(max(tokens, 2 * session.max_tokens), self.serving.context_tokens)
        return relocate(session, self.engine, max_tokens, session.pool)


def play_one(service: RolloutService) -> None:
    """Plays a prompt of one token with a reply of one: compiles and runs the program of a round."""
    limits = Limits(max_turn_tokens=1)
    service.submit([Task(episode=0, group=0, prompt=Prompt(token_ids=(0,)), limits=limits)])
    for finished in service.drain():
        for each in finished:
            service.release(each.row)
